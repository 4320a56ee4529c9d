# SPDX-License-Identifier: GPL-3.0-or-later
"""The packages of the servers' image import from lower levels only, and nothing imports in a circle."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3] / "images" / "gpushare" / "src" / "gpushare"
# A package imports from lower levels, and from itself.
LEVELS = (("shared",), ("http",), ("api", "nvml"), ("kubelet",), ("node",), ("extender", "plugin", "dra", "templates"))
FILES = sorted(SOURCES.rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(("gpushare", *path.relative_to(SOURCES).with_suffix("").parts)).removesuffix(".__init__")


def package(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def level(name: str) -> int:
    """The level of a module's package; below all of them for the version in ``gpushare`` itself."""
    return next((number for number, packages in enumerate(LEVELS) if package(name) in packages), -1)


@functools.cache
def graph() -> dict[str, set[str]]:
    known = {dotted(path) for path in FILES}
    found: dict[str, set[str]] = {}
    for path in FILES:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parents = dotted(path).split(".")[: -node.level] if node.level else []
                module = ".".join([*parents, *([node.module] if node.module else [])])
                names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        found[dotted(path)] = names & known
    return found


def reached(name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = graph()[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_every_file_belongs_to_a_package_that_has_a_level() -> None:
    assert [dotted(path) for path in FILES if level(dotted(path)) < 0] == ["gpushare"]


def test_a_package_imports_from_lower_levels_only_and_nothing_in_a_circle() -> None:
    pairs = [(name, used) for name, uses in graph().items() for used in uses if package(used) != package(name)]
    assert [(name, used) for name, used in pairs if level(used) >= level(name)] == []
    assert [name for name in graph() if name in reached(name)] == []
