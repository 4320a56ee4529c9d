# SPDX-License-Identifier: GPL-3.0-or-later
"""Edits of YAML texts change nothing else."""

from __future__ import annotations

import json

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._documents.yaml_editor import Document
from ansible_collections.kubegpu.share.plugins.module_utils._documents.yaml_tree import Loader
from hypothesis import given
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
        ("a: {}\n", ("a", "b"), 1, "a: { b: 1 }\n"),
        ("a: { # none\n  }\n", ("a", "b"), 1, "a: { b: 1  # none\n  }\n"),
        ("{}", ("a", "b"), 1, '{ "a": {"b": 1} }'),
        ("a: {x: 1} # c\n", ("a", "b"), 1, "a: {x: 1, b: 1} # c\n"),
        ('{"a": {"b": "x"}}', ("a", "b"), "y", '{"a": {"b": "y"}}'),
        ("a: 1\n", ("m", "n"), "v", "a: 1\nm:\n  n: v\n"),
        ("a: 1", ("b",), 2, "a: 1\nb: 2"),
        ("a: 1\r\nb: 2\r\n", ("c", "d"), 3, "a: 1\r\nb: 2\r\nc:\r\n  d: 3\r\n"),
        ("a: null # c\nb: 1\n", ("a",), {"x": 1}, "a: {x: 1} # c\nb: 1\n"),
        ("a:   # c\nb: 1\n", ("a", "x"), 1, "a: {    x: 1 }   # c\nb: 1\n"),
        ("a: ~\n", ("a", "x"), 1, "a: {   x: 1 }\n"),
        ("a: [x] # c\n", ("a",), "y", "a: y # c\n"),
        ("a:\n- x\nb: 1\n", ("a",), [1, {"k": 2}], "a:\n- 1\n- k: 2\nb: 1\n"),
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
        ("l: [a,\n    b,\n   ]\n", "n", "l: [a,\n    b,\n    n,\n   ]\n"),
        ("l: [ a, b ]\n", "n", "l: [ a, b, n ]\n"),
        ("l: [a, # c\n  b]\n", "n", "l: [a, # c\n  b, n]\n"),
        ("l: []\n", "n", "l: [ n ]\n"),
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


ODD = [
    "a: null\nb: ~\nc:\nd: True\ne: yes\nf: 0644\ng: 1.50\nh: 'q'\ni: \"r\"\n",
    "# head\n\n---\n# more\na: 1\n\n\nb: 2\n",
    "a:\n    b:\n      -   c: |\n              text\n          d: >-\n              more\n",
    '{\n    "a": "é",\n    "b": [\n        1.5\n    ]\n}',
    '{\r\n\t"a": "b",\r\n\t"c" : {}\r\n}\r\n',
    '{"a":1,"b":{"c":[]}}\n',
    "{a: 1, b: [x, y]}\n",
    "a: 1\t# beside\nb:\t2\n",
    "%YAML 1.1\n---\na: 1\n...\n",
    "a: 1\n---\n# nothing more\n",
    "--- # head\na: &x {b: 1}\nc: *x\nd:\n  <<: *x\n  e: 1\n",
    "a: |+\n  text\n\n",
    "a: 1\nb: >-\n  # no comment\n  more",
    "\ufeffa: 1   \nb:\n\n  - 1\n  -   2\n",
    "? a\n: 1\nb: 2\n",
    "a: 1\n# end",
    "a:\n-\n  b: 1\n-  # c\n  b: 2\n",
]


@pytest.mark.parametrize("text", ODD)
def test_unedited_text_is_kept(text: str) -> None:
    done = edited(text, ("set", ("ours", "x"), {"y": [1]}), ("append", ("mine",), {"n": "v", "m": ["-", "a\nb"]}))
    read = json.loads if text.startswith("{") and '"' in text else lambda text: yaml.safe_load(text.replace("\t", " "))
    first = read(text.partition("---\n# nothing")[0])
    more = {"ours": {"x": {"y": [1]}}, "mine": [{"n": "v", "m": ["-", "a\nb"]}]}
    assert read(done.partition("---\n# nothing")[0]) == {**first, **more}
    assert edited(done, ("delete", ("mine", 0), None), ("delete", ("ours", "x", "y", 0), None)) == text


@pytest.mark.parametrize(
    "text",
    ["a: {}\n", "a: { }\n", "a: {\n  # none\n}\n", "a: null\n", "a: ~ # c\n", "a:\nb: 1\n", "{a: }\n", '{"a": null}'],
)
@pytest.mark.parametrize("listed", [True, False])
def test_empty_collections_are_restored(text: str, listed: bool) -> None:
    text = (
        text.replace("{}", "[]").replace("{ }", "[ ]").replace("{\n", "[\n").replace("\n}", "\n]") if listed else text
    )
    done = edited(text, ("append", ("a",), "x") if listed else ("set", ("a", "b"), "x"))
    assert yaml.safe_load(done)["a"] == (["x"] if listed else {"b": "x"})
    assert edited(done, ("delete", ("a", 0 if listed else "b"), None)) == text


