# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the sections ``driver``, ``dkms`` and ``log``: what is loaded, what is installed, and by which source."""

from __future__ import annotations

import re
import typing as t

from .._contracts.card_exclusion import NOTHING, Exclusion
from .._host.cached_reader import names, text
from .._host.iommu import PCI
from .._host.system import System, target
from .._host.systemd import command_line
from .._host.types import Excluded, ExcludedCard, NvSwitch, Package, PciGpu
from . import nvidia_smi as smi
from . import runfile
from .library import MODULE, PROC, card_information, library_version, loaded_version
from .types import FABRIC_MODULES, Card, DkmsModule, Fabric, InstalledDriver, KernelLog, ModuleFile

PID_FILE = "/run/nvidia-persistenced/nvidia-persistenced.pid"
# As in Ubuntu's unit: the daemon leaves the mode of the cards off.
DISABLING = "--no-persistence-mode"

UNITS = "/etc/systemd/system"
FOLDER = f"{UNITS}/nvidia-persistenced.service.d"
DROP_IN = f"{FOLDER}/kubegpu.conf"
UNIT = f"{UNITS}/nvidia-persistenced.service"
WANTED = f"{UNITS}/multi-user.target.wants/nvidia-persistenced.service"
MARK = "# Written by kubegpu.share"


def enables(system: System) -> bool | None:
    """Return whether the running daemon enables persistence mode; None where none runs."""
    pid = (system.read(PID_FILE) or "").strip()
    arguments = command_line(system, int(pid)) if pid.isdigit() else ()
    # After a crash another process may have the daemon's number.
    if not arguments or not arguments[0].endswith("nvidia-persistenced"):
        return None
    return DISABLING not in arguments


def masked(system: System) -> bool:
    """Return whether the machine's administrator has masked the daemon's unit."""
    return system.link(UNIT) == "/dev/null"


def own_files(system: System) -> list[str]:
    """Return the paths of the role's unit and drop-in of the daemon, in the order in which they are removed.

    A unit or a drop-in of others stays. What identifies the role's comes last, so that a killed removal is continued.
    """
    drop_in = system.exists(DROP_IN)
    unit = (system.read(UNIT) or "").startswith(MARK)
    # A directory without other files is the role's, too.
    alone = drop_in and system.names(FOLDER) == [DROP_IN.rpartition("/")[2]]
    return [
        *([WANTED] if (drop_in or unit) and system.exists(WANTED) else []),
        *([UNIT] if unit else []),
        *([FOLDER if alone else DROP_IN] if drop_in else []),
    ]


TREE = "/var/lib/dkms"
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
# A module that Secure Boot or lockdown rejected.
REJECTED = re.compile(
    r"Key was rejected by service"
    r"|Loading of (?:unsigned module|module with unavailable key) is rejected"
    r"|unsigned module loading is restricted"
)
# The message spans lines, each with its own prefix.
UNSUPPORTED = re.compile(r"not supported by (?:the )?(?:NVIDIA )?open\b")
REQUIRED = re.compile(r"requires use of (?:the )?NVIDIA open kernel modules")


def dkms(system: System) -> list[DkmsModule]:
    """Return dkms' modules by its own tree: the command is a shell script that takes a second for a few kernels."""
    rows: list[DkmsModule] = []
    for module in names(system, TREE):
        folder = f"{TREE}/{module}"
        for version in names(system, folder):
            if system.exists(f"{folder}/{version}/source"):
                states = _states(system, folder, version)
                rows += [
                    {"module": module, "version": version, "kernel": release, "state": state}
                    for release, state in sorted(states.items())
                ] or [{"module": module, "version": version, "kernel": "", "state": "added"}]
    return rows


