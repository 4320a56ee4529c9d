# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a page per module and role from their own documentation, or check that the pages are current."""

from __future__ import annotations

import argparse
import filecmp
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PAGES = ROOT / "docs" / "reference"


def generate(folder: Path) -> None:
    """Write the pages of the collection in reStructuredText that code hosts show as it is."""
    subprocess.run(
        [
            str(BIN / "antsibull-docs"),
            "collection",
            "--use-current",
            "--squash-hierarchy",
            "--output-format=simplified-rst",
            "--fail-on-error",
            f"--dest-dir={folder}",
            "kubegpu.share",
        ],
        check=True,
        env=dict(
            os.environ,
            ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"),
            PATH=f"{BIN}:{os.environ['PATH']}",
        ),
        stdin=subprocess.DEVNULL,
    )


FINDINGS = """\
Findings of preflight
+++++++++++++++++++++

Each has an id. Those of the first table say that something was asked for that can't be served. Those of the second
may be known to you better than to preflight: ``preflight_ignore: [boot-full, card-lost@gpu7]`` goes on despite them.

{}
May be ignored
--------------

{}"""


def findings(folder: Path) -> None:
    """Write the page of what preflight can find, from the checks themselves."""
    sys.path.insert(0, str(ROOT / ".collections"))
    preflight = importlib.import_module("ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate")
    groups = (preflight.INPUT, preflight.described())
    tables = ["".join(f"``{id}``\n    {meaning}\n\n" for id, meaning in group.items()) for group in groups]
    (folder / "preflight_findings.rst").write_text(FINDINGS.format(*tables))


def differences(old: Path, new: Path) -> list[str]:
    """Return the names of pages that aren't the same in both folders."""
    names = {path.name for folder in (old, new) if folder.is_dir() for path in folder.iterdir()}
    return sorted(
        name
        for name in names
        if not (old / name).is_file()
        or not (new / name).is_file()
        or not filecmp.cmp(old / name, new / name, shallow=False)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page isn't current")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as name:
        new = Path(name)
        generate(new)
        findings(new)
        stale = differences(PAGES, new)
        if check:
            verdict = f"not current: {', '.join(stale)}; run `make docs`" if stale else "current"
            print(f"docs/reference: {verdict}")
            return int(bool(stale))
        shutil.rmtree(PAGES, ignore_errors=True)
        shutil.copytree(new, PAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
