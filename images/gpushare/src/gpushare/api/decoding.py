# SPDX-License-Identifier: GPL-3.0-or-later
"""Decode JSON that arrives in pieces, in memory that doesn't depend on its size.

Whoever may create an object chooses its size: the API server takes 3 MiB, which are more when it sends them (defaults,
escapes), and 25 times that as Python's objects. So nothing larger than ``WHOLE_BYTES`` is decoded at once. A larger
value is read piece by piece, and only what its *shape* names is kept. What is skipped isn't checked in full.

A shape is ``LEAF`` for a string, number, boolean or null; ``ALL`` for any value, which is decoded at once; a dict of
the fields to keep with their shapes, where ``OTHERS`` stands for any other key; or a :class:`Each` for a list. A value
of another kind than its shape is kept without its content.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

# An object's bytes: its decoded form takes up to 25 times as much. Ordinary pods and nodes have 5 to 50 KiB.
WHOLE_BYTES = 128 * 1024
# What is read at a time, in characters.
PIECE_LENGTH = 64 * 1024
# A kept string's length, before its escapes are decoded; an object's annotations have 256 KiB together.
STRING_LENGTH = 6 * 256 * 1024
# The length of a number or a name of JSON.
WORD_LENGTH = 400
# Keys that a shape doesn't name.
MOST_OTHERS = 1000
# Entries of a list: a pod has at most 32,000 containers, as the API server stores 1.5 MiB.
MOST_ENTRIES = 50_000


@dataclasses.dataclass(frozen=True)
class Each:
    """The shape of a list.

    :param shape: of its entries.
    :param most: entries that are kept, the first ones.
    """

    shape: Shape
    most: int = MOST_ENTRIES


LEAF, ALL, OTHERS = "leaf", "all", "*"
Shape: TypeAlias = "str | Mapping[str, Shape] | Each | None"

_SPACE = re.compile(r"[ \t\r\n]*+")
_WORD = re.compile(r"[-+.0-9A-Za-z]*+")
# A string without escapes, and one that is a key: most are.
_SIMPLE = re.compile(r'"([^"\\]*+)"')
_KEY = re.compile(r'[ \t\r\n]*+"([^"\\]*+)"[ \t\r\n]*+:')
# Repeated groups are in atomic ones: possessive ones go wrong in Python 3.11 up to 3.11.4.
_CHARS = re.compile(r'[^"\\]*+(?>(?:\\.[^"\\]*+)*)', re.DOTALL)
# Whole characters and escapes.
_COMPLETE = re.compile(r'[^"\\]*+(?>(?:\\(?:u[0-9a-fA-F]{4}|[^u])[^"\\]*+)*)', re.DOTALL)
# What is skipped at once: strings and words, and lists and objects that hold nothing else. Without alternatives, so
# that nothing is tried twice.
_PLAIN = r'[^"{}\[\]]*+(?>(?:"[^"\\]*+(?>(?:\\.[^"\\]*+)*)"[^"{}\[\]]*+)*)'
_RUN = re.compile(rf"{_PLAIN}(?>(?:[{{\[]{_PLAIN}[}}\]]{_PLAIN})*)", re.DOTALL)
_decode = json.JSONDecoder().raw_decode


class _Text:
    """The text of an answer, of which one piece is held at a time.

    All methods raise ValueError where the text isn't JSON, or ends too early.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._decoder = iter(pieces), codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False

    def more(self) -> bool:
        """Read some pieces more, and drop what has been read; return False at the end."""
        new, length = list[str](), 0
        while length < PIECE_LENGTH and not self._ended:
            piece = next(self._pieces, None)
            self._ended = piece is None
            new.append(self._decoder.decode(piece or b"", self._ended))
            length += len(new[-1])
        if length:
            self._text, self._at = "".join((self._text[self._at :], *new)), 0
        return length > 0

    def peek(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self.more():
                return ""

    def take(self, wanted: str) -> None:
        """Read a character."""
        token = self.peek()
        if token != wanted:
            raise ValueError(f"{token!r} stands where {wanted!r} is expected" if token else "it ends too early")
        self._at += 1

    def end(self) -> None:
        if self.peek():
            raise ValueError("something follows the value")

    # Values.

    def whole(self, most: int) -> tuple[bool, Any]:
        """Decode the next value at once if it ends within so many characters.

        :returns: whether it did, and the value. Of an object or a list; the end of a word or number isn't seen.
        """
        least = 0
        while True:
            length = len(self._text) - self._at
            if length >= least or self._ended:
                try:
                    value, self._at = _decode(self._text, self._at)
                    return True, value
                # Incomplete, no JSON, or nested too deeply: the slow way tells.
                except (ValueError, RecursionError):
                    least = 2 * length
            if length >= most or self._ended:
                return False, None
            self.more()

    def value(self, shape: Shape) -> Any:
        """Read the next value, and return what its shape names of it."""
        first = self.peek()
        if first == "{" and isinstance(shape, Mapping):
            return self._object(shape)
        if first == "[" and isinstance(shape, Each):
            values = list[Any]()
            for entry in self.entries(shape.shape, kept=shape.most):
                if len(values) < shape.most:
                    values.append(entry)
            return values
        if shape == ALL and first in ("{", "["):
            is_whole, value = self.whole(sys.maxsize)
            if not is_whole:
                raise ValueError("it ends too early, or is nested too deeply")
            return value
        if shape is not None and first == '"':
            return self.string()
        if shape is None or first in ("{", "["):
            self.skip()
            if shape is None:
                return None
            return {} if first == "{" else []
        return self._word(True)

    def _object(self, shape: Mapping[str, Shape]) -> dict[str, Any]:
        members, others = dict[str, Any](), 0
        for key in self.names():
            inner = shape.get(key)
            if inner is None and OTHERS in shape:
                others += 1
                inner = shape[OTHERS] if others <= MOST_OTHERS else None
            if inner is None:
                self.skip()
            else:
                members[key] = self.value(inner)
        return members

    def names(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads each value before the next key."""
        self.take("{")
        if self.peek() == "}":
            self._at += 1
            return
        while True:
            simple = _KEY.match(self._text, self._at)
            if simple is not None and len(simple[1]) <= WORD_LENGTH:
                key, self._at = simple[1], simple.end()
            elif self.peek() != '"':
                raise ValueError("a key is no string")
            else:
                key = self.string(WORD_LENGTH)
                self.take(":")
            yield key
            if not self._goes_on("}"):
                return

    def entries(self, shape: Shape, most: int = 0, kept: int = sys.maxsize) -> Iterator[Any]:
        """Yield the entries of a list.

        :param shape: of an entry.
        :param most: characters of an entry that is returned as it is, with all of its fields; by default none is.
        :param kept: after so many entries the others are only skipped.
        """
        self.take("[")
        if self.peek() == "]":
            self._at += 1
            return
        for number in itertools.count():
            is_whole = False
            if number == kept:
                shape = None
            if shape is not None and self.peek() in ("{", "["):
                # Short ones within what is held: the standard library's decoder is many times faster than this one.
                is_whole, value = self.whole(most)
            if not is_whole:
                yield self.value(shape)
            else:
                yield value if most else _reduced(value, shape)
            if not self._goes_on("]"):
                return

    def _goes_on(self, end: str) -> bool:
        """Read a comma, or the end of a list or an object."""
        token = self.peek()
        if token not in (",", end):
            raise ValueError(f"{token!r} stands where ',' is expected" if token else "it ends too early")
        self._at += 1
        return token == ","

    def string(self, most: int = STRING_LENGTH) -> str:
        """Read a string; of a longer one the beginning."""
        simple = _SIMPLE.match(self._text, self._at)
        if simple is not None and len(simple[1]) <= most:
            self._at = simple.end()
            return simple[1]
        parts, length = list[str](), 0
        for part in self._chars():
            if length <= most:
                parts.append(part)
            length += len(part)
        raw = "".join(parts)
        if length > most:
            match = _COMPLETE.match(raw[:most])
            assert match is not None
            raw = match[0]
        # Control characters are allowed: there are none in Go's JSON.
        value: str = json.loads(f'"{raw}"', strict=False)
        # Half of a pair.
        return value[:-1] if length > most and "\ud800" <= value[-1:] <= "\udbff" else value

    def _chars(self) -> Iterator[str]:
        """Yield the text of a string, with its escapes, and read its end."""
        self._at += 1
        while True:
            match = _CHARS.match(self._text, self._at)
            assert match is not None
            if match.end() > self._at:
                yield match[0]
            self._at = match.end()
            if self._text[self._at : self._at + 1] == '"':
                self._at += 1
                return
            # A backslash at the end stays for the next piece.
            if not self.more():
                raise ValueError("it ends within a string")

    def _word(self, is_kept: bool) -> Any:
        text = ""
        while True:
            match = _WORD.match(self._text, self._at)
            assert match is not None
            text = (text + match[0])[: WORD_LENGTH + 1]
            self._at = match.end()
            if self._at < len(self._text) or not self.more():
                break
        if not text:
            raise ValueError(f"{self.peek()!r} stands where a value is expected")
        if not is_kept:
            return None
        if len(text) > WORD_LENGTH:
            raise ValueError("a number is too long")
        return json.loads(text)

    def skip(self) -> None:
        """Read a value without keeping anything, however deeply it is nested."""
        depth = 0
        while True:
            first = self.peek()
            if first in ("{", "["):
                depth += 1
                self._at += 1
            elif first == '"':
                if simple := _SIMPLE.match(self._text, self._at):
                    self._at = simple.end()
                else:
                    collections.deque(self._chars(), 0)
            elif depth and first in ("}", "]"):
                depth -= 1
                self._at += 1
            elif depth and first in (",", ":"):
                self._at += 1
            else:
                self._word(False)
            if not depth:
                return
            match = _RUN.match(self._text, self._at)
            assert match is not None
            self._at = match.end()


def _reduced(value: Any, shape: Shape) -> Any:
    """Return what a shape names of a decoded value."""
    if shape == ALL:
        return value
    if isinstance(value, dict):
        if not isinstance(shape, Mapping):
            return {}
        members, others = dict[str, Any](), 0
        for key, member in value.items():
            inner = shape.get(key)
            if inner is None and OTHERS in shape:
                others += 1
                inner = shape[OTHERS] if others <= MOST_OTHERS else None
            if inner is not None:
                members[key] = _reduced(member, inner)
        return members
    if isinstance(value, list):
        return [_reduced(item, shape.shape) for item in value[: shape.most]] if isinstance(shape, Each) else []
    return value


def document(pieces: Iterable[bytes], shape: Shape) -> Any:
    """Decode one value.

    :param shape: of a value that is larger than ``WHOLE_BYTES``; a smaller one is returned as it is.
    :raises ValueError: it isn't JSON, or ends too early.
    """
    text = _Text(pieces)
    value = None
    is_whole = text.peek() in ("{", "[")
    if is_whole:
        is_whole, value = text.whole(WHOLE_BYTES)
    if not is_whole:
        value = text.value(shape)
    text.end()
    return value


def listed(pieces: Iterable[bytes], shape: Shape, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Decode the ``items`` of a list one by one.

    :param shape: of an item that is larger than ``WHOLE_BYTES``; a smaller one is returned as it is.
    :param head: receives the list's ``metadata``, before or after the items.
    :raises ValueError: it isn't JSON, or isn't a list.
    """
    text, has_items = _Text(pieces), False
    for key in text.names():
        if key == "items" and text.peek() == "[":
            if has_items:
                raise ValueError("the list has two lists of items")
            has_items = True
            for item in text.entries(shape, WHOLE_BYTES):
                if not isinstance(item, dict):
                    raise ValueError("an item of the list is no object")
                yield item
        elif key == "metadata":
            head[key] = text.value({"resourceVersion": LEAF, "continue": LEAF})
        else:
            text.skip()
    text.end()


def events(pieces: Iterable[bytes], shape: Shape) -> Iterator[dict[str, Any]]:
    """Decode the events of a watch, which are a line each.

    :param shape: of an event that is larger than ``WHOLE_BYTES``; a smaller one is returned as it is.
    :raises ValueError: a line isn't JSON, or is no event.
    """
    lines = _Lines(pieces)
    while (line := lines.next()) is not None:
        event = document(line, shape)
        if not isinstance(event, dict):
            raise ValueError("it is no event")
        yield event


class _Lines:
    """Divides pieces into lines, which are pieces again.

    :param pieces: of a text that ends with a line, or is cut.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._piece, self._at = iter(pieces), b"", 0

    def next(self) -> Iterable[bytes] | None:
        """Return the next line that isn't empty, in one piece if it is short; None at the end.

        It must be read whole before the next one.
        """
        held, size = list[bytes](), 0
        while (piece := self._part()) is not None:
            part, is_end = piece
            held.append(part)
            size += len(part)
            if is_end:
                line = b"".join(held)
                if line.strip():
                    return (line,)
                held, size = [], 0
            elif size > WHOLE_BYTES:
                return itertools.chain(held, self._rest())
        # A connection that is cut ends within a line.
        return None

    def _rest(self) -> Iterator[bytes]:
        while (piece := self._part()) is not None:
            yield piece[0]
            if piece[1]:
                return

    def _part(self) -> tuple[bytes, bool] | None:
        """Return the next part of a line, and whether it is the last one."""
        if self._at >= len(self._piece):
            piece = next(self._pieces, None)
            if piece is None:
                return None
            self._piece, self._at = piece, 0
        start, end = self._at, self._piece.find(b"\n", self._at)
        self._at = end + 1 if end >= 0 else len(self._piece)
        return self._piece[start : end if end >= 0 else None], end >= 0
