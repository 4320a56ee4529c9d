# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect ``gpu_node``: all facts of a machine that the roles plan from."""

from __future__ import annotations

import re
import typing as t

from .._boot import loaders
from .._contracts import card_exclusion
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._driver import facts as driver
from .._driver import library, nouveau
from .._host import facts as host
from .._host import iommu, kernels
from .._host.cached_reader import Once, names, text, whole
from .._host.system import System
from .._host.types import MachineOwnerKey, Security
from .._images import names as images
from .._packages import installed as packages
from .._packages import lists
from .._passthrough import facts as passthrough
from .._rancher.settings import K3S, RKE2
from .._runtime import containerd, crio, docker, k3s, kubelet
from .._runtime.types import Runtimes
from .._toolkit import facts as toolkit
from .._toolkit import legacy, memory_limit
from .._vgpu import facts as vgpu
from . import gpus as gpu
from .types import PATH, BaselineSection, GpuNode, parse


def observe_baseline(system: System, content: bool = False) -> BaselineSection | None:
    """Return the section; None where nothing is kept.

    :param content: include the snapshot, None where it can't be read.
    """
    text = system.read(PATH)
    if text is None:
        return None
    section: BaselineSection = {"path": PATH, "taken": "", "own_files": [], "error": ""}
    snapshot = None
    try:
        baseline = parse(text)
    except ShareError as error:
        section["error"] = str(error)
    else:
        section["taken"], section["own_files"], snapshot = baseline.taken, list(baseline.own_files), baseline.snapshot
    if content:
        section["snapshot"] = snapshot
    return section


EFI = "/sys/firmware/efi/efivars"
SECURE_BOOT = f"{EFI}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# shim's variable with the keys that the MOK manager asks about at the next boot.
REQUESTED = f"{EFI}/MokNew-605dab50-e046-4300-abb6-3dd810dd8b23"
DKMS = "/etc/dkms/framework.conf"
SHIM_KEY = "/var/lib/shim-signed/mok/MOK.der"
DKMS_KEY = "/var/lib/dkms/mok.pub"
AKMODS_KEY = "/etc/pki/akmods/certs/public_key.der"


def secure_boot(system: System) -> bool | None:
    """Return whether firmware checks signatures; None without UEFI."""
    variable = whole(system, SECURE_BOOT)
    return variable[-1] == "\x01" if variable else None


def observe_security(system: System) -> Security:
    """Return SELinux's mode, empty without SELinux, and whether AppArmor is on."""
    enforcing = text(system, "/sys/fs/selinux/enforce")
    mode = {"1": "enforcing", "0": "permissive"}.get(enforcing, "")
    if not mode and system.exists("/etc/selinux/config"):
        mode = "disabled"
    return {"selinux": mode, "apparmor": text(system, "/sys/module/apparmor/parameters/enabled") == "Y"}


def mok(system: System, distribution: str, checked: bool | None) -> MachineOwnerKey:
    """Return the key that modules built on this machine are signed with, and whether firmware trusts it.

    :param distribution: its id.
    :param checked: whether firmware checks signatures; where it doesn't, the key's state doesn't matter.
    """
    key = signing_key(system, distribution)
    owner_key: MachineOwnerKey = {"key": key, "enrolled": None, "pending": None}
    if not key or not checked:
        return owner_key
    done = system.run(["mokutil", "--test-key", key], timeout=10)
    output = done.out + done.err
    if "is already enrolled" in output or "is already in db" in output:
        return {**owner_key, "enrolled": True, "pending": False}
    if "is already in the enrollment request" in output:
        return {**owner_key, "enrolled": False, "pending": True}
    if "is not enrolled" in output:
        # Some releases of mokutil don't report requests.
        return {**owner_key, "enrolled": False, "pending": bool(whole(system, REQUESTED))}
    return owner_key


def signing_key(system: System, distribution: str) -> str:
    """Return the certificate's path; empty where there is none yet."""
    drop_ins = [f"{DKMS}.d/{name}" for name in names(system, f"{DKMS}.d") if name.endswith(".conf")]
    configured = [configured_key(text(system, path)) for path in [*reversed(drop_ins), DKMS]]
    usual = [SHIM_KEY, DKMS_KEY] if distribution == "ubuntu" else [DKMS_KEY, SHIM_KEY]
    return next(
        (path for path in [*configured, *usual, AKMODS_KEY] if path.startswith("/") and system.exists(path)), ""
    )


def configured_key(content: str) -> str:
    """Return the certificate in a configuration of dkms; empty without one."""
    certificates = re.findall(r"^\s*mok_certificate=[\"']?([^\"'\s]+)", content, re.MULTILINE)
    return str(certificates[-1]) if certificates else ""


