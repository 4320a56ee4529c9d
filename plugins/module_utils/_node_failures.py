# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The ways in which GPU nodes break, told from one observation. Pure.

Each check is a function over ``gpu_node`` (as ``gpu_node_info`` returns it) that returns what it found, or nothing. Its
docstring is its line in the documentation. What can't be known (an empty section) is no finding.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _nouveau as nouveau
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._findings import NOTE, PROBLEM, WARNING, Finding

Json = t.Mapping[str, t.Any]


@dataclasses.dataclass(frozen=True)
class NodeWish:
    """What the user asks of the nodes, by the roles' variables."""

    driver_state: str = "present"
    driver_source: str = "repository"
    driver_version: str = "580.95.05"
    driver_repo_url: str = ""
    toolkit_state: str = "present"
    toolkit_version: str = "1.20.1-1"
    maintenance: str = "never"

    def driver(self) -> dict[str, str]:
        """What is asked of the driver, as role driver names it."""
        prefix = "driver_"
        return {name[len(prefix) :]: value for name, value in vars(self).items() if name.startswith(prefix)}


@dataclasses.dataclass(frozen=True)
class Found:
    severity: str
    found: str
    do: str


Check = t.Callable[["Node"], t.Optional[Found]]


class Node:
    """An observation with what is asked for; ``get`` answers None for what wasn't looked at."""

    def __init__(self, seen: Json, wish: NodeWish) -> None:
        self.seen = seen
        self.wish = wish

    def get(self, path: str) -> t.Any:
        value: t.Any = self.seen
        for part in path.split("."):
            value = value.get(part) if isinstance(value, t.Mapping) else None
        return value

    def rows(self, path: str) -> list[t.Any]:
        return list(self.get(path) or [])

    @property
    def cards(self) -> list[Json]:
        """Cards on PCI that are this node's own; a virtual machine may have others."""
        return [card for card in self.rows("gpus") if card.get("driver") != "vfio-pci"]

    @property
    def installs_driver(self) -> bool:
        return self.wish.driver_state == "present"

    @property
    def own_kernel(self) -> bool:
        """A container has none of its own."""
        return bool(self.get("kernel.installed"))

    @property
    def module(self) -> str:
        """Version of the loaded kernel module."""
        return str(self.get("driver.module_version") or "")

    @property
    def built_here(self) -> bool:
        """The driver's module is, or will be, compiled on this node."""
        return any("dkms" in name for name in self.get("packages") or {} if "nvidia" in name)


CHECKS: dict[str, Check] = {}


def check(id: str) -> t.Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[id] = function
        return function

    return add


def examine(seen: Json, wish: NodeWish, host: str) -> list[Finding]:
    """Every failure that one node shows."""
    node = Node(seen, wish)
    found = []
    for id, function in CHECKS.items():
        one = function(node)
        if one is not None:
            found.append(Finding(id, one.severity, f"host {host} {one.found}", one.do, host))
    return found


def described() -> list[tuple[str, str]]:
    """Id and meaning of every check, for the documentation."""
    return [(id, " ".join((function.__doc__ or "").split())) for id, function in CHECKS.items()]


# --------------------------------------------------------------------------- nouveau, kernel, boot


@check("nouveau-in-use")
def _nouveau(node: Node) -> Found | None:
    """nouveau is loaded and in use, so that only a reboot frees the cards."""
    taken = [card["address"] for card in node.cards if card.get("driver") == "nouveau"]
    if not node.own_kernel or not node.get("nouveau.loaded") or not (taken or node.get("nouveau.refcnt")):
        return None
    which = f" and has {', '.join(taken)}" if taken else ""
    if node.wish.maintenance == "reboot":
        return Found(NOTE, f"has nouveau loaded{which}", "it will be emptied and rebooted, as gpu_maintenance allows")
    return Found(
        WARNING,
        f"has nouveau loaded{which}, and only a reboot may rid it of it",
        "set gpu_maintenance: reboot, or reboot it yourself after role nouveau has run",
    )


