# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks of one machine: whether the roles can set it up, and the ways in which GPU nodes break. Pure.

Each check is a function over a ``Machine``; its docstring is its line in the documentation. Its text begins with a verb
whose subject is the host. Unknown facts are no finding.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import gpushare as contract
from .._contracts.gpushare import Card
from .._core.errors import BadInput
from .._core.natural import natural
from .._driver import available as driver_lists
from .._driver import conflicts as driver_conflicts
from .._driver import nouveau_plan, nvidia_smi
from .._driver.nouveau import NOVA
from .._driver.nouveau import PATH as BLACKLIST
from .._driver.types import MISMATCH, NodeFacts
from .._host.types import PciGpu
from .._node.types import GpuNode
from .._openshift import coreos
from .._runtime.properties import cgroup_driver
from .._toolkit import memory_limit
from .._toolkit.facts import takes_cards_on_reload
from .findings import NOTE, PROBLEM, WARNING, Finding

# The roles for nodes support these; a role that supports another one adds it here.
FAMILIES = ("debian", "redhat", "suse")
ARCHITECTURES = ("amd64", "arm64")
SUBJECT = "host {host} "
# Xid errors after which a card needs a reset or a repair:
# https://docs.nvidia.com/deploy/xid-errors/
FATAL_XIDS = (48, 74, 79, 95, 119, 120)
# States of a card's registration with NVSwitches with which nothing is left to do, and of one that hasn't begun.
SETTLED, NOT_STARTED = (None, "completed", "not supported"), "not started"
# Modules beside the driver that dkms builds (GPUDirect Storage and RDMA).
NO_DRIVER = ("nvidia-fs", "nvidia_fs", "nvidia-peer", "nvidia_peer")


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """The variables of the roles for nodes."""

    driver_state: str = "present"
    driver_source: str = "repository"
    driver_version: str = "580.95.05"
    driver_repo_url: str = ""
    fabric_manager: str = "auto"
    toolkit_state: str = "present"
    toolkit_version: str = "1.20.2-1"
    maintenance: str = "never"
    gpushare_selinux_type: str = "auto"

    def driver(self) -> dict[str, str]:
        """Return the driver's, by the names of role driver's options."""
        prefix = "driver_"
        return {name[len(prefix) :]: value for name, value in vars(self).items() if name.startswith(prefix)}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A host of gpu_nodes: its facts, and what is asked of it.

    :param unit: unit of GPU memory; empty where it is unknown.
    :param limit: gpushare_memory_limit; ``off`` where limits don't matter.
    :param listed: a device plugin will list the units to kubelet.
    """

    host: str
    node: GpuNode
    options: NodeOptions
    unit: str
    limit: str
    listed: bool = True

    @property
    def gpus(self) -> list[PciGpu]:
        """Cards on PCI that are this node's own; a virtual machine may have others."""
        return [gpu for gpu in self.node["gpus"] if "vfio" not in (gpu["driver"] or "")]

    @property
    def driver_facts(self) -> NodeFacts:
        """The sections that the driver's planners read."""
        return t.cast("NodeFacts", self.node)

    @property
    def provider(self) -> nvidia_smi.Provider | None:
        """Who provides the driver, which role driver then leaves alone."""
        return nvidia_smi.of(self.node["driver"]["others"])

    @property
    def installs_driver(self) -> bool:
        return self.options.driver_state == "present" and not self.provider

    @property
    def installs_toolkit(self) -> bool:
        return self.options.toolkit_state == "present"

    @property
    def has_kernel(self) -> bool:
        """A container has no kernel of its own."""
        return bool(self.node["kernel"]["installed"])

    @property
    def module(self) -> str:
        """Version of the loaded kernel module."""
        return self.node["driver"]["module_version"] or ""


Check = t.Callable[[Machine], t.Optional[Finding]]
CHECKS: dict[str, Check] = {}


def _found(severity: str, what: str, action: str = "", variable: str = "", **fields: t.Any) -> Finding:
    """Return a finding without its id and host; ``what`` begins with a verb whose subject is the host."""
    return Finding("", severity, what, action, "", variable, fields, SUBJECT)


