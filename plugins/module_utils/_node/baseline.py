# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The baseline of a node: what is recorded before the first change, and the comparison after an uninstall. Pure.

A snapshot is a part of ``gpu_node``: all packages, services, each runtime's default, nouveau, and digests of the files
in the directories that roles change. It holds no file's text: package sources and runtimes' files may hold passwords.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.digest import digest
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host.types import Service
from .types import PATH, Baseline, BaselineSection, FileState, GpuNode, NouveauState, PackageState, Snapshot

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "compared", "absent"], "default": "present"},
    "accept": {"type": "list", "elements": "str", "default": []},
    "observed": {"type": "dict"},
}

# Names of all that this collection installs or replaces.
NVIDIA = re.compile(r"nvidia|nouveau|libcuda|cuda-|libnvsdm|libnv-|nvlsm|kubegpu", re.IGNORECASE)
OWN = "kubegpu"
DEFAULT = re.compile(r"""^[ \t]*default_runtime(?:_name)?[ \t]*=[ \t]*["']([^"'\n]*)["']""", re.MULTILINE)
RUNTIMES = ("containerd", "docker", "crio", "k3s", "k3s-agent", "rke2-server", "rke2-agent")


# --------------------------------------------------------------------------- snapshot


def file_state(path: str, text: str) -> FileState:
    """Return what is recorded of a file."""
    return {"sha256": digest(text), "nvidia": bool(NVIDIA.search(path) or NVIDIA.search(text))}


def snapshot(node: GpuNode, files: t.Mapping[str, str]) -> Snapshot:
    """Reduce a node's facts to what the comparison needs.

    :param node: its facts with all packages.
    :param files: texts by path.
    """
    runtimes: t.Mapping[str, t.Any] = node["runtimes"]
    return {
        "packages": {
            name: {"version": package["version"], "held": package["held"]} for name, package in node["packages"].items()
        },
        "files": {path: file_state(path, text) for path, text in files.items()},
        "services": dict(node["services"]),
        "runtimes": {name: default_runtime(state) for name, state in runtimes.items() if state},
        "nouveau": {
            "blacklisted": node["nouveau"]["blacklisted"],
            "images": {
                image["path"]: {"nouveau": image["nouveau"], "blacklist": image["blacklist"]}
                for image in node["nouveau"]["images"]
            },
        },
    }


def default_runtime(state: t.Mapping[str, t.Any]) -> str:
    """Return a runtime's default; containerd has it in its dump."""
    if state.get("default_runtime") is not None:
        return str(state["default_runtime"])
    match = DEFAULT.search(str(state.get("dump") or ""))
    return match.group(1) if match else ""


def own_files(files: t.Iterable[str]) -> list[str]:
    """Return the files of this collection: with any, it is too late for a baseline."""
    return sorted(path for path in files if OWN in path.lower())


# --------------------------------------------------------------------------- plan


def make_plan(state: str, section: BaselineSection | None) -> Plan:
    """Record the baseline where there is none, or remove it."""
    if state == "present" and section is None:
        return Plan((Change(PATH, "", "packages, files, services and runtimes as they are before anything changes\n"),))
    if state != "present" and section is not None:
        return Plan((Change(PATH, f"taken {section['taken'] or 'at an unknown time'}\n", ""),))
    return Plan()


# --------------------------------------------------------------------------- comparison


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that isn't as it was.

    :param id: the name that ``accept`` takes.
    :param ours: this collection made it, as far as can be detected.
    :param command: restores the earlier state; may be empty.
    """

    id: str
    ours: bool
    before: str
    now: str
    command: str = ""

    def __str__(self) -> str:
        return f"{self.id}: {self.before} before, {self.now} now" + (f" ({self.command})" if self.command else "")


def compare(before: Snapshot, now: Snapshot) -> list[Difference]:
    """Return all differences, this collection's first."""
    differences = [
        *_packages(before["packages"], now["packages"]),
        *_files(before["files"], now["files"]),
        *_runtimes(before["runtimes"], now["runtimes"]),
        *_services(before["services"], now["services"]),
        *_nouveau(before["nouveau"], now["nouveau"]),
    ]
    return sorted(differences, key=lambda difference: not difference.ours)


