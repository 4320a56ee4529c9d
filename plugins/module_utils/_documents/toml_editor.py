# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Edit a user's TOML file: only the bytes of edited statements change, and the standard library validates the result.

A key that this collection sets carries a comment with its old value, by which it is restored. Keys within an inline
table can't carry one, so the comment stands behind the whole table and names them::

    default_runtime_name = "nvidia" # kubegpu.share, was "runc"
    containerd = { default_runtime_name = "nvidia" } # kubegpu.share, set default_runtime_name, was {}
"""

from __future__ import annotations

import copy
import re
import typing as t

from .._core.errors import BadInput
from .._core.libraries import tomllib
from .._core.types import JsonObject
from . import toml_tree
from .toml_tree import ARRAY, BLANK, HEADER, PAIR, Statement, common, written, written_key

Path = toml_tree.Path

MARK = "# kubegpu.share"
# Levels of tables and arrays.
DEEPEST = 100
_MARKED = re.compile(rf"(.*?) ?{re.escape(MARK)}(.*)")
_WAS = re.compile(r"(?:, was (.+?))?[ \t]*")
_BOM = "\ufeff"


class Unparsable(BadInput):
    """The file isn't TOML."""


class Mark(t.NamedTuple):
    """The comment beside a key that this collection set.

    :param comment: the user's own comment before it.
    :param was: the old value as it was written; None where there was none.
    :param keys: of an inline table, those that this collection set; empty where it set the whole value.
    """

    comment: str
    was: str | None
    keys: tuple[Path, ...] = ()

    @property
    def text(self) -> str:
        """Return the whole comment."""
        keys = ", set " + ", ".join(map(written_key, self.keys)) if self.keys else ""
        was = (self.was or "").replace("\\", r"\\").replace("\n", r"\n").replace("\r", r"\r")
        return (f"{self.comment} " if self.comment else "") + MARK + keys + (f", was {was}" if was else "")


class Place(t.NamedTuple):
    """A key or a table's header that is written."""

    path: Path
    header: bool


class Literal(t.NamedTuple):
    """A value and how it is written."""

    text: str
    value: t.Any


