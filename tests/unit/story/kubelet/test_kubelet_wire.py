# SPDX-License-Identifier: GPL-3.0-or-later
"""Our reader of protobuf's wire format beside the real library."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_wire import Broken, fields, text, text_map, texts
from google.protobuf.message import DecodeError
from gpushare import wire
from hypothesis import given
from hypothesis import strategies as st
from real_kubelet import answer

RESPONSE = wire.message("v1beta1.ContainerAllocateResponse")
words = st.text(max_size=300)
maps = st.dictionaries(words, words, max_size=8)


def ours(data):
    parts = fields(data, (1, 3, 4, 5))
    return {
        "envs": text_map(parts.get(1)),
        "annotations": text_map(parts.get(4)),
        "cdi": [text(fields(one, (1,)).get(1)) for one in parts.get(5, [])],
        "devices": [text(fields(one, (2,)).get(2)) for one in parts.get(3, [])],
    }


def theirs(data):
    found = RESPONSE.FromString(data)
    return {
        "envs": dict(found.envs),
        "annotations": dict(found.annotations),
        "cdi": [one.name for one in found.cdi_devices],
        "devices": [one.host_path for one in found.devices],
    }


@given(maps, maps, st.lists(words, max_size=5).map(tuple), st.lists(words, max_size=5).map(tuple))
def test_it_reads_what_the_library_writes(envs, annotations, cdi, devices):
    data = answer(envs, cdi, devices, annotations, mounts=("/lib",))
    assert ours(data) == theirs(data)
    assert ours(data)["envs"] == envs and ours(data)["cdi"] == list(cdi)


@given(st.binary(max_size=200) | st.tuples(st.just(answer({"A": "b"}, ("c",), ("/d",))), st.binary()).map(b"".join))
def test_it_reads_no_more_than_the_library(data):
    """Whatever we take for a message the library takes for the same one; it takes more, see the module."""
    try:
        found = ours(data)
    except Broken as error:
        assert str(error)
        return
    assert found == theirs(data)


@given(maps, st.data())
def test_what_is_cut_short_is_never_the_whole(envs, data):
    """Cut between two fields, less is a message, too; cut within one, it is none."""
    whole = answer(envs, ("nvidia.com/gpu=0",))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        assert ours(cut) == theirs(cut) and ours(cut) != ours(whole)
    except Broken:
        with pytest.raises(DecodeError):
            theirs(cut)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x0a", "within a number"),
        (b"\x0a\x05abc", "cut short"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "cut short"),
        (b"\x0a" + b"\xff" * 10, "64 bits"),
        (b"\x0a" + b"\x80" * 11, "64 bits"),
        (b"\x0a" + b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\x00\x00", "begins no field"),
        (b"\x02\x00", "begins no field"),
        (b"\xff\xff\xff\xff\x7f\x00", "begins no field"),
        (b"\x08\x01", "wire type 0"),
        (b"\x0d\0\0\0\0", "wire type 5"),
        (b"\x11\0\0\0", "cut short"),
        (b"\x15\0\0\0", "cut short"),
        (b"\x10\x80", "within a number"),
        (b"\x13\x14", "wire type 3"),
        (b"\x16", "wire type 6"),
        (b"\x17", "wire type 7"),
    ],
    ids=lambda one: one.hex() if isinstance(one, bytes) else one.replace(" ", "-"),
)
def test_no_message(data, says):
    with pytest.raises(Broken, match=says):
        fields(data, (1,))


def test_what_isnt_wanted_is_stepped_over():
    data = b"\x10\x80\x01" + b"\x19" + b"\0" * 8 + b"\x25" + b"\0" * 4 + b"\x2a\x03xyz" + b"\x0a\x01a"
    assert fields(data, (1,)) == {1: [b"a"]} and fields(b"", (1,)) == {}
    long = b"a" * 70000
    assert fields(b"\x0a\xf0\xa2\x04" + long, (1,)) == {1: [long]}


def test_texts():
    assert text(None) == text([]) == "" and text([b"a", b"\xc3\xa9"]) == "é" and texts(None) == []
    assert text_map([b"", b"\x0a\x01a", b"\x0a\x01b\x12\x01c", b"\x0a\x01b\x12\x01d"]) == {"": "", "a": "", "b": "d"}
    with pytest.raises(Broken, match="UTF-8"):
        text([b"\xff"])
