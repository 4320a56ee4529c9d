# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Files on the controller: written whole or not at all, and only where their content is another."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import tempfile
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput

# A diff of more than that tells nobody anything; Ansible's own limit.
MOST_TO_SHOW = 104448


@dataclasses.dataclass(frozen=True)
class Target:
    """A file to write.

    :param argument: the module's argument that names it.
    :param path: absolute, or relative to the working folder.
    :param content: its text, written as UTF-8.
    :param mode: its permissions where it is written.
    """

    argument: str
    path: str
    content: str
    mode: int = 0o600


@dataclasses.dataclass(frozen=True)
class Written:
    """A file and whether it was (or, in check mode, would be) another before."""

    target: Target
    before: bytes | None
    changed: bool

    def diff(self) -> dict[str, t.Any]:
        """In the form that Ansible prints with --diff; large files are only said to be large, as Ansible does."""
        path = self.target.path
        shown: dict[str, t.Any] = {"before_header": path, "after_header": path, "before": "", "after": ""}
        if self.before is not None and len(self.before) > MOST_TO_SHOW:
            shown["dst_larger"] = MOST_TO_SHOW
        elif len(self.target.content) > MOST_TO_SHOW:
            shown["src_larger"] = MOST_TO_SHOW
        else:
            before = (self.before or b"").decode("utf-8", "replace")
            shown.update(before=before, after=self.target.content)
        return shown


def look(targets: t.Sequence[Target]) -> list[Written]:
    """What writing the files would change; nothing is written.

    :raises BadInput: a file can't be written there.
    """
    taken: dict[str, str] = {}
    for target in targets:
        place = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(target.path))), _name(target))
        if place in taken:
            raise BadInput(f"{target.argument}: {target.path} is the file of {taken[place]} too; give each its own")
        taken[place] = target.argument
    return [_look(target) for target in targets]


def write(seen: t.Sequence[Written]) -> None:
    """Write those files that change.

    :raises BadInput: a file couldn't be written; it is as it was, and those before it are written.
    """
    for one in seen:
        if one.changed:
            _write(one.target)


def _name(target: Target) -> str:
    name = os.path.basename(target.path)
    if name in ("", ".", "..") or "\0" in target.path:
        raise BadInput(f"{target.argument}: {target.path!r} names no file")
    return name


def _look(target: Target) -> Written:
    folder = os.path.dirname(os.path.abspath(target.path))
    if not os.path.isdir(folder):
        raise BadInput(f"{target.argument}: the folder {folder} doesn't exist on the controller; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"{target.argument}: the folder {folder} on the controller can't be written to")
    try:
        state = os.lstat(target.path)
        if stat.S_ISLNK(state.st_mode):
            # It is replaced and never followed: somebody else may have put it there.
            return Written(target, None, True)
        if not stat.S_ISREG(state.st_mode):
            raise BadInput(f"{target.argument}: {target.path} is there and is no file")
        with open(target.path, "rb") as file:
            before = file.read()
    except FileNotFoundError:
        return Written(target, None, True)
    except OSError as error:
        raise BadInput(f"{target.argument}: {target.path} can't be read: {error.strerror}") from error
    return Written(target, before, before != target.content.encode())


def _write(target: Target) -> None:
    """Beside the file first, so that nobody ever reads half of it (node_exporter reads at any time)."""
    path = os.path.abspath(target.path)
    temporary = ""
    try:
        # The collector takes *.prom only, so a name that begins and ends otherwise is never read.
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
