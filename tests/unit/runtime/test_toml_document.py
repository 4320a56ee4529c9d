# SPDX-License-Identifier: GPL-3.0-or-later
"""Edits of TOML texts: only the requested bytes change."""

from __future__ import annotations

import tomllib

import pytest
import tomlkit
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.plugin_utils._documents import toml_editor as toml
from hypothesis import given, settings
from hypothesis import strategies as st


def test_set_replaces_a_value_and_keeps_its_comment() -> None:
    document = toml.Document("/c", 'a = "x" # why # really\n')
    document.set(("a",), "y")
    assert document.checked() == 'a = "y" # why # really\n'
    document.set(("a",), "z", "# note")
    assert document.checked() == 'a = "z" # note\n'
    document.set(("a",), document.item("'w'"), "")
    assert document.checked() == "a = 'w'\n"


@pytest.mark.parametrize(
    ("text", "path", "value", "done"),
    [
        ("[t]\n    a = 1\n\n[u]\n", ("t", "b"), True, "[t]\n    a = 1\n    b = true\n\n[u]\n"),
        ("# head\nv = 2\n\n[t]\n", ("imports",), ["/a"], '# head\nv = 2\nimports = ["/a"]\n\n[t]\n'),
        ("[t]\na = 1\n", ("imports",), ["/a"], 'imports = ["/a"]\n[t]\na = 1\n'),
        ("[plugins.'a.b'.c]\n", ("plugins", "a.b", "c", "d"), 1, "[plugins.'a.b'.c]\n  d = 1\n"),
        ("a = 1", ("t", "a.b", "c"), False, 'a = 1\n\n[t."a.b"]\n  c = false'),
        ("v = 1\n[[t]]\na = 1 # c\n[[t]]\na = 2\n", ("u",), 1, "v = 1\nu = 1\n[[t]]\na = 1 # c\n[[t]]\na = 2\n"),
    ],
)
def test_set_adds_a_key_to_its_table(text: str, path: tuple[str, ...], value: object, done: str) -> None:
    document = toml.Document("/c", text)
    document.set(path, value)
    assert document.checked() == done


@pytest.mark.parametrize(
    ("present", "old", "new"),
    [
        (True, "x = []\n", 'x = ["n"]\n'),
        (True, 'x = ["a"] # c\n', 'x = ["a", "n"] # c\n'),
        (True, 'x = ["a", ]\n', 'x = ["a", "n" ]\n'),
        (True, 'x = [\n  "a",\n]\n', 'x = [\n  "a",\n  "n",\n]\n'),
        (True, 'x = [\n    "a" # no comma\n]\n', 'x = [\n    "a", # no comma\n    "n"\n]\n'),
        (True, 'x = [\n  "a", # "quoted" ]\n]\n', 'x = [\n  "a", # "quoted" ]\n  "n",\n]\n'),
        (False, 'x = ["n"]\n', "x = []\n"),
        (False, 'x = ["a", "n"] # c\n', 'x = ["a"] # c\n'),
        (False, 'x = ["n", "a"]\n', 'x = ["a"]\n'),
        (False, 'x = [\n  "a",\n  "n",\n]\n', 'x = [\n  "a",\n]\n'),
        (False, "x = ['a', 'n']\n", "x = ['a']\n"),
    ],
)
def test_append_and_remove(present: bool, old: str, new: str) -> None:
    document = toml.Document("/c", old)
    document.listed(("x",), "n", present=present)
    assert document.checked() == new


@pytest.mark.parametrize(
    ("text", "line"), [("a = 1\nb = \n", 2), ("a = [\n", 2), ('a = "x\n', 1), ("[a]\n[a]\n", 2), ("a = 1\na = 2\n", 2)]
)
def test_a_syntax_error_has_its_line(text: str, line: int) -> None:
    # The parser may stand at the start of the next line when it notices.
    with pytest.raises(BadInput, match=rf"^/c, line ({line}|{line + 1}), can't be parsed \(.+\); it is left as it is$"):
        toml.Document("/c", text)


def test_unsafe_edits_are_refused() -> None:
    document = toml.Document("/c", 't = { a = "x" }\n')
    with pytest.raises(BadInput):
        document.set(("t", "b"), 1)
        document.checked()
    document = toml.Document("/c", 'x = "a"\n')
    with pytest.raises(BadInput, match="x isn't an array"):
        document.listed(("x",), "n", present=True)


