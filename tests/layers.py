# SPDX-License-Identifier: GPL-3.0-or-later
"""The layers of plugins/: which package stands on which level, what imports what, and which files touch the machine.

``tests/unit/test_layers.py`` holds the levels; ``docs/layers.py`` draws them.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "plugins"
COLLECTION = "ansible_collections.kubegpu.share.plugins"

# A package imports from lower levels, and from itself.
LEVELS = {
    "module_utils": (
        ("_core",),
        ("_contracts", "_rancher"),
        ("_host", "_nvml", "_kubelet", "_documents"),
        ("_packages",),
        ("_kube", "_driver", "_toolkit", "_runtime", "_mirrors", "_boot"),
        ("_images", "_allocation", "_kubevirt", "_openshift", "_passthrough", "_vgpu"),
        ("_node", "_e2e"),
        ("_hami", "_kata", "_nvidia", "_scheduler"),
        ("_backends",),
        ("_check", "_preflight", "_report"),
    ),
    "plugin_utils": (
        ("_pins",),
        ("_airgap",),
        ("_actions",),
        ("_preflight",),
        ("_plan",),
    ),
}
# Standard library that reaches out of the process.
IO_MODULES = frozenset(
    (
        "os",
        "subprocess",
        "socket",
        "shutil",
        "tempfile",
        "urllib",
        "http",
        "ssl",
        "select",
        "threading",
        "multiprocessing",
    )
)
# The adapters: the only files that touch the machine or the network.
ADAPTERS = frozenset(
    (
        "module_utils/_host/file_tree",
        "module_utils/_host/kernel_write",
        "module_utils/_host/system",
        "module_utils/_host/http_probe",
        "module_utils/_images/archives",
        "module_utils/_images/image_archive",
        "module_utils/_images/sources",
        "module_utils/_kube/client",
        "module_utils/_kube/direct",
        "module_utils/_kube/pod_exec",
        "module_utils/_kubelet/source",
        "module_utils/_mirrors/store",
        "module_utils/_nvml/worker",
        "module_utils/_nvml/binding",
        "module_utils/_nvml/host",
        "module_utils/_passthrough/kernel",
        "module_utils/_report/outcome",
        "module_utils/_vgpu/machine",
        "module_utils/_vgpu/restore",
    )
)


def name_of(path: Path) -> str:
    """A file below ``plugins`` as ``folder/package/file``, without its ending."""
    return path.relative_to(PLUGINS).with_suffix("").as_posix()


def sources() -> list[Path]:
    """All Python files below ``plugins``."""
    return sorted(PLUGINS.rglob("*.py"))


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """The full dotted name of what an import statement names, be it relative or not."""
    if not node.level:
        return node.module or ""
    package = [COLLECTION, *path.relative_to(PLUGINS).parts[:-1]]
    return ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Dotted names of all that a file imports: modules, and names taken from modules."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node)
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(names)


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each file below ``plugins`` imports of the others at run time."""
    known = {f"{COLLECTION}.{name_of(path).replace('/', '.')}": name_of(path) for path in sources()}
    return {name_of(path): {known[one] for one in imported(path) if one in known} for path in sources()}


def reached(name: str, over: dict[str, set[str]] | None = None) -> set[str]:
    """All files that a file imports, directly and through others."""
    edges = graph() if over is None else over
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for one in edges.get(waiting.pop(), set()) - found:
            found.add(one)
            waiting.append(one)
    return found - {name}


def level(name: str) -> int | None:
    """The level of a file's package, or None for a file of modules, actions and the other plugins."""
    folder, *rest = name.split("/")
    for number, packages in enumerate(LEVELS.get(folder, ())):
        if rest[0] in packages:
            return number
    return None


def io_imports(path: Path) -> set[str]:
    """Modules of the standard library that reach out of the process and that a file imports itself."""
    return {one for one in imported(path) if one.split(".")[0] in IO_MODULES and not one.startswith("urllib.parse")}
