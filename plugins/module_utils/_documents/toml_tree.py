# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The positions of all statements and values in a TOML text, and the text of new values.

The standard library decides what is TOML: ``scan`` takes texts that ``tomllib`` has read.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import typing as t

from .._core.libraries import tomllib

Path = tuple[str, ...]

HEADER, ROW, PAIR, BLANK = "header", "row", "pair", "blank"
ARRAY, TABLE, PLAIN = "array", "table", "plain"

_BLANKS = re.compile(r"[ \t]*")
# What may stand between the items of an array.
_BETWEEN = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_COMMENT = re.compile(r"#[^\r\n]*")
_LINE_END = re.compile(r"\r?\n|\Z")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
# A closing delimiter of three quotes may follow one or two that belong to the string.
_PLAIN = re.compile(
    r'"""(?:[^"\\]|\\[\s\S]|"{1,2}(?!"))*"{3,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9][^\s,\]}#]*"
    r"|[^\s,\[\]{}#\"']+"
)


class Unexpected(Exception):
    """The text isn't written as TOML is."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A value and its position; ``items`` are those of an array or an inline table."""

    start: int
    end: int
    kind: str = PLAIN
    items: tuple[Item, ...] = ()


@dataclasses.dataclass(frozen=True)
class Item:
    """An array's item, or a pair of an inline table; ``comma`` is the position of the comma behind it, if any."""

    start: int
    key: Path
    value: Value
    comma: int | None


@dataclasses.dataclass(frozen=True)
class Statement:
    """A header, the header of an array's row, a pair, or a line without any of them, to the end of its last line.

    :param kind: HEADER, ROW, PAIR or BLANK.
    :param start: of its line.
    :param end: after its line break.
    :param path: its full key; empty within a row, which has no key of its own.
    :param table: the header of its section; None in a row.
    :param keys: the ends of the parts of its key.
    :param key_start: where its key begins.
    :param value: a pair's.
    :param comment: start and end of its comment; equal where there is none.
    """

    kind: str
    start: int
    end: int
    path: Path
    table: Path | None
    keys: tuple[int, ...]
    key_start: int
    value: Value | None
    comment: tuple[int, int]


def scan(text: str) -> list[Statement]:
    """Return the statements of a valid text.

    :raises Unexpected: it isn't valid.
    """
    statements: list[Statement] = []
    table: Path | None = ()
    rows: set[Path] = set()
    at = 0
    while at < len(text):
        start, at = at, _after(_BLANKS, text, at)
        kind, key_start, value = BLANK, at, None
        path: Path = ()
        keys: tuple[int, ...] = ()
        if text[at : at + 1] == "[":
            kind = ROW if text[at + 1 : at + 2] == "[" else HEADER
            brackets = 2 if kind == ROW else 1
            key_start = _after(_BLANKS, text, at + brackets)
            full, keys, at = _key(text, key_start)
            at = _sign(text, at, "]" * brackets)
            inside = any(full[:length] in rows for length in range(1, len(full)))
            rows |= {full} if kind == ROW else set()
            path, table = () if inside else full, None if inside or kind == ROW else full
        elif text[at : at + 1] not in ("", "#", "\r", "\n"):
            kind = PAIR
            own, keys, at = _key(text, at)
            value = scan_value(text, _after(_BLANKS, text, _sign(text, at, "=")))
            at = value.end
            path = (*table, *own) if table is not None else ()
        comment = _after(_BLANKS, text, at)
        end = _after(_COMMENT, text, comment) if text[comment : comment + 1] == "#" else comment
        at = _after(_LINE_END, text, end)
        statements.append(Statement(kind, start, at, path, table, keys, key_start, value, (comment, end)))
    return statements


def scan_value(text: str, start: int) -> Value:
    """Return the value that begins at a position.

    :raises Unexpected: none does.
    """
    sign = text[start : start + 1]
    if sign not in ("[", "{"):
        return Value(start, _after(_PLAIN, text, start))
    closing = "]" if sign == "[" else "}"
    items: list[Item] = []
    at = _after(_BETWEEN, text, start + 1)
    while text[at : at + 1] != closing:
        begin = at
        key: Path = ()
        if sign == "{":
            key, _ends, at = _key(text, at)
            at = _after(_BETWEEN, text, _sign(text, at, "="))
        value = scan_value(text, at)
        at = _after(_BETWEEN, text, value.end)
        comma = at if text[at : at + 1] == "," else None
        items.append(Item(begin, key, value, comma))
        if comma is not None:
            at = _after(_BETWEEN, text, comma + 1)
        elif text[at : at + 1] != closing:
            raise Unexpected(f"a comma is missing at {at}")
    return Value(start, at + 1, ARRAY if sign == "[" else TABLE, tuple(items))


def scan_key(text: str, start: int) -> tuple[Path, int]:
    """Return the key, dotted or not, that begins at a position, and its end."""
    key, ends, _at = _key(text, start)
    return key, ends[-1]


def _key(text: str, at: int) -> tuple[Path, tuple[int, ...], int]:
    """Return a key's parts, their ends, and the position behind it."""
    parts: list[str] = []
    ends: list[int] = []
    while True:
        end = _after(_KEY, text, at)
        part = text[at:end]
        if part[0] in "\"'":
            part = tomllib.loads(f"x = {part}")["x"] if "\\" in part else part[1:-1]
        parts.append(part)
        ends.append(end)
        at = _after(_BLANKS, text, end)
        if text[at : at + 1] != ".":
            return tuple(parts), tuple(ends), at
        at = _after(_BLANKS, text, at + 1)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    if match is None:
        raise Unexpected(f"something unexpected is at {at}")
    return match.end()


