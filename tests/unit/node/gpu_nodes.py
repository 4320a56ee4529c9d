# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole ``gpu_node`` facts for tests: a healthy node, and changes of it."""

from __future__ import annotations

import copy
from typing import Any

VERSION = "580.95.05"
CARD: dict[str, Any] = {
    "address": "0000:01:00.0",
    "driver": "nvidia",
    "vgpu": False,
    "link": {"speed": "16.0 GT/s PCIe", "width": "16", "max_speed": "16.0 GT/s PCIe", "max_width": "16"},
}
# What a card has beside the fields that a test gives it.
MODES: dict[str, Any] = {"name": "NVIDIA L4", "unified": False, "persistence": None, "mig": None, "fabric": None}
FABRIC: dict[str, Any] = {"version": "", "needed": False, "nvlink5": False, "unloaded": [], "missing": []}
NOTHING_EXCLUDED: dict[str, Any] = {"cards": [], "unmatched": [], "unnamed": False}
BLACKLIST = "/etc/modprobe.d/blacklist-nouveau.conf"
IMAGE: dict[str, Any] = {
    "path": "/boot/initrd.img-6.1",
    "release": "6.1",
    "bytes": 50 << 20,
    "newer": True,
    "nouveau": False,
    "blacklist": True,
}
HEALTHY: dict[str, Any] = {
    "distribution": {"id": "debian", "name": "Debian 12", "version": "12", "family": "debian", "arch": "amd64"},
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
    "integrated": "",
    "nouveau": {
        "loaded": False,
        "refcnt": None,
        "nova": {"modules": [], "in_use": False, "built_in": False},
        "tool": "initramfs-tools",
        "files": {
            BLACKLIST: "blacklist nouveau\noptions nouveau modeset=0\n"
            "blacklist nova\nblacklist nova_drm\nblacklist nova_core\n"
        },
        "dracut": None,
        "images": [IMAGE],
        "leftovers": [],
        "boot_free": 1 << 30,
        "boot_read_only": False,
    },
    "driver": {
        "version": VERSION,
        "module_version": VERSION,
        "library_version": VERSION,
        "code": 0,
        "error": None,
        "others": [],
        "root": "/",
        "cards": [
            {
                "index": 0,
                "uuid": "GPU-aaaaaaaa",
                "address": CARD["address"],
                "minor": 0,
                "memory_mib": 16384,
                **MODES,
                "persistence": True,
            }
        ],
        "fabric": {**FABRIC, "version": VERSION, "needed": True},
        "excluded": NOTHING_EXCLUDED,
        "licences": [],
        "runfile": None,
    },
    "toolkit": {
        "version": "1.20.1",
        "packages": {"a": "1.20.1-1", "b": "1.20.1-1"},
        "operator": False,
        "config": {"mode": "auto", "text": 'mode = "auto"'},
    },
    "package_lists": None,
    "sources_stale": [],
    "cdi": {"stale": False, "driver_version": VERSION},
    "cgroup": {"version": 2},
    "devices": {"uvm": True, "char_links": False},
    "log": {"xids": [], "key_rejected": False, "unsupported_by_open": False},
    "dkms": [],
    "apt": None,
    "rpm": None,
    "packages": {"nvidia-driver-cuda": {"version": "580.95.05-1", "held": True, "origin": "NVIDIA"}},
    "runtimes": {"containerd": None, "docker": None, "crio": None, "k3s": None, "rke2": None},
    "kubelet": {"version": "1.36.3", "cgroup_driver": "systemd", "runtime": "containerd"},
}


def gpu_node(**paths: Any) -> dict[str, Any]:
    """Return the healthy node with other values; ``a__b`` names ``a.b``."""
    node = copy.deepcopy(HEALTHY)
    for path, value in paths.items():
        *folders, last = path.split("__")
        at = node
        for folder in folders:
            at = at[folder]
        at[last] = value
    node["driver"]["cards"] = [{**MODES, **card} for card in node["driver"]["cards"]]
    node["driver"]["fabric"] = {**FABRIC, **node["driver"]["fabric"]}
    return node