def check(id: str) -> t.Callable[[Check], Check]:
    """Register a check under its id."""

    def register(function: Check) -> Check:
        CHECKS[id] = function
        return function

    return register


def examine(machine: Machine) -> list[Finding]:
    """Return all findings about a machine; on CoreOS nothing else is examined."""
    own = coreos.refusal(machine.host, machine.node["distribution"])
    if own:
        return [Finding("coreos", PROBLEM, "{reason}", "", machine.host, "gpu_nodes", {"reason": own})]
    findings = []
    for id, function in CHECKS.items():
        finding = function(machine)
        if finding is not None:
            findings.append(dataclasses.replace(finding, id=id, host=machine.host))
    for clash in driver_conflicts.conflicts(machine.driver_facts, **machine.options.driver()):
        fields = {"found": clash["found"], "remedy": clash["remedy"]}
        findings.append(Finding(clash["id"], PROBLEM, "{found}", "{remedy}", machine.host, "", fields, SUBJECT))
    return findings


def described() -> dict[str, str]:
    """Return id and meaning of every check, for the documentation."""
    checks = {id: " ".join((function.__doc__ or "").split()) for id, function in CHECKS.items()}
    return {**checks, **driver_conflicts.IDS, **driver_lists.IDS}


# --------------------------------------------------------------------------- system


@check("distribution")
def _distribution(machine: Machine) -> Finding | None:
    """The machine's distribution isn't of a family that can be set up."""
    distribution = machine.node["distribution"]
    if distribution["family"] in FAMILIES:
        return None
    return _found(
        PROBLEM,
        "runs {id} {version}",
        "take it out of the group: only the families {known} can be set up",
        variable="gpu_nodes",
        id=distribution["id"],
        version=distribution["version"],
        known=" or ".join(FAMILIES),
    )


@check("architecture")
def _architecture(machine: Machine) -> Finding | None:
    """The machine's architecture has no driver or no servers."""
    arch = machine.node["distribution"]["arch"]
    if arch in ARCHITECTURES:
        return None
    action = "take it out of the group: the driver and the servers exist for {known} only"
    return _found(PROBLEM, "has the architecture {arch}", action, variable="gpu_nodes", arch=arch, known=ARCHITECTURES)


@check("no-gpu")
def _no_gpu(machine: Machine) -> Finding | None:
    """No NVIDIA GPU is on the machine's PCI bus."""
    left_out = machine.node["driver"]["excluded"]["cards"]
    if machine.node["gpus"] or machine.node["integrated"]:
        return None
    if left_out:
        return _found(
            PROBLEM,
            "has no card beside those that it keeps: {cards}",
            "take it out of the group, or take a card out of gpu_exclude",
            variable="gpu_nodes",
            cards=[card["address"] for card in left_out],
        )
    action = "take it out of the group, or check that its card is seated ('lspci -d 10de:' lists none)"
    return _found(PROBLEM, "has no NVIDIA GPU on its PCI bus", action, variable="gpu_nodes")


@check("no-own-memory")
def _no_own_memory(machine: Machine) -> Finding | None:
    """A GPU uses the machine's memory (GB10, Jetson): there is no memory of a card that shares could be made of."""
    unified = [f"{card['name']} at {card['address']}" for card in machine.node["driver"]["cards"] if card["unified"]]
    if not machine.node["gpus"] and machine.node["integrated"]:
        unified = [machine.node["integrated"]]
    if not unified:
        return None
    return _found(
        PROBLEM,
        "has a GPU without memory of its own, which uses the machine's: {cards}",
        "take it out of the group, or name the card in gpu_exclude: shares of GPU memory can't be made of it, nor "
        "limited",
        variable="gpu_nodes",
        cards=unified,
    )


@check("vgpu-driver")
def _vgpu_driver(machine: Machine) -> Finding | None:
    """The machine is a guest with a vGPU and has no driver for it; role driver installs none."""
    if not any(gpu["vgpu"] for gpu in machine.gpus) or machine.module or not machine.has_kernel:
        return None
    return _found(
        PROBLEM,
        "has a vGPU and no driver for it",
        "install the guest driver of the hypervisor's release of NVIDIA's vGPU software (nvidia-linux-grid-* or its "
        "GRID .run file): the data center driver doesn't work with a vGPU",
    )


