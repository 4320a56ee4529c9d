# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The container toolkit's configuration files, and the files that its packages leave behind. Pure.

A flag of nvidia-cdi-refresh.service keeps its CDI specification older than version 0.7, which older runtimes reject: it
writes that version where a device node needs a group of its own. A key of config.toml controls whether an unprivileged
container gets the GPUs that its environment requests.
https://github.com/NVIDIA/nvidia-container-toolkit/blob/v1.20.1/internal/config/config.go
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._packages.steps import RemoveFile
from .facts import CONFIG, ENVIRONMENT

SERVICE = "nvidia-cdi-refresh.service"
# The service writes it, and no package removes it; /var/run is /run.
SPECIFICATION = "/run/cdi/nvidia.yaml"
VARIABLE = "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS"
FLAG = "no-additional-gids-for-device-nodes"
MARKER = "# kubegpu.share: this node's container runtime reads no CDI specification of version 0.7."
# The marker until the specification has been regenerated.
PENDING = f"{MARKER} (Not in effect yet.)"

ACCEPT = "accept-nvidia-visible-devices-envvar-when-unprivileged"
# The original line follows.
ACCEPT_MARKER = "# kubegpu.share: only a privileged container gets GPUs by its environment. Before:"


@dataclasses.dataclass(frozen=True)
class Refresh:
    """The environment's text while the specification is regenerated, and after it."""

    pending: str
    text: str


@dataclasses.dataclass(frozen=True)
class Configure:
    """A change of the toolkit's configuration.

    :param before: None where there is no file.
    :param refuses: the toolkit has to confirm that it refuses requests of unprivileged containers.
    """

    before: str | None
    text: str
    refuses: bool


def with_flag(text: str, marker: str = MARKER) -> str:
    """Return the environment with the flag, set by us or by the user."""
    bare = without_flag(text)
    lines = bare.splitlines(keepends=True)
    at = _assignment(lines)
    if at is None or not _flags(lines[at]):
        # The last assignment wins, so the user's empty one can stay.
        start = bare if not bare or bare.endswith("\n") else bare + "\n"
        return f"{start}{marker}\n{VARIABLE}={FLAG}\n"
    if FLAG in _flags(lines[at]):
        return bare
    end = lines[at][len(lines[at].rstrip("\r\n")) :]
    flags = [*_flags(lines[at]), FLAG]
    lines[at] = f"{marker}\n{VARIABLE}={','.join(flags)}{end or chr(10)}"
    return "".join(lines)


def without_flag(text: str) -> str:
    """Return the environment without the flag, where we set it."""
    lines = text.splitlines(keepends=True)
    marks = [number for number, line in enumerate(lines) if line.startswith(MARKER)]
    for mark in reversed(marks):
        after = lines[mark + 1] if mark + 1 < len(lines) else ""
        if FLAG in _flags(after):
            left = [flag for flag in _flags(after) if flag != FLAG]
            end = after[len(after.rstrip("\r\n")) :]
            lines[mark + 1 : mark + 2] = [f"{VARIABLE}={','.join(left)}{end}"] if left else []
        del lines[mark]
    return "".join(lines)


def _assignment(lines: t.Sequence[str]) -> int | None:
    """Find the last assignment, which is systemd's choice too."""
    found = [number for number, line in enumerate(lines) if re.match(rf"\s*{VARIABLE}\s*=", line)]
    return found[-1] if found else None


def _flags(line: str) -> list[str]:
    name, _equals, value = line.partition("=")
    words = value.strip().strip("\"'").split(",") if name.strip() == VARIABLE else []
    return [word.strip() for word in words if word.strip()]


def refusing(text: str) -> str:
    """Return the configuration that ignores the environment of unprivileged containers."""
    bare = accepting(text)
    lines = bare.splitlines(keepends=True)
    at = _accepts(lines)
    if at is None:
        # A top-level key has to precede the first table.
        return f"{ACCEPT_MARKER}\n{ACCEPT} = false\n{bare}"
    old = lines[at].rstrip("\r\n")
    if re.match(r"[^=]*=\s*false\b", old):
        return bare
    end = lines[at][len(old) :]
    lines[at] = f"{ACCEPT_MARKER} {old}{end or chr(10)}{ACCEPT} = false{end}"
    return "".join(lines)


def accepting(text: str) -> str:
    """Undo ``refusing``."""
    lines = text.splitlines(keepends=True)
    for mark in reversed([number for number, line in enumerate(lines) if line.startswith(ACCEPT_MARKER)]):
        before = lines[mark][len(ACCEPT_MARKER) :].rstrip("\r\n")
        after = lines[mark + 1] if mark + 1 < len(lines) else ""
        ours = bool(re.match(rf"{ACCEPT} = false\s*$", after))
        end = after[len(after.rstrip("\r\n")) :] if ours else "\n"
        lines[mark : mark + 1 + ours] = [before[1:] + end] if before and ours else []
    return "".join(lines)


def _accepts(lines: t.Sequence[str]) -> int | None:
    """Find the line that assigns the key; a line after the first table's header belongs to that table."""
    for number, line in enumerate(lines):
        if re.match(r"\s*\[\[?[^\[\],]+\]\]?\s*(#.*)?$", line):
            return None
        if re.match(rf"\s*([\"']?){ACCEPT}\1\s*=", line):
            return number
    return None


def _configuration(text: str | None, accept: bool) -> t.Iterator[Change]:
    have = text or ""
    want = accepting(have) if accept else refusing(have)
    if want != have:
        yield Change(CONFIG, have, want, Configure(text, want, not accept))


def plan(params: JsonObject, seen: t.Mapping[str, t.Any]) -> Plan:
    """Plan the changes.

    :param seen: sections ``toolkit`` and ``cdi`` of ``gpu_node``.
    """
    text = seen["cdi"].get("refresh_env")
    config = (seen["toolkit"].get("config") or {}).get("text")
    if params["state"] == "present":
        return Plan((*_environment(text, params["old_cdi"]), *_configuration(config, params["accept_unprivileged"])))
    existing = {CONFIG: config, ENVIRONMENT: text}
    if SPECIFICATION in [one["path"] for one in seen["cdi"]["specs"]]:
        existing[SPECIFICATION] = f"generated by {SERVICE}\n"
    changes = [
        Change(path, was, "", RemoveFile(path))
        for path, was in existing.items()
        if was is not None and path not in params["keep"]
    ]
    if ENVIRONMENT in params["keep"]:
        # A file that existed before stays, without our settings.
        changes += _environment(text, False)
    if CONFIG in params["keep"]:
        changes += _configuration(config, True)
    return Plan(tuple(changes))


def _environment(text: str | None, old_cdi: bool) -> t.Iterator[Change]:
    have = text or ""
    want = with_flag(have) if old_cdi else without_flag(have)
    if want != have:
        yield Change(ENVIRONMENT, have, want, Refresh(with_flag(have, PENDING) if old_cdi else want, want))
