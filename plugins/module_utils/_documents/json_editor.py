# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Edit a user's JSON file: only the bytes of edited members change; numbers, order and layout stay."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject

Path = tuple[str, ...]

_BLANK = re.compile(r"[ \t\r\n]*")
DEFAULT_INDENT = "    "
# Real files aren't nested so deeply, and every parser has a limit.
DEEPEST = 100


@dataclasses.dataclass(frozen=True)
class Number:
    """A number as it is written: 1.0e3 isn't 1000.0, and a long one keeps its digits."""

    text: str


@dataclasses.dataclass(frozen=True)
class Member:
    """A key and its value, with the key's position; ``colon`` is the text between them."""

    start: int
    value: Node
    colon: str


@dataclasses.dataclass(frozen=True)
class Node:
    """A value and its position in the text; ``members`` is None for all but objects."""

    start: int
    end: int
    plain: t.Any
    members: dict[str, Member] | None = None


def _no_constant(word: str) -> t.NoReturn:
    raise ValueError(f"{word} isn't JSON")


_DECODER = json.JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=_no_constant)


class Document:
    """A JSON object under edit; ``tree`` holds the values that the edited text has to have.

    An empty text is an empty object.

    :raises BadInput: it isn't a JSON object, or (any method) can't be edited safely.
    """

    def __init__(self, path: str, text: str) -> None:
        self._file = path
        # Editors on Windows begin a file with a byte order mark.
        self._mark = "\ufeff" if text.startswith("\ufeff") else ""
        self._text = text[len(self._mark) :]
        self._line = "\r\n" if "\r\n" in text else "\n"
        if not self._text.strip(" \t\r\n"):
            self._text = "{}" + (self._text or "\n")
        self._root = self._parsed(self._text)
        self._wide = "\n" in self._text.strip(" \t\r\n") or not self._root.members
        self._indent = self._unit()
        self.tree: JsonObject = copy.deepcopy(self._root.plain)

    @property
    def text(self) -> str:
        return self._mark + self._text

    def get(self, path: Path) -> t.Any:
        tree: t.Any = self.tree
        for part in path:
            tree = tree.get(part) if isinstance(tree, dict) else None
        return tree

    def has(self, path: Path) -> bool:
        """Return whether the key exists, even with the value null."""
        above = self.get(path[:-1])
        return isinstance(above, dict) and path[-1] in above

    def written(self, path: Path) -> str:
        """Return a value as it is written.

        :raises KeyError: the key doesn't exist.
        """
        node = self._node(path)
        if node is None:
            raise KeyError(path)
        return self._text[node.start : node.end]

    def set(self, path: Path, value: t.Any) -> None:
        """Set a key to strings, booleans, and objects of them; missing objects above it are created."""
        self._put(path, value, None)

    def restore(self, path: Path, literal: str) -> None:
        """Set a key to a value as it was written."""
        self._put(path, self._value(literal, 0).plain, literal)

    def delete(self, path: Path) -> None:
        """Remove a key with its comma."""
        above = self._node(path[:-1])
        if above is None or above.members is None or path[-1] not in above.members:
            return
        names = list(above.members)
        number = names.index(path[-1])
        here = above.members[path[-1]]
        if number:
            before = above.members[names[number - 1]].value
            start, end = before.end, here.value.end
        elif len(names) > 1:
            start, end = here.start, above.members[names[1]].start
        else:
            start, end = above.start + 1, above.end - 1
        self._splice(start, end, "")
        del self.get(path[:-1])[path[-1]]

    def checked(self) -> str:
        """Return the edited text.

        :raises BadInput: it doesn't hold exactly the old values and the requested ones.
        """
        if self._parsed(self._text).plain != self.tree:
            raise BadInput(
                f"{self._file} is written in a way that can't be edited safely (the edit would have changed more than "
                "it should); it is left as it is"
            )
        return self.text

    # ----------------------------------------------------------------- edit

    def _put(self, path: Path, value: t.Any, literal: str | None) -> None:
        above = self._node(path[:-1])
        if path[:-1] and (above is None or above.plain is None):
            self._put(path[:-1], {path[-1]: value}, None)
            if literal is not None:
                self._put(path, value, literal)
            return
        if above is None or above.members is None:
            raise BadInput(f"{self._file}: {'.'.join(path[:-1])} isn't an object; it is left as it is")
        depth = len(path)
        new = literal if literal is not None else self._render(value, depth)
        if path[-1] in above.members:
            node = above.members[path[-1]].value
            self._splice(node.start, node.end, new)
        elif above.members:
            last = list(above.members.values())[-1]
            first = next(iter(above.members.values()))
            lead = self._text[above.start + 1 : first.start]
            between = self._between(above) if len(above.members) > 1 else lead
            colon = last.colon if "\n" not in last.colon else ": "
            self._splice(last.value.end, last.value.end, f",{between}{json.dumps(path[-1])}{colon}{new}")
        else:
            inner, outer = self._breaks(depth)
            self._splice(above.start + 1, above.end - 1, f"{inner}{json.dumps(path[-1])}: {new}{outer}")
        self.get(path[:-1])[path[-1]] = copy.deepcopy(value)

    def _between(self, above: Node) -> str:
        """Return the text between the last comma and the last key."""
        *_others, before_last, last = (above.members or {}).values()
        return self._text[before_last.value.end : last.start].split(",", 1)[1]

    def _breaks(self, depth: int) -> tuple[str, str]:
        """Return the text before the keys of an object, and before its closing brace."""
        if not self._wide:
            return "", ""
        return self._line + self._indent * depth, self._line + self._indent * (depth - 1)

    def _render(self, value: t.Any, depth: int) -> str:
        if not isinstance(value, dict):
            return json.dumps(value)
        if not value:
            return "{}"
        inner, outer = self._breaks(depth + 1)
        items = [f"{json.dumps(key)}: {self._render(member, depth + 1)}" for key, member in value.items()]
        return "{" + inner + ("," + (inner or " ")).join(items) + outer + "}"

    def _splice(self, start: int, end: int, new: str) -> None:
        self._text = self._text[:start] + new + self._text[end:]
        self._root = self._parsed(self._text)

    def _unit(self) -> str:
        """Return one step of the file's indentation."""
        for member in (self._root.members or {}).values():
            match = re.search(r"\n([ \t]+)$", self._text[: member.start])
            return match[1] if match else DEFAULT_INDENT
        return DEFAULT_INDENT

    def _node(self, path: Path) -> Node | None:
        node: Node | None = self._root
        for part in path:
            members = node.members if node is not None else None
            node = members[part].value if members and part in members else None
        return node

    # ----------------------------------------------------------------- parse

    def _parsed(self, text: str) -> Node:
        root = self._value(text, self._skip(text, 0))
        end = self._skip(text, root.end)
        if root.members is None:
            raise self._broken(text, root.start, "it isn't an object")
        if end < len(text):
            raise self._broken(text, end, "something follows the object")
        return root

    def _skip(self, text: str, at: int) -> int:
        match = _BLANK.match(text, at)
        return match.end() if match else at

    def _value(self, text: str, at: int, depth: int = 0) -> Node:
        sign = text[at : at + 1]
        if depth > DEEPEST:
            raise self._broken(text, at, "it is nested too deeply")
        if sign == "{":
            return self._object(text, at, depth + 1)
        if sign == "[":
            return self._array(text, at, depth + 1)
        try:
            plain, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise self._broken(text, error.pos, self._reason(text, error.pos, error.msg)) from None
        except ValueError as error:
            raise self._broken(text, at, str(error)) from None
        return Node(at, end, plain)

    def _object(self, text: str, start: int, depth: int) -> Node:
        members: dict[str, Member] = {}
        at = self._skip(text, start + 1)
        if text[at : at + 1] == "}":
            return Node(start, at + 1, {}, members)
        while True:
            if text[at : at + 1] != '"':
                raise self._broken(text, at, self._reason(text, at, "a key in double quotes was expected"))
            name = self._value(text, at)
            key: str = name.plain
            if key in members:
                raise self._broken(text, at, f"the key {json.dumps(key)} is there twice")
            colon = self._skip(text, name.end)
            if text[colon : colon + 1] != ":":
                raise self._broken(text, colon, self._reason(text, colon, "a colon was expected"))
            value = self._value(text, self._skip(text, colon + 1), depth)
            members[key] = Member(at, value, text[name.end : value.start])
            at = self._skip(text, value.end)
            sign = text[at : at + 1]
            if sign == "}":
                return Node(start, at + 1, {item: member.value.plain for item, member in members.items()}, members)
            if sign != ",":
                raise self._broken(text, at, self._reason(text, at, "a comma or a closing brace was expected"))
            at = self._after_comma(text, at, "}")

    def _array(self, text: str, start: int, depth: int) -> Node:
        items: list[t.Any] = []
        at = self._skip(text, start + 1)
        if text[at : at + 1] == "]":
            return Node(start, at + 1, items)
        while True:
            value = self._value(text, at, depth)
            items.append(value.plain)
            at = self._skip(text, value.end)
            sign = text[at : at + 1]
            if sign == "]":
                return Node(start, at + 1, items)
            if sign != ",":
                raise self._broken(text, at, self._reason(text, at, "a comma or a closing bracket was expected"))
            at = self._after_comma(text, at, "]")

    def _after_comma(self, text: str, comma: int, closing: str) -> int:
        at = self._skip(text, comma + 1)
        if text[at : at + 1] == closing:
            raise self._broken(text, comma, f"a comma stands before the closing {closing}")
        return at

    def _reason(self, text: str, at: int, otherwise: str) -> str:
        if text.startswith(("//", "/*", "#"), at):
            return "JSON has no comments"
        if at >= len(text):
            return "it ends too early"
        return otherwise[:1].lower() + otherwise[1:]

    def _broken(self, text: str, at: int, reason: str) -> BadInput:
        line = text.count("\n", 0, at) + 1
        return BadInput(f"{self._file}, line {line}, can't be parsed ({reason}); it is left as it is")
