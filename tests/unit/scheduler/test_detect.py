# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of a cluster's kind of scheduler, and refusals where a scheduler would be left out."""

from __future__ import annotations

import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import node_of
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import (
    SCHEDULER_OPTIONS,
    Node,
    State,
    collect,
    read_state,
    select_mode,
)
from fake_kube import FakeKube

CONTROL = {"node-role.kubernetes.io/control-plane": ""}
OLD_CONTROL = {"node-role.kubernetes.io/master": ""}
IMAGE = "registry.k8s.io/kube-scheduler:v1.36.3"


def node(name, kubelet="v1.36.3", labels=None, os="Debian GNU/Linux 12 (bookworm)"):
    return Node(name, labels=CONTROL if labels is None else labels, kubelet_version=kubelet, os=os)


WORKER = node("gpu1", labels={})
KUBEADM = State([node("cp1"), WORKER], {"cp1": IMAGE})
THREE = State([node("cp1"), node("cp2"), node("cp3"), WORKER], dict.fromkeys(("cp1", "cp2", "cp3"), IMAGE), "cp2_7a-1")
K3S = State([node("s1", "v1.34.2+k3s1"), WORKER], {})
RKE2 = State([node("s1", "v1.34.2+rke2r1")], {"s1": "docker.io/rancher/hardened-kubernetes:v1.34.2-rke2r1"})
MANAGED = State([node("ip-10-0-0-1", "v1.34.1-eks-1a2b3c4", {})], {})
OPENSHIFT = State([node("m0", "v1.33.5", OLD_CONTROL)], {}, "", "4.20.3")
HOSTS = {"cp1.lab": "cp1", "cp2.lab": "cp2", "cp3.lab": "cp3"}


@pytest.mark.parametrize(
    ("state", "hosts", "mode", "reason"),
    [
        (KUBEADM, {"cp1": "cp1"}, "static_pod", "node cp1 runs kube-scheduler as a static pod"),
        (THREE, HOSTS, "static_pod", "node cp1 runs kube-scheduler as a static pod"),
        (K3S, {"a": "s1"}, "k3s", "node s1 runs v1.34.2+k3s1"),
        (RKE2, {"a": "s1"}, "rke2", "node s1 runs v1.34.2+rke2r1"),
        (MANAGED, {}, "dedicated", "no node reports a kube-scheduler"),
        (OPENSHIFT, {}, "openshift", "it is OpenShift 4.20.3"),
    ],
)
def test_mode_is_detected(state, hosts, mode, reason):
    choice = select_mode("auto", hosts, state)
    assert choice.mode == mode and reason in choice.reason
    assert select_mode(mode, hosts, state) == choice


def test_lease_holder_is_last():
    assert select_mode("auto", HOSTS, THREE).hosts == ("cp1.lab", "cp3.lab", "cp2.lab")
    unheld = State(THREE.nodes, THREE.schedulers, "")
    assert select_mode("auto", HOSTS, unheld).hosts == ("cp1.lab", "cp2.lab", "cp3.lab")
    by_host_name = State(THREE.nodes, THREE.schedulers, "cp1.lab_7a-1")
    assert select_mode("auto", HOSTS, by_host_name).hosts[-1] == "cp1.lab"


@pytest.mark.parametrize(
    ("names", "hostname", "leader"),
    [
        # The machine's own name is shorter than its node's, or longer.
        (("ip-10-0-0-1.ec2.internal", "ip-10-0-0-2.ec2.internal"), "", "ip-10-0-0-1"),
        (("ip-10-0-0-1", "ip-10-0-0-2"), "", "ip-10-0-0-1.ec2.internal"),
        (("ip-1", "ip-2"), "", "IP-1.ec2.internal"),
        # A node has a name of its own (--hostname-override, a cloud's), and its label or address says the machine's.
        (("i-0a", "i-0b"), "label", "cp-a"),
        (("i-0a", "i-0b"), "address", "cp-a.dc1"),
        # The whole name goes before the short one, which several may have.
        (("cp.dc1", "cp.dc2"), "", "cp.dc1"),
        (("10.0.0.1", "10.0.0.2"), "", "10.0.0.1"),
    ],
)
def test_lease_holder_is_found_by_host_name_label_or_address(names, hostname, leader):
    def api_node(name, host):
        node = raw_node(name)
        if hostname == "label":
            node["metadata"]["labels"] = {**CONTROL, "kubernetes.io/hostname": host}
        addresses = [{"type": "InternalIP", "address": "10.0.0.9"}]
        node["status"]["addresses"] = addresses + [{"type": "Hostname", "address": host}] * (hostname == "address")
        return node

    nodes = [api_node(*name) for name in zip(names, ("cp-a", "cp-b"), strict=True)]
    kube = FakeKube(*nodes, lease(leader))
    hosts = dict(zip(("a", "b"), names, strict=True))
    assert select_mode("static_pod", hosts, read_state(kube, list(map(node_of, nodes)))).hosts == ("b", "a")