def _states(system: System, folder: str, version: str) -> dict[str, str]:
    """Return the state of a module for each kernel."""
    by_kernel = {}
    for release in names(system, f"{folder}/{version}"):
        if release not in ("source", "build") and any(
            system.exists(f"{folder}/{version}/{release}/{arch}/module")
            for arch in names(system, f"{folder}/{version}/{release}")
        ):
            by_kernel[release] = "built"
    for name in names(system, folder):
        # kernel-<release>-<arch> links to <version>/<release it was built for>/<arch>.
        path = target(system, f"{folder}/{name}").split("/") if name.startswith("kernel-") else []
        if path[-3:-2] == [version]:
            release = name[len("kernel-") : -len("-" + path[-1])]
            by_kernel[release] = "installed" if path[-2] == release else "installed-weak"
    return by_kernel


def log(system: System, interesting: bool) -> KernelLog:
    """Return the driver's errors in the kernel's log since boot.

    :param interesting: there is a card or a driver; otherwise the log isn't read.
    """
    out = system.run(["dmesg"], timeout=10).out if interesting else ""
    return {
        "xids": [{"address": address, "code": code} for address, code in dict.fromkeys(xids(out))],
        "key_rejected": bool(REJECTED.search(out)),
        "unsupported_by_open": bool(UNSUPPORTED.search(out)),
        "requires_open": bool(REQUIRED.search(out)),
    }


def xids(out: str) -> t.Iterator[tuple[str, int]]:
    """Yield address and code of each Xid; the driver leaves out the address' function."""
    for address, code in XID.findall(out):
        yield (address if "." in address else f"{address}.0").lower(), int(code)


FABRIC_MANAGER = "/usr/bin/nv-fabricmanager"
INFINIBAND = "/sys/class/infiniband"
# NVIDIA's former Mellanox: an HGX board's NVSwitches are managed through such devices.
MELLANOX = "0x15b3"
SWITCH_MANAGER = "SW_MNG"
# Cards of boards whose NVSwitches aren't on PCI (NVLink 5), by their PCI device ids: B200 and B300 as SXM6 modules.
# Those of GB200 and GB300 (0x2941, 0x31c2) have their switches in other machines of the rack, whose own fabric manager
# serves them. https://pci-ids.ucw.cz/read/PC/10de
NVLINK5_BOARDS = (0x2901, 0x29BC, 0x3182)
# A virtual machine gets 1, 2, 4 or 8 cards of a board, and only one with all of them also gets the switches.
PART_OF_BOARD = 4
# Role driver's list of them for the boot.
FABRIC_AT_BOOT = "/etc/modules-load.d/kubegpu-fabric.conf"

# Packages with the kernel module or NVML's library. Two sources of these conflict; of all others they don't.
DRIVER_PACKAGE = re.compile(
    r"(?:akmod|kmod|dkms)-nvidia.*"
    r"|nvidia-(?:dkms|kernel-dkms|open-kernel-dkms|kernel-open-dkms|kernel-source|open-driver|headless).*"
    r"|nvidia-(?:tesla|legacy)-.*-(?:kernel-dkms|driver)"
    r"|nvidia-driver(?:-(?:\d.*|cuda|cuda-libs|libs|bin|NVML|G\d\d.*))?"
    r"|nvidia-(?:compute|gfx|utils|compute-utils)-?(?:G\d\d.*|\d.*)"
    r"|linux-(?:modules|objects)-nvidia-.*"
    r"|libnvidia-(?:compute.*|ml1?|(?:tesla|legacy)-.*-ml1)"
    r"|xorg-x11-drv-nvidia.*"
    r"|nvidia-x11-drv.*"
    r"|nvidia-linux-grid-.*|nvidia-vgpu-(?:guest|ubuntu|rhel).*"
)
# Words in a package's Maintainer or Vendor that identify its source; the first match counts.
MAKERS = (
    ("rpmfusion", re.compile(r"rpm ?fusion", re.IGNORECASE)),
    ("elrepo", re.compile(r"elrepo", re.IGNORECASE)),
    ("negativo17", re.compile(r"negativo17", re.IGNORECASE)),
    ("distribution", re.compile(r"debian|ubuntu|suse|almalinux|amazon|fedora|red hat|rocky|oracle", re.IGNORECASE)),
    ("nvidia", re.compile(r"nvidia", re.IGNORECASE)),
)
# Packages of Ubuntu's graphics-drivers PPA have Ubuntu's maintainers; only their versions differ.
PPA_VERSION = re.compile(r"~gpu\d")
# Names that only one source uses, for packages without Vendor.
NAMES = (
    ("rpmfusion", re.compile(r"xorg-x11-drv-nvidia.*")),
    ("elrepo", re.compile(r"nvidia-x11-drv.*")),
    ("negativo17", re.compile(r"dkms-nvidia.*")),
)


