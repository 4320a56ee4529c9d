# SPDX-License-Identifier: GPL-3.0-or-later
"""What the admission policies cost: CPU time of a real kube-apiserver for the largest objects that it accepts.

For each list and map of a pod, a node or a template that a policy looks through, an object with as many entries as the
policy looks through, and one with as many as the API accepts, is sent in a dry run, with no policy and with each of
them. A policy passes if no request takes more than twice the CPU time that it takes without a policy (beside a few
milliseconds, below which nothing can be told).

    python bench/admission.py [--policy NAME ...] [--object NAME ...] [--turns N] [--bounds] [--roles FOLDER]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
from processes import ROOT, NoResult, verdict

_AnsibleCollectionFinder(paths=[str(ROOT / ".collections")])._install()
sys.path.append(str(ROOT / "tests" / "unit" / "cluster"))

import gpushare_objects  # noqa: E402
import role_templates  # noqa: E402
from real_apiserver import MERGE, ApiServer, Missing  # noqa: E402

MEMORY = "aliyun.com/gpu-mem"
TIMES, NOISE_MS = 2.0, 6.0
# The largest body that the API server reads in a dry run, and the bytes of all annotations.
BODY, ANNOTATIONS = 3_000_000, 262_000
SLOW_MS = 600.0
SYSTEM = "gpushare-system"
ACCOUNTS = {
    "gpushare-device-plugin": f"system:serviceaccount:{SYSTEM}:gpushare-device-plugin",
    "gpushare-extender": f"system:serviceaccount:{SYSTEM}:gpushare-extender",
    "gpushare-scheduler-account": "system:serviceaccount:gpushare-scheduler:gpushare-scheduler",
}
USER = "tenant"
# Of a policy that looks at nothing.
NOTHING = "a policy of nothing"
Body = dict[str, Any]


# --------------------------------------------------------------------------- objects


@dataclasses.dataclass(frozen=True)
class Object:
    """A kind of large object.

    :param make: returns it with a number of entries.
    :param looked: the number of entries that a policy looks through at most.
    :param size: bytes of an entry, by which the largest number is found.
    :param path: of the request, without its query.
    """

    name: str
    make: Callable[[int], Body]
    looked: int
    size: float
    total: int = BODY
    path: str = "/api/v1/namespaces/default/pods"


def pod(containers: Sequence[Body] = (), metadata: Body | None = None, **spec: Any) -> Body:
    """Return a pod, by default with one container that asks for a share."""
    return {
        "metadata": {"name": "p", **(metadata or {})},
        "spec": {"containers": list(containers) or [container()], **spec},
    }


def container(name: str = "c", units: int = 1, **more: Any) -> Body:
    resources = {"resources": {"limits": {MEMORY: str(units)}}} if units else {}
    return {"name": name, "image": "i", **resources, **more}


def _env(number: int) -> list[Body]:
    # The last one is what is looked for.
    return [{"name": f"a{n}"} for n in range(number - 1)] + [{"name": "CUDA_VERSION", "value": "1"}]


def _keys(number: int) -> dict[str, str]:
    return {f"{n:x}": "" for n in range(number)}


def _annotated(annotations: dict[str, str]) -> Body:
    return pod(metadata={"annotations": annotations})


def _containers(number: int, units: int, prefix: str = "c", **more: Any) -> list[Body]:
    return [container(f"{prefix}{n}", units, **more) for n in range(number)]


def _turned(number: int) -> Body:
    own = [container(f"c{n}", int(n < 32)) for n in range(number // 2)]
    return pod(own, initContainers=_containers(number // 2, 0, "i"))


def _mounting(*paths: str) -> Body:
    mounts = [{"name": "v", "mountPath": path} for path in paths]
    return pod([container(volumeMounts=mounts)], volumes=[{"name": "v", "emptyDir": {}}])


def _capable(number: int) -> Body:
    return {"capabilities": {"add": ["NET_ADMIN"] * number}}


def _amounts(number: int) -> Body:
    return {MEMORY: "1", **{f"example.org/{n:x}": "1" for n in range(number)}}


OTHER = container(units=0)
VOID = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
# As long as a path is read, and with the name that is looked for at its end.
SLASHES = ("/./" * 80 + "run/nvidia-container-devices-")[-250:]


def _affinity(terms: int, each: int) -> Body:
    expression = {"key": "kubegpu.share/backend", "operator": "NotIn", "values": ["other"]}
    term = {"matchExpressions": [expression] * each}
    required = {"nodeSelectorTerms": [term] * terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _claims(number: int) -> Body:
    names = [f"k{n}" for n in range(number)]
    own = container(resources={"limits": {MEMORY: "1"}, "claims": [{"name": name} for name in names]})
    return pod([own], resourceClaims=[{"name": name, "resourceClaimName": "x"} for name in names])


def _template(number: int) -> Body:
    requests = [{"name": f"r{n}", "exactly": {"deviceClassName": "gpu.kubegpu.share"}} for n in range(number)]
    labels = {"app.kubernetes.io/managed-by": "kubegpu.share"}
    return {"metadata": {"name": "gpu-mem-1", "labels": labels}, "spec": {"spec": {"devices": {"requests": requests}}}}


TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
OBJECTS = (
    Object("annotations", lambda n: _annotated(_keys(n)), 500, 4.5, ANNOTATIONS),
    Object("labels", lambda n: pod(metadata={"labels": _keys(n)}), 500, 10),
    Object("both", lambda n: pod(metadata={"annotations": _keys(n), "labels": _keys(n)}), 500, 20, ANNOTATIONS),
    Object("annotations of no share", lambda n: pod([OTHER], {"annotations": _keys(n)}), 500, 4.5, ANNOTATIONS),
    Object("containers", lambda n: pod(_containers(n, 0)), 250, 40),
    Object("containers, one asks", lambda n: pod([*_containers(n - 1, 0), container("last")]), 250, 40),
    Object("containers of a share", lambda n: pod(_containers(n, 1)), 32, 90),
    Object("containers of a turned pod", _turned, 64, 90),
    Object("init containers", lambda n: pod(initContainers=_containers(n, 0, "i")), 249, 40),
    Object("env", lambda n: pod([container(env=_env(n))]), 500, 20),
    Object("env of containers", lambda n: pod(_containers(n, 0, env=_env(500))), 4, 8_000),
    Object("env of a turned pod", lambda n: pod(_containers(n, 1, env=_env(500))), 4, 8_000),
    Object("env that is accepted", lambda n: pod(_containers(n, 0, env=[VOID] * 500)), 4, 30_000),
    Object("envFrom", lambda n: pod([container(envFrom=[{"secretRef": {"name": "s"}}] * n)]), 500, 40),
    Object("mounts", lambda n: _mounting(*(f"/m{k}" for k in range(n))), 500, 40),
    Object("mounts with slashes", lambda n: _mounting(*(f"{SLASHES}{k}" for k in range(n))), 500, 300),
    Object("a path of slashes", lambda n: _mounting("/" * n), 256, 1),
    Object("a path with the name", lambda n: _mounting("/" * n + "nvidia-container-devices"), 230, 1),
    Object("capabilities", lambda n: pod([container(securityContext=_capable(n))]), 500, 14),
    Object("claims", _claims, 64, 80),
    Object("image pull secrets", lambda n: pod(imagePullSecrets=[{"name": f"{k}"} for k in range(n)]), 500, 20),
    Object("tolerations", lambda n: pod(tolerations=[{"key": f"k{k}"} for k in range(n)]), 99, 40),
    Object("node selector", lambda n: pod(nodeSelector=_keys(n)), 500, 12),
    Object("limits", lambda n: pod([container(resources={"limits": _amounts(n)})]), 500, 40),
    Object("terms", lambda n: pod(affinity=_affinity(n, 1)), 250, 100),
    Object("expressions", lambda n: pod(affinity=_affinity(max(1, n // 250), 250)), 250, 90),
    Object("models", lambda n: _annotated({"kubegpu.share/models": "," * n}), 500, 1, ANNOTATIONS),
    Object("a long model", lambda n: _annotated({"kubegpu.share/models": "a" * n}), 128, 1, ANNOTATIONS),
    Object("card count", lambda n: _annotated({"kubegpu.share/card-count": "0" * n + "1"}), 31, 1, ANNOTATIONS),
    Object("limit ranger", lambda n: _annotated({"kubernetes.io/limit-ranger": MEMORY * n}), 500, 18, ANNOTATIONS),
    Object("requests of a template", _template, 32, 80, path=TEMPLATES),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Patch:
    """A patch of a large object that is there, in a dry run.

    :param kind: ``pods`` or ``nodes``.
    :param field: of its metadata or status which is large.
    """

    name: str
    kind: str
    body: Body
    looked: int
    most: int
    field: str = "annotations"
    sub: str = ""


ONE = {"metadata": {"annotations": {"one": "1"}}}
LABEL = {"metadata": {"labels": {"one": "1"}}}
COUNTED = {"status": {"capacity": {"aliyun.com/gpu-count": "1"}}}
PATCHES = (
    Patch("annotate a pod", "pods", ONE, 499, 30_000),
    Patch("annotate a pod by its status", "pods", ONE, 499, 30_000, sub="/status"),
    Patch("label a pod with annotations", "pods", LABEL, 499, 30_000),
    Patch("label a pod with labels", "pods", LABEL, 499, 60_000, "labels"),
    Patch("annotate a node", "nodes", ONE, 499, 30_000),
    Patch("annotate a node by its status", "nodes", ONE, 499, 30_000, sub="/status"),
    Patch("label a node with labels", "nodes", LABEL, 499, 60_000, "labels"),
    Patch("a node's capacity", "nodes", COUNTED, 499, 15_000, "capacity", "/status"),
    Patch("debug a pod", "pods", {"spec": {"ephemeralContainers": [{"name": "last", "image": "i"}]}}, 249, 8_000,
          "ephemeral", "/ephemeralcontainers"),
)  # fmt: skip


# --------------------------------------------------------------------------- policies


def accepting() -> list[Body]:
    """Return a policy that looks at nothing: what every policy costs, as the API server converts the object for it."""
    api, name = "admissionregistration.k8s.io/v1", {"name": "nothing"}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"]}
    rules = [{**pods, "resources": ["pods", "pods/status", "pods/ephemeralcontainers", "nodes", "nodes/status"]}]
    spec = {"matchConstraints": {"resourceRules": rules}, "validations": [{"expression": "true"}]}
    binding = {"policyName": "nothing", "validationActions": ["Deny"]}
    return [
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": name, "spec": spec},
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding", "metadata": name, "spec": binding},
    ]


def policies() -> dict[str, list[Body]]:
    """Return the policies of all roles, each with its binding and what it needs, by name."""
    dedicated = {
        "scheduler_name": "gpushare-scheduler",
        "scheduler_dedicated_admission": "deny",
        "scheduler_dedicated_namespace": "gpushare-scheduler",
        "__scheduler_extender_namespace": SYSTEM,
        "__scheduler_dedicated": {"policy_api": "admissionregistration.k8s.io/v1"},
    }
    hami = {"__hami_resource": "nvidia.com/gpu", "__hami_scheduler_name": "hami-scheduler"}
    shares = {"gpushare_admission": "deny", "gpushare_admission_env_from": "deny"}
    found: dict[str, list[Body]] = {NOTHING: accepting()}
    for one in (
        *gpushare_objects.rendered("rights", __gpushare_cluster={"version": "v1.36.0"}),
        *gpushare_objects.rendered("admission", **shares),
        *gpushare_objects.rendered("dra_admission", "dra", gpushare_allocation="dra"),
        *role_templates.objects("scheduler", "dedicated/policy", "dedicated/account", **dedicated),
        *role_templates.objects("hami", "policy", **hami),
    ):
        if "AdmissionPolicy" in one["kind"]:
            kind = "Mutating" if one["kind"].startswith("Mutating") else ""
            found.setdefault(f"{kind} {one['metadata']['name']}".strip(), []).append(one)
    return found


# --------------------------------------------------------------------------- measurement


def cpu(pid: int) -> float:
    """Return the milliseconds of CPU that the threads of a process have used."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e6


