# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's response to List: GPU devices only, decoded completely or not at all."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.devices import parse_pod_resources
from hypothesis import given
from hypothesis import strategies as st
from real_kubelet import MEMORY, list_response

GPUS = ["aliyun.com/gpu-", "nvidia.com/"]


def test_pods_with_their_devices():
    data = list_response(
        {
            "b/two": {"main": {MEMORY: ["s-1", "s-0", "s-1"], "nvidia.com/mig-1g.5gb": ["MIG-1"]}, "side": {}},
            "b/plain": {"main": {}},
            "a/fpga": {"main": {"intel.com/fpga": ["secret"]}},
            "a/one": {"main": {"intel.com/fpga": ["secret"]}, "other": {MEMORY: ["s-2"]}},
        }
    )
    one = {"name": "other", "devices": [{"resource": MEMORY, "ids": ["s-2"]}], "claims": []}
    mig = {"resource": "nvidia.com/mig-1g.5gb", "ids": ["MIG-1"]}
    two = {"name": "main", "devices": [{"resource": MEMORY, "ids": ["s-1", "s-0"]}, mig], "claims": []}
    assert parse_pod_resources(data, GPUS) == {
        "state": "ok",
        "problem": "",
        "pods": [
            {"namespace": "a", "name": "one", "containers": [one]},
            {"namespace": "b", "name": "two", "containers": [two]},
        ],
    }
    assert "secret" not in str(parse_pod_resources(data, GPUS))
    assert parse_pod_resources(b"", GPUS) == {"state": "ok", "problem": "", "pods": []}


def test_fields_of_newer_versions_are_skipped():
    # A container's cpu_ids (3, packed), memory (4) and an unknown one (6); an unknown field of the pod.
    container = b"\x0a\x01m" + b"\x1a\x02\x01\x02" + b"\x22\x00" + b"\x32\x03abc"
    devices = b"\x0a\x0envidia.com/gpu" + b"\x12\x01x" + b"\x1a\x04\x0a\x02\x08\x01"
    container += b"\x12" + bytes([len(devices)]) + devices
    pod = b"\x0a\x01p\x12\x01n" + b"\x1a" + bytes([len(container)]) + container + b"\x78\x05"
    found = parse_pod_resources(b"\x0a" + bytes([len(pod)]) + pod, GPUS)
    assert found["state"] == "ok"
    assert found["pods"][0]["containers"][0]["devices"] == [{"resource": "nvidia.com/gpu", "ids": ["x"]}]


WHOLE = list_response({"a/one": {"main": {MEMORY: ["s-0", "s-1"]}}, "a/two": {"main": {MEMORY: ["s-2"]}}})


@pytest.mark.parametrize("data", [b"<html>", b"\x0a\x05", WHOLE[:-1], b"\x0a\x03\x0a\x01\xff"], ids=repr)
def test_a_malformed_response_is_unknown(data):
    found = parse_pod_resources(data, GPUS)
    assert found["state"] == "unknown" and found["pods"] == [] and "version 1" in found["problem"]


@given(
    st.binary(max_size=200)
    | st.integers(0, len(WHOLE)).map(lambda end: WHOLE[:end])
    | st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=1)).map(
        lambda change: WHOLE[: change[0]] + change[1] + WHOLE[change[0] + 1 :]
    )
)
def test_any_bytes(data):
    found = parse_pod_resources(data, GPUS)
    assert found["state"] in ("ok", "unknown") and (found["state"] == "ok") == (found["problem"] == "")
    assert found["state"] == "ok" or not found["pods"]