def driver(
    system: System,
    modules: t.Sequence[str],
    packages: t.Mapping[str, Package],
    gpus: t.Sequence[PciGpu] = (),
    exclude: Exclusion = NOTHING,
) -> InstalledDriver:
    """Return the section ``driver`` without its fabric manager.

    ``error`` is nvidia-smi's message where it fails or lists a card that it can't read.

    :param modules: names of the driver's modules that the running kernel would load.
    :param packages: all installed packages.
    :param gpus: all cards on PCI.
    :param exclude: cards that are left out.
    """
    proc = text(system, f"{PROC}/version")
    provider = smi.find(system, packages)
    command = provider.smi if provider else (smi.SMI,)
    seen = smi.ask(system, command, provider.program if provider else smi.SMI, exclude)
    left_out = excluded(exclude, gpus, seen["cards"])
    addresses = {card["address"] for card in left_out["cards"]}
    seen["cards"] = [card for card in seen["cards"] if card["address"] not in addresses]
    vgpu = bool(provider and provider.id == smi.VGPU) or any(smi.is_vgpu(card) for card in seen["cards"])
    vgpu = vgpu or any(gpu["vgpu"] for gpu in gpus if gpu["address"] not in addresses)
    if vgpu and provider is None:
        # However its driver was installed, only one for vGPUs works there.
        provider = smi.of([smi.VGPU])
    root = provider.root if provider else "/"
    for card in seen["cards"]:
        card["minor"] = card_information(system, card["address"]).minor
    ours = runfile.record(system)
    modes = [card["persistence"] for card in seen["cards"]]
    return {
        "loaded": system.exists(MODULE),
        "module_version": loaded_version(system) or None,
        "module_open": "Open Kernel Module" in proc if proc else None,
        "library_version": library_version(system, root),
        **module_file(system, modules),
        **seen,
        "persistence": all(modes) if modes and None not in modes else None,
        "persistence_daemon": {
            "enables": enables(system),
            "masked": masked(system),
            "files": own_files(system),
        },
        "runfile": ours._asdict() if ours else None,
        "others": [*([provider.id] if provider else []), *other_managers(system, packages)],
        "root": root,
        "excluded": left_out,
        "licences": smi.licences(system, command) if vgpu and seen["cards"] else [],
    }


def module_file(system: System, modules: t.Sequence[str]) -> ModuleFile:
    """Return modinfo's fields of the module that modprobe would load, which may differ from the loaded one."""
    fields: dict[str, str] = {}
    if modules:
        done = system.run(["modinfo", modules[0]], timeout=10)
        lines = [re.match(r"(\w+):\s+(.*\S)", line) for line in done.out.splitlines()] if done.rc == 0 else []
        fields = {line.group(1): line.group(2) for line in lines if line}
    return {
        "file_version": fields.get("version", ""),
        "signer": fields.get("signer", ""),
        "license": fields.get("license", ""),
    }