class Document:
    """A TOML file under edit.

    :ivar text: as it is edited.
    :ivar tree: the values that the edited text has to have.
    :raises Unparsable: it isn't TOML.
    :raises BadInput: (any method) it is written in a way that can't be edited safely.
    """

    def __init__(self, path: str, text: str) -> None:
        self._file, self._before = path, text
        self._line_end = "\r\n" if "\r\n" in text else "\n"
        self.tree = parse(path, text)
        self._bom = _BOM if text.startswith(_BOM) else ""
        body = text[len(self._bom) :]
        # A text without a final line feed keeps none, see ``text``.
        self._open = body[-1:] not in ("", "\n")
        self._scan(body + self._line_end if self._open else body)

    def _scan(self, text: str) -> None:
        self._text = text
        self.text = self._bom + (text.removesuffix(self._line_end) if self._open else text)
        try:
            self._statements = toml_tree.scan(text)
        except (toml_tree.Unexpected, RecursionError) as error:
            raise self.unsafe(str(error)) from error
        self._places: dict[Path, Statement] = {}
        for statement in self._statements:
            if statement.path:
                self._places.setdefault(statement.path, statement)

    def get(self, path: Path) -> t.Any:
        tree: t.Any = self.tree
        for part in path:
            tree = tree.get(part) if isinstance(tree, dict) else None
        return tree

    def places(self) -> list[Place]:
        """List everything that is written, in its order; tables without a header of their own are left out."""
        return [Place(path, place.kind == HEADER) for path, place in self._places.items()]

    def find(self, path: Path) -> Literal | None:
        """Return a key's value as it is written, or None."""
        there = self._places.get(path)
        if there is None or there.value is None:
            return None
        return Literal(self._text[there.value.start : there.value.end], self.get(path))

    def comment(self, path: Path) -> str:
        """Return the comment beside a key or header, with its sign, or nothing."""
        there = self._places.get(path)
        return self._comment(there).rstrip(" \t") if there else ""

    def mark(self, path: Path) -> Mark | None:
        """Return this collection's mark beside a key, or None."""
        there = self._places.get(path)
        match = _MARKED.fullmatch(self._comment(there)) if there else None
        try:
            keys, at = _keys(match[2]) if match else ((), 0)
        except toml_tree.Unexpected:
            return None
        rest = _WAS.fullmatch(match[2], at) if match else None
        if match is None or rest is None:
            return None
        was = re.sub(r"\\(.)", lambda one: {"n": "\n", "r": "\r"}.get(one[1], one[1]), rest[1] or "")
        return Mark(match[1], was or None, keys)

    def put(self, path: Path, value: t.Any) -> None:
        """Set a key and note its old value beside it."""
        now = self.get(path)
        if now == value:
            return
        if now is not None and type(now) is not type(value):
            raise self.unsafe(f"{'.'.join(path)} isn't a {'list' if isinstance(value, list) else type(value).__name__}")
        there = self._places.get(path)
        if there is None:
            self.set(path, value, MARK)
        elif self.mark(path):
            self.set(path, value)
        else:
            self.set(path, value, Mark(self._comment(there), self._literal(there)).text)

    def restore(self, path: Path) -> None:
        """Undo ``put``: restore a marked key's old value, or remove the key; in an inline table all marked keys."""
        there = self._places.get(path) or self._inline(path)
        mark = self.mark(there.path) if there else None
        if there is None or mark is None:
            return
        if mark.keys:
            self._restore_inline(there, mark, path)
        elif there.path == path and mark.was:
            self.set(path, self.item(mark.was), mark.comment)
        elif there.path == path:
            self.delete(path)

    def restore_all(self, roots: t.Container[str] | None = None) -> None:
        """Remove all marked tables, and restore all marked keys.

        :param roots: the first parts of the keys' paths to restore; None for all.
        """
        for place in reversed(self.places() if MARK in self.text else []):
            if place.header and self.comment(place.path) == MARK:
                self.delete(place.path)
            elif not place.header and (roots is None or place.path[0] in roots):
                self.restore(place.path)

    def item(self, literal: str) -> Literal:
        """Parse a value as it was written."""
        try:
            value = tomllib.loads(f"x = {literal}")
        except (ValueError, RecursionError):
            value = {}
        if list(value) != ["x"]:
            raise self.unsafe(f"{literal} isn't a value")
        return Literal(literal, value["x"])

    def set(self, path: Path, value: t.Any, comment: str | None = None) -> None:
        """Set a key, and the comment beside it if one is given.

        :param value: a plain value, or a literal that is kept as it is written.
        :param comment: for a key within an inline table, whether it is noted as ours.
        """
        new = value if isinstance(value, Literal) else Literal(written(value), value)
        if "\n" in (comment or ""):
            raise self.unsafe(f"{'.'.join(path)} spans lines")
        if there := self._places.get(path):
            self._replace(there, new.text, comment)
        elif there := self._inline(path):
            self._set_inline(there, path, new, bool(comment))
        elif spot := self._spot(path[:-1]):
            at, lead, above = spot
            line = f"{lead}{written_key(path[above:])} = {new.text} {comment or ''}".rstrip()
            self._splice(at, at, line + self._line_end)
        else:
            self.add_table(path[:-1], {path[-1]: new.value}, comment or "")
            return
        self._asked(path[:-1])[path[-1]] = copy.deepcopy(new.value)

    def add_table(self, path: Path, values: JsonObject, comment: str = "") -> None:
        """Append a new table to the end of the file.

        Below an inline table, and below one that is written by dotted keys, it is written like these.
        """
        if there := self._inline(path):
            self._set_inline(there, path, Literal(written(values), values), bool(comment))
            self._asked(path).update(copy.deepcopy(values))
            return
        if self._dotted(path):
            for key, value in values.items():
                self.set((*path, key), value, comment)
            return
        lines = [""] if self._text else []
        lines += [f"[{written_key(path)}] {comment}".rstrip()]
        lines += [f"  {written_key((key,))} = {written(value)}" for key, value in values.items()]
        self._splice(len(self._text), len(self._text), "".join(line + self._line_end for line in lines))
        self._asked(path).update(copy.deepcopy(values))

    def listed(self, path: Path, item: str, present: bool) -> None:
        """Add a string to the end of an array, or remove it."""
        there, asked = self._places.get(path), self.get(path)
        if there is None or there.value is None or there.value.kind != ARRAY:
            raise self.unsafe(f"{'.'.join(path)} isn't an array")
        if present:
            self._replace(there, toml_tree.array_add(self._text, there.value, written(item)))
            asked.append(item)
        while not present and item in asked:
            value = self._places[path].value
            if value:
                self._replace(self._places[path], toml_tree.array_remove(self._text, value, asked.index(item)))
            asked.remove(item)

    def put_table(self, path: Path, values: JsonObject) -> None:
        """Let a table have these keys: one of ours nothing else, and a user's beside his own, as by ``put``."""
        if self.get(path) is None:
            self.add_table(path, values, MARK)
            return
        ours = self.comment(path) == MARK
        for key, value in values.items():
            if not ours:
                self.put((*path, key), value)
            elif self.get((*path, key)) != value:
                self.set((*path, key), value)
        keys = [place.path[-1] for place in self.places() if place.path[:-1] == path and not place.header]
        for key in keys if ours else ():
            if key not in values:
                self.delete((*path, key))

    def add_item(self, path: Path, item: str) -> None:
        """Add a string to the end of an array, so that ``remove_item`` restores the bytes; a missing one is created."""
        items = self.get(path)
        if items is None:
            self.set(path, [item], MARK)
            return
        trial = Document(self._file, self.text)
        trial.listed(path, item, present=True)
        trial = Document(self._file, trial.text)
        trial.listed(path, item, present=False)
        if trial.text == self.text:
            self.listed(path, item, present=True)
        else:
            # Removing it from the list again would leave a comma or a blank.
            self.put(path, [*items, item])

    def remove_item(self, path: Path, item: str) -> None:
        """Undo ``add_item``, also where somebody else has changed the array since."""
        items, mark = self.get(path), self.mark(path)
        if not items or item not in items:
            return
        if mark and mark.was and items == [*self.item(mark.was).value, item]:
            self.restore(path)
            return
        self.listed(path, item, present=False)
        if mark and mark.was:
            # Its old value is obsolete.
            self.set(path, self.find(path), mark.comment)
        elif self.comment(path) == MARK:
            if self.get(path):
                self.set(path, self.find(path), "")
            else:
                self.delete(path)

    def delete(self, path: Path) -> None:
        """Remove a key, or a table's header and keys with the blank line that ``add_table`` put above it.

        Comments on lines of their own stay.
        """
        there = self._places[path]
        if there.kind != HEADER:
            self._asked(path[:-1]).pop(path[-1])
            self._splice(there.start, there.end, "")
            return
        number = self._statements.index(there)
        above = self._statements[number - 1] if number else None
        pairs = [statement for statement in self._statements if statement.kind == PAIR and statement.table == path]
        for pair in reversed(pairs):
            self._asked(pair.path[:-1]).pop(pair.path[-1])
            self._splice(pair.start, pair.end, "")
        blank = above and above.kind == BLANK and self._text[above.start : above.end] == self._line_end
        self._splice(above.start if above and blank else there.start, there.end, "")

    def checked(self) -> str:
        """Return the edited text.

        :raises BadInput: it doesn't hold exactly the old values and the requested ones.
        """
        text = self.text
        if text == self._before:
            return text
        try:
            done = tomllib.loads(text.removeprefix(_BOM))
        except (ValueError, RecursionError) as error:
            raise self.unsafe(f"the edited text isn't valid: {error}") from error
        if _comparable(done) != _comparable(self.tree):
            raise self.unsafe("the edit would have changed more than it should")
        return text

    # ----------------------------------------------------------------- edits

    def _splice(self, start: int, end: int, new: str) -> None:
        self._scan(self._text[:start] + new + self._text[end:])

    def _replace(self, there: Statement, new: str, comment: str | None = None) -> None:
        """Replace a pair's value, and its comment if one is given."""
        if there.value is None:
            raise self.unsafe(f"{'.'.join(there.path)} is a table")
        gap, old = self._text[there.value.end : there.comment[0]], self._comment(there)
        # Before a new comment one blank is ours; the user's stay, so that removing ours restores the bytes.
        if comment and not old:
            gap += " "
        elif comment == "" and old:
            gap = gap.removesuffix(" ")
        self._splice(there.value.start, there.comment[1], new + gap + (old if comment is None else comment))

    def _spot(self, table: Path) -> tuple[int, str, int] | None:
        """Return where a new key of a table goes; None where the table needs a header.

        :returns: the position, the text before the key, and the number of the key's parts that this text stands for.
        """
        there = self._places.get(table)
        if not table or (there and there.kind == HEADER):
            pairs = [statement for statement in self._statements if statement.kind == PAIR and statement.table == table]
            if pairs:
                return pairs[-1].end, self._text[pairs[-1].start : pairs[-1].key_start], len(table)
            if there is None:
                return 0, "", 0
            bracket = self._text.index("[", there.start)
            return there.end, self._text[there.start : bracket] + "  ", len(table)
        beside = self._dotted(table)
        if beside is None or beside.table is None:
            return None
        shared = common(beside.path[:-1], table)
        end = beside.keys[shared - len(beside.table) - 1]
        return beside.end, self._text[beside.start : end] + ".", shared

    def _dotted(self, table: Path) -> Statement | None:
        """Return the last pair whose dotted key defines a table or the nearest one above; None where a header does."""
        best, found = 0, None
        for statement in self._statements:
            shared = common(statement.path[:-1] if statement.kind == PAIR else statement.path, table)
            dotted = statement.kind == PAIR and statement.table is not None and shared > len(statement.table)
            if shared > best or (dotted and shared == best):
                best, found = shared, statement if dotted else None
        return found

    # ----------------------------------------------------------------- inline tables

    def _inline(self, path: Path) -> Statement | None:
        """Return the pair whose value holds a key, if any."""
        above = (self._places.get(path[:length]) for length in range(len(path) - 1, 0, -1))
        return next((statement for statement in above if statement and statement.value), None)

    def _set_inline(self, there: Statement, path: Path, new: Literal, ours: bool) -> None:
        """Set a value within a pair's inline table.

        :param there: the pair.
        :param path: the key.
        :param new: its value.
        :param ours: note the key, and the table as it was, beside the pair.
        """
        was, key = self._literal(there), path[len(there.path) :]
        mark, comment = self.mark(there.path), None
        if ours and mark is None:
            comment = Mark(self._comment(there), was, (key,)).text
        elif ours and mark and mark.keys and not any(key[: len(noted)] == noted for noted in mark.keys):
            comment = mark._replace(keys=(*mark.keys, key)).text
        self._replace(there, self._edited(there, was, key, new.text), comment)

    def _restore_inline(self, there: Statement, mark: Mark, path: Path) -> None:
        """Restore the marked keys of an inline table that are at or below a path."""
        was, text = self.item(mark.was or "{}"), self._literal(there)
        back = [key for key in mark.keys if (*there.path, *key)[: len(path)] == path]
        for key in back:
            old = toml_tree.inline_get(was.text, key)
            text = self._edited(there, text, key, old)
            above = self._asked((*there.path, *key[:-1]))
            above.pop(key[-1], None)
            above.update({key[-1]: self.item(old).value} if old is not None else {})
        # What somebody else has changed since stays.
        if _comparable(self.item(text).value) == _comparable(was.value):
            text = was.text
        left = tuple(key for key in mark.keys if key not in back)
        self._replace(there, text, mark._replace(keys=left).text if left else mark.comment)

    def _edited(self, there: Statement, table: str, key: Path, new: str | None) -> str:
        try:
            return toml_tree.inline_set(table, key, new)
        except toml_tree.Unexpected as error:
            raise self.unsafe(f"{'.'.join((*there.path, *key[:-1]))} isn't a table") from error

    # ----------------------------------------------------------------- places

    def _comment(self, there: Statement) -> str:
        return self._text[there.comment[0] : there.comment[1]]

    def _literal(self, there: Statement) -> str:
        return self._text[there.value.start : there.value.end] if there.value else ""

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


