# SPDX-License-Identifier: GPL-3.0-or-later
"""Imports run one way: modules and actions -> runner -> pure rooms; doors are reached through Protocols."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UTILS = ROOT / "plugins" / "module_utils"
PREFIX = "ansible_collections.kubegpu.share.plugins."

# What a pure room may take from the standard library and from libraries that edit text.
IO_MODULES = {"os", "subprocess", "socket", "shutil", "tempfile", "urllib", "http", "ssl", "select", "threading"}
# The files that touch something: the machine, the Kubernetes API, local health endpoints, archives, kubelet, NVML.
DOORS = {
    "_system",
    "_kube",
    "_probe",
    "_image_archives",
    "_kubelet_door",
    "_nvml_child",
    "_nvml_door",
    "_nvml_proc",
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(folder: str) -> list[Path]:
    return sorted((ROOT / "plugins" / folder).glob("*.py"))


@pytest.mark.parametrize("path", files("module_utils"), ids=lambda path: path.stem)
def test_module_utils_are_private_and_know_no_module(path: Path) -> None:
    assert path.name.startswith("_")
    taken = imports(path)
    assert not {
        one for one in taken if one.startswith((PREFIX + "modules", PREFIX + "action", PREFIX + "plugin_utils"))
    }
    assert not {one for one in taken if one.startswith("ansible.module_utils.basic")}, "AnsibleModule lives in modules/"
    if path.stem not in DOORS:
        touching = {one for one in taken if one.split(".")[0] in IO_MODULES}
        assert not touching, f"{path.name} isn't a door and imports {touching}"


@pytest.mark.parametrize("path", files("modules"), ids=lambda path: path.stem)
def test_modules_are_wiring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    code = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper())
        and not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr, ast.If))
    ]
    lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in code)
    assert lines <= 60, f"{path.name}: {lines} lines of code; logic belongs in module_utils"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "roles").glob("*/**/*.yml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_roles_read_nothing_that_a_built_collection_lacks(path: Path) -> None:
    text = path.read_text()
    for outside in ("inventories/", "molecule/", "tests/", ".lab/", "lab/"):
        assert outside not in text.replace("kubegpu-lab", ""), f"{path} names {outside}"
