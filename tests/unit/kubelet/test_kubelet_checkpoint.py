# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's checkpoint: both of its forms, the fields that may leave the node, and damage of every kind."""

from __future__ import annotations

import base64
import copy
import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.checkpoint import parse_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from real_kubelet import GPU, MEMORY, POD, allocate_response, checkpoint, document, entry

GPUS = ["aliyun.com/gpu-", "nvidia.com/"]
GIVEN = {
    "NVIDIA_VISIBLE_DEVICES": GPU,
    "ALIYUN_COM_GPU_MEM_IDX": "0",
    "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
    "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
    "CGPU_DISABLE": "true",
}
SECRET = {"API_TOKEN": "hunter2", "CUDA_VISIBLE_DEVICES": "0", "MY_NVIDIA_KEY": "hunter2"}
RESPONSE = allocate_response(
    {**SECRET, **GIVEN}, ("nvidia.com/gpu=0",), ("/dev/nvidia0",), {"cdi.k8s.io/x": "y"}, ("/lib",)
)


def test_an_entry_with_a_full_response():
    raw = checkpoint(
        entry({"-1": ["s-1", "s-0"]}, response=RESPONSE),
        registered={MEMORY: ["s-0", "s-1"], "intel.com/fpga": ["f"], "nvidia.com/gpu": None},
    )
    assert parse_checkpoint(raw, GPUS) == {
        "state": "ok",
        "problem": "",
        "entries": [
            {
                "pod_uid": POD,
                "container": "main",
                "resource": MEMORY,
                "ids": ["s-1", "s-0"],
                "count": 2,
                "envs": GIVEN,
                "cdi_devices": ["nvidia.com/gpu=0"],
                "devices": ["/host/dev/nvidia0"],
                "annotations": {"cdi.k8s.io/x": "y"},
                "problem": "",
            }
        ],
        "registered": {MEMORY: ["s-0", "s-1"], "nvidia.com/gpu": []},
    }
    assert "hunter2" not in str(parse_checkpoint(raw, GPUS))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["a", "b", "a"], ["a", "b"]),
        ({"-1": ["a", "b"]}, ["a", "b"]),
        ({"10": ["c"], "2": ["b"], "0": ["a"]}, ["a", "b", "c"]),
        ({"0": ["a", "b"], "1": ["b", "a"]}, ["a", "b"]),
        ({"0": None}, []),
        ({}, []),
        ([], []),
        (None, []),
    ],
    ids=str,
)
def test_both_forms_of_ids(ids, expected):
    """A list before 1.20; by NUMA node since, where a device of two nodes is listed twice and counts once."""
    found = parse_checkpoint(checkpoint(entry(ids)), GPUS)["entries"][0]
    assert found["ids"] == expected and found["count"] == len(expected)


def test_other_resources_are_dropped():
    raw = checkpoint(
        entry({"0": ["serial"]}, "intel.com/fpga", response=allocate_response({"NVIDIA_X": "serial"})),
        entry({"0": ["a"]}, "nvidia.com/gpu", container="b"),
        entry({"0": ["b"]}, "nvidia.com/gpu", container="a"),
        registered={"intel.com/fpga": ["serial"]},
    )
    found = parse_checkpoint(raw, GPUS)
    assert "serial" not in str(found) and found["registered"] == {}
    assert [one["container"] for one in found["entries"]] == ["a", "b"]
    assert len(parse_checkpoint(raw, ["intel.com/"])["entries"]) == 1


def test_go_writes_null_for_empty_fields():
    empty = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": None}, "Checksum": 0, "BootID": "x"}
    expected = {"state": "ok", "problem": "", "entries": [], "registered": {}}
    assert parse_checkpoint(json.dumps(empty).encode(), GPUS) == expected
    bare = {**entry(["a"]), "AllocResp": None}
    found = parse_checkpoint(checkpoint(bare), GPUS)["entries"][0]
    assert found["envs"] == {} and found["problem"] == ""


@pytest.mark.parametrize(
    "response", ["!", "====", "AA", "Cg==", "CgU=", base64.b64encode(RESPONSE[:-1]).decode(), "é", 5]
)
def test_a_response_that_cant_be_decoded(response):
    """The IDs are still reported; nothing of the response is, rather than half of it."""
    found = parse_checkpoint(checkpoint({**entry(["a"]), "AllocResp": response}, entry(["b"], container="z")), GPUS)
    assert found["state"] == "ok"
    broken, good = found["entries"]
    assert broken["envs"] is None and "AllocResp" in broken["problem"] and broken["ids"] == ["a"]
    assert not broken["devices"] and not broken["cdi_devices"] and not broken["annotations"]
    assert good["envs"] == {} and good["problem"] == ""