@pytest.mark.parametrize(
    ("text", "step", "words"),
    [
        # The anchor makes one list of two.
        ("a: &l\n- x\nb: *l\n", ("append", ("a",), "n"), "line 2, .*more than it should"),
        ("a: &l\n- x\nb: *l\n", ("append", ("b",), "n"), r"line 3, .*\(b is an alias\)"),
        ("a: &l {x: 1}\nb:\n  <<: *l\n  y: 1\n", ("delete", ("b", "x"), None), r"line 2, .*merge key, <<"),
        ("a: &l {x: {}}\nb:\n  <<: *l\n  y: 1\n", ("set", ("b", "x", "z"), 1), r"line 3, .*merge key, <<"),
        ("a: [b # c\n", ("set", ("a",), 1), "line 2, can't be parsed"),
        ("a:  # c\n  # d\n  b: 1\n  c: 2\n", ("set", ("a",), {"x": 1}), "line 1, .*a comment would be lost"),
        ("l:\n- a: 1\n  # b\n  b: 2\n", ("delete", ("l", 0, "a"), None), "line 2, .*a comment would be lost"),
        ("a: 1\nb: 2\na: 3\n", ("set", ("c",), 1), "line 3, can't be parsed .the key a is there twice"),
        ("a: x\n", ("append", ("a",), 1), r"a isn't a list"),
        ("a: x\n", ("set", ("a", "b"), 1), r"a isn't a mapping"),
        ("a: !!timestamp x\n", ("set", ("b",), 1), "can't be parsed"),
        ("a: !!bool x\n", ("set", ("b",), 1), "can't be parsed"),
        ("a: 1\nb: \a\n", ("set", ("b",), 1), "the character #x07 isn't allowed"),
        ("[a]: 1\n", ("set", ("b",), 1), "can't be parsed"),
        ("a: " + "[" * 2000 + "]" * 2000, ("set", ("b",), 1), "nested too deeply"),
    ],
)
def test_unsafe_edits_refused(text: str, step: tuple[str, tuple[object, ...], object], words: str) -> None:
    with pytest.raises(BadInput, match=f"^/c, .*{words}.*; it is left as it is$"):
        edited(text, step)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\t# x\n", 1),
        ("a:\t1\nb: 2\n", 1),
        ("a\t: 'x\ty' \t\n", "x\ty"),
        ("a: x\ty\n", "x\ty"),
        ("a: x\n \ty\n  \t\n  z\n", "x y\nz"),
        ("a:\t\n  b: 1\n", {"b": 1}),
        ("a: {b: 1,\n\tc: 2}\n", {"b": 1, "c": 2}),
        ("a: 1\n  \t# c\nb: 2\n", 1),
        ("a: 1\n  \t  \nb: 2\n", 1),
        ("a: 2001-99-99\n", "2001-99-99"),
        ("a: 1\n--- # the end\n", 1),
    ],
)
def test_tabs_are_read_as_kubernetes_reads_them(text: str, value: object) -> None:
    """The values are those of sigs.k8s.io/yaml 1.4."""
    document = Document("/c", text)
    assert document.get(("a",)) == value
    document.set(("q",), True)
    assert document.get(("a",)) == value
    done = document.checked()
    assert all(line in done.splitlines() for line in text.splitlines())
    assert edited(done, ("delete", ("q",), None)) == text


@pytest.mark.parametrize(
    "text", ["a:\n\tb: 1\n", "-\tfoo\n", "\t\na: 1\n", "a: 1\n\t# c\n", "? a\n:\tb\n", "a:\n -\t# x\n  - 1\n"]
)
def test_tabs_that_kubernetes_refuses(text: str) -> None:
    with pytest.raises(BadInput, match="can't be parsed"):
        Document("/c", text)


def test_the_work_grows_with_the_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[int] = []
    first = Loader.__init__

    def counted(self: Loader, text: str) -> None:
        scanned.append(len(text))
        first(self, text)

    monkeypatch.setattr(Loader, "__init__", counted)
    Document("/c", "a: 1\t# x\n")
    few = len(scanned)
    scanned.clear()
    Document("/c", "".join(f"a{number}:\t|\n  # text\n  x\n# c\t\n" for number in range(300)))
    assert len(scanned) == few <= 2


def test_a_text_that_would_take_minutes_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^/c has more than 1 MiB, too much for a configuration; it is left as it is$"):
        Document("/c", "a: 1\n" + "#" * (1 << 20))
    dense = "a: 1\n" + "".join(f"k{number}: {{x: [1, 2]}} # c\n" for number in range(12_000))
    with pytest.raises(BadInput, match=r"^/c has more than 128 KiB without its comments, too much for a config"):
        Document("/c", dense)
    # One of nearly the first size, of comments as real ones are.
    text = "a: 1\n" + "# a comment\n" * 80_000
    assert edited(text, ("set", ("a",), 2)) == text.replace("1", "2", 1)