def observe_runtimes(system: System) -> Runtimes:
    """Return the state of each container runtime; None for one that isn't installed."""
    return {
        "containerd": containerd.observe(system),
        "docker": docker.observe(system),
        "crio": crio.observe(system),
        "k3s": k3s.observe(system, K3S),
        "rke2": k3s.observe(system, RKE2),
    }


# What to collect beside what is always collected.
OPTIONS: JsonObject = {
    "images": {"type": "list", "elements": "str", "default": []},
    "packages": {"type": "list", "elements": "str", "default": []},
    "baseline": {"type": "bool", "default": False},
    "driver_version": {"type": "str", "default": ""},
    "exclude": {"type": "list", "elements": "str", "default": []},
}
ARGUMENTS: JsonObject = {
    **OPTIONS,
    "sysroot": {"type": "path", "default": "/"},
    # The action plugin's.
    "report_trouble": {"type": "bool", "default": False},
    "control_plane": {"type": "bool", "default": False},
    "patches_dir": {"type": "path"},
}


def observe(
    machine: System,
    image_references: t.Sequence[str] = (),
    package_patterns: t.Sequence[str] = (),
    content: bool = False,
    driver_version: str = "",
    exclude: t.Sequence[str] = (),
) -> GpuNode:
    """Collect all sections of ``gpu_node``.

    :param image_references: images to search in the container runtime.
    :param package_patterns: names of packages to include, beside NVIDIA's.
    :param exclude: entries of ``gpu_exclude``: no section has anything of these cards but ``driver.excluded``
        and ``vgpu.excluded``.
    :param content: include the snapshot of the baseline, which is as long as these facts.
    :param driver_version: ask the package lists where this version, or its module for a kernel, isn't installed.
    """
    system = Once(machine)
    distribution = host.distribution(system)
    kernel = host.kernel(system)
    checked = secure_boot(system)
    software = packages.observe(system, distribution["family"], distribution["arch"])
    every, switches = gpu.pci(system)
    installed = driver.driver(
        system,
        host.driver_modules(system, kernel["release"]),
        software["packages"],
        every,
        card_exclusion.parse(exclude),
    )
    left_out = {card["address"] for card in installed["excluded"]["cards"]}
    gpus = [card for card in every if card["address"] not in left_out]
    log = driver.log(system, bool(every or switches or installed["loaded"]))
    log["xids"] = [xid for xid in log["xids"] if xid["address"] not in left_out]
    tools = toolkit.toolkit(system, software["packages"])
    cgroup = host.cgroup(system)
    booted = kernels.booted(kernel)
    asked = bool(gpus) and lists.wanted(driver_version, software["packages"], kernel, booted)
    return {
        "distribution": distribution,
        "python": host.python(),
        "kernel": kernel,
        "boot": loaders.observe(system, dict(distribution)),
        "secure_boot": checked,
        "security": observe_security(system),
        "mok": mok(system, distribution["id"], checked),
        "reboot_required": host.reboot_required(system),
        "services": host.services(system),
        "iommu": iommu.observe(system, kernel["release"]),
        "gpus": gpus,
        "nvswitches": switches,
        "integrated": gpu.integrated(system),
        "passthrough": passthrough.facts(system),
        "vgpu": vgpu.facts(system, [card for card in every if card["address"] in left_out]),
        # Without a card nouveau does no harm, and listing initramfs images takes seconds.
        "nouveau": nouveau.observe(system, distribution["family"], kernel["installed"] if gpus or switches else []),
        "driver": {**installed, "fabric": driver.fabric(system, every, switches, kernel["release"])},
        "memory_limit": memory_limit.conditions(
            installed["module_version"] or installed["version"] or "",
            tools["version"] or "",
            cgroup["version"],
            {card["index"]: bool(card["mig"]) for card in installed["cards"]},
        ),
        "toolkit": tools,
        "cdi": {**toolkit.cdi(system, installed["module_version"]), "refresh_env": toolkit.refresh_env(system)},
        "cgroup": cgroup,
        "devices": gpu.devices(system),
        "dkms": driver.dkms(system),
        "log": log,
        "apt": software["apt"],
        "rpm": software["rpm"],
        "packages": packages.reported(software["packages"], package_patterns),
        "package_lists": lists.observe(system, software, booted) if asked else None,
        "sources_stale": legacy.observe_sources(system),
        "toolkit_legacy": legacy.observe_record(system),
        "runtimes": observe_runtimes(system),
        "kubelet": kubelet.observe(system),
        "baseline": observe_baseline(system, content),
        "maintenance": {"unfinished": library.unfinished(system)},
        "images": images.observe(system, image_references) if image_references else {},
    }
