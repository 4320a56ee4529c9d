# SPDX-License-Identifier: GPL-3.0-or-later
"""Run pytest in the guest: ``python -m lab.guest [pytest's arguments]``, by default on tests/kernel.

The exit status is pytest's. A report of ``--junitxml=FILE`` is written to that file of this machine.
``KUBEGPU_GUEST_SECONDS`` (900) is the most processor time that the guest may take.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from lab import host
from lab.guest import machine
from lab.guest.kernel import kernel
from lab.shell import LabError

JUNIT = "--junitxml="
SECONDS = 900.0


def main(arguments: list[str]) -> int:
    host.prepare(need_engine=False, guest=True)
    made = kernel()
    report = next((Path(word.removeprefix(JUNIT)) for word in arguments if word.startswith(JUNIT)), None)
    chosen = [word for word in arguments if not word.startswith(JUNIT)] or ["tests/kernel"]
    pytest = (*["-m", "pytest", "-p", "no:cacheprovider", "--color=no"], f"{JUNIT}/run/guest/junit.xml")
    with tempfile.TemporaryDirectory(prefix="kubegpu-guest-") as folder:
        results = Path(folder)
        ended = machine.run_inside(
            made,
            [sys.executable, *pytest, *chosen],
            results,
            float(os.environ.get("KUBEGPU_GUEST_SECONDS", SECONDS)),
            lambda line: print(line, flush=True),
            {"KUBEGPU_GUEST": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        if report and (results / "junit.xml").exists():
            shutil.copyfile(results / "junit.xml", report)
    return ended.code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        sys.exit(f"lab.guest: {error}")
