# SPDX-License-Identifier: GPL-3.0-or-later
"""Edits of JSON texts: other bytes stay, and syntax errors are refused."""

from __future__ import annotations

import json
import re
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._documents.json_editor import Document
from hypothesis import given
from hypothesis import strategies as st

FILE = "/etc/docker/daemon.json"

NEW = json.dumps({"d": "n", "r": {"n": {"path": "/x"}}}, indent=4) + "\n"
# before -> after ``default-runtime``, ``runtimes.nvidia.path`` and ``features.cdi`` were set
SET = {
    "empty": ("", NEW),
    "blank": ("\n\n", f"{NEW}\n"),
    "one line with blanks": ('{ "a": 1, "b": 2 }\n', '{ "a": 1, "b": 2, "d": "n", "r": {"n": {"path": "/x"}} }\n'),
    "tabs, no final newline": (
        '{\n\t"a": 12345678901234567890,\n\t"b": 1.0e3\n}',
        '{\n\t"a": 12345678901234567890,\n\t"b": 1.0e3,\n\t"d": "n",\n\t"r": {\n\t\t"n": {\n\t\t\t"path": "/x"\n'
        "\t\t}\n\t}\n}",
    ),
    "CRLF, colons with blanks": (
        '{\r\n  "a" : 1\r\n}\r\n',
        '{\r\n  "a" : 1,\r\n  "d" : "n",\r\n  "r" : {\r\n    "n": {\r\n      "path": "/x"\r\n    }\r\n  }\r\n}\r\n',
    ),
    "byte order mark": ('\ufeff{"a":1}', '\ufeff{"a":1,"d":"n","r":{"n": {"path": "/x"}}}'),
    "null for an object": ('{"r": null, "a": 1}', '{"r": {"n": {"path": "/x"}}, "a": 1, "d": "n"}'),
    "an object in its own way": (
        '{\n  "r": {"m": {"path": "/m"}},\n  "a": 0\n}\n',
        '{\n  "r": {"m": {"path": "/m"},"n": {\n      "path": "/x"\n    }},\n  "a": 0,\n  "d": "n"\n}\n',
    ),
    "there already": ('{"d": "x", "r": {"n": {"path": "/y", "runtimeArgs": ["--v"]}}}', None),
}


@pytest.mark.parametrize(("before", "after"), SET.values(), ids=list(SET))
def test_only_edited_bytes_change(before: str, after: str | None) -> None:
    document = Document(FILE, before)
    document.set(("d",), "n")
    document.set(("r", "n", "path"), "/x")
    expected = after or before.replace('"x"', '"n"').replace("/y", "/x")
    assert document.checked() == expected
    json.loads(document.checked().lstrip("\ufeff"))
    again = Document(FILE, expected)
    again.set(("d",), "n")
    again.set(("r", "n", "path"), "/x")
    assert again.checked() == expected, "the same again changes nothing"


@pytest.mark.parametrize(
    ("text", "path", "after"),
    [
        ('{"a": 1, "b": 2}', "a", '{"b": 2}'),
        ('{"a": 1, "b": 2}', "b", '{"a": 1}'),
        ('{\n  "a": 1\n}\n', "a", "{}\n"),
        ('{"a": 1}', "x", '{"a": 1}'),
    ],
)
def test_a_key_is_removed_with_its_comma(text: str, path: str, after: str) -> None:
    document = Document(FILE, text)
    document.delete((path,))
    assert document.checked() == after


def test_a_value_is_restored_as_it_was_written() -> None:
    before = Document(FILE, '{"a": {"n": 1.50,  "m": [1,2 ]}}')
    document = Document(FILE, '{"a": {}}')
    document.restore(("a",), before.written(("a",)))
    assert document.checked() == '{"a": {"n": 1.50,  "m": [1,2 ]}}'


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('{\n  "a": 1,\n}', 2, "a comma stands before the closing }"),
        ('{\n// mine\n"a": 1}', 2, "JSON has no comments"),
        ('# x\n{"a": 1}', 1, "JSON has no comments"),
        ('{"a": NaN}', 1, "NaN isn't JSON"),
        ('{"a": -Infinity}', 1, "-Infinity isn't JSON"),
        ('{"a": 1,\n"a": 2}', 2, 'the key "a" is there twice'),
        ('{"b": [{"a": 1, "a": 2}]}', 1, 'the key "a" is there twice'),
        ("[1]", 1, "it isn't an object"),
        ('{"a": 1} {}', 1, "something follows the object"),
        ('{"a": 01}', 1, "a comma or a closing brace was expected"),
        ("{'a': 1}", 1, "a key in double quotes was expected"),
        ('{"a" 1}', 1, "a colon was expected"),
        ('{"a": tru}', 1, "expecting value"),
        ('{\n"a":', 2, "it ends too early"),
        ('{"a": "x\ny"}', 1, "invalid control character at"),
        ('{"a":' * 200 + "1" + "}" * 200, 1, "it is nested too deeply"),
    ],
)
def test_a_syntax_error_is_refused_with_its_line(text: str, line: int, reason: str) -> None:
    message = f"{FILE}, line {line}, can't be parsed ({reason}); it is left as it is"
    with pytest.raises(BadInput, match=f"^{re.escape(message)}$"):
        Document(FILE, text)


