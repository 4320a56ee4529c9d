# SPDX-License-Identifier: GPL-3.0-or-later
"""The choice of the container runtime by the kubelet and the user's options, and cgroup drivers."""

from __future__ import annotations

import typing as t
from collections.abc import Sequence

import pytest
from action_plugins import act
from ansible_collections.kubegpu.share.plugins.action import container_runtime
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._node import facts
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import kubelet as runtime_kubelet
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import plan, properties
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.plan import choose
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.properties import TITLES, cgroup_mismatch
from fake_node import FakeNode
from runtime_kit import ABSENT, PRESENT, containerd_state, docker_state, show_unit


def found(version: str = "1.0.0", **more: t.Any) -> dict[str, t.Any]:
    return {"version": version, **more}


def kubelet(runtime: str, endpoint: str = "unix:///x", driver: str = "systemd") -> dict[str, t.Any]:
    return {"version": "1.36.3", "endpoint": endpoint, "runtime": runtime, "cgroup_driver": driver}


@pytest.mark.parametrize(
    ("name", "runtimes", "kubelets", "chosen"),
    [
        ("auto", {"containerd": found(), "docker": found()}, kubelet("docker"), "docker"),
        ("auto", {"containerd": found("", embedded="k3s"), "k3s": found()}, kubelet("k3s"), "k3s"),
        ("auto", {"containerd": found()}, None, "containerd"),
        ("auto", {"containerd": None, "docker": found()}, None, "docker"),
        ("auto", {"crio": found()}, kubelet("", ""), "crio"),
        ("docker", {"containerd": found(), "docker": found()}, kubelet("containerd"), "docker"),
        ("crio", {}, None, "crio"),
        ("auto", {"containerd": found(dump='disabled_plugins = ["cri"]\n'), "docker": found()}, None, "docker"),
    ],
)
def test_choice_of_the_runtime(
    name: str, runtimes: dict[str, t.Any], kubelets: dict[str, t.Any] | None, chosen: str
) -> None:
    assert choose(name, True, runtimes, kubelets) == chosen


@pytest.mark.parametrize(
    ("name", "runtimes", "kubelets", "message"),
    [
        ("auto", {"containerd": found(), "docker": found()}, None, "set runtime_name to containerd or docker"),
        ("auto", {}, None, "no container runtime is installed"),
        ("auto", {"containerd": found()}, kubelet("", "unix:///run/other.sock"), "belongs to no supported runtime"),
        ("auto", {"containerd": found("", embedded="k0s")}, None, "set the default runtime in /etc/k0s/containerd.d"),
        ("containerd", {"containerd": found("", embedded="k3s")}, None, "set runtime_name: k3s"),
    ],
)
def test_refusals_name_the_choice(
    name: str, runtimes: dict[str, t.Any], kubelets: dict[str, t.Any] | None, message: str
) -> None:
    with pytest.raises(BadInput, match=f"runtime_name.*{message}"):
        choose(name, True, runtimes, kubelets)


@pytest.mark.parametrize(("name", "title"), TITLES.items())
def test_a_runtime_that_isnt_installed(name: str, title: str) -> None:
    with pytest.raises(BadInput, match=f"runtime_name: {title} isn't installed"):
        plan.make_plan(name, PRESENT, {}, None)
    assert plan.make_plan(name, ABSENT, {}, None).plan.empty


def test_removal_needs_no_choice() -> None:
    assert choose("auto", False, {}, None) == ""
    assert choose("auto", False, {"containerd": found("", embedded="k0s")}, None) == ""
    both = {"containerd": found(), "docker": found(ours=True)}
    assert choose("auto", False, both, None) == "docker", "the one that has ours"
    assert choose("auto", False, both, kubelet("containerd")) == "docker", "the kubelet has changed since"
    marked = {"containerd": found(files={"/c": "x = 1 # kubegpu.share\n"}), "docker": found()}
    assert choose("auto", False, marked, None) == "containerd"
    assert choose("auto", False, {"containerd": found(), "docker": found()}, None) == "", "nothing is ours"
    with pytest.raises(BadInput, match="set runtime_name to containerd or docker"):
        choose("auto", False, {"containerd": found(drop_in="x"), "docker": found(ours=True)}, None)


# --------------------------------------------------------------------------- the kubelet


