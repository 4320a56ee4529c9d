# SPDX-License-Identifier: GPL-3.0-or-later
"""Edits of YAML texts: what is asked for, and nothing more."""

from __future__ import annotations

import re

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.plugin_utils import _yaml_document
from ansible_collections.kubegpu.share.plugins.plugin_utils._yaml_document import Document
from hypothesis import given, settings
from hypothesis import strategies as st


def edited(text: str, *steps: tuple[str, tuple[object, ...], object]) -> str:
    document = Document("/c", text)
    for verb, path, value in steps:
        if verb == "delete":
            document.delete(path)  # type: ignore[arg-type]
        else:
            getattr(document, verb)(path, value)
    return document.checked()


@pytest.mark.parametrize(
    ("old", "path", "value", "new"),
    [
        ("a: 1 # c\nb: 2\n", ("a",), 3, "a: 3 # c\nb: 2\n"),
        ("a: 'x' # c\n", ("a",), "z", "a: 'z' # c\n"),
        ("a:\n  b: 1\n# end\n", ("a", "c"), "x", "a:\n  b: 1\n  c: x\n# end\n"),
        ("a:\n    b: 1\n", ("a", "c"), {"d": [1]}, "a:\n    b: 1\n    c:\n        d:\n        - 1\n"),
        ("a: {}\n", ("a", "b"), 1, "a:\n  b: 1\n"),
        ("a: {x: 1} # c\n", ("a", "b"), 1, "a: {x: 1, b: 1} # c\n"),
        ('{"a": {"b": "x"}}', ("a", "b"), "y", '{"a": {"b": "y"}}'),
        ("a: 1\n", ("m", "n"), "v", "a: 1\nm:\n  n: v\n"),
        ("a: 1", ("b",), 2, "a: 1\nb: 2\n"),
        ("a: null # c\nb: 1\n", ("a",), {"x": 1}, "a:      # c\n  x: 1\nb: 1\n"),
        ("a: |\n  text\n  more\nb: 1\n", ("c",), 1, "a: |\n  text\n  more\nb: 1\nc: 1\n"),
        ("b: 1\na: |\n  text\n  more\n", ("c",), 1, "b: 1\na: |\n  text\n  more\nc: 1\n"),
        ("a: 0\n", ("a",), "true", "a: 'true'\n"),
    ],
)
def test_set(old: str, path: tuple[object, ...], value: object, new: str) -> None:
    assert edited(old, ("set", path, value)) == new


@pytest.mark.parametrize(
    ("old", "item", "new"),
    [
        ("l:\n- a\n- b # c\nx: 1\n", "n", "l:\n- a\n- b # c\n- n\nx: 1\n"),
        ("l:\n    - a\n    # end\n", "n", "l:\n    - a\n    - n\n    # end\n"),
        ("l: [a, b] # c\n", "n", "l: [a, b, n] # c\n"),
        ("l: [a,\n    b,\n   ]\n", "n", "l: [a, b, n]\n"),
        ("l: []\n", "n", "l:\n- n\n"),
        ("l:\n- a # e\n\n# about x\nx: 1\n", "n", "l:\n- a # e\n- n\n\n# about x\nx: 1\n"),
        ("x: 1\n", "n", "x: 1\nl:\n- n\n"),
        ("l:\n- k: 1\n", {"k": 2, "m": [3]}, "l:\n- k: 1\n- k: 2\n  m:\n  - 3\n"),
        ("l:\n-   k: 1\n", {"k": 2}, "l:\n-   k: 1\n-   k: 2\n"),
        ("l: [{k: 1}]\n", {"k": 2}, "l: [{k: 1}, {k: 2}]\n"),
    ],
)
def test_append(old: str, item: object, new: str) -> None:
    assert edited(old, ("append", ("l",), item)) == new


@pytest.mark.parametrize(
    ("old", "path", "new"),
    [
        ("a: 1\nb: 2 # c\nd: 3\n", ("b",), "a: 1\nd: 3\n"),
        ("l:\n- a\n- b\n- c\n", ("l", 1), "l:\n- a\n- c\n"),
        ("l: [a, b, c]\n", ("l", 1), "l: [a, c]\n"),
        ("l: [a, b]\n", ("l", 0), "l: [b]\n"),
        ("l: [a, b]\n", ("l", 1), "l: [a]\n"),
        ("m: {a: 1, b: 2}\n", ("m", "b"), "m: {a: 1}\n"),
        ("a: 1\nl:\n- x\n", ("l", 0), "a: 1\n"),
        ("a: 1\nm:\n  n:\n    o: 1\n", ("m", "n", "o"), "a: 1\n"),
        ("l:\n- k: 1\n  m: 2\n- k: 3\n", ("l", 0), "l:\n- k: 3\n"),
        ("l:\n- a\n- n # ours\n# about b\n- b\n", ("l", 1), "l:\n- a\n# about b\n- b\n"),
        ("l:\n- k: 1\n  m: 2\n", ("l", 0, "k"), "l:\n- m: 2\n"),
        ("m:\n  a: 1\n  # about b\n  b: 2\n", ("m", "b"), "m:\n  a: 1\n  # about b\n"),
    ],
)
def test_delete(old: str, path: tuple[object, ...], new: str) -> None:
    assert edited(old, ("delete", path, None)) == new