def test_only_an_object_gets_members() -> None:
    with pytest.raises(BadInput, match=r"daemon.json: features isn't an object"):
        Document(FILE, '{"features": []}').set(("features", "cdi"), True)


def test_an_edit_that_would_change_more_is_refused() -> None:
    document = Document(FILE, '{"a": 1}')
    document.tree["b"] = "never written"
    with pytest.raises(BadInput, match="changed more than it should"):
        document.checked()


blank = st.text(" \t\r\n", max_size=3)
numbers = st.sampled_from(["0", "-1", "12345678901234567890", "1.0e3", "-0.0", "1E-5", "3.140"])
texts = st.text(max_size=8).map(lambda one: json.dumps(one, ensure_ascii=False))


@st.composite
def literals(draw: st.DrawFn, depth: int = 3) -> str:
    """Any JSON value, in any layout."""
    kind = draw(st.sampled_from(["scalar", "list", "object"] if depth else ["scalar"]))
    if kind == "scalar":
        return draw(st.one_of(numbers, texts, st.sampled_from(["true", "false", "null"])))
    if kind == "list":
        items = draw(st.lists(literals(depth - 1), max_size=3))
        return "[" + ",".join(draw(blank) + item + draw(blank) for item in items) + "]"
    return draw(objects(depth - 1))


@st.composite
def objects(draw: st.DrawFn, depth: int = 3) -> str:
    names = st.one_of(st.sampled_from(["runtimes", "features", "default-runtime", "nvidia"]), st.text(max_size=4))
    keys = draw(st.lists(names, max_size=4, unique=True))
    members = [f"{draw(blank)}{json.dumps(key)}{draw(blank)}:{draw(blank)}{draw(literals(depth))}" for key in keys]
    return "{" + (",".join(members) or draw(blank)) + "}"


def _kept(tree: dict[str, t.Any], *paths: tuple[str, ...]) -> dict[str, t.Any]:
    """All but what is ours; objects that were made for it go too."""
    tree = json.loads(json.dumps(tree))
    for path in paths:
        here: t.Any = tree
        for part in path[:-1]:
            here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, dict):
            here.pop(path[-1], None)
    return {key: one for key, one in tree.items() if not (key in ("runtimes", "features") and one in ({}, None))}


@given(st.builds(lambda *parts: "".join(parts), st.sampled_from(["", "\ufeff"]), blank, objects(), blank))
def test_no_foreign_member_is_lost(text: str) -> None:
    before = json.loads(text.lstrip("\ufeff"), parse_int=str, parse_float=str)
    document = Document(FILE, text)
    assert document.checked() == text
    ours = (("default-runtime",), ("runtimes", "nvidia"), ("features", "cdi"))
    values: tuple[t.Any, ...] = ("nvidia", {"path": "/x"}, True)
    try:
        for path, value in zip(ours, values, strict=True):
            document.set(path, value)
    except BadInput as refused:
        assert "isn't an object" in str(refused)
        return
    after = document.checked()
    tree = json.loads(after.lstrip("\ufeff"), parse_int=str, parse_float=str)
    assert _kept(tree, *ours) == _kept(before, *ours)
    assert tree["runtimes"]["nvidia"] == {"path": "/x"} and tree["features"]["cdi"] is True
    assert [key for key in tree if key in before] == list(before), "the order stays"
    again = Document(FILE, after)
    for path in reversed(ours):
        again.delete(path)
    left = json.loads(again.checked().lstrip("\ufeff"), parse_int=str, parse_float=str)
    assert _kept(left, *ours) == _kept(before, *ours)


JUNK = st.text(max_size=40) | st.text('{}[]",:01truefalsn \n', max_size=30) | objects().map(lambda one: one[:-1])


@given(JUNK)
def test_anything_invalid_is_a_clear_error(text: str) -> None:
    try:
        valid = isinstance(json.loads(text.lstrip("\ufeff").strip(" \t\r\n") or "{}"), dict)
    except ValueError:
        valid = False
    try:
        assert Document(FILE, text).checked()
    except BadInput as refused:
        assert str(refused).startswith(f"{FILE}, line ") and str(refused).endswith("; it is left as it is")
        if valid:
            assert "twice" in str(refused) or "isn't JSON" in str(refused) or "isn't an object" in str(refused)
    else:
        assert valid
