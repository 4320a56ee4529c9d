# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A user's YAML file under edit: ruamel.yaml keeps comments and order; PyYAML, reading like Kubernetes, judges."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import json
import re
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError

try:
    import ruamel.yaml
    from ruamel.yaml.constructor import RoundTripConstructor
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.representer import RoundTripRepresenter
    from ruamel.yaml.tokens import CommentToken
except ImportError:
    ruamel = None  # type: ignore[assignment]

Step = str | int
Path = tuple[Step, ...]


class Document:
    """A YAML file with one mapping under edit.

    :raises BadInput: it isn't that, or (``checked``) is written in a way that can't be edited.
    """

    def __init__(self, path: str, text: str) -> None:
        if ruamel is None:
            raise ShareError("kube_scheduler needs the Python package ruamel.yaml on the controller")
        self._file, self._before = path, text
        try:
            # What is asked for so far.
            self._asked = _read(text)
            # ruamel.yaml drops what stands above the document's first line.
            self._head = re.match(r"(?:(?:[ \t]*(?:#.*)?\n)*---[ \t]*(?:#.*)?\n)?", text)[0]  # type: ignore[index]
            self._yaml = _round_trip()
            self._tree = self._yaml.load(text[len(self._head) :])
        except (yaml.YAMLError, ruamel.yaml.error.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            above = 0 if isinstance(error, yaml.YAMLError) else self._head.count("\n")
            line = above + mark.line + 1 if mark else 1
            raise self._unparsable(line, getattr(error, "problem", None) or error) from error
        if not isinstance(self._asked, dict):
            raise self._unparsable(1, "it isn't a mapping")
        self._yaml.indent(**_indents(self._tree))

    def get(self, path: Path) -> t.Any:
        """The value at a path of what is asked for so far, or None."""
        value: t.Any = self._asked
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def set(self, path: Path, value: t.Any) -> None:
        """Set what stands under a mapping's key; mappings above it are made."""
        parent, key = path[:-1], path[-1]
        if parent and not self.get(parent):
            self.set(parent, {key: value})
            return
        self.get(parent)[key] = copy.deepcopy(value)
        node = self._node(parent)
        with _added(node):
            node[key] = self._new(value)

    def append(self, path: Path, item: t.Any) -> None:
        """Add an item to the end of a list, which is made where there is none."""
        if not self.get(path):
            self.set(path, [item])
            return
        self.get(path).append(copy.deepcopy(item))
        node = self._node(path)
        with _added(node):
            node.append(self._new(item))

    def delete(self, path: Path) -> None:
        """Remove a key or a list's item; a list or mapping that it leaves empty goes too."""
        parent, key = path[:-1], path[-1]
        if len(self.get(parent)) == 1 and parent:
            self.delete(parent)
            return
        node = self._node(parent)
        number = _keys(node).index(key)
        if number and _block(node):
            _hand_on(_last_line(node, number), _last_line(node, number - 1))
        del self.get(parent)[key], node[key]

    def checked(self) -> str:
        """The edited text, known to hold what it held and what was asked for, and nothing else."""
        if self._asked == _read(self._before):
            return self._before
        if _is_json(self._before):
            indent = re.match(r"\s*\{\r?\n( *)", self._before)
            text = json.dumps(self._asked, ensure_ascii=False, indent=len(indent[1]) if indent else None)
            return text + ("\n" if self._before.endswith("\n") else "")
        stream = io.StringIO()
        self._yaml.dump(self._tree, stream)
        text = self._head + stream.getvalue()
        try:
            held = _read(text) == self._asked
        except yaml.YAMLError:
            held = False
        wrong = "" if held else "the edit would have changed more than it should"
        if _comments(self._before) - _comments(text):
            wrong = wrong or "a comment would be lost"
        if wrong:
            raise BadInput(
                f"{self._file} is written in a way that can't be edited safely ({wrong}); it is left as it is"
            )
        return text

    def _node(self, path: Path) -> t.Any:
        node = self._tree
        for step in path:
            node = node[step]
        return node

    def _new(self, value: t.Any) -> t.Any:
        """A value as PyYAML would write it: with quotes where YAML 1.1 needs them."""
        return self._yaml.load(yaml.safe_dump(value, sort_keys=False, default_flow_style=False, width=1 << 20))

    def _unparsable(self, line: int, reason: t.Any) -> BadInput:
        return BadInput(f"{self._file}, line {line}, can't be parsed ({reason}); it is left as it is")


def _read(text: str) -> t.Any:
    """By way of JSON, like Kubernetes: an anchor's copies are values of their own."""
    return json.loads(json.dumps(yaml.safe_load(text), default=str))


def _is_json(text: str) -> bool:
    """kubelet and kube-scheduler take what begins with a brace for JSON: it has to stay that."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _comments(text: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(r"(?m)^[ \t]*(#.*?)[ \t]*$", text))


def _round_trip() -> t.Any:
    """ruamel.yaml's parser and writer; nulls and booleans, too, stay as they are written."""

    class Constructor(RoundTripConstructor):
        pass

    class Representer(RoundTripRepresenter):
        pass

    for kind in ("null", "bool"):
        tag = f"tag:yaml.org,2002:{kind}"
        written = type(kind, (str,), {"tag": tag})
        Constructor.add_constructor(tag, lambda _self, node, written=written: written(node.value))
        Representer.add_representer(written, lambda self, value: self.represent_scalar(value.tag, str(value)))
    document = ruamel.yaml.YAML(typ="rt")
    document.Constructor, document.Representer = Constructor, Representer
    document.preserve_quotes, document.width = True, 1 << 20
    document.brace_single_entry_mapping_in_flow_sequence = True
    return document


def _keys(node: t.Any) -> list[t.Any]:
    return list(node) if isinstance(node, dict) else list(range(len(node)))


def _block(node: t.Any) -> bool:
    return hasattr(node, "fa") and bool(node) and not node.fa.flow_style()


def _indents(tree: t.Any) -> dict[str, int]:
    """The indentation that is used most: of mappings, of lists' items, and of their dashes."""
    mappings: collections.Counter[int] = collections.Counter()
    lists: collections.Counter[tuple[int, int]] = collections.Counter()

    def walk(node: t.Any) -> None:
        for key, inner in ((key, node[key]) for key in _keys(node) if _block(node[key])):
            # What has an anchor begins there, on its key's line.
            if hasattr(node, "keys") and inner.lc.line > node.lc.key(key)[0]:
                offset = inner.lc.col - node.lc.col
                if hasattr(inner, "keys"):
                    mappings[offset] += 1
                else:
                    lists[inner.lc.item(0)[1] - node.lc.col, offset] += 1
            walk(inner)

    walk(tree)
    [(mapping, _count)] = mappings.most_common(1) or [(2, 0)]
    [((sequence, offset), _count)] = lists.most_common(1) or [((2, 0), 0)]
    return {"mapping": mapping, "sequence": sequence, "offset": offset}


# ruamel.yaml hangs comments on the scalar above them; here they stay with what they stand above.

Line = tuple[list[t.Any], int]


def _last_line(node: t.Any, number: int = -1) -> Line:
    """Where the comment lies that follows a node's entry."""
    key = _keys(node)[number]
    if _block(node[key]):
        return _last_line(node[key])
    return node.ca.items.setdefault(key, [None, None, None, None]), 2 if isinstance(node, dict) else 0


def _hand_on(old: Line, new: Line) -> None:
    """Move the comments on the lines below one entry to those below another."""
    (above, old_slot), (after, new_slot) = old, new
    beside, _feed, below = above[old_slot].value.partition("\n") if above[old_slot] else ("", "", "")
    if below and above is not after:
        mark = above[old_slot].start_mark
        above[old_slot] = CommentToken(beside + "\n", mark, None) if beside else None
        there = after[new_slot] or CommentToken("\n", CommentMark(0), None)
        after[new_slot] = CommentToken(there.value + below, there.start_mark, None)


@contextlib.contextmanager
def _added(node: t.Any) -> t.Iterator[None]:
    """Comments below a mapping or list stay below what is added to its end."""
    before = _last_line(node) if _block(node) else None
    yield
    if before is not None:
        _hand_on(before, _last_line(node))
