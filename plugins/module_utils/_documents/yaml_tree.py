# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The positions of all values in a YAML text."""

from __future__ import annotations

import bisect
import dataclasses
import re
import typing as t

from .._core.errors import BadInput
from .._core.libraries import SafeLoader, yaml

MAP, LIST, SCALAR, ALIAS = "map", "list", "scalar", "alias"
# In characters without lines of comments. An edit parses a text seven times, each some 3 microseconds a character, so
# the largest takes seconds; the largest of 1,000 real ones has 25 KiB. Comments cost next to nothing.
LARGEST, LARGEST_WITH_COMMENTS = 1 << 17, 1 << 20
_BREAKS = "\r\n\x85\u2028\u2029"
_BLANKS = re.compile("[ \t]*")
_COMMENT_LINES = re.compile(r"(?m)^[ \t]*#[^\r\n]*")
# What may precede a token on its line, and a comment; tabs only where they don't indent a block.
_BETWEEN = re.compile(rf"[ \t]*(?:#[^\0{_BREAKS}]*)?")
_BETWEEN_WITHOUT_TABS = re.compile(rf"[ ]*(?:#[^\0{_BREAKS}]*)?")


class Repeated(Exception):
    """A repeated key, of which parsers choose different ones."""

    def __init__(self, key: str, at: int) -> None:
        super().__init__(f"the key {key} is there twice")
        self.at = at


def refuse_large(path: str, text: str) -> None:
    """Refuse a text whose edit would take minutes.

    :raises BadInput: it has more than 128 KiB without lines of comments, or more than 1 MiB with them.
    """
    if len(text) > LARGEST_WITH_COMMENTS:
        size = f"{LARGEST_WITH_COMMENTS >> 20} MiB"
    elif len(text) > LARGEST and len(_COMMENT_LINES.sub("", text)) > LARGEST:
        size = f"{LARGEST >> 10} KiB without its comments"
    else:
        return
    raise BadInput(f"{path} has more than {size}, too much for a configuration; it is left as it is")


def fault(text: str, error: yaml.YAMLError) -> tuple[int, str]:
    """Return the line of a parser's error, and its reason."""
    if isinstance(error, yaml.reader.ReaderError):
        at = error.position
        return text.count("\n", 0, at) + 1, f"the character #x{ord(text[at]):02x} isn't allowed"
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark else 1, str(getattr(error, "problem", None) or error)


@dataclasses.dataclass
class Entry:
    """A mapping's key with its value, or a list's item; it starts at its key or, in a block, at its dash."""

    start: int
    value: Node
    key: str | None = None
    key_end: int = 0

    @property
    def end(self) -> int:
        return max(self.value.end, self.key_end)


@dataclasses.dataclass
class Node:
    """A value and its position in the text."""

    kind: str
    start: int
    end: int
    flow: bool = False
    style: str = ""
    """A scalar's quote or block indicator."""
    column: int = 0
    """The column of a block collection's keys or dashes."""
    entries: list[Entry] = dataclasses.field(default_factory=list)

    def entry(self, step: str | int) -> Entry | None:
        if self.kind == LIST and isinstance(step, int):
            return self.entries[step] if step < len(self.entries) else None
        return next((entry for entry in self.entries if self.kind == MAP and entry.key == step), None)


def parse(text: str, is_json: bool) -> Node:
    """Parse the first document of a text.

    :raises yaml.YAMLError: it isn't YAML.
    :raises Repeated: it is ambiguous.
    """
    # JSON may begin with tabs, and its strings contain none.
    text = text.replace("\t", " ") if is_json else text
    loader = _Positions(text)
    try:
        builder = _Builder(text, loader)
        for event in builder.events:
            if isinstance(event, yaml.DocumentStartEvent):
                return builder.node(next(builder.events))
    finally:
        loader.dispose()
    raise yaml.YAMLError("it is empty")


