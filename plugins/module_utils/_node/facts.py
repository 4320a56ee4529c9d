# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect ``gpu_node``: all facts of a machine that the roles plan from."""

from __future__ import annotations

import typing as t

from .._contracts import card_exclusion
from .._core.types import JsonObject
from .._driver import facts as driver
from .._driver import maintenance
from .._driver import module_facts as modules
from .._driver import nouveau_query as nouveau
from .._host import facts as host
from .._host import kernels
from .._host.cached_reader import Once
from .._host.system import System
from .._images import query as images
from .._packages import installed as packages
from .._packages import lists
from .._runtime import facts as runtimes
from .._runtime import kubelet
from .._toolkit import facts as toolkit
from .._toolkit import legacy_query as legacy
from .._toolkit import memory_limit
from . import baseline_query, security
from . import gpus as gpu
from .types import GpuNode

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
    :param exclude: entries of ``gpu_exclude``: no section has anything of these cards but ``driver.excluded``.
    :param content: include the snapshot of the baseline, which is as long as these facts.
    :param driver_version: ask the package lists where this version, or its module for a kernel, isn't installed.
    """
    system = Once(machine)
    distribution = host.distribution(system)
    kernel = host.kernel(system)
    checked = security.secure_boot(system)
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
    log = modules.log(system, bool(every or switches or installed["loaded"]))
    log["xids"] = [one for one in log["xids"] if one["address"] not in left_out]
    tools = toolkit.toolkit(system, software["packages"])
    cgroup = host.cgroup(system)
    booted = kernels.booted(kernel)
    asked = bool(gpus) and lists.wanted(driver_version, software["packages"], kernel, booted)
    return {
        "distribution": distribution,
        "python": host.python(),
        "kernel": kernel,
        "secure_boot": checked,
        "security": security.security(system),
        "mok": security.mok(system, distribution["id"], checked),
        "reboot_required": host.reboot_required(system),
        "services": host.services(system),
        "gpus": gpus,
        "nvswitches": switches,
        "integrated": gpu.integrated(system),
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
        "dkms": modules.dkms(system),
        "log": log,
        "apt": software["apt"],
        "rpm": software["rpm"],
        "packages": packages.reported(software["packages"], package_patterns),
        "package_lists": lists.observe(system, software, booted) if asked else None,
        "sources_stale": legacy.observe_sources(system),
        "toolkit_legacy": legacy.observe_record(system),
        "runtimes": runtimes.observe(system),
        "kubelet": kubelet.observe(system),
        "baseline": baseline_query.observe(system, content),
        "maintenance": {"unfinished": maintenance.unfinished(system)},
        "images": images.observe(system, image_references) if image_references else {},
    }
