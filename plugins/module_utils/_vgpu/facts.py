# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The section ``vgpu`` of ``gpu_node``: what role vgpu has on the machine beside the vGPUs, and the cards' vGPUs."""

from __future__ import annotations

import typing as t

from .._core.digest import digest
from .._host.cached_reader import Lenient, text
from .._host.mounts import read_only
from .._host.system import System, target
from . import sysfs

ROOT = "/usr/local/lib/kubegpu-share"
# The program at boot is a package there, with the folders that the collection has, so that its imports are the same.
PACKAGE = "vgpu_boot"
FILES = ("_vgpu/restore.py", "_vgpu/sysfs.py", "_host/kernel_write.py")
PROGRAMS = tuple(f"{ROOT}/{PACKAGE}/{name}" for name in FILES)
NAME = "kubegpu-share-vgpu.service"
UNIT = f"/etc/systemd/system/{NAME}"
WANTED_BY = f"/etc/systemd/system/multi-user.target.wants/{NAME}"
# Where a boot must find what a run writes.
FOLDERS = ("/usr/local/lib", "/etc/systemd/system", "/var/lib")


class VgpuFacts(t.TypedDict):
    """What role vgpu has on the machine: texts of its record, of its unit and of the types' names, None without them.

    ``programs`` are SHA-256 by path. ``enabled``: the unit starts at boot. ``systemd``: it is the machine's init.
    ``read_only`` are the folders for these files that are on file systems mounted read-only. ``excluded`` are the cards
    that ``gpu_node.gpus`` leaves out, in its form: a layout counts them, and they may have been divided before.
    """

    record: str | None
    unit: str | None
    names: str | None
    programs: dict[str, str]
    enabled: bool
    systemd: bool
    read_only: list[str]
    excluded: list[t.Mapping[str, t.Any]]


def facts(system: System, excluded: t.Iterable[t.Mapping[str, t.Any]] = ()) -> VgpuFacts:
    """Return the section.

    :param excluded: the cards that ``gpu_exclude`` names, as ``gpu_node.gpus`` has cards.
    """
    lenient = Lenient(system)
    mounts = text(system, "/proc/self/mounts")
    texts = {path: lenient.read(path) for path in PROGRAMS}
    return {
        "record": lenient.read(sysfs.RECORD),
        "unit": lenient.read(UNIT),
        "names": lenient.read(sysfs.NAMES),
        "programs": {path: digest(content) for path, content in texts.items() if content is not None},
        "enabled": system.exists(WANTED_BY),
        "systemd": system.exists("/run/systemd/system"),
        "read_only": [path for path in FOLDERS if read_only(mounts, target(system, path))],
        "excluded": list(excluded),
    }