def test_comments_outlive_deleted_items() -> None:
    assert edited("l:\n- ours\n# about b\n- b\n", ("delete", ("l", 0), None)) == "l:\n# about b\n- b\n"
    inside = "l:\n- a\n- b: 1\n  # whose\n  c: |\n    # text\nd: 1\n"
    assert edited(inside, ("delete", ("l", 1), None)) == "l:\n- a\n  # whose\nd: 1\n"
    assert edited("l: [a, # a\n  b, c]\n", ("delete", ("l", 1), None)) == "l: [a, # a\n  c]\n"
    assert edited("l: [a, # a\n  b]\n", ("delete", ("l", 1), None)) == "l: [a, # a\n  ]\n"


def test_line_numbers() -> None:
    document = Document("/c", "# c\na:\n- b: 1\n  c: 2\n")
    paths = [(), ("a",), ("a", 0), ("a", 0, "c"), ("a", 7), ("z",)]
    assert [document.line(path) for path in paths] == [2, 2, 3, 4, 2, 2]


SCALAR = st.one_of(st.booleans(), st.integers(0, 99), st.sampled_from(["x", "a b", "#", "yes", "1", "", "é: -"]))
KEY = st.sampled_from(["a", "b", "key.with/slash", "c d"])
TREE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEY, inner, min_size=1, max_size=3),
    max_leaves=12,
)


def places(tree: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """All mappings and lists of a tree."""
    if not isinstance(tree, (dict, list)):
        return []
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [path, *(place for step, what in inner for place in places(what, (*path, step)))]


@st.composite
def many_styles(draw: st.DrawFn) -> str:
    """A file in which each mapping and list has a style of its own, with comments and blank lines anywhere."""

    def end() -> str:
        return draw(st.sampled_from(["", "", "", "  ", " # beside", "\t# beside"])) + draw(
            st.sampled_from(["\n", "\n", "\n", "\n\n", "\n# comment\n", "\n      # far in\n"])
        )

    def scalar(value: object) -> str:
        text = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=1000).strip()[1:-1]
        quoted = isinstance(value, str) and draw(st.booleans())
        return json.dumps(value, ensure_ascii=False) if quoted else text

    def flow(node: object) -> str:
        if not isinstance(node, (dict, list)):
            return scalar(node)
        blank = draw(st.sampled_from(["", "", "\n" + " " * 20])) if node else ""
        comma = draw(st.sampled_from([",", ", ", ",\n" + " " * 20, ", # beside\n" + " " * 20]))
        parts = (
            [f"{flow(key)}: {flow(what)}" for key, what in node.items()] if isinstance(node, dict) else map(flow, node)
        )
        opening, closing = "{}" if isinstance(node, dict) else "[]"
        return opening + blank + comma.join(parts) + blank + closing

    def block(node: object, indent: int) -> str:
        """What follows a colon or a dash, with the line's end."""
        if not isinstance(node, (dict, list)) or not node or draw(st.sampled_from([True, False, False])):
            return f" {flow(node)}{end()}"
        lowest = 0 if isinstance(node, list) and indent else 1
        return end() + body(node, indent + draw(st.integers(lowest, 4)) if indent >= 0 else 0)

    def body(node: dict[str, object] | list[object], indent: int) -> str:
        lead = " " * indent
        if isinstance(node, dict):
            return "".join(f"{lead}{flow(key)}:{block(what, indent)}" for key, what in node.items())
        # Kubernetes' parser refuses a tab behind a dash.
        return "".join(f"{lead}-{block(what, indent + 1)}".replace("-\t", "- ", 1) for what in node)

    tree = draw(st.dictionaries(KEY, TREE, min_size=1, max_size=4))
    text = draw(st.sampled_from(["", "# head\n", "---\n", "\n"])) + body(tree, 0)
    text = text.rstrip("\n") if draw(st.booleans()) else text
    return text.replace("\n", draw(st.sampled_from(["\n", "\r\n"])))


@given(many_styles(), st.data())
def test_an_edit_at_any_depth_is_undone_to_the_byte(text: str, data: st.DataObject) -> None:
    try:
        tree = yaml.safe_load(text.replace("\t", " "))
    except yaml.YAMLError:
        return
    if not tree:
        return
    path = data.draw(st.sampled_from(places(tree)))
    value = data.draw(st.sampled_from([1, "v", {"k": ["v"], "m": "yes"}, {"x": ["y"], "z": {}}]))
    document = Document("/c", text)
    there = document.get(path)
    steps = [(*path, "ours")]
    if isinstance(there, list):
        steps = [(*path, len(there)), (*path, len(there) + 1)]
    for step in steps:
        if isinstance(there, list):
            document.append(path, value)
        else:
            document.set(step, value)
    again = Document("/c", document.checked())
    for step in reversed(steps):
        assert again.get(step) == value
        again.delete(step)
    assert again.checked() == text
