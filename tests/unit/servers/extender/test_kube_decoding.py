# SPDX-License-Identifier: GPL-3.0-or-later
"""Decoding of JSON in pieces: the same values as the standard library, wherever it is cut, and in little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from gpushare.api import decoding
from gpushare.api.decoding import LEAF, MOST_OTHERS, OTHERS, STRING_LENGTH, Each, Shape, document, events, listed
from gpushare.api.fields import EVENT, OBJECT
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False))
# Also what needs an escape, and more than two bytes.
TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from('"\\/\n\u2028😀{}[],:')), max_size=12)
KEYS = st.one_of(st.sampled_from(["a", "b", "items", "metadata", "name"]), TEXT)
VALUES = st.recursive(
    st.one_of(WORDS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=25,
)


def refuse(*_given: Any) -> Any:
    raise ValueError


SHAPES: st.SearchStrategy[Shape] = st.recursive(
    st.just(LEAF),
    lambda inner: st.one_of(
        inner.map(lambda one: Each(one, 3)), st.dictionaries(st.one_of(KEYS, st.just(OTHERS)), inner, max_size=4)
    ),
    max_leaves=8,
)


def cut(data: bytes, every: int) -> Iterator[bytes]:
    return (data[at : at + every] for at in range(0, len(data), every))


def wanted(value: Any, shape: Shape) -> Any:
    """What a shape names of a value, said in another way than by the code."""
    if shape is None:
        return None
    if isinstance(value, dict):
        if not isinstance(shape, dict):
            return {}
        named = {key: shape.get(key, shape.get(OTHERS)) for key in value}
        return {key: wanted(value[key], inner) for key, inner in named.items() if inner is not None}
    if isinstance(value, list):
        return [wanted(one, shape.shape) for one in value][: shape.most] if isinstance(shape, Each) else []
    return value


@pytest.fixture(scope="module", params=[1, 5, 1 << 16], ids=["by character", "by five", "by large pieces"])
def piece(request: pytest.FixtureRequest) -> Iterator[int]:
    """How much is held, at the least, and the size of the pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "PIECE_LENGTH", request.param)
        yield request.param


@pytest.fixture(params=[True, False], ids=["whole", "never whole"])
def whole(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether short values are decoded at once."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr(decoding, "WHOLE_BYTES", 0)
        yield request.param


def texts(value: Any) -> list[bytes]:
    """A value in several notations."""
    return [
        json.dumps(value).encode(),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(),
        json.dumps(value, indent=2).replace("\n", " \r\n\t").encode(),
    ]


@settings(max_examples=40)
@given(VALUES, SHAPES)
def test_a_value_is_that_of_the_standard_library(piece: int, value: Any, shape: Shape) -> None:
    for data in texts(value):
        found = document(cut(data, piece), shape)
        assert found == (value if isinstance(value, dict | list) else wanted(value, shape))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "WHOLE_BYTES", 0)
            assert document(cut(data, piece), shape) in (wanted(value, shape), value)
            patch.setattr(decoding, "_decode", refuse)
            assert document(cut(data, piece), shape) == wanted(value, shape)


@settings(max_examples=40)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=4), max_size=4), SHAPES, st.booleans(), VALUES)
def test_the_items_of_a_list_are_those_of_the_standard_library(
    piece: int, items: list[dict[str, Any]], shape: Shape, is_last: bool, other: Any
) -> None:
    """Whatever comes before and after them."""
    metadata = {"resourceVersion": "7", "continue": "ü", "remainingItemCount": 3}
    first: dict[str, Any] = {"kind": "List", "metadata": metadata, "other": other}
    answer = {**first, "items": items} if is_last else {"items": items, **first}
    for data in texts(answer):
        head: dict[str, Any] = {}
        found = list(listed(cut(data, piece), shape, head))
        assert found == items
        assert head == {"metadata": {"resourceVersion": "7", "continue": "ü"}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "_decode", refuse)
            assert list(listed(cut(data, piece), shape, {})) == [wanted(item, shape) for item in items]


@settings(max_examples=40)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=4), max_size=4), st.booleans())
def test_the_events_of_a_watch_are_those_of_the_standard_library(
    piece: int, sent: list[dict[str, Any]], is_cut: bool
) -> None:
    data = b"".join(json.dumps(one).encode() + b"\n" for one in sent) + (b'\n{"type":"AD' if is_cut else b"\n")
    shape: Shape = {"a": LEAF, "items": {OTHERS: LEAF}}
    assert list(events(cut(data, piece), shape)) == sent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "WHOLE_BYTES", 0)
        patch.setattr(decoding, "_decode", refuse)
        complete = cut(data.removesuffix(b'{"type":"AD'), piece)
        assert list(events(complete, shape)) == [wanted(one, shape) for one in sent]


@settings(max_examples=40)
@given(VALUES, st.data())
def test_what_is_no_json_is_refused(piece: int, value: Any, data: st.DataObject) -> None:
    """Cut anywhere; and also where only the skipped parts are read."""
    text = json.dumps({"kept": value, "skipped": value}).encode()
    end = data.draw(st.integers(0, len(text) - 1))
    for shape in (OBJECT, {"kept": LEAF}, None):
        with pytest.raises(ValueError, match=r"."):
            document(cut(text[:end], piece), shape)
    with pytest.raises(ValueError, match=r"."):
        list(listed(cut(b'{"items":[' + text[:end], piece), OBJECT, {}))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1", '{"a" 1}', '{"a":}', "{1:2}", '{"a":1 "b":2}', '"a', "tru", "{} {}", "]", '{"a":"\\x"}'],
)
def test_malformed_text_is_refused(text: str, piece: int, whole: bool) -> None:
    with pytest.raises(ValueError, match=r"."):
        document(cut(text.encode(), piece), {OTHERS: LEAF})


