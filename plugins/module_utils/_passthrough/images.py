# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe whether the initramfs of installed kernels has the rule of VFIO's cards, and the modules that it needs."""

from __future__ import annotations

import re
import typing as t

from .._driver.nouveau import image_content, listed
from .._host.cached_reader import text
from .._host.system import System
from . import files
from .model import Image, module_of

DRIVER = re.compile(r'driver_override\}="([^"]+)"')


def observed(
    system: System, family: str, tool: str | None, installed: t.Sequence[str], rule: str, ours: bool
) -> list[Image]:
    """Return each installed kernel's image; what is in it only where it may contain something of this role.

    :param tool: of the images; None without one.
    :param installed: releases of the kernels.
    :param rule: the text of the rule's file.
    :param ours: something of this role is on the machine.
    """
    images = []
    wanted = sorted({module_of(name) for name in DRIVER.findall(rule)})
    for image in listed(system, family, installed, files.PATHS):
        built_in = text(system, f"/lib/modules/{image.release}/modules.builtin").replace("-", "_")
        needed = [name for name in wanted if f"/{name}.ko" not in built_in]
        inside = image_content(system, tool, image.path, files.RULE, needed) if tool and ours else None
        images.append(
            Image(
                path=image.path,
                release=image.release,
                size=image.size,
                newer=image.newer,
                kept=image.kept,
                inside=inside.blacklist if inside is not None else (False if not ours else None),
                lacking=inside.lacking if inside is not None else (),
            )
        )
    return images