class Loader(SafeLoader):
    """Accept tabs where Kubernetes' parser does: everywhere but where they would indent a block."""

    def scan_to_next_token(self) -> None:
        untyped: t.Any = self
        if self.index == 0 and self.peek() == "\ufeff":
            self.forward()
        self._skip_between()
        while untyped.scan_line_break():
            self.allow_simple_key = self.allow_simple_key or not self.flow_level
            self._skip_between()

    def _skip_between(self) -> None:
        begins_block = self.allow_simple_key and not self.flow_level
        self._skip(_BETWEEN_WITHOUT_TABS if begins_block else _BETWEEN)

    def scan_plain_spaces(self, indent: int, start_mark: t.Any) -> t.Any:
        """Return the blanks within a plain scalar, or its folded line breaks; None at the end of the document."""
        untyped: t.Any = super()
        blanks = self._skip(_BLANKS)
        if self.peek() not in _BREAKS:
            return [blanks] if blanks else []
        folded = untyped.scan_plain_spaces(indent, start_mark)
        while folded is not None and self.peek() == "\t" and self.column >= indent:
            self._skip(_BLANKS)
            if self.peek() in _BREAKS:
                # The line had nothing but tabs.
                more = untyped.scan_plain_spaces(indent, start_mark)
                folded = [*(piece for piece in (*folded, "\n", *more) if piece != " ")] if more is not None else None
        return folded

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Skip a part of a line; PyYAML's own methods take each character by itself."""
        match = pattern.match(self.buffer, self.pointer)
        skipped = match[0] if match else ""
        self.pointer += len(skipped)
        self.index += len(skipped)
        self.column += len(skipped)
        return skipped


# As for Kubernetes, a date is a string, and so is an equals sign.
Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in found if resolver[0].rpartition(":")[2] not in ("timestamp", "value")]
    for first, found in SafeLoader.yaml_implicit_resolvers.items()
}


class _Positions(Loader):
    """Record where entries of blocks begin: an item at its dash, a key at its question mark, if any."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.begins: list[int] = []
        self.columns: list[int] = []

    def get_token(self) -> t.Any:
        token = super().get_token()  # type: ignore[no-untyped-call]
        if isinstance(token, (yaml.BlockEntryToken, yaml.KeyToken)):
            self.begins.append(token.start_mark.index)
            self.columns.append(token.start_mark.column)
        return token


class _Builder:
    def __init__(self, text: str, loader: _Positions) -> None:
        self._text, self._loader = text, loader
        untyped: t.Any = loader
        self.events: t.Iterator[t.Any] = iter(untyped.get_event, None)

    def _begin(self, node: Node, start: int) -> int:
        """Return the position where a block's entry begins."""
        number = bisect.bisect_left(self._loader.begins, start) - 1
        node.column = self._loader.columns[number]
        return self._loader.begins[number]

    def node(self, event: t.Any) -> Node:
        start, end = event.start_mark.index, event.end_mark.index
        if isinstance(event, yaml.AliasEvent):
            return Node(ALIAS, start, end)
        if isinstance(event, yaml.ScalarEvent):
            style = event.style or ""
            if style in ("|", ">"):
                # Exclude its final line break.
                match = re.search(r"\r?\n\Z", self._text[start:end])
                end -= len(match[0]) if match else 0
            return Node(SCALAR, start, end, style=style)
        if isinstance(event, yaml.MappingStartEvent):
            return self._map(event)
        return self._list(event)

    def _map(self, event: t.Any) -> Node:
        node = Node(MAP, event.start_mark.index, event.end_mark.index, flow=bool(event.flow_style))
        seen: set[str] = set()
        for key in self.events:
            if isinstance(key, yaml.MappingEndEvent):
                self._close(node, key)
                return node
            name = self.node(key)
            word = key.value if name.kind == SCALAR else None
            if word in seen:
                raise Repeated(word, name.start)
            seen |= {word} if word is not None else set()
            begin = name.start if node.flow else self._begin(node, name.start + 1)
            value = self.node(next(self.events))
            # An empty value follows the colon.
            colon = re.compile(r"\s*:").match(self._text, name.end)
            node.entries.append(Entry(begin, value, word, colon.end() if colon else name.end))
        raise yaml.YAMLError("a mapping doesn't end")

    def _list(self, event: t.Any) -> Node:
        node = Node(LIST, event.start_mark.index, event.end_mark.index, flow=bool(event.flow_style))
        for item in self.events:
            if isinstance(item, yaml.SequenceEndEvent):
                self._close(node, item)
                return node
            start = item.start_mark.index
            begin = start if node.flow else self._begin(node, start)
            node.entries.append(Entry(begin, self.node(item)))
        raise yaml.YAMLError("a list doesn't end")

    @staticmethod
    def _close(node: Node, event: t.Any) -> None:
        node.end = event.end_mark.index if node.flow else node.entries[-1].end