@check("vgpu-licence")
def _vgpu_licence(machine: Machine) -> Finding | None:
    """A vGPU has no licence: its driver slows it down, and later starts no CUDA program."""
    without = [
        licence for licence in machine.node["driver"]["licences"] if not licence["status"].startswith("Licensed")
    ]
    if not without:
        return None
    return _found(
        WARNING,
        "has vGPUs without a licence: {cards}",
        "put a client configuration token into /etc/nvidia/ClientConfigToken and restart nvidia-gridd; "
        "'nvidia-smi -q' has the state",
        cards=[f"{licence['address']} ({licence['status']})" for licence in without],
    )


@check("driver-provided")
def _driver_provided(machine: Machine) -> Finding | None:
    """A container or the image of the cloud's nodes provides the driver: role driver leaves it alone."""
    if machine.options.driver_state != "present" or not machine.provider:
        return None
    return _found(
        NOTE,
        "has its driver ({version}) from {who}; role driver leaves it alone",
        "whoever provides it decides on its version; driver_version isn't used there",
        version=machine.module or "none loaded",
        who=machine.provider.who,
    )


# --------------------------------------------------------------------------- nouveau, kernel, boot


@check("nouveau-in-use")
def _nouveau(machine: Machine) -> Finding | None:
    """nouveau or nova, the kernel's own drivers, are loaded and in use: only a reboot may free the cards."""
    state = machine.node["nouveau"]
    nova = state["nova"]
    loaded = {"nouveau": state["loaded"], NOVA[-1]: bool(nova["modules"])}
    bound = {name: [gpu["address"] for gpu in machine.gpus if gpu["driver"] == name] for name in loaded}
    used = {"nouveau": bool(state["refcnt"]), NOVA[-1]: nova["in_use"]}
    names = [name for name in loaded if loaded[name] and (bound[name] or used[name])]
    if not machine.has_kernel or not names:
        return None
    cards = [card for name in names for card in bound[name]]
    what = "has {modules} loaded" + (" for {cards}" if cards else "")
    if machine.options.maintenance == "reboot":
        action = "it will be drained and rebooted, as gpu_maintenance allows"
        return _found(NOTE, what, action, modules=names, cards=cards)
    action = "set gpu_maintenance: reboot, or reboot it yourself after role nouveau has run"
    return _found(WARNING, what + ", and only a reboot may unload it", action, modules=names, cards=cards)


@check("nova-built-in")
def _nova_built_in(machine: Machine) -> Finding | None:
    """The running kernel has nova built in, and it drives a card: neither a blacklist nor a reboot frees the card."""
    bound = [gpu["address"] for gpu in machine.gpus if gpu["driver"] == NOVA[-1]]
    if not machine.has_kernel or not bound or not machine.node["nouveau"]["nova"]["built_in"]:
        return None
    return _found(
        PROBLEM,
        "runs kernel {release}, whose own driver nova_core is built in and drives {cards}",
        "boot a kernel that has it as a module (CONFIG_NOVA_CORE=m), or not at all",
        release=machine.node["kernel"]["release"],
        cards=bound,
    )


@check("nouveau-in-initramfs")
def _initramfs(machine: Machine) -> Finding | None:
    """The blacklist file is there and an initramfs still lacks it: nouveau comes back with the next boot."""
    state = machine.node["nouveau"]
    images = [image["path"] for image in state["images"] if image["nouveau"] and image["blacklist"] is False]
    if not state["files"].get(BLACKLIST) or not images:
        return None
    return _found(
        NOTE,
        "has {images} with nouveau or nova_core and without their blacklist",
        "role nouveau rebuilds it",
        images=images,
    )


@check("boot-full")
def _boot(machine: Machine) -> Finding | None:
    """An initramfs has to be rebuilt, and /boot has no space for it or can't be written."""
    if not machine.node["nouveau"]["images"] or machine.node["distribution"]["family"] not in FAMILIES:
        return None
    try:
        nouveau_plan.make_plan(True, machine.driver_facts)
    except BadInput as error:
        return _found(PROBLEM, "can't have its initramfs rebuilt", "{reason}", reason=str(error))
    return None


