# SPDX-License-Identifier: GPL-3.0-or-later
"""Any layout of TOML and YAML: an edit and its removal restore the bytes, or a sentence says why not."""

from __future__ import annotations

import collections
import json
import re
import tomllib
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._documents import json_editor, yaml_editor
from ansible_collections.kubegpu.share.plugins.module_utils._documents import toml_editor as toml
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.decode import Source
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.schema import CONFIGURATION
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_json_document import objects

pytestmark = pytest.mark.long
many = settings(max_examples=500, deadline=None, suppress_health_check=[*HealthCheck])

NAMES = ["a", "plugins", "io.containerd.grpc.v1.cri", "containerd", "nvidia", "x y", "ü", "", 'q"', "1"]
KEY = st.sampled_from(NAMES)
PATH = st.lists(KEY, min_size=1, max_size=4).map(tuple)
NEW = st.one_of(st.booleans(), st.integers(-9, 1 << 40), st.text("x#='\"[]{},\\ \t\nü\x7f", max_size=6))
Tree = dict[str, t.Any]


# --------------------------------------------------------------------------- TOML


@st.composite
def toml_texts(draw: st.DrawFn) -> str:
    """Valid TOML: tables in any order, indented anyhow, with dotted keys, inline tables, rows, comments and quotes."""
    blank = st.sampled_from(["", "", " ", "\t", "  "])

    def key(parts: tuple[str, ...]) -> str:
        def one(part: str) -> str:
            ways = [json.dumps(part, ensure_ascii=False)]
            ways += [f"'{part}'"] if "'" not in part else []
            ways += [part] * 3 if re.fullmatch("[A-Za-z0-9_-]+", part) else []
            return draw(st.sampled_from(ways))

        return f"{draw(blank)}.{draw(blank)}".join(map(one, parts))

    def comment() -> str:
        return draw(st.sampled_from(["", "", "", "#", "# c", '# "x = [', "# [t] \t", "#\té "]))

    def value(depth: int) -> str:
        kinds = ["scalar", "scalar", "text", "array", "table"] if depth < 3 else ["scalar"]
        kind = draw(st.sampled_from(kinds))
        if kind == "scalar":
            words = [
                "1",
                "0x1F",
                "1_000",
                "2.5e3",
                "nan",
                "-inf",
                "true",
                "'x'",
                "1979-05-27 07:32:00Z",
            ]
            return draw(st.sampled_from([*words, "07:32:00.5", '"a\\"\\u00e9#"', "''"]))
        if kind == "text":
            return draw(
                st.sampled_from(['"""\na = 1\n# no comment ""\n"""', "'''\n[t]\n''''", '""""q""" ', '"""a\\\n  b"""'])
            ).strip()
        if kind == "array":
            gap = draw(st.sampled_from(["", " ", "\n  ", " # in\n\t"]))
            items = [f"{gap}{value(depth + 1)}{draw(blank)}" for _number in range(draw(st.integers(0, 3)))]
            end = draw(st.sampled_from(["", ",", f",{gap}"])) if items else gap
            return f"[{','.join(items)}{end}]"
        pairs = [
            f"{key(draw(st.lists(KEY, min_size=1, max_size=2).map(tuple)))} = {value(depth + 1)}"
            for _number in range(draw(st.integers(0, 3)))
        ]
        # Before TOML 1.1 an inline table has one line.
        pairs = [one for one in pairs if "\n" not in one]
        return "{" + draw(blank) + f"{draw(blank)},{draw(blank)}".join(pairs) + draw(blank) + "}"

    def pair() -> str:
        name = key(draw(st.lists(KEY, min_size=1, max_size=draw(st.sampled_from([1, 1, 3]))).map(tuple)))
        return f"{draw(blank)}{name}{draw(blank)}={draw(blank)}{value(0)}{draw(blank)}{comment()}"

    def noise() -> list[str]:
        return draw(st.lists(st.sampled_from(["", "  ", "# a line", "\t# [x]"]), max_size=2))

    text = ""
    sections = [noise() + [pair() for _number in range(draw(st.integers(0, 3)))]]
    for _number in range(draw(st.integers(0, 5))):
        brackets = draw(st.sampled_from(["[]", "[]", "[]", "[]", "[[]]"]))
        opening, closing = brackets[: len(brackets) // 2], brackets[len(brackets) // 2 :]
        name = f"{draw(blank)}{key(draw(PATH))}{draw(blank)}"
        head = f"{draw(blank)}{opening}{name}{closing}{draw(blank)}{comment()}"
        sections.append([head, *noise(), *[pair() for _number in range(draw(st.integers(0, 2)))], *noise()])
    for lines in sections:
        # Sections and pairs that TOML forbids behind the ones before them are left out.
        for number, line in enumerate(lines):
            try:
                tomllib.loads(text + line + "\n")
            except (tomllib.TOMLDecodeError, ValueError):
                if not number:
                    break
                continue
            text += line + "\n"
    text = text.removesuffix("\n") if draw(st.booleans()) else text
    text = text.replace("\n", draw(st.sampled_from(["\n", "\n", "\r\n"])))
    return draw(st.sampled_from(["", "", "", "\ufeff"])) + text


def toml_comments(text: str) -> collections.Counter[str]:
    """Count the comments that the texts above have."""
    return collections.Counter(re.findall(r"# (?:a line|c|\[x\]|in)\b", text))


def toml_edit(text: str, edits: list[tuple[tuple[str, ...], t.Any]]) -> str:
    document = toml.Document("/c", text)
    for path, value in edits:
        if isinstance(value, dict):
            if document.get(path) is None:
                document.add_table(path, value, toml.MARK)
        else:
            document.put(path, value)
    return document.checked()


def toml_remove(text: str) -> str:
    document = toml.Document("/c", text)
    document.restore_all()
    return document.checked()


EDITS = st.lists(
    st.tuples(PATH, st.one_of(NEW, st.dictionaries(KEY, NEW, min_size=1, max_size=2))), min_size=1, max_size=4
)


@many
@given(toml_texts(), EDITS)
def test_toml(text: str, edits: list[tuple[tuple[str, ...], t.Any]]) -> None:
    assert toml.Document("/c", text).checked() == text
    assert toml_remove(text) == text
    try:
        done = toml_edit(text, edits)
    except BadInput:
        return
    assert tomllib.loads(done.removeprefix("\ufeff")) is not None
    assert not toml_comments(text) - toml_comments(done)
    # Of edits that contradict each other a second run would repeat the first.
    last = dict(edits)
    if len(last) == len(edits) and not any(one != two and one == two[: len(one)] for one in last for two in last):
        assert toml_edit(done, edits) == done
    assert toml_remove(done) == text


@many
@given(toml_texts(), st.text("ab/*\"'", min_size=1, max_size=4))
def test_lists_of_toml(text: str, item: str) -> None:
    document = toml.Document("/c", text)
    for place in document.places():
        if isinstance(document.get(place.path), list) and not place.header:
            try:
                document = toml.Document("/c", text)
                document.listed(place.path, item, present=True)
                done = document.checked()
                document = toml.Document("/c", done)
                document.listed(place.path, item, present=False)
                back = document.checked()
            except BadInput:
                continue
            assert toml.parse("/c", back) == toml.parse("/c", text) or "nan" in text
            assert not toml_comments(text) - toml_comments(done)
            assert not toml_comments(text) - toml_comments(back)


# --------------------------------------------------------------------------- YAML


@st.composite
def yaml_texts(draw: st.DrawFn) -> str:
    """YAML as people write it: block and flow, indentation of every kind, quotes, anchors, comments and tabs."""
    name = st.sampled_from(["a", "b", "spec", "x y", '"q"', "'s'", "1", "ü"])

    def end() -> str:
        return draw(st.sampled_from(["", "", "  ", " # c", "\t# c", " \t"])) + draw(
            st.sampled_from(["\n", "\n", "\n\n", "\n# a line\n", "\n   # far in\n"])
        )

    def scalar() -> str:
        return draw(
            st.sampled_from(
                [
                    "1",
                    "x",
                    "x y#z",
                    "'it''s'",
                    '"a\\tb#"',
                    "~",
                    "null",
                    "true",
                    "2001-99-99",
                    "1:30",
                    "a\tb",
                    '"a\n   b"',
                    "0o7",
                ]
            )
        )

    def flow(depth: int) -> str:
        if depth > 2 or draw(st.booleans()):
            return draw(st.sampled_from(["1", "x", "'q'", '"d"', "null"]))
        gap = draw(st.sampled_from(["", " ", "\n          ", " # in\n          "]))
        parts = [flow(depth + 1) for _number in range(draw(st.integers(0, 3)))]
        if draw(st.booleans()):
            return "[" + gap + f",{gap or ' '}".join(parts) + gap + "]"
        return "{" + gap + f",{gap or ' '}".join(f"k{number}: {part}" for number, part in enumerate(parts)) + gap + "}"

    def block(indent: int, depth: int) -> str:
        """What follows a colon or a dash, with the line's end."""
        kind = draw(st.sampled_from(["scalar", "scalar", "flow", "text", "map", "list"] if depth < 4 else ["scalar"]))
        if kind == "scalar":
            return f" {scalar()}{end()}"
        if kind == "flow":
            return f" {flow(0)}{end()}"
        if kind == "text":
            inner = " " * (indent + 3)
            return f" {draw(st.sampled_from(['|', '>-', '|+']))}\n{inner}# text\n{inner}\ttab\n"
        return draw(st.sampled_from(["", " # c", "  "])) + "\n" + lines(kind, indent + draw(st.integers(1, 4)), depth)

    def lines(kind: str, indent: int, depth: int) -> str:
        lead = " " * indent
        if kind == "list":
            return "".join(f"{lead}-{block(indent, depth + 1)}" for _number in range(draw(st.integers(1, 3))))
        keys = draw(st.lists(name, min_size=1, max_size=3, unique=True))
        return "".join(f"{lead}{key}:{block(indent, depth + 1)}" for key in keys)

    text = draw(st.sampled_from(["", "# head\n", "---\n", "\n"])) + lines("map", 0, 0)
    text += draw(st.sampled_from(["", "", "---\n", "--- # c\n", "...\n"]))
    text = text.removesuffix("\n") if draw(st.booleans()) else text
    return text.replace("\n", draw(st.sampled_from(["\n", "\n", "\r\n"])))


STEP = st.one_of(st.sampled_from(["a", "b", "spec", "x y", "q", "new", "k0"]), st.integers(0, 2))
WORD = st.one_of(
    st.booleans(), st.integers(-9, 99), st.text("xy#:-'\"[]{} \t", max_size=6), st.lists(st.just("i"), max_size=2)
)


@many
@given(yaml_texts(), st.lists(STEP, max_size=3).map(tuple), WORD)
def test_yaml(text: str, above: yaml_editor.Path, value: t.Any) -> None:
    try:
        document = yaml_editor.Document("/c", text)
    except BadInput:
        return
    assert document.checked() == text
    for verb in ("set", "append"):
        document = yaml_editor.Document("/c", text)
        there = document.get(above)
        try:
            if verb == "set" and isinstance(there, dict):
                path: yaml_editor.Path = (*above, "ours")
                document.set(path, value)
            elif verb == "append" and isinstance(there, list):
                path = (*above, len(there))
                document.append(above, value)
            else:
                continue
            done = document.checked()
            again = yaml_editor.Document("/c", done)
            assert again.get(path) == value
            again.delete(path)
            back = again.checked()
        except BadInput:
            continue
        assert back == text
        comments = collections.Counter(re.findall(r"# (?:a line|far in|head|in)(?=\r?$)", text, re.MULTILINE))
        assert not comments - collections.Counter(
            re.findall(r"# (?:a line|far in|head|in)(?=\r?$)", done, re.MULTILINE)
        )


# --------------------------------------------------------------------------- anything

SIGNS = st.text("ab01.-:=#\"'[]{}|>&*!%<,\\ \t\n\r~?\x07\ufeff\ufffdé", max_size=60)


@many
@given(st.one_of(SIGNS, SIGNS.map(lambda one: "apiVersion: v1\n" + one), toml_texts(), objects(), yaml_texts()))
def test_any_text_is_read_or_refused_by_a_sentence(text: str) -> None:
    readers: list[t.Callable[[], t.Any]] = [
        lambda: toml.Document("/c", text).checked(),
        lambda: json_editor.Document("/c", text).checked(),
        lambda: yaml_editor.Document("/c", text).checked(),
        lambda: Source("/c", text).decode(CONFIGURATION, 30, "v1", strict=True),
        lambda: Source("/c", text).decode(CONFIGURATION, 30, "v1", strict=False),
    ]
    for read in readers:
        try:
            read()
        except BadInput as error:
            assert str(error).startswith("/c") and "\n" not in str(error)