@check("nouveau-in-initramfs")
def _initramfs(node: Node) -> Found | None:
    """Our blacklist is there and an initramfs still lacks it, so that nouveau comes back with the next boot."""
    if not (node.get("nouveau.files") or {}).get("/etc/modprobe.d/blacklist-nouveau.conf"):
        return None
    bad = [one["path"] for one in node.rows("nouveau.images") if one.get("nouveau") and one.get("blacklist") is False]
    if not bad:
        return None
    return Found(NOTE, f"has {', '.join(bad)} with nouveau and without its blacklist", "role nouveau makes it anew")


@check("boot-full")
def _boot(node: Node) -> Found | None:
    """An initramfs has to be made anew, and /boot has no room for it or can't be written."""
    if not node.rows("nouveau.images") or not node.get("distribution.family"):
        return None
    try:
        nouveau.plan(True, dict(node.seen))
    except BadInput as error:
        found, _colon, todo = str(error).partition(": ")
        return Found(PROBLEM, f"can't have its initramfs made anew, because {found}", todo or "see role nouveau")
    return None


@check("kernel-without-module")
def _kernel_module(node: Node) -> Found | None:
    """A driver is installed, and the running or the newest kernel has no module of it (DKMS failed or wasn't run)."""
    modules = node.get("kernel.modules") or {}
    if not modules or not any(row.get("nvidia") for row in modules.values()):
        return None
    release = node.get("kernel.release")
    lacking = [name for name, row in modules.items() if not row.get("nvidia")]
    # Releases are listed as the boot loader would: the last one boots next.
    wanted = [name for name in lacking if name == release or name == list(modules)[-1]]
    if not wanted:
        return None
    return Found(
        WARNING,
        f"has no nvidia module for kernel {' and '.join(wanted)}, and would have no GPU when that runs",
        f"install its headers and run 'dkms autoinstall -k {wanted[-1]}'",
    )


@check("headers-missing")
def _headers(node: Node) -> Found | None:
    """The running kernel's headers aren't there and the module has to be built here."""
    if not node.own_kernel or node.get("kernel.headers") is not False or node.module or not node.installs_driver:
        return None
    return Found(
        NOTE,
        f"has no headers of its running kernel {node.get('kernel.release')}",
        "role driver installs them first, as driver_install_headers says",
    )


@check("compiler-mismatch")
def _compiler(node: Node) -> Found | None:
    """The kernel was built by another major version of gcc than is installed, with which its modules may not build."""
    kernel, gcc = str(node.get("kernel.compiler.kernel") or ""), str(node.get("kernel.compiler.gcc") or "")
    if not kernel or not gcc or kernel.partition(".")[0] == gcc.partition(".")[0] or not node.own_kernel:
        return None
    return Found(
        WARNING,
        f"has gcc {gcc} and a kernel that was built by gcc {kernel}",
        f"install gcc {kernel.partition('.')[0]} (Oracle's UEK: the gcc-toolset of that version) before the driver",
    )


@check("secure-boot")
def _secure_boot(node: Node) -> Found | None:
    """Secure Boot is on and the key that modules built here are signed with isn't enrolled."""
    if not node.get("secure_boot") or node.module or node.get("mok.enrolled"):
        return None
    key = node.get("mok.key")
    if node.get("mok.pending"):
        return Found(
            PROBLEM,
            "has Secure Boot on and a key whose enrolment waits for the next boot",
            "reboot it and confirm the key on its console",
        )
    return Found(
        PROBLEM if node.built_here or node.get("log.key_rejected") else WARNING,
        "has Secure Boot on and no enrolled key for modules that are built on it",
        "use signed modules (driver_source: distribution on Ubuntu), or run 'mokutil --import "
        + (str(key) if key else "/var/lib/dkms/mok.pub")
        + "', reboot it and confirm the key on its console",
    )


# --------------------------------------------------------------------------- driver


@check("driver-mismatch")
def _mismatch(node: Node) -> Found | None:
    """The loaded module and the driver's library are of different versions (upgraded and not reloaded)."""
    library = str(node.get("driver.library_version") or "")
    differs = node.module and library and library != node.module
    if not differs and node.get("driver.code") != 18:
        return None
    mends = node.installs_driver and node.wish.maintenance != "never"
    return Found(
        WARNING if mends or not node.own_kernel else PROBLEM,
        f"has the nvidia module {node.module or '?'} loaded and the driver's library {library or '?'}",
        "it will be emptied and its modules loaded anew"
        if mends
        else "set gpu_maintenance: drain (or reboot), or reboot it yourself",
    )