@check("kernel-without-module")
def _kernel_module(machine: Machine) -> Finding | None:
    """A driver is installed, and the running or the newest kernel has no module of it (not built or not installed)."""
    modules = machine.node["kernel"]["modules"]
    if not any(module["nvidia"] for module in modules.values()):
        return None
    # The boot loader takes the newest one.
    booted = {machine.node["kernel"]["release"], max(modules, key=natural)}
    missing = sorted((name for name in booted & set(modules) if not modules[name]["nvidia"]), key=natural)
    if not missing:
        return None
    return _found(
        WARNING,
        "has no nvidia module for kernel {kernels}, and would have no GPU when that one runs",
        _module_advice(machine.node, missing),
        kernels=missing,
        newest=missing[-1],
        packages=_module_packages(machine.node, missing),
    )


def _module_advice(node: GpuNode, missing: t.Sequence[str]) -> str:
    """Return the template of what gives kernels the driver's module, by what gave it to the others."""
    packages = node["packages"]
    if _built_by_dkms(node):
        return "install its headers and run 'dkms autoinstall -k {newest}'"
    if any(name.startswith("akmod-nvidia") for name in packages):
        return "install its headers and run 'akmods --force --kernels {newest}'"
    if _module_packages(node, missing):
        return "install {packages}: the modules come compiled, in a package for each kernel"
    if node["driver"]["runfile"]:
        return "boot it and run the driver's .run file again: dkms doesn't build these modules"
    return "install the package of its compiled modules, or boot a kernel that has them: dkms doesn't build these"


def _built_by_dkms(node: GpuNode) -> bool:
    """Return whether dkms builds the driver's modules; a package no-dkms and nvidia-fs don't show that."""
    names = [module["module"] for module in node["dkms"]] + [name for name in node["packages"] if "dkms" in name]
    return any("nvidia" in name and "no-dkms" not in name and not name.startswith(NO_DRIVER) for name in names)


def _module_packages(node: GpuNode, missing: t.Sequence[str]) -> list[str]:
    """Return the names that packages for one kernel, such as linux-modules-nvidia-580-<kernel>, have for others."""
    having = [release for release, module in node["kernel"]["modules"].items() if module["nvidia"]]
    prefixes = {
        name[: -len(release)]
        for name in node["packages"]
        for release in having
        # The kernel's own flavour may be nvidia, too.
        if name.endswith(f"-{release}") and "nvidia" in name[: -len(release)]
    }
    return sorted(f"{prefix}{release}" for prefix in prefixes for release in missing)


@check("headers-missing")
def _headers(machine: Machine) -> Finding | None:
    """The running kernel's headers are missing and the module has to be built here."""
    kernel = machine.node["kernel"]
    if not machine.has_kernel or kernel["headers"] or machine.module or not machine.installs_driver:
        return None
    action = "role driver installs them first, as driver_install_headers allows"
    return _found(NOTE, "has no headers of its running kernel {release}", action, release=kernel["release"])


@check("compiler-mismatch")
def _compiler(machine: Machine) -> Finding | None:
    """The kernel was built by another major version of gcc than is installed: its modules may not build."""
    kernel, gcc = machine.node["kernel"]["compiler"]["kernel"], machine.node["kernel"]["compiler"]["gcc"]
    major = kernel.partition(".")[0]
    if not kernel or not gcc or major == gcc.partition(".")[0] or not machine.has_kernel:
        return None
    return _found(
        WARNING,
        "has gcc {gcc} and a kernel that was built by gcc {kernel}",
        "install gcc {major} (Oracle's UEK: the gcc-toolset of that version) before the driver",
        gcc=gcc,
        kernel=kernel,
        major=major,
    )


@check("secure-boot")
def _secure_boot(machine: Machine) -> Finding | None:
    """Secure Boot is on and the key that modules built here are signed with isn't enrolled."""
    mok = machine.node["mok"]
    if not machine.node["secure_boot"] or machine.module or mok["enrolled"]:
        return None
    if mok["pending"]:
        what = "has Secure Boot on and a key whose enrolment waits for the next boot"
        return _found(PROBLEM, what, "reboot it and confirm the key on its console")
    return _found(
        PROBLEM if _built_by_dkms(machine.node) or machine.node["log"]["key_rejected"] else WARNING,
        "has Secure Boot on and no enrolled key for modules that are built on it",
        "use signed modules (driver_source: distribution on Ubuntu), or run 'mokutil --import {key}', reboot it and "
        "confirm the key on its console",
        key=mok["key"] or "/var/lib/dkms/mok.pub",
    )


