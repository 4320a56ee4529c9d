# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose a namespace is: made by us it goes again, somebody else's gets its labels back, whatever is in it."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.filter.shared_namespace import FilterModule
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_objects import converge
from ansible_collections.kubegpu.share.plugins.module_utils._namespace_use import CREATED
from ansible_collections.kubegpu.share.plugins.module_utils._objects import DIGEST, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting
from ansible_collections.kubegpu.share.plugins.plugin_utils._shared_namespace import BEFORE
from fake_kube import FakeKube

terms = FilterModule().filters()["shared_namespace"]
REF = Ref("v1", "Namespace", "", "gpushare-system")
ENFORCE, SYNC = "pod-security.kubernetes.io/enforce", "security.openshift.io/scc.podSecurityLabelSync"
WANTED = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {"name": "gpushare-system", "labels": {ENFORCE: "privileged", SYNC: "false"}},
}


def namespace(labels):
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpushare-system", "labels": labels}}


def look(kube):
    return copy.deepcopy(kube.objects[REF]["metadata"]) if REF in kube.objects else {}


def put(kube):
    params = {"definitions": [terms(look(kube), WANTED)["wish"]], "state": "present"}
    params |= {"field_manager": "kubegpu-share", "replace_unready": False, "wait": False, "node_resources": []}
    return converge(kube, params, False, Waiting(timeout=1))


def merged(kube, patch):
    """As the API server merges it."""
    metadata = kube.objects[REF]["metadata"]
    for field in ("labels", "annotations"):
        for key, value in patch["metadata"][field].items():
            if value is None:
                metadata[field].pop(key, None)
            else:
                metadata[field][key] = value


def test_one_that_wasnt_there_is_ours_and_stays_so():
    kube = FakeKube()
    assert put(kube)["changed"]
    assert look(kube)["annotations"][CREATED] == "true" and BEFORE not in look(kube)["annotations"]
    assert not put(kube)["changed"]
    again = terms(look(kube), WANTED)
    assert again["ours"] and again["undo"] == {}


@pytest.mark.parametrize(
    "labels", [{"team": "a"}, {"team": "a", ENFORCE: "restricted"}, {"team": "a", ENFORCE: "privileged"}]
)
def test_somebody_elses_is_as_before_in_the_end(labels):
    kube = FakeKube(namespace(labels))
    assert not terms(look(kube), WANTED)["ours"] and terms(look(kube), WANTED)["undo"] == {}
    assert put(kube)["changed"]
    assert look(kube)["labels"] == {**labels, **WANTED["metadata"]["labels"]}
    assert not put(kube)["changed"], "what it was before is remembered, not taken anew"
    found = terms(look(kube), WANTED)
    assert not found["ours"] and CREATED not in look(kube)["annotations"]
    merged(kube, found["undo"])
    assert look(kube)["labels"] == labels
    assert not {BEFORE, DIGEST} & set(look(kube)["annotations"])
    assert terms(look(kube), WANTED)["undo"] == {}


def test_what_its_owner_set_meanwhile_stays():
    kube = FakeKube(namespace({ENFORCE: "restricted"}))
    put(kube)
    kube.objects[REF]["metadata"]["labels"][ENFORCE] = "baseline"
    merged(kube, terms(look(kube), WANTED)["undo"])
    assert look(kube)["labels"] == {ENFORCE: "baseline"}