def test_dedicated_mode_on_a_kubeadm_cluster():
    choice = select_mode("dedicated", {}, KUBEADM)
    assert choice.mode == "dedicated" and choice.hosts == ()
    assert "scheduler_mode sets it; auto would select static_pod: " in choice.reason


@pytest.mark.parametrize(
    ("mode", "hosts", "state", "sentence"),
    [
        ("auto", {"cp1.lab": "cp1"}, THREE, "control_plane: node cp2, cp3 runs a kube-scheduler and has no host"),
        ("auto", {}, KUBEADM, "control_plane: node cp1 runs a kube-scheduler and has no host"),
        ("auto", {}, K3S, "control_plane: node s1 runs a kube-scheduler and has no host"),
        ("auto", {"a": "cp1", "b": "nowhere"}, KUBEADM, "the cluster has no node nowhere; set gpu_node_name of host b"),
        ("auto", {"a": "cp1", "b": "gpu1"}, KUBEADM, "node gpu1 of host b runs no kube-scheduler"),
        ("static_pod", {}, MANAGED, "control_plane: this group is empty, and scheduler_mode is static_pod"),
        ("static_pod", {}, OPENSHIFT, "scheduler_mode: static_pod doesn't fit this cluster: it is OpenShift 4.20.3"),
        ("openshift", {}, KUBEADM, "scheduler_mode: openshift doesn't fit this cluster: node cp1 runs"),
    ],
)
def test_refused(mode, hosts, state, sentence):
    with pytest.raises(BadInput, match=r".") as caught:
        select_mode(mode, hosts, state)
    assert sentence in str(caught.value)


# --------------------------------------------------------------------------- schedulers that no mode configures

K0S = State([Node("gpu1", kubelet_version="v1.34.2+k0s.0", distribution="k0s")], {}, "controller-1_7a-1")
MICROK8S = State([Node("m1", kubelet_version="v1.32.9", distribution="MicroK8s")], {}, "m1_7a-1")
KUBEASZ = State([Node("192.168.1.1", kubelet_version="v1.33.1", hostnames=("k8s-01",)), WORKER], {}, "k8s-01_7a-1")
ABROAD = State(MANAGED.nodes, {}, "ip-172-16-3-4.ec2.internal_7a-1")
NO_AGENT = State([node("gpu1", "v1.30.1+k3s1", {})], {}, "srv_7a-1")
OTHER_REGION = State(
    [node("ip-10-0-1-2.ec2.internal", "v1.34.1-eks-1a2b3c4", {})], {}, "ip-10-0-1-2.us-west-2.compute.internal_7a-1"
)
BOOTKUBE = State(
    [node("cp1", labels=OLD_CONTROL)], {}, "cp1_1", "", {"": "kube-scheduler-7d-a", "cp1": "kube-scheduler-7d-x"}
)
PENDING = State([node("cp1", labels=OLD_CONTROL)], {}, "", "", {"": "kube-scheduler-7d-a"})


