# SPDX-License-Identifier: GPL-3.0-or-later
"""Who owns a cluster's set-up: recorded by compare-and-swap on a real API server, and what preflight says of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._kube.setup_record import (
    ARGUMENTS,
    FOREIGN,
    OWN,
    RECORD,
    TAKEN,
    Record,
    read,
    whose,
    work,
)
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.ownership import examine

MAIN = "GPUShare/main"
PATH = "/api/v1/namespaces/kube-system/configmaps/kubegpu-share"


@pytest.fixture
def kube(api_server):
    given = {**dict.fromkeys(auth_arguments()), "kubeconfig": str(api_server.kubeconfig)}
    yield connect(SimpleNamespace(params=given, tmpdir=str(api_server.folder), no_log_values=set()))
    api_server.ask("DELETE", PATH, {"propagationPolicy": "Background"})


def run(kube, state, owner="playbook", check=False, **options):
    usual = {name: rules.get("default") for name, rules in ARGUMENTS.items()}
    return work(kube, {**usual, "state": state, "owner": owner, **options}, check)


def data(kube):
    live = kube.get(RECORD)
    # No garbage collector runs here.
    return None if live is None or "deletionTimestamp" in live["metadata"] else live["data"]


def test_the_record_is_written_before_the_first_change_and_removed_exactly(kube):
    known = read(kube, MAIN)
    assert known == {"owner": "", "version": "", "unverified": False, "exists": None}
    assert run(kube, "present", MAIN, check=True, unverified=True, known=known)["changed"] and data(kube) is None
    assert run(kube, "present", MAIN, unverified=True, known=known)["changed"]
    assert data(kube) == {"owner": MAIN, "unverified": "true"}
    assert not run(kube, "present", MAIN, unverified=True)["changed"]
    assert run(kube, "verified", MAIN)["changed"] and data(kube) == {"owner": MAIN}
    assert not run(kube, "verified", MAIN)["changed"]
    assert not run(kube, "present", MAIN)["changed"], "a run that changes nothing else writes nothing"
    assert run(kube, "absent", MAIN)["changed"] and data(kube) is None
    assert not run(kube, "absent", MAIN)["changed"] and not run(kube, "verified", MAIN)["changed"]


def test_of_two_runs_that_planned_at_once_the_second_changes_nothing(kube):
    first, second = read(kube, "playbook"), read(kube, MAIN)
    run(kube, "present", unverified=True, known=first)
    before = kube.get(RECORD)
    with pytest.raises(BadInput, match=r"the set-up is playbook's now.*Nothing was changed; run again when"):
        run(kube, "present", MAIN, unverified=True, known=second)
    # Of one owner, too: two templates of AWX.
    with pytest.raises(BadInput, match="another run has begun to change this cluster"):
        run(kube, "present", unverified=True, known=second)
    assert kube.get(RECORD) == before


@pytest.mark.parametrize("there", [False, True])
def test_the_api_server_decides_between_two_that_write_in_the_same_moment(kube, there):
    if there:
        run(kube, "present")

    class Racing:
        """Another run writes between this one's read and its write."""

        def __getattr__(self, name):
            return getattr(kube, name)

        def _first(self, name, *given):
            run(kube, "present", unverified=True)
            return getattr(kube, name)(*given)

        def create(self, *given):
            return self._first("create", *given)

        def patch(self, *given):
            return self._first("patch", *given)

    with pytest.raises(BadInput, match="another run has begun to change this cluster"):
        run(Racing(), "present", MAIN, take_over="playbook")
    assert data(kube) == {"owner": "playbook", "unverified": "true"}


def test_a_record_that_somebody_has_taken_over_meanwhile_is_not_removed(kube):
    run(kube, "present", MAIN)

    class Racing:
        def __getattr__(self, name):
            return getattr(kube, name)

        def delete(self, *given):
            run(kube, "present", take_over=MAIN)
            kube.delete(*given)

    with pytest.raises(
        BadInput, match=r"while this run removed the set-up, which is playbook's now\. The record was kept"
    ):
        run(Racing(), "absent", MAIN)
    assert data(kube) == {"owner": "playbook"}


