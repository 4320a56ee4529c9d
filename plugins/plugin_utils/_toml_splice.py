# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Edit a TOML text by replacing, inserting and deleting a few characters; every other byte stays as it is.

Nothing here is trusted: ``Document.checked`` parses the result again, and an edit that did anything but what was asked
(because the text is written in a way that isn't foreseen here) is refused instead of written.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import typing as t

import tomllib

Path = tuple[str, ...]


class Unparsable(Exception):
    """The text isn't TOML.

    :param line: where, counted from 1; 0 where the parser doesn't say.
    """

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


class Unforeseen(Exception):
    """The text is TOML, but written in a way that can't be edited here."""


@dataclasses.dataclass(frozen=True)
class Statement:
    """One key with its value, or one table header; ``start`` and ``end`` are offsets of whole lines.

    :param path: full path, the table's included.
    :param value: offsets of the value, without comment; (0, 0) for a header.
    """

    header: bool
    path: Path
    start: int
    end: int
    value: tuple[int, int]
    table: Path


def parse(text: str) -> dict[str, t.Any]:
    """The parsed text.

    :raises Unparsable: it isn't TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line ([0-9]+)", str(error))
        line = int(found.group(1)) if found else text.count("\n") + 1
        raise Unparsable(re.sub(r" \(at .*\)$", "", str(error)), line) from error


def literal(value: t.Any) -> str:
    """A TOML value: string, boolean, integer, or a list of these."""
    if isinstance(value, list):
        return "[" + ", ".join(literal(one) for one in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value)


def key_literal(part: str) -> str:
    return part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part)


def table_header(path: Path) -> str:
    return "[" + ".".join(key_literal(part) for part in path) + "]"


def statements(text: str) -> list[Statement]:
    """All statements of a text that parses, in order.

    :raises Unforeseen: an array of tables is in it, or a line that can't be taken apart.
    """
    found: list[Statement] = []
    table: Path = ()
    # Only a line feed ends a line in TOML; splitlines knows more.
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    position = number = 0
    while number < len(lines):
        line = lines[number]
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            position += len(line)
            number += 1
            continue
        if stripped.startswith("[["):
            raise Unforeseen("it holds an array of tables")
        if stripped.startswith("["):
            table = _only_path(tomllib.loads(stripped))
            found.append(Statement(True, table, position, position + len(line), (0, 0), table))
            position += len(line)
            number += 1
            continue
        # Values may span lines: take as many as it needs to parse.
        block = ""
        start = position
        while True:
            if number >= len(lines):
                raise Unforeseen("a value has no end")
            block += lines[number]
            position += len(lines[number])
            number += 1
            try:
                inner = tomllib.loads(block)
                break
            except tomllib.TOMLDecodeError:
                continue
        path, value = _key_and_value(block, inner)
        found.append(Statement(False, (*table, *path), start, position, (start + value[0], start + value[1]), table))
    return found


def _only_path(tree: t.Any) -> Path:
    path: list[str] = []
    while isinstance(tree, dict) and len(tree) == 1:
        key, tree = next(iter(tree.items()))
        path.append(key)
    return tuple(path)


def _key_and_value(block: str, tree: dict[str, t.Any]) -> tuple[Path, tuple[int, int]]:
    """The key's path and the span of the value in ``key = value # comment``."""
    found = re.match(r"\s*((?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|[A-Za-z0-9_-]+|\s*\.\s*)+?)\s*=\s*", block)
    if not found:
        raise Unforeseen("a key is written in an unusual way")
    path = _only_path(tomllib.loads(found.group(1).strip() + " = 0"))
    begin = found.end()
    ends = [match.start() for match in re.finditer("#", block) if match.start() > begin] + [len(block)]
    for end in ends:
        candidate = block[begin:end].rstrip()
        try:
            tomllib.loads("x = " + candidate)
        except tomllib.TOMLDecodeError:
            continue
        return path, (begin, begin + len(candidate))
    raise Unforeseen("a value is written in an unusual way")


class Document:
    """A TOML text under edit.

    :raises Unparsable: the text isn't TOML.
    """

    def __init__(self, text: str) -> None:
        self._original = text
        self.text = text
        self.tree = parse(text)
        self._expected = copy.deepcopy(self.tree)
        self._taken_apart: tuple[str, list[Statement]] | None = None

    # ----------------------------------------------------------------- reading

    def get(self, path: Path) -> t.Any:
        """The value at a path of what is asked for so far, or None."""
        tree: t.Any = self._expected
        for part in path:
            if not isinstance(tree, dict) or part not in tree:
                return None
            tree = tree[part]
        return tree

    def all(self) -> list[Statement]:
        """All statements of the text as it is now."""
        if self._taken_apart is None or self._taken_apart[0] != self.text:
            self._taken_apart = (self.text, statements(self.text))
        return self._taken_apart[1]

    def statement(self, path: Path, header: bool = False) -> Statement | None:
        found = [one for one in self.all() if one.path == path and one.header is header]
        return found[0] if found else None

    def comment(self, one: Statement) -> str:
        """The comment at the end of a statement's line, with its ``#``; nothing where there is none."""
        if one.header:
            found = re.match(r"\s*\[.*?\]\s*#(.*)$", self.text[one.start : one.end].rstrip("\n"))
            return found.group(1).strip() if found else ""
        return self.text[one.value[1] : one.end].partition("#")[2].strip()

    # ----------------------------------------------------------------- editing

    def set(self, path: Path, value: t.Any, comment: str = "") -> None:
        """Set a key; its comment is added to what stands behind it."""
        self._expect(path, value)
        there = self.statement(path)
        note = f" # {comment}" if comment else ""
        if there is not None:
            rest = self.text[there.value[1] : there.end]
            ending = "\n" if rest.endswith("\n") else ""
            self._splice(there.value[0], there.end, literal(value) + rest.rstrip("\n").rstrip() + note + ending)
            return
        table = path[:-1]
        line = f"{key_literal(path[-1])} = {literal(value)}{note}\n"
        if not table:
            self._insert_at_top(line)
            return
        header = self.statement(table, header=True)
        if header is None:
            self.add_table(table, {path[-1]: value}, comment)
            return
        last = [one for one in self.all() if one.table == table][-1]
        indent = self._indent(last) if not last.header else self._indent(header) + "  "
        self._insert(last.end, indent + line)

    def add_table(self, path: Path, values: dict[str, t.Any], comment: str = "") -> None:
        """Write a whole new table behind all that there is."""
        for key, value in values.items():
            self._expect((*path, key), value)
        note = f" # {comment}" if comment else ""
        block = table_header(path) + note + "\n"
        block += "".join(f"  {key_literal(key)} = {literal(value)}\n" for key, value in values.items())
        self._insert(len(self.text), ("\n" if self.text else "") + block)

    def append(self, path: Path, item: str) -> None:
        """Add a string to the end of an array that is there."""
        items = [*self.get(path), item]
        self._expect(path, items)
        there = self._must(path)
        old = self.text[there.value[0] : there.value[1]]
        for new in _appended(old, item):
            try:
                if tomllib.loads("x = " + new)["x"] == items:
                    self._splice(there.value[0], there.value[1], new)
                    return
            except tomllib.TOMLDecodeError:
                continue
        raise Unforeseen(f"{'.'.join(path)} is written in an unusual way")

    def take(self, path: Path, item: str) -> None:
        """Remove a string from an array."""
        items = [one for one in self.get(path) if one != item]
        self._expect(path, items)
        there = self._must(path)
        old = self.text[there.value[0] : there.value[1]]
        for pattern in (r"\n[ \t]*{}[ \t]*,?(?=[ \t]*(?:#[^\n]*)?\n)", r",[ \t]*{}", r"{}[ \t]*,[ \t]*", r"{}"):
            for quoted in (json.dumps(item), f"'{item}'"):
                new = re.sub(pattern.format(re.escape(quoted)), "", old, count=1)
                try:
                    if new != old and tomllib.loads("x = " + new)["x"] == items:
                        self._splice(there.value[0], there.value[1], new)
                        return
                except tomllib.TOMLDecodeError:
                    continue
        raise Unforeseen(f"{'.'.join(path)} is written in an unusual way")

    def replace(self, path: Path, value: str, comment: str) -> None:
        """Give a key a value as it was once written, and its line the comment that it had then."""
        self._expect(path, tomllib.loads("x = " + value)["x"])
        there = self._must(path)
        ending = "\n" if self.text[there.value[1] : there.end].endswith("\n") else ""
        gap = re.match(r"[ \t]*", self.text[there.value[1] : there.end])
        note = f"{gap.group() if gap else ' '}# {comment}" if comment else ""
        self._splice(there.value[0], there.end, value + note + ending)

    def delete(self, path: Path) -> None:
        """Remove a key with its line."""
        self._forget(path)
        there = self._must(path)
        self._splice(there.start, there.end, "")

    def delete_table(self, path: Path) -> None:
        """Remove a table header and the keys under it, with the blank line that was put above it."""
        self._forget(path)
        inside = [one for one in self.all() if one.table == path]
        start, end = inside[0].start, inside[-1].end
        if self.text[:start].endswith("\n\n") or self.text[:start] == "\n":
            start -= 1
        self._splice(start, end, "")

    def checked(self) -> str:
        """The edited text, known to hold what it held and what was asked for, and nothing else.

        :raises Unforeseen: it doesn't.
        """
        try:
            done = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            raise Unforeseen(f"the edit doesn't fit in ({error})") from error
        if _without_empty(done) != _without_empty(self._expected):
            raise Unforeseen("the edit would have changed more than it should")
        return self.text

    # ----------------------------------------------------------------- the inside

    def _must(self, path: Path) -> Statement:
        there = self.statement(path)
        if there is None:
            raise Unforeseen(f"{'.'.join(path)} is written in an unusual way")
        return there

    def _indent(self, one: Statement) -> str:
        found = re.match(r"[ \t]*", self.text[one.start : one.end])
        return found.group() if found else ""

    def _splice(self, start: int, end: int, new: str) -> None:
        self.text = self.text[:start] + new + self.text[end:]

    def _insert(self, position: int, new: str) -> None:
        if position and self.text[position - 1] != "\n":
            new = "\n" + new
        self._splice(position, position, new)

    def _insert_at_top(self, line: str) -> None:
        """Behind the last key above all tables; ``version`` and comments at the head stay at the head."""
        top = [one for one in self.all() if not one.table and not one.header]
        self._insert(top[-1].end if top else 0, line)

    def _expect(self, path: Path, value: t.Any) -> None:
        tree = self._expected
        for part in path[:-1]:
            tree = tree.setdefault(part, {})
            if not isinstance(tree, dict):
                raise Unforeseen(f"{'.'.join(path)} isn't in a table")
        tree[path[-1]] = value

    def _forget(self, path: Path) -> None:
        tree = self._expected
        for part in path[:-1]:
            tree = tree[part]
        tree.pop(path[-1], None)


def _appended(old: str, item: str) -> t.Iterator[str]:
    """Ways to write an array with one string more at its end, the likeliest first."""
    close = old.rindex("]")
    body = old[:close]
    if "\n" in old:
        lead = body.rstrip(" \t")
        indent = next((m.group(1) for m in re.finditer(r"\n([ \t]*)[\"']", body)), "  ")
        line = f"{indent}{json.dumps(item)},\n"
        yield lead + ("" if lead.endswith("\n") else "\n") + line + body[len(lead) :] + old[close:]
        # The last item has no comma yet: it goes behind a quote, before any comment.
        for quote in reversed([m.end() for m in re.finditer(r"[\"']", lead)]):
            with_comma = lead[:quote] + "," + lead[quote:]
            yield with_comma + ("" if with_comma.endswith("\n") else "\n") + line + body[len(lead) :] + old[close:]
    trimmed = body.rstrip()
    gap = body[len(trimmed) :]
    yield trimmed + (" " if trimmed.endswith(",") else ", ") + json.dumps(item) + gap + old[close:]
    yield trimmed + json.dumps(item) + gap + old[close:]


def _without_empty(tree: t.Any) -> t.Any:
    """Tables that hold nothing don't matter: they come and go with what is put into them."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: _without_empty(value) for key, value in tree.items()}
    return {key: value for key, value in inner.items() if value != {}}
