# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the blacklist of nouveau and nova: the modprobe.d file, and the initramfs of every kernel. Pure."""

from __future__ import annotations

import dataclasses

from .._core.errors import BadInput
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .nouveau import (
    DIRECTIVES,
    DRACUT_PATH,
    FAMILIES,
    KEPT,
    PATH,
    directives,
)
from .types import InitramfsImage, NodeFacts, Nouveau

DRACUT_TEXT = f"""\
# dracut leaves /etc/modprobe.d out of images for every host.
install_items+=" {PATH} "
"""


ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "keep_file": {"type": "bool", "default": False},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class PutFile:
    """``text``: None removes the file."""

    path: str
    text: str | None


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """One kernel's image has to be rebuilt."""

    path: str
    release: str


@dataclasses.dataclass(frozen=True)
class Unload:
    """Unload the modules, which only these consoles use."""

    modules: tuple[str, ...]
    consoles: tuple[str, ...]


def make_plan(present: bool, facts: NodeFacts, keep_file: bool = False) -> Plan:
    """Return what has to be done.

    :param keep_file: the file existed before, and stays when the blacklist is removed.
    :raises BadInput: this node's images can't be rebuilt, or /boot has too little space or is read-only.
    """
    family, nouveau = facts["distribution"]["family"], facts["nouveau"]
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadInput(f"nouveau: the distribution's family {family!r} isn't supported; supported: {known}")
    own = None if keep_file and not present else _file_change(present, nouveau["files"].get(PATH))
    files = [own, _dracut_change(present, nouveau)]
    changes = [change for change in files if change is not None]
    stale = [image for image in nouveau["images"] if _stale(present, image, files[0], nouveau["files"].get(PATH))]
    # The kept copy of an existing image is restored by its rebuild.
    kept = {KEPT + image["release"] for image in nouveau["images"] if image.get("kept")}
    left = [path for path in nouveau.get("leftovers", ()) if path not in kept]
    if stale or left:
        _refuse_boot(nouveau)
    changes += [Change(path, "left by an interrupted run\n", "", PutFile(path, None)) for path in left]
    for image in stale:
        texts = ("without nouveau's blacklist\n", "with nouveau's blacklist\n")
        before, after = texts if present else texts[::-1]
        changes.append(Change(image["path"], before, after, Rebuild(image["path"], image["release"])))
    if present and unloadable(facts):
        step = Unload(("nouveau",), tuple(nouveau.get("consoles", ())))
        changes.append(Change("module nouveau", "loaded\n", "", step))
    if present and nova_unloadable(facts):
        names = tuple(nouveau["nova"]["modules"])
        changes.append(Change(f"module {names[-1]}", "loaded\n", "", Unload(names, ())))
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


def _dracut_change(present: bool, nouveau: Nouveau) -> Change | None:
    needed = present and nouveau.get("tool") == "dracut" and nouveau["images"]
    have, wanted = nouveau.get("dracut"), DRACUT_TEXT if needed else None
    if have == wanted:
        return None
    return Change(DRACUT_PATH, have or "", wanted or "", PutFile(DRACUT_PATH, wanted))


def _stale(present: bool, image: InitramfsImage, change: Change | None, text: str | None) -> bool:
    """Return whether an image lacks the file, contains an older one, or one that no longer exists."""
    if change is not None or image.get("kept"):
        return True
    if text is not None:
        return not image["newer"] or (present and image.get("blacklist") is False)
    # A run was killed after it had removed the file.
    return not present and image.get("blacklist") is True


def _refuse_boot(nouveau: Nouveau) -> None:
    """Refuse to begin where an image might be written in part: that kernel wouldn't boot.

    :raises BadInput: there is no tool, too little space for two of the largest image, or /boot is read-only.
    """
    if nouveau.get("boot_read_only"):
        raise BadInput("/boot is mounted read-only, so that no initramfs can be rebuilt: mount it writable")
    if not nouveau["images"]:
        return
    if nouveau.get("tool") is None:
        raise BadInput("no initramfs can be rebuilt on this node: install initramfs-tools or dracut")
    need = 2 * max(image["bytes"] for image in nouveau["images"])
    free = nouveau["boot_free"] or 0
    if free < need:
        raise BadInput(
            f"/boot has {free >> 20} MiB free and an initramfs rebuild needs {need >> 20} MiB: remove unused kernels"
        )


def unloadable(facts: NodeFacts) -> bool:
    """Return whether the module is loaded and unused, or used only by a console.

    A container has its host's modules, which stay.
    """
    nouveau = facts["nouveau"]
    if not nouveau["loaded"] or not facts["kernel"]["installed"]:
        return False
    if nouveau["refcnt"] == 0:
        return True
    # The console of another card, whose driver stays, would remain dark.
    only_ours = all("nouveau" in name for name in nouveau.get("framebuffers", ()))
    idle = nouveau["refcnt"] is not None and not nouveau.get("holders") and not nouveau.get("users")
    return bool(idle and only_ours and nouveau.get("consoles"))


def nova_unloadable(facts: NodeFacts) -> bool:
    """Return whether nova is loaded and unused."""
    nova = facts["nouveau"]["nova"]
    return bool(nova["modules"] and not nova["in_use"] and facts["kernel"]["installed"])


def reboot_required(present: bool, facts: NodeFacts) -> bool:
    """Return whether only a reboot unloads a module."""
    if not present or not facts["kernel"]["installed"]:
        return False
    nouveau = facts["nouveau"]
    stays = nouveau["loaded"] and not unloadable(facts)
    return bool(stays or (nouveau["nova"]["modules"] and not nova_unloadable(facts)))