WHOLE = checkpoint(entry({"0": ["s-0"]}, response=RESPONSE), registered={MEMORY: ["s-0", "s-1"]})
DEEP = b'{"Data":' * 100_000


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "Expecting value"),
        (WHOLE[:-1], "Expecting"),
        (WHOLE[: len(WHOLE) // 2], "Unterminated"),
        (WHOLE + b"}", "Extra data"),
        (WHOLE + WHOLE, "Extra data"),
        (b"\xff\xfe" + WHOLE, "byte 0 isn't UTF-8"),
        (b"\xef\xbb\xbf" + WHOLE, "BOM"),
        (WHOLE.replace(b"3206411873", b"NaN"), "NaN is no number"),
        (WHOLE.replace(b"3206411873", b"-Infinity"), "-Infinity is no number"),
        (WHOLE.replace(b'"Checksum"', b'"Data":{},"Checksum"'), "'Data' twice"),
        (WHOLE.replace(b'"ContainerName"', b'"PodUID"'), "'PodUID' twice"),
        (WHOLE.replace(b"3206411873", b"9" * 10_000), "too long"),
        (DEEP, "nested too deeply"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\0" * 4096, "Expecting value"),
    ],
    ids=[
        "empty", "last byte", "half", "more", "twice", "utf-16", "bom", "nan", "infinity", "two Data", "two PodUID",
        "huge number", "deep objects", "deep lists", "zeroes",
    ],
)  # fmt: skip
def test_invalid_json(raw, message):
    found = parse_checkpoint(raw, GPUS)
    assert found["state"] == "unreadable" and message in found["problem"] and "\n" not in found["problem"]
    assert found["entries"] == [] and found["registered"] == {}


def changed(**keys):
    """An entry with other values; the valid one beside it must not be reported alone."""
    return document({**entry(["a"]), **keys}, entry(["b"], container="z"))


def data(**keys):
    whole = document(entry(["a"]))
    whole["Data"] = {**whole["Data"], **keys}
    return whole


@pytest.mark.parametrize(
    "whole",
    [
        None, [], {}, 5, "text", {"Checksum": 1}, {"Data": {}, "Checksum": 1}, {"Data": document()["Data"]},
        document(version=3), data(Version="v3"), document(apiVersion="kubelet/v1"),
        document(Data=[]), document(Data="x"), document(Data=None), document(Checksum="1"), document(Checksum=True),
        document(Checksum=None),
        data(PodDeviceEntries={}), data(PodDeviceEntries=0),
        data(PodDeviceEntries=[None]), data(PodDeviceEntries=[[]]), data(PodDeviceEntries=["x"]),
        data(RegisteredDevices=[]), data(RegisteredDevices=0), data(RegisteredDevices={MEMORY: "s-0"}),
        data(RegisteredDevices={MEMORY: [1]}), data(RegisteredDevices={MEMORY: {}}),
        changed(PodUID=None), changed(PodUID=5), changed(PodUID=["x"]), changed(PodUID="\ud800"),
        changed(ContainerName={}), changed(ResourceName=None), changed(ResourceName=7),
        changed(DeviceIDs="a"), changed(DeviceIDs=5), changed(DeviceIDs=[None]),
        changed(DeviceIDs=[["a"]]), changed(DeviceIDs={"numa0": ["a"]}), changed(DeviceIDs={"1_0": ["a"]}),
        changed(DeviceIDs={"0": "a"}), changed(DeviceIDs={"0": [1]}), changed(DeviceIDs={"0": {"a": 1}}),
        changed(DeviceIDs={"9" * 5000: ["a"]}), changed(DeviceIDs=["\udc00"]),
        document(entry(["a"]), entry(["b"])),
    ],
    ids=lambda whole: json.dumps(whole, default=str)[:150],
)  # fmt: skip
def test_an_unknown_form(whole):
    found = parse_checkpoint(json.dumps(whole).encode(), GPUS)
    assert found["state"] == "unknown" and "unknown form" in found["problem"]
    assert found["entries"] == [] and found["registered"] == {}


# --------------------------------------------------------------------------- arbitrary input

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("QQ==")
junk = st.recursive(
    leaves, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=4), one, max_size=3)
)
ENTRIES = ("Data", "PodDeviceEntries")
PLACES = [(), ("Data",), ("Checksum",), ENTRIES, (*ENTRIES, 0), (*ENTRIES, 0, "DeviceIDs", "0")]
PLACES += [
    *((*ENTRIES, 0, key) for key in entry([])),
    ("Data", "RegisteredDevices"),
    ("Data", "RegisteredDevices", MEMORY),
]


def assert_consistent(found):
    """The invariants of every result."""
    assert found["state"] in ("ok", "unreadable", "unknown")
    assert (found["state"] == "ok") == (found["problem"] == "")
    assert found["state"] == "ok" or (found["entries"] == [] and found["registered"] == {})
    for one in found["entries"]:
        assert all(isinstance(one[key], str) for key in ("pod_uid", "container", "resource"))
        assert one["count"] == len(one["ids"]) == len(set(one["ids"])) and all(isinstance(i, str) for i in one["ids"])
        assert (one["envs"] is None) == (one["problem"] != "")
    json.dumps(found, ensure_ascii=False).encode("utf-8")


@given(st.sampled_from(PLACES), junk)
def test_any_value_anywhere(place, value):
    whole = {"": json.loads(WHOLE)}
    inner = whole
    for key in ("", *place)[:-1]:
        inner = inner[key]
    inner[("", *place)[-1]] = copy.deepcopy(value)
    assert_consistent(parse_checkpoint(json.dumps(whole[""]).encode("utf-8", "surrogatepass"), GPUS))


@given(st.integers(0, len(WHOLE) - 1))
def test_a_truncated_file_is_never_ok(end):
    found = parse_checkpoint(WHOLE[:end], GPUS)
    assert_consistent(found)
    assert found["state"] == "unreadable"


@given(st.binary(max_size=300))
def test_any_bytes(raw):
    found = parse_checkpoint(raw, GPUS)
    assert_consistent(found)
    assert found["state"] != "ok"


@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=4), st.integers(0, 6))
def test_damage_in_the_middle(place, inserted, removed):
    raw = WHOLE[:place] + inserted + WHOLE[place + removed :]
    found = parse_checkpoint(raw, GPUS)
    assert_consistent(found)
    try:
        json.loads(raw)
    except ValueError:
        assert found["state"] == "unreadable"


@given(st.binary(max_size=100) | st.integers(0, len(RESPONSE)).map(lambda end: RESPONSE[:end]))
def test_any_response_of_a_plugin(response):
    found = parse_checkpoint(checkpoint(entry(["a"], response=response)), GPUS)
    assert_consistent(found)
    assert found["state"] == "ok" and found["entries"][0]["ids"] == ["a"]
