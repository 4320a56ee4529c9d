# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Edit a user's TOML file: tomlkit preserves everything that isn't edited, the standard library validates the result.

A key that this collection sets carries a comment with its old value, by which it is restored::

    default_runtime_name = "nvidia" # kubegpu.share, was "runc"
"""

from __future__ import annotations

import re
import tomllib
import typing as t

from ...module_utils._core.errors import BadInput, ShareError
from ...module_utils._core.types import JsonObject

try:
    import tomlkit
    from tomlkit.items import AoT, Array, Item, Key, SingleKey, Table, Whitespace
except ImportError:
    tomlkit = None  # type: ignore[assignment]

Path = tuple[str, ...]

MARK = "# kubegpu.share"
_MARKED = re.compile(rf"(.*?)\s*{re.escape(MARK)}(?:, was (.+))?")


class Unparsable(BadInput):
    """The file isn't TOML."""


class Mark(t.NamedTuple):
    """The comment beside a key that this collection set.

    :param comment: the user's own comment before it.
    :param was: the old value as it was written; None where there was none.
    """

    comment: str
    was: str | None


class Place(t.NamedTuple):
    """A value, a table's header, or a comment or blank line (with an empty path), and the list that holds it."""

    path: Path
    item: Item
    body: list[tuple[Key | None, Item]]

    @property
    def header(self) -> bool:
        return isinstance(self.item, Table)

    def replace(self, *items: Item) -> None:
        number = next(n for n, (_key, one) in enumerate(self.body) if one is self.item)
        self.body[number : number + 1] = [(self.body[number][0], one) for one in items]


