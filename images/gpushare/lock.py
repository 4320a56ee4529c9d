# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the hashes of everything that a build of the image may install.

For each requirements file beside this one pip is asked which wheel it would take on each platform and Python; its
hashes go into a file of the same name that ends in ``.lock``. Nothing is downloaded that pip doesn't need to answer.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("requirements", "build-requirements")
# Of the images that can be the base.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
# The newest glibc first; Debian 12 has 2.36.
GLIBC = range(36, 4, -1)
HEAD = "# Written by lock.py from {}: the wheels that pip takes for Python {} on {}.\n"


def pinned(text: str) -> dict[str, str]:
    """Return names, as the index normalises them, and versions in a requirements file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {normal(name): version.strip() for name, version in pairs}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def platforms(machine: str) -> list[str]:
    tags = [f"manylinux_2_{minor}" for minor in GLIBC]
    return [f"{tag}_{machine}" for tag in (*tags, "manylinux2014", "linux")]


def asked(file: Path, python: str, machine: str) -> dict[str, tuple[str, str]]:
    """Return version and SHA-256 of the wheel that pip takes of each package.

    :raises CalledProcessError: pip finds one of them nowhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"),
                *(
                    "--only-binary=:all:",
                    "--implementation=cp",
                    f"--python-version={python}",
                    f"--target={folder}/none",
                ),
                *(f"--platform={one}" for one in platforms(machine)),
                *(f"--report={report}", f"--requirement={file}"),
            ],
            check=True,
        )
        installs = json.loads(report.read_text())["install"]
    return {
        normal(one["metadata"]["name"]): (
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in installs
    }


def written(name: str) -> str:
    """Return the text of a lock file."""
    file = HERE / f"{name}.txt"
    versions = pinned(file.read_text())
    hashes: dict[str, set[str]] = {package: set() for package in versions}
    for python in PYTHONS:
        for machine in MACHINES:
            for package, (version, sha256) in asked(file, python, machine).items():
                if versions[package] != version:
                    raise SystemExit(f"{package}: {file.name} has {versions[package]}, and pip takes {version}")
                hashes[package].add(sha256)
    lines = [HEAD.format(file.name, ", ".join(PYTHONS), " and ".join(MACHINES))]
    for package in sorted(versions):
        rows = [f"{package}=={versions[package]}", *(f"    --hash=sha256:{one}" for one in sorted(hashes[package]))]
        lines.append(" \\\n".join(rows) + "\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    for name in FILES:
        (HERE / f"{name}.lock").write_text(written(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