@pytest.mark.parametrize(
    ("state", "hosts", "reason"),
    [
        (K0S, {}, "kube-scheduler runs outside of a pod (k0s)"),
        (K0S, {"c": "controller-1"}, "kube-scheduler runs on controller-1 outside of a pod (k0s)"),
        (MICROK8S, {}, "kube-scheduler runs on m1 outside of a pod (MicroK8s)"),
        (KUBEASZ, {}, "kube-scheduler runs on 192.168.1.1 outside of a pod (MicroK8s, k0s, RKE1, or a unit of systemd"),
        (ABROAD, {"a": "m1", "b": "m2"}, "kube-scheduler runs on m1, m2 outside of a pod (MicroK8s"),
        (NO_AGENT, {"a": "srv"}, "kube-scheduler runs on srv outside of a pod (k3s)"),
        (BOOTKUBE, {"a": "cp1"}, "on node cp1 in pod kube-system/kube-scheduler-7d-x, which is no static pod"),
        (PENDING, {}, "kube-scheduler runs in pod kube-system/kube-scheduler-7d-a, which is no static pod"),
    ],
)
def test_a_scheduler_that_no_mode_configures(state, hosts, reason):
    with pytest.raises(BadInput) as caught:
        select_mode("auto", hosts, state)
    message = str(caught.value)
    assert message.startswith("scheduler_mode: ") and reason in message and "set scheduler_mode: dedicated" in message
    assert select_mode("dedicated", hosts, state).mode == "dedicated"
    removed = select_mode("auto", hosts, state, present=False)
    assert removed.mode == "dedicated" and reason in removed.reason


@pytest.mark.parametrize("state", [ABROAD, OTHER_REGION], ids=["abroad", "other region"])
def test_a_lease_that_no_node_holds_is_a_providers(state):
    choice = select_mode("auto", {}, state)
    assert choice.mode == "dedicated" and "managed by a provider" in choice.reason


# --------------------------------------------------------------------------- the API


def of_api(kind, name, api_version="v1", metadata=(), **more):
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, **dict(metadata)}, **more}


def raw_node(name, os="Debian", worker=False):
    info = {"kubeletVersion": "v1.36.3", "osImage": os}
    return of_api("Node", name, metadata={"labels": None if worker else CONTROL}, status={"nodeInfo": info})


def mirror(name, annotations=("kubernetes.io/config.mirror",)):
    metadata = {"namespace": "kube-system", "labels": {"component": "kube-scheduler"}}
    metadata["annotations"] = dict.fromkeys(annotations, "0")
    containers = [{"name": "logger", "image": "x:1"}, {"name": "kube-scheduler", "image": IMAGE}]
    return of_api("Pod", f"kube-scheduler-{name}", metadata=metadata, spec={"nodeName": name, "containers": containers})


def lease(holder):
    place = {"namespace": "kube-system"}
    spec = {"holderIdentity": f"{holder}_7a-1"}
    return of_api("Lease", "kube-scheduler", "coordination.k8s.io/v1", metadata=place, spec=spec)


def asked(**given):
    defaults = {name: spec.get("default") for name, spec in SCHEDULER_OPTIONS.items()}
    return {"memory_unit": None, "scheduler": {**defaults, **given}}


def detected(api, **given):
    return collect(api, asked(**{"hosts": {"a": "cp1"}, **given}))["scheduler"]


def kubeadm(*objects, version="v1.36.3"):
    """Return a cluster whose only control-plane machine is cp1."""
    kube = FakeKube(raw_node("cp1"), mirror("cp1"), *objects)
    kube.version_answer = {"gitVersion": version}
    return kube


def of_installer(machine, labels=None, annotations=("kubernetes.io/config.mirror",), **container):
    """Return a kube-scheduler's pod whose labels aren't kubeadm's."""
    pod = mirror(machine, annotations)
    pod["metadata"]["labels"] = labels
    pod["spec"]["containers"] = [{"name": "kube-scheduler", "image": IMAGE, **container}]
    return pod


OTHER_WORK = [
    {"name": "kube-controller-manager", "image": "registry.k8s.io/kube-controller-manager:v1.36.3"},
    {"name": "log", "image": "busybox", "command": ["tail", "-f", "/var/log/kube-scheduler"]},
    {"name": "s", "image": "x/hyperkube:v1", "command": ["/hyperkube", "proxy"]},
    {"name": "s", "image": "x/my-kube-scheduler:v1"},
]


