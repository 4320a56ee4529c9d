# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What a machine is: distribution, kernel, boot, services. Every function is one section, as plain JSON."""

from __future__ import annotations

import shlex
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# By ID, then by the words of ID_LIKE: what packages a distribution uses and how it boots.
FAMILIES = {
    "debian": "debian",
    "ubuntu": "debian",
    "rhel": "redhat",
    "fedora": "redhat",
    "centos": "redhat",
    "amzn": "redhat",
    "suse": "suse",
    "sles": "suse",
    "opensuse": "suse",
}
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
SERVICES = ("nvidia-persistenced.service", "nvidia-fabricmanager.service")


def distribution(system: System) -> Json:
    """Who made the system; an unknown family is the distribution's own name."""
    fields = os_release(system.read("/etc/os-release") or system.read("/usr/lib/os-release") or "")
    name = fields.get("ID", "linux")
    machine = system.run(["uname", "-m"]).out.strip()
    known = [FAMILIES[word] for word in [name, *fields.get("ID_LIKE", "").split()] if word in FAMILIES]
    return {
        "id": name,
        "version": fields.get("VERSION_ID", ""),
        "codename": fields.get("VERSION_CODENAME", ""),
        "family": known[0] if known else name,
        "arch": ARCHITECTURES.get(machine, machine),
    }


def os_release(text: str) -> dict[str, str]:
    """The assignments of an os-release file."""
    fields = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            try:
                fields[name] = "".join(shlex.split(value))
            except ValueError:
                fields[name] = value
    return fields


def kernel(system: System) -> Json:
    """The running kernel, and those that this machine boots: a container has none of its own."""
    release = (system.read("/proc/sys/kernel/osrelease") or "").strip()
    prefix = "vmlinuz-"
    return {
        "release": release,
        "installed": [name[len(prefix) :] for name in system.names("/boot") if name.startswith(prefix)],
        "headers": system.exists(f"/lib/modules/{release}/build"),
    }


def reboot_required(system: System) -> bool:
    """The distribution asks for a reboot."""
    return system.exists("/run/reboot-required") or system.exists("/var/run/reboot-required")


def secure_boot(system: System) -> bool | None:
    """Whether firmware checks signatures; None on a machine without UEFI."""
    variable = system.read(SECURE_BOOT)
    return None if not variable else variable[-1] == "\x01"


def services(system: System) -> Json:
    """Which of NVIDIA's services there are, whether they run and whether they start at boot."""
    if not system.exists("/run/systemd/system"):
        return {}
    done = system.run(["systemctl", "show", "-p", "Id,LoadState,ActiveState,UnitFileState", *SERVICES], timeout=10)
    found = {}
    for block in done.out.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("LoadState") == "loaded":
            name = fields["Id"].rpartition(".")[0]
            found[name] = {
                "active": fields.get("ActiveState") == "active",
                "enabled": fields.get("UnitFileState") == "enabled",
            }
    return found
