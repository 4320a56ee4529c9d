# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A strict reader of YAML 1.1 for settings of k3s and RKE2: nodes have no YAML library. Pure.

It reads the first document as go-yaml 2 does, which both use, with scalars as the text that Go prints of them. What it
doesn't know is refused, never guessed. https://yaml.org/spec/1.1/
"""

from __future__ import annotations

import math
import re
import typing as t

Value = t.Union[str, None, "list[t.Any]", "Pairs"]


class Pairs(list[tuple[str, t.Any]]):
    """A mapping: its keys in order, repeated ones too.

    :ivar lines: the number of each key's line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[int] = []


class Unreadable(Exception):
    """A text that isn't read.

    :ivar line: number of the line, from 1.
    :ivar code: one of ``WHY``.
    """

    def __init__(self, code: str, line: int) -> None:
        super().__init__(code)
        self.code, self.line = code, line


# What is wrong, by code.
WHY = {
    "alias": "an alias without an anchor before it",
    "character": "a character that YAML or UTF-8 doesn't allow",
    "colon": "a colon and a blank within a value; quote the value",
    "depth": "too many levels",
    "end": "text behind a value",
    "escape": "an unknown escape in a quoted value",
    "flow": "brackets or braces that aren't closed, or a comma or colon that is missing",
    "indent": "a wrong indentation, or a tab in it",
    "key": "a key that isn't a word followed by a colon",
    "mapping": "not a mapping of settings",
    "merge": "a merge key (<<) whose value isn't a mapping",
    "plain": "a value that begins with a character which has to be quoted",
    "quote": "a quoted value that isn't closed",
    "size": "more text, or more values, than settings have",
    "tag": "a tag or directive, which this collection doesn't read",
}
DEEPEST = 40
# Characters: settings have some thousands.
LONGEST = 256 << 10
# Digits of an integer, also of a binary one with zeros before it.
LONGEST_NUMBER = 1000
# Characters with which a value that isn't plain begins, on one line or within brackets.
STARTS = "[{\"'*"

_BAD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufffd\ufffe\uffff\ufeff]")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {
    **{"0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b"},
    **{" ": " ", '"': '"', "'": "'", "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029"},
}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_BOOLS = {
    spelling: value
    for words, value in (("y yes true on", "true"), ("n no false off", "false"))
    for word in words.split()
    for spelling in (word, word.capitalize(), word.upper())
}
_NULLS = ("", "~", "null", "Null", "NULL")
_INTEGER = re.compile(r"([-+]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$")


def read(text: str) -> Pairs:
    """Read a file of settings.

    :raises Unreadable: it isn't a mapping in the YAML that is known here.
    """
    return _Reader(text).document()


