# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects of role gpushare on a real API server: schemas, permissions and admission policies."""

from __future__ import annotations

import pytest
from gpushare_objects import rendered
from own_cluster import Guarded, until
from real_apiserver import MERGE, Refused, own_api_server

NAMESPACE = "gpushare-system"
STRATEGIC = "application/strategic-merge-patch+json"
MEMORY = "aliyun.com/gpu-mem"


@pytest.fixture(scope="module")
def server():
    with own_api_server() as started:
        started.apply(*rendered("namespace", "extender", "device_plugin"))
        yield started


# --------------------------------------------------------------------------- objects and rights


@pytest.mark.parametrize(
    "variables",
    [
        {"gpushare_memory_limit": "off", "gpushare_device_injection": "envvar"},
        {"gpushare_memory_limit": "required", "gpushare_device_injection": "cdi", "gpushare_cdi_folders": ["/etc/cdi"]},
        {"gpushare_preemption": False, "gpushare_runtime_class": "nvidia", "gpushare_image_pull_secrets": ["one"]},
        {"gpushare_extender_image": "example.org/e:1", "gpushare_device_plugin_image": "example.org/p:1"},
    ],
    ids=",".join,
)
def test_the_api_server_accepts_every_variant_strictly(server, variables):
    names = ["extender", "device_plugin"]
    if "gpushare_extender_image" in variables:
        names = [f"{name}_upstream" for name in names]
    server.apply(*rendered(*names, **variables), dry_run=True)


def listed(server, account, namespace):
    """Return the permissions of an account beyond those of every account, as ``verb resource[.group] [name]``."""
    found = {}
    for who in (f"system:serviceaccount:{NAMESPACE}:{account}", f"system:serviceaccount:{NAMESPACE}:default"):
        done = server.kubectl("auth", "can-i", "--list", f"--namespace={namespace}", f"--as={who}", "--no-headers")
        assert done.returncode == 0, done.stderr
        found[who] = set()
        for line in done.stdout.splitlines():
            resource, rest = line.split(maxsplit=1)
            *_urls, names, verbs = (part.strip(" ]").split() for part in rest.split("["))
            if not resource.startswith("["):
                found[who] |= {f"{verb} {resource} {name}".rstrip() for verb in verbs for name in names or [""]}
    mine, everybodys = tuple(found.values())
    return mine - everybodys


READ = {f"{verb} {resource}" for verb in ("get", "list", "watch") for resource in ("nodes", "pods")}
WRITE = {"create events", "patch pods/status", "write annotations.kubegpu.share"}
POLICY = "get validatingadmissionpolicybindings.admissionregistration.k8s.io gpushare-annotations"
EXTENDER = READ | WRITE | {"create pods/binding", "create pods/eviction", POLICY}
LEASES = "leases.coordination.k8s.io"
LEDGER = {
    f"{verb} {LEASES} {name}" for verb in ("get", "update") for name in ("gpushare-ledger", "gpushare-ledger-probe")
}
LEDGER |= {f"create {LEASES}"}
PLUGIN = READ | WRITE | {"patch nodes/status"}


@pytest.mark.parametrize(
    ("account", "namespace", "rights"),
    [
        ("gpushare-extender", NAMESPACE, EXTENDER | LEDGER),
        ("gpushare-extender", "kube-node-lease", EXTENDER),
        ("gpushare-device-plugin", NAMESPACE, PLUGIN),
        ("gpushare-device-plugin", "default", PLUGIN),
    ],
)
def test_kubectl_lists_exactly_these_permissions(server, account, namespace, rights):
    assert listed(server, account, namespace) == rights


# --------------------------------------------------------------------------- policies


def container(*env, name="c", **more):
    named = [{"name": one, "value": "x"} if isinstance(one, str) else one for one in env]
    return {"name": name, "image": "i", **({"env": named} if named else {}), **more}


def pod(*containers, annotations=None, **spec):
    metadata = {"name": "p", **({"annotations": annotations} if annotations else {})}
    return {"metadata": metadata, "spec": {"containers": list(containers) or [container()], **spec}}


