# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts of a machine: distribution, kernel, services. Each function returns one section of ``gpu_node``."""

from __future__ import annotations

import re
import shlex
import sys

from .cached_reader import names, text
from .system import System, target
from .types import Cgroup, Distribution, Kernel, PythonInterpreter, Service

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# By ID, then by the words of ID_LIKE. A family shares its package manager and boot configuration.
FAMILIES = {
    "debian": "debian",
    "ubuntu": "debian",
    "rhel": "redhat",
    "fedora": "redhat",
    "centos": "redhat",
    "rocky": "redhat",
    "almalinux": "redhat",
    "ol": "redhat",
    "amzn": "redhat",
    "suse": "suse",
    "sles": "suse",
    "sled": "suse",
    "sle-micro": "suse",
    "opensuse": "suse",
}
# vmlinuz on most distributions, Image on SUSE for arm64.
KERNELS = re.compile(r"(?:vmlinuz|Image)-(\d.*)")
# Rescue kernels of Red Hat's family and backups of dpkg are not booted.
NO_KERNEL = re.compile(r"0-rescue-|.*\.(?:dpkg-\w+|old|bak|hmac|efi\.signed)$")
# Debian names the module nvidia-current, nvidia-tesla-470 and the like; the related modules are no driver alone.
MODULE = re.compile(r"(?:^|/)(nvidia(?:-(?:current|legacy|tesla)[\w.-]*?)?)\.ko(?:\.(?:gz|xz|zst))?:", re.MULTILINE)
SIBLINGS = ("-modeset", "-drm", "-uvm", "-peermem")
# Debian's family (new and old path) and SUSE.
REBOOT = ("/run/reboot-required", "/var/run/reboot-required", "/run/reboot-needed")
SERVICES = (
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "docker.service",
    "containerd.service",
    "crio.service",
    "kubelet.service",
    "k3s.service",
    "k3s-agent.service",
    "rke2-server.service",
    "rke2-agent.service",
    "nvidia-cdi-refresh.path",
    "unattended-upgrades.service",
    "dnf-automatic.timer",
    "dnf-automatic-install.timer",
    "dnf5-automatic.timer",
)


def distribution(system: System) -> Distribution:
    """Return the distribution; the family of an unknown one is its own name."""
    fields = os_release(text(system, "/etc/os-release") or text(system, "/usr/lib/os-release"))
    name = fields.get("ID", "linux").lower()
    machine = system.run(["uname", "-m"]).out.strip()
    known = [FAMILIES[word] for word in [name, *fields.get("ID_LIKE", "").lower().split()] if word in FAMILIES]
    version = fields.get("VERSION_ID", "")
    major = re.match(r"\d+", version)
    return {
        "id": name,
        "name": fields.get("PRETTY_NAME", ""),
        "version": version,
        "major": int(major.group()) if major else 0,
        "codename": fields.get("VERSION_CODENAME", ""),
        "family": known[0] if known else name,
        "arch": ARCHITECTURES.get(machine, machine),
    }


def os_release(content: str) -> dict[str, str]:
    """Parse the assignments of an os-release file."""
    fields = {}
    for line in content.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            try:
                fields[name] = "".join(shlex.split(value))
            except ValueError:
                fields[name] = value
    return fields


def python() -> PythonInterpreter:
    """Return the Python that runs the module."""
    return {"version": ".".join(str(part) for part in sys.version_info[:3]), "executable": sys.executable or ""}


def kernel(system: System) -> Kernel:
    """Return the running kernel and the installed ones; a container has none installed."""
    release, installed = running(system), installed_kernels(system)
    return {
        "release": release,
        "installed": installed,
        "headers": headers(system, release),
        "compiler": {"kernel": compiled_by(text(system, "/proc/version")), "gcc": gcc(system)},
        "modules": {
            name: {"headers": headers(system, name), "nvidia": bool(driver_modules(system, name))} for name in installed
        },
        "command_line": text(system, "/proc/cmdline"),
    }


def running(system: System) -> str:
    """Return the release of the running kernel."""
    return text(system, "/proc/sys/kernel/osrelease")


def installed_kernels(system: System) -> list[str]:
    """Return the releases in /boot; none in a container."""
    matches = [KERNELS.fullmatch(name) for name in names(system, "/boot")]
    return [match.group(1) for match in matches if match and not NO_KERNEL.match(match.group(1))]


def headers(system: System, release: str) -> bool:
    """Return whether modules can be built for a kernel; Red Hat's family has the link even without headers."""
    return bool(release) and system.exists(target(system, f"/lib/modules/{release}/build") + "/Makefile")


def driver_modules(system: System, release: str) -> list[str]:
    """Return the names of NVIDIA's driver modules that modprobe finds for a kernel."""
    paths = MODULE.findall(text(system, f"/lib/modules/{release}/modules.dep")) if release else []
    return [name for name in paths if not name.endswith(SIBLINGS)]


def compiled_by(version: str) -> str:
    """Return the version of gcc in /proc/version, with which the kernel was compiled; empty for another compiler."""
    match = re.search(r"gcc version (\d[\d.]*)|gcc[\w.-]*(?: \([^)]*\))? (\d[\d.]*)", version)
    return (match.group(1) or match.group(2)).rstrip(".") if match else ""


def gcc(system: System) -> str:
    if not system.exists("/usr/bin/gcc"):
        return ""
    # gcc before release 7 understands only the second option; newer ones print the full version for the first.
    done = system.run(["/usr/bin/gcc", "-dumpfullversion", "-dumpversion"], timeout=10)
    return done.out.strip() if done.rc == 0 else ""


def reboot_required(system: System) -> bool:
    """Return whether the distribution requests a reboot."""
    return any(system.exists(path) for path in REBOOT)


def cgroup(system: System) -> Cgroup:
    """Return the version of control groups; 0 without any."""
    if system.exists("/sys/fs/cgroup/cgroup.controllers"):
        return {"version": 2}
    return {"version": 1 if system.exists("/sys/fs/cgroup/memory") else 0}


def services(system: System) -> dict[str, Service]:
    """Return the existing services, whether they run and whether they start at boot."""
    if not system.exists("/run/systemd/system"):
        return {}
    done = system.run(["systemctl", "show", "-p", "Id,LoadState,ActiveState,UnitFileState", *SERVICES], timeout=10)
    existing: dict[str, Service] = {}
    for block in done.out.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("LoadState") == "loaded":
            existing[fields.get("Id", "").removesuffix(".service")] = {
                "active": fields.get("ActiveState") == "active",
                "enabled": fields.get("UnitFileState") == "enabled",
            }
    return existing
