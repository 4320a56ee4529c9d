# SPDX-License-Identifier: GPL-3.0-or-later
"""The two modules of all back ends: which work each state is, and what no back end has."""

from __future__ import annotations

import pytest
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.kubegpu.share.plugins.module_utils._backends import cluster, machine
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from fake_kube import FakeKube
from test_hami_leftovers import Api

LEFT = {"nvidia.com/gpu": "0"}


def params(module, **given):
    result = ArgumentSpecValidator(module.ARGUMENTS).validate(given)
    assert not result.error_messages, result.error_messages
    return result.validated_parameters


def node(annotations=None, labels=None, resources=None):
    metadata = {"name": "gpu1", "annotations": annotations or {}, "labels": labels or {}}
    status = {"capacity": resources or {}, "allocatable": resources or {}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


@pytest.mark.parametrize(
    ("backend", "live", "more"),
    [
        ("gpushare", node({"kubegpu.share/cards": "[]"}), {}),
        ("hami", node({"hami.io/node-nvidia-register": "[]"}, {"gpu": "on", "kubegpu.share/backend": "hami"}), {}),
        ("nvidia", node(resources=LEFT), {"resources": ["nvidia.com/*"]}),
    ],
)
def test_what_a_back_ends_server_wrote_goes_from_its_node_and_stays_elsewhere(backend, live, more):
    def off(name, check=False):
        given = {"backend": backend, "state": "off_nodes", "nodes": [name], "kubelet_timeout": 0, **more}
        return cluster.ensure(kube, params(cluster, **given), check)["changed"]

    kube = Api(live)
    assert off("gpu1", check=True) and not off("gpu2")
    assert off("gpu1") and not off("gpu1")
    [left] = kube.list_all("v1", "Node")
    assert not left["metadata"]["annotations"] and not left["metadata"]["labels"] and not left["status"]["capacity"]


def test_a_state_that_a_back_end_does_not_have_is_refused():
    with pytest.raises(BadInput, match="state: ready isn't one of nvidia's, which are off_nodes"):
        cluster.ensure(FakeKube(), params(cluster, backend="nvidia", state="ready"), False)


def test_hamis_release_is_ready_only_with_its_webhook():
    kube = FakeKube(node())
    kube.try_create = lambda one: one
    given = {"backend": "hami", "state": "ready", "proof_namespace": "default", "nodes": ["gpu1"]}
    unready = cluster.ensure(kube, params(cluster, **given), True)["unready"]
    assert [one.partition(" ")[0] for one in unready] == ["HAMi's", "node"], unready


def test_each_back_end_with_files_has_its_own_removal():
    assert set(machine.REMOVED) == {"hami", "nvidia"}
    # One option of either is none of the other's.
    assert set(machine.ARGUMENTS) == {"backend", "library_folder", "mps_root", "kubelet_root"}
