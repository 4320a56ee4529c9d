# SPDX-License-Identifier: GPL-3.0-or-later
"""A namespace that we created is deleted; the labels of an existing one are restored."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.filter.scheduler import FilterModule
from ansible_collections.kubegpu.share.plugins.module_utils._kube.objects import CREATED, DIGEST
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import BEFORE
from fake_kube import FakeKube, apply_set
from merge_patch import merge_patch

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


def metadata(kube):
    return copy.deepcopy(kube.objects[REF]["metadata"]) if REF in kube.objects else {}


def apply(kube):
    return apply_set(kube, [terms(metadata(kube), WANTED)["definition"]])


def undo(kube):
    merge_patch(kube.objects[REF], terms(metadata(kube), WANTED)["undo"])


def test_a_created_namespace_is_ours():
    kube = FakeKube()
    assert apply(kube)["changed"] and not apply(kube)["changed"]
    assert metadata(kube)["annotations"][CREATED] == "true" and BEFORE not in metadata(kube)["annotations"]
    assert {**terms(metadata(kube), WANTED), "definition": {}} == {"ours": True, "definition": {}, "undo": {}}


@pytest.mark.parametrize(
    "labels", [{"team": "a"}, {"team": "a", ENFORCE: "restricted"}, {"team": "a", ENFORCE: "privileged"}]
)
def test_the_labels_of_an_existing_namespace_are_restored(labels):
    kube = FakeKube(namespace(labels))
    assert not terms(metadata(kube), WANTED)["ours"] and terms(metadata(kube), WANTED)["undo"] == {}
    assert apply(kube)["changed"]
    assert metadata(kube)["labels"] == {**labels, **WANTED["metadata"]["labels"]}
    assert not apply(kube)["changed"], "the recorded labels stay those of the first run"
    found = terms(metadata(kube), WANTED)
    assert not found["ours"] and CREATED not in metadata(kube)["annotations"]
    undo(kube)
    assert metadata(kube)["labels"] == labels
    assert not {BEFORE, DIGEST} & set(metadata(kube)["annotations"])
    assert terms(metadata(kube), WANTED)["undo"] == {}


def test_labels_set_meanwhile_stay():
    kube = FakeKube(namespace({ENFORCE: "restricted"}))
    apply(kube)
    kube.objects[REF]["metadata"]["labels"][ENFORCE] = "baseline"
    undo(kube)
    assert metadata(kube)["labels"] == {ENFORCE: "baseline"}