@pytest.mark.parametrize(
    "container",
    [
        {"image": "x/y@sha256:0"},
        {"name": "s", "image": "reg:5000/hyperkube:v1.15.3", "command": ["/hyperkube", "kube-scheduler", "--v=2"]},
        {"name": "s", "image": "x", "command": ["/usr/local/bin/kube-scheduler"]},
        {"name": "s", "image": "x", "args": ["kube-scheduler", "--v=2"]},
        {"name": "s", "image": "reg:5000/x/kube-scheduler-arm64:v1.18.2"},
        {"name": "s", "image": "registry.k8s.io/kube-scheduler@sha256:0"},
    ],
)
def test_a_static_pod_with_other_labels_is_found_on_its_node(container):
    machines = [raw_node("cp1"), raw_node("cp2"), raw_node("gpu1", worker=True)]
    pods = [of_installer("cp1", {"k8s-app": "kube-scheduler"}, **container), of_installer("cp2", **container)]
    kube = FakeKube(*machines, *pods, lease("cp1"))
    found = collect(kube, asked(hosts={"b": "cp1", "a": "cp2"}))["scheduler"]
    assert (found["mode"], found["hosts"]) == ("static_pod", ["a", "b"])
    assert kube.requests == {"GET": 9}, "one more for each node without a labelled pod"


def test_removal_needs_no_machines_that_have_nothing():
    """On Talos nothing reaches the machines, and the scheduler is one of its own."""
    machine = [raw_node("cp1"), of_installer("cp1", {"k8s-app": "kube-scheduler"})]
    found = detected(FakeKube(*machine), hosts={}, state="absent")
    assert (found["mode"], found["hosts"], found["on_machines"]) == ("dedicated", [], False)
    assert "runs kube-scheduler as a static pod, group control_plane is empty" in found["reason"]
    with pytest.raises(BadInput, match="node cp1 runs a kube-scheduler and has no host in this group"):
        detected(FakeKube(*machine), hosts={})
    with pytest.raises(BadInput, match="node cp1 runs a kube-scheduler and has no host in this group"):
        detected(FakeKube(*machine, left("DaemonSet")), hosts={}, state="absent")


@pytest.mark.parametrize("container", OTHER_WORK, ids=lambda one: one["image"])
def test_other_static_pods_are_no_schedulers(container):
    kube = FakeKube(raw_node("cp1"), of_installer("cp1", **container))
    with pytest.raises(BadInput, match="kube-scheduler runs on cp1 outside of a pod"):
        detected(kube)


def test_control_plane_machines_without_a_label_are_found_by_lease_and_inventory():
    machines = [raw_node(name, worker=True) for name in ("m1", "m2", "gpu1")]
    kube = FakeKube(
        *machines, of_installer("m1"), of_installer("m2"), of_installer("gpu1", annotations=()), lease("m1")
    )
    assert detected(kube, hosts={"a": "m1", "b": "m2"})["hosts"] == ["b", "a"]
    assert [call for call in kube.calls if "kube-system" in call and "Pods" in call] == ["GET Pods kube-system"] * 3


def test_nodes_of_schedulers_without_a_label_are_reported():
    """By their names the extender reaches them."""
    labelled, old, bare = raw_node("cp1"), raw_node("cp2"), raw_node("cp3", worker=True)
    old["metadata"]["labels"] = OLD_CONTROL
    pods = [mirror(name) for name in ("cp1", "cp2", "cp3")]
    kube = FakeKube(labelled, old, bare, raw_node("gpu1", worker=True), *pods, lease("cp1"))
    found = detected(kube, hosts={"a": "cp1", "b": "cp2", "c": "cp3"})
    assert (found["mode"], sorted(found["hosts"]), found["unlabelled"]) == ("static_pod", ["a", "b", "c"], ["cp3"])
    assert detected(kubeadm())["unlabelled"] == []
    assert detected(openshift_of("4.20.0"), hosts={})["unlabelled"] == []


def server_node(name, distribution, arguments, labels=None):
    """As k3s and RKE2 note on their nodes with which arguments they run."""
    kubelet = {"k3s": "v1.34.2+k3s1", "rke2": "v1.34.2+rke2r1"}[distribution]
    metadata = {"labels": labels, "annotations": {f"{distribution}.io/node-args": json.dumps(arguments)}}
    return of_api("Node", name, metadata=metadata, status={"nodeInfo": {"kubeletVersion": kubelet}})


