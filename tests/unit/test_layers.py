# SPDX-License-Identifier: GPL-3.0-or-later
"""Packages import from lower levels only, modules are wiring, and only adapters touch the machine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import layers

ROOT = layers.ROOT
UTILITIES = [path for path in layers.sources() if path.is_relative_to(layers.PLUGINS / "module_utils")]
UTILITIES += [path for path in layers.sources() if path.is_relative_to(layers.PLUGINS / "plugin_utils")]


def test_every_file_belongs_to_a_package_with_a_level() -> None:
    assert not [layers.name_of(path) for path in UTILITIES if layers.level(layers.name_of(path)) is None]
    assert not [path for folder in layers.LEVELS for path in (layers.PLUGINS / folder).glob("*.py")]


@pytest.mark.parametrize("path", UTILITIES, ids=layers.name_of)
def test_a_package_imports_from_lower_levels_only(path: Path) -> None:
    name = layers.name_of(path)
    folder, package, _file = name.split("/")
    for other in layers.graph()[name]:
        other_folder, other_package = other.split("/")[:2]
        if other_folder == folder and other_package != package:
            assert (layers.level(other) or 0) < (layers.level(name) or 0), f"{name} imports {other}"
        allowed = ("module_utils",) if folder == "module_utils" else ("module_utils", "plugin_utils")
        assert other_folder in allowed, f"{name} imports {other}"
    absolute = [
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).startswith(layers.COLLECTION)
    ]
    assert not absolute, f"{name} imports {absolute} by its full name; relative imports show the structure"
    if folder == "module_utils":
        assert not [one for one in layers.imported(path) if one.startswith("ansible.module_utils.basic")]


def test_there_is_no_import_cycle() -> None:
    assert not [name for name in layers.graph() if any(name in layers.reached(other) for other in layers.reached(name))]


@pytest.mark.parametrize("path", UTILITIES, ids=layers.name_of)
def test_only_adapters_use_io_modules(path: Path) -> None:
    name = layers.name_of(path)
    if name.startswith("module_utils/") and name not in layers.ADAPTERS:
        touching = layers.io_imports(path)
        assert not touching, f"{name} isn't an adapter and imports {touching}"


@pytest.mark.parametrize("path", sorted((layers.PLUGINS / "modules").glob("*.py")), ids=lambda path: path.stem)
def test_modules_are_wiring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    code = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper())
        and not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr, ast.If))
    ]
    lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in code)
    assert lines <= 40, f"{path.name}: {lines} lines of code; logic belongs in module_utils"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "roles").glob("*/**/*.yml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_roles_read_no_files_outside_the_built_collection(path: Path) -> None:
    text = path.read_text()
    for outside in ("inventories/", "molecule/", "tests/", ".lab/", "lab/"):
        assert outside not in text.replace("kubegpu-lab", ""), f"{path} names {outside}"
