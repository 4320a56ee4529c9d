# SPDX-License-Identifier: GPL-3.0-or-later
"""List each pinned component, the newest release that its registry has, and what it would take: ``make outdated``.

Go modules are asked of the module proxy by ``go list``, Python packages by pip's index, charts by their repositories.
Nothing is written. A component whose registry doesn't answer is "unknown", which isn't current: with one the exit code
is 2. Outdated components alone are no failure.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import typing as t
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from pins import NotUpdated, entries_of, printable  # noqa: E402

from lab import build  # noqa: E402
from lab.shell import LabError  # noqa: E402

SECONDS = 60
RELEASE = re.compile(r"v?[0-9]{1,20}(\.[0-9]{1,20})*")
PINNED = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", re.MULTILINE)
PYTHON = ("requirements.txt", "images/gpushare/requirements.lock", "images/gpushare/build-requirements.lock")
# Of Go modules, those that stay behind by intention aren't listed: releases that only tests of old configurations use.
SETS = (*build.TOOL_SETS, build.HELM, build.OPM, build.OPERATOR_API)

# What a registry that doesn't answer, or answers with something else, comes to.
NO_ANSWER = (OSError, ValueError, KeyError, TypeError, NotUpdated, LabError, subprocess.SubprocessError)


@dataclass(frozen=True)
class Component:
    """A pinned version; ``where`` is the file that has it, ``takes`` what a newer one would take."""

    kind: str
    name: str
    version: str
    where: str
    takes: str


@dataclass(frozen=True)
class Row:
    """A component with the newest release; empty where it couldn't be learnt, and ``error`` says why."""

    component: Component
    newest: str
    error: str = ""

    @property
    def state(self) -> str:
        """One of current, outdated and unknown."""
        if not self.newest:
            return "unknown"
        return "outdated" if order(self.newest) > order(self.component.version) else "current"


def order(version: str) -> tuple[int, ...]:
    """Return what sorts releases; a suffix is ignored."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def newest(versions: t.Iterable[str]) -> str:
    """Return the newest release, without its v; pre-releases are none. Empty where there is none."""
    released = [one for one in versions if RELEASE.fullmatch(one)]
    return max(released, key=order).removeprefix("v") if released else ""


def components(root: Path) -> list[Component]:
    """Return every component that is asked for."""
    found = [
        Component(
            "go", tools.module, tools.version, f"lab/go/{tools.name}/go.mod", "a build, the lab's tests, make pins"
        )
        for tools in SETS
    ]
    for name in PYTHON:
        # For an older Python a file may pin an older release beside the newest.
        pins = dict(sorted(PINNED.findall((root / name).read_text(encoding="utf-8")), key=lambda one: order(one[1])))
        takes = "a new environment, make lint" if name == PYTHON[0] else "new digests in the lock, make unit"
        found += [Component("python", package, version, name, takes) for package, version in sorted(pins.items())]
    table = yaml.safe_load((root / "meta/pins.yml").read_text(encoding="utf-8"))
    found += [
        Component(f"chart {pin['url']}", name, pin["version"], "meta/pins.yml", "the role's default, make pins")
        for name, pin in table["charts"].items()
    ]
    return found


def _printed(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd="/")
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout


def ask(component: Component) -> list[str]:
    """Return the versions that a component's registry has.

    :raises Exception: one of NO_ANSWER.
    """
    if component.kind == "go":
        listed = json.loads(_printed(build.find_go(), "list", "-m", "-versions", "-json", component.name))
        return list(listed.get("Versions") or [])
    if component.kind == "python":
        pip = (sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", component.name)
        found = re.search(r"^Available versions: (.*)$", _printed(*pip), re.MULTILINE)
        return found[1].split(", ") if found else []
    url = component.kind.partition(" ")[2].rstrip("/") + "/index.yaml"
    return [str(entry["version"]) for entry in entries_of(url, component.name)]


def compare(found: t.Iterable[Component], asked: t.Callable[[Component], list[str]] = ask) -> list[Row]:
    """Return a row for each component, also where its registry doesn't answer."""
    rows = []
    for component in found:
        try:
            version = newest(asked(component))
            rows.append(Row(component, version, "" if version else "its registry lists no release"))
        except NO_ANSWER as error:
            rows.append(Row(component, "", printable(error, 200)))
    return rows


def main(arguments: t.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="List each pinned component and the newest release of it.")
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    given = parser.parse_args(arguments)
    rows = compare(components(ROOT))
    if given.json:
        print(json.dumps([{**vars(row.component), "newest": row.newest, "state": row.state} for row in rows], indent=1))
    else:
        for row in rows:
            if row.state != "current":
                one = row.component
                then = f"{row.newest}; it takes {one.takes}" if row.newest else f"unknown: {row.error}"
                print(f"{one.name} {one.version} ({one.where}) -> {then}")
        counted = {state: sum(row.state == state for row in rows) for state in ("current", "outdated", "unknown")}
        print(", ".join(f"{number} {state}" for state, number in counted.items()))
    return 2 if any(row.state == "unknown" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
