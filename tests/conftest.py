# SPDX-License-Identifier: GPL-3.0-or-later
"""Register the marks of the tests, and share compiled code among the processes of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lab: needs the running lab (make lab-up)")
    config.addinivalue_line("markers", "long: left to `make test-all`; nothing that an ordinary change breaks")
    # A worker of xdist has the folder of the process that started it.
    if "KUBEGPU_COMPILED" not in os.environ:
        folder = tempfile.mkdtemp(prefix="kubegpu-compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        others = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        path = os.pathsep.join([str(Path(__file__).resolve().parent / "compiled"), *others])
        os.environ.update(KUBEGPU_COMPILED=folder, PYTHONPATH=path)
