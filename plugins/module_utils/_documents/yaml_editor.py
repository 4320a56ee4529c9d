# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Edit a user's YAML (or JSON) file: only the characters of edited values change.

PyYAML provides the positions and validates the result, which has to hold the old values and the requested ones. An
addition can be removed again to the byte: an empty collection or a null that is filled is written in brackets, and the
number of blanks after the opening one encodes the original. (A round trip of ruamel.yaml changes bytes of 29 of the 47
manifests in the tests without any edit: indentation, line ends, marks of documents, and JSON.)
"""

from __future__ import annotations

import bisect
import collections
import copy
import json
import re
import typing as t

from .._core.errors import BadInput
from .._core.libraries import yaml
from .yaml_tree import (
    LIST,
    MAP,
    SCALAR,
    Entry,
    Loader,
    Node,
    Repeated,
    fault,
    parse,
    refuse_large,
)

Step = t.Union[str, int]
Path = tuple[Step, ...]

WIDTH = 1 << 20
# The original of a filled pair of brackets, by the blanks after the opening one.
WAS = {1: "", 2: "null", 3: "~", 4: None, 5: "Null", 6: "NULL"}


class Document:
    """A YAML file with one mapping under edit.

    :param path: the file's name, for messages.
    :raises BadInput: it isn't one mapping, or (any other method) can't be edited safely.
    """

    def __init__(self, path: str, text: str) -> None:
        self._file, self._before, self._text = path, text, text
        refuse_large(path, text)
        self._json = _is_json(text)
        self._line = 1
        try:
            # The values that the edited text has to have.
            self._asked = self._read(text)
            self._was = copy.deepcopy(self._asked)
            self._tree = parse(text, self._json)
        except yaml.YAMLError as error:
            raise self._unparsable(*fault(text, error)) from error
        except Repeated as error:
            raise self._unparsable(_line_of(text, error.at), error) from error
        except RecursionError as error:
            raise self._unparsable(1, "it is nested too deeply") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # A value that doesn't fit its tag, or a mapping as a key.
            raise self._unparsable(1, error) from error
        self._comments = _comments(text, self._tree)
        self._style = Style(text, self._tree, self._json)

    def get(self, path: Path) -> t.Any:
        """Return the requested value at a path, or None."""
        value: t.Any = self._asked
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def line(self, path: Path) -> int:
        """Return the line of a value's key or item, or of its nearest existing parent."""
        node, at = self._tree, self._tree.start
        for step in path:
            entry = node.entry(step)
            if entry is None:
                break
            node, at = entry.value, entry.start
        return _line_of(self._text, at)

    def set(self, path: Path, value: t.Any) -> None:
        """Set the value of a mapping's key; missing mappings above it are created."""
        parent, key = path[:-1], path[-1]
        above = self.get(parent)
        if not above and parent and not self._has(parent):
            self.set(parent, {key: value})
            return
        node = self._node(parent)
        if not above:
            self._fill(parent, node, {key: value})
            return
        if not isinstance(above, dict):
            raise self._unsafe(f"{_written(parent)} isn't a mapping")
        if key not in above:
            self._add(node, str(key), value)
        else:
            entry = node.entry(key)
            if entry is None:
                raise self._unsafe("it comes from a merge key, <<")
            self._replace(node, entry, value)
        above[key] = copy.deepcopy(value)

    def append(self, path: Path, item: t.Any) -> None:
        """Add an item to the end of a list, which is created if missing."""
        if not self._has(path):
            self.set(path, [item])
            return
        above = self.get(path)
        if not above:
            self._fill(path, self._node(path), [item])
            return
        if not isinstance(above, list):
            raise self._unsafe(f"{_written(path)} isn't a list")
        self._add(self._node(path), None, item)
        above.append(copy.deepcopy(item))

    def delete(self, path: Path) -> None:
        """Remove a key or a list's item, and the empty collection that it leaves."""
        parent, key = path[:-1], path[-1]
        above, node = self.get(parent), self._node(parent)
        entry = node.entry(key)
        if entry is None:
            raise self._unsafe("it comes from a merge key, <<")
        if len(above) == 1 and (parent or node.flow):
            self._empty(parent, node, entry)
            return
        self._remove(node, node.entries.index(entry))
        del above[key]

    def checked(self) -> str:
        """Return the edited text.

        :raises BadInput: it doesn't hold exactly the old values, the requested ones, and all comments.
        """
        if self._asked == self._was:
            return self._before
        held = self._read(self._text) == self._asked
        if not held:
            raise self._unsafe("the edit would have changed more than it should")
        if self._comments - _comments(self._text, self._tree):
            raise self._unsafe("a comment would be lost")
        return self._text

    # ----------------------------------------------------------------- edits

    def _add(self, node: Node, key: str | None, value: t.Any) -> None:
        """Add an entry after the last one of a collection that isn't empty."""
        last = node.entries[-1]
        if node.flow:
            new = self._style.flow_entry(self._text, node, key, value)
            self._splice(last.end, last.end, self._style.separator(self._text, node) + new)
            return
        lines = self._style.block_entry(self._text, node, key, value)
        at = _line_end(self._text, last.end)
        self._splice(at, at, "".join(self._style.newline + line for line in lines))

    def _fill(self, path: Path, node: Node, value: dict[Step, t.Any] | list[t.Any]) -> None:
        """Write the first entry into an empty pair of brackets, or replace a null by it."""
        opening, closing = "[]" if isinstance(value, list) else "{}"
        inner = self._style.flow(value)[1:-1]
        if node.kind in (MAP, LIST):
            self._splice(node.start + 1, node.start + 1, f" {inner} ")
        else:
            word = self._text[node.start : node.end] or None
            blanks = next((blanks for blanks, was in WAS.items() if was == word), 2)
            before = " " if word is None else ""
            new = f"{before}{opening}{' ' * blanks}{inner} {closing}"
            self._splice(node.start, node.end, new)
        if path:
            self.get(path[:-1])[path[-1]] = copy.deepcopy(value)
        else:
            self._asked = copy.deepcopy(value)

    def _empty(self, path: Path, node: Node, last: Entry) -> None:
        """Remove a collection's only entry, and the collection unless ``_fill`` wrote it."""
        blanks = 0
        if node.flow:
            blanks = len(self._text[node.start + 1 : last.start])
            blanks = 0 if self._text[node.start + 1 : last.start].strip(" ") else blanks
        if blanks not in WAS:
            if path:
                self.delete(path)
            else:
                self._splice(node.start + 1, node.end - 1, "")
                self._asked.clear()
            return
        was = WAS[blanks]
        if was == "":
            after = self._text[last.end : node.end - 1]
            self._splice(node.start + 1, node.end - 1, after[1:] if after.startswith(" ") else after)
        elif was is None:
            self._splice(node.start - 1, node.end, "")
        else:
            self._splice(node.start, node.end, was)
        left: t.Any = None
        if was == "":
            left = {} if node.kind == MAP else []
        if path:
            self.get(path[:-1])[path[-1]] = left
        else:
            self._asked = left

    def _replace(self, node: Node, entry: Entry, value: t.Any) -> None:
        old = entry.value
        if not node.flow and old.kind in (MAP, LIST) and not old.flow:
            lines = self._style.block_value(node, value)
            self._splice(entry.key_end, old.end, lines)
            return
        new = self._style.scalar_like(old, value)
        if old.start == old.end:
            colon = ":" in self._text[entry.start : old.start] or entry.key is None
            new = (" " if colon else ": ") + new
        self._splice(old.start, old.end, new)

    def _remove(self, node: Node, number: int) -> None:
        """Remove one of several entries."""
        entry = node.entries[number]
        following = node.entries[number + 1] if number + 1 < len(node.entries) else None
        if node.flow:
            self._remove_flow(node, number)
            return
        start, end = _line_start(self._text, entry.start), _line_end(self._text, entry.end)
        if self._text[start : entry.start].strip():
            # It shares its line with the dash above it.
            if following is None:
                raise self._unsafe("it shares its line with something else")
            self._splice(entry.start, following.start, "")
            return
        # Comments on lines of their own stay.
        kept = "".join(self._style.newline + comment for comment in _comment_lines(self._text, self._tree, start, end))
        if start:
            before = start - (2 if self._text[:start].endswith("\r\n") else 1)
            self._splice(before, end, kept)
        else:
            skipped = re.match(r"\r\n|\n|", self._text[end:])
            self._splice(0, end + (skipped.end() if skipped and not kept else 0), kept.lstrip("\r\n"))

    def _remove_flow(self, node: Node, number: int) -> None:
        entry = node.entries[number]
        if number:
            before = node.entries[number - 1].end
            if "#" not in self._text[before : entry.start]:
                self._splice(before, entry.end, "")
                return
        if number + 1 < len(node.entries):
            after = node.entries[number + 1].start
            if "#" not in self._text[entry.end : after]:
                self._splice(entry.start, after, "")
                return
        self._splice(entry.start, entry.end, "")

    def _splice(self, start: int, end: int, new: str) -> None:
        self._line = _line_of(self._text, start)
        text = self._text[:start] + new + self._text[end:]
        try:
            self._tree = parse(text, self._json)
        except (yaml.YAMLError, Repeated, RecursionError) as error:
            raise self._unsafe("the edit would break it") from error
        self._text = text

    # ----------------------------------------------------------------- places

    def _has(self, path: Path) -> bool:
        above = self.get(path[:-1])
        if isinstance(above, list):
            return isinstance(path[-1], int) and path[-1] < len(above)
        return isinstance(above, dict) and path[-1] in above

    def _node(self, path: Path) -> Node:
        node = self._tree
        for step in path:
            self._line = _line_of(self._text, node.start)
            entry = node.entry(step)
            if entry is None:
                raise self._unsafe(f"{_written(path)} comes from a merge key, <<")
            node = entry.value
            self._line = _line_of(self._text, entry.start)
            if node.kind not in (MAP, LIST, SCALAR):
                raise self._unsafe(f"{_written(path)} is an alias")
        return node

    def _read(self, text: str) -> t.Any:
        """Convert by JSON, like Kubernetes: each alias becomes a copy."""
        if self._json:
            return json.loads(text)
        first, *others = [*yaml.load_all(text, Loader=Loader), None]
        if any(other is not None for other in others):
            second = re.search(r"(?m)^---(?=\s).*(?:\r?\n)+(?!\s*$)", text[1:])
            raise self._unparsable(_line_of(text, 1 + second.start()) if second else 1, "it holds several documents")
        if not isinstance(first, dict):
            raise self._unparsable(1, "it isn't a mapping")
        return json.loads(json.dumps(first, default=str))

    # ----------------------------------------------------------------- messages

    def _unparsable(self, line: int, reason: t.Any) -> BadInput:
        # A leading brace means JSON, for Kubernetes too.
        brace = self._before.lstrip("\ufeff \t\r\n").startswith("{")
        kind = " as JSON, because it begins with a brace" if brace else ""
        return BadInput(f"{self._file}, line {line}, can't be parsed{kind} ({reason}); it is left as it is")

    def _unsafe(self, reason: str) -> BadInput:
        return BadInput(
            f"{self._file}, line {self._line}, is written in a way that can't be edited safely ({reason}); "
            "it is left as it is"
        )


