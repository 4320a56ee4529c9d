# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where boot loaders have the kernel's arguments, and the form of their entries. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

DEFAULT = "/etc/default/grub"
DROP_INS = "/etc/default/grub.d"
# After those of cloud images, which set variables anew.
DROP_IN = f"{DROP_INS}/90-kubegpu.cfg"
CMDLINE = "/etc/kernel/cmdline"
KERNELSTUB = "/etc/kernelstub/configuration"
# The kernels that these are for mustn't change by what is configured on the machine.
_RESCUE = re.compile(r"-0-rescue|[-_.]rescue\.conf$")
_MACHINE = re.compile(r"[0-9a-f]{32}(?=[-.])")


@dataclasses.dataclass(frozen=True)
class EntryLine:
    """A line of an entry: its key, and the positions of its value without the line's end."""

    key: str
    start: int
    end: int


def entry_lines(text: str) -> list[EntryLine]:
    found = []
    for match in re.finditer(r"^[ \t]*([^\s#]\S*)[ \t]+([^\r\n]*)", text, re.MULTILINE):
        found.append(EntryLine(match.group(1), match.start(2), match.end(2)))
    return found


def entry_fields(text: str) -> dict[str, str]:
    """Return the keys of an entry with their values; ``options`` are joined by a blank."""
    fields: dict[str, str] = {}
    for line in entry_lines(text):
        value = text[line.start : line.end].strip()
        fields[line.key] = f"{fields[line.key]} {value}" if line.key == "options" and "options" in fields else value
    return fields


def is_entry(path: str) -> bool:
    """Return whether a path is that of an entry of the Boot Loader Specification."""
    return path.endswith(".conf")


def is_place(path: str) -> bool:
    """Return whether this collection may have written a file: a record that names another one isn't its own."""
    if path in (DEFAULT, DROP_IN, CMDLINE, KERNELSTUB):
        return True
    folder, _slash, name = path.rpartition("/")
    return is_entry(name) and folder.endswith("/loader/entries") and posixpath.normpath(path) == path


def own_entries(files: t.Mapping[str, str], machine_id: str) -> list[str]:
    """Return the paths of the entries of this system's kernels: no rescue kernel, and no other system's.

    :param machine_id: an entry whose name begins with another one is another system's, unless all do, as in an image.
    """
    paths = []
    for path, text in sorted(files.items()):
        name = path.rpartition("/")[2]
        if is_entry(path) and "linux" in entry_fields(text) and not _RESCUE.search(name):
            paths.append(path)
    known = [path for path in paths if _MACHINE.match(path.rpartition("/")[2])]
    ours = [path for path in known if path.rpartition("/")[2].startswith(machine_id)] if machine_id else known
    return [path for path in paths if path not in known or path in ours or not ours]


def command_lines(text: str) -> list[str]:
    """Return the lines of /etc/kernel/cmdline that aren't comments."""
    return [line for line in text.splitlines() if line.lstrip()[:1] != "#"]
