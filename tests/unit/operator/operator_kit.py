# SPDX-License-Identifier: GPL-3.0-or-later
"""The real ansible-operator with this checkout's operator, in played pods, on a real API server.

The program is the lab's (built from the Go module proxy once), the Python packages are those of
operator/requirements.txt in a virtual environment of the cache. No kubelet runs; the servers' pods are played.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import typing as t
from pathlib import Path

import pod_init
import pytest
import yaml
from claims_cluster import Cluster
from own_cluster import ROOT, controllers, until
from real_apiserver import MERGE, ApiServer, own_api_server

from lab import build
from lab.paths import cache_root, made_once
from lab.shell import LabError

# Seconds of a wait: a reconciliation runs playbooks, and beside the lab each has a small part of the processors.
PATIENCE = 600.0
OPERATOR = ROOT / "operator"
SPACE = NAME = "kubegpu-operator"
ACCOUNT = f"system:serviceaccount:{SPACE}:{NAME}"
RESOURCES = "/apis/kubegpu.share/v1alpha1/gpushares"
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata", "users": [ACCOUNT]}, {"level": "None"}],
}
# With any option: what somebody has who replaces the schema, and what the operator's own list is tried with.
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
CONTROLLERS = ("namespace", "garbage-collector", "serviceaccount")
# Groups of the API for which the account has rights that only OpenShift needs.
OPENSHIFT = frozenset(("security.openshift.io", "config.openshift.io", "nvidia.com", "apiextensions.k8s.io"))


def crd(spec: dict[str, t.Any] = OPEN) -> dict[str, t.Any]:
    """A definition of GPUShare with this schema of its spec."""
    schema = {"type": "object", "properties": {"spec": spec, "status": OPEN}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "gpushares.kubegpu.share"},
        "spec": {
            "group": "kubegpu.share",
            "scope": "Cluster",
            "names": {"plural": "gpushares", "singular": "gpushare", "kind": "GPUShare", "listKind": "GPUShareList"},
            "versions": [{**version, "subresources": {"status": {}}}],
        },
    }


def environment() -> Path:
    """The programs of a virtual environment with the image's Python packages, in the cache.

    Skips the test where the packages can't be had.
    """
    wanted = (OPERATOR / "requirements.txt").read_bytes()
    python = "".join(map(str, sys.version_info[:2]))
    target = cache_root() / "operator" / f"{python}-{hashlib.sha256(wanted).hexdigest()[:16]}"
    try:
        with made_once(target) as fresh:
            if fresh:
                subprocess.run([sys.executable, "-m", "venv", fresh / "venv"], check=True)
                words = ("install", "--quiet", "--no-deps", f"--requirement={OPERATOR / 'requirements.txt'}")
                subprocess.run([fresh / "venv" / "bin" / "python", "-m", "pip", *words], check=True)
                # Its programs name their interpreter by the folder, which gets another name.
                for program in (fresh / "venv" / "bin").glob("ansible*"):
                    program.write_text(program.read_text().replace(str(fresh), str(target)))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no packages of the operator: {error}")
    return target / "venv" / "bin"


class Pod:
    """A played pod of the operator.

    :param home: the operator's files; this checkout's by default.
    """

    def __init__(self, operator: Operator, name: str, home: Path = OPERATOR) -> None:
        self._reader = operator.reader
        self.folder = operator.folder / name
        self.folder.mkdir(exist_ok=True)
        self.log = self.folder / "log"
        port = int(operator.api.url.rpartition(":")[2])
        self._listener = pod_init.listen_unix(self.folder / "api.sock")
        pod_init.forward(self._listener, socket.AF_INET, ("127.0.0.1", port))
        command = [
            *(str(operator.engine), "run", f"--watches-file={home / 'watches.yaml'}"),
            *("--leader-elect", f"--leader-election-id={NAME}", f"--leader-election-namespace={SPACE}"),
            # So that a killed leader isn't waited for as long as in a cluster.
            *("--leader-elect-lease-duration=4s", "--leader-elect-renew-deadline=3s"),
            *(f"--metrics-bind-address=127.0.0.1:{pod_init.METRICS}", "--metrics-secure", "--metrics-require-rbac"),
            "--max-concurrent-reconciles=1",
        ]
        environment = {
            **{key: os.environ[key] for key in ("LANG", "LC_ALL") if key in os.environ},
            "PATH": f"{home / 'bin'}:{operator.bin}:{os.environ['PATH']}",
            "HOME": "/tmp",
            "PYTHONPATH": f"{home / 'src'}:{operator.collections}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "ANSIBLE_COLLECTIONS_PATH": str(operator.collections),
            "ANSIBLE_CONFIG": str(home / "ansible.cfg"),
            "ANSIBLE_INVENTORY": str(home / "inventory.yml"),
            "ANSIBLE_HOME": "/tmp/ansible-operator/ansible",
            "KUBECONFIG": str(operator.kubeconfig),
            "KUBEGPU_OPERATOR_HOME": str(home),
            "KUBEGPU_OPERATOR_KUBECONFIG": str(operator.kubeconfig),
            "POD_NAMESPACE": SPACE,
            "KUBEGPU_OPERATOR_PERIOD": "2",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    # It ends with the test run, even if that is killed.
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *(operator.bin / "python", pod_init.__file__, self.folder, str(port), "64", *command),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=home,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it at once with all its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        self._listener.close()

    def runs(self) -> bool:
        return self._process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """What the engine publishes of ours; nothing as long as it doesn't answer."""

        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(10)
        connection = http.client.HTTPConnection("localhost")
        try:
            plain.connect(str(self.folder / "metrics.sock"))
            # Its certificate is its own.
            connection.sock = ssl._create_unverified_context().wrap_socket(plain)
        except OSError:
            # The pod has just been started.
            plain.close()
            return {}
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {self._reader}"})
        answer = connection.getresponse()
        lines = answer.read().decode().splitlines()
        connection.close()
        assert answer.status == 200, lines
        pairs = (line.rpartition(" ") for line in lines if line.startswith("kubegpu_operator_"))
        return {name: float(value) for name, _space, value in pairs}


