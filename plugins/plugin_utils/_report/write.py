# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write files on the controller: completely or not at all, and only if their content changes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import tempfile
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject

# Bytes. Ansible's own limit of a diff.
MOST_TO_SHOW = 104448


@dataclasses.dataclass(frozen=True)
class Target:
    """A file to write.

    :param argument: the module's argument that sets the path.
    :param path: absolute, or relative to the working directory.
    :param content: its text, written as UTF-8.
    :param mode: its permissions.
    """

    argument: str
    path: str
    content: str
    mode: int = 0o600


@dataclasses.dataclass(frozen=True)
class PlannedFile:
    """A file, its content before, and whether it changes."""

    target: Target
    before: bytes | None
    changed: bool

    def diff(self) -> JsonObject:
        """Return the diff in Ansible's form; large files are only reported as such, as Ansible does."""
        path = self.target.path
        shown: JsonObject = {"before_header": path, "after_header": path, "before": "", "after": ""}
        if self.before is not None and len(self.before) > MOST_TO_SHOW:
            shown["dst_larger"] = MOST_TO_SHOW
        elif len(self.target.content) > MOST_TO_SHOW:
            shown["src_larger"] = MOST_TO_SHOW
        else:
            before = (self.before or b"").decode("utf-8", "replace")
            shown.update(before=before, after=self.target.content)
        return shown


def plan(targets: t.Sequence[Target]) -> list[PlannedFile]:
    """Compute what writing the files would change.

    :raises BadInput: a file can't be written there.
    """
    taken: dict[str, str] = {}
    for target in targets:
        place = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(target.path))), _name(target))
        if place in taken:
            raise BadInput(f"{target.argument}: {target.path} is also the path of {taken[place]}; set different ones")
        taken[place] = target.argument
    return [_plan(target) for target in targets]


def write(planned: t.Sequence[PlannedFile]) -> None:
    """Write the files that change.

    :raises BadInput: a file can't be written; it is unchanged, and those before it are written.
    """
    for one in planned:
        if one.changed:
            _write(one.target)


def _name(target: Target) -> str:
    name = os.path.basename(target.path)
    if name in ("", ".", "..") or "\0" in target.path:
        raise BadInput(f"{target.argument}: {target.path!r} isn't a file name")
    return name


def _plan(target: Target) -> PlannedFile:
    folder = os.path.dirname(os.path.abspath(target.path))
    if not os.path.isdir(folder):
        raise BadInput(f"{target.argument}: the directory {folder} doesn't exist on the controller; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"{target.argument}: the directory {folder} on the controller isn't writable")
    try:
        state = os.lstat(target.path)
        if stat.S_ISLNK(state.st_mode):
            # A symbolic link is replaced, not followed: another user may have created it.
            return PlannedFile(target, None, True)
        if not stat.S_ISREG(state.st_mode):
            raise BadInput(f"{target.argument}: {target.path} exists and isn't a regular file")
        with open(target.path, "rb") as file:
            before = file.read()
    except FileNotFoundError:
        return PlannedFile(target, None, True)
    except OSError as error:
        raise BadInput(f"{target.argument}: {target.path} can't be read: {error.strerror}") from error
    return PlannedFile(target, before, before != target.content.encode())


def _write(target: Target) -> None:
    """Write a temporary file and rename it, so that readers (node_exporter at any time) see a complete file."""
    path = os.path.abspath(target.path)
    temporary = ""
    try:
        # The collector reads *.prom only, so it never reads this name.
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=os.path.dirname(path))
        with os.fdopen(handle, "wb") as file:
            file.write(target.content.encode())
            os.fchmod(file.fileno(), target.mode)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise BadInput(f"{target.argument}: {target.path} can't be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            if temporary:
                os.unlink(temporary)
