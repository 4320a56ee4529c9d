# SPDX-License-Identifier: GPL-3.0-or-later
"""Packages import from lower levels only, modules are wiring, and only adapters touch the machine."""

from __future__ import annotations

import ast

from tests import layers

ROOT = layers.ROOT
UTILITIES = [path for path in layers.sources() if path.is_relative_to(layers.PLUGINS / "module_utils")]
UTILITIES += [path for path in layers.sources() if path.is_relative_to(layers.PLUGINS / "plugin_utils")]


def test_every_file_belongs_to_a_package_with_a_level() -> None:
    assert not [layers.name_of(path) for path in UTILITIES if layers.level(layers.name_of(path)) is None]
    assert not [path for folder in layers.LEVELS for path in (layers.PLUGINS / folder).glob("*.py")]


def test_a_package_imports_from_lower_levels_only() -> None:
    for name in map(layers.name_of, UTILITIES):
        folder, package, _file = name.split("/")
        for other in layers.graph()[name]:
            other_folder, other_package = other.split("/")[:2]
            if other_folder == folder and other_package != package:
                assert (layers.level(other) or 0) < (layers.level(name) or 0), f"{name} imports {other}"
            allowed = ("module_utils",) if folder == "module_utils" else ("module_utils", "plugin_utils")
            assert other_folder in allowed, f"{name} imports {other}"


def test_imports_are_relative_and_module_utils_need_no_module() -> None:
    """Relative imports show the structure."""
    for path in UTILITIES:
        assert f"from {layers.COLLECTION}" not in path.read_text(), path
        if path.is_relative_to(layers.PLUGINS / "module_utils"):
            assert not [name for name in layers.imported(path) if name.startswith("ansible.module_utils.basic")], path


def test_there_is_no_import_cycle() -> None:
    assert not [name for name in layers.graph() if any(name in layers.reached(other) for other in layers.reached(name))]


def test_only_adapters_use_io_modules() -> None:
    found = {layers.name_of(path): layers.io_imports(path) for path in UTILITIES}
    touching = {name for name, modules in found.items() if modules and name.startswith("module_utils/")}
    assert touching <= layers.ADAPTERS, "these aren't adapters"


def test_modules_are_wiring() -> None:
    for path in (layers.PLUGINS / "modules").glob("*.py"):
        code = [
            node
            for node in ast.parse(path.read_text()).body
            if not (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper())
            and not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr, ast.If))
        ]
        lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in code)
        assert lines <= 40, f"{path.name}: {lines} lines of code; logic belongs in module_utils"


def test_roles_read_no_files_outside_the_built_collection() -> None:
    for path in (ROOT / "roles").glob("*/**/*.yml"):
        text = path.read_text().replace("kubegpu-lab", "")
        outside = [folder for folder in ("inventories/", "molecule/", "tests/", ".lab/", "lab/") if folder in text]
        assert not outside, path
