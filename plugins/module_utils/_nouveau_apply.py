# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""See nouveau on a machine, and carry out the plan that keeps it away."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _nouveau as nouveau
from ansible_collections.kubegpu.share.plugins.module_utils import _runner
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._node_info_host import distribution, kernel
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

# modprobe reads all of them; a file in an earlier one hides its namesakes in the later ones.
FOLDERS = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")


def observe(system: System, family: str, installed: t.Sequence[str]) -> Json:
    """The section ``nouveau``.

    :param installed: releases of the kernels that this node boots; none in a container.
    """
    files = {}
    for folder in FOLDERS:
        for name in system.names(folder):
            text = system.read(f"{folder}/{name}") if name.endswith(".conf") else None
            if text is not None and (f"{folder}/{name}" == nouveau.PATH or nouveau.blacklisted(text)):
                files[f"{folder}/{name}"] = text
    count = system.read("/sys/module/nouveau/refcnt")
    images = _images(system, family, installed)
    return {
        "loaded": system.exists("/sys/module/nouveau"),
        "refcnt": int(count) if count is not None else None,
        "blacklisted": any(nouveau.blacklisted(text) for text in files.values()),
        "files": files,
        "images": images,
        "boot_free": system.free_bytes("/boot") if images else None,
    }


def _images(system: System, family: str, installed: t.Sequence[str]) -> list[Json]:
    """Each kernel's image and whether it was made after our file was written."""
    kind = nouveau.INITRAMFS.get(family)
    paths = [kind.prefix + release for release in installed if system.exists(kind.prefix + release)] if kind else []
    if not paths:
        return []
    # One cheap call. Looking into the images instead would take a second for each.
    done = system.run(["stat", "-c", "%.9Y %s %n", nouveau.PATH, *paths])
    rows = [line.split(" ", 2) for line in done.out.splitlines()]
    written = {path: float(when) for when, _size, path in rows}
    sizes = {path: int(size) for _when, size, path in rows}
    since = written.get(nouveau.PATH, 0.0)
    return [{"path": path, "bytes": sizes[path], "newer": written[path] >= since} for path in paths if path in sizes]


class NouveauConcern:
    """nouveau on the machine that the module runs on."""

    def __init__(self, present: bool, system: System) -> None:
        self._present = present
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
        return nouveau.plan(self._present, seen)

    def apply(self, seen: Json, plan: _runner.Plan) -> None:
        steps = [change.step for change in plan.changes]
        files = [step for step in steps if isinstance(step, nouveau.PutFile)]
        for file in files:
            self._system.write(nouveau.PATH, file.text)
        if any(isinstance(step, nouveau.Rebuild) for step in steps):
            self._rebuild(nouveau.INITRAMFS[seen["distribution"]["family"]].rebuild)
        for file in files:
            if file.remove:
                self._system.remove(nouveau.PATH)
        if any(isinstance(step, nouveau.Unload) for step in steps):
            # Something may have begun to use it since: then it goes with the next boot.
            self._in_use = self._system.run(["modprobe", "-r", "nouveau"]).rc != 0

    def _rebuild(self, argv: t.Sequence[str]) -> None:
        done = self._system.run(argv, timeout=1800)
        if done.rc != 0:
            words = (done.err or done.out).strip().splitlines()[-1:] or [f"status {done.rc}"]
            raise ShareError(f"{' '.join(argv)} failed: {words[0]}", stdout=done.out[-8000:], stderr=done.err[-8000:])


def work(present: bool, check: bool, system: System) -> Json:
    """Run the concern and add what only a reboot can do."""
    concern = NouveauConcern(present, system)
    result = _runner.run(concern, check)
    seen = concern.observe()
    return {**result, "reboot_required": nouveau.reboot_required(present, seen)}
