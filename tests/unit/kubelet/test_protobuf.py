# SPDX-License-Identifier: GPL-3.0-or-later
"""Our reader of protobuf's wire format beside the real library."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.protobuf import (
    MalformedMessage,
    decode_fields,
    decode_string,
    decode_string_map,
    decode_strings,
)
from google.protobuf.message import DecodeError
from gpushare.kubelet import wire
from hypothesis import given
from hypothesis import strategies as st
from real_kubelet import allocate_response

RESPONSE = wire.message("v1beta1.ContainerAllocateResponse")
words = st.text(max_size=300)
maps = st.dictionaries(words, words, max_size=8)


def decoded(data):
    parts = decode_fields(data, (1, 3, 4, 5))
    return {
        "envs": decode_string_map(parts.get(1)),
        "annotations": decode_string_map(parts.get(4)),
        "cdi": [decode_string(decode_fields(one, (1,)).get(1)) for one in parts.get(5, [])],
        "devices": [decode_string(decode_fields(one, (2,)).get(2)) for one in parts.get(3, [])],
    }


def by_library(data):
    found = RESPONSE.FromString(data)
    return {
        "envs": dict(found.envs),
        "annotations": dict(found.annotations),
        "cdi": [device.name for device in found.cdi_devices],
        "devices": [device.host_path for device in found.devices],
    }


@given(maps, maps, st.lists(words, max_size=5).map(tuple), st.lists(words, max_size=5).map(tuple))
def test_decodes_what_the_library_encodes(envs, annotations, cdi, devices):
    data = allocate_response(envs, cdi, devices, annotations, mounts=("/lib",))
    assert decoded(data) == by_library(data)
    assert decoded(data)["envs"] == envs and decoded(data)["cdi"] == list(cdi)


@given(
    st.binary(max_size=200)
    | st.tuples(st.just(allocate_response({"A": "b"}, ("c",), ("/d",))), st.binary()).map(b"".join)
)
def test_accepts_no_more_than_the_library(data):
    """Every message that is accepted decodes as with the library, which is more lenient."""
    try:
        found = decoded(data)
    except MalformedMessage as error:
        assert str(error)
        return
    assert found == by_library(data)


@given(maps, st.data())
def test_a_truncated_message_never_equals_the_complete_one(envs, data):
    """Truncated between two fields it is a shorter message; truncated within a field it is none."""
    whole = allocate_response(envs, ("nvidia.com/gpu=0",))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        assert decoded(cut) == by_library(cut) and decoded(cut) != decoded(whole)
    except MalformedMessage:
        with pytest.raises(DecodeError):
            by_library(cut)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a", "within a number"),
        (b"\x0a\x05abc", "truncated"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "truncated"),
        (b"\x0a" + b"\xff" * 10, "64 bits"),
        (b"\x0a" + b"\x80" * 11, "64 bits"),
        (b"\x0a" + b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\x00\x00", "no field begins"),
        (b"\x02\x00", "no field begins"),
        (b"\xff\xff\xff\xff\x7f\x00", "no field begins"),
        (b"\x08\x01", "wire type 0"),
        (b"\x0d\0\0\0\0", "wire type 5"),
        (b"\x11\0\0\0", "truncated"),
        (b"\x15\0\0\0", "truncated"),
        (b"\x10\x80", "within a number"),
        (b"\x13\x14", "wire type 3"),
        (b"\x16", "wire type 6"),
        (b"\x17", "wire type 7"),
    ],
    ids=lambda one: one.hex() if isinstance(one, bytes) else one.replace(" ", "-"),
)
def test_malformed(data, message):
    with pytest.raises(MalformedMessage, match=message):
        decode_fields(data, (1,))


def test_other_fields_are_skipped():
    data = b"\x10\x80\x01" + b"\x19" + b"\0" * 8 + b"\x25" + b"\0" * 4 + b"\x2a\x03xyz" + b"\x0a\x01a"
    assert decode_fields(data, (1,)) == {1: [b"a"]} and decode_fields(b"", (1,)) == {}
    long = b"a" * 70000
    assert decode_fields(b"\x0a\xf0\xa2\x04" + long, (1,)) == {1: [long]}


def test_strings():
    assert (decode_string(None), decode_string([]), decode_strings(None)) == ("", "", [])
    assert decode_string([b"a", b"\xc3\xa9"]) == "é"
    rows = [b"", b"\x0a\x01a", b"\x0a\x01b\x12\x01c", b"\x0a\x01b\x12\x01d"]
    assert decode_string_map(rows) == {"": "", "a": "", "b": "d"}
    with pytest.raises(MalformedMessage, match="UTF-8"):
        decode_string([b"\xff"])
