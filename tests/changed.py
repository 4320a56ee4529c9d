# SPDX-License-Identifier: GPL-3.0-or-later
"""Name the unit tests that a change touches: those that import a changed file, directly or through others.

Nothing imports a role, a playbook, a template or a page; the tests that name it are taken instead, and so are the tests
of roles whose tasks name a plugin that imports a changed file.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNIT = ROOT / "tests" / "unit"
COLLECTION = "ansible_collections.kubegpu.share."
SERVERS = ROOT / "images" / "gpushare" / "src"
PLUGIN_FOLDERS = ("modules", "action", "filter", "lookup")
# These decide for all tests.
EVERYTHING = ("requirements.txt", "images/gpushare/requirements.txt", "tests/unit/conftest.py", ".ci/setup")


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1]


def changed_since(base: str) -> set[str]:
    """Paths, relative to the checkout, that differ from the commit or are new."""
    point = git("merge-base", base, "HEAD")[0]
    return set(git("diff", "--name-only", point)) | set(git("ls-files", "--others", "--exclude-standard"))


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def files_by_name() -> dict[str, Path]:
    """Files of the checkout by the dotted names that absolute imports know them by."""
    found = {_dotted(path, SERVERS): path for path in SERVERS.rglob("*.py")}
    for folder in ("plugins", "lab", "tests", "docs"):
        found |= {_dotted(path, ROOT): path for path in (ROOT / folder).rglob("*.py")}
    found |= {COLLECTION + name: path for name, path in found.items() if name.startswith("plugins.")}
    # conftest.py puts these folders on the path: helpers are imported by their bare names.
    folders = (ROOT / "tests" / "lab", ROOT / "bench", ROOT / "awx" / "filter_plugins")
    for path in (*UNIT.rglob("*.py"), *(path for folder in folders for path in folder.glob("*.py"))):
        found.setdefault(path.stem, path)
    return {name: path.resolve() for name, path in found.items()}


def _found(dotted: str, path: Path, level: int) -> Path | None:
    """The file of the checkout that a dotted name means, if any."""
    if not level:
        return files_by_name().get(dotted)
    file = path.parents[level - 1].joinpath(*filter(None, dotted.split("."))).with_suffix(".py")
    return file.resolve() if file.is_file() else None


@functools.cache
def imports(path: Path) -> set[Path]:
    """Files of the checkout that a Python file imports itself."""
    found: set[Path | None] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {_found(alias.name, path, 0) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found.add(_found(module, path, node.level))
            found |= {_found(f"{module}.{alias.name}", path, node.level) for alias in node.names}
    return {one for one in found if one}


def reached(path: Path) -> set[Path]:
    """A file and all that it imports, directly and through others."""
    found, waiting = {path}, [path]
    while waiting:
        new = imports(waiting.pop()) - found
        waiting += new
        found |= new
    return found


def names_of(changed: str) -> str:
    """A pattern for the names by which tests mention a file that nothing imports."""
    parts = Path(changed).parts
    if parts[0] == "roles" and len(parts) > 1:
        return rf"""(share\.|roles/|roles" / "){re.escape(parts[1])}\b"""
    if parts[0] == "plugins" and parts[1] in PLUGIN_FOLDERS:
        return rf"\b{re.escape(Path(changed).stem)}\b"
    return re.escape(Path(changed).name)


def plugins_reaching(files: set[Path]) -> set[str]:
    """Paths of modules and other plugins that a task names, which import a changed file."""
    entries = (path for folder in PLUGIN_FOLDERS for path in (ROOT / "plugins" / folder).glob("*.py"))
    return {str(path.relative_to(ROOT)) for path in entries if reached(path.resolve()) & files}


def roles_naming(plugins: set[str]) -> set[str]:
    """Paths of the roles whose tasks name one of these plugins."""
    names = [re.compile(names_of(plugin)) for plugin in plugins]
    tasks = (path for path in (ROOT / "roles").glob("*/**/*") if path.suffix in (".yml", ".j2"))
    return {str(path.relative_to(ROOT)) for path in tasks if any(name.search(path.read_text()) for name in names)}


def selected(changed: set[str]) -> list[Path]:
    """The test files that a set of changed paths touches."""
    tests = sorted(UNIT.rglob("test_*.py"))
    if changed & set(EVERYTHING):
        return tests
    files = {(ROOT / name).resolve() for name in changed}
    plugins = plugins_reaching(files)
    generated = ("docs/reference/", "changelogs/")
    named = {one for one in changed if not one.endswith(".py") and not one.startswith(generated)}
    patterns = {names_of(plugin) for plugin in plugins | roles_naming(plugins) | named}
    names = re.compile("|".join(sorted(patterns))) if patterns else None
    return [test for test in tests if reached(test.resolve()) & files or (names and names.search(test.read_text()))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="main", help="the commit to compare with (default main)")
    parser.add_argument("--list", action="store_true", help="print the test files and run nothing")
    arguments, rest = parser.parse_known_args()
    tests = [str(path.relative_to(ROOT)) for path in selected(changed_since(arguments.base))]
    if arguments.list or not tests:
        print(*tests or ["no unit test is touched"], sep="\n")
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *rest, *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