def _is_json(text: str) -> bool:
    """Return whether the text is JSON; it has to stay so, because kubelet expects JSON after a leading brace."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _comment_lines(text: str, tree: Node, start: int = 0, end: int | None = None) -> list[str]:
    """Return the comments on lines of their own; a line of a multi-line scalar is none.

    :param tree: of the whole text.
    :param start: of the part to search, and ``end`` its end; None for the end of the text.
    """

    def texts(node: Node) -> t.Iterator[tuple[int, int]]:
        if node.kind == SCALAR and "\n" in text[node.start : node.end]:
            yield node.start, node.end
        for entry in node.entries:
            yield from texts(entry.value)

    # In the order of their positions, as entries are.
    inside = [(-1, -1), *texts(tree)]
    return [
        match[0]
        for match in re.compile(r"(?m)^[ \t]*#[^\r\n]*").finditer(text, start, len(text) if end is None else end)
        if match.start() >= inside[bisect.bisect_left(inside, (match.start(),)) - 1][1]
    ]


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    """Return the position of a line's end, before its line break."""
    end = text.find("\n", at)
    if end < 0:
        return len(text)
    return end - 1 if text[end - 1 : end] == "\r" and end > at else end


def _comments(text: str, tree: Node) -> collections.Counter[str]:
    return collections.Counter(comment.strip() for comment in _comment_lines(text, tree))


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _written(path: Path) -> str:
    return ".".join(str(step) for step in path) or "it"