@pytest.mark.parametrize(
    ("text", "line"), [("a: 1\nb: [\n", 3), ("a: 1\n b: 2\n", 2), ("- a\n", 1), ("a: 1\n---\nb: 1\n", 2), ("", 1)]
)
def test_unparsable(text: str, line: int) -> None:
    with pytest.raises(BadInput, match=rf"^/c, line {line}, can't be parsed \(.+\); it is left as it is$"):
        Document("/c", text)


@pytest.mark.parametrize(
    "text",
    [
        "a: null\nb: ~\nc:\nd: True\ne: yes\nf: 0644\ng: 1.50\nh: 'q'\ni: \"r\"\n",
        "# head\n\n---\n# more\na: 1\n\n\nb: 2\n",
        "a:\n    b:\n      -   c: |\n              text\n          d: >-\n              more\n",
        '{\n    "a": "é",\n    "b": [\n        1.5\n    ]\n}',
    ],
)
def test_what_isnt_edited_stays_as_it_is_written(text: str) -> None:
    done = edited(text, ("set", ("ours", "x"), {"y": [1]}))
    assert done != text
    assert edited(done, ("delete", ("ours", "x", "y", 0), None)) == text


def test_an_edit_that_reaches_further_than_asked_is_refused() -> None:
    # The anchor makes one list of two.
    with pytest.raises(BadInput, match=r"/c is written .*more than it should"):
        edited("a: &l\n- x\nb: *l\n", ("append", ("a",), "n"))


def test_a_comment_isnt_taken_out_with_what_stood_above_it() -> None:
    with pytest.raises(BadInput, match="a comment would be lost"):
        edited("l:\n- ours\n# about b\n- b\n", ("delete", ("l", 0), None))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_yaml_document, "ruamel", None)
    with pytest.raises(ShareError, match=r"ruamel\.yaml"):
        Document("/c", "a: 1\n")


SCALAR = st.one_of(st.booleans(), st.integers(0, 99), st.sampled_from(["x", "a b", "#", "yes", "1", "", "é: -"]))
KEY = st.sampled_from(["a", "b", "key.with/slash", "c d"])
TREE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEY, inner, min_size=1, max_size=3),
    max_leaves=12,
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    tree = draw(st.dictionaries(KEY, TREE, max_size=4))
    text = yaml.safe_dump(
        tree,
        default_flow_style=draw(st.sampled_from([False, None, True])),
        sort_keys=False,
        indent=draw(st.sampled_from([2, 4])),
        allow_unicode=True,
    )
    lines = text.split("\n")
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, len(lines) - 1)), "# comment")
    text = "\n".join(lines)
    try:
        return text if yaml.safe_load(text) == tree else ""
    except yaml.YAMLError:
        return ""


@settings(deadline=None)
@given(texts(), st.sampled_from([1, "v", {"x": ["y"], "z": {}}]), st.booleans())
def test_added_then_removed_gives_the_bytes_back(text: str, value: object, listed: bool) -> None:
    try:
        document = Document("/c", text)
    except BadInput:
        return
    try:
        if listed:
            document.append(("ours",), value)
            document.append(("ours",), "second")
            document = Document("/c", document.checked())
            document.delete(("ours", 1))
            document.delete(("ours", 0))
        else:
            document.set(("ours",), value)
            document = Document("/c", document.checked())
            assert document.get(("ours",)) == value
            if not yaml.safe_load(text):
                return
            document.delete(("ours",))
        done = document.checked()
    except BadInput:
        return
    if yaml.safe_load(text):
        assert re.sub(r"\s", "", done) == re.sub(r"\s", "", text), "only whitespace may change"
        assert yaml.safe_load(done) == yaml.safe_load(text)
        # A file in several styles is written in one by ruamel.yaml: here PyYAML's "- a" beside "-   b: c", and flow.
        if "-   " not in text and "[" not in text and "{" not in text:
            assert done.rstrip("\n") == text.rstrip("\n")
