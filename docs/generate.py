# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a page per module and role from their own documentation, and those of ``code_tables``.

With ``--check`` nothing is written, and a page that isn't current is an error.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import code_tables

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PAGES = ROOT / "docs" / "reference"
CONFIGURATION = ROOT / "docs" / "antsibull.cfg"


def antsibull(folder: Path, *options: str) -> None:
    """Write a page per module, plugin and role by antsibull-docs.

    :param options: further ones of ``antsibull-docs collection``.
    """
    program = (BIN / "antsibull-docs", f"--config-file={CONFIGURATION}")
    fixed = ("--use-current", "--squash-hierarchy", "--fail-on-error", f"--dest-dir={folder}")
    subprocess.run(
        [*program, "collection", *fixed, *options, "kubegpu.share"],
        check=True,
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        },
        stdin=subprocess.DEVNULL,
    )


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
        # reStructuredText that code hosts show as it is.
        antsibull(new, "--output-format=simplified-rst")
        for file, page in code_tables.PAGES.items():
            (new / file).write_text(page())
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
