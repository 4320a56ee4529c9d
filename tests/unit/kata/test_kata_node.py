# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node lacks for pods of Kata with cards, and the RuntimeClass with its nodes."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._kata import classes, messages, node, shim
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import kubelet
from kata_facts import specification
from node_fakes import FakeSystem

HANDLER = "kata-qemu-nvidia-gpu"
FOLDER = "/opt/kata/share/defaults/kata-containers/runtimes/qemu-nvidia-gpu"
CONFIG, SHIM = f"{FOLDER}/configuration-qemu-nvidia-gpu.toml", "/opt/kata/bin/containerd-shim-kata-v2"
MAIN = "/etc/containerd/config.toml"
CRI = "plugins.'io.containerd.cri.v1.runtime'.containerd"
RUNTIME = (
    f"[{CRI}.runtimes.{HANDLER}]\nruntime_type = 'io.containerd.{HANDLER}.v2'\nruntime_path = '{SHIM}'\n"
    f"[{CRI}.runtimes.{HANDLER}.options]\nConfigPath = '{CONFIG}'\n"
)
DUMP = f"[{CRI}]\ndefault_runtime_name = 'runc'\n[{CRI}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
TOML = """
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
# cold_plug_vfio = "no-port"
cold_plug_vfio = "root-port"  # for cards
pcie_root_port = 8
[runtime]
pod_resource_api_sock = "/var/lib/kubelet/pod-resources/kubelet.sock"
"""
KUBELET = "apiVersion: kubelet.config.k8s.io/v1beta1\nruntimeRequestTimeout: 20m0s\n"
PARAMS = {"handler": HANDLER, "shim": SHIM, "config": CONFIG, "cards": 2}


def machine(dump=DUMP + RUNTIME, config=TOML, settings=KUBELET, version="1.36.3", without=(), **files):
    """A node on which nothing is missing, but what is said."""
    there = {
        **{"/dev/kvm": "", SHIM: "", "/opt/kata/bin/qemu-system-x86_64": "", MAIN: "version = 3\n", CONFIG: config},
        **{"/var/lib/kubelet/pod-resources/kubelet.sock": "", "/var/lib/kubelet/config.yaml": settings},
        "/var/run/cdi/nvidia.com-pgpu.yaml": specification("12", "31"),
    }
    system = FakeSystem({path: text for path, text in {**there, **files}.items() if path not in without})
    active = "LoadState=loaded\nActiveState=active\nMainPID=0\n"
    system.commands |= {
        "containerd --version": Done(0, "containerd c 2.4.2 x\n", ""),
        f"containerd --config {MAIN} config dump": Done(0, dump, ""),
        "systemctl show": Done(0, active, ""),
        "kubelet --version": Done(0, f"Kubernetes v{version}\n", ""),
    }
    return system


def codes(system, **params):
    return [problem["code"] for problem in node.work(system, {**PARAMS, **params})["problems"]]


def test_a_complete_node_lacks_nothing():
    done = node.work(machine(), PARAMS)
    assert done["problems"] == [] and not done["changed"]
    seen = done["kata"]
    assert seen["handlers"] == [HANDLER, "runc"] and seen["handler_loaded"] and seen["default_runtime"] == "runc"
    assert seen["devices"] == ["nvidia.com/pgpu=12", "nvidia.com/pgpu=31"] and not seen["iommufd"]


