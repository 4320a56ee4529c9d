# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Files of the container toolkit that its packages don't keep right by themselves. Pure.

One flag of nvidia-cdi-refresh.service: its CDI specification is of version 0.7 where a device node needs a group of its
own, and older runtimes refuse that version. Whether a container without privileges gets cards by what its environment
asks for. And what is left when the packages are gone.
What has been seen is plain JSON: ``toolkit`` {config} and ``cdi`` {specs, refresh_env} as in ``gpu_node``.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

ENVIRONMENT = "/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"
SERVICE = "nvidia-cdi-refresh.service"
CONFIG = "/etc/nvidia-container-runtime/config.toml"
# /var/run is /run; the service writes this one, and no package takes it away.
SPECIFICATION = "/run/cdi/nvidia.yaml"
VARIABLE = "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS"
FLAG = "no-additional-gids-for-device-nodes"
MARKER = "# kubegpu.share: this node's container runtime reads no CDI specification of version 0.7."
# What stands there until the specification was made anew.
PENDING = f"{MARKER} (Not in effect yet.)"

ACCEPT = "accept-nvidia-visible-devices-envvar-when-unprivileged"
# What the line was before, is said behind it.
ACCEPT_MARKER = "# kubegpu.share: only a privileged container gets cards by its environment. Before:"

ARGUMENTS: Json = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "old_cdi": {"type": "bool", "default": False},
    "accept_unprivileged": {"type": "bool", "default": True},
    "keep": {"type": "list", "elements": "path", "default": []},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class Refresh:
    """The environment's text while the specification is made anew, and after it."""

    pending: str
    text: str


@dataclasses.dataclass(frozen=True)
class Configure:
    """The toolkit's configuration as it is, None where there is none, and as it has to be.

    :param says: whether the toolkit has to say then that it refuses.
    """

    before: str | None
    text: str
    says: bool


@dataclasses.dataclass(frozen=True)
class RemoveFile:
    path: str


def with_flag(text: str, marker: str = MARKER) -> str:
    """The environment with the flag, set by us or by the user."""
    bare = without_flag(text)
    lines = bare.splitlines(keepends=True)
    at = _assignment(lines)
    if at is None or not _flags(lines[at]):
        # The last assignment counts, and an empty one of the user's stays as it is.
        start = bare if not bare or bare.endswith("\n") else bare + "\n"
        return f"{start}{marker}\n{VARIABLE}={FLAG}\n"
    if FLAG in _flags(lines[at]):
        return bare
    end = lines[at][len(lines[at].rstrip("\r\n")) :]
    flags = [*_flags(lines[at]), FLAG]
    lines[at] = f"{marker}\n{VARIABLE}={','.join(flags)}{end or chr(10)}"
    return "".join(lines)


def without_flag(text: str) -> str:
    """The environment without the flag, where it was us who set it."""
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
    """The last one counts, as for systemd."""
    found = [number for number, line in enumerate(lines) if re.match(rf"\s*{VARIABLE}\s*=", line)]
    return found[-1] if found else None


def _flags(line: str) -> list[str]:
    name, _equals, value = line.partition("=")
    words = value.strip().strip("\"'").split(",") if name.strip() == VARIABLE else []
    return [word.strip() for word in words if word.strip()]


def refusing(text: str) -> str:
    """The toolkit's configuration that accepts the environment's wishes from nobody without privileges."""
    bare = accepting(text)
    lines = bare.splitlines(keepends=True)
    at = _accepts(lines)
    if at is None:
        # A key of no table has to stand before the first one.
        return f"{ACCEPT_MARKER}\n{ACCEPT} = false\n{bare}"
    old = lines[at].rstrip("\r\n")
    if re.match(r"[^=]*=\s*false\b", old):
        return bare
    end = lines[at][len(old) :]
    lines[at] = f"{ACCEPT_MARKER} {old}{end or chr(10)}{ACCEPT} = false{end}"
    return "".join(lines)


def accepting(text: str) -> str:
    """The toolkit's configuration without what ``refusing`` put in."""
    lines = text.splitlines(keepends=True)
    for mark in reversed([number for number, line in enumerate(lines) if line.startswith(ACCEPT_MARKER)]):
        before = lines[mark][len(ACCEPT_MARKER) :].rstrip("\r\n")
        after = lines[mark + 1] if mark + 1 < len(lines) else ""
        ours = bool(re.match(rf"{ACCEPT} = false\s*$", after))
        end = after[len(after.rstrip("\r\n")) :] if ours else "\n"
        lines[mark : mark + 1 + ours] = [before[1:] + end] if before and ours else []
    return "".join(lines)


def _accepts(lines: t.Sequence[str]) -> int | None:
    """The line that assigns the key; those below the first table's name belong to a table."""
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


def plan(params: Json, seen: Json) -> Plan:
    """What has to be done on a node that looks so."""
    text = seen["cdi"].get("refresh_env")
    config = (seen["toolkit"].get("config") or {}).get("text")
    if params["state"] == "present":
        return Plan((*_environment(text, params["old_cdi"]), *_configuration(config, params["accept_unprivileged"])))
    there = {CONFIG: config, ENVIRONMENT: text}
    if SPECIFICATION in [one["path"] for one in seen["cdi"]["specs"]]:
        there[SPECIFICATION] = f"made by {SERVICE}\n"
    changes = [
        Change(path, was, "", RemoveFile(path))
        for path, was in there.items()
        if was is not None and path not in params["keep"]
    ]
    if ENVIRONMENT in params["keep"]:
        # What was there before stays without what we put into it.
        changes += _environment(text, False)
    if CONFIG in params["keep"]:
        changes += _configuration(config, True)
    return Plan(tuple(changes))


def _environment(text: str | None, old_cdi: bool) -> t.Iterator[Change]:
    have = text or ""
    want = with_flag(have) if old_cdi else without_flag(have)
    if want != have:
        yield Change(ENVIRONMENT, have, want, Refresh(with_flag(have, PENDING) if old_cdi else want, want))
