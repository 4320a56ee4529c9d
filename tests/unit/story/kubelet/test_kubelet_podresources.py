# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's answer to List: only GPUs, whole or not at all."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_podresources import listed
from hypothesis import given
from hypothesis import strategies as st
from real_kubelet import MEMORY
from real_kubelet import listed as answer

GPUS = ["aliyun.com/gpu-", "nvidia.com/"]


def test_pods_with_their_devices():
    data = answer(
        {
            "b/two": {"main": {MEMORY: ["s-1", "s-0", "s-1"], "nvidia.com/mig-1g.5gb": ["MIG-1"]}, "side": {}},
            "b/plain": {"main": {}},
            "a/fpga": {"main": {"intel.com/fpga": ["secret"]}},
            "a/one": {"main": {"intel.com/fpga": ["secret"]}, "other": {MEMORY: ["s-2"]}},
        }
    )
    assert listed(data, GPUS) == {
        "state": "ok",
        "problem": "",
        "pods": [
            {
                "namespace": "a",
                "name": "one",
                "containers": [{"name": "other", "devices": [{"resource": MEMORY, "ids": ["s-2"]}]}],
            },
            {
                "namespace": "b",
                "name": "two",
                "containers": [
                    {
                        "name": "main",
                        "devices": [
                            {"resource": MEMORY, "ids": ["s-1", "s-0"]},
                            {"resource": "nvidia.com/mig-1g.5gb", "ids": ["MIG-1"]},
                        ],
                    }
                ],
            },
        ],
    }
    assert "secret" not in str(listed(data, GPUS))
    assert listed(b"", GPUS) == {"state": "ok", "problem": "", "pods": []}


def test_fields_of_newer_versions_are_stepped_over():
    # A container's cpu_ids (3, packed), memory (4) and dynamic_resources (5); an unknown field of the pod.
    container = b"\x0a\x01m" + b"\x1a\x02\x01\x02" + b"\x22\x00" + b"\x2a\x03abc"
    devices = b"\x0a\x0envidia.com/gpu" + b"\x12\x01x" + b"\x1a\x04\x0a\x02\x08\x01"
    container += b"\x12" + bytes([len(devices)]) + devices
    pod = b"\x0a\x01p\x12\x01n" + b"\x1a" + bytes([len(container)]) + container + b"\x78\x05"
    found = listed(b"\x0a" + bytes([len(pod)]) + pod, GPUS)
    assert found["state"] == "ok"
    assert found["pods"][0]["containers"][0]["devices"] == [{"resource": "nvidia.com/gpu", "ids": ["x"]}]


WHOLE = answer({"a/one": {"main": {MEMORY: ["s-0", "s-1"]}}, "a/two": {"main": {MEMORY: ["s-2"]}}})


@pytest.mark.parametrize("data", [b"<html>", b"\x0a\x05", WHOLE[:-1], b"\x0a\x03\x0a\x01\xff"], ids=repr)
def test_what_is_no_such_message_is_unknown(data):
    found = listed(data, GPUS)
    assert found["state"] == "unknown" and found["pods"] == [] and "version 1" in found["problem"]


@given(st.binary(max_size=200) | st.integers(0, len(WHOLE)).map(lambda end: WHOLE[:end]))
def test_any_bytes(data):
    found = listed(data, GPUS)
    assert found["state"] in ("ok", "unknown") and (found["state"] == "ok") == (found["problem"] == "")
    assert found["state"] == "ok" or not found["pods"]


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_one_byte_that_is_another(place, byte):
    found = listed(WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :], GPUS)
    assert found["state"] in ("ok", "unknown") and (found["state"] == "ok") == (found["problem"] == "")
