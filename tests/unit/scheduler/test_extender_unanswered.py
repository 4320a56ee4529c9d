# SPDX-License-Identifier: GPL-3.0-or-later
"""No kube-scheduler is changed before the extender has answered from its machine; on machines in memory."""

from __future__ import annotations

import typing as t

import manifests
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.http_probe import Answer
from fake_machine import ABSENT, EXTENDER, OTHER, PRESENT, FakeMachine, carry_out, plan, run
from fake_server import FakeServer
from memory_system import ANSWERS

REFUSED = Answer(0, "refused", "[Errno 111] Connection refused")
ASKED = f"post {EXTENDER.url}/filter"
# The commands of an observation.
READING = ("date ", "grep ", "stat ", "systemctl show ", "journalctl ", "/usr/local/bin/")


def done(machine: t.Any) -> list[str]:
    """Its changes and requests."""
    return [one for one in machine.log if not one.startswith(READING)]


def machines() -> list[t.Any]:
    return [FakeMachine(manifests.kubeadm(36)), FakeServer("k3s"), FakeServer("rke2")]


@pytest.mark.parametrize("machine", machines(), ids=["static_pod", "k3s", "rke2"])
def test_nothing_is_changed_where_no_extender_answers(machine: t.Any) -> None:
    before, begun = dict(machine.files), machine.time
    machine.extender = REFUSED
    words = r"isn't changed, because the extender doesn't answer http.* within 60 s"
    with pytest.raises(ShareError, match=words) as one:
        run(machine, PRESENT)
    assert one.value.details["reason"] == "refused" and one.value.details["host"] in ("cp1", "server1")
    assert machine.time - begun <= 62
    assert machine.files == before and set(done(machine)) == {ASKED}
    # With an answer the same run succeeds, by one request.
    machine.extender = ANSWERS
    machine.log.clear()
    run(machine, PRESENT)
    assert done(machine)[0] == ASKED and machine.log.count(ASKED) == 1
    # A run without changes doesn't ask, and neither does the removal.
    machine.log.clear()
    machine.extender = REFUSED
    run(machine, PRESENT)
    assert done(machine) == []
    with pytest.raises(ShareError):
        run(machine, OTHER)
    machine.log.clear()
    run(machine, ABSENT)
    assert ASKED not in machine.log and plan(machine, ABSENT).plan.empty


def test_a_rollback_asks_nobody() -> None:
    """kube-scheduler is healthy and doesn't renew its lease: it goes back, whatever the extender does."""
    machine = FakeMachine(manifests.kubeadm(36))
    planned = plan(machine, PRESENT)
    carry_out(machine, planned)
    machine.extender = REFUSED
    rollback = planned.rollback()
    assert rollback["extender"] == "" and planned.to_module()["extender"] == EXTENDER.url
