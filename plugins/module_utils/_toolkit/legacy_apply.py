# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan and carry out the removal of the tools that the container toolkit replaced, and restore them.

Everything is backed up before its removal, so that it can be restored. Plans use the sections ``sources_stale``,
``toolkit_legacy`` and ``packages`` of ``gpu_node``; on the node ``keyrings`` (to remove) and ``backups`` (restorable
files) are observed too.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
import typing as t

from .._core import plan as core_plan
from .._core.errors import BadInput, ShareError
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host.file_transaction import replace_text
from .._host.system import System
from .._packages.names import described
from .._packages.steps import FinishInterrupted, PutFile, RemoveFile, RemovePackage
from . import legacy as sources
from .legacy import RECORD, STORE, observe_record, observe_sources

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


def make_plan(options: LegacyOptions, seen: t.Mapping[str, t.Any]) -> Plan:
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


def is_restorable(path: str, now: str | None, was: str) -> bool:
    """Return whether a file is unchanged since the removal, so that its backup may replace it."""
    if now is None:
        return True
    return now != was and sources.is_source(path) and now == (sources.clean(path, was).text or "")


def results(seen: t.Mapping[str, t.Any], record: Record | None) -> JsonObject:
    """Return the module's results beside ``changed`` and ``diff``."""
    return {
        "packages": {name: package["version"] for name, package in record.packages.items()}
        if record is not None
        else {},
        "drop_ins": (seen.get("toolkit_legacy") or {}).get("drop_ins", []),
    }