class Operator:
    """An API server with the operator's account and rights, and its pods.

    :param rules: the rights of the account; those of operator/rights.yml by default.
    """

    def __init__(self, api: ApiServer, engine: Path, rules: list[dict[str, t.Any]] | None = None) -> None:
        self.api, self.engine = api, engine
        self.bin = environment()
        # Not in /tmp, which pods have their own of.
        self.folder = Path(tempfile.mkdtemp(prefix="kubegpu-operator-", dir="/var/tmp"))
        self.collections = self.folder / "collections"
        (self.collections / "ansible_collections" / "kubegpu").mkdir(parents=True)
        (self.collections / "ansible_collections" / "kubegpu" / "share").symlink_to(ROOT)
        core = Path(sysconfig.get_paths()["purelib"]) / "ansible_collections" / "kubernetes"
        (self.collections / "ansible_collections" / "kubernetes").symlink_to(core)
        self.kubeconfig = self.folder / "kubeconfig"
        self.pods: list[Pod] = []
        self.cluster = Cluster(api)
        self._rights(rules)

    def _rights(self, rules: list[dict[str, t.Any]] | None) -> None:
        if rules is None:
            rules = yaml.safe_load((OPERATOR / "rights.yml").read_text())
        own = yaml.safe_load((OPERATOR / "rights_namespace.yml").read_text())
        subjects = [{"kind": "ServiceAccount", "name": NAME, "namespace": SPACE}]
        group = "rbac.authorization.k8s.io"
        metadata, api = {"name": NAME}, f"{group}/v1"
        of = {"apiGroup": group, "name": NAME}
        inside = {**metadata, "namespace": SPACE}
        self.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        self.api.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": inside},
            {"apiVersion": api, "kind": "ClusterRole", "metadata": metadata, "rules": rules},
            {
                **{"apiVersion": api, "kind": "ClusterRoleBinding", "metadata": metadata},
                **{"subjects": subjects, "roleRef": {**of, "kind": "ClusterRole"}},
            },
            {"apiVersion": api, "kind": "Role", "metadata": inside, "rules": own},
            {
                **{"apiVersion": api, "kind": "RoleBinding", "metadata": inside},
                **{"subjects": subjects, "roleRef": {**of, "kind": "Role"}},
            },
        )
        self.api.apply(*yaml.safe_load_all((OPERATOR / "config" / "admission.yml").read_text()))
        account = self.api.token(self.folder / "account", SPACE, NAME)
        config = yaml.safe_load((OPERATOR / "kubeconfig").read_text())
        config["clusters"][0]["cluster"] = {
            "server": self.api.url,
            "certificate-authority": str(account / "ca.crt"),
        }
        config["users"][0]["user"] = {"tokenFile": str(account / "token")}
        self.kubeconfig.write_text(yaml.safe_dump(config))
        self.reader = (self.api.service_account(self.folder / "reader", SPACE, "reader") / "token").read_text()

    def start(self, name: str = "first", home: Path = OPERATOR) -> Pod:
        pod = Pod(self, name, home)
        self.pods.append(pod)
        return pod

    def end(self) -> None:
        for pod in self.pods:
            pod.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ----------------------------------------------------------------- the resource

    def create(self, name: str = "cluster", **spec: t.Any) -> None:
        given = {
            "gpushareNodes": ["gpu1"],
            "gpushareAllocation": "dra",
            "preflightIgnore": ["runtime"],
            "gpushareWaitTimeout": 60,
            **spec,
        }
        body = {
            "apiVersion": "kubegpu.share/v1alpha1",
            "kind": "GPUShare",
            "metadata": {"name": name},
        }
        self.api.request(
            "POST", RESOURCES, {**body, "spec": {key: one for key, one in given.items() if one is not None}}
        )

    def change(self, name: str = "cluster", **spec: t.Any) -> None:
        self.api.request("PATCH", f"{RESOURCES}/{name}", {"spec": spec}, MERGE)

    def get(self, name: str = "cluster") -> dict[str, t.Any] | None:
        status, text = self.api.ask("GET", f"{RESOURCES}/{name}")
        return json.loads(text) if status == 200 else None

    def conditions(self, name: str = "cluster") -> dict[str, tuple[str, str]]:
        """Status and reason of each condition, as far as they are of the present generation."""
        one = self.get(name) or {"metadata": {}}
        found = (one.get("status") or {}).get("conditions") or []
        generation = one["metadata"].get("generation")
        return {
            each["type"]: (each["status"], each["reason"]) for each in found if each["observedGeneration"] == generation
        }

    def status_of(self, kind: str, name: str = "cluster") -> str:
        """A condition's status, of whichever generation."""
        found = ((self.get(name) or {}).get("status") or {}).get("conditions") or []
        return next((each["status"] for each in found if each["type"] == kind), "")

    def message(self, kind: str = "Degraded", name: str = "cluster") -> str:
        found = ((self.get(name) or {}).get("status") or {}).get("conditions") or []
        return next((each["message"] for each in found if each["type"] == kind), "")

    def until_well(self, seconds: float = PATIENCE, name: str = "cluster") -> None:
        self.until(lambda: self._well(self.conditions(name)), seconds)

    @staticmethod
    def _well(found: dict[str, tuple[str, str]]) -> bool:
        return {key: value[0] for key, value in found.items()} == {
            "Available": "True",
            "Progressing": "False",
            "Degraded": "False",
        }

    def until_degraded(self, reason: str, seconds: float = PATIENCE, name: str = "cluster") -> None:
        self.until(lambda: self.conditions(name).get("Degraded") == ("True", reason), seconds)

    def until(self, check: t.Callable[[], t.Any], seconds: float = PATIENCE) -> t.Any:
        """Return the first true value of a check; where there is none, the pods' logs are printed."""
        try:
            return until(check, seconds, 0.2)
        except AssertionError:
            print("conditions:", json.dumps((self.get() or {}).get("status"), indent=1))
            for pod in self.pods:
                print(f"--- {pod.folder.name}\n{pod.text()[-9000:]}")
            raise

    def left(self) -> dict[str, set[str]]:
        """What is deployed, by its kind; without what the operator itself was installed with."""
        named = {
            kind: {name for name in names if not name.startswith(NAME)} for kind, names in self.cluster.named().items()
        }
        return {kind: names for kind, names in named.items() if names}

    # ----------------------------------------------------------------- the audit log

    def audit(self) -> list[dict[str, t.Any]]:
        """The requests of the operator's account, in their order."""
        lines = (self.api.folder / "audit.log").read_text().splitlines()
        events = []
        for line in lines:
            # The last one may be incomplete.
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events

    def as_account(self, *words: str) -> None:
        """Have kubectl ask for something with the account's token."""
        command = [self.api.programs["kubectl"], f"--kubeconfig={self.kubeconfig}", *words]
        subprocess.run(command, check=False, capture_output=True, env={"PATH": os.environ["PATH"], "HOME": "/tmp"})

    def writes(self) -> int:
        return sum(one["verb"] in ("create", "patch", "update", "delete") for one in self.audit() if not _lease(one))

    def refusals(self) -> list[str]:
        """What the account asked for and may not do. An admission policy's refusal, which a run tries, is none."""
        decision = "authorization.k8s.io/decision"
        refused = [one for one in self.audit() if one.get("annotations", {}).get(decision) == "forbid"]
        return sorted({_words(one) for one in refused})


