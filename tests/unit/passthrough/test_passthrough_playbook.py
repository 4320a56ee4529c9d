# SPDX-License-Identifier: GPL-3.0-or-later
"""passthrough.yml in ansible-playbook: which machines it is for, and that a run for none isn't a success."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._boot import plan as boot_plan
from ansible_collections.kubegpu.share.plugins.module_utils._boot.apply import BootReconciler
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import facts as passthrough_facts
from boot_machines import debian
from own_cluster import ROOT, run_playbook
from pci_machine import CARD, TWIN, Machine

PLAYBOOK = ROOT / "playbooks/passthrough.yml"


def node(*bound: str) -> dict[str, Any]:
    machine = Machine()
    if bound:
        machine.present(*bound)
    return {
        "distribution": {"family": "debian"},
        "kernel": {"installed": ["6.1"]},
        "iommu": {"groups": 20},
        "passthrough": passthrough_facts.facts(machine),
        "boot": {**BootReconciler(debian(), boot_plan.Options(False)).observe()},
    }


def play(folder: Any, hosts: dict[str, Any], **variables: Any) -> Any:
    known = {name: {"gpu_node": node(*given.pop("bound", ())), **given} for name, given in hosts.items()}
    return run_playbook(folder, PLAYBOOK, groups={"gpu_nodes": known}, maintenance_cluster=False, **variables)


def test_a_run_for_no_machine_fails_and_says_what_to_set(tmp_path: Any) -> None:
    done = play(tmp_path, {"a": {}, "b": {"gpu_backend": "nvidia"}})
    assert done.rc != 0 and done.changed == 0, done.text
    text = " ".join(done.text.split())
    assert "No host of this run has cards for virtual machines: set passthrough_cards" in text


@pytest.mark.parametrize("given", [{"passthrough_cards": [CARD, TWIN]}, {"gpu_backend": "kata"}])
def test_machines_whose_cards_are_bound_are_left_as_they_are(tmp_path: Any, given: dict[str, Any]) -> None:
    done = play(tmp_path, {"a": {**given, "bound": (CARD, TWIN)}, "b": {}})
    assert done.rc == 0 and done.changed == 0, done.text
    assert "skipping: [b]" in done.text


def test_nothing_is_taken_back_where_nothing_was_given(tmp_path: Any) -> None:
    done = play(tmp_path, {"a": {}}, passthrough_state="absent")
    assert done.rc == 0 and done.changed == 0, done.text