OLD_CLASS = RUNTIME.replace(f"io.containerd.{HANDLER}.v2", "io.containerd.runc.v2")


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"without": ["/dev/kvm"]}, "no_kvm", "VT-x"),
        ({"without": [SHIM]}, "no_shim", SHIM),
        ({"without": [CONFIG]}, "no_config", CONFIG),
        ({"without": ["/opt/kata/bin/qemu-system-x86_64"]}, "no_hypervisor", "qemu"),
        ({"dump": DUMP}, "no_handler", "it has runc"),
        ({"dump": DUMP + OLD_CLASS}, "not_kata", "io.containerd.runc.v2"),
        ({"dump": DUMP.replace("= 'runc'", "= 'nvidia'") + RUNTIME}, "default_nvidia", "runtime_state: absent"),
        ({"version": "1.33.4"}, "kubelet_gate", "KubeletPodResourcesGet"),
        ({"settings": KUBELET + "featureGates:\n  KubeletPodResourcesGet: false\n"}, "kubelet_gate", "1.36.3"),
        ({"settings": "kind: KubeletConfiguration\n"}, "kubelet_timeout", "is 2m"),
        ({"settings": "runtimeRequestTimeout: 15m0s\n"}, "kubelet_timeout", "is 15m0s"),
        ({"config": TOML.replace('"root-port"  #', '"no-port"  #')}, "no_cold_plug", "root-port"),
        ({"config": TOML.replace("= 8", "= 1")}, "root_ports", "2 cards"),
        ({"config": TOML.replace("pod_resource_api_sock", "#")}, "no_pod_resources", node.SOCKET),
        ({"without": [node.SOCKET]}, "pod_resources_missing", node.SOCKET),
        ({f"{FOLDER}/config.d/10-ports.toml": "[hypervisor.qemu]\npcie_root_port = 1\n"}, "root_ports", "2 cards"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(given, code, says):
    [problem] = node.work(machine(**given), PARAMS)["problems"]
    assert problem["code"] == code and says in problem["text"]


def test_settings_that_are_enough():
    assert codes(machine(version="1.33.4", settings=KUBELET + "featureGates: {KubeletPodResourcesGet: true}\n")) == []
    assert codes(machine(settings="runtimeRequestTimeout: 1200s\n")) == []
    assert [node.seconds_of(each) for each in ("1h30m", "20m", "90s", "soon", "")] == [5400, 1200, 90, 0, 0]


def test_kubelets_flags_win():
    arguments = ["--runtime-request-timeout=25m", "--feature-gates=A=false,KubeletPodResourcesGet=true"]
    settings = kubelet.Settings(
        arguments, "runtimeRequestTimeout: 2m\nfeatureGates:\n  KubeletPodResourcesGet: false\n"
    )
    assert settings.runtime_request_timeout == "25m" and settings.gate("KubeletPodResourcesGet") is True
    assert kubelet.Settings([], "").gate("KubeletPodResourcesGet") is None


def test_the_shims_values_are_read_without_a_library():
    values = shim.parse(
        'top = 1\n[a]\nx = "with # sign" # note\n[hypervisor.qemu] # one\ny = [\n "z = 1",\n]\nw = true\n'
    )
    assert values == {"top": "1", "a.x": "with # sign", "hypervisor.qemu.w": "true"} | {
        key: value for key, value in values.items() if key == "hypervisor.qemu.y"
    }
    assert shim.hypervisor(values, "w") == "true" and shim.hypervisor(values, "none") == ""


def test_every_code_has_a_sentence():
    assert all(text.strip() and not text.endswith(".") for text in messages.TEXTS.values())


CC = {"nvidia.com/cc.ready.state": "false"}
DEPLOYED = {"metadata": {"name": HANDLER}, "handler": HANDLER}
DEPLOYED |= {"scheduling": {"nodeSelector": {"katacontainers.io/kata-runtime": "true", **CC}}}


def cluster(state="managed", found=(DEPLOYED,), labels=None, nodes=("gpu1",), **more):
    live = [{"metadata": {"name": "gpu1", "labels": labels or {}}}]
    given = {"state": state, "runtime_class": HANDLER, "handler": HANDLER, "labels": CC, "overhead": {"cpu": "1"}}
    return classes.plan({**given, "nodes": nodes, "classes": list(found), "live": live, **more})


INSTALLED = {"katacontainers.io/kata-runtime": "true"}


def test_the_label_that_nobody_sets_is_set_and_no_other():
    planned = cluster(labels=INSTALLED)
    assert planned["problems"] == [] and planned["definition"] == {}, "kata-deploy's stays its own"
    [definition] = planned["nodes"]
    assert definition["metadata"] == {"name": "gpu1", "labels": CC}


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"state": "external", "labels": INSTALLED}, "label_missing", "set kata_state: managed"),
        ({}, "label_missing", "kata-deploy sets it"),
        ({"labels": {**INSTALLED, "nvidia.com/cc.ready.state": "true"}}, "label_differs", "whoever set the label"),
        ({"state": "external", "found": ()}, "no_class", "kata-deploy"),
        ({"labels": {**INSTALLED, **CC}, "handler": "kata"}, "class_handler", "set kata_handler"),
        ({"labels": INSTALLED, "nodes": ("gpu9",)}, "no_node", "gpu9"),
    ],
)
def test_pods_that_would_stay_pending_are_named(given, code, says):
    [problem] = cluster(**given)["problems"]
    assert problem["code"] == code and says in problem["text"]


def test_a_runtime_class_of_ours_where_there_is_none():
    planned = cluster(found=())
    assert planned["problems"] == []
    assert planned["definition"]["scheduling"] == {"nodeSelector": CC} and classes.is_ours(planned["definition"])
    again = cluster(found=(planned["definition"],), labels=CC)
    assert again["definition"] == planned["definition"] and again["nodes"]