# --------------------------------------------------------------------------- driver


@check("driver-mismatch")
def _mismatch(machine: Machine) -> Finding | None:
    """The loaded module and the driver's library have different versions (upgraded and not reloaded)."""
    library = machine.node["driver"]["library_version"]
    differs = machine.module and library and library != machine.module
    if not differs and machine.node["driver"]["code"] != MISMATCH:
        return None
    repaired = machine.installs_driver and machine.options.maintenance != "never"
    return _found(
        WARNING if repaired or not machine.has_kernel else PROBLEM,
        "has the nvidia module {module} loaded and the driver's library {library}",
        "it will be drained and its modules reloaded"
        if repaired
        else "set gpu_maintenance: drain (or reboot), or reboot it yourself",
        module=machine.module or "?",
        library=library or "?",
    )


@check("driver-fails")
def _driver_fails(machine: Machine) -> Finding | None:
    """nvidia-smi is there and fails, or doesn't answer in time."""
    driver = machine.node["driver"]
    if not driver["error"] or driver["code"] == MISMATCH:
        return None
    return _found(
        PROBLEM if machine.options.driver_state == "external" else WARNING,
        "has a driver that fails; nvidia-smi reports: {error}",
        "run 'dmesg | grep NVRM' on it; a card that fell off the bus needs a reboot or a repair",
        error=driver["error"],
    )


@check("flavour")
def _flavour(machine: Machine) -> Finding | None:
    """The kernel reports that the open module doesn't support a card of this node."""
    if not machine.node["log"]["unsupported_by_open"]:
        return None
    action = "set driver_flavour: proprietary and a driver_version of branch 580 or older for cards before Turing"
    return _found(WARNING, "has a card that the open kernel module doesn't support, as its kernel reports", action)


@check("driver-not-held")
def _unheld(machine: Machine) -> Finding | None:
    """Others installed the driver, and unattended upgrades may separate its library from its module."""
    upgrades = machine.node["services"].get("unattended-upgrades")
    if machine.installs_driver or upgrades is None or not upgrades["enabled"]:
        return None
    # The packages of kernels of the flavour nvidia, and what follows the kernel, aren't the driver's to hold.
    loose = sorted(
        name
        for name, package in machine.node["packages"].items()
        if "nvidia" in name and not name.startswith("linux-") and not package["held"]
    )
    if not loose:
        return None
    more = " …" if len(loose) > 3 else ""
    return _found(
        WARNING,
        "upgrades by itself and holds none of {packages}{more}",
        "run 'apt-mark hold {names}'{more}",
        packages=loose[:3],
        names=" ".join(loose[:3]),
        more=more,
    )


@check("fabric-manager")
def _fabric(machine: Machine) -> Finding | None:
    """There are NVSwitches, and the fabric manager doesn't run or isn't of the driver's version."""
    fabric = machine.node["driver"]["fabric"]
    if not (machine.node["nvswitches"] or fabric["needed"]) or not machine.module:
        return None
    version = machine.node["driver"]["fabric"]["version"]
    service = machine.node["services"].get("nvidia-fabricmanager")
    active = bool(service and service["active"])
    if active and version == machine.module:
        return None
    return _found(
        WARNING if machine.installs_driver else PROBLEM,
        "has NVSwitches, driver {module} and "
        + ("a fabric manager of version {version}" if version else "no fabric manager")
        + ("" if active or not version else " that does not run"),
        "role driver installs it at the driver's version"
        if machine.installs_driver
        else "install nvidia-fabricmanager of exactly {module} and start it",
        module=machine.module,
        version=version,
    )