@check("driver-fails")
def _driver_fails(node: Node) -> Found | None:
    """nvidia-smi is there and fails, or doesn't answer in time."""
    error = node.get("driver.error")
    if not error or node.get("driver.code") == 18:
        return None
    return Found(
        PROBLEM if node.wish.driver_state == "external" else WARNING,
        f"has a driver that fails, nvidia-smi says: {error}",
        "look at 'dmesg | grep NVRM'; a card that fell off the bus needs a reboot or a repair",
    )


@check("flavour")
def _flavour(node: Node) -> Found | None:
    """The kernel says that the open module doesn't support a card of this node."""
    if not node.get("log.unsupported_by_open"):
        return None
    return Found(
        WARNING,
        "has a card that the open kernel module doesn't support, as its kernel says",
        "set driver_flavour: proprietary and a driver_version of branch 580 or older for cards before Turing",
    )


@check("driver-held-by-nobody")
def _unheld(node: Node) -> Found | None:
    """The driver isn't ours and unattended upgrades may tear its library from its module."""
    if node.installs_driver or not (node.get("services.unattended-upgrades.enabled")):
        return None
    loose = [name for name, row in (node.get("packages") or {}).items() if "nvidia" in name and not row.get("held")]
    if not loose:
        return None
    return Found(
        WARNING,
        f"upgrades by itself and holds back none of {', '.join(sorted(loose)[:3])}" + (" …" if len(loose) > 3 else ""),
        f"run 'apt-mark hold {' '.join(sorted(loose)[:3])}'" + (" …" if len(loose) > 3 else ""),
    )


@check("fabric-manager")
def _fabric(node: Node) -> Found | None:
    """NVSwitches are there and the fabric manager doesn't run, or isn't of the driver's version."""
    if not node.rows("nvswitches") or not node.module:
        return None
    version = str(node.get("driver.fabric.version") or "")
    active = node.get("services.nvidia-fabricmanager.active")
    if active and version == node.module:
        return None
    what = f"a fabric manager of version {version}" if version else "no fabric manager"
    return Found(
        WARNING if node.installs_driver else PROBLEM,
        f"has NVSwitches, driver {node.module} and {what}{'' if active or not version else ' that does not run'}",
        "role driver installs it at the driver's version"
        if node.installs_driver
        else f"install nvidia-fabricmanager of exactly {node.module} and start it",
    )


@check("persistence-off")
def _persistence(node: Node) -> Found | None:
    """Persistence is off: the driver unloads its state between uses, slowly and with settings lost."""
    off = [row for row in node.rows("driver.cards") if row.get("persistence") is False]
    if not off or node.installs_driver:
        return None
    return Found(
        NOTE,
        f"has persistence off on {len(off)} card{'s' if len(off) > 1 else ''}",
        "run 'systemctl enable --now nvidia-persistenced'",
    )


@check("device-nodes")
def _device_nodes(node: Node) -> Found | None:
    """The driver shows cards and /dev/nvidia-uvm isn't there, without which CUDA doesn't start."""
    if not node.own_kernel or not node.rows("driver.cards") or node.get("devices.uvm") is not False:
        return None
    return Found(
        WARNING,
        "shows cards and has no /dev/nvidia-uvm",
        "run 'nvidia-modprobe -u -c 0', or start nvidia-persistenced at boot",
    )


@check("card-lost")
def _lost(node: Node) -> Found | None:
    """A card fell off the bus (Xid 79), needs a reset, or is missing from what the driver lists."""
    lost = sorted({row["address"] for row in node.rows("log.xids") if row.get("code") in (48, 74, 79, 95, 119, 120)})
    listed, there = len(node.rows("driver.cards")), len(node.cards)
    if lost:
        return Found(
            WARNING,
            f"has reported fatal errors (Xid) of {', '.join(lost)} since it was booted",
            "empty it, reboot it, and have the card looked at if they come again",
        )
    if node.module and listed and listed != there:
        return Found(
            PROBLEM,
            f"has {there} NVIDIA cards on PCI and its driver lists {listed}",
            "look at 'dmesg | grep NVRM' for the card that is missing",
        )
    return None


