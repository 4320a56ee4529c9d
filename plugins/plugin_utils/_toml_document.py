# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A user's TOML file under edit: tomlkit keeps all that isn't edited as it is written, the standard library judges."""

from __future__ import annotations

import re
import tomllib
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError

try:
    import tomlkit
    from tomlkit.items import AoT, Array, Item, Key, SingleKey, Table, Whitespace
except ImportError:
    tomlkit = None  # type: ignore[assignment]

Path = tuple[str, ...]


class Unparsable(BadInput):
    """It isn't TOML."""


class Place(t.NamedTuple):
    """A key's value, a table's header, or a comment or blank line (no path), and the list that it stands in."""

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
    """A TOML file under edit; ``tree`` is what is asked for so far.

    :raises Unparsable: it isn't TOML.
    :raises BadInput: it (any method) is written in a way that can't be edited.
    """

    def __init__(self, path: str, text: str) -> None:
        if tomlkit is None:
            raise ShareError("container_runtime needs the Python package tomlkit on the controller")
        # containerd 1.x takes a byte order mark, for which TOML has no place.
        self._bom, text = ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)
        self._file, self._before = path, text
        self._line_end = "\r\n" if "\r\n" in text else "\n"
        try:
            self.tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r" \(?at line ([0-9]+).*$", str(error))
            line, reason = (found[1], str(error)[: found.start()]) if found else (text.count("\n") + 1, error)
            raise Unparsable(f"{path}, line {line}, can't be parsed ({reason}); it is left as it is") from error
        self._document = self._parsed(text if text.endswith("\n") or not text else text + self._line_end)

    def _parsed(self, text: str) -> tomlkit.TOMLDocument:
        """As tomlkit sees it, which doesn't understand every order of tables."""
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
        """All that is written, in its order; tables without a header of their own are left out."""

        def walk(body: list[tuple[Key | None, Item]], table: Path) -> t.Iterator[Place]:
            for key, item in body:
                path = (*table, key.key) if key else ()
                if not isinstance(item, Table) or not (item.is_super_table() or (key and key.is_dotted())):
                    yield Place(path, item, body)
                if isinstance(item, Table):
                    yield from walk(item.value.body, path)
                elif isinstance(item, AoT):
                    # Of several tables of one name only what stands between their keys.
                    for row in item.body:
                        yield from (one for one in walk(row.value.body, path) if not one.path)

        return list(walk(self._document.body, ()))

    def find(self, path: Path) -> Item | None:
        """A key's value, or a table that has a header, as it is written."""
        return next((one.item for one in self.places() if one.path == path), None)

    def comment(self, path: Path) -> str:
        """The comment beside a key or header, with its sign; nothing where there is none."""
        found = self.find(path)
        return found.trivia.comment if found is not None else ""

    def written(self, literal: str) -> Item:
        """A value as it was written once."""
        try:
            return tomlkit.value(literal)
        except tomlkit.exceptions.TOMLKitError as error:
            raise self.unsafe(f"{literal} isn't a value") from error

    def set(self, path: Path, value: t.Any, comment: str | None = None) -> None:
        """Set a key, and the comment beside it if one is given; the value may be an item as it was written once."""
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
            # One blank is ours where there was no comment; all others stay: taking ours out gives the bytes back.
            if comment and not trivia.comment:
                trivia.comment_ws += trivia.trail.removesuffix(end) + " "
                trivia.trail = end
            elif trivia.comment and not comment:
                trivia.comment_ws = trivia.comment_ws.removesuffix(" ")
            trivia.comment = comment
        self._asked(path[:-1])[path[-1]] = new.unwrap()

    def add_table(self, path: Path, values: dict[str, t.Any], comment: str = "") -> None:
        """Write a whole new table behind all that there is."""
        lines = ["" if self.text else None, f"[{tomlkit.key(path).as_string()}] {comment}".rstrip()]
        lines += [f"  {tomlkit.key(key).as_string()} = {tomlkit.item(values[key]).as_string()}" for key in values]
        self._document.body.extend(
            tomlkit.parse("".join(f"{one}{self._line_end}" for one in lines if one is not None)).body
        )
        self._asked(path).update(values)

    def listed(self, path: Path, item: str, present: bool) -> None:
        """Add a string to the end of an array, or take it out."""
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
        """Remove a key, or a table's header and keys with the blank line that was put above it."""
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
        """The edited text, known to hold what it held and what was asked for, and nothing else."""
        # A text without a line feed at its end stays one.
        text = self.text.removesuffix(self._line_end) if self._before[-1:] not in ("", "\n") else self.text
        try:
            done = tomllib.loads(text.removeprefix("\ufeff"))
        except tomllib.TOMLDecodeError as error:
            raise self.unsafe(f"the edit doesn't fit in: {error}") from error
        if _without_empty(done) != _without_empty(self.tree):
            raise self.unsafe("the edit would have changed more than it should")
        if text != self._bom + self._before:
            # What can't be read again couldn't be taken out again.
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
        """The error that says why this file stays as it is."""
        return BadInput(f"{self._file} is written in a way that can't be edited safely ({reason}); it is left as it is")


def _without_empty(tree: t.Any) -> t.Any:
    """Tables that hold nothing don't matter: they come and go with what is put into them."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: _without_empty(value) for key, value in tree.items()}
    return {key: value for key, value in inner.items() if value != {}}