ROLES = {f"node-role.kubernetes.io/{name}": "true" for name in ("control-plane", "etcd", "master")}


@pytest.mark.parametrize("distribution", ["k3s", "rke2"])
def test_servers_of_k3s_and_rke2_are_known_by_their_roles_and_arguments(distribution):
    """RKE2 1.34 sets no label master; a node of etcd alone has no scheduler, and a label may be missing."""
    role = {"node-role.kubernetes.io/control-plane": "true"}
    etcd = {"node-role.kubernetes.io/etcd": "true"}
    # A taken node says of itself what it likes.
    agent = server_node("gpu1", distribution, ["server"])
    for labels, missing in ((ROLES, []), (role, []), (OLD_CONTROL, []), (None, ["s1"]), ({"a": "b"}, ["s1"])):
        machines = [server_node("s1", distribution, ["server", "--cluster-init"], labels)]
        machines += [server_node("e1", distribution, ["server", "--disable-scheduler"], etcd), agent]
        pods = [mirror("s1")] if distribution == "rke2" else []
        found = detected(FakeKube(*machines, *pods), hosts={"a": "s1"})
        assert (found["mode"], found["hosts"], found["unlabelled"]) == (distribution, ["a"], missing)
        with pytest.raises(BadInput, match="node e1 of host b runs no kube-scheduler; take it out of the group"):
            detected(FakeKube(*machines, *pods), hosts={"a": "s1", "b": "e1"})


@pytest.mark.parametrize("arguments", ["agent", [], ["agent"], {"a": 1}, None, ["server", "--disable-scheduler"]])
def test_what_is_no_server_of_k3s_is_none(arguments):
    with pytest.raises(BadInput, match=r"node s1 of host a runs no kube-scheduler|outside of a pod"):
        detected(FakeKube(server_node("s1", "k3s", arguments)), hosts={"a": "s1"})


def test_arguments_that_nest_too_deep_are_none():
    node = server_node("s1", "k3s", [])
    node["metadata"]["annotations"]["k3s.io/node-args"] = "[" * 100_000
    with pytest.raises(BadInput, match=r"node s1 of host a runs no kube-scheduler|outside of a pod"):
        detected(FakeKube(node), hosts={"a": "s1"})


def test_a_hosted_scheduler_is_told_apart():
    kube = FakeKube(raw_node("cp1"), of_installer("cp1", {"k8s-app": "kube-scheduler"}, annotations=()))
    with pytest.raises(BadInput, match="in pod kube-system/kube-scheduler-cp1, which is no static pod"):
        detected(kube)
    assert detected(kube, mode="dedicated")["mode"] == "dedicated"
    assert detected(kube, state="absent")["mode"] == "dedicated"


@pytest.mark.parametrize(
    ("kubelet", "metadata", "title"),
    [
        ("v1.34.2+k0s.0", {}, "k0s"),
        ("v1.32.9", {"labels": {"microk8s.io/cluster": "true"}}, "MicroK8s"),
        ("v1.28.15", {"annotations": {"rke.cattle.io/internal-ip": "10.0.0.1"}}, "RKE1"),
    ],
)
def test_distributions_are_known_by_their_nodes(kubelet, metadata, title):
    machine = of_api("Node", "m1", metadata=metadata, status={"nodeInfo": {"kubeletVersion": kubelet}})
    with pytest.raises(BadInput, match=rf"kube-scheduler runs outside of a pod \({title}\), and no mode"):
        detected(FakeKube(machine), hosts={})


COREOS = "Red Hat Enterprise Linux CoreOS 417.94.202411261619-0"


def openshift_of(version, *objects):
    status = {"desired": {"version": version}}
    return FakeKube(
        raw_node("m0", COREOS), of_api("ClusterVersion", "version", "config.openshift.io/v1", status=status), *objects
    )