def _lease(one: dict[str, t.Any]) -> bool:
    return (one.get("objectRef") or {}).get("resource") == "leases"


def _words(one: dict[str, t.Any]) -> str:
    at = one.get("objectRef") or {}
    resource = "/".join(filter(None, (at.get("resource", one["requestURI"]), at.get("subresource"))))
    return f"{one['verb']} {at.get('apiGroup', '')} {resource} {at.get('namespace', '')}/{at.get('name', '')}"


@contextlib.contextmanager
def running(rules: list[dict[str, t.Any]] | None = None, more: t.Sequence[str] = ()) -> t.Iterator[Operator]:
    """An API server with the operator's account; skips the test where a part can't be had.

    :param rules: the account's rights; those of operator/rights.yml by default.
    :param more: controllers that run beside those that every test needs.
    """
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("a played pod needs root, unshare and setpriv")
    try:
        engine = build.built(build.OPERATOR) / "ansible-operator"
    except (LabError, OSError) as error:
        pytest.skip(f"no ansible-operator: {error}")
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "audit.yml"
        policy.write_text(yaml.safe_dump(AUDIT))
        # Its folder is known when it has started.
        flags = (f"--audit-policy-file={policy}", "--audit-log-path=audit.log", "--audit-log-mode=blocking")
        with own_api_server(*flags) as api, controllers(api, *CONTROLLERS, *more):
            api.apply(crd())
            until(lambda: api.ask("GET", RESOURCES)[0] == 200, 30)
            operator = Operator(api, engine, rules)
            try:
                with operator.cluster.kubelets():
                    yield operator
            finally:
                operator.end()


def rules_used(rules: list[dict[str, t.Any]], events: t.Iterable[dict[str, t.Any]]) -> list[bool]:
    """By rule, whether a request needed it; a server-side apply that makes an object needs create, too."""

    def needed() -> t.Iterator[tuple[str, str, str, str]]:
        for one in events:
            at = one.get("objectRef") or {}
            resource = "/".join(filter(None, (at.get("resource", ""), at.get("subresource"))))
            for verb in ("patch", "create") if one["verb"] == "patch" else (one["verb"],):
                yield at.get("apiGroup", ""), resource, verb, at.get("name", "")

    asked = set(needed())
    return [
        any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for group, resource, verb, name in asked
        )
        for rule in rules
    ]
