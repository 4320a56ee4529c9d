# SPDX-License-Identifier: GPL-3.0-or-later
"""The built collection, installed elsewhere, runs on the lab by its playbooks' names, without the checkout."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from _lab import ROOT, Lab

sys.path.insert(0, str(ROOT / "tests"))

import built_collection


@pytest.mark.parametrize("playbook", [pytest.param("site", marks=pytest.mark.long), "inspect"])
def test_playbook_of_the_installed_collection(lab: Lab, playbook: str) -> None:
    with built_collection.installed() as (folder, paths):
        command = ("ansible-playbook", "-i", str(ROOT / "inventories/lab"), f"kubegpu.share.{playbook}")
        done = built_collection.run(*command, cwd=Path(folder), ANSIBLE_COLLECTIONS_PATH=paths)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
        recap = re.findall(r"changed=(\d+) .*failed=(\d+)", done.stdout)
        assert recap and set(recap) == {("0", "0")}, done.stdout[-2000:]
        assert str(ROOT / "roles") not in done.stdout
