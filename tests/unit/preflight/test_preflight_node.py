# SPDX-License-Identifier: GPL-3.0-or-later
"""Each fault of a node: one change of a healthy node that exactly this check reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._preflight import node as machines
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.findings import NOTE, PROBLEM, WARNING, Finding
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.node import Machine, NodeOptions
from gpu_nodes import CARD, IMAGE, gpu_node

DEFAULT = NodeOptions()
EXTERNAL = NodeOptions(driver_state="external", toolkit_state="external")
DRAIN, REBOOT = NodeOptions(maintenance="drain"), NodeOptions(maintenance="reboot")


NO_DRIVER = {"driver__module_version": None, "driver__library_version": "", "driver__cards": [], "nvswitches": []}
# id, severity, options, changed facts, part of the text.
NVLINK5 = {"version": "580.95.05", "needed": True, "nvlink5": True}
CASES: list[tuple[str, str, NodeOptions, dict[str, Any], str]] = [
    ("nouveau-in-use", WARNING, DEFAULT, {"nouveau__loaded": True, "nouveau__refcnt": 2}, "set gpu_maintenance"),
    ("nouveau-in-use", NOTE, REBOOT, {"nouveau__loaded": True, "nouveau__refcnt": 2}, "drained and rebooted"),
    ("nouveau-in-use", WARNING, DEFAULT,
     {**NO_DRIVER, "nouveau__loaded": True, "nouveau__refcnt": 0, "gpus": [{**CARD, "driver": "nouveau"}]},
     "for 0000:01:00.0"),
    ("nouveau-in-use", WARNING, DEFAULT,
     {**NO_DRIVER, "nouveau__nova": {"modules": ["nova_core"], "in_use": False, "built_in": False},
      "gpus": [{**CARD, "driver": "nova_core"}]}, "has nova_core loaded for 0000:01:00.0, and only a reboot"),
    ("nova-built-in", PROBLEM, DEFAULT,
     {**NO_DRIVER, "nouveau__nova": {"modules": [], "in_use": False, "built_in": True},
      "gpus": [{**CARD, "driver": "nova_core"}]}, "whose own driver nova_core is built in and drives 0000:01:00.0"),
    ("nouveau-in-initramfs", NOTE, DEFAULT, {"nouveau__images": [{**IMAGE, "nouveau": True, "blacklist": False}]},
     "/boot/initrd.img-6.1 with nouveau"),
    ("boot-full", PROBLEM, DEFAULT, {"nouveau__boot_free": 60 << 20, "nouveau__images": [{**IMAGE, "newer": False}]},
     "/boot has 60 MiB free"),
    ("boot-full", PROBLEM, DEFAULT, {"nouveau__boot_read_only": True, "nouveau__images": [{**IMAGE, "newer": False}]},
     "is mounted read-only"),
    ("kernel-without-module", WARNING, DEFAULT,
     {"kernel__modules": {"6.1": {"nvidia": True}, "6.2": {"nvidia": False}}}, "for kernel 6.2, and would have no GPU"),
    ("kernel-without-module", WARNING, DEFAULT,
     {"kernel__modules": {"6.1": {"nvidia": False}, "6.2": {"nvidia": True}}}, "for kernel 6.1"),
    ("kernel-without-module", WARNING, DEFAULT,
     {"kernel__release": "6.8.0-99", "kernel__modules": {"6.8.0-100": {"nvidia": False}, "6.8.0-99": {"nvidia": True}}},
     "for kernel 6.8.0-100, and"),
    ("kernel-without-module", WARNING, DEFAULT,
     {"kernel__release": "6.8.0-9",
      "kernel__modules": {"6.8.0-100": {"nvidia": False}, "6.8.0-9": {"nvidia": False}, "6.8.0-99": {"nvidia": True}}},
     "for kernel 6.8.0-9, 6.8.0-100, and"),
    ("headers-missing", NOTE, DEFAULT, {**NO_DRIVER, "kernel__headers": False}, "running kernel 6.1"),
    ("compiler-mismatch", WARNING, DEFAULT, {"kernel__compiler": {"kernel": "13.2.0", "gcc": "12.2.0"}}, "gcc 12.2.0"),
    ("secure-boot", WARNING, DEFAULT, {**NO_DRIVER, "secure_boot": True}, "mokutil --import /var/lib/dkms/mok.pub"),
    ("secure-boot", PROBLEM, DEFAULT,
     {**NO_DRIVER, "secure_boot": True, "packages": {"nvidia-kernel-open-dkms": {"held": True}}}, "no enrolled key"),
    ("secure-boot", PROBLEM, DEFAULT,
     {**NO_DRIVER, "secure_boot": True, "mok": {"key": "k", "enrolled": False, "pending": True}},
     "waits for the next boot"),
    ("driver-mismatch", PROBLEM, DEFAULT, {"driver__library_version": "580.105.08"}, "library 580.105.08"),
    ("driver-mismatch", WARNING, DRAIN, {"driver__library_version": "580.105.08"}, "will be drained"),
    ("driver-mismatch", PROBLEM, EXTERNAL, {"driver__code": 18, "driver__error": "mismatch"}, "reboot it yourself"),
    ("driver-fails", WARNING, DEFAULT, {"driver__code": 999, "driver__error": "Unknown Error"}, "Unknown Error"),
    ("driver-fails", PROBLEM, EXTERNAL, {"driver__code": 999, "driver__error": "Unknown Error"}, "dmesg"),
    ("flavour", WARNING, DEFAULT, {"log__unsupported_by_open": True}, "driver_flavour: proprietary"),
    ("driver-provided", NOTE, DEFAULT, {"driver__others": ["gke"]}, "(580.95.05) from GKE's nvidia-driver-installer"),
    ("driver-not-held", WARNING, EXTERNAL, {"packages": {"nvidia-driver-cuda": {"held": False}}},
     "apt-mark hold nvidia-driver-cuda"),
    ("fabric-manager", WARNING, DEFAULT, {"driver__fabric": {"version": "570.1"}}, "fabric manager of version 570.1"),
    ("fabric-manager", PROBLEM, EXTERNAL, {"driver__fabric": {"version": ""}}, "no fabric manager"),
    ("fabric-manager", PROBLEM, EXTERNAL, {"services": {"nvidia-fabricmanager": {"active": False}}},
     "that does not run"),
    ("fabric-module", NOTE, DEFAULT,
     {"driver__fabric": {**NVLINK5, "unloaded": ["ib_umad"]}}, "role driver loads it"),
    ("fabric-module", PROBLEM, EXTERNAL, {"driver__fabric": {**NVLINK5, "unloaded": ["ib_umad"]}},
     "isn't loaded: ib_umad; load it by modprobe"),
    ("fabric-module", PROBLEM, NodeOptions(fabric_manager="absent"),
     {"driver__fabric": {**NVLINK5, "unloaded": ["ib_umad"]}}, "load it by modprobe"),
    ("fabric-module", PROBLEM, DEFAULT,
     {"driver__fabric": {**NVLINK5, "unloaded": ["mlx5_ib", "ib_umad"], "missing": ["mlx5_ib"]}},
     "(on Ubuntu linux-modules-extra-6.1)"),
    ("fabric-manager", PROBLEM, EXTERNAL,
     {"nvswitches": [], "driver__fabric": {**NVLINK5, "version": ""}}, "no fabric manager"),
    ("fabric-state", PROBLEM, EXTERNAL, {"driver__cards": [{"address": CARD["address"], "fabric": "in progress"}]},
     "0000:01:00.0 (in progress)"),
    ("fabric-state", WARNING, EXTERNAL, {"driver__cards": [{"address": CARD["address"], "fabric": "not started"}]},
     "CUDA fails unless their links are off: 0000:01:00.0"),
    ("fabric-state", PROBLEM, DEFAULT,
     {"driver__cards": [{"address": CARD["address"], "fabric": "in progress"}], "nvswitches": [],
      "driver__fabric": {"needed": False}}, "of the hypervisor, or of the rack's switch trays"),
    ("no-own-memory", PROBLEM, DEFAULT,
     {"driver__cards": [{"address": CARD["address"], "name": "NVIDIA GB10", "unified": True}]}, "NVIDIA GB10 at"),
    ("no-own-memory", PROBLEM, DEFAULT,
     {**NO_DRIVER, "gpus": [], "integrated": "NVIDIA Jetson AGX Orin Developer Kit"}, "NVIDIA Jetson AGX Orin"),
    ("vgpu-driver", PROBLEM, DEFAULT, {**NO_DRIVER, "gpus": [{**CARD, "vgpu": True}]}, "nvidia-linux-grid-*"),
    ("vgpu-licence", WARNING, DEFAULT,
     {"driver__licences": [{"address": "0000:01:00.0", "product": "x", "status": "Unlicensed (Unrestricted)"}]},
     "0000:01:00.0 (Unlicensed (Unrestricted))"),
    ("persistence-off", NOTE, EXTERNAL, {"driver__cards": [{"address": CARD["address"], "persistence": False}]},
     "off on 1 card"),
    ("device-nodes", WARNING, DEFAULT, {"devices__uvm": False}, "nvidia-modprobe -u -c 0"),
    ("card-lost", WARNING, DEFAULT, {"log__xids": [{"address": "0000:01:00.0", "code": 79}]}, "(Xid) of 0000:01:00.0"),
    ("card-lost", PROBLEM, DEFAULT, {"gpus": [CARD, {**CARD, "address": "0000:03:00.0"}]}, "2 NVIDIA cards on PCI"),
    ("link-degraded", WARNING, DEFAULT, {"gpus": [{**CARD, "link": {"width": "8", "max_width": "16"}}]},
     "8 of 16 lanes"),
    ("toolkit-skew", NOTE, DEFAULT, {"toolkit__packages": {"a": "1.20.1-1", "b": "1.19.0-1"}}, "a 1.20.1-1, b 1.19"),
    ("toolkit-skew", WARNING, EXTERNAL, {"toolkit__packages": {"a": "1.20.1-1", "b": "1.19.0-1"}}, "install all four"),
    ("stale-sources", NOTE, DEFAULT, {"sources_stale": [{"file": "/etc/apt/x.list", "text": ""}]}, "/etc/apt/x.list"),
    ("legacy-mode", WARNING, DEFAULT, {"toolkit__config": {"mode": "legacy", "text": ""}}, "daemon-reload takes"),
    ("legacy-mode", WARNING, EXTERNAL, {"toolkit__version": "1.14.6"}, "auto, which is legacy in toolkit 1.14.6 with"),
    ("legacy-mode", WARNING, EXTERNAL, {"toolkit__version": "1.17.8", "toolkit__config": None}, "in toolkit 1.17.8"),
    # k3s and RKE2 have their driver in their containerd's configuration alone.
    ("legacy-mode", WARNING, EXTERNAL,
     {"toolkit__version": "1.14.6", "kubelet": {"version": "", "runtime": "rke2", "cgroup_driver": ""},
      "runtimes": {"rke2": {"version": "1.30.4", "cgroup_driver": "systemd"}}}, "daemon-reload takes"),
    # CRI-O's driver counts where the kubelet names none.
    ("legacy-mode", WARNING, EXTERNAL,
     {"toolkit__version": "1.14.6", "kubelet": {"version": "1.36.3", "runtime": "crio", "cgroup_driver": "cgroupfs"},
      "runtimes": {"crio": {"version": "1.36.3", "cgroup_driver": "systemd"}}}, "daemon-reload takes"),
    ("cdi-stale", WARNING, DEFAULT, {"cdi": {"stale": True, "driver_version": "570.1"}},
     "of driver 570.1 and runs 580"),
    ("toolkit-gpu-operator", PROBLEM, DEFAULT, {"toolkit__operator": True}, "toolkit.enabled=false"),
    ("mandatory-access", NOTE, DEFAULT, {"security__selinux": "enforcing"}, "container_use_devices"),
    ("selinux-type", WARNING, dataclasses.replace(DEFAULT, gpushare_selinux_type=""),
     {"security__selinux": "enforcing", "packages": {"nvidia-container-selinux": {"held": False}}},
     "reach kubelet"),
]  # fmt: skip


def examine(host: str, options: NodeOptions, **paths: Any) -> list[Finding]:
    return machines.examine(Machine(host, gpu_node(**paths), options, "", "off"))


@pytest.mark.parametrize(("id", "severity", "options", "paths", "message"), CASES)
def test_each_fault_has_its_finding_and_no_other(
    id: str, severity: str, options: NodeOptions, paths: dict[str, Any], message: str
) -> None:
    found = examine("gpu7", options, **paths)
    assert [(one.id, one.severity, one.host) for one in found] == [(id, severity, "gpu7")]
    assert message in found[0].text and "\n" not in found[0].text
    assert found[0].found.removeprefix(f"{found[0].variable}: ").startswith("host gpu7 ") and found[0].do
    assert "gpu7" not in found[0].bare


@pytest.mark.parametrize(
    ("mode", "options"),
    [("permissive", dataclasses.replace(DEFAULT, gpushare_selinux_type="")), ("enforcing", DEFAULT)],
)
def test_a_device_plugin_that_selinux_leaves_alone_is_no_finding(mode: str, options: NodeOptions) -> None:
    assert "selinux-type" not in {one.id for one in examine("gpu7", options, security__selinux=mode)}


BOTH = {"6.8.0-99-generic": {"nvidia": True}, "6.8.0-100-generic": {"nvidia": False}}
BY_DKMS = "install its headers and run 'dkms autoinstall -k 6.8.0-100-generic'"
MODULES = "linux-modules-nvidia-580-server-open"


def dkms(module: str) -> list[dict[str, str]]:
    return [{"module": module, "version": "1", "kernel": "6.8.0-99-generic", "state": "installed"}]


def named(*packages: str) -> dict[str, Any]:
    return {name: {"version": "1", "held": True, "origin": ""} for name in packages}


@pytest.mark.parametrize(
    ("paths", "advice"),
    [
        ({"packages": named("nvidia-dkms-580-open"), "dkms": dkms("nvidia")}, BY_DKMS),
        ({"packages": named("nvidia-driver-cuda"), "dkms": dkms("nvidia-current")}, BY_DKMS),
        ({"packages": named("kmod-nvidia-open-dkms")}, BY_DKMS),
        ({"packages": {}, "dkms": dkms("nvidia"), "driver__runfile": {"version": "580.95.05"}}, BY_DKMS),
        (
            {"packages": named("nvidia-headless-no-dkms-580-server-open", f"{MODULES}-6.8.0-99-generic")},
            f"install {MODULES}-6.8.0-100-generic: the modules come compiled",
        ),
        # Canonical's modules, and dkms for another module than the driver's.
        (
            {
                "packages": named("nvidia-fs-dkms", f"{MODULES}-6.8.0-99-generic", "linux-headers-6.8.0-99-generic"),
                "dkms": dkms("nvidia-fs"),
            },
            f"install {MODULES}-6.8.0-100-generic: the modules come compiled",
        ),
        ({"packages": named("akmod-nvidia-open")}, "run 'akmods --force --kernels 6.8.0-100-generic'"),
        ({"packages": {}, "driver__runfile": {"version": "580.95.05"}}, "run the driver's .run file again"),
        (
            {"packages": named("nvidia-open-kmod", "nvidia-driver-cuda")},
            "install the package of its compiled modules",
        ),
        (
            {"packages": named("nvidia-open-driver-G06-signed-cuda-kmp-default")},
            "install the package of its compiled modules",
        ),
    ],
)
def test_advice_for_a_kernel_without_a_module_fits_where_modules_come_from(paths: dict[str, Any], advice: str) -> None:
    (found,) = [
        one
        for one in examine("n", DEFAULT, kernel__release="6.8.0-99-generic", kernel__modules=BOTH, **paths)
        if one.id == "kernel-without-module"
    ]
    assert advice in found.do and ("dkms autoinstall" in found.do) == (advice == BY_DKMS)


def test_packages_of_a_kernel_of_the_flavour_nvidia_are_no_modules_of_the_driver() -> None:
    old, new = "6.8.0-99-nvidia", "6.8.0-100-nvidia"
    packages = named(*(f"linux-{one}-{old}" for one in ("image", "headers", "modules", "tools")), f"{MODULES}-{old}")
    modules = {new: {"nvidia": False}, old: {"nvidia": True}}
    found = examine("n", DEFAULT, kernel__release=old, kernel__modules=modules, packages=packages)
    (advice,) = [one.do for one in found if one.id == "kernel-without-module"]
    assert f"install {MODULES}-{new}: the" in advice


def test_packages_without_dkms_build_nothing_here() -> None:
    packages = named("nvidia-headless-no-dkms-580-server-open")
    found = examine("n", DEFAULT, **NO_DRIVER, secure_boot=True, packages=packages)
    assert [one.severity for one in found if one.id == "secure-boot"] == [WARNING]


# Checks whose cases are in test_preflight.py: they need no healthy node.
OTHERS = {"distribution", "architecture", "no-gpu", "unknown-cards", "device-list", "small-card", "memory-limit"}


def test_every_check_has_a_case_and_a_meaning() -> None:
    assert {case[0] for case in CASES} | OTHERS == set(machines.CHECKS)
    assert all(meaning.endswith(".") for meaning in machines.described().values())


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        *((options, {}) for options in (DEFAULT, EXTERNAL, DRAIN, REBOOT)),
        # A container reads its host's modules.
        (DEFAULT, {"kernel__installed": [], "nouveau__loaded": True, "nouveau__refcnt": 3}),
        (DEFAULT, {"kernel__installed": [], "devices__uvm": False}),
        # The role unloads a nouveau that nothing uses.
        (DEFAULT, {"nouveau__loaded": True, "nouveau__refcnt": 0}),
        # No image has to be rebuilt.
        (DEFAULT, {"nouveau__boot_free": 60 << 20}),
        # Cards of a virtual machine.
        (DEFAULT, {"gpus": [CARD, {**CARD, "address": "0000:09:00.0", "driver": "vfio-pci"}]}),
        (DEFAULT, {"gpus": [CARD, {**CARD, "address": "0000:09:00.0", "driver": "nvgrace_gpu_vfio_pci"}]}),
        (EXTERNAL, {"toolkit__operator": True}),
        # Mode auto is jit-cdi from 1.18 on; the role installs such a one; and cgroupfs isn't systemd's.
        (EXTERNAL, {"toolkit__version": "1.18.0"}),
        (DEFAULT, {"toolkit__version": "1.14.6"}),
        (EXTERNAL, {"toolkit__version": "1.14.6", "kubelet__cgroup_driver": "cgroupfs"}),
        (EXTERNAL, {"toolkit__version": "1.14.6", "devices__char_links": True}),
        (EXTERNAL, {"toolkit__version": "1.14.6", "toolkit__config": {"mode": "cdi", "text": ""}}),
        # A driver that runs under Secure Boot is signed with a key that is enrolled.
        (DEFAULT, {"secure_boot": True}),
        (DEFAULT, {"log__xids": [{"address": "0000:01:00.0", "code": 13}]}),
        # MIG turns the links between cards off.
        (DEFAULT, {"driver__cards": [{"address": CARD["address"], "fabric": "in progress", "mig": True}]}),
        # The boot loader takes 6.1.0-10; an old kernel needs no module.
        (
            DEFAULT,
            {
                "kernel__release": "6.1.0-10",
                "kernel__modules": {"6.1.0-10": {"nvidia": True}, "6.1.0-9": {"nvidia": False}},
            },
        ),
        (
            DEFAULT,
            {
                "services": {"nvidia-fabricmanager": {"active": False}},
                "nvswitches": [],
                "driver__fabric": {"needed": False},
            },
        ),
    ],
)
def test_no_finding(options: NodeOptions, paths: dict[str, Any]) -> None:
    assert examine("n", options, **paths) == []