@check("fabric-module")
def _fabric_module(machine: Machine) -> Finding | None:
    """A kernel module that manages NVSwitches of NVLink 5 isn't loaded: no fabric manager starts."""
    fabric = machine.node["driver"]["fabric"]
    unloaded, missing = fabric["unloaded"], fabric["missing"]
    if not unloaded or not machine.has_kernel:
        return None
    release = machine.node["kernel"]["release"]
    if missing:
        return _found(
            PROBLEM,
            "has NVSwitches of NVLink 5, and its kernel {release} doesn't have what manages them: {modules}",
            "install the kernel's package with it (on Ubuntu linux-modules-extra-{release})",
            modules=missing,
            release=release,
        )
    what = "has NVSwitches of NVLink 5, and what manages them isn't loaded: {modules}"
    if machine.installs_driver and machine.options.fabric_manager != "absent":
        return _found(NOTE, what, "role driver loads it, also at boot", modules=unloaded)
    return _found(
        PROBLEM,
        what,
        "load it by modprobe, write the names to a file in /etc/modules-load.d, restart nvidia-fabricmanager, and see "
        "that the package nvlsm is installed",
        modules=unloaded,
    )


@check("fabric-state")
def _fabric_state(machine: Machine) -> Finding | None:
    """The driver reports that a card isn't registered with its NVSwitches: CUDA fails there with error 802."""
    # The links between cards are off where MIG is on.
    states = {card["address"]: card["fabric"] for card in machine.node["driver"]["cards"] if not card["mig"]}
    idle = [address for address, state in states.items() if state == NOT_STARTED]
    waiting = {address: state for address, state in states.items() if state not in (*SETTLED, NOT_STARTED)}
    if not idle and not waiting:
        return None
    rack = not machine.node["driver"]["fabric"]["needed"] and not machine.node["nvswitches"]
    what = "has cards that aren't registered with their NVSwitches, where CUDA fails with error 802: {cards}"
    if not waiting:
        what = (
            "has cards that don't register with their NVSwitches, where CUDA fails unless their links are off: {cards}"
        )
    return _found(
        PROBLEM if waiting and (rack or not machine.installs_driver) else WARNING,
        what,
        "look at the fabric manager where the switches are: of the hypervisor, or of the rack's switch trays"
        if rack
        else "run 'systemctl status nvidia-fabricmanager' and 'journalctl -u nvidia-fabricmanager' on it",
        cards=[f"{address} ({state})" for address, state in waiting.items()] or idle,
    )


@check("persistence-off")
def _persistence(machine: Machine) -> Finding | None:
    """Persistence is off: the driver unloads its state between uses, which is slow and loses settings."""
    off = [card for card in machine.node["driver"]["cards"] if card["persistence"] is False]
    if not off or machine.installs_driver:
        return None
    what = "has persistence off on {count} card" + ("s" if len(off) > 1 else "")
    return _found(NOTE, what, "run 'systemctl enable --now nvidia-persistenced'", count=len(off))


@check("device-nodes")
def _device_nodes(machine: Machine) -> Finding | None:
    """The driver lists cards and /dev/nvidia-uvm is missing, without which CUDA doesn't start."""
    if not machine.has_kernel or not machine.node["driver"]["cards"] or machine.node["devices"]["uvm"]:
        return None
    action = "run 'nvidia-modprobe -u -c 0', or start nvidia-persistenced at boot"
    return _found(WARNING, "has cards and no /dev/nvidia-uvm", action)


@check("card-lost")
def _lost(machine: Machine) -> Finding | None:
    """A card fell off the bus (Xid 79), needs a reset, or is missing from the driver's list."""
    lost = sorted({xid["address"] for xid in machine.node["log"]["xids"] if xid["code"] in FATAL_XIDS})
    if lost:
        action = "drain it, reboot it, and have the card checked if they come again"
        return _found(WARNING, "has reported fatal errors (Xid) of {cards} since it was booted", action, cards=lost)
    listed, there = len(machine.node["driver"]["cards"]), len(machine.gpus)
    if not machine.module or not listed or listed == there:
        return None
    return _found(
        PROBLEM,
        "has {there} NVIDIA cards on PCI and its driver lists {listed}",
        "run 'dmesg | grep NVRM' on it for the card that is missing",
        there=there,
        listed=listed,
    )