def test_another_owners_record_is_only_written_on_purpose(kube):
    run(kube, "present", MAIN)
    for state in ("present", "absent"):
        with pytest.raises(BadInput, match=f"^{MAIN} owns what is set up in this cluster.*take_over: {MAIN}$"):
            run(kube, state, take_over="GPUShare/other")
    assert data(kube) == {"owner": MAIN}
    assert run(kube, "present", take_over=MAIN)["changed"] and data(kube) == {"owner": "playbook"}
    # Without it from now on, and for the former owner it is another's.
    assert not run(kube, "present")["changed"]
    assert (run(kube, "read")["own"], run(kube, "read", MAIN)["own"]) == (True, False)


def test_what_is_set_up_without_a_record_is_the_playbooks(kube):
    found = run(kube, "read", MAIN)
    assert (found["own"], found["present"], found["changed"]) == (False, "playbook", False)
    assert run(kube, "read")["own"]
    nothing = found["record"]
    for owner, set_up, expected in (("playbook", True, OWN), (MAIN, True, FOREIGN), (MAIN, False, OWN)):
        assert whose(nothing, owner, "", set_up) == expected
    assert whose(nothing, MAIN, "playbook", True) == TAKEN


def test_who_may_not_read_the_record_cannot_begin(kube):
    class Forbidden:
        def get(self, ref):
            raise KubeError("no", 403, "Forbidden")

        def create(self, definition):
            raise KubeError("may not create configmaps", 403, "Forbidden")

    assert read(Forbidden(), "playbook")["owner"] == ""
    with pytest.raises(KubeError, match="may not create"):
        run(Forbidden(), "present")


@pytest.mark.parametrize("owner", ["", "playbooks", "GPUShare/", "GPUShare/a b", "gpushare/main", "GPUShare/{{ x }}"])
def test_an_owner_that_is_none_is_refused_by_its_variable(kube, owner):
    with pytest.raises(BadInput, match=r"^gpu_owner: .* is neither playbook nor a resource, as GPUShare/NAME$"):
        run(kube, "present", owner)


def record(owner="", unverified=False, exists=None):
    return Record(owner=owner, version="1" if owner else "", unverified=unverified, exists=exists)


@pytest.mark.parametrize(
    ("given", "owner", "take_over", "set_up", "id", "severity", "text"),
    [
        (record(MAIN, exists=True), "playbook", "", True, "other-owner", "problem", "kubectl edit gpushare main"),
        (
            record(MAIN, exists=False),
            "playbook",
            "",
            True,
            "other-owner",
            "problem",
            "There is no GPUShare/main any more",
        ),
        (record(MAIN), "playbook", "GPUShare/b", True, "other-owner", "problem", f"set gpu_owner_take_over: {MAIN}"),
        (record(), MAIN, "", True, "other-owner", "problem", "leave it to the playbooks, or set gpu_owner_take_over"),
        (record("a\x1b[2Jb"), "playbook", "", False, "other-owner", "problem", "owns what is set up"),
        (record(MAIN), "playbook", MAIN, True, "owner-taken", "note", "takes over for playbook what GPUShare/main"),
        (record("playbook", unverified=True), "playbook", "", True, "run-unfinished", "warning", "was killed"),
    ],
)
def test_preflight_says_whose_the_set_up_is(given, owner, take_over, set_up, id, severity, text):
    [found] = examine(given, owner, take_over, set_up)
    assert (found.id, found.severity) == (id, severity)
    assert text in found.text and "\x1b" not in found.text
    assert found.fields["present"] == (given["owner"] or "playbook") and found.fields["owner"] == owner


def test_an_own_set_up_and_a_new_cluster_have_no_finding():
    for given, owner, set_up in ((record(), MAIN, False), (record(), "playbook", True), (record(MAIN), MAIN, True)):
        assert list(examine(given, owner, "", set_up)) == []
