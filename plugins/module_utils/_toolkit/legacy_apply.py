# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Back up and remove the tools that the toolkit replaced, and restore them."""

from __future__ import annotations

import dataclasses
import posixpath
import typing as t

from .._core import plan as core_plan
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._host.file_transaction import replace_text
from .._host.system import System
from .._packages.steps import PutFile, RemoveFile, RemovePackage
from . import legacy
from . import legacy_sources as sources
from .legacy_paths import RECORD, STORE
from .legacy_query import observe_record, observe_sources

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

    def __init__(self, options: legacy.LegacyOptions, system: System) -> None:
        self._options = options
        self._system = system

    def observe(self) -> JsonObject:
        seen: JsonObject = {
            "sources_stale": observe_sources(self._system),
            "toolkit_legacy": observe_record(self._system),
            "packages": installed(self._system, self._options.packages),
        }
        if self._options.restore:
            record = legacy.record_of(seen)
            seen["backups"] = {path: self._backup_state(path) for path in record.files} if record is not None else {}
        elif self._options.sources:
            seen["keyrings"] = self._keyrings(seen["sources_stale"])
        return seen

    def plan(self, seen: JsonObject) -> core_plan.Plan:
        return legacy.plan(self._options, seen)

    def apply(self, seen: JsonObject, plan: core_plan.Plan) -> None:
        steps = [change.step for change in plan.changes]
        if self._options.restore:
            for step in steps:
                if isinstance(step, legacy.RestoreFile):
                    self._restore(step.path)
            self._must(["rm", "-r", STORE])
            return
        earlier = legacy.record_of(seen) or legacy.Record()
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
        restorable = was is not None and legacy.restorable(path, now, was)
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
        texts.update({path: one.text or "" for path, one in cleaned.items()})
        candidates = {path for one in cleaned.values() for path in one.keyrings}
        return [
            path
            for path in sources.named_nowhere(candidates, texts.values())
            if self._system.exists(path) and self._system.run(["dpkg", "-S", path]).rc != 0
        ]

    def _back_up(self, earlier: legacy.Record, seen: JsonObject, steps: t.Iterable[t.Any]) -> legacy.Record:
        """Copy each file and write the record before anything is changed."""
        files = [step.path for step in steps if isinstance(step, (RemoveFile, PutFile))]
        going = [step.name for step in steps if isinstance(step, RemovePackage)]
        self._must(["mkdir", "-p", "-m", "0700", posixpath.dirname(STORE)])
        self._must(["mkdir", "-p", "-m", "0700", STORE])
        protected = [path for path in legacy.PROTECTED if going and self._system.exists(path)]
        for path in protected:
            self._copy(path, _backup_path(path))
        for path in files:
            # The first backup is the original.
            if not self._system.exists(_backup_path(path)):
                self._copy(path, _backup_path(path))
        record = legacy.Record(
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

    def _protect_all(self, record: legacy.Record) -> None:
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