def pid_of(folder: Path) -> int:
    """Return the process of kube-apiserver whose data is in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[0].endswith("kube-apiserver") and any(str(folder) in word for word in words):
            return int(process.name)
    raise NoResult("no process of kube-apiserver")


class Requests:
    """Sends each request several times, and takes the least of its costs."""

    def __init__(self, server: ApiServer, turns: int) -> None:
        self.server, self.turns = server, turns
        self.pid = pid_of(server.folder)

    def cost(self, method: str, path: str, body: Body, content: str, user: str, more: int = 1) -> tuple[float, int]:
        """Return the milliseconds of CPU of the cheapest try, and the HTTP status.

        :param more: times as many tries as usual.
        """
        best, status = float("inf"), 0
        for _turn in range(self.turns * more):
            began = cpu(self.pid)
            status = self.status(method, path, body, content, user)
            best = min(best, cpu(self.pid) - began)
            # A request that takes long needs no further try.
            if best > 1000:
                break
        return best, status

    def status(self, method: str, path: str, body: Body, content: str, user: str = "") -> int:
        """Return the HTTP status; 504 where no answer comes."""
        try:
            return self.server.ask(method, path, body, content, user)[0]
        except OSError:
            return 504


def largest(requests: Requests, one: Object) -> int:
    """Return how many entries the API accepts, found from above; of those that take it half a second or so."""
    number = int(one.total / one.size)
    while number > one.looked:
        body = one.make(number)
        if len(json.dumps(body)) < BODY:
            began = cpu(requests.pid)
            status = requests.status("POST", f"{one.path}?dryRun=All", body, "application/json")
            if status < 400 and cpu(requests.pid) - began < SLOW_MS:
                return number
        number //= 2
    return one.looked


def prepare(server: ApiServer) -> None:
    """Give the users their rights, and create the large pods and nodes."""
    users = [USER, *ACCOUNTS.values(), f"system:serviceaccount:{SYSTEM}:gpushare-dra-templates"]
    server.request(
        "POST",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        {
            "metadata": {"name": "everything"},
            "rules": [
                {
                    "apiGroups": ["", "resource.k8s.io"],
                    "resources": ["*"],
                    "verbs": ["get", "create", "update", "patch"],
                }
            ],
        },
    )
    subjects = [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"} for user in users]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "everything"}
    bound = {"metadata": {"name": "everything"}, "roleRef": role, "subjects": subjects}
    server.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", bound)
    for one in PATCHES:
        for number in (one.looked, one.most):
            name = f"{one.field}-{number}"
            root = "/api/v1/nodes" if one.kind == "nodes" else "/api/v1/namespaces/default/pods"
            if server.ask("GET", f"{root}/{name}")[0] == 200:
                continue
            made: Body = pod([OTHER]) if one.kind == "pods" else {"metadata": {}}
            made["metadata"]["name"] = name
            if one.field in ("annotations", "labels"):
                made["metadata"][one.field] = _keys(number)
            server.request("POST", root, made)
            if one.field == "capacity":
                status = {"capacity": _amounts(number - 1), "allocatable": _amounts(number - 1)}
                server.request("PATCH", f"{root}/{name}/status", {"status": status}, MERGE)
            if one.field == "ephemeral":
                many = [{"name": f"e{k}", "image": "i"} for k in range(number)]
                path = f"{root}/{name}/ephemeralcontainers"
                server.request("PATCH", path, {"spec": {"ephemeralContainers": many}}, STRATEGIC)


STRATEGIC = "application/strategic-merge-patch+json"


def cases(requests: Requests, chosen: Sequence[str], bounds: bool) -> Iterator[tuple[str, str, str, Body, str]]:
    """Yield each request: what it is, method, path, body and content type."""
    for one in OBJECTS:
        if not chosen or one.name in chosen:
            began = time.monotonic()
            found = one.looked if bounds else largest(requests, one)
            print(
                f"{one.name}: {found} entries are accepted ({time.monotonic() - began:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
            for number in dict.fromkeys((one.looked, found)):
                yield f"{one.name}: {number}", "POST", f"{one.path}?dryRun=All", one.make(number), "application/json"
    for patch in PATCHES:
        if not chosen or patch.name in chosen:
            root = "/api/v1/nodes" if patch.kind == "nodes" else "/api/v1/namespaces/default/pods"
            for number in (patch.looked, *(() if bounds else (patch.most,))):
                path = f"{root}/{patch.field}-{number}{patch.sub}?dryRun=All"
                yield f"{patch.name}: {number}", "PATCH", path, patch.body, STRATEGIC


def user_of(policy: str) -> str:
    return ACCOUNTS.get(policy, f"system:serviceaccount:{SYSTEM}:{policy}" if policy.endswith("-templates") else USER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", default=[], help="only this policy (all: together)")
    parser.add_argument("--object", action="append", default=[], help="only this object or patch")
    parser.add_argument("--turns", type=int, default=5, help="tries of each request")
    parser.add_argument("--bounds", action="store_true", help="only what a policy looks through, nothing larger")
    parser.add_argument("--roles", type=Path, help="take the policies from these roles, as of another version")
    given = parser.parse_args()
    if given.roles:
        role_templates.ROLES = given.roles.resolve()
    try:
        server = ApiServer()
    except Missing as missing:
        raise NoResult(str(missing)) from None
    goals: list[tuple[str, bool]] = []
    with server:
        prepare(server)
        requests = Requests(server, given.turns)
        wanted = list(cases(requests, given.object, given.bounds))
        without = {
            what: requests.cost(method, path, body, content, USER, 2) for what, method, path, body, content in wanted
        }
        for name, objects in policies().items():
            if given.policy and name not in given.policy:
                continue
            server.apply(*objects)
            # A new policy is in effect within a second.
            time.sleep(2)
            rows = []
            for what, method, path, body, content in wanted:
                before, _status = without[what]
                cost, status = requests.cost(method, path, body, content, user_of(name))
                if cost > TIMES * max(before, NOISE_MS):
                    # Perhaps others were busy.
                    time.sleep(1)
                    cost = min(cost, requests.cost(method, path, body, content, user_of(name), 4)[0])
                rows.append((cost / max(before, NOISE_MS), what, before, cost, status))
            for ratio, what, before, cost, status in sorted(rows, reverse=True)[:6]:
                print(f"{name:28} {what:40} {before:8.1f} ms {cost:8.1f} ms  {ratio:5.1f} times  {status}", flush=True)
            worst = max(rows)
            if name != NOTHING:
                goals.append((f"{name}: at most {TIMES} times, {worst[0]:.1f} for {worst[1]}", worst[0] <= TIMES))
            for one in reversed(objects):
                server.request("DELETE", server._path(one))
            time.sleep(1)
    return verdict(goals)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoResult as error:
        sys.exit(f"no result: {error}")