def _sign(text: str, at: int, sign: str) -> int:
    if not text.startswith(sign, at):
        raise Unexpected(f"{sign} is missing at {at}")
    return at + len(sign)


# --------------------------------------------------------------------------- new text


def written_key(path: Path) -> str:
    """Return the text of a key."""
    return ".".join(part if _BARE.fullmatch(part) else _string(part) for part in path)


def written(value: t.Any) -> str:
    """Return the text of a value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, dict):
        pairs = ", ".join(f"{written_key((key,))} = {written(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    return _string(str(value))


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


# --------------------------------------------------------------------------- inline tables


def inline_get(text: str, path: Path) -> str | None:
    """Return a value of an inline table as it is written, or None.

    :param text: of the whole inline table.
    """
    literal: Value | None = scan_value(text, 0)
    while path and literal is not None:
        item = _nearest(literal, path)
        literal, path = (item.value, path[len(item.key) :]) if item else (None, path)
    return text[literal.start : literal.end] if literal is not None else None


def inline_set(text: str, path: Path, new: str | None) -> str:
    """Set a value of an inline table, or remove it.

    :param text: of the whole inline table.
    :param path: the value's key in it; missing tables above it are created.
    :param new: the value's text; None removes it.
    :returns: the text of the whole inline table.
    :raises Unexpected: something above it isn't a table.
    """
    table, rest = scan_value(text, 0), path
    while (item := _nearest(table, rest)) and item.key != rest:
        table, rest = item.value, rest[len(item.key) :]
    if table.kind != TABLE:
        raise Unexpected(f"{written_key(path)} isn't in a table")
    if item and new is not None:
        return text[: item.value.start] + new + text[item.value.end :]
    if item:
        number = table.items.index(item)
        if number:
            start, end = table.items[number - 1].comma or item.start, item.value.end
        elif table.items[1:]:
            start, end = item.start, table.items[1].start
        else:
            start, end = table.start + 1, table.end - 1
        return text[:start] + text[end:]
    if new is None:
        return text
    # The part of the key that other pairs write dotted has to be dotted here too.
    dotted = max((common(item.key[:-1], rest[:-1]) for item in table.items), default=0) + 1
    for part in reversed(rest[dotted:]):
        new = f"{{ {written_key((part,))} = {new} }}"
    pair = f"{written_key(rest[:dotted])} = {new}"
    if table.items:
        at = table.items[-1].value.end
        return f"{text[:at]}, {pair}{text[at:]}"
    return f"{text[: table.start]}{{ {pair} }}{text[table.end :]}"


def _nearest(table: Value, path: Path) -> Item | None:
    """Return the pair that has a key, or holds it."""
    return next((item for item in table.items if item.key and item.key == path[: len(item.key)]), None)


def common(path: Path, other: Path) -> int:
    """Return the number of parts with which both begin."""
    number = 0
    for mine, theirs in zip(path, other, strict=False):
        if mine != theirs:
            break
        number += 1
    return number


# --------------------------------------------------------------------------- arrays


def array_add(text: str, array: Value, new: str) -> str:
    """Add an item to the end of an array, on a line of its own where the last one is.

    :param text: of the document.
    :param array: in the document.
    :param new: the item's text.
    :returns: the array's new text.
    """
    if not array.items:
        return f"[{new}{text[array.start + 1 : array.end]}"
    last = array.items[-1]
    before = array.items[-2].comma if array.items[1:] else None
    lead = re.search(r"\r?\n[ \t]*\Z", text[before or array.start : last.start])
    comma = "" if last.comma is None else ","
    at = last.value.end if last.comma is None else last.comma + 1
    # The rest of the last item's line, its comment for example, stays there.
    line = re.match(r"[^\r\n]*(?=\r?\n)", text[at : array.end]) if lead else None
    behind = at + (line.end() if line else 0)
    item = f"{lead[0]}{new}{comma}" if lead else f" {new}"
    return text[array.start : at] + ("" if comma else ",") + text[at:behind] + item + text[behind : array.end]


def array_remove(text: str, array: Value, number: int) -> str:
    """Remove an item of an array with its comma and, if nothing else is on it, its line.

    :param text: of the document.
    :param array: in the document.
    :param number: the item's, from 0.
    :returns: the array's new text.
    """
    item = array.items[number]
    before = array.items[number - 1].comma if number else None
    start, end = item.start, item.value.end if item.comma is None else item.comma + 1
    lead = re.search(r"(?:\r?\n)?[ \t]*\Z", text[array.start + 1 : start])
    blanks = lead[0] if lead else ""
    rest = text[end : array.end]
    # A line of its own goes unless a comment is on it; else the blanks on one side.
    if re.match(r"[ \t]*(?:\r?\n|\])", rest) if "\n" in blanks else number:
        start -= len(blanks)
    elif "\n" not in blanks and array.items[1:]:
        end += len(rest) - len(rest.lstrip(" \t"))
    head, tail = text[array.start : start], text[end : array.end]
    if item.comma is None and before is not None:
        # The item before is the last one now, and the last one had no comma.
        head = head[: before - array.start] + head[before + 1 - array.start :]
    return head + tail
