# SPDX-License-Identifier: GPL-3.0-or-later
"""Edits of TOML texts: only the requested bytes change."""

from __future__ import annotations

import tomllib

import pytest
import tomlkit
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._documents import toml_editor as toml
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
    document = toml.Document("/c", 't = [{ a = "x" }]\n')
    with pytest.raises(BadInput, match="t isn't a table"):
        document.set(("t", "b"), 1)
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


CRI = 'plugins."io.containerd.grpc.v1.cri"'
NAME = ("plugins", "io.containerd.grpc.v1.cri", "containerd", "default_runtime_name")
NVIDIA = (*NAME[:-1], "runtimes", "nvidia")


@pytest.mark.parametrize(
    "text",
    [
        # A table whose parent's table follows it, both indented, and sisters that have no parent.
        f"version = 2\n[plugins]\n  [{CRI}.containerd.runtimes.runc.options]\n    SystemdCgroup = true\n"
        f'  [{CRI}.containerd.runtimes.runc]\n    runtime_type = "io.containerd.runc.v2"\n',
        f'version = 2\n[{CRI}]\n  [{CRI}.containerd.runtimes.runc]\n    runtime_type = "io.containerd.runc.v2"\n'
        f'  [{CRI}.containerd.runtimes.kata]\n    runtime_type = "io.containerd.kata.v2"\n',
        f'[{CRI}.containerd]\n  default_runtime_name = "runc" # x \t\n',
        f'[{CRI}]\n  containerd . "default_runtime_name" = "runc"\t#c\n  containerd.snapshotter = "x" # y',
        f'{CRI}.containerd.default_runtime_name = "runc"\r\n# end\r\n',
        f'[{CRI}]\ncontainerd = {{ default_runtime_name = "runc", a.b = 1 }}  # c\n',
        f"[{CRI}]\ncontainerd = {{ }} \n",
        'plugins = { "io.containerd.grpc.v1.cri" = { containerd = { a = [ { b = 1 } ] } } } # c\n',
        "[[rows]]\na = 1 # c\n[rows.plugins]\n[[rows]]\n# end",
        "\ufeffversion = 2 # with a byte order mark\n",
        "a = nan\nb = [ inf, -nan ]\n",
        "a = 1",
        "# only a comment",
        "",
    ],
)
def test_any_layout_is_edited_and_restored(text: str) -> None:
    assert toml.Document("/c", text).checked() == text
    document = toml.Document("/c", text)
    document.put(NAME, "nvidia")
    if document.get(NVIDIA) is None:
        document.add_table(NVIDIA, {"runtime_type": "x"}, toml.MARK)
    document.put((*NVIDIA, "options", "BinaryName"), "/b")
    done = document.checked()
    assert set(text.split()) <= {*done.split(), *done.replace(" }", "").split()}
    again = toml.Document("/c", done)
    again.put(NAME, "nvidia")
    again.put((*NVIDIA, "options", "BinaryName"), "/b")
    assert again.checked() == done
    assert removed(done) == text


TABLES = [
    "[grpc]\n{}  gid = 0 # group\n",
    f"[{CRI}]\n{{}}  sandbox_image = 'pause'\n",
    f'[{CRI}.containerd]\n{{}}  default_runtime_name = "runc" # x \t\n',
    f"[{CRI}.containerd.runtimes.runc]\n{{}}  runtime_type = 'io.containerd.runc.v2'\n\n",
    f"# of runc\n[{CRI}.containerd.runtimes.runc.options]\n{{}}  SystemdCgroup = true\n",
    "[plugins]\n",
]


@given(st.permutations(TABLES), st.lists(st.sampled_from(["", "  ", "\t"]), min_size=len(TABLES), max_size=len(TABLES)))
def test_tables_in_any_order_and_indentation_are_edited_and_restored(tables: list[str], indents: list[str]) -> None:
    text = "version = 2\n" + "".join(
        indent + table.format(indent) for table, indent in zip(tables, indents, strict=True)
    )
    document = toml.Document("/c", text)
    document.put(NAME, "nvidia")
    document.add_table(NVIDIA, {"runtime_type": "x"}, toml.MARK)
    document.put((*NAME[:2], "enable_cdi"), True)
    done = document.checked()
    assert set(text.splitlines()) - set(done.splitlines()) <= {
        line for line in text.splitlines() if "default_runtime_name" in line
    }
    assert removed(done) == text


def removed(text: str) -> str:
    """Remove all that is marked."""
    document = toml.Document("/c", text)
    document.restore_all()
    return document.checked()


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("[t]\n  a.b.c = 1\n[u]\n", "[t]\n  a.b.c = 1\n  a.b.d = 2 # kubegpu.share\n[u]\n"),
        ("t.'a'.x = 1\n", "t.'a'.x = 1\nt.'a'.b.d = 2 # kubegpu.share\n"),
        ("t = {}\n", "t = { a = { b = { d = 2 } } } # kubegpu.share, set a.b.d, was {}\n"),
        (
            "t = { a.x = 1, c = 2 } # c\n",
            "t = { a.x = 1, c = 2, a.b = { d = 2 } } # c # kubegpu.share, set a.b.d, was { a.x = 1, c = 2 }\n",
        ),
        (
            "t.a = { b = { d = 1, e = 2 } }\n",
            "t.a = { b = { d = 2, e = 2 } } # kubegpu.share, set b.d, was { b = { d = 1, e = 2 } }\n",
        ),
        ("[t.a.b]\n[t]\na.x = 1\n", "[t.a.b]\n  d = 2 # kubegpu.share\n[t]\na.x = 1\n"),
        ("[t]\na.x = 1\n[t.a.b.c]\n", "[t]\na.x = 1\n[t.a.b.c]\n\n[t.a.b] # kubegpu.share\n  d = 2\n"),
    ],
)
def test_a_new_key_is_written_like_its_neighbours(text: str, done: str) -> None:
    document = toml.Document("/c", text)
    document.put(("t", "a", "b", "d"), 2)
    assert document.checked() == done
    assert removed(done) == text


def test_an_inline_table_keeps_the_users_later_change() -> None:
    document = toml.Document("/c", 't = { name = "runc", x = {} }\n')
    document.put(("t", "name"), "nvidia")
    document.put(("t", "x", "a, was b"), [1.5])
    done = document.checked()
    assert done == (
        't = { name = "nvidia", x = { "a, was b" = [1.5] } } # kubegpu.share, set name, x."a, was b", '
        'was { name = "runc", x = {} }\n'
    )
    later = toml.Document("/c", done.replace('"nvidia"', '"nvidia", theirs = 1', 1))
    later.restore(("t", "name"))
    assert later.get(("t",)) == {"name": "runc", "theirs": 1, "x": {"a, was b": [1.5]}}
    later.restore(("t",))
    assert later.checked() == 't = { name = "runc", theirs = 1, x = {} }\n'


def test_a_byte_order_mark_is_read() -> None:
    assert toml.parse("/c", "\ufeffa = 1\n") == {"a": 1}


def test_numbers_and_depths_that_python_limits_are_refused() -> None:
    for text in (f"a = {'1' * 5000}\n", f"a = {'[' * 5000}{']' * 5000}\n"):
        with pytest.raises(toml.Unparsable, match="it is left as it is"):
            toml.Document("/c", text)


def test_a_removed_table_keeps_the_users_comments() -> None:
    done = '[a]\n\n[b] # ours\n  # why\n  k = "v"\n\n# c\n[d]\n'
    document = toml.Document("/c", done)
    document.delete(("b",))
    assert document.checked() == "[a]\n  # why\n\n# c\n[d]\n"


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
