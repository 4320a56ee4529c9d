# SPDX-License-Identifier: GPL-3.0-or-later
"""``acceptance.yml`` passes on the lab and leaves nothing behind, even after a killed run."""

from __future__ import annotations

import re

import pytest
from _lab import RESOURCE, Lab, until

PLAYBOOK = "playbooks/acceptance.yml"


def left_behind(lab: Lab) -> list[str]:
    spaces = [name for name in lab.api.namespaces() if name.startswith("kubegpu-acceptance")]
    pods = [
        one["metadata"]["name"]
        for one in lab.api.items("/api/v1/pods")
        if one["metadata"]["namespace"].startswith("kubegpu-acceptance")
    ]
    return spaces + pods


def test_everything_passes(lab: Lab) -> None:
    until(lambda: not units_in_use(lab), "no pod holds GPU memory", 60)
    done = lab.playbook(PLAYBOOK)
    assert done.rc == 0, done.out[-6000:]
    results = re.findall(r"^\W*(W[1-8])  .*  (PASS|FAIL|UNKNOWN|skipped)  ", done.out, re.MULTILINE)
    assert results == [(f"W{number}", "PASS") for number in range(1, 9)], done.out[-6000:]
    assert left_behind(lab) == []
    assert units_in_use(lab) == 0


def units_in_use(lab: Lab) -> int:
    return sum(
        int(container["resources"].get("limits", {}).get(RESOURCE, 0))
        for pod in lab.api.items("/api/v1/pods")
        if pod["status"].get("phase") in ("Pending", "Running")
        for container in pod["spec"]["containers"]
    )


@pytest.mark.long
def test_a_killed_run_is_cleaned_up_by_the_next(lab: Lab) -> None:
    lab.killed_playbook(PLAYBOOK, r"^TASK .*acceptance : Run the suites", 8.0)
    assert left_behind(lab) != [], "it was killed too early or too late to show anything"
    done = lab.playbook(PLAYBOOK)
    assert done.rc == 0, done.out[-6000:]
    assert left_behind(lab) == []


@pytest.mark.long
def test_it_fails_when_pods_do_not_share(lab: Lab) -> None:
    """Without an image no pod runs: the checks fail, the table is printed, and nothing is left."""
    done = lab.playbook(PLAYBOOK, "-e", "acceptance_image=localhost/none:0", "-e", "acceptance_timeout=5")
    assert done.rc != 0
    row = r"W2 +Three pods run on the cards that the placement chooses +(UNKNOWN|FAIL) "
    assert re.search(row, done.out), done.out[-6000:]
    assert left_behind(lab) == []