def observe(
    files: dict[str, str] | None = None,
    arguments: str = "",
    version: str = "1.36.3",
    pid: int = 4,
    units: Sequence[str] = ("kubelet.service",),
    drop_ins: str = "",
) -> dict[str, t.Any] | None:
    made = FakeNode(dict(files or {}))
    if pid and arguments:
        made.files[f"/proc/{pid}/cmdline"] = "\0".join(["/usr/bin/kubelet", *arguments.split()]) + "\0"

    def systemctl(argv: Sequence[str]) -> Done:
        if argv[2] not in units:
            return Done(0, "LoadState=not-found\nActiveState=inactive\nMainPID=0\n", "")
        return show_unit(pid, "/usr/bin/kubelet $KUBELET_KUBEADM_ARGS", DropInPaths=drop_ins)

    made.answers = {"systemctl": systemctl, "kubelet": lambda argv: Done(0, f"Kubernetes v{version}\n", "")}
    return runtime_kubelet.observe(made)


KUBEADM = """apiVersion: kubelet.config.k8s.io/v1beta1
cgroupDriver: systemd
containerRuntimeEndpoint: {}
kind: KubeletConfiguration
"""


@pytest.mark.parametrize(
    ("endpoint", "runtime"),
    [
        ("unix:///run/containerd/containerd.sock", "containerd"),
        ("unix:///var/run/crio/crio.sock", "crio"),
        ("unix:///run/cri-dockerd.sock", "docker"),
        ("/var/run/dockershim.sock", "docker"),
        ("unix:///run/k3s/containerd/containerd.sock", "k3s"),
        ("unix:///run/other.sock", ""),
    ],
)
def test_runtime_of_a_socket(endpoint: str, runtime: str) -> None:
    seen = observe({runtime_kubelet.CONFIG: KUBEADM.format(endpoint)}, "--config=/var/lib/kubelet/config.yaml")
    assert seen == {"version": "1.36.3", "endpoint": endpoint, "runtime": runtime, "cgroup_driver": "systemd"}


def test_flags_override_the_file() -> None:
    seen = observe(
        {"/srv/k.yaml": KUBEADM.format("unix:///run/containerd/containerd.sock")},
        "--config /srv/k.yaml --container-runtime-endpoint=unix:///run/cri-dockerd.sock --cgroup-driver=cgroupfs",
    )
    assert seen is not None and seen["runtime"] == "docker" and seen["cgroup_driver"] == "cgroupfs"


def test_a_kubelet_that_doesnt_run_is_read_from_its_files() -> None:
    flags = 'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///var/run/crio/crio.sock --pod-infra-x=x"\n'
    seen = observe({runtime_kubelet.CONFIG: "cgroupDriver: systemd\n", runtime_kubelet.FLAGS: flags}, pid=0)
    assert seen is not None and seen["runtime"] == "crio"
    drop_in = "/etc/systemd/system/kubelet.service.d/20.conf"
    text = '[Service]\nEnvironment="KUBELET_EXTRA_ARGS=--container-runtime-endpoint=unix:///run/cri-dockerd.sock"\n'
    seen = observe({runtime_kubelet.CONFIG: "", drop_in: text}, pid=0, drop_ins=drop_in)
    assert seen is not None and seen["runtime"] == "docker"


def test_a_directory_of_configuration_files() -> None:
    files = {
        runtime_kubelet.CONFIG: KUBEADM.format("unix:///run/containerd/containerd.sock"),
        "/k.d/10.conf": "containerRuntimeEndpoint: unix:///var/run/crio/crio.sock\n",
        "/k.d/20.txt": "containerRuntimeEndpoint: unix:///run/cri-dockerd.sock\n",
    }
    seen = observe(files, "--config-dir=/k.d")
    assert seen is not None and seen["runtime"] == "crio"


@pytest.mark.parametrize(
    ("version", "runtime"), [("1.23.17", "docker"), ("1.24.0", "containerd"), ("1.36.3", "containerd")]
)
def test_without_an_endpoint_it_depends_on_the_release(version: str, runtime: str) -> None:
    seen = observe({runtime_kubelet.CONFIG: "cgroupDriver: systemd\n"}, "--v=2", version)
    assert seen is not None and seen["runtime"] == runtime


def test_installed_and_never_joined() -> None:
    seen = observe({}, pid=0)
    assert seen is not None and (seen["runtime"], seen["endpoint"]) == ("", "")


def test_the_kubelet_of_k3s_and_none() -> None:
    assert observe({}, units=()) is None
    seen = observe({"/etc/rancher/k3s/config.yaml": ""}, units=("k3s-agent.service",))
    assert seen is not None and seen["runtime"] == "k3s" and seen["endpoint"].endswith("k3s/containerd/containerd.sock")
    config = "container-runtime-endpoint: unix:///run/containerd/containerd.sock\n"
    seen = observe({"/etc/rancher/rke2/config.yaml": config}, units=("rke2-server.service",))
    assert seen is not None and seen["runtime"] == "containerd"


