# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the real definitions of OpenShift's resources, which are no part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OLD = "schedulers.config.openshift.io-4.6.yaml"


def definitions() -> Path:
    """The folder with the definitions; the test is skipped where the machine has none."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "crds"
    folder = Path(os.environ.get("KUBEGPU_CRDS") or beside)
    if not folder.is_dir():
        pytest.skip(
            f"no definitions of OpenShift's resources: {folder} isn't there (KUBEGPU_CRDS names another folder)"
        )
    return folder
