# SPDX-License-Identifier: GPL-3.0-or-later
"""Which container runtime of a node the role is about: what the kubelet uses, and what the user says."""

from __future__ import annotations

import typing as t
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from ansible_collections.kubegpu.share.plugins.action import container_runtime
from ansible_collections.kubegpu.share.plugins.module_utils import _observe_kubelet, _observe_runtimes
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import choose
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from ansible_collections.kubegpu.share.plugins.plugin_utils import _runtime_plan
from fake_node import FakeNode

PRESENT = Wanted(True, True, "/usr/bin/nvidia-container-runtime", True, False)


def there(version: str = "1.0.0", **more: t.Any) -> dict[str, t.Any]:
    return {"version": version, **more}


def kubelet(runtime: str, endpoint: str = "unix:///x", driver: str = "systemd") -> dict[str, t.Any]:
    return {"version": "1.36.3", "endpoint": endpoint, "runtime": runtime, "cgroup_driver": driver}


@pytest.mark.parametrize(
    ("asked", "runtimes", "kubelets", "chosen"),
    [
        ("auto", {"containerd": there(), "docker": there()}, kubelet("containerd"), "containerd"),
        ("auto", {"containerd": there(), "docker": there()}, kubelet("docker"), "docker"),
        ("auto", {"crio": there()}, kubelet("crio"), "crio"),
        ("auto", {"containerd": there("", embedded="k3s"), "k3s": there()}, kubelet("k3s"), "k3s"),
        ("auto", {"docker": there(), "k3s": there()}, kubelet("docker"), "docker"),
        ("auto", {"containerd": there()}, None, "containerd"),
        ("auto", {"containerd": None, "docker": there()}, None, "docker"),
        ("auto", {"crio": there()}, kubelet("", ""), "crio"),
        ("docker", {"containerd": there(), "docker": there()}, kubelet("containerd"), "docker"),
        ("crio", {}, None, "crio"),
        ("auto", {"containerd": there(dump='disabled_plugins = ["cri"]\n'), "docker": there()}, None, "docker"),
    ],
)
def test_the_runtime_that_counts(
    asked: str, runtimes: dict[str, t.Any], kubelets: dict[str, t.Any] | None, chosen: str
) -> None:
    assert choose(asked, True, runtimes, kubelets) == chosen


@pytest.mark.parametrize(
    ("asked", "runtimes", "kubelets", "words"),
    [
        ("auto", {"containerd": there(), "docker": there()}, None, "set runtime_name to containerd or docker"),
        ("auto", {}, None, "no container runtime is installed"),
        ("auto", {"containerd": there()}, kubelet("", "unix:///run/other.sock"), "which no runtime known here has"),
        (
            "auto",
            {"containerd": there("", embedded="microk8s")},
            None,
            "set the default runtime in /var/snap/microk8s/current/args/containerd-template.toml",
        ),
        ("auto", {"containerd": there("", embedded="k0s")}, None, "set the default runtime in /etc/k0s/containerd.d"),
        ("containerd", {"containerd": there("", embedded="k3s")}, None, "set runtime_name: k3s"),
    ],
)
def test_refused_with_the_choice(
    asked: str, runtimes: dict[str, t.Any], kubelets: dict[str, t.Any] | None, words: str
) -> None:
    with pytest.raises(BadInput, match="runtime_name") as refused:
        choose(asked, True, runtimes, kubelets)
    assert words in str(refused.value)


def test_taking_out_never_asks() -> None:
    assert choose("auto", False, {}, None) == ""
    assert choose("auto", False, {"containerd": there("", embedded="k0s")}, None) == ""
    both = {"containerd": there(), "docker": there(ours=True)}
    assert choose("auto", False, both, None) == "docker", "the one that has ours"
    assert choose("auto", False, both, kubelet("containerd")) == "docker", "the kubelet has changed since"
    marked = {"containerd": there(files={"/c": "x = 1 # kubegpu.share\n"}), "docker": there()}
    assert choose("auto", False, marked, None) == "containerd"
    assert choose("auto", False, {"containerd": there(), "docker": there()}, None) == "", "nothing is ours"
    with pytest.raises(BadInput, match="set runtime_name to containerd or docker"):
        choose("auto", False, {"containerd": there(drop_in="x"), "docker": there(ours=True)}, None)


# --------------------------------------------------------------------------- the kubelet


