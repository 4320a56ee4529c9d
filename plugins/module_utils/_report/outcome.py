# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the action ``gpu_report`` prints and writes: files completely or not at all, and JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import tempfile
import typing as t

from .._contracts.claims import MALFORMED
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._core.untrusted import line
from . import html, junit, prometheus, text_output
from .parse import view

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
    for file in planned:
        if file.changed:
            _write(file.target)


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


def render_json(report: JsonObject | None, allocation: JsonObject | None) -> str:
    """Return the report's keys and ``allocation``; ASCII, so that it contains no terminal sequences."""
    whole = {**(report or {}), **({} if allocation is None else {"allocation": allocation})}
    return json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n"


def _plain(value: t.Any) -> t.Any:
    """Replace NaN and infinity, which JSON doesn't have, by null."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


ARGUMENTS: JsonObject = {
    "text": {"type": "str"},
    "report": {"type": "dict"},
    "allocation": {"type": "dict"},
    "html": {"type": "path"},
    "json": {"type": "path"},
    "junit": {"type": "path"},
    "prometheus": {"type": "path"},
    "prometheus_mode": {"type": "raw", "default": "0644"},
    "quiet": {"type": "bool", "default": False},
}
REQUIRED_ONE_OF = [["report", "allocation", "text"]]
MUTUALLY_EXCLUSIVE = [["text", other] for other in ("report", "allocation", "html", "json", "junit", "prometheus")]


class Rendered(t.NamedTuple):
    """
    :param text: to print.
    :param result: a level; empty if nothing was checked.
    :param targets: files to write.
    """

    text: str
    result: str
    targets: list[Target]


def untagged(params: JsonObject) -> JsonObject:
    """Copy the arguments without the tags of Ansible's values.

    :raises BadInput: they contain what JSON can't.
    """
    try:
        copied: JsonObject = json.loads(json.dumps(params, default=str))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"report, allocation: they aren't data of a report: {error}") from error
    return copied


def render(params: JsonObject) -> Rendered:
    """Render everything that the arguments request.

    :raises BadInput: an argument is invalid.
    """
    if params["text"] is not None:
        return Rendered(params["text"], "", [])
    mode = permissions(params["prometheus_mode"])
    if params["junit"] and params["report"] is None:
        raise BadInput("junit: its cases are those of the checks, so it needs report")
    try:
        return _rendered(params, mode)
    except MALFORMED as error:
        raise BadInput(
            "report, allocation: they aren't the results of gpu_allocation_check and gpu_allocation_info "
            f"({type(error).__name__}: {line(error, 80)})"
        ) from error


def _rendered(params: JsonObject, mode: int) -> Rendered:
    report, allocation = params["report"], params["allocation"]
    shown = view(report, allocation)
    renderers: dict[str, t.Callable[[], str]] = {
        "html": lambda: html.render(shown),
        "json": lambda: render_json(report, allocation),
        "junit": lambda: junit.render(shown),
        "prometheus": lambda: prometheus.render(shown),
    }
    targets = [
        Target(argument, params[argument], make(), mode if argument == "prometheus" else 0o600)
        for argument, make in renderers.items()
        if params[argument]
    ]
    return Rendered(text_output.render(shown), shown.result if shown.checked else "", targets)


def permissions(value: t.Any) -> int:
    """Parse permissions as Ansible's ``mode`` accepts them: octal digits as text, or YAML's number for 0644.

    :raises BadInput: they are invalid.
    """
    mode = value if isinstance(value, int) and not isinstance(value, bool) else -1
    if isinstance(value, str) and 3 <= len(value) <= 4 and set(value) <= set("01234567"):
        mode = int(value, 8)
    if not 0o400 <= mode <= 0o777:
        raise BadInput(f"prometheus_mode: {value!r} isn't like '0644'")
    return mode
