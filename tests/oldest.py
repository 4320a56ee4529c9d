# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the unit tests with the oldest Python, ansible-core, client and kubernetes.core that the collection promises.

The versions are those of meta/runtime.yml, meta/ee-requirements.txt and galaxy.yml; what tests need besides is what
requirements.txt pins. The virtual environment is kept beside that of `make setup`. Arguments are pytest's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from lab.paths import cache_root  # noqa: E402

# The oldest Python of ansible-core 2.19 on a controller.
PYTHON = "3.11"
# Packages of requirements.txt that the unit tests import.
TESTS = ("hypothesis", "jsonpatch", "openshift", "pytest", "pytest-testinfra", "pytest-xdist", "tomlkit")
SERVERS = ("images/gpushare/requirements.txt", "images/gpushare/build-requirements.txt")
# The package ansible of each kubernetes.core that may be the oldest: only that has it where Galaxy can't be reached.
COMMUNITY = {"5.0.0": "11.0.0"}
# They run the tools of development, or build what has no version of these.
LEFT_OUT = ("tests/unit/lab", "tests/unit/packaging", "tests/unit/test_docs.py")


def floor(text: str, name: str) -> str:
    """Return the version of ``name`` and ``>=`` in a line of a text.

    :raises LookupError: there is none.
    """
    match = re.search(rf"^{re.escape(name)}\b.*>=([\d.]+)", text, re.MULTILINE)
    if match is None:
        raise LookupError(f"no lowest version of {name}")
    return match[1]


def requirements() -> tuple[list[str], str]:
    """Return what pip installs with its dependencies, and the package ansible, which is installed without."""
    pinned: dict[str, dict[str, str]] = {}
    for path in ("requirements.txt", *SERVERS):
        for line in (ROOT / path).read_text().splitlines():
            name, equals, version = line.partition(";")[0].strip().partition("==")
            if equals and not line.startswith("#"):
                pinned.setdefault(path, {})[name] = version
    client = (ROOT / "meta/ee-requirements.txt").read_text()
    oldest = {name: floor(client, name) for name in ("kubernetes", "orjson")}
    oldest["ansible-core"] = floor((ROOT / "meta/runtime.yml").read_text(), "requires_ansible")
    collections = yaml.safe_load((ROOT / "galaxy.yml").read_text())["dependencies"]
    wanted = {**oldest, **{name: pinned["requirements.txt"][name] for name in TESTS}}
    for path in SERVERS:
        wanted |= pinned[path]
    community = COMMUNITY[collections["kubernetes.core"].removeprefix(">=")]
    return [f"{name}=={version}" for name, version in sorted(wanted.items())], f"ansible=={community}"


def interpreter() -> str:
    """Return the path of that Python, on the PATH or under pyenv; empty where there is none."""
    folders = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{PYTHON}.*/bin"))
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    return shutil.which(f"python{PYTHON}", path=path) or ""


def environment(python: str) -> Path:
    """Create the virtual environment unless it is there, and return its folder."""
    packages, community = requirements()
    key = hashlib.sha256("\n".join([python, *packages, community]).encode()).hexdigest()[:16]
    folder = cache_root() / "venv" / f"oldest-{key}"
    if not (folder / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = (str(folder / "bin/python"), "-m", "pip", "install", "--quiet")
        for command in (
            (python, "-m", "venv", str(folder)),
            (*pip, *packages),
            (*pip, "--no-deps", community),
        ):
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (folder / ".complete").touch()
    return folder


def main() -> int:
    python = interpreter()
    if not python:
        print(f"This machine has no Python {PYTHON}.")
        return 1
    folder = environment(python)
    packages, community = requirements()
    print(f"Python {PYTHON}, {community}, {', '.join(packages)}", flush=True)
    words = ("-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:], "tests/unit")
    ignored = [f"--ignore={path}" for path in LEFT_OUT]
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    command = (str(folder / "bin/python"), *words, *ignored)
    return subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "PATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