@check("link-degraded")
def _link(machine: Machine) -> Finding | None:
    """A card runs on fewer PCIe lanes than it has."""
    slow = [
        f"{gpu['address']} ({gpu['link']['width']} of {gpu['link']['max_width']} lanes)"
        for gpu in machine.gpus
        if gpu["link"]["width"] and gpu["link"]["max_width"] not in (None, gpu["link"]["width"])
        # The link of a card that is part of the machine's processor is none of PCIe.
        if not any(card["unified"] and card["address"] == gpu["address"] for card in machine.node["driver"]["cards"])
    ]
    if not slow:
        return None
    return _found(WARNING, "has cards on a narrow PCIe link: {cards}", "reseat the card, or ask its vendor", cards=slow)


# --------------------------------------------------------------------------- toolkit, runtime, cluster


@check("toolkit-skew")
def _skew(machine: Machine) -> Finding | None:
    """The toolkit's packages have different versions."""
    versions = machine.node["toolkit"]["packages"]
    if len(set(versions.values())) < 2:
        return None
    packages = [f"{name} {version}" for name, version in sorted(versions.items())]
    severity, action = WARNING, "install all four at one version"
    if machine.installs_toolkit:
        severity, action = NOTE, "role toolkit installs one version of them"
    return _found(severity, "has {packages}", action, packages=packages)


@check("stale-sources")
def _stale_sources(machine: Machine) -> Finding | None:
    """Lists of the retired nvidia-docker repositories are there, beside which apt refuses a new one (Signed-By)."""
    files = [source["file"] for source in machine.node["sources_stale"]]
    if not files:
        return None
    what = "has {files} of NVIDIA's container repositories"
    if machine.installs_toolkit:
        return _found(NOTE, what, "role toolkit removes them", files=files)
    return _found(WARNING, what, "remove them", files=files)


@check("legacy-mode")
def _legacy_mode(machine: Machine) -> Finding | None:
    """Legacy hook, systemd cgroups and no /dev/char links: a daemon-reload takes the GPUs from running containers."""
    toolkit = machine.node["toolkit"]
    config = toolkit["config"]
    # Without a file the runtime has its defaults.
    default = "auto" if toolkit["version"] else ""
    mode = config["mode"] if config else default
    version = (machine.installs_toolkit and machine.options.toolkit_version) or toolkit["version"]
    if not takes_cards_on_reload(mode, version) or machine.node["devices"]["char_links"]:
        return None
    if cgroup_driver(machine.node["kubelet"], machine.node["runtimes"]) != "systemd":
        return None
    return _found(
        WARNING,
        "has NVIDIA's runtime in mode {mode} with systemd's cgroups, where a daemon-reload takes the GPUs from "
        "running containers (NVML: Unknown Error)",
        'set mode = "cdi" in /etc/nvidia-container-runtime/config.toml (with toolkit 1.18 and newer "auto"), or run '
        "'nvidia-ctk system create-dev-char-symlinks --create-all' at boot",
        mode="legacy" if mode == "legacy" else f"auto, which is legacy in toolkit {version}",
    )


@check("cdi-stale")
def _cdi(machine: Machine) -> Finding | None:
    """A CDI specification names libraries of another driver version than the loaded one."""
    if not machine.node["cdi"]["stale"]:
        return None
    return _found(
        WARNING,
        "has a CDI specification of driver {specified} and runs {module}",
        "run 'nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml', or start nvidia-cdi-refresh",
        specified=machine.node["cdi"]["driver_version"],
        module=machine.module,
    )


@check("toolkit-gpu-operator")
def _operator(machine: Machine) -> Finding | None:
    """NVIDIA's GPU Operator manages the toolkit of this node."""
    if not machine.node["toolkit"]["operator"] or not machine.installs_toolkit:
        return None
    action = "switch that part of the operator off (toolkit.enabled=false), or take the node out of gpu_nodes"
    return _found(PROBLEM, "has its toolkit from NVIDIA's GPU Operator", action)