def _packages(before: dict[str, PackageState], now: dict[str, PackageState]) -> t.Iterator[Difference]:
    for name in sorted(set(before) | set(now)):
        ours = bool(NVIDIA.search(name))
        versions = [state[name]["version"] if name in state else "not installed" for state in (before, now)]
        if versions[0] != versions[1]:
            yield Difference(f"package:{name}", ours, *versions)
        if name in before and name in now and before[name]["held"] != now[name]["held"]:
            yield Difference(f"hold:{name}", ours, *_states("held", "not held", before[name]["held"]))


def _files(before: dict[str, FileState], now: dict[str, FileState]) -> t.Iterator[Difference]:
    for path in sorted(set(before) | set(now)):
        old, new = before.get(path), now.get(path)
        # Where both texts name NVIDIA's parts, whose change it was can't be detected: it counts as this collection's.
        ours = bool((old and old["nvidia"]) or (new and new["nvidia"]))
        if old is None or new is None:
            yield Difference(f"file:{path}", ours, "present" if old else "absent", "present" if new else "absent")
        elif old["sha256"] != new["sha256"]:
            texts = ("the original text", "another text")
            if old["nvidia"] != new["nvidia"]:
                texts = _states("with NVIDIA's parts", "without NVIDIA's parts", old["nvidia"])
            yield Difference(f"file:{path}", ours, *texts)


def _runtimes(before: dict[str, str], now: dict[str, str]) -> t.Iterator[Difference]:
    for name in sorted(set(before) & set(now)):
        old, new = before[name], now[name]
        # An empty default couldn't be read.
        if old and new and old != new:
            ours = bool(NVIDIA.search(old) or NVIDIA.search(new))
            yield Difference(f"runtime:{name}", ours, f"default runtime {old!r}", repr(new))


def _services(before: dict[str, Service], now: dict[str, Service]) -> t.Iterator[Difference]:
    for name in sorted(set(before) & set(now)):
        id, ours = f"service:{name}", bool(NVIDIA.search(name))
        if before[name]["enabled"] != now[name]["enabled"]:
            yield Difference(id, ours, *_states("enabled", "disabled", before[name]["enabled"]))
        if before[name]["active"] and not now[name]["active"] and (ours or name in RUNTIMES):
            # Without its container runtime the node doesn't work, whoever stopped it.
            yield Difference(id, True, "active", "inactive", f"systemctl start {name}")


def _nouveau(before: NouveauState, now: NouveauState) -> t.Iterator[Difference]:
    if before["blacklisted"] != now["blacklisted"]:
        yield Difference("nouveau", True, *_states("blacklisted", "not blacklisted", before["blacklisted"]))
    for path in sorted(set(before["images"]) & set(now["images"])):
        old, new = before["images"][path]["blacklist"], now["images"][path]["blacklist"]
        if old is not None and new is not None and old != new:
            states = _states("with nouveau's blacklist", "without nouveau's blacklist", old)
            yield Difference(f"image:{path}", True, *states)


def _states(yes: str, no: str, before: bool) -> tuple[str, str]:
    """Return the texts of a state that changed, before and after."""
    return (yes, no) if before else (no, yes)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """``problems`` are this collection's and not accepted; ``notes`` are others' changes and accepted differences."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def evaluate(baseline: Baseline, now: Snapshot, accept: t.Sequence[str]) -> Comparison:
    """Compare a node with its baseline.

    :param accept: ids of differences that are no problem.
    """
    if baseline.own_files:
        files = ", ".join(baseline.own_files)
        note = (
            f"the baseline of {baseline.taken} was recorded when files of this collection were there already ({files})"
        )
        return Comparison(notes=(f"{note}: the state before them can't be compared",))
    differences = compare(baseline.snapshot, now)
    problems = [difference for difference in differences if difference.ours and difference.id not in accept]
    notes = [difference for difference in differences if difference not in problems]
    return Comparison(tuple(map(str, problems)), tuple(map(str, notes)))


NO_BASELINE = (
    "this node has no baseline: an older version of this collection set the node up, or the baseline was removed; "
    "the state before can't be compared"
)