@pytest.mark.parametrize("text", ['{"items":[1]}', '{"items":[],"items":[]}', "[]", '{"items":[{}]'])
def test_what_is_no_list_of_objects_is_refused(text: str, piece: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(listed(cut(text.encode(), piece), OBJECT, {}))


def test_a_list_may_be_null(piece: int) -> None:
    """As Go writes one that is empty."""
    head: dict[str, Any] = {}
    assert list(listed(cut(b'{"items":null,"metadata":{"resourceVersion":"1"}}', piece), OBJECT, head)) == []
    assert head["metadata"] == {"resourceVersion": "1"}


def test_depth_costs_nothing(piece: int) -> None:
    """Brackets of any depth, and numbers of any length."""
    depth = 20_000
    nested, number = "[" * depth + "]" * depth, "9" * 100_000
    text = f'{{"items":[{{"metadata":{{"name":"p","managedFields":{nested}}},"n":{number}}}]}}'
    assert list(listed(cut(text.encode(), 1000), OBJECT, {})) == [{"metadata": {"name": "p"}}]


def test_what_is_kept_is_bounded(piece: int) -> None:
    """Strings, other keys and entries; escapes and pairs aren't cut in half."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "WHOLE_BYTES", 0)
        patch.setattr(decoding, "_decode", refuse)
        room = "a" * (STRING_LENGTH - 9)
        for sent, kept in (("a" * 20, "a" * 9), ("aaa\\ud83d\\ude00aaaaa", "aaa"), ("aaaaa\\u1234b", "aaaaa")):
            assert document(cut(f'{{"a":"{room}{sent}"}}'.encode(), 999), {"a": LEAF}) == {"a": room + kept}
        with pytest.raises(ValueError, match="too long"):
            document(cut(b'{"a":' + b"9" * 500 + b"}", piece), {"a": LEAF})
        many = {**{f"k{number}": "" for number in range(MOST_OTHERS + 5)}, "own": "x"}
        found = document(cut(json.dumps(many).encode(), 1000), {OTHERS: LEAF, "own": LEAF})
        assert len(found) == MOST_OTHERS + 1 and found["own"] == "x"


LARGE = {
    "secrets": {"imagePullSecrets": [{"name": "a"}] * 50_000},
    "empty": {"tolerations": [{}] * 120_000},
    "escapes": {"containers": [{"name": "c", "env": [{"name": "A", "value": "<" * 1_400_000}]}]},
    "environment": {"containers": [{"name": "c", "env": [{"name": f"A{at}"} for at in range(40_000)]}]},
    "containers": {"containers": [{"name": f"c{at}", "image": "i", "resources": {}} for at in range(10_000)]},
    "claims": {"resourceClaims": [{"name": f"c{at}", "resourceClaimName": "x"} for at in range(8_000)]},
}


@pytest.mark.parametrize("kind", sorted(LARGE))
def test_a_large_pod_takes_little_memory(kind: str) -> None:
    """By the memory of Python's objects; tests/unit/servers/test_large_objects.py has that of the processes."""
    metadata = {"name": "p", "namespace": "n", "managedFields": [{"fieldsV1": {"f:spec": {}}}] * 10}
    pod = json.dumps({"metadata": metadata, "spec": LARGE[kind]}).replace("<", "\\u003c").encode()
    answer = b'{"metadata":{"resourceVersion":"1"},"items":[%s]}' % b",".join([pod] * 2)
    line = b'{"type":"ADDED","object":%s}\n' % pod

    def names() -> Iterator[str]:
        for one in listed(cut(answer, 16384), OBJECT, {}):
            yield one["metadata"]["name"]
        for event in events(cut(line, 16384), EVENT):
            yield event["object"]["metadata"]["name"]
        yield document(cut(pod, 16384), OBJECT)["metadata"]["name"]

    tracemalloc.start()
    try:
        assert list(names()) == ["p"] * 4
        most = tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()
    print(f"{kind}: {len(pod) / 1e6:.1f} MB of JSON, {most:.1f} MB of memory at the most")
    # Of containers something is kept; here of two pods at once.
    assert most < (20 if kind == "containers" else 5)


def test_what_an_object_is_large_by_costs_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each change: its owner makes many. What isn't kept isn't decoded, and plain strings are read at once."""
    calls = {"decoded": 0, "parts": 0}
    decode, chars = decoding._decode, decoding._Text._chars

    def counted(text: str, at: int) -> Any:
        calls["decoded"] += 1
        return decode(text, at)

    def parts(self: decoding._Text) -> Iterator[str]:
        calls["parts"] += 1
        return chars(self)

    monkeypatch.setattr(decoding, "_decode", counted)
    monkeypatch.setattr(decoding._Text, "_chars", parts)
    pod = {
        "metadata": {"name": "p", "labels": {f"l{at}": "" for at in range(20_000)}, "finalizers": ["a/b"] * 20_000},
        "spec": {"resourceClaims": [{"name": f"c{at}", "resourceClaimName": "x"} for at in range(20_000)]},
    }
    found = document(cut(json.dumps(pod).encode(), 16_384), OBJECT)
    assert (len(found["metadata"]["finalizers"]), len(found["spec"]["resourceClaims"])) == (100, 1000)
    # Besides the first tries to decode the whole, and what a piece cuts.
    assert calls["decoded"] < 1100 and calls["parts"] < 200
