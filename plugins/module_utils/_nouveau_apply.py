# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""See nouveau on a machine, and carry out the plan that keeps it away."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _initramfs as initramfs
from ansible_collections.kubegpu.share.plugins.module_utils import _nouveau as nouveau
from ansible_collections.kubegpu.share.plugins.module_utils import _open_devices as open_devices
from ansible_collections.kubegpu.share.plugins.module_utils import _runner
from ansible_collections.kubegpu.share.plugins.module_utils._initramfs_rebuild import Image, look_inside
from ansible_collections.kubegpu.share.plugins.module_utils._node_info_host import distribution, kernel
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

# modprobe reads all of them; a file in an earlier one hides its namesakes in the later ones.
FOLDERS = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")
MODULE = "/sys/module/nouveau"
CONSOLES = "/sys/class/vtconsole"
FRAMEBUFFERS = "/sys/class/graphics"
# What a display or a program that draws has open; a console has none.
DEVICES = ("/dev/dri/", "/dev/fb")


def observe(system: System, family: str, installed: t.Sequence[str]) -> Json:
    """The section ``nouveau``.

    Per image of an installed kernel it costs one look inside: 0.2 s with initramfs-tools, 2 s with dracut.

    :param installed: releases of the kernels that this node boots; none in a container.
    """
    files = {}
    for folder in FOLDERS:
        for name in system.names(folder):
            text = system.read(f"{folder}/{name}") if name.endswith(".conf") else None
            if text is not None and (f"{folder}/{name}" == nouveau.PATH or nouveau.blacklisted(text)):
                files[f"{folder}/{name}"] = text
    tool = initramfs.tool_of(family, system.exists)
    images = _images(system, family, tool, installed)
    return {
        **_module(system),
        "blacklisted": any(nouveau.blacklisted(text) for text in files.values()),
        "files": files,
        "tool": tool,
        "dracut": system.read(nouveau.DRACUT_PATH),
        "images": images,
        "leftovers": _leftovers(system) if installed else [],
        "boot_free": system.free_bytes("/boot") if images else None,
        "boot_read_only": initramfs.read_only(system.read("/proc/self/mounts") or "") if images else False,
    }


def _module(system: System) -> Json:
    """The module and all that keeps it from being unloaded."""
    loaded = system.exists(MODULE)
    count = system.read(f"{MODULE}/refcnt")
    seen: Json = {
        "loaded": loaded,
        "refcnt": int(count) if count is not None else None,
        "holders": [],
        "users": [],
        "consoles": [],
        "framebuffers": [],
    }
    if loaded and seen["refcnt"] != 0:
        names = [name for name in system.names(FRAMEBUFFERS) if name.startswith("fb") and name[2:].isdigit()]
        users = open_devices.users(system, lambda path: path.startswith(DEVICES))
        seen.update(
            holders=system.names(f"{MODULE}/holders"),
            users=sorted({user["command"] for user in users}),
            consoles=[name for name in system.names(CONSOLES) if _shows_framebuffer(system, name)],
            framebuffers=[(system.read(f"{FRAMEBUFFERS}/{name}/name") or "").strip() for name in names],
        )
    return seen


def _shows_framebuffer(system: System, name: str) -> bool:
    kind, bound = (system.read(f"{CONSOLES}/{name}/{file}") or "" for file in ("name", "bind"))
    return "frame buffer" in kind and bound.strip() == "1"


def _leftovers(system: System) -> list[str]:
    paths = (f"/boot/{name}" for name in system.names("/boot"))
    return [path for path in paths if path.startswith((initramfs.KEPT, initramfs.BUILT))]


def _images(system: System, family: str, tool: str | None, installed: t.Sequence[str]) -> list[Json]:
    """Each installed kernel's image, and whether it holds our file as it is now."""
    if family not in initramfs.FAMILIES:
        return []
    # A rescue kernel has its modules in its image alone, which nobody could make anew.
    paths = {
        initramfs.image_of(family, release): release
        for release in installed
        if system.exists(f"/lib/modules/{release}")
    }
    paths = {path: release for path, release in paths.items() if system.exists(path)}
    if not paths:
        return []
    # Missing files are the command's complaint, not its end.
    done = system.run(["stat", "-c", "%.9Y %s %n", nouveau.PATH, *paths])
    rows = [line.split(" ", 2) for line in done.out.splitlines()]
    written = {path: float(when) for when, _size, path in rows}
    sizes = {path: int(size) for _when, size, path in rows}
    since = written.get(nouveau.PATH, 0.0)
    found = []
    for path, release in paths.items():
        if path not in sizes:
            continue
        inside = look_inside(system, tool, path, nouveau.PATH) if tool is not None else None
        found.append(
            {
                "path": path,
                "release": release,
                "bytes": sizes[path],
                "newer": written[path] >= since,
                "nouveau": inside.nouveau if inside is not None else None,
                "blacklist": inside.blacklist if inside is not None else None,
                "kept": system.exists(initramfs.KEPT + release),
            }
        )
    return found


class NouveauConcern:
    """nouveau on the machine that the module runs on."""

    def __init__(self, present: bool, system: System, keep_file: bool = False) -> None:
        self._present = present
        self._keep_file = keep_file
        self._system = system
        self._in_use = False

    def observe(self) -> Json:
        found = distribution(self._system)
        own = kernel(self._system)
        seen: Json = {
            "distribution": found,
            "kernel": own,
            "nouveau": observe(self._system, found["family"], own["installed"]),
        }
        if self._in_use:
            seen["nouveau"]["refcnt"] = None
        return seen

    def plan(self, seen: Json) -> _runner.Plan:
        return nouveau.plan(self._present, seen, self._keep_file)

    def apply(self, seen: Json, plan: _runner.Plan) -> None:
        for change in plan.changes:
            step = change.step
            if isinstance(step, nouveau.PutFile):
                self._put(step)
            elif isinstance(step, nouveau.Sweep):
                self._system.remove(step.path)
            elif isinstance(step, nouveau.Rebuild):
                tool = seen["nouveau"]["tool"]
                Image(self._system, tool, step.path, step.release, nouveau.PATH, self._present).rebuild()
            elif isinstance(step, nouveau.Unload):
                self._unload(step)

    def _put(self, file: nouveau.PutFile) -> None:
        if file.text is None:
            self._system.remove(file.path)
        else:
            self._system.write(file.path, file.text)

    def _unload(self, step: nouveau.Unload) -> None:
        for name in step.consoles:
            self._bind(name, "0")
        # Something may have begun to use it since: then it goes with the next boot.
        self._in_use = self._system.run(["modprobe", "-r", "nouveau"]).rc != 0
        if self._in_use:
            for name in step.consoles:
                self._bind(name, "1")

    def _bind(self, console: str, value: str) -> None:
        self._system.run(["tee", f"{CONSOLES}/{console}/bind"], stdin=f"{value}\n")


def work(present: bool, check: bool, system: System, keep_file: bool = False) -> Json:
    """Run the concern and add what only a reboot can do."""
    concern = NouveauConcern(present, system, keep_file)
    result = _runner.run(concern, check)
    seen = concern.observe()
    return {**result, "reboot_required": nouveau.reboot_required(present, seen)}
