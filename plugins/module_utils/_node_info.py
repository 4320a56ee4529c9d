# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Everything that the roles decide on, from one look at a machine."""

from __future__ import annotations

import fnmatch
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _apt_observe as apt
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_gpu as gpu
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_host as host
from ansible_collections.kubegpu.share.plugins.module_utils import _nouveau_apply as nouveau
from ansible_collections.kubegpu.share.plugins.module_utils import _observe_containerd as containerd
from ansible_collections.kubegpu.share.plugins.module_utils import _observe_images as images
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

ARGUMENTS: Json = {
    "sysroot": {"type": "path", "default": "/"},
    "images": {"type": "list", "elements": "str", "default": []},
    "packages": {"type": "list", "elements": "str", "default": []},
}
# Of some hundred packages these are told of.
PACKAGES = ("*nvidia*", "*cuda*", "linux-headers-*", "dkms")


def observe(system: System, image_references: t.Sequence[str], package_patterns: t.Sequence[str]) -> Json:
    """All sections of ``gpu_node``."""
    distribution = host.distribution(system)
    kernel = host.kernel(system)
    software = apt.observe(system, distribution["arch"])
    patterns = (*PACKAGES, *package_patterns)
    return {
        "distribution": distribution,
        "kernel": kernel,
        "secure_boot": host.secure_boot(system),
        "reboot_required": host.reboot_required(system),
        "services": host.services(system),
        "gpus": gpu.gpus(system),
        "nouveau": nouveau.observe(system, distribution["family"], kernel["installed"]),
        "driver": gpu.driver(system),
        "toolkit": gpu.toolkit(system),
        "apt": software["apt"],
        "packages": {
            name: package
            for name, package in software["packages"].items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        },
        "runtimes": {"containerd": containerd.observe(system)},
        "images": images.observe(system, image_references) if image_references else {},
    }
