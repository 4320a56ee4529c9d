# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Everything that the roles decide on, from one look at a machine."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _first_look_observe as first_look
from ansible_collections.kubegpu.share.plugins.module_utils import _kernel_driver_apply as kernel_driver
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_driver as driver
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_gpu as gpu
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_host as host
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_modules as modules
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_packages as packages
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_security as security
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_toolkit as toolkit
from ansible_collections.kubegpu.share.plugins.module_utils import _nouveau_apply as nouveau
from ansible_collections.kubegpu.share.plugins.module_utils import _observe_images as images
from ansible_collections.kubegpu.share.plugins.module_utils import _observe_kubelet as kubelet
from ansible_collections.kubegpu.share.plugins.module_utils import _observe_runtimes as runtimes
from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_files_apply as toolkit_files
from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_legacy_observe as legacy
from ansible_collections.kubegpu.share.plugins.module_utils._node_info_files import Once
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

ARGUMENTS: Json = {
    "sysroot": {"type": "path", "default": "/"},
    "images": {"type": "list", "elements": "str", "default": []},
    "packages": {"type": "list", "elements": "str", "default": []},
    "first_look": {"type": "bool", "default": False},
}


def observe(
    machine: System,
    image_references: t.Sequence[str] = (),
    package_patterns: t.Sequence[str] = (),
    content: bool = False,
) -> Json:
    """All sections of ``gpu_node``.

    :param content: with the whole of the first look that was kept, which is as long as this one.
    """
    system = Once(machine)
    distribution = host.distribution(system)
    kernel = host.kernel(system)
    checked = security.secure_boot(system)
    software = packages.observe(system, distribution["family"], distribution["arch"])
    gpus, switches = gpu.pci(system)
    installed = driver.driver(system, host.driver_modules(system, kernel["release"]), software["packages"])
    tools = toolkit.toolkit(system, software["packages"])
    cgroup = host.cgroup(system)
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
        # Without a card there is nothing to keep nouveau from, and looking into images takes seconds.
        "nouveau": nouveau.observe(system, distribution["family"], kernel["installed"] if gpus or switches else []),
        "driver": {**installed, "fabric": driver.fabric(system, gpus, switches)},
        "memory_limit": toolkit.memory_limit(installed, tools, cgroup),
        "toolkit": tools,
        "cdi": {**toolkit.cdi(system, installed["module_version"]), "refresh_env": toolkit_files.refresh_env(system)},
        "cgroup": cgroup,
        "devices": gpu.devices(system),
        "dkms": modules.dkms(system),
        "log": modules.log(system, bool(gpus or switches or installed["loaded"])),
        "apt": software["apt"],
        "rpm": software["rpm"],
        "packages": packages.told(software["packages"], package_patterns),
        "sources_stale": legacy.observe(system),
        "toolkit_legacy": legacy.kept(system),
        "runtimes": runtimes.observe(system),
        "kubelet": kubelet.observe(system),
        "first_look": first_look.observe(system, content),
        "maintenance": {"unfinished": kernel_driver.unfinished(system)},
        "images": images.observe(system, image_references) if image_references else {},
    }