def fabric(system: System, gpus: t.Sequence[PciGpu], switches: t.Sequence[NvSwitch], release: str) -> Fabric:
    """Return the fabric manager's version, whether this machine's cards need it, and what manages their switches.

    :param release: of the running kernel.
    """
    match = None
    if system.exists(FABRIC_MANAGER):
        done = system.run([FABRIC_MANAGER, "-v"], timeout=10)
        match = re.search(r"version is\s*:\s*(\d[\d.]*)", done.out + done.err)
    nvlink5 = not switches and _hidden_switches(system, gpus)
    unloaded = [name for name in FABRIC_MODULES if nvlink5 and not system.exists(f"/sys/module/{name}")]
    if unloaded:
        built_in = text(system, f"/lib/modules/{release}/modules.builtin")
        unloaded = [name for name in unloaded if f"/{name}.ko" not in built_in]
    modules = text(system, f"/lib/modules/{release}/modules.dep") if unloaded else ""
    return {
        "version": match.group(1) if match else "",
        "needed": bool(switches) or nvlink5,
        "nvlink5": nvlink5,
        "unloaded": unloaded,
        "missing": [name for name in unloaded if f"/{name}.ko" not in modules],
        "at_boot": system.exists(FABRIC_AT_BOOT),
    }


def _hidden_switches(system: System, gpus: t.Sequence[PciGpu]) -> bool:
    """Return whether there are NVSwitches of NVLink 5, which aren't on PCI: by the cards, or by what manages them."""
    boards = [gpu for gpu in gpus if int(gpu["device"] or "0", 16) in NVLINK5_BOARDS]
    if len(boards) > PART_OF_BOARD:
        return True
    # VPD is slow to read, so it is read only where such a switch is possible. InfiniBand's modules may not be loaded.
    if not any(gpu["generation"] in ("blackwell", "unknown") for gpu in gpus):
        return False
    devices = [f"{INFINIBAND}/{name}/device" for name in names(system, INFINIBAND)]
    devices += [f"{PCI}/{name}" for name in names(system, PCI) if text(system, f"{PCI}/{name}/vendor") == MELLANOX]
    return any(SWITCH_MANAGER in text(system, f"{device}/vpd") for device in devices)


def excluded(exclude: Exclusion, gpus: t.Sequence[PciGpu], cards: t.Sequence[Card]) -> Excluded:
    """Return the cards that the user keeps from Kubernetes.

    :param gpus: all on PCI.
    :param cards: all that the driver lists.
    """
    listed = {card["address"]: card for card in cards}
    excluded_cards: list[ExcludedCard] = []
    for gpu in gpus:
        card = listed.get(gpu["address"])
        uuid, name = (card["uuid"], card["name"]) if card else ("", "")
        entry = exclude.of(gpu["address"], uuid, name)
        if entry:
            excluded_cards.append({"address": gpu["address"], "uuid": uuid, "name": name, "entry": entry})
    # Several entries may name one card.
    unmatched = [
        entry
        for entry in exclude.entries
        if not any(Exclusion((entry,)).of(card["address"], card["uuid"], card["name"]) for card in excluded_cards)
    ]
    return {
        "cards": excluded_cards,
        "unmatched": unmatched,
        "unnamed": any(gpu["address"] not in listed for gpu in gpus),
    }


def other_managers(system: System, packages: t.Mapping[str, Package]) -> list[str]:
    """Return the sources that installed a driver on this machine itself: more than one conflict."""
    managers = []
    if system.exists("/usr/bin/nvidia-uninstall") or system.exists("/usr/bin/nvidia-installer"):
        managers.append("runfile")
    makers = {
        maker(name, package.get("version", ""), package.get("origin", ""))
        for name, package in packages.items()
        if DRIVER_PACKAGE.fullmatch(name)
    }
    return [*managers, *sorted(makers - {""})]


def maker(name: str, version: str, origin: str) -> str:
    """Return the source of a driver package; empty where it is unknown."""
    if PPA_VERSION.search(version):
        return "graphics-ppa"
    if origin:
        return next((who for who, pattern in MAKERS if pattern.search(origin)), "")
    return next((who for who, pattern in NAMES if pattern.fullmatch(name)), "")