def look(
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
        start = "{ path=/usr/bin/kubelet ; argv[]=/usr/bin/kubelet $KUBELET_KUBEADM_ARGS ; }"
        return Done(
            0, f"LoadState=loaded\nActiveState=active\nMainPID={pid}\nDropInPaths={drop_ins}\nExecStart={start}\n", ""
        )

    made.answers = {"systemctl": systemctl, "kubelet": lambda argv: Done(0, f"Kubernetes v{version}\n", "")}
    return _observe_kubelet.observe(made)


KUBEADM = """apiVersion: kubelet.config.k8s.io/v1beta1
cgroupDriver: systemd
containerRuntimeEndpoint: {}
kind: KubeletConfiguration
"""


@pytest.mark.parametrize(
    ("endpoint", "runtime"),
    [
        ("unix:///run/containerd/containerd.sock", "containerd"),
        ("unix:///var/run/containerd/containerd.sock", "containerd"),
        ("unix:///var/run/crio/crio.sock", "crio"),
        ("unix:///run/cri-dockerd.sock", "docker"),
        ("/var/run/dockershim.sock", "docker"),
        ("unix:///run/k3s/containerd/containerd.sock", "k3s"),
        ("unix:///run/other.sock", ""),
    ],
)
def test_whose_socket_that_is(endpoint: str, runtime: str) -> None:
    seen = look({_observe_kubelet.CONFIG: KUBEADM.format(endpoint)}, "--config=/var/lib/kubelet/config.yaml")
    assert seen == {"version": "1.36.3", "endpoint": endpoint, "runtime": runtime, "cgroup_driver": "systemd"}


def test_flags_win_over_the_file() -> None:
    seen = look(
        {"/srv/k.yaml": KUBEADM.format("unix:///run/containerd/containerd.sock")},
        "--config /srv/k.yaml --container-runtime-endpoint=unix:///run/cri-dockerd.sock --cgroup-driver=cgroupfs",
    )
    assert seen is not None and seen["runtime"] == "docker" and seen["cgroup_driver"] == "cgroupfs"


def test_a_kubelet_that_doesnt_run_is_read_from_its_files() -> None:
    flags = 'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///var/run/crio/crio.sock --pod-infra-x=x"\n'
    seen = look({_observe_kubelet.CONFIG: "cgroupDriver: systemd\n", _observe_kubelet.FLAGS: flags}, pid=0)
    assert seen is not None and seen["runtime"] == "crio"
    drop_in = "/etc/systemd/system/kubelet.service.d/20.conf"
    text = '[Service]\nEnvironment="KUBELET_EXTRA_ARGS=--container-runtime-endpoint=unix:///run/cri-dockerd.sock"\n'
    seen = look({_observe_kubelet.CONFIG: "", drop_in: text}, pid=0, drop_ins=drop_in)
    assert seen is not None and seen["runtime"] == "docker"


def test_a_folder_of_configuration() -> None:
    files = {
        _observe_kubelet.CONFIG: KUBEADM.format("unix:///run/containerd/containerd.sock"),
        "/k.d/10.conf": "containerRuntimeEndpoint: unix:///var/run/crio/crio.sock\n",
        "/k.d/20.txt": "containerRuntimeEndpoint: unix:///run/cri-dockerd.sock\n",
    }
    seen = look(files, "--config-dir=/k.d")
    assert seen is not None and seen["runtime"] == "crio"


@pytest.mark.parametrize(
    ("version", "runtime"), [("1.23.17", "docker"), ("1.24.0", "containerd"), ("1.36.3", "containerd")]
)
def test_without_an_endpoint_it_depends_on_the_release(version: str, runtime: str) -> None:
    seen = look({_observe_kubelet.CONFIG: "cgroupDriver: systemd\n"}, "--v=2", version)
    assert seen is not None and seen["runtime"] == runtime


def test_installed_and_never_joined() -> None:
    seen = look({}, pid=0)
    assert seen is not None and (seen["runtime"], seen["endpoint"]) == ("", "")


def test_the_kubelet_of_k3s_and_none() -> None:
    assert look({}, units=()) is None
    seen = look({"/etc/rancher/k3s/config.yaml": ""}, units=("k3s-agent.service",))
    assert seen is not None and seen["runtime"] == "k3s" and seen["endpoint"].endswith("k3s/containerd/containerd.sock")
    config = "container-runtime-endpoint: unix:///run/containerd/containerd.sock\n"
    seen = look({"/etc/rancher/rke2/config.yaml": config}, units=("rke2-server.service",))
    assert seen is not None and seen["runtime"] == "containerd"


def test_a_node_with_nothing() -> None:
    made = FakeNode({})
    names = ("systemctl", "containerd", "dockerd", "crio", "k3s", "rke2", "kubelet")
    made.answers = {name: lambda argv: Done(127, "", "") for name in names}
    assert _observe_runtimes.observe(made) == dict.fromkeys(("containerd", "docker", "crio", "k3s", "rke2"))
    assert _observe_kubelet.observe(made) is None


# --------------------------------------------------------------------------- the plan and the task


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
def test_who_makes_the_cgroups(name: str, observed: dict[str, t.Any] | None, theirs: str) -> None:
    assert _runtime_plan.cgroup_driver(name, observed) == theirs
    notes = _runtime_plan.cgroup_mismatch(name, observed, kubelet(name, driver="systemd"))
    assert bool(notes) is (theirs == "cgroupfs")
    assert all("the kubelet's cgroupDriver is systemd" in one for one in notes)
    assert _runtime_plan.cgroup_mismatch(name, observed, kubelet("other", driver="systemd")) == []


def docker(**changes: t.Any) -> dict[str, t.Any]:
    return {
        "version": "27.3.1",
        "config_path": "/etc/docker/daemon.json",
        "text": None,
        "flags": {},
        "default_runtime": "runc",
        "runtimes": {"runc": "runc"},
        "cgroup_driver": "cgroupfs",
        "live_restore": False,
        "containers": 1,
        "rootless": "",
        "service_active": True,
        "answers": True,
        "error": "",
        "was": None,
        "ours": False,
        "pending": False,
        "operator": False,
        **changes,
    }


def test_the_task_warns_and_hands_over_whose_plan_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible.plugins.action import ActionBase

    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    executed = []
    made = object.__new__(container_runtime.ActionModule)
    node = {"runtimes": {"docker": docker()}, "kubelet": kubelet("docker")}
    made._task = SimpleNamespace(args={"observed": node}, check_mode=False, diff=True, action="x")
    made._execute_module = lambda **given: executed.append(given["module_args"]) or {"changed": True}
    result = made.run()
    assert result["changed"] and len(result["warnings"]) == 2
    assert "features.cdi takes effect" in result["warnings"][0] and "cgroupDriver" in result["warnings"][1]
    assert executed[0]["plan"]["runtime"] == "docker" and executed[0]["plan"]["restart"] is False