DPKG = "/var/lib/dpkg/status"
APT_GET = ("apt-get", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Get::AutomaticRemove=0")
# The suffix that rpm gives to the configuration files of a removed package.
RPMSAVE = ".rpmsave"


def installed(system: System, names: t.Sequence[str]) -> dict[str, JsonObject]:
    """Query which of these packages are installed, with version and hold."""
    if not names:
        return {}
    if system.exists(DPKG):
        done = system.run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\\t${Package}\\t${Version}\\n", *names])
        rows = [line.split("\t") for line in done.out.splitlines() if line.count("\t") == 2]
        # First letter: the selection, h for hold. Second: the state, c for a removed package with configuration files.
        return {name: {"version": v, "held": state[0] == "h"} for state, name, v in rows if state[1] not in "nc"}
    done = system.run(["rpm", "-q", "--qf", "%{NAME}\\t%{VERSION}-%{RELEASE}\\n", *names])
    rows = [line.split("\t") for line in done.out.splitlines() if "\t" in line]
    return {name: {"version": version, "held": False} for name, version in rows}


class LegacyReconciler:
    """The replaced tools on the machine that the module runs on."""

    def __init__(self, options: LegacyOptions, system: System) -> None:
        self._options = options
        self._system = system

    def observe(self) -> JsonObject:
        seen: JsonObject = {
            "sources_stale": observe_sources(self._system),
            "toolkit_legacy": observe_record(self._system),
            "packages": installed(self._system, self._options.packages),
        }
        if self._options.restore:
            record = record_of(seen)
            seen["backups"] = {path: self._backup_state(path) for path in record.files} if record is not None else {}
        elif self._options.sources:
            seen["keyrings"] = self._keyrings(seen["sources_stale"])
        return seen

    def plan(self, seen: JsonObject) -> core_plan.Plan:
        return make_plan(self._options, seen)

    def apply(self, seen: JsonObject, plan: core_plan.Plan) -> None:
        steps = [change.step for change in plan.changes]
        if self._options.restore:
            for step in steps:
                if isinstance(step, RestoreFile):
                    self._restore(step.path)
            self._must(["rm", "-r", STORE])
            return
        earlier = record_of(seen) or Record()
        for path in earlier.protected:
            self._protect(path, exclusive=False)
        record = self._back_up(earlier, seen, steps)
        for step in steps:
            if isinstance(step, RemoveFile):
                self._system.remove(step.path)
            elif isinstance(step, PutFile):
                replace_text(self._system, step.path, step.text)
        try:
            self._remove_packages([step for step in steps if isinstance(step, RemovePackage)])
        except ShareError:
            # The failed removal may have deleted some of them already.
            self._protect_all(record)
            raise
        self._protect_all(record)
        self._system.write(RECORD, dataclasses.replace(record, finished=True, protected=()).text(), 0o600)

    def _backup_state(self, path: str) -> JsonObject:
        now, was = self._system.read(path), self._system.read(_backup_path(path))
        restorable = was is not None and is_restorable(path, now, was)
        # A keyring isn't text.
        text = sources.is_source(path)
        return {"now": now if text else None, "was": was if text else None, "restorable": restorable}

    def _keyrings(self, rows: t.Iterable[JsonObject]) -> list[str]:
        """List the keyrings that only the stale sources name and no package owns."""
        cleaned = {row["file"]: sources.clean(row["file"], row["text"]) for row in rows}
        texts = {
            f"{folder}/{name}": self._system.read(f"{folder}/{name}") or ""
            for folder in ("/etc/apt", "/etc/apt/sources.list.d")
            for name in self._system.names(folder)
            if name.endswith((".list", ".sources"))
        }
        texts.update({path: source.text or "" for path, source in cleaned.items()})
        candidates = {path for source in cleaned.values() for path in source.keyrings}
        return [
            path
            for path in sources.named_nowhere(candidates, texts.values())
            if self._system.exists(path) and self._system.run(["dpkg", "-S", path]).rc != 0
        ]

    def _back_up(self, earlier: Record, seen: JsonObject, steps: t.Iterable[t.Any]) -> Record:
        """Copy each file and write the record before anything is changed."""
        files = [step.path for step in steps if isinstance(step, (RemoveFile, PutFile))]
        going = [step.name for step in steps if isinstance(step, RemovePackage)]
        self._must(["mkdir", "-p", "-m", "0700", posixpath.dirname(STORE)])
        self._must(["mkdir", "-p", "-m", "0700", STORE])
        protected = [path for path in PROTECTED if going and self._system.exists(path)]
        for path in protected:
            self._copy(path, _backup_path(path))
        for path in files:
            # The first backup is the original.
            if not self._system.exists(_backup_path(path)):
                self._copy(path, _backup_path(path))
        record = Record(
            finished=False,
            files=tuple(dict.fromkeys([*earlier.files, *files])),
            protected=tuple(protected),
            packages={**{name: seen["packages"][name] for name in going}, **earlier.packages},
        )
        self._system.write(RECORD, record.text(), 0o600)
        return record

    def _remove_packages(self, steps: t.Sequence[RemovePackage]) -> None:
        if not steps:
            return
        names = [step.name for step in steps]
        if self._system.exists(DPKG):
            held = [step.name for step in steps if step.held]
            try:
                if held:
                    self._must(["apt-mark", "unhold", *held])
                # A purge would delete the configuration files that the package owns.
                self._must([*APT_GET, "remove", *names], 1800)
            except ShareError:
                remaining = list(installed(self._system, held))
                if remaining:
                    self._system.run(["apt-mark", "hold", *remaining])
                raise
        else:
            self._must(["rpm", "-e", *names], 1800)

    def _protect_all(self, record: Record) -> None:
        for path in record.protected:
            self._protect(path, exclusive=True)

    def _protect(self, path: str, exclusive: bool) -> None:
        """Restore a file that a package's removal deleted or changed.

        :param exclusive: only the removal can have changed it; after a killed run somebody else may have.
        """
        backed_up = self._system.exists(_backup_path(path))
        missing = not self._system.exists(path)
        changed = exclusive and self._system.run(["cmp", "-s", path, _backup_path(path)]).rc != 0
        if backed_up and (missing or changed):
            self._restore(path)
        if backed_up and self._system.run(["cmp", "-s", _backup_path(path), path + RPMSAVE]).rc == 0:
            self._system.remove(path + RPMSAVE)
        # The backup may hold credentials.
        self._system.remove(_backup_path(path))

    def _restore(self, path: str) -> None:
        self._copy(_backup_path(path), path)
        if self._system.run(["cmp", "-s", _backup_path(path), path]).rc != 0:
            raise ShareError(f"{path} couldn't be restored; its backup is {_backup_path(path)}")

    def _copy(self, source: str, target: str) -> None:
        """Copy a file with mode, owner and times, atomically."""
        folder, name = posixpath.split(target)
        temporary = f"{folder}/.kubegpu-{name}"
        self._must(["mkdir", "-p", folder])
        self._must(["cp", "-a", "--remove-destination", source, temporary])
        self._must(["mv", "-f", temporary, target])

    def _must(self, argv: t.Sequence[str], timeout: float = 60) -> None:
        done = self._system.run(argv, timeout=timeout)
        if done.rc != 0:
            errors = [line for line in done.err.splitlines() if line.startswith(("E:", "error:"))]
            errors = errors or (done.err or done.out).strip().splitlines()[-1:] or [f"status {done.rc}"]
            raise ShareError(f"{' '.join(argv)} failed: {errors[0]}", stdout=done.out[-8000:], stderr=done.err[-8000:])


def _backup_path(path: str) -> str:
    return f"{STORE}/files{path}"
