# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Take away what the toolkit replaced, keep it aside, and give it back."""

from __future__ import annotations

import dataclasses
import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _runner
from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_legacy as legacy
from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_legacy_sources as sources
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._system import System
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_legacy_observe import kept, observe

Json = t.Dict[str, t.Any]

DPKG = "/var/lib/dpkg/status"
APT_GET = ("apt-get", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Get::AutomaticRemove=0")
# What rpm calls a configuration file that it takes out of use.
RPMSAVE = ".rpmsave"


def installed(system: System, names: t.Sequence[str]) -> dict[str, Json]:
    """Which of these packages are there, with version and hold."""
    if not names:
        return {}
    if system.exists(DPKG):
        done = system.run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\\t${Package}\\t${Version}\\n", *names])
        rows = [line.split("\t") for line in done.out.splitlines() if line.count("\t") == 2]
        # First letter: what is wanted. Second: c is a removed package whose configuration stayed.
        return {name: {"version": v, "held": state[0] == "h"} for state, name, v in rows if state[1] not in "nc"}
    done = system.run(["rpm", "-q", "--qf", "%{NAME}\\t%{VERSION}-%{RELEASE}\\n", *names])
    rows = [line.split("\t") for line in done.out.splitlines() if "\t" in line]
    return {name: {"version": version, "held": False} for name, version in rows}


class LegacyConcern:
    """The container tools of earlier years on the machine that the module runs on."""

    def __init__(self, want: legacy.Wanted, system: System) -> None:
        self._want = want
        self._system = system

    def observe(self) -> Json:
        seen: Json = {
            "sources_stale": observe(self._system),
            "toolkit_legacy": kept(self._system),
            "packages": installed(self._system, self._want.packages),
        }
        if self._want.give_back:
            record = legacy.record_of(seen)
            seen["kept"] = {path: self._kept(path) for path in record.files} if record is not None else {}
        elif self._want.sources:
            seen["keyrings"] = self._keyrings(seen["sources_stale"])
        return seen

    def plan(self, seen: Json) -> _runner.Plan:
        return legacy.plan(self._want, seen)

    def apply(self, seen: Json, plan: _runner.Plan) -> None:
        steps = [change.step for change in plan.changes]
        if self._want.give_back:
            for step in steps:
                if isinstance(step, legacy.GiveBack):
                    self._put_back(step.path)
            self._must(["rm", "-r", legacy.STORE])
            return
        earlier = legacy.record_of(seen) or legacy.Record()
        for path in earlier.protected:
            self._protect(path, sure=False)
        record = self._keep_aside(earlier, seen, steps)
        for step in steps:
            if isinstance(step, legacy.RemoveFile):
                self._system.remove(step.path)
            elif isinstance(step, legacy.PutFile):
                self._edit(step)
        try:
            self._remove_packages([step for step in steps if isinstance(step, legacy.RemovePackage)])
        except ShareError:
            # What it took along before it failed is missing now, not only after the next run.
            self._protect_all(record)
            raise
        self._protect_all(record)
        self._system.write(legacy.RECORD, dataclasses.replace(record, finished=True, protected=()).text(), 0o600)

    # ------------------------------------------------------------------ what is seen

    def _kept(self, path: str) -> Json:
        now, was = self._system.read(path), self._system.read(_aside(path))
        give_back = was is not None and legacy.to_give_back(path, now, was)
        shown = sources.is_source(path)
        return {"now": now if shown else None, "was": was if shown else None, "give_back": give_back}

    def _keyrings(self, rows: t.Iterable[Json]) -> list[str]:
        """Those that only what goes was signed by, and that no package brought."""
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

    # ------------------------------------------------------------------ what is done

    def _keep_aside(self, earlier: legacy.Record, seen: Json, steps: t.Iterable[t.Any]) -> legacy.Record:
        """Write down what will be touched, with a copy of each file, before anything is."""
        files = [step.path for step in steps if isinstance(step, (legacy.RemoveFile, legacy.PutFile))]
        going = [step.name for step in steps if isinstance(step, legacy.RemovePackage)]
        self._must(["mkdir", "-p", "-m", "0700", posixpath.dirname(legacy.STORE)])
        self._must(["mkdir", "-p", "-m", "0700", legacy.STORE])
        protected = [path for path in legacy.PROTECTED if going and self._system.exists(path)]
        for path in protected:
            self._copy(path, _aside(path))
        for path in files:
            # What was there first is what is given back.
            if not self._system.exists(_aside(path)):
                self._copy(path, _aside(path))
        record = legacy.Record(
            finished=False,
            files=tuple(dict.fromkeys([*earlier.files, *files])),
            protected=tuple(protected),
            packages={**{name: seen["packages"][name] for name in going}, **earlier.packages},
        )
        self._system.write(legacy.RECORD, record.text(), 0o600)
        return record

    def _edit(self, step: legacy.PutFile) -> None:
        """The new text with the old file's permissions and owner."""
        done = self._system.run(["stat", "-c", "%a %u:%g", step.path])
        mode, _blank, owner = done.out.strip().partition(" ")
        self._system.write(step.path, step.text, int(mode, 8) if done.rc == 0 else 0o644)
        if done.rc == 0 and owner != "0:0":
            self._must(["chown", owner, step.path])

    def _remove_packages(self, steps: t.Sequence[legacy.RemovePackage]) -> None:
        if not steps:
            return
        names = [step.name for step in steps]
        if self._system.exists(DPKG):
            held = [step.name for step in steps if step.held]
            try:
                if held:
                    self._must(["apt-mark", "unhold", *held])
                # Removed and not purged: a purge takes the files that the package calls its own.
                self._must([*APT_GET, "remove", *names], 1800)
            except ShareError:
                there = list(installed(self._system, held))
                if there:
                    self._system.run(["apt-mark", "hold", *there])
                raise
        else:
            self._must(["rpm", "-e", *names], 1800)

    def _protect_all(self, record: legacy.Record) -> None:
        for path in record.protected:
            self._protect(path, sure=True)

    def _protect(self, path: str, sure: bool) -> None:
        """Give a file back that a package took along.

        :param sure: nobody but the package's removal can have changed it. After a killed run somebody may have.
        """
        kept = self._system.exists(_aside(path))
        there = self._system.exists(path)
        if kept and (not there or (sure and self._system.run(["cmp", "-s", path, _aside(path)]).rc != 0)):
            self._put_back(path)
        if kept and self._system.run(["cmp", "-s", _aside(path), path + RPMSAVE]).rc == 0:
            self._system.remove(path + RPMSAVE)
        # It may hold what isn't for others' eyes, and it is in its place.
        self._system.remove(_aside(path))

    def _put_back(self, path: str) -> None:
        self._copy(_aside(path), path)
        if self._system.run(["cmp", "-s", _aside(path), path]).rc != 0:
            raise ShareError(f"{path} couldn't be given back; as it was it lies at {_aside(path)}")

    def _copy(self, source: str, target: str) -> None:
        """A whole file with mode, owner and times, in place at once."""
        folder, name = posixpath.split(target)
        temporary = f"{folder}/.kubegpu-{name}"
        self._must(["mkdir", "-p", folder])
        self._must(["cp", "-a", "--remove-destination", source, temporary])
        self._must(["mv", "-f", temporary, target])

    def _must(self, argv: t.Sequence[str], timeout: float = 60) -> None:
        done = self._system.run(argv, timeout=timeout)
        if done.rc != 0:
            words = [line for line in done.err.splitlines() if line.startswith(("E:", "error:"))]
            words = words or (done.err or done.out).strip().splitlines()[-1:] or [f"status {done.rc}"]
            raise ShareError(f"{' '.join(argv)} failed: {words[0]}", stdout=done.out[-8000:], stderr=done.err[-8000:])


def _aside(path: str) -> str:
    return f"{legacy.STORE}/files{path}"


def work(want: legacy.Wanted, check: bool, system: System) -> Json:
    """Run the concern and tell what was removed with it."""
    concern = LegacyConcern(want, system)
    before = legacy.record_of(concern.observe())
    result = _runner.run(concern, check)
    seen = {"toolkit_legacy": kept(system)}
    return {**result, **legacy.told(seen, legacy.record_of(seen) or before)}