@check("mandatory-access")
def _selinux(machine: Machine) -> Finding | None:
    """SELinux is enforcing, and containers may not open the cards' device files without its policy."""
    if machine.node["security"]["selinux"] != "enforcing" or "nvidia-container-selinux" in machine.node["packages"]:
        return None
    return _found(
        NOTE,
        "has SELinux enforcing",
        "where containers get 'Insufficient Permissions', run 'ausearch -m avc' and allow container_use_devices "
        "('setsebool -P container_use_devices on')",
    )


@check("selinux-type")
def _selinux_type(machine: Machine) -> Finding | None:
    """SELinux is enforcing, and the device plugin and the DRA driver are to stay confined."""
    if machine.node["security"]["selinux"] != "enforcing" or machine.options.gpushare_selinux_type:
        return None
    return _found(
        WARNING,
        "has SELinux enforcing: where its container runtime uses it, gpushare's device plugin or DRA driver can't "
        "reach kubelet without a type of SELinux",
        "leave it unset, or name a type that the machine's policy has",
        variable="gpushare_selinux_type",
    )


# --------------------------------------------------------------------------- shares of memory


def _cards(machine: Machine) -> list[Card]:
    """Return the cards in the unit of shares, none where it is unknown; a card that can't be read is left out."""
    return [
        Card(
            index=card["index"],
            uuid=card["uuid"],
            minor=card["minor"] or 0,
            memory_mib=card["memory_mib"],
            units=contract.units_of(card["memory_mib"], machine.unit),
        )
        for card in machine.node["driver"]["cards"]
        if machine.unit and card["memory_mib"]
    ]


@check("unknown-cards")
def _unknown_cards(machine: Machine) -> Finding | None:
    """The driver isn't loaded: the memory of the cards isn't known yet."""
    if not machine.unit or not machine.listed or not machine.gpus or machine.node["driver"]["cards"]:
        return None
    return _found(
        NOTE,
        "lists no card before its driver is loaded; the device plugin itself will check whether {unit} makes too many "
        "device IDs there",
        variable="gpushare_memory_unit",
        unit=machine.unit,
    )


@check("device-list")
def _device_list(machine: Machine) -> Finding | None:
    """The memory unit makes more device IDs than kubelet accepts."""
    cards = _cards(machine)
    size = contract.device_list_bytes(cards) if machine.listed else 0
    if size <= contract.KUBELET_MESSAGE_BYTES:
        return None
    return _found(
        PROBLEM,
        "has cards of {count} units: {unit} makes a list of device IDs of {size} bytes, and kubelet accepts {most}",
        "set it to GiB",
        variable="gpushare_memory_unit",
        count=sum(card.units for card in cards),
        unit=machine.unit,
        size=size,
        most=contract.KUBELET_MESSAGE_BYTES,
    )


@check("small-card")
def _small_card(machine: Machine) -> Finding | None:
    """A card has less memory than one unit."""
    small = [card for card in _cards(machine) if card.units <= 0]
    if not small:
        return None
    return _found(
        PROBLEM,
        "has card {index} with {memory} MiB, less than one {unit}",
        "set it to MiB, or take the machine out of gpu_nodes",
        variable="gpushare_memory_unit",
        index=small[0].index,
        memory=small[0].memory_mib,
        unit=machine.unit,
    )


@check("memory-limit")
def _memory_limit(machine: Machine) -> Finding | None:
    """Limits of memory are required and the machine can't enforce them."""
    if machine.limit not in ("auto", "required"):
        return None
    options, driver = machine.options, machine.node["driver"]
    unmet = memory_limit.conditions(
        (options.driver_version if machine.installs_driver else "") or machine.module or driver["version"] or "",
        (options.toolkit_version if machine.installs_toolkit else "") or machine.node["toolkit"]["version"] or "",
        machine.node["cgroup"]["version"],
        {card["index"]: bool(card["mig"]) for card in driver["cards"]},
    )["why"]
    if not unmet:
        return None
    reason, variable = "; ".join(unmet), "gpushare_memory_limit"
    if machine.limit == "auto":
        return _found(NOTE, "doesn't limit pods to their shares, because {reason}", variable=variable, reason=reason)
    what = "can't limit pods to their shares, because {reason}"
    action = "set it to auto where that is acceptable, or provide what is missing"
    return _found(PROBLEM, what, action, variable=variable, reason=reason)
