# SPDX-License-Identifier: GPL-3.0-or-later
"""What people are told of memory limits: before anything changes, in the table, and by the verification."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _allocation, _memory_limit
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._allocation_table import table
from ansible_collections.kubegpu.share.plugins.module_utils._node_failures import NodeWish
from ansible_collections.kubegpu.share.plugins.module_utils._preflight import Host, Wish, described, examine
from ansible_collections.kubegpu.share.plugins.module_utils._verification import Expected, compare

R615 = NodeWish(driver_version="615.71.09")
CARDS = [contract.Card(0, "GPU-aaaaaaaa", 0, 16384, 16)]


def seen(driver="615.71.09", toolkit="1.20.1", cgroup=2, mig=False):
    return {
        "distribution": {"id": "debian", "version": "12", "family": "debian", "arch": "amd64"},
        "gpus": [{"address": "0000:01:00.0"}],
        "driver": {
            "module_version": driver,
            "version": driver,
            "cards": [{"index": 0, "uuid": "GPU-aaaaaaaa", "memory_mib": 16384, "minor": 0, "mig": mig}],
        },
        "toolkit": {"version": toolkit},
        "cgroup": {"version": cgroup},
    }


def judged(limit, what, wish=R615, **more):
    found = examine(Wish(memory_limit=limit, **more), None, [Host("gpu1", "gpu1", "gpu_nodes", what, wish)])
    return [(one.severity, one.sentence) for one in found.all if "gpushare_memory_limit" in one.found]


@pytest.mark.parametrize("limit", ["auto", "required", "off"])
def test_nothing_is_said_where_shares_will_be_limits(limit):
    assert judged(limit, seen()) == []
    # The roles will bring what isn't there yet.
    assert judged(limit, seen(driver=None, toolkit=None)) == []
    assert judged(limit, seen(driver="580.95.05", toolkit="1.17.0")) == []


@pytest.mark.parametrize(
    ("what", "wish", "why"),
    [
        (seen(cgroup=1), R615, "the node doesn't run with cgroup version 2"),
        (seen(), NodeWish(), "the driver is 580.95.05, and limits need 615 or newer"),
        (
            seen(driver="610.57.04"),
            NodeWish(driver_state="external", driver_version="615.71.09"),
            "the driver is 610.57.04, and limits need 615 or newer",
        ),
        (seen(mig=True), R615, "MIG is on for card 0, and MIG devices can't be limited"),
        (
            seen(toolkit="1.19.0"),
            NodeWish(driver_version="615.71.09", toolkit_state="external"),
            "NVIDIA's container toolkit is 1.19.0, and limits need 1.20.1 or newer",
        ),
        (
            seen(),
            NodeWish(driver_version="615.71.09", toolkit_version="1.18.2-1"),
            "NVIDIA's container toolkit is 1.18.2-1, and limits need 1.20.1 or newer",
        ),
    ],
)
def test_auto_notes_and_required_refuses_in_one_sentence(what, wish, why):
    assert judged("auto", what, wish) == [
        ("note", f"gpushare_memory_limit: nobody holds the pods of host gpu1 to their shares, because {why}")
    ]
    ((severity, sentence),) = judged("required", what, wish)
    assert severity == "problem"
    assert sentence.startswith(f"gpushare_memory_limit: host gpu1 can't hold pods to their shares, because {why}; ")
    assert judged("off", what, wish) == []
    assert judged("required", what, wish, device_plugin_image="registry.example/upstream:1") == []


def test_all_that_is_missing_is_one_sentence():
    ((_level, sentence),) = judged("auto", seen(cgroup=1, mig=True), NodeWish())
    assert sentence.endswith(
        "because the driver is 580.95.05, and limits need 615 or newer; the node doesn't run with cgroup version 2; "
        "MIG is on for card 0, and MIG devices can't be limited"
    )


def test_a_machine_of_which_little_is_known_isnt_judged():
    assert judged("required", {"distribution": {}, "gpus": [], "driver": {"cards": []}}) == []


def test_an_unknown_value_is_refused_and_a_required_limit_can_be_given_up_for_a_host():
    ((severity, sentence),) = judged("hard", seen())
    assert severity == "problem"
    assert sentence == "gpushare_memory_limit: 'hard' isn't known; it can be auto or required or off"
    assert "memory-limit" in described()
    hosts = [Host("gpu1", "gpu1", "gpu_nodes", seen(cgroup=1), R615)]
    assert examine(Wish(memory_limit="required"), None, hosts, ["memory-limit@gpu1"]).problems == []


@pytest.mark.parametrize(
    ("value", "mode"), [(False, "off"), ("off", "off"), ("False", "off"), ("auto", "auto"), (1, "1")]
)
def test_yaml_reads_off_as_false(value, mode):
    assert _memory_limit.mode(value) == mode


# --------------------------------------------------------------------------- what the node says


def node(name="gpu1", limit=None):
    annotations = {contract.NODE_CARDS: contract.cards_to_annotation(CARDS)}
    if limit is not None:
        annotations[contract.NODE_LIMIT] = limit
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"gpushare": "true"}, "annotations": annotations},
        "status": {
            "capacity": {contract.RESOURCE_MEMORY: "16"},
            "allocatable": {contract.RESOURCE_MEMORY: "16"},
            "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
        },
    }


def test_the_table_says_whether_shares_are_limits():
    found = _allocation.allocation(
        [node(limit=contract.LIMIT_ENFORCED), node("gpu2", "unenforced: old"), node("gpu3")], []
    )
    assert [one["memory_limit"] for one in found["nodes"]] == ["enforced", "unenforced: old", ""]
    lines = table(found).splitlines()
    assert lines[:3] == ["NAME:       gpu1", "IPADDRESS:  192.0.2.1", "LIMIT:      enforced"]
    assert [line for line in lines if line.startswith("LIMIT")] == [
        "LIMIT:      enforced",
        "LIMIT:      unenforced: old",
    ]


def test_the_verification_passes_what_is_enforced_and_notes_what_isnt_once_per_reason():
    old = "unenforced: NVIDIA's driver is 580.95.05, and limits need 615 or newer"
    nodes = [node("gpu1", "enforced"), node("gpu2", old), node("gpu3", old), node("gpu4", "off"), node("gpu5")]
    story = compare(Expected({}, [], "gpushare-system"), nodes, [])
    assert [one for one in story.passed if "to their shares" in one] == [
        "node gpu1: NVIDIA's driver holds the pods to their shares"
    ]
    assert story.notes == [
        "nobody holds the pods of nodes gpu2, gpu3 to their shares: "
        "NVIDIA's driver is 580.95.05, and limits need 615 or newer"
    ]
    assert not any("shares" in one for one in story.problems + story.unknown)


def test_many_nodes_are_counted():
    nodes = [node(f"gpu{number}", "unenforced: old") for number in range(13)]
    assert _memory_limit.notes(nodes)[0].endswith("gpu9 and 3 more to their shares: old")
