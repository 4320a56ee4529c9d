# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tools that the container toolkit replaced: stale package sources, their keyrings, and packages. Pure.

Everything is backed up before its removal, so that it can be restored. Plans use the sections ``sources_stale``,
``toolkit_legacy`` and ``packages`` of ``gpu_node``; on the node ``keyrings`` (to remove) and ``backups`` (restorable
files) are observed too.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._packages.names import described
from .._packages.steps import FinishInterrupted, PutFile, RemoveFile, RemovePackage
from . import legacy_sources as sources
from .legacy_paths import RECORD

SCHEMA = 1
# The removal of a package may delete these: nvidia-docker2 owns Docker's own configuration.
PROTECTED = ("/etc/docker/daemon.json", "/etc/nvidia-container-runtime/config.toml")


@dataclasses.dataclass(frozen=True)
class LegacyOptions:
    """What to remove, or with ``restore`` whether to restore everything that was removed."""

    restore: bool
    sources: bool
    packages: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of a removal.

    :param files: package sources and keyrings that were removed or edited.
    :param protected: files that a package's removal must not change; only while ``finished`` is false.
    :param packages: the removed packages, by name.
    """

    finished: bool = True
    files: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    packages: t.Mapping[str, JsonObject] = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1, sort_keys=True) + "\n"


@dataclasses.dataclass(frozen=True)
class RestoreFile:
    path: str


def options_of(params: JsonObject) -> LegacyOptions:
    """Convert the module's options.

    :raises BadInput: a package's name isn't valid.
    """
    for name in params["remove_packages"]:
        if not re.fullmatch(r"[a-z0-9][a-zA-Z0-9+._-]+", name):
            raise BadInput(f"remove_packages: {name!r} isn't a valid package name")
    return LegacyOptions(params["state"] == "absent", params["remove_sources"], tuple(params["remove_packages"]))


def record_of(seen: t.Mapping[str, t.Any]) -> Record | None:
    """Return the record of earlier removals; None where nothing was removed.

    :raises ShareError: another version of this collection wrote it.
    """
    text = (seen.get("toolkit_legacy") or {}).get("record")
    return parse_record(text) if text else None


def parse_record(text: str) -> Record:
    """Parse a record.

    :raises ShareError: another version of this collection wrote it.
    """
    try:
        values = json.loads(text)
        if values.pop("schema") != SCHEMA:
            raise ValueError
        return Record(**{**values, "files": tuple(values["files"]), "protected": tuple(values["protected"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ShareError(
            f"{RECORD} wasn't written by this version of the collection: move it aside; the files beside it are the "
            "removed ones"
        ) from None


def plan(options: LegacyOptions, seen: t.Mapping[str, t.Any]) -> Plan:
    """Plan the changes.

    :raises ShareError: the record of earlier removals can't be read.
    """
    record = record_of(seen)
    if options.restore:
        return Plan(tuple(_restorations(record, seen)) if record is not None else ())
    changes = []
    if record is not None and not record.finished:
        changes.append(Change(RECORD, "unfinished\n", "finished\n", FinishInterrupted()))
    if options.sources:
        # Keyrings first: the run after a killed one still finds them by their package sources.
        changes += [Change(path, "a keyring\n", "", RemoveFile(path)) for path in seen.get("keyrings", [])]
        changes += [_source_change(row) for row in seen["sources_stale"]]
    for name in options.packages:
        have = seen["packages"].get(name)
        if have is not None:
            before = described(have["version"], have["held"])
            changes.append(Change(f"package {name}", before, "", RemovePackage(name, have["held"])))
    return Plan(tuple(changes))


def _source_change(row: JsonObject) -> Change:
    remaining = sources.clean(row["file"], row["text"]).text
    step = RemoveFile(row["file"]) if remaining is None else PutFile(row["file"], remaining)
    return Change(row["file"], row["text"], remaining or "", step)


def _restorations(record: Record, seen: t.Mapping[str, t.Any]) -> t.Iterator[Change]:
    for path, text in seen.get("backups", {}).items():
        if text["restorable"]:
            yield Change(path, text["now"] or "", text["was"] or "a keyring\n", RestoreFile(path))
    yield Change(RECORD, "".join(f"{path}\n" for path in record.files), "", RemoveFile(RECORD))


def restorable(path: str, now: str | None, was: str) -> bool:
    """Return whether a file is unchanged since the removal, so that its backup may replace it."""
    if now is None:
        return True
    return now != was and sources.is_source(path) and now == (sources.clean(path, was).text or "")


def results(seen: t.Mapping[str, t.Any], record: Record | None) -> JsonObject:
    """Return the module's results beside ``changed`` and ``diff``."""
    return {
        "packages": {name: one["version"] for name, one in record.packages.items()} if record is not None else {},
        "drop_ins": (seen.get("toolkit_legacy") or {}).get("drop_ins", []),
    }