def test_kubeadm_cluster_takes_seven_requests():
    machines = [raw_node("cp1"), raw_node("cp2"), raw_node("gpu1", worker=True)]
    kube = FakeKube(*machines, mirror("cp1"), mirror("cp2"), mirror("gpu1", ()), lease("cp1"))
    found = collect(kube, asked(hosts={"b": "cp1", "a": "cp2"}))
    assert found["scheduler"]["mode"] == "static_pod" and found["scheduler"]["on_machines"] is True
    assert found["scheduler"]["hosts"] == ["a", "b"] and found["scheduler"]["version"] == "v1.36.3"
    assert found["scheduler"]["versions"] == ["v1.36.3"] and found["requests"] == {"GET": 7}
    assert found["scheduler"]["leftovers"] == []
    assert found["scheduler"]["namespace"] == {"name": "gpushare-system", "metadata": {}}


@pytest.mark.parametrize(("version", "policy"), [("4.9.59", True), ("4.10.0", False), ("4.22.1", False)])
def test_openshift_detected_by_cluster_version(version, policy):
    found = detected(openshift_of(version), hosts={})
    assert (found["mode"], found["openshift"], found["takes_policy"]) == ("openshift", version, policy)


def test_coreos_without_openshift():
    kube = FakeKube(raw_node("cp1", "Red Hat Enterprise Linux CoreOS 9"), mirror("cp1"))
    assert detected(kube)["mode"] == "static_pod"


def test_namespace_metadata_is_reduced():
    metadata = {"labels": {"a": "b"}, "annotations": {"kubegpu.share/created": "true", "long": "text"}}
    found = detected(kubeadm(of_api("Namespace", "n", metadata=metadata)), namespace="n")["namespace"]
    marks = {"kubegpu.share/created": "true"}
    assert found == {"name": "n", "metadata": {"name": "n", "labels": {"a": "b"}, "annotations": marks}}


# --------------------------------------------------------------------------- leftovers of another mode

OURS = {"app.kubernetes.io/part-of": "gpushare"}
LEFT = {
    "ValidatingAdmissionPolicy": ("gpushare-scheduler", "admissionregistration.k8s.io/v1", ""),
    "Deployment": ("gpushare-scheduler", "apps/v1", "gpushare-scheduler"),
    "DaemonSet": ("gpushare-extender", "apps/v1", "gpushare-system"),
}


def left(kind, beta="", **metadata):
    name, api_version, namespace = LEFT[kind]
    return of_api(kind, name, api_version + beta, metadata={"namespace": namespace, "labels": OURS, **metadata})


@pytest.mark.parametrize("kind", ["ValidatingAdmissionPolicy", "Deployment"])
def test_leftover_dedicated_scheduler_refused_and_listed_for_removal(kind):
    api = kubeadm(left(kind))
    with pytest.raises(BadInput) as caught:
        detected(api)
    message = str(caught.value)
    assert message.startswith("scheduler_mode: static_pod (node cp1 runs") and f"leave {kind} " in message
    assert "kubegpu.share.uninstall --limit localhost,control_plane -e scheduler_mode=dedicated" in message
    found = detected(api, state="absent")
    assert found["mode"] == "static_pod" and [leftover.split()[0] for leftover in found["leftovers"]] == [kind]
    # Its own mode continues.
    assert detected(api, mode="dedicated", hosts={})["leftovers"] == []


@pytest.mark.parametrize("more", [{"labels": None}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}])
def test_foreign_and_terminating_objects_are_no_leftovers(more):
    found = kubeadm(left("ValidatingAdmissionPolicy", **more), left("Deployment", **more))
    assert detected(found)["leftovers"] == []


@pytest.mark.parametrize(
    ("version", "beta", "found"),
    [("v1.30.2", "", 1), ("v1.29.9+k3s1", "beta1", 1), ("v1.30.2", "beta1", 0), ("v1.27.1", "beta1", 0)],
)
def test_policy_requested_in_the_served_version(version, beta, found):
    kube = kubeadm(left("ValidatingAdmissionPolicy", beta), version=version)
    assert len(detected(kube, state="absent")["leftovers"]) == found


def test_leftover_extender_daemon_set_reported():
    daemons, reported = left("DaemonSet"), ["DaemonSet gpushare-system/gpushare-extender"]
    assert detected(openshift_of("4.9.59", daemons), hosts={})["leftovers"] == []
    assert detected(openshift_of("4.10.0", daemons), hosts={})["leftovers"] == reported
    assert detected(kubeadm(daemons), mode="dedicated", hosts={})["leftovers"] == reported
    assert detected(kubeadm(daemons))["leftovers"] == []