def new_file(head: str, tables: t.Iterable[tuple[Path, JsonObject]]) -> str:
    """Return the text of a new file.

    :param head: its first lines.
    :param tables: each with its plain keys, in their order.
    """
    document = Document("", head)
    for path, values in tables:
        document.add_table(path, values)
    return document.checked()


def parse(path: str, text: str) -> JsonObject:
    """Parse a file, with or without a byte order mark.

    TOML doesn't allow that mark; CRI-O and containerd 1.x accept it.

    :param path: for messages.
    :raises Unparsable: it isn't TOML; the message has the line.
    """
    if "\ufffd" in text:
        line = text[: text.index("\ufffd")].count("\n") + 1
        raise Unparsable(f"{path}, line {line}, isn't UTF-8; it is left as it is")
    too_deep = f"{path} is nested too deeply; it is left as it is"
    try:
        tree = tomllib.loads(text.removeprefix(_BOM))
    except RecursionError as error:
        raise Unparsable(too_deep) from error
    except ValueError as error:
        # The error of a number that is too long has no line.
        match = re.search(r" \(?at line ([0-9]+).*$", str(error))
        reason = str(error)[: match.start()] if match else str(error)
        number = getattr(error, "lineno", None) or (match[1] if match else text.count("\n") + 1)
        raise Unparsable(f"{path}, line {number}, can't be parsed ({reason}); it is left as it is") from error
    # The parser of dotted keys isn't recursive, and what follows is.
    if not _is_shallow(tree):
        raise Unparsable(too_deep)
    return tree


def _is_shallow(tree: t.Any) -> bool:
    level = [tree]
    for _depth in range(DEEPEST):
        inside = [container.values() if isinstance(container, dict) else container for container in level]
        level = [value for values in inside for value in values if isinstance(value, (dict, list))]
        if not level:
            return True
    return False


def _keys(text: str) -> tuple[tuple[Path, ...], int]:
    """Return the keys with which a mark's text begins, and their end."""
    keys: list[Path] = []
    at, begin = 0, ", set "
    while text.startswith(begin, at) and not (keys and text.startswith(", was ", at)):
        key, at = toml_tree.scan_key(text, at + len(begin))
        keys.append(key)
        begin = ", "
    return tuple(keys), at


def _comparable(value: t.Any) -> t.Any:
    """Remove empty tables, which come and go with their content, and make equal what is written alike, as nan."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if not isinstance(value, dict):
        return type(value).__name__, str(value)
    inner = {key: _comparable(item) for key, item in value.items()}
    return {key: item for key, item in inner.items() if item != {}}
