# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The container tools of earlier years: stale lists, their keyrings and the packages that the toolkit replaced. Pure.

What goes is kept aside first, so that it can be given back. What has been seen is plain JSON: ``sources_stale``, rows
{file, text} of lists; ``toolkit_legacy`` {record, drop_ins}: the text of what was written down when things were kept
aside, and files of nvidia-ctk, which are only told of; ``packages`` {name: {version, held}}. On the node itself
``keyrings`` (those to go) and ``kept`` (what can be given back) stand beside them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_legacy_sources as sources
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

STORE = "/var/lib/kubegpu-share/legacy"
RECORD = f"{STORE}/record.json"
SCHEMA = 1
# A package's removal may take these along: nvidia-docker2 owns Docker's own configuration.
PROTECTED = ("/etc/docker/daemon.json", "/etc/nvidia-container-runtime/config.toml")
# Where releases of nvidia-ctk put their drop-ins, read by the runtime or not; that is for the role runtime.
DROP_INS = (
    "/etc/containerd/config.d/99-nvidia.toml",
    "/etc/containerd/conf.d/99-nvidia.toml",
    "/etc/crio/conf.d/99-nvidia.toml",
    "/etc/crio/crio.conf.d/99-nvidia.toml",
)

ARGUMENTS: Json = {
    "state": {"type": "str", "choices": ["absent", "given_back"], "default": "absent"},
    "sources": {"type": "bool", "default": True},
    "packages": {"type": "list", "elements": "str", "default": []},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What of the earlier years goes; with ``give_back`` all that had gone comes back."""

    give_back: bool
    sources: bool
    packages: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """What was kept aside.

    :param files: lists and keyrings that went or were edited.
    :param protected: files that a package's removal was not to change; only while ``finished`` is false.
    :param packages: versions that were removed, by name.
    """

    finished: bool = True
    files: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    packages: t.Mapping[str, Json] = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1, sort_keys=True) + "\n"


# --------------------------------------------------------------------------- steps of a plan


@dataclasses.dataclass(frozen=True)
class PutFile:
    path: str
    text: str


@dataclasses.dataclass(frozen=True)
class RemoveFile:
    path: str


@dataclasses.dataclass(frozen=True)
class RemovePackage:
    name: str
    held: bool


@dataclasses.dataclass(frozen=True)
class Finish:
    """A run was killed between taking away and proving that nothing else was lost."""


@dataclasses.dataclass(frozen=True)
class GiveBack:
    path: str


# --------------------------------------------------------------------------- the plan


def wanted(params: Json) -> Wanted:
    """What the module's options ask for.

    :raises BadInput: a name is no package's.
    """
    for name in params["packages"]:
        if not re.fullmatch(r"[a-z0-9][a-zA-Z0-9+._-]+", name):
            raise BadInput(f"packages: {name!r} isn't a package's name")
    return Wanted(params["state"] == "given_back", params["sources"], tuple(params["packages"]))


def record_of(seen: Json) -> Record | None:
    """What has been kept aside; None where nothing has.

    :raises ShareError: the record is of another version of this collection.
    """
    text = (seen.get("toolkit_legacy") or {}).get("record")
    return parse_record(text) if text else None


def parse_record(text: str) -> Record:
    """Read a record.

    :raises ShareError: it isn't one that this version wrote.
    """
    try:
        values = json.loads(text)
        if values.pop("schema") != SCHEMA:
            raise ValueError
        return Record(**{**values, "files": tuple(values["files"]), "protected": tuple(values["protected"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ShareError(
            f"{RECORD} isn't one of this version of the collection: move it aside; the files beside it are what went"
        ) from None


def plan(want: Wanted, seen: Json) -> Plan:
    """What has to be done on a node that looks so.

    :raises ShareError: what was kept aside can't be read.
    """
    record = record_of(seen)
    if want.give_back:
        return Plan(tuple(_returns(record, seen)) if record is not None else ())
    changes = []
    if record is not None and not record.finished:
        changes.append(Change(RECORD, "unfinished\n", "finished\n", Finish()))
    if want.sources:
        # The keyrings first: a run that is killed here still finds the lists that they belong to.
        changes += [Change(path, "a keyring\n", "", RemoveFile(path)) for path in seen.get("keyrings", [])]
        changes += [_source_change(row) for row in seen["sources_stale"]]
    for name in want.packages:
        have = seen["packages"].get(name)
        if have is not None:
            before = f"{have['version']}, held\n" if have["held"] else f"{have['version']}\n"
            changes.append(Change(f"package {name}", before, "", RemovePackage(name, have["held"])))
    return Plan(tuple(changes))


def _source_change(row: Json) -> Change:
    left = sources.clean(row["file"], row["text"]).text
    step = RemoveFile(row["file"]) if left is None else PutFile(row["file"], left)
    return Change(row["file"], row["text"], left or "", step)


def _returns(record: Record, seen: Json) -> t.Iterator[Change]:
    for path, text in seen.get("kept", {}).items():
        if text["give_back"]:
            yield Change(path, text["now"] or "", text["was"] or "a keyring\n", GiveBack(path))
    yield Change(RECORD, "".join(f"{path}\n" for path in record.files), "", RemoveFile(RECORD))


def to_give_back(path: str, now: str | None, was: str) -> bool:
    """Whether a file is still as we left it, so that the old one may take its place."""
    if now is None:
        return True
    return now != was and sources.is_source(path) and now == (sources.clean(path, was).text or "")


def told(seen: Json, record: Record | None) -> Json:
    """What the module returns beside ``changed`` and ``diff``."""
    return {
        "packages": {name: one["version"] for name, one in record.packages.items()} if record is not None else {},
        "drop_ins": (seen.get("toolkit_legacy") or {}).get("drop_ins", []),
    }