class Document:
    """A TOML file under edit; ``tree`` holds the values that the edited text has to have.

    :raises Unparsable: it isn't TOML.
    :raises BadInput: (any method) it is written in a way that can't be edited safely.
    """

    def __init__(self, path: str, text: str) -> None:
        if tomlkit is None:
            raise ShareError("container_runtime needs the Python package tomlkit on the controller")
        # containerd 1.x accepts a byte order mark, which TOML doesn't allow.
        self._bom, text = ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)
        self._file, self._before = path, text
        self._line_end = "\r\n" if "\r\n" in text else "\n"
        self.tree = parse(path, text)
        self._document = self._parsed(text if text.endswith("\n") or not text else text + self._line_end)

    def _parsed(self, text: str) -> tomlkit.TOMLDocument:
        """Parse by tomlkit, which doesn't support every order of tables."""
        try:
            return tomlkit.parse(text)
        except tomlkit.exceptions.TOMLKitError as error:
            raise self.unsafe(str(error)) from error

    @property
    def text(self) -> str:
        return self._bom + self._document.as_string()

    def get(self, path: Path) -> t.Any:
        tree: t.Any = self.tree
        for part in path:
            tree = tree.get(part) if isinstance(tree, dict) else None
        return tree

    def places(self) -> list[Place]:
        """List everything that is written, in its order; tables without a header of their own are left out."""

        def walk(body: list[tuple[Key | None, Item]], table: Path) -> t.Iterator[Place]:
            for key, item in body:
                path = (*table, key.key) if key else ()
                if not isinstance(item, Table) or not (item.is_super_table() or (key and key.is_dotted())):
                    yield Place(path, item, body)
                if isinstance(item, Table):
                    yield from walk(item.value.body, path)
                elif isinstance(item, AoT):
                    # Of an array of tables only the comments and blank lines.
                    for row in item.body:
                        yield from (one for one in walk(row.value.body, path) if not one.path)

        return list(walk(self._document.body, ()))

    def find(self, path: Path) -> Item | None:
        """Return a key's value, or a table with a header, as it is written."""
        return next((one.item for one in self.places() if one.path == path), None)

    def comment(self, path: Path) -> str:
        """Return the comment beside a key or header, with its sign, or nothing."""
        found = self.find(path)
        return found.trivia.comment if found is not None else ""

    def mark(self, path: Path) -> Mark | None:
        """Return this collection's mark beside a key, or None."""
        found = _MARKED.fullmatch(self.comment(path))
        was = re.sub(r"\\(.)", lambda one: {"n": "\n", "r": "\r"}.get(one[1], one[1]), found[2] or "") if found else ""
        return Mark(found[1], was or None) if found else None

    def put(self, path: Path, value: t.Any) -> None:
        """Set a key and note its old value beside it."""
        now = self.get(path)
        if now == value:
            return
        if now is not None and type(now) is not type(value):
            raise self.unsafe(f"{'.'.join(path)} isn't a {'list' if isinstance(value, list) else type(value).__name__}")
        there = self.find(path)
        if there is None:
            self.set(path, value, MARK)
        elif self.mark(path):
            self.set(path, value)
        else:
            was = there.as_string().strip().replace("\\", r"\\").replace("\n", r"\n").replace("\r", r"\r")
            self.set(path, value, f"{self.comment(path)} {MARK}, was {was}".strip())

    def restore(self, path: Path) -> None:
        """Undo ``put``: restore a marked key's old value, or remove the key."""
        mark = self.mark(path)
        if mark and mark.was:
            self.set(path, self.item(mark.was), mark.comment)
        elif mark:
            self.delete(path)

    def item(self, literal: str) -> Item:
        """Parse a value as it was written."""
        try:
            return tomlkit.value(literal)
        except tomlkit.exceptions.TOMLKitError as error:
            raise self.unsafe(f"{literal} isn't a value") from error

    def set(self, path: Path, value: t.Any, comment: str | None = None) -> None:
        """Set a key, and the comment beside it if one is given.

        :param value: a plain value, or an item that is kept as it is written.
        """
        new = value if isinstance(value, Item) else tomlkit.item(value)
        table = self.find(path[:-1]) if path[1:] else None
        if there := next((one for one in self.places() if one.path == path), None):
            new.trivia.__dict__.update(vars(there.item.trivia))
            there.replace(new)
        elif isinstance(table, Table) or not path[1:]:
            body = table.value.body if isinstance(table, Table) else self._document.body
            keys = [n for n, (key, one) in enumerate(body) if key and not isinstance(one, (AoT, Table))]
            deeper = "" if table is None else table.trivia.indent + "  "
            new.trivia.indent = body[keys[-1]][1].trivia.indent if keys else deeper
            new.trivia.trail = self._line_end
            body.insert(keys[-1] + 1 if keys else 0, (SingleKey(path[-1]), new))
        else:
            self.add_table(path[:-1], {path[-1]: value}, comment or "")
            return
        if "\n" in (comment or ""):
            raise self.unsafe(f"{'.'.join(path)} spans lines")
        if comment is not None:
            trivia, end = new.trivia, new.trivia.trail.lstrip(" \t")
            # Before a new comment one blank is ours; the user's stay, so that removing ours restores the bytes.
            if comment and not trivia.comment:
                trivia.comment_ws += trivia.trail.removesuffix(end) + " "
                trivia.trail = end
            elif trivia.comment and not comment:
                trivia.comment_ws = trivia.comment_ws.removesuffix(" ")
            trivia.comment = comment
        self._asked(path[:-1])[path[-1]] = new.unwrap()

    def add_table(self, path: Path, values: JsonObject, comment: str = "") -> None:
        """Append a new table to the end of the file."""
        lines = ["" if self.text else None, f"[{tomlkit.key(path).as_string()}] {comment}".rstrip()]
        lines += [f"  {tomlkit.key(key).as_string()} = {tomlkit.item(values[key]).as_string()}" for key in values]
        self._document.body.extend(
            tomlkit.parse("".join(f"{one}{self._line_end}" for one in lines if one is not None)).body
        )
        self._asked(path).update(values)

    def listed(self, path: Path, item: str, present: bool) -> None:
        """Add a string to the end of an array, or remove it."""
        array, asked = self.find(path), self.get(path)
        if not isinstance(array, Array):
            raise self.unsafe(f"{'.'.join(path)} isn't an array")
        if present:
            array.append(item)
            asked.append(item)
        while not present and item in asked:
            array.remove(item)
            asked.remove(item)

    def delete(self, path: Path) -> None:
        """Remove a key, or a table's header and keys with the blank line that ``add_table`` put above it."""
        places = self.places()
        number = next(n for n, one in enumerate(places) if one.path == path)
        item, above = places[number].item, places[number - 1]
        if not isinstance(item, Table):
            self._asked(path[:-1]).pop(path[-1])
            places[number].replace()
            return
        for one in places:
            if one.path and one.body is item.value.body and not isinstance(one.item, Table):
                self._asked(path).pop(one.path[-1])
        headless = tomlkit.table(is_super_table=True)
        headless.value.body.extend(one for one in item.value.body if isinstance(one[1], Table))
        places[number].replace(headless)
        if number and isinstance(above.item, Whitespace):
            above.replace(Whitespace(above.item.s.replace(self._line_end, "", 1)))

    def checked(self) -> str:
        """Return the edited text.

        :raises BadInput: it doesn't hold exactly the old values and the requested ones.
        """
        # A text without a final line feed keeps none.
        text = self.text.removesuffix(self._line_end) if self._before[-1:] not in ("", "\n") else self.text
        try:
            done = tomllib.loads(text.removeprefix("\ufeff"))
        except tomllib.TOMLDecodeError as error:
            raise self.unsafe(f"the edited text isn't valid: {error}") from error
        if _without_empty(done) != _without_empty(self.tree):
            raise self.unsafe("the edit would have changed more than it should")
        if text != self._bom + self._before:
            # A text that tomlkit can't parse again couldn't be undone.
            self._parsed(text.removeprefix("\ufeff"))
        return text

    def _asked(self, table: Path) -> t.Any:
        tree = self.tree
        for part in table:
            tree = tree.setdefault(part, {})
            if not isinstance(tree, dict):
                raise self.unsafe(f"{'.'.join(table)} isn't a table")
        return tree

    def unsafe(self, reason: str) -> BadInput:
        """Create the error for a file that can't be edited."""
        return BadInput(f"{self._file} is written in a way that can't be edited safely ({reason}); it is left as it is")


def parse(path: str, text: str) -> JsonObject:
    """Parse a file.

    :param path: for messages.
    :raises Unparsable: it isn't TOML; the message has the line.
    """
    if "\ufffd" in text:
        line = text[: text.index("\ufffd")].count("\n") + 1
        raise Unparsable(f"{path}, line {line}, isn't UTF-8; it is left as it is")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(?at line ([0-9]+).*$", str(error))
        number, reason = (found[1], str(error)[: found.start()]) if found else (text.count("\n") + 1, error)
        raise Unparsable(f"{path}, line {number}, can't be parsed ({reason}); it is left as it is") from error


def _without_empty(tree: t.Any) -> t.Any:
    """Remove empty tables, which come and go with their content."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: _without_empty(value) for key, value in tree.items()}
    return {key: value for key, value in inner.items() if value != {}}