def plain(text: str) -> str | None:
    """Return what Go prints of a plain scalar; None for null."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    digits = text.replace("_", "") if text[:1] in "+-.0123456789" else ""
    number = _INTEGER.match(digits)
    # Longer ones are out of Go's range; Python refuses to parse much longer ones.
    if number and len(digits) < LONGEST_NUMBER:
        value = number.group(2)
        base = {"x": 16, "b": 2, "o": 8}.get(value[1:2].lower(), 8 if value[0] == "0" else 10)
        whole = int(value[2:] if value[1:2].isalpha() else value, base)
        if whole < 1 << 63:
            return str(-whole if number.group(1) == "-" else whole)
    if _FLOAT.match(digits):
        real = float(digits)
        if math.isinf(real):
            # Out of Go's range, such as a token 12e4567: it is text.
            return text
        return str(int(real)) if real == int(real) and abs(real) < 1e21 else repr(real)
    return text


class _Reader:
    """One document; ``_at`` is the place of the next character."""

    def __init__(self, text: str) -> None:
        self._text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        self._at = 0
        self._depth = 0
        self._anchors: dict[str, Value] = {}
        if len(text) > LONGEST:
            raise self._wrong("size")
        bad = _BAD.search(self._text)
        if bad:
            self._at = bad.start()
            raise self._wrong("character")

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _wrong(self, code: str) -> Unreadable:
        return Unreadable(code, self._line())

    def document(self) -> Pairs:
        self._next_line()
        if self._text[self._at : self._at + 1] == "%" and self._column() == 0:
            raise self._wrong("tag")
        if self._marker("---"):
            self._at += 3
            self._blanks()
            if self._peek() not in "\n{" and not self._comment():
                # As k3s' parser, which takes no key behind the mark.
                raise self._wrong("mapping")
        elif self._marker("..."):
            raise self._wrong("mapping")
        self._next_line()
        if self._ends():
            return Pairs()
        value = self._content(0, first=True)
        self._next_line()
        if not self._ends():
            raise self._wrong("end" if self._column() == 0 else "indent")
        if value is None:
            return Pairs()
        if not isinstance(value, Pairs):
            self._at = 0
            raise self._wrong("mapping")
        return value

    # ----------------------------------------------------------------- places

    def _peek(self, width: int = 1) -> str:
        """Return the next characters; a line feed at the end of the text."""
        return self._text[self._at : self._at + width] or "\n"

    def _blank_follows(self) -> bool:
        return self._peek(2)[1:] in ("", " ", "\t", "\n")

    def _dash(self) -> bool:
        return self._peek() == "-" and self._blank_follows()

    def _column(self) -> int:
        return self._at - (self._text.rfind("\n", 0, self._at) + 1)

    def _marker(self, mark: str) -> bool:
        following = self._text[self._at + 3 : self._at + 4]
        return self._column() == 0 and self._peek(3) == mark and following in ("", " ", "\t", "\n")

    def _ends(self) -> bool:
        return self._at >= len(self._text) or self._marker("---") or self._marker("...")

    def _blanks(self) -> bool:
        """Skip blanks and tabs; return whether there were any."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        return self._at > start

    def _comment(self) -> bool:
        """Return whether a comment begins here."""
        return self._peek() == "#" and (self._at == 0 or self._text[self._at - 1] in " \t\n")

    def _rest_of_line(self) -> None:
        """Skip blanks and a comment up to the end of the line.

        :raises Unreadable: something else is there.
        """
        self._blanks()
        if self._comment():
            end = self._text.find("\n", self._at)
            self._at = end if end >= 0 else len(self._text)
        if self._peek() != "\n":
            raise self._wrong("colon" if self._peek() == ":" else "end")

    def _next_line(self) -> None:
        """Skip empty lines and comments, up to the next character that counts."""
        while self._at < len(self._text):
            tab = self._blanks() and "\t" in self._text[self._text.rfind("\n", 0, self._at) + 1 : self._at]
            if self._comment():
                self._rest_of_line()
            if self._peek() != "\n":
                if tab:
                    raise self._wrong("indent")
                return
            if self._at < len(self._text):
                self._at += 1

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._wrong("depth")

    # ----------------------------------------------------------------- block style

    def _value(self, least: int, sequence_at: int = -1) -> Value:
        """Read the value behind a key's colon or an item's dash.

        :param least: the smallest column of a value on lines of its own.
        :param sequence_at: the column at which a sequence may begin that is no deeper than its key.
        """
        self._blanks()
        anchor, text_only, properties = "", False, False
        while self._peek() in "&!":
            mark, properties = self._peek(), True
            if mark == "&":
                anchor = self._name()
            elif self._peek(5) == "!!str":
                self._at, text_only = self._at + 5, True
            else:
                raise self._wrong("tag")
            if not self._blanks() and self._peek() != "\n":
                raise self._wrong("end")
        if self._peek() != "\n" and not self._comment():
            value = self._content(least, first=False, text_only=text_only, compact=not properties and sequence_at < 0)
        else:
            back = self._at
            self._rest_of_line()
            self._next_line()
            column = self._column()
            if self._ends() or not (column >= least or (column == sequence_at and self._dash())):
                self._at = back
                self._rest_of_line()
                value = "" if text_only else None
            else:
                value = self._content(least, first=True, text_only=text_only)
        if anchor:
            self._anchors[anchor] = value
        return value

    def _name(self) -> str:
        """Read the name of an anchor or alias, behind its mark."""
        match = _NAME.match(self._text, self._at + 1)
        if not match:
            raise self._wrong("alias")
        self._at = match.end()
        return match.group()

    def _alias(self) -> Value:
        name = self._name()
        if name not in self._anchors:
            raise self._wrong("alias")
        return self._anchors[name]

    def _content(self, least: int, first: bool, text_only: bool = False, compact: bool = False) -> Value:
        """Read a node that begins here.

        :param least: the smallest column of its further lines.
        :param first: it is the first of its line.
        :param text_only: a plain scalar is text.
        :param compact: a mapping or sequence may begin behind a dash.
        """
        self._enter()
        try:
            here, column = self._peek(), self._column()
            if self._dash():
                if not (first or compact):
                    raise self._wrong("plain")
                return self._sequence(column)
            if here == "?" and self._blank_follows():
                raise self._wrong("key")
            if here in "&!" and first:
                # These belong to a value on lines of its own, or to its first key.
                back = self._at
                if self._is_key():
                    raise self._wrong("key")
                self._at = back
                return self._value(least)
            if (first or compact) and self._is_key():
                return self._mapping(column)
            if here in "|>":
                return self._block_scalar(least)
            if here in STARTS:
                value = self._started(here)
            else:
                text = self._plain(least, flow=False)
                value = text if text_only else plain(text)
            self._rest_of_line()
            return value
        finally:
            self._depth -= 1

    def _started(self, here: str) -> Value:
        """Read a value that its first character tells, one of STARTS."""
        if here in "[{":
            return self._flow()
        return self._alias() if here == "*" else self._quoted()

    def _is_key(self) -> bool:
        """Return whether a key with its colon begins here, on this line."""
        back = self._at
        try:
            if self._peek() in "[{|>":
                return False
            self._key()
            return True
        except Unreadable:
            return False
        finally:
            self._at = back

    def _key(self) -> str:
        """Read a key and its colon."""
        here, start = self._peek(), self._at
        if here in "\"'":
            key: Value = self._quoted()
        elif here in "&!*?[{|>":
            raise self._wrong("key")
        else:
            key = plain(self._plain(0, flow=False, one_line=True))
        if "\n" in self._text[start : self._at]:
            raise self._wrong("key")
        self._blanks()
        if self._peek() != ":" or not self._blank_follows():
            raise self._wrong("key")
        self._at += 1
        return str(key or "")

    def _add(self, pairs: Pairs, key: str, value: Value, start: int, line: int) -> None:
        """Add a pair to a mapping, but not a merge key, which go-yaml loses where it keeps the order of keys."""
        if key == "<<" and self._text[start] == "<":
            merged = [value] if isinstance(value, Pairs) or not isinstance(value, list) else value
            if not all(isinstance(item, Pairs) for item in merged):
                self._at = start
                raise self._wrong("merge")
            return
        pairs.append((key, value))
        pairs.lines.append(line)

    def _mapping(self, column: int) -> Pairs:
        pairs = Pairs()
        while True:
            line, start = self._line(), self._at
            key = self._key()
            self._add(pairs, key, self._value(column + 1, sequence_at=column), start, line)
            self._next_line()
            if self._ends() or self._column() < column:
                return pairs
            if self._column() > column:
                raise self._wrong("indent")

    def _sequence(self, column: int) -> list[t.Any]:
        items: list[t.Any] = []
        while True:
            self._at += 1
            items.append(self._value(column + 1))
            self._next_line()
            if self._ends() or self._column() < column or (self._column() == column and not self._dash()):
                return items
            if self._column() > column:
                raise self._wrong("indent")

    def _block_scalar(self, least: int) -> str:
        """Read a value behind ``|`` or ``>``."""
        header = re.compile(r"([|>])(?:([1-9])?([-+])?|([-+])([1-9]))(?=[ \t\n]|$)").match(self._text, self._at)
        if not header:
            raise self._wrong("plain")
        folded, keep = header.group(1) == ">", header.group(3) or header.group(4) or ""
        explicit = header.group(2) or header.group(5)
        self._at = header.end()
        self._rest_of_line()
        lines: list[str] = []
        width = least - 1 + int(explicit) if explicit else 0
        while self._at < len(self._text):
            # The line feed before the line.
            end = self._text.find("\n", self._at + 1)
            line = self._text[self._at + 1 : end if end >= 0 else len(self._text)]
            indent = len(line) - len(line.lstrip(" "))
            if line.strip(" ") and not width:
                width = max(indent, least, 1)
            if line.strip(" ") and indent < (width or 1):
                if line[indent] == "\t" and indent < least:
                    raise self._wrong("indent")
                break
            lines.append(line[width:] if width else "")
            self._at = end if end >= 0 else len(self._text)
        # Go's trimming makes all ends of lines the same.
        while lines and not lines[-1]:
            lines.pop()
        text = _fold(lines) if folded else "\n".join(lines)
        return text if keep == "-" or not lines else text + "\n"

    # ----------------------------------------------------------------- scalars

    def _plain(self, least: int, flow: bool, one_line: bool = False) -> str:
        """Read a plain scalar.

        :param least: the smallest column of its further lines.
        :param flow: it is within brackets or braces.
        :param one_line: it ends with its line.
        """
        here, following = self._peek(), self._peek(2)[1:] or "\n"
        ends = following in " \t\n" or (flow and (here == ":" or following in ",[]{}"))
        if here in ",[]{}#&*!|>'\"%@`" or (here in "-?:" and ends):
            raise self._wrong("plain")
        text = self._plain_line(flow)
        while not one_line:
            back, breaks = self._at, 0
            self._blanks()
            while self._peek() == "\n" and self._at < len(self._text):
                self._at, breaks = self._at + 1, breaks + 1
                self._blanks()
            ended = not breaks or self._ends() or self._comment() or self._peek() in (",[]{}" if flow else "")
            if ended or (not flow and self._column() < least):
                self._at = back
                return text
            more = self._plain_line(flow)
            if not more:
                self._at = back
                return text
            text += ("\n" * (breaks - 1) or " ") + more
        return text

    def _plain_line(self, flow: bool) -> str:
        start = self._at
        while self._peek() != "\n":
            here, following = self._peek(), self._peek(2)[1:] or "\n"
            if (here == ":" and following in " \t\n") or self._comment() or (flow and here in ",[]{}"):
                break
            if flow and (here == "?" or (here == ":" and following in ",[]{}")):
                # Releases of YAML differ here.
                raise self._wrong("flow")
            self._at += 1
        line = self._text[start : self._at].rstrip(" \t")
        self._at = start + len(line)
        return line

    def _quoted(self) -> str:
        """Read a quoted scalar, which may have several lines."""
        quote, start = self._peek(), self._at
        self._at += 1
        parts: list[str] = []
        while True:
            if self._at >= len(self._text):
                self._at = start
                raise self._wrong("quote")
            here = self._peek()
            if here == quote and quote == "'" and self._peek(2) == "''":
                parts.append("'")
                self._at += 2
            elif here == quote:
                self._at += 1
                return "".join(parts)
            elif here == "\\" and quote == '"':
                parts.append(self._escape())
            elif here in " \t\n":
                parts.append(self._space())
                if self._column() == 0 and (self._marker("---") or self._marker("...")):
                    raise self._wrong("quote")
            else:
                parts.append(here)
                self._at += 1

    def _escape(self) -> str:
        kind = self._peek(2)[1:]
        if kind == "\n":
            # A line that goes on without a blank.
            self._at += 2
            self._blanks()
            return ""
        width = _DIGITS.get(kind, 0)
        digits = self._text[self._at + 2 : self._at + 2 + width]
        if width and re.fullmatch(rf"[0-9a-fA-F]{{{width}}}", digits):
            number = int(digits, 16)
            if number <= 0x10FFFF and not 0xD800 <= number <= 0xDFFF:
                self._at += 2 + width
                return chr(number)
        if width or kind not in _ESCAPES:
            raise self._wrong("escape")
        self._at += 2
        return _ESCAPES[kind]

    def _space(self) -> str:
        """Read the white space within a quoted scalar: of line breaks the first one is a blank, or nothing."""
        start = self._at
        self._blanks()
        blanks, breaks = self._text[start : self._at], 0
        while self._peek() == "\n" and self._at < len(self._text):
            self._at, breaks = self._at + 1, breaks + 1
            if self._marker("---") or self._marker("..."):
                return ""
            self._blanks()
        return blanks if not breaks else "\n" * (breaks - 1) or " "

    # ----------------------------------------------------------------- flow style

    def _flow(self) -> Value:
        """Read a sequence in brackets or a mapping in braces."""
        self._enter()
        start, is_list = self._at, self._peek() == "["
        items: list[t.Any] = []
        pairs = Pairs()
        self._at += 1
        while True:
            self._flow_space(start)
            if self._peek() == ("]" if is_list else "}"):
                self._at += 1
                self._depth -= 1
                return items if is_list else pairs
            if is_list:
                items.append(self._flow_value(start))
            else:
                line, begin = self._line(), self._at
                key, value = self._member(start)
                self._add(pairs, key, value, begin, line)
            self._flow_space(start)
            if self._peek() == ",":
                self._at += 1
            elif self._peek() != ("]" if is_list else "}"):
                raise self._wrong("flow")

    def _member(self, start: int) -> tuple[str, Value]:
        here, begin = self._peek(), self._at
        quoted = here in "\"'"
        if here in "&!*?[{":
            raise self._wrong("key")
        key: Value = self._quoted() if quoted else plain(self._plain(0, flow=True))
        if "\n" in self._text[begin : self._at]:
            raise self._wrong("key")
        name = str(key or "")
        self._flow_space(start)
        if self._peek() in ",}":
            return name, None
        if self._peek() != ":" or not (quoted or (self._peek(2)[1:] or "\n") in " \t\n"):
            raise self._wrong("flow")
        self._at += 1
        self._flow_space(start)
        return name, (None if self._peek() in ",}" else self._flow_value(start))

    def _flow_value(self, start: int) -> Value:
        here, anchor = self._peek(), ""
        if here == "!":
            raise self._wrong("tag")
        if here == "&":
            anchor = self._name()
            self._flow_space(start)
            here = self._peek()
        value = self._started(here) if here in STARTS else plain(self._plain(0, flow=True))
        if anchor:
            self._anchors[anchor] = value
        return value

    def _flow_space(self, start: int) -> None:
        """Skip white space and comments within brackets or braces."""
        while True:
            self._blanks()
            if self._comment():
                end = self._text.find("\n", self._at)
                self._at = end if end >= 0 else len(self._text)
            if self._at >= len(self._text) or self._marker("---") or self._marker("..."):
                self._at = start
                raise self._wrong("flow")
            if self._peek() != "\n":
                return
            self._at += 1


def _fold(lines: t.Sequence[str]) -> str:
    """Join the lines of a folded block: a break between lines without more indentation is a blank."""
    text, blank, last = "", 0, ""
    for number, line in enumerate(lines):
        if not line:
            blank += 1
            continue
        indented = line[0] in " \t" or last[:1] in (" ", "\t")
        if number > blank:
            text += "\n" * (blank + 1) if indented else ("\n" * blank or " ")
        else:
            text += "\n" * blank
        text, blank, last = text + line, 0, line
    return text