class Style:
    """The style of a file: its line breaks, its indentation, JSON or YAML."""

    def __init__(self, text: str, tree: Node, is_json: bool) -> None:
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self._json = is_json
        found: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        _measure(text, tree, found)

        def usual(what: str, otherwise: int) -> int:
            return found[what].most_common(1)[0][0] if found[what] else otherwise

        self._map, self._dash, self._gap = usual(MAP, 2), usual(LIST, 0), usual("gap", 2)
        wide = re.match(r"\s*\{\r?\n([ \t]*)", text)
        self._unit = wide[1] if wide else ""

    # ----------------------------------------------------------------- in brackets

    def flow(self, value: t.Any) -> str:
        if self._json:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, str) and "\n" in value:
            return json.dumps(value, ensure_ascii=False)
        written = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=WIDTH, allow_unicode=True)
        return str(written).rstrip("\n")[1:-1]

    def separator(self, text: str, node: Node) -> str:
        """Return the text between two entries."""
        if len(node.entries) > 1:
            *_others, before_last, last = node.entries
            between = text[before_last.end : last.start]
            return between if re.fullmatch(r"\s*,\s*", between) else ", "
        lead = text[node.start + 1 : node.entries[0].start]
        return f",{lead}" if "\n" in lead and not lead.strip() else ", "

    def flow_entry(self, text: str, node: Node, key: str | None, value: t.Any) -> str:
        """Return the text of a new entry of a node in braces or brackets.

        :param text: the document.
        :param node: has an entry already, whose spelling the new one takes.
        :param key: the entry's key; None in a list.
        """
        last = node.entries[-1]
        prefix = text[_line_start(text, last.start) : last.start]
        if self._json and self._unit and not prefix.strip():
            written = json.dumps(value, ensure_ascii=False, indent=self._unit)
            written = written.replace("\n", self.newline + prefix)
        else:
            written = self.flow(value)
        if key is None:
            return written
        colon = text[last.key_end - 1 : last.value.start] if self._json else ": "
        return self.flow(key) + (colon if re.fullmatch(r":[ \t]*", colon) else ": ") + written

    def scalar_like(self, old: Node, value: t.Any) -> str:
        """Return a value's text in the quotes of the value that it replaces."""
        if isinstance(value, str) and not self._json and value.isprintable():
            if old.style == "'":
                return "'" + value.replace("'", "''") + "'"
            if old.style == '"':
                return json.dumps(value, ensure_ascii=False)
        return self.flow(value)

    # ----------------------------------------------------------------- in lines

    def block_entry(self, text: str, node: Node, key: str | None, value: t.Any) -> list[str]:
        """Return the lines of a new entry of a node without braces.

        :param text: the document.
        :param node: has an entry already, whose indentation the new one takes.
        :param key: the entry's key; None in a list.
        """
        last = node.entries[-1]
        if key is not None:
            return self._keyed(" " * node.column, key, value)
        same_line = "\n" not in text[last.start : last.value.start] and last.value.start < last.value.end
        gap = last.value.start - last.start if same_line else self._gap
        return self._item(" " * node.column, gap, value)

    def block_value(self, node: Node, value: t.Any) -> str:
        """Return the text after a key's colon."""
        first, *more = self._keyed(" " * node.column, "k", value)
        return first.strip()[2:] + "".join(self.newline + line for line in more)

    def _keyed(self, indent: str, key: str, value: t.Any) -> list[str]:
        name = f"{indent}{self.flow(key)}:"
        if isinstance(value, dict) and value:
            inner = indent + " " * self._map
            return [name, *(line for item, what in value.items() for line in self._keyed(inner, str(item), what))]
        if isinstance(value, list) and value:
            inner = indent + " " * self._dash
            return [name, *(line for item in value for line in self._item(inner, self._gap, item))]
        return [f"{name} {self.flow(value)}"]

    def _item(self, indent: str, gap: int, value: t.Any) -> list[str]:
        dash = indent + "-".ljust(gap)
        inner = " " * len(dash)
        if isinstance(value, dict) and value:
            lines = [line for key, what in value.items() for line in self._keyed(inner, str(key), what)]
        elif isinstance(value, list) and value:
            lines = [line for item in value for line in self._item(inner, self._gap, item)]
        else:
            lines = [inner + self.flow(value)]
        return [dash + lines[0][len(dash) :], *lines[1:]]


def _measure(text: str, node: Node, counts: dict[str, collections.Counter[int]]) -> None:
    """Measure the indentation of block collections."""
    for entry in node.entries:
        value = entry.value
        if node.kind == MAP and value.kind in (MAP, LIST) and value.entries and not value.flow and not node.flow:
            counts[value.kind][value.column - node.column] += 1
        if node.kind == LIST and not node.flow and value.start < value.end:
            between = text[entry.start + 1 : value.start]
            if between and not between.strip(" "):
                counts["gap"][len(between) + 1] += 1
        _measure(text, value, counts)
