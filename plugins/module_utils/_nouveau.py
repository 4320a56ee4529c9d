# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Keep nouveau away from the cards: the modprobe.d file, and the initramfs of every kernel. Pure.

What has been seen is plain JSON, as ``gpu_node_info`` returns it: ``nouveau`` (see ``_nouveau_apply.observe``),
``kernel`` {release, installed} and ``distribution`` {family}.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _initramfs as initramfs
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

PATH = "/etc/modprobe.d/blacklist-nouveau.conf"
# The two lines of NVIDIA's installation guide: the first keeps it from being loaded, the second from driving a card.
DIRECTIVES = ("blacklist nouveau", "options nouveau modeset=0")

# dracut puts /etc/modprobe.d only into images for one host. Cloud machines have images for every host, nouveau inside.
DRACUT_PATH = "/etc/dracut.conf.d/kubegpu-nouveau.conf"
DRACUT_TEXT = f"""\
# Images that aren't made for this host alone leave /etc/modprobe.d out.
install_items+=" {PATH} "
"""

ARGUMENTS: Json = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "keep_file": {"type": "bool", "default": False},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class PutFile:
    """None takes the file away."""

    path: str
    text: str | None


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """One kernel's image doesn't hold what it should."""

    path: str
    release: str


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What an unfinished run left in /boot."""

    path: str


@dataclasses.dataclass(frozen=True)
class Unload:
    """The module is loaded and nothing but these consoles uses it."""

    consoles: tuple[str, ...]


def directives(text: str) -> list[str]:
    """A modprobe.d file's directives, blanks made one, comments left out."""
    lines = (" ".join(line.split("#", 1)[0].split()) for line in text.splitlines())
    return [line for line in lines if line]


def blacklisted(text: str) -> bool:
    return DIRECTIVES[0] in directives(text)


def plan(present: bool, seen: Json, keep_file: bool = False) -> Plan:
    """What has to be done on a node that looks so.

    :param keep_file: the file was the user's before, and stays when nouveau needn't be kept away any more.
    :raises BadInput: no way is known to make this node's images, or /boot has no room for it or can't be written.
    """
    family, nouveau = seen["distribution"]["family"], seen["nouveau"]
    if family not in initramfs.FAMILIES:
        known = ", ".join(initramfs.FAMILIES)
        raise BadInput(f"nouveau can't be kept away from a node of family {family!r}; known: {known}")
    own = None if keep_file and not present else _file_change(present, nouveau["files"].get(PATH))
    files = [own, _dracut_change(present, nouveau)]
    changes = [change for change in files if change is not None]
    stale = [one for one in nouveau["images"] if _stale(present, one, files[0], nouveau["files"].get(PATH))]
    sweeps = _sweeps(nouveau)
    if stale or sweeps:
        _refuse(nouveau)
    changes += sweeps
    for one in stale:
        with_it = ("without nouveau's blacklist\n", "with nouveau's blacklist\n")
        before, after = with_it if present else with_it[::-1]
        changes.append(Change(one["path"], before, after, Rebuild(one["path"], one["release"])))
    if present and unloadable(seen):
        changes.append(Change("module nouveau", "loaded\n", "", Unload(tuple(nouveau.get("consoles", ())))))
    return Plan(tuple(changes))


def _file_change(present: bool, text: str | None) -> Change | None:
    have = text or ""
    if present:
        missing = [line for line in DIRECTIVES if line not in directives(have)]
        if not missing:
            return None
        start = have if not have or have.endswith("\n") else have + "\n"
        after = start + "".join(f"{line}\n" for line in missing)
        return Change(PATH, have, after, PutFile(PATH, after))
    if text is None:
        return None
    rest = "".join(
        line for line in text.splitlines(keepends=True) if not set(directives(line)).intersection(DIRECTIVES)
    )
    if rest == text and rest.strip():
        return None
    if rest.strip():
        return Change(PATH, text, rest, PutFile(PATH, rest))
    return Change(PATH, text, "", PutFile(PATH, None))


def _dracut_change(present: bool, nouveau: Json) -> Change | None:
    needed = present and nouveau.get("tool") == "dracut" and nouveau["images"]
    have, wanted = nouveau.get("dracut"), DRACUT_TEXT if needed else None
    if have == wanted:
        return None
    return Change(DRACUT_PATH, have or "", wanted or "", PutFile(DRACUT_PATH, wanted))


def _stale(present: bool, image: Json, change: Change | None, text: str | None) -> bool:
    """Whether an image lacks the file, holds an older one, or one that isn't there any more."""
    if change is not None or image.get("kept"):
        return True
    if text is not None:
        return not image["newer"] or (present and image.get("blacklist") is False)
    # A run that was killed after it had taken the file away.
    return not present and image.get("blacklist") is True


def _sweeps(nouveau: Json) -> list[Change]:
    # What is kept of an image that is still there is put back by its rebuild.
    kept = {initramfs.KEPT + one["release"] for one in nouveau["images"] if one.get("kept")}
    left = [path for path in nouveau.get("leftovers", ()) if path not in kept]
    return [Change(path, "left by a run that didn't finish\n", "", Sweep(path)) for path in left]


def _refuse(nouveau: Json) -> None:
    """A half-written image is a kernel that doesn't boot.

    :raises BadInput: there is no tool, no room for two of the largest image, or no writing at all.
    """
    if nouveau.get("boot_read_only"):
        raise BadInput("/boot is mounted read-only, so that no initramfs can be made: mount it writable")
    if not nouveau["images"]:
        return
    if nouveau.get("tool") is None:
        raise BadInput("no initramfs can be made on this node: it has neither initramfs-tools nor dracut")
    need = 2 * max(one["bytes"] for one in nouveau["images"])
    if nouveau["boot_free"] < need:
        raise BadInput(
            f"/boot has {nouveau['boot_free'] >> 20} MiB free and making the initramfs anew needs {need >> 20} MiB: "
            "remove kernels that aren't used"
        )


def unloadable(seen: Json) -> bool:
    """Loaded, this node's own, and used by nobody, or by nothing but a console that is shown through it.

    A container sees its host's modules and leaves them alone.
    """
    nouveau = seen["nouveau"]
    if not nouveau["loaded"] or not seen["kernel"]["installed"]:
        return False
    if nouveau["refcnt"] == 0:
        return True
    # The console would go dark for good if it were another card's, whose driver stays.
    only_ours = all("nouveau" in name for name in nouveau.get("framebuffers", ()))
    idle = nouveau["refcnt"] is not None and not nouveau.get("holders") and not nouveau.get("users")
    return bool(idle and only_ours and nouveau.get("consoles"))


def reboot_required(present: bool, seen: Json) -> bool:
    """Only a reboot rids the node of the module."""
    return bool(present and seen["nouveau"]["loaded"] and seen["kernel"]["installed"] and not unloadable(seen))