def test_a_removed_table_keeps_its_subtables() -> None:
    text = "[a]\nx = 1\n\n[z]\n\n\n"
    document = toml.Document("/c", text)
    document.add_table(("a", "b.c"), {"k": "v"}, "# ours")
    done = document.checked()
    assert done == text + '\n[a."b.c"] # ours\n  k = "v"\n'
    document = toml.Document("/c", done)
    document.delete(("a", "b.c"))
    assert document.checked() == text
    document = toml.Document("/c", done + '[a."b.c".theirs]\n')
    document.delete(("a", "b.c"))
    assert document.checked() == text + '[a."b.c".theirs]\n'


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toml, "tomlkit", None)
    with pytest.raises(ShareError, match="tomlkit"):
        toml.Document("/c", "")


def test_a_wrong_edit_is_detected() -> None:
    document = toml.Document("/c", "a = 1\n")
    document.set(("b",), 2)
    document.tree["a"] = 3
    with pytest.raises(BadInput):
        document.checked()


KEY = st.sampled_from(["a", "b", "c.d", "e f"])
VALUE = st.one_of(
    st.booleans(), st.integers(0, 9), st.text("x#='[]\" ", max_size=5), st.lists(st.just("i"), max_size=2)
)
TABLE = st.lists(KEY, min_size=1, max_size=3).map(tuple)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Random TOML texts with tables, comments, blank lines and odd spacing."""
    lines = []
    used: set[tuple[str, ...]] = set()

    def keys(table: tuple[str, ...]) -> None:
        for key, value in draw(st.dictionaries(KEY, VALUE, max_size=3)).items():
            if any(one[: len(table) + 1] == (*table, key) for one in used):
                continue
            used.add((*table, key))
            comment = draw(st.sampled_from(["", " # c", "  # 'x' = ["]))
            space = draw(st.sampled_from(["", "  "]))
            lines.append(f"{space}{tomlkit.key([key]).as_string()} = {tomlkit.item(value).as_string()}{comment}")

    keys(())
    for table in draw(st.lists(TABLE, max_size=3, unique=True)):
        if any(table[: len(one)] == one for one in used):
            continue
        used.add((*table, ""))
        lines += ["", "# " + draw(st.sampled_from(["x", "[t]"])), f"[{tomlkit.key(table).as_string()}]"]
        keys(table)
    text = "\n".join(lines) + draw(st.sampled_from(["", "\n"]))
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ""
    return text


@settings(deadline=None)
@given(texts(), TABLE, KEY, VALUE)
def test_only_the_set_value_changes(text: str, table: tuple[str, ...], key: str, value: object) -> None:
    document = toml.Document("/c", text)
    try:
        document.set((*table, key), value, "# ours")
        done = document.checked()
    except BadInput:
        return
    kept = [line for line in text.split("\n") if line.strip()]
    there = done.split("\n")
    # Every line of before is still there, but for the one whose value changed.
    assert len([line for line in kept if line not in there]) <= 1
    read: object = tomllib.loads(done)
    for step in (*table, key):
        assert isinstance(read, dict)
        read = read[step]
    assert read == value


@settings(deadline=None)
@given(texts(), st.text("ab/*", min_size=1, max_size=4))
def test_append_and_remove_restore_the_bytes(text: str, item: str) -> None:
    if "imports" in tomllib.loads(text):
        return
    before = 'imports = ["first"] # c\n' + text
    document = toml.Document("/c", before)
    document.listed(("imports",), f"new {item}", present=True)
    document = toml.Document("/c", document.checked())
    document.listed(("imports",), f"new {item}", present=False)
    assert document.checked() == before


@pytest.mark.parametrize("end", ["", "  ", " # c", "# c", "\t# c"])
@pytest.mark.parametrize("value", ['"x"', "''", "[ 1 ]", "true"])
def test_a_removed_mark_restores_the_bytes(value: str, end: str) -> None:
    text = f"a = {value}{end}\nb = 1\n"
    document = toml.Document("/c", text)
    comment = document.comment(("a",))
    document.set(("a",), "y", f"{comment} # ours".strip())
    document = toml.Document("/c", document.checked())
    document.set(("a",), document.item(value), comment)
    assert document.checked() == text
