# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Edit a YAML text by replacing, inserting and deleting a few characters; every other byte stays as it is.

Nothing here is trusted: ``Document.checked`` parses the result again, and an edit that did anything but what was asked
(because the text is written in a way that isn't foreseen here) is refused instead of written.
"""

from __future__ import annotations

import copy
import json
import typing as t

import yaml

Step = t.Union[str, int]
Path = tuple[Step, ...]


class Unparsable(Exception):
    """The text isn't one YAML document that is a mapping.

    :param line: where, counted from 1; 0 where the parser doesn't say.
    """

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


class Unforeseen(Exception):
    """The text is YAML, but written in a way that can't be edited here."""


class Document:
    """A YAML text under edit.

    :raises Unparsable: the text isn't YAML, or isn't a mapping.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._expected = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 0
            raise Unparsable(error.problem or str(error), line) from error
        except yaml.YAMLError as error:
            raise Unparsable(str(error), 0) from error
        if not isinstance(self._expected, dict):
            raise Unparsable("it isn't a mapping", 1)

    # ----------------------------------------------------------------- reading

    def get(self, path: Path) -> t.Any:
        """The value at a path of what is asked for so far, or None."""
        value: t.Any = self._expected
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    # ----------------------------------------------------------------- editing

    def set(self, path: Path, value: t.Any) -> None:
        """Set a scalar or a structure under a mapping's key; mappings above it are made."""
        parent, key = path[:-1], path[-1]
        if self.get(parent) is None and parent:
            self.set(parent, {key: value})
            return
        there = self._find(path)
        node = self._node(parent)
        self._expect(parent)[key] = copy.deepcopy(value)
        if there is None:
            self._add(node, _render({key: value}), f"{_flow(key)}: {_flow(value)}")
        elif node.flow_style:
            self._splice(there.start_mark.index, there.end_mark.index, _flow(value))
        elif isinstance(there, yaml.ScalarNode) and not isinstance(value, (dict, list)):
            self._splice(there.start_mark.index, there.end_mark.index, _scalar(value))
        else:
            indent = node.start_mark.column
            colon = self.text.index(":", _key(node, key).end_mark.index) + 1
            self._splice(colon, _end(there), _under(value, indent))

    def append(self, path: Path, item: t.Any) -> None:
        """Add an item to the end of a list, which is made where there is none."""
        if not self.get(path):
            self.set(path, [item])
            return
        node = self._node(path)
        self._expect(path).append(copy.deepcopy(item))
        self._add(node, _render([item]), _flow(item))

    def delete(self, path: Path) -> None:
        """Remove a key or a list's item with its lines; a list or mapping that it leaves empty goes too."""
        parent = self.get(path[:-1])
        if len(parent) == 1 and len(path) > 1:
            self.delete(path[:-1])
            return
        node = self._node(path[:-1])
        there = self._node(path)
        held = self._expect(path[:-1])
        del held[path[-1]]
        if node.flow_style:
            self._delete_flow(node, there)
            return
        start = there.start_mark.index
        if isinstance(node, yaml.MappingNode):
            start = _key(node, path[-1]).start_mark.index
        begin = self.text.rfind("\n", 0, start) + 1
        lead = self.text[begin:start]
        end = self._line_end(_end(there))
        if not lead.strip() or (lead.strip() == "-" and isinstance(node, yaml.SequenceNode)):
            self._splice(begin, end, "")
            return
        # The first key of a list's item stands behind the dash: the next key takes its place.
        following = self.text[end:]
        stripped = following.lstrip(" ")
        if len(following) - len(stripped) != len(lead):
            raise Unforeseen(f"{_dotted(path)} is written in an unusual way")
        self._splice(start, end + len(lead), "")

    def checked(self) -> str:
        """The edited text, known to hold what it held and what was asked for, and nothing else.

        :raises Unforeseen: it doesn't.
        """
        try:
            done = yaml.safe_load(self.text)
        except yaml.YAMLError as error:
            raise Unforeseen("the edit doesn't fit in") from error
        if done != self._expected:
            raise Unforeseen("the edit would have changed more than it should")
        return self.text

    # ----------------------------------------------------------------- the inside

    def _find(self, path: Path) -> t.Any:
        node: t.Any = yaml.compose(self.text, Loader=yaml.SafeLoader)
        for step in path:
            if isinstance(node, yaml.MappingNode):
                found = [v for k, v in node.value if k.value == step]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                found = node.value[step : step + 1]
            else:
                found = []
            if not found:
                return None
            node = found[0]
        return node

    def _node(self, path: Path) -> t.Any:
        node = self._find(path)
        if node is None:
            raise Unforeseen(f"{_dotted(path)} isn't there")
        return node

    def _expect(self, path: Path) -> t.Any:
        value: t.Any = self._expected
        for step in path:
            value = value[step]
        return value

    def _add(self, node: t.Any, block: str, flow: str) -> None:
        """Add an entry at the end of a mapping or list, in the style in which that is written."""
        if node.flow_style:
            position = node.end_mark.index - 1
            body = self.text[node.start_mark.index + 1 : position].rstrip()
            gap = ", " if body and not body.endswith(",") else " " if body else ""
            position = node.start_mark.index + 1 + len(body)
            self._splice(position, position, gap + flow)
            return
        if not isinstance(node, yaml.CollectionNode):
            raise Unforeseen("a scalar stands where a mapping or a list should")
        position = self._line_end(_end(node))
        lead = "" if not position or self.text[position - 1] == "\n" else "\n"
        self._splice(position, position, lead + _indented(block, node.start_mark.column))

    def _delete_flow(self, node: t.Any, there: t.Any) -> None:
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(one, one) for one in node.value]
        entries = [(key.start_mark.index, value.end_mark.index) for key, value in pairs]
        number = next(n for n, (_s, end) in enumerate(entries) if end == there.end_mark.index)
        if len(entries) == 1:
            self._splice(*entries[0], "")
        elif number:
            self._splice(entries[number - 1][1], entries[number][1], "")
        else:
            self._splice(entries[0][0], entries[1][0], "")

    def _line_end(self, position: int) -> int:
        found = self.text.find("\n", position)
        return len(self.text) if found < 0 else found + 1

    def _splice(self, start: int, end: int, new: str) -> None:
        self.text = self.text[:start] + new + self.text[end:]


def _key(node: t.Any, key: Step) -> t.Any:
    return next(k for k, _v in node.value if k.value == key)


def _end(node: t.Any) -> int:
    """Where the last character of a node is; a block's own end mark lies behind the comments that follow it."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        end = node.end_mark.index
        if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
            # Ends at the start of the next line.
            return int(end) - 1
        return int(end)
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def _scalar(value: t.Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=1 << 20)).split("\n")[0]


def _flow(value: t.Any) -> str:
    # JSON is YAML's flow style too, and stays readable for whom the whole file is JSON.
    return json.dumps(value, ensure_ascii=False)


def _render(value: t.Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=False, sort_keys=False, width=1 << 20))


def _indented(block: str, columns: int) -> str:
    return "".join(" " * columns + line if line.strip() else line for line in block.splitlines(keepends=True))


def _under(value: t.Any, indent: int) -> str:
    """A value as it stands behind its key's colon."""
    if isinstance(value, (dict, list)) and value:
        columns = indent if isinstance(value, list) else indent + 2
        return "\n" + _indented(_render(value), columns).rstrip("\n")
    return " " + _flow(value)


def _dotted(path: Path) -> str:
    return ".".join(str(step) for step in path)