ONE = {"limits": {MEMORY: "1"}}
SECRET = {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
DEVICES, LEGACY = "NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION"


def devices(value):
    return {"name": DEVICES, "value": value}


def mounting(path, **volume):
    mount = {"name": "v", "mountPath": path}
    return pod(container(volumeMounts=[mount]), volumes=[{"name": "v", **(volume or {"emptyDir": {}})}])


ADMITTED = {
    "nothing": pod(),
    "a share": pod(container(resources=ONE)),
    "its own variables": pod(container("CUDA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE")),
    "no card at all": pod(container(devices("void"))),
    "none": pod(container(devices("none"))),
    "an empty value": pod(container({"name": DEVICES})),
    "CUDA's version with no card at all": pod(container(LEGACY, devices("void"))),
    "CUDA's version with a share": pod(container(LEGACY, resources=ONE)),
    "CUDA's version without a value": pod(container({"name": LEGACY})),
    "another mount": mounting("/data"),
    "a mount of a similar name": mounting("/var/run/nvidia-container-devices-of-mine/all"),
    "a folder of that name elsewhere": mounting("/data/nvidia-container-devices/all"),
    "another annotation": pod(annotations={"example.org/cdi.k8s.io": "x"}),
    "a whole config map": pod(container(envFrom=[{"configMapRef": {"name": "m"}}])),
}
OTHER_GPUS = f"container c sets {DEVICES}, which would let"
EVERY_CARD = "container c sets CUDA_VERSION without NVIDIA_VISIBLE_DEVICES"
# Pods, and the message that rejects each; empty if it is admitted.
CASES = {
    **{case: (one, "") for case, one in ADMITTED.items()},
    "all cards": (pod(container(DEVICES)), OTHER_GPUS),
    "all cards with a share": (pod(container(DEVICES, resources=ONE)), OTHER_GPUS),
    "CUDA's version": (pod(container(LEGACY)), EVERY_CARD),
    "CUDA's version from a secret": (pod(container({"name": LEGACY, **SECRET})), EVERY_CARD),
    "CUDA's version, and a share in another container": (
        pod(container(resources=ONE), container(LEGACY, name="d")),
        "container d sets CUDA_VERSION without",
    ),
    "CUDA's version with a share of nothing": (pod(container(LEGACY, resources={"limits": {MEMORY: "0"}})), EVERY_CARD),
    # kubelet ignores a resource that its node doesn't announce, for a pod that names the node.
    "CUDA's version with a share of a node that is named": (
        pod(container(LEGACY, resources=ONE), nodeName="gpu1"),
        "to void there too, or leave out nodeName where it asks for",
    ),
    "CUDA's version and a requirement": (pod(container("NVIDIA_REQUIRE_CUDA", LEGACY)), EVERY_CARD),
    "CUDA's version in an init container": (
        pod(initContainers=[container(LEGACY, name="b", restartPolicy="Always")]),
        "container b sets CUDA_VERSION without",
    ),
    "from a secret": (pod(container({"name": DEVICES, **SECRET})), OTHER_GPUS),
    "more memory": (
        pod(container("A", "NVIDIA_GPU_MEMORY_LIMIT", devices("void"), resources=ONE)),
        "container c sets NVIDIA_GPU_MEMORY_LIMIT, ",
    ),
    "memory set aside": (pod(container("NVIDIA_GPU_MEMORY_REQUEST")), "NVIDIA_GPU_MEMORY_REQUEST"),
    "MIG's configuration": (pod(container("NVIDIA_MIG_CONFIG_DEVICES")), "NVIDIA_MIG_CONFIG_DEVICES"),
    "the second one": (
        pod(container(), container(DEVICES, name="d"), container("NVIDIA_GPU_MEMORY_LIMIT", name="e")),
        f"container d sets {DEVICES}; container e sets NVIDIA_GPU_MEMORY_LIMIT",
    ),
    "an init container": (pod(initContainers=[container(DEVICES, name="b")]), f"container b sets {DEVICES}"),
    "a mounted name": (
        mounting("/var/run/nvidia-container-devices/all", hostPath={"path": "/dev/null"}),
        "container c mounts something under /var/run/nvidia-container-devices",
    ),
    **{
        f"the same as {path}": (mounting(path), "container c mounts something")
        for path in (
            "/run/nvidia-container-devices/all",
            "/var//run/nvidia-container-devices/all",
            "/var/./run/nvidia-container-devices/all/",
            "/srv/../var/run/nvidia-container-devices/all",
            "/var/run/nvidia-container-devicesall",
            "/var/run/nvidia-container-devices",
            "var/run/nvidia-container-devices/all",
            "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/all",
        )
    },
    "a CDI annotation": (
        pod(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=all"}),
        "annotation cdi.k8s.io/x names devices",
    ),
    "that of NVIDIA's plugin": (
        pod(annotations={"nvidia.cdi.k8s.io/container.c": "nvidia.com/gpu=0"}),
        "annotation nvidia.cdi.k8s.io/container.c names devices",
    ),
}


ALL = CASES["all cards"][0]


@pytest.fixture(scope="module")
def guarded(server):
    """Return a namespace in which the policies are in effect."""
    server.apply(*rendered("admission", gpushare_admission="deny"))
    made = Guarded(server, server.namespace())
    made.until(403, ALL)
    return made


@pytest.mark.parametrize("case", CASES)
def test_pods_that_would_exceed_their_share(guarded, case):
    guarded.expect(*CASES[case])


def test_a_controllers_event_has_the_reason(server, guarded):
    flags = (f"--namespace={guarded.namespace}", "--image=i", f"--env={DEVICES}=all", "--dry-run=server")
    done = server.kubectl("run", "p", *flags)
    assert done.returncode and "container p sets NVIDIA_VISIBLE_DEVICES" in done.stderr


def test_exempt_namespaces(server, guarded):
    for name in (NAMESPACE, "kube-system", server.namespace(labels={"kubegpu.share/admission": "exempt"})):
        Guarded(server, name).expect(ALL)
    other = server.namespace(labels={"kubegpu.share/admission": "other"})
    Guarded(server, other).expect(ALL, OTHER_GPUS)


def test_existing_pods_keep_running_without_new_containers(server, guarded):
    """A pod from before the policy can still be labelled and evicted."""
    name = server.namespace(labels={"kubegpu.share/admission": "exempt"})
    path = f"/api/v1/namespaces/{name}"
    old = {**ALL, "metadata": {"name": "old", "annotations": {"cdi.k8s.io/x": "a"}}}
    server.request("POST", f"{path}/pods", old)
    server.request("PATCH", path, {"metadata": {"labels": {"kubegpu.share/admission": None}}}, MERGE)
    one = f"{path}/pods/old"
    Guarded(server, name).until(403, ALL)
    server.request("PATCH", one, {"metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}}}, MERGE)
    server.request("PATCH", f"{one}/status", {"status": {"message": "fine"}}, MERGE)
    for annotation in ("cdi.k8s.io/x", "cdi.k8s.io/y"):
        with pytest.raises(Refused, match=f"annotation {annotation} names devices"):
            server.request("PATCH", one, {"metadata": {"annotations": {annotation: "b"}}}, MERGE)
    server.request("PATCH", one, {"metadata": {"annotations": {"cdi.k8s.io/x": None}}}, MERGE)
    fine = {"spec": {"ephemeralContainers": [container(name="e")]}}
    server.request("PATCH", f"{one}/ephemeralcontainers", fine, STRATEGIC)
    taking = {"spec": {"ephemeralContainers": [container("NVIDIA_VISIBLE_DEVICES", name="f")]}}
    with pytest.raises(Refused, match="container f sets NVIDIA_VISIBLE_DEVICES"):
        server.request("PATCH", f"{one}/ephemeralcontainers", taking, STRATEGIC)
    legacy = {"spec": {"ephemeralContainers": [container(LEGACY, name="g")]}}
    with pytest.raises(Refused, match="container g sets CUDA_VERSION without"):
        server.request("PATCH", f"{one}/ephemeralcontainers", legacy, STRATEGIC)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "old"}}
    server.request("POST", f"{one}/eviction", eviction)


@pytest.mark.parametrize(
    ("prefix", "refused"),
    [
        (None, True),
        ("", True),
        ("N", True),
        ("NVIDIA_", True),
        ("CUDA_", True),
        ("MY_", False),
        ("NVIDIA_VISIBLE_DEVICES_", False),
    ],
)
def test_variables_from_config_maps(server, guarded, prefix, refused):
    source = {"secretRef": {"name": "s"}, **({} if prefix is None else {"prefix": prefix})}
    wanted = pod(container(envFrom=[{"configMapRef": {"name": "m"}, "prefix": "MINE_"}, source], name="reads"))
    anything = pod(container(envFrom=[{"secretRef": {"name": "s"}}]))
    server.apply(*rendered("admission", gpushare_admission="deny", gpushare_admission_env_from="deny"))
    try:
        guarded.until(403, anything)
        guarded.expect(wanted, "container reads takes variables of any name from elsewhere" if refused else "")
    finally:
        server.apply(*rendered("admission", gpushare_admission="deny"))
        guarded.until(201, anything)


@pytest.mark.parametrize(
    ("context", "privileged"),
    [
        ({"privileged": True}, True),
        ({"capabilities": {"add": ["SYS_ADMIN"]}}, True),
        ({"capabilities": {"add": ["ALL"]}}, True),
        ({"capabilities": {"add": ["NET_ADMIN"]}}, False),
        ({"privileged": False, "capabilities": {"drop": ["ALL"]}}, False),
    ],
    ids=str,
)
def test_privileged_pods_get_a_warning(guarded, context, privileged):
    message = "container c may do everything on its node"
    until(lambda: message in guarded.warnings(pod(container(resources=ONE, securityContext={"privileged": True}))))
    assert (message in guarded.warnings(pod(container(resources=ONE, securityContext=context)))) == privileged
    assert not guarded.warnings(pod(container(securityContext=context))), "it requests no share"


def test_a_warning_instead_of_a_rejection(server, guarded):
    server.apply(*rendered("admission"))
    try:
        guarded.until(201, ALL)
        assert f"container c sets {DEVICES}" in guarded.warnings(ALL)
        assert EVERY_CARD in guarded.warnings(pod(container(LEGACY)))
    finally:
        server.apply(*rendered("admission", gpushare_admission="deny"))
        guarded.until(403, ALL)


def test_the_api_servers_type_check_accepts_the_expressions(server, guarded):
    """The API server refuses a policy with an expression that it can't compile."""
    for policy in [one for one in rendered("admission") if one["kind"] == "ValidatingAdmissionPolicy"]:
        broken = {**policy, "spec": {**policy["spec"], "variables": [{"name": "x", "expression": "nothing.here"}]}}
        with pytest.raises(Refused, match="undeclared reference"):
            server.apply(broken, dry_run=True)
