# SPDX-License-Identifier: GPL-3.0-or-later
"""Each way in which a node breaks: one change of a healthy observation that exactly this check finds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _node_failures as failures
from ansible_collections.kubegpu.share.plugins.module_utils._findings import NOTE, PROBLEM, WARNING
from ansible_collections.kubegpu.share.plugins.module_utils._node_failures import NodeWish

VERSION = "580.95.05"
CARD = {
    "address": "0000:01:00.0",
    "driver": "nvidia",
    "link": {"speed": "16.0 GT/s PCIe", "width": "16", "max_speed": "16.0 GT/s PCIe", "max_width": "16"},
}
CONFIGURATION = "/etc/modprobe.d/blacklist-nouveau.conf"
BLACKLIST = "blacklist nouveau\noptions nouveau modeset=0\n"
IMAGE = {
    "path": "/boot/initrd.img-6.1",
    "release": "6.1",
    "bytes": 50 << 20,
    "newer": True,
    "nouveau": False,
    "blacklist": True,
}
HEALTHY: dict[str, Any] = {
    "distribution": {"family": "debian"},
    "kernel": {
        "release": "6.1",
        "installed": ["6.0", "6.1"],
        "headers": True,
        "compiler": {"kernel": "12.2.0", "gcc": "12.2.0"},
        "modules": {"6.0": {"headers": False, "nvidia": False}, "6.1": {"headers": True, "nvidia": True}},
    },
    "secure_boot": False,
    "mok": {"key": "", "enrolled": None, "pending": None},
    "security": {"selinux": "", "apparmor": True},
    "services": {
        "nvidia-fabricmanager": {"active": True, "enabled": True},
        "unattended-upgrades": {"active": True, "enabled": True},
    },
    "gpus": [CARD],
    "nvswitches": [{"address": "0000:02:00.0"}],
    "nouveau": {
        "loaded": False,
        "refcnt": None,
        "tool": "initramfs-tools",
        "files": {CONFIGURATION: BLACKLIST},
        "images": [IMAGE],
        "boot_free": 1 << 30,
    },
    "driver": {
        "module_version": VERSION,
        "library_version": VERSION,
        "code": 0,
        "error": None,
        "others": [],
        "cards": [{"address": CARD["address"], "persistence": True}],
        "fabric": {"version": VERSION, "needed": True},
    },
    "toolkit": {"packages": {"a": "1.20.1-1", "b": "1.20.1-1"}, "operator": False, "config": {"text": 'mode = "auto"'}},
    "sources_stale": [],
    "cdi": {"stale": False, "driver_version": VERSION},
    "devices": {"uvm": True, "char_links": False},
    "log": {"xids": [], "key_rejected": False, "unsupported_by_open": False},
    "packages": {"nvidia-driver-cuda": {"version": "580.95.05-1", "held": True, "origin": "NVIDIA"}},
    "kubelet": {"cgroup_driver": "systemd", "runtime": "containerd"},
}
EXTERNAL = NodeWish(driver_state="external", toolkit_state="external")
DRAIN, REBOOT = NodeWish(maintenance="drain"), NodeWish(maintenance="reboot")


def changed(**paths: Any) -> dict[str, Any]:
    """The healthy node with other values; ``a__b`` names ``a.b``."""
    seen = copy.deepcopy(HEALTHY)
    for path, value in paths.items():
        *folders, last = path.split("__")
        at = seen
        for folder in folders:
            at = at[folder]
        at[last] = value
    return seen


NO_DRIVER = {"driver__module_version": None, "driver__library_version": "", "driver__cards": [], "nvswitches": []}
NO_MODULES = {"kernel__modules": {}}
# id, severity, what the user asked for, what is otherwise, words of the finding.
CASES: list[tuple[str, str, NodeWish, dict[str, Any], str]] = [
    ("nouveau-in-use", WARNING, NodeWish(), {"nouveau__loaded": True, "nouveau__refcnt": 2}, "set gpu_maintenance"),
    ("nouveau-in-use", NOTE, REBOOT, {"nouveau__loaded": True, "nouveau__refcnt": 2}, "emptied and rebooted"),
    (
        "nouveau-in-use",
        WARNING,
        NodeWish(),
        {**NO_DRIVER, "nouveau__loaded": True, "nouveau__refcnt": 0, "gpus": [{**CARD, "driver": "nouveau"}]},
        "and has 0000:01:00.0",
    ),
    (
        "nouveau-in-initramfs",
        NOTE,
        NodeWish(),
        {"nouveau__images": [{**IMAGE, "nouveau": True, "blacklist": False}]},
        "/boot/initrd.img-6.1 with nouveau",
    ),
    (
        "boot-full",
        PROBLEM,
        NodeWish(),
        {"nouveau__boot_free": 60 << 20, "nouveau__images": [{**IMAGE, "newer": False}]},
        "/boot has 60 MiB free and making",
    ),
    (
        "boot-full",
        PROBLEM,
        NodeWish(),
        {"nouveau__boot_read_only": True, "nouveau__images": [{**IMAGE, "newer": False}]},
        "is mounted read-only",
    ),
    (
        "kernel-without-module",
        WARNING,
        NodeWish(),
        {"kernel__modules": {"6.1": {"nvidia": True}, "6.2": {"nvidia": False}}},
        "for kernel 6.2, and would have no GPU",
    ),
    (
        "kernel-without-module",
        WARNING,
        NodeWish(),
        {"kernel__modules": {"6.1": {"nvidia": False}, "6.2": {"nvidia": True}}},
        "for kernel 6.1",
    ),
    ("headers-missing", NOTE, NodeWish(), {**NO_DRIVER, "kernel__headers": False}, "running kernel 6.1"),
    (
        "compiler-mismatch",
        WARNING,
        NodeWish(),
        {"kernel__compiler": {"kernel": "13.2.0", "gcc": "12.2.0"}},
        "gcc 12.2.0",
    ),
    ("secure-boot", WARNING, NodeWish(), {**NO_DRIVER, "secure_boot": True}, "mokutil --import /var/lib/dkms/mok.pub"),
    (
        "secure-boot",
        PROBLEM,
        NodeWish(),
        {**NO_DRIVER, "secure_boot": True, "packages": {"nvidia-kernel-open-dkms": {"held": True}}},
        "no enrolled key",
    ),
    (
        "secure-boot",
        PROBLEM,
        NodeWish(),
        {**NO_DRIVER, "secure_boot": True, "mok": {"key": "k", "enrolled": False, "pending": True}},
        "waits for the next boot",
    ),
    ("driver-mismatch", PROBLEM, NodeWish(), {"driver__library_version": "580.105.08"}, "library 580.105.08"),
    ("driver-mismatch", WARNING, DRAIN, {"driver__library_version": "580.105.08"}, "will be emptied"),
    ("driver-mismatch", PROBLEM, EXTERNAL, {"driver__code": 18, "driver__error": "mismatch"}, "reboot it yourself"),
    ("driver-fails", WARNING, NodeWish(), {"driver__code": 999, "driver__error": "Unknown Error"}, "Unknown Error"),
    ("driver-fails", PROBLEM, EXTERNAL, {"driver__code": 999, "driver__error": "Unknown Error"}, "dmesg"),
    ("flavour", WARNING, NodeWish(), {"log__unsupported_by_open": True}, "driver_flavour: proprietary"),
    (
        "driver-held-by-nobody",
        WARNING,
        EXTERNAL,
        {"packages": {"nvidia-driver-cuda": {"held": False}}},
        "apt-mark hold nvidia-driver-cuda",
    ),
    (
        "fabric-manager",
        WARNING,
        NodeWish(),
        {"driver__fabric": {"version": "570.1"}},
        "fabric manager of version 570.1",
    ),
    ("fabric-manager", PROBLEM, EXTERNAL, {"driver__fabric": {"version": ""}}, "no fabric manager"),
    (
        "fabric-manager",
        PROBLEM,
        EXTERNAL,
        {"services": {"nvidia-fabricmanager": {"active": False}}},
        "that does not run",
    ),
    (
        "persistence-off",
        NOTE,
        EXTERNAL,
        {"driver__cards": [{"address": CARD["address"], "persistence": False}]},
        "off on 1 card",
    ),
    ("device-nodes", WARNING, NodeWish(), {"devices__uvm": False}, "nvidia-modprobe -u -c 0"),
    (
        "card-lost",
        WARNING,
        NodeWish(),
        {"log__xids": [{"address": "0000:01:00.0", "code": 79}]},
        "(Xid) of 0000:01:00.0",
    ),
    ("card-lost", PROBLEM, NodeWish(), {"gpus": [CARD, {**CARD, "address": "0000:03:00.0"}]}, "2 NVIDIA cards on PCI"),
    (
        "link-degraded",
        WARNING,
        NodeWish(),
        {"gpus": [{**CARD, "link": {"width": "8", "max_width": "16"}}]},
        "8 of 16 lanes",
    ),
    ("toolkit-skew", NOTE, NodeWish(), {"toolkit__packages": {"a": "1.20.1-1", "b": "1.19.0-1"}}, "a 1.20.1-1, b 1.19"),
    ("toolkit-skew", WARNING, EXTERNAL, {"toolkit__packages": {"a": "1.20.1-1", "b": "1.19.0-1"}}, "install all four"),
    (
        "stale-sources",
        NOTE,
        NodeWish(),
        {"sources_stale": [{"file": "/etc/apt/x.list", "text": ""}]},
        "/etc/apt/x.list",
    ),
    (
        "legacy-mode",
        WARNING,
        NodeWish(),
        {"toolkit__config": {"text": '# x\nmode = "legacy"\n'}},
        "daemon-reload takes",
    ),
    (
        "cdi-stale",
        WARNING,
        NodeWish(),
        {"cdi": {"stale": True, "driver_version": "570.1"}},
        "of driver 570.1 and runs 580",
    ),
    ("toolkit-gpu-operator", PROBLEM, NodeWish(), {"toolkit__operator": True}, "toolkit.enabled=false"),
    ("mandatory-access", NOTE, NodeWish(), {"security__selinux": "enforcing"}, "container_use_devices"),
]


def test_a_healthy_node_has_none() -> None:
    for wish in (NodeWish(), EXTERNAL, DRAIN, REBOOT):
        assert failures.examine(HEALTHY, wish, "n") == []


def test_a_node_that_nothing_is_known_of_has_none() -> None:
    assert failures.examine({}, NodeWish(), "n") == []


@pytest.mark.parametrize(("id", "severity", "wish", "paths", "words"), CASES)
def test_each_failure_is_found_and_no_other(
    id: str, severity: str, wish: NodeWish, paths: dict[str, Any], words: str
) -> None:
    found = failures.examine(changed(**paths), wish, "gpu7")
    assert [(one.id, one.severity, one.host) for one in found] == [(id, severity, "gpu7")]
    assert words in found[0].sentence
    assert found[0].found.startswith("host gpu7 has ") or found[0].found.startswith("host gpu7 ")
    assert found[0].do and "\n" not in found[0].sentence


def test_every_check_has_a_case_and_a_meaning() -> None:
    assert {case[0] for case in CASES} == set(failures.CHECKS)
    assert all(meaning.endswith(".") for _id, meaning in failures.described())


@pytest.mark.parametrize(
    ("wish", "paths"),
    [
        # A container sees its host's modules.
        (NodeWish(), {"kernel__installed": [], "nouveau__loaded": True, "nouveau__refcnt": 3}),
        (NodeWish(), {"kernel__installed": [], "devices__uvm": False}),
        # nouveau that nobody uses is unloaded by the role.
        (NodeWish(), {"nouveau__loaded": True, "nouveau__refcnt": 0}),
        # No image has to be made anew.
        (NodeWish(), {"nouveau__boot_free": 60 << 20}),
        # Somebody else's cards.
        (NodeWish(), {"gpus": [CARD, {**CARD, "address": "0000:09:00.0", "driver": "vfio-pci"}]}),
        (EXTERNAL, {"toolkit__operator": True}),
        # A driver that runs under Secure Boot is signed with a key that is enrolled.
        (NodeWish(), {"secure_boot": True}),
        (NodeWish(), {"log__xids": [{"address": "0000:01:00.0", "code": 13}]}),
        (NodeWish(), {"services": {"nvidia-fabricmanager": {"active": False}}, "nvswitches": []}),
    ],
)
def test_what_is_no_failure(wish: NodeWish, paths: dict[str, Any]) -> None:
    assert failures.examine(changed(**paths), wish, "n") == []
