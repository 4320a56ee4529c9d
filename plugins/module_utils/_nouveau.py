# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Keep nouveau away from the cards: the modprobe.d file, and the initramfs of every kernel. Pure.

What has been seen is plain JSON, as ``gpu_node_info`` returns it: ``nouveau`` {loaded, refcnt, blacklisted, files,
images, boot_free}, ``kernel`` {release, installed} and ``distribution`` {family}.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

PATH = "/etc/modprobe.d/blacklist-nouveau.conf"
# The two lines of NVIDIA's installation guide: the first keeps it from being loaded, the second from driving a card.
DIRECTIVES = ("blacklist nouveau", "options nouveau modeset=0")

ARGUMENTS: Json = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class Initramfs:
    """How a family of distributions keeps its images: ``prefix`` + release is one; ``rebuild`` makes all of them."""

    prefix: str
    rebuild: tuple[str, ...]


INITRAMFS = {
    # Without -k all only the newest kernel's image is made, and that needn't be the one that boots.
    "debian": Initramfs("/boot/initrd.img-", ("update-initramfs", "-u", "-k", "all")),
}


@dataclasses.dataclass(frozen=True)
class PutFile:
    """``text`` is what the images are made with; ``remove`` takes the file away after that."""

    text: str
    remove: bool = False


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """One image is older than the file."""


@dataclasses.dataclass(frozen=True)
class Unload:
    """The module is loaded and nothing uses it."""


def directives(text: str) -> list[str]:
    """A modprobe.d file's directives, blanks made one, comments left out."""
    lines = (" ".join(line.split("#", 1)[0].split()) for line in text.splitlines())
    return [line for line in lines if line]


def blacklisted(text: str) -> bool:
    return DIRECTIVES[0] in directives(text)


def plan(present: bool, seen: Json) -> Plan:
    """What has to be done on a node that looks so.

    :raises BadInput: no way is known to make this distribution's images, or /boot is too full for it.
    """
    family = seen["distribution"]["family"]
    if family not in INITRAMFS:
        raise BadInput(f"nouveau can't be kept away from a node of family {family!r}; known: {', '.join(INITRAMFS)}")
    nouveau = seen["nouveau"]
    file = _file_change(present, nouveau["files"].get(PATH))
    stale = [one for one in nouveau["images"] if file or (nouveau["files"].get(PATH) is not None and not one["newer"])]
    changes = [file] if file else []
    if stale:
        refuse_full_boot(nouveau)
    for one in stale:
        with_it = ("without nouveau's blacklist\n", "with nouveau's blacklist\n")
        before, after = with_it if present else with_it[::-1]
        changes.append(Change(one["path"], before, after, Rebuild()))
    if present and unloadable(seen):
        changes.append(Change("module nouveau", "loaded\n", "", Unload()))
    return Plan(tuple(changes))


def _file_change(present: bool, text: str | None) -> Change | None:
    have = text or ""
    if present:
        missing = [line for line in DIRECTIVES if line not in directives(have)]
        if not missing:
            return None
        start = have if not have or have.endswith("\n") else have + "\n"
        after = start + "".join(f"{line}\n" for line in missing)
        return Change(PATH, have, after, PutFile(after))
    if text is None:
        return None
    rest = "".join(
        line for line in text.splitlines(keepends=True) if not set(directives(line)).intersection(DIRECTIVES)
    )
    if rest == text and rest.strip():
        return None
    # The emptied file outlives the images' making: an interrupted run still sees what there is to do.
    return Change(PATH, text, rest if rest.strip() else "", PutFile(rest, remove=not rest.strip()))


def refuse_full_boot(nouveau: Json) -> None:
    """A half-written image is a kernel that doesn't boot.

    :raises BadInput: less is free than two of the largest image.
    """
    need = 2 * max(one["bytes"] for one in nouveau["images"])
    if nouveau["boot_free"] < need:
        raise BadInput(
            f"/boot has {nouveau['boot_free'] >> 20} MiB free and making the initramfs anew needs {need >> 20} MiB: "
            "remove kernels that aren't used"
        )


def unloadable(seen: Json) -> bool:
    """Loaded, used by nobody, and this node's own: a container sees its host's modules and leaves them alone."""
    return bool(seen["nouveau"]["loaded"] and seen["nouveau"]["refcnt"] == 0 and seen["kernel"]["installed"])


def reboot_required(present: bool, seen: Json) -> bool:
    """Only a reboot rids the node of the module."""
    return bool(present and seen["nouveau"]["loaded"] and seen["kernel"]["installed"] and not unloadable(seen))