def test_a_node_without_runtimes() -> None:
    made = FakeNode({})
    names = ("systemctl", "containerd", "dockerd", "crio", "k3s", "rke2", "kubelet")
    made.answers = {name: lambda argv: Done(127, "", "") for name in names}
    assert facts.observe_runtimes(made) == dict.fromkeys(("containerd", "docker", "crio", "k3s", "rke2"))
    assert runtime_kubelet.observe(made) is None


CONTAINERD = """
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


@pytest.mark.parametrize(
    ("name", "observed", "theirs"),
    [
        ("docker", {"cgroup_driver": "cgroupfs"}, "cgroupfs"),
        ("crio", {"cgroup_driver": "systemd"}, "systemd"),
        ("containerd", {"dump": CONTAINERD}, "cgroupfs"),
        ("containerd", {"dump": CONTAINERD.replace("false", "true")}, "systemd"),
        ("containerd", {"dump": ""}, ""),
        ("docker", None, ""),
    ],
)
def test_cgroup_drivers(name: str, observed: dict[str, t.Any] | None, theirs: str) -> None:
    assert properties.runtime_driver(name, {name: observed}) == theirs
    notes = cgroup_mismatch(name, {name: observed}, kubelet(name, driver="systemd"))
    assert bool(notes) is (theirs == "cgroupfs")
    assert all("the kubelet's cgroupDriver is systemd" in note for note in notes)
    assert cgroup_mismatch(name, {name: observed}, kubelet("other", driver="systemd")) == []


SYSTEMD = CONTAINERD.replace("SystemdCgroup = false", "SystemdCgroup = true")


@pytest.mark.parametrize(
    ("name", "version", "kubelets", "warned"),
    [
        # From 1.34 on kubelet asks a runtime that answers; its own cgroupfs is a default that doesn't count.
        ("containerd", "2.1.4", "1.36.3", False),
        ("containerd", "2.0.0", "1.34.0", False),
        ("containerd", "2.1.4", "1.33.4", True),
        ("containerd", "1.7.28", "1.36.3", True),
        ("containerd", "2.1.4", "", True),
        ("crio", "1.36.3", "1.36.3", False),
        ("crio", "1.27.0", "1.34.0", True),
        ("crio", "1.33.0", "1.33.0", True),
        ("docker", "28.5.0", "1.36.3", True),
    ],
)
def test_a_kubelet_that_asks_its_runtime_agrees_with_it(name: str, version: str, kubelets: str, warned: bool) -> None:
    state = {"version": version, "dump": SYSTEMD, "cgroup_driver": "systemd"}
    assert properties.runtime_driver(name, {name: state}) == "systemd"
    own = {**kubelet(name, driver="cgroupfs"), "version": kubelets}
    assert bool(cgroup_mismatch(name, {name: state}, own)) is warned


def test_the_task_warns_and_passes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = docker_state(None, cgroup_driver="cgroupfs", containers=1)
    node = {"runtimes": {"docker": docker}, "kubelet": kubelet("docker")}
    result, executed = act(container_runtime, {"observed": node}, monkeypatch)
    assert result["changed"] and len(result["warnings"]) == 2
    assert "features.cdi takes effect" in result["warnings"][0] and "cgroupDriver" in result["warnings"][1]
    assert executed[0]["plan"]["runtime"] == "docker" and executed[0]["plan"]["restart"] is False


def test_the_task_hands_over_what_containerds_guard_has_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\n  snapshotter = "stargz"\n'
    seen = containerd_state({"/etc/containerd/config.toml": text})
    seen["dump"] += "[plugins.'io.containerd.cri.v1.images']\nsnapshotter = 'overlayfs'\n"
    node = {"runtimes": {"containerd": seen}, "kubelet": kubelet("containerd")}
    result, executed = act(container_runtime, {"observed": node}, monkeypatch)
    assert "it takes effect" in result["warnings"][0]
    path = ["plugins", "io.containerd.cri.v1.images", "snapshotter"]
    assert executed[0]["plan"]["expected"] == [{"path": path, "value": "stargz"}]
    assert executed[0]["plan"]["users_default"] == "runc"


def test_a_removal_keeps_the_cri_for_the_kubelet() -> None:
    text = 'disabled_plugins = [] # kubegpu.share, was ["cri"]\n'
    runtimes = {"containerd": containerd_state({"/etc/containerd/config.toml": text})}
    assert plan.make_plan("auto", ABSENT, runtimes, kubelet("containerd")).warnings
    assert plan.make_plan("auto", ABSENT, runtimes, kubelet("crio")).warnings == ()