@check("link-degraded")
def _link(node: Node) -> Found | None:
    """A card runs on fewer PCIe lanes than it has."""
    slow = [
        f"{card['address']} ({card['link']['width']} of {card['link']['max_width']} lanes)"
        for card in node.cards
        if (card.get("link") or {}).get("width")
        and (card["link"].get("max_width") or card["link"]["width"]) != card["link"]["width"]
    ]
    if not slow:
        return None
    return Found(WARNING, f"has cards on a narrow PCIe link: {', '.join(slow)}", "reseat the card, or ask its maker")


# --------------------------------------------------------------------------- toolkit, runtime, cluster


@check("toolkit-skew")
def _skew(node: Node) -> Found | None:
    """The toolkit's packages are of different versions."""
    versions = {name: row for name, row in (node.get("toolkit.packages") or {}).items() if row}
    if len(set(versions.values())) < 2:
        return None
    return Found(
        NOTE if node.wish.toolkit_state == "present" else WARNING,
        "has " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
        "role toolkit brings them to one version"
        if node.wish.toolkit_state == "present"
        else "install all four at one version",
    )


@check("stale-sources")
def _stale_sources(node: Node) -> Found | None:
    """Lists of the retired nvidia-docker repositories are there, beside which apt refuses a new one (Signed-By)."""
    files = [row["file"] for row in node.rows("sources_stale")]
    if not files:
        return None
    return Found(
        NOTE if node.wish.toolkit_state == "present" else WARNING,
        f"has {', '.join(files)} of NVIDIA's container repositories",
        "role toolkit takes them away" if node.wish.toolkit_state == "present" else "remove them",
    )


@check("legacy-mode")
def _legacy_mode(node: Node) -> Found | None:
    """Legacy hook, systemd cgroups and no /dev/char links: a daemon-reload takes the GPUs from running containers."""
    text = str(node.get("toolkit.config.text") or "")
    mode = re.search(r'(?m)^\s*mode\s*=\s*"([^"]*)"', text)
    if not mode or mode.group(1) != "legacy" or node.get("kubelet.cgroup_driver") != "systemd":
        return None
    if node.get("devices.char_links"):
        return None
    return Found(
        WARNING,
        "has NVIDIA's runtime in mode \"legacy\" with systemd's cgroups, where a daemon-reload takes the GPUs from "
        "running containers (NVML: Unknown Error)",
        'set mode = "auto" in /etc/nvidia-container-runtime/config.toml, or run '
        "'nvidia-ctk system create-dev-char-symlinks --create-all' at boot",
    )


@check("cdi-stale")
def _cdi(node: Node) -> Found | None:
    """A CDI specification names libraries of another driver version than is loaded."""
    if not node.get("cdi.stale"):
        return None
    return Found(
        WARNING,
        f"has a CDI specification of driver {node.get('cdi.driver_version')} and runs {node.module}",
        "run 'nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml', or start nvidia-cdi-refresh",
    )


@check("toolkit-gpu-operator")
def _operator(node: Node) -> Found | None:
    """NVIDIA's GPU operator manages the toolkit of this node."""
    if not node.get("toolkit.operator") or node.wish.toolkit_state != "present":
        return None
    return Found(
        PROBLEM,
        "has its toolkit from NVIDIA's GPU operator",
        "switch that part of the operator off (toolkit.enabled=false), or take the node out of gpu_nodes",
    )


@check("mandatory-access")
def _selinux(node: Node) -> Found | None:
    """SELinux enforces, and containers may not open the cards' device files without its policy."""
    if node.get("security.selinux") != "enforcing":
        return None
    if "nvidia-container-selinux" in (node.get("packages") or {}):
        return None
    return Found(
        NOTE,
        "has SELinux enforcing",
        "where containers get 'Insufficient Permissions', look at 'ausearch -m avc' and allow "
        "container_use_devices ('setsebool -P container_use_devices on')",
    )
