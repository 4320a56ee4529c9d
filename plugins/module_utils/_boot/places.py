# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files that decide the kernel's arguments: their words, and changes that keep every other byte. Pure.

The kind of a file follows from its path. Each kind has ``read`` (its words), ``add`` and ``remove``.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._documents import json_editor
from . import words
from .layout import CMDLINE, DROP_IN, KERNELSTUB, command_lines, entry_lines, is_entry

# In the entries of all kernels, those for recovery too: a card that a virtual machine has must not get a driver there.
VARIABLE = "GRUB_CMDLINE_LINUX"
OWN = "# Written by the Ansible collection kubegpu.share; it is removed with the arguments.\n"


class File(t.Protocol):
    """A kind of file."""

    def read(self, path: str, text: str) -> list[str]:
        """Return the words for the kernel.

        :raises BadInput: the text can't be parsed.
        """

    def add(self, path: str, text: str, arguments: t.Sequence[str]) -> str: ...

    def remove(self, path: str, text: str, arguments: t.Collection[str]) -> str: ...


class LoaderEntry:
    """An entry of the Boot Loader Specification; its keys ``options`` follow one another."""

    def read(self, path: str, text: str) -> list[str]:
        found = [text[line.start : line.end] for line in entry_lines(text) if line.key == "options"]
        return [word for options in found for word in words.split(options)]

    def add(self, path: str, text: str, arguments: t.Sequence[str]) -> str:
        if not arguments:
            return text
        options = [line for line in entry_lines(text) if line.key == "options"]
        if not options:
            line = "\r\n" if "\r\n" in text else "\n"
            return f"{text}{'' if text.endswith(chr(10)) or not text else line}options {' '.join(arguments)}{line}"
        # In the one with init's words, if any, else in the last.
        ending = [option for option in options if words.END in words.split(text[option.start : option.end])]
        option = (ending or options[-1:])[0]
        return text[: option.start] + words.add(text[option.start : option.end], arguments) + text[option.end :]

    def remove(self, path: str, text: str, arguments: t.Collection[str]) -> str:
        for line in reversed(entry_lines(text)):
            if line.key != "options":
                continue
            rest = words.remove(text[line.start : line.end], arguments)
            text = text[: line.start] + rest + text[line.end :]
        return text


class Cmdline:
    """/etc/kernel/cmdline: words on one line or on several; a line that begins with # is a comment."""

    def read(self, path: str, text: str) -> list[str]:
        return [word for line in command_lines(text) for word in words.split(line)]

    def add(self, path: str, text: str, arguments: t.Sequence[str]) -> str:
        lines = text.splitlines(keepends=True)
        used = [number for number, line in enumerate(lines) if line.strip() and line.lstrip()[0] != "#"]
        if not used:
            return text + (" ".join(arguments) + "\n" if arguments else "")
        ending = [number for number in used if words.END in words.split(lines[number])]
        at = (ending or used[-1:])[0]
        lines[at] = words.add(lines[at], arguments)
        return "".join(lines)

    def remove(self, path: str, text: str, arguments: t.Collection[str]) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(line if line.lstrip()[:1] == "#" else words.remove(line, arguments) for line in lines)


class Kernelstub:
    """The configuration of Pop!_OS's kernelstub, which is JSON.

    kernelstub itself loses the order of its options when it removes one, so it isn't asked to.
    """

    def read(self, path: str, text: str) -> list[str]:
        return [word for option in self._options(self._document(path, text), path) for word in words.split(option)]

    def add(self, path: str, text: str, arguments: t.Sequence[str]) -> str:
        document = self._document(path, text)
        return self._with(document, path, [*self._options(document, path), *arguments])

    def remove(self, path: str, text: str, arguments: t.Collection[str]) -> str:
        document = self._document(path, text)
        return self._with(
            document, path, [argument for argument in self._options(document, path) if argument not in arguments]
        )

    def same(self, path: str, text: str, other: str) -> bool:
        """Return whether two texts have the same values."""
        return self._document(path, text).tree == self._document(path, other).tree

    def _with(self, document: json_editor.Document, path: str, options: list[str]) -> str:
        if options != self._options(document, path):
            document.set(("user", "kernel_options"), options)
        return document.checked()

    def _document(self, path: str, text: str) -> json_editor.Document:
        return json_editor.Document(path, text)

    def _options(self, document: json_editor.Document, path: str) -> list[str]:
        user: JsonObject = document.tree.get("user") or {}
        options = user.get("kernel_options") if isinstance(user, dict) else None
        if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
            raise BadInput(f"{path}: user.kernel_options is no list of texts")
        return list(options)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """``NAME=value`` of a shell's file; ``raw`` are the positions of the value, ``value`` is it without quotes.

    :param simple: the value is one text, in quotes or not, with nothing that a shell would do, and in force.
    """

    name: str
    start: int
    end: int
    value: str
    simple: bool


_ASSIGNMENT = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)\+?=")
# What may leave an assignment out, or repeat it.
_CONTROL = re.compile(r"^[ \t]*(?:if|for|while|until|case|select|function|\{|\w+[ \t]*\(\))", re.MULTILINE)
# Ends an unquoted value.
_BREAKS = frozenset(" \t\r\n;&|<>()")


def assignments(text: str) -> list[Assignment]:
    """Return the assignments of a shell's file in their order, those inside ``if`` too.

    :raises BadInput: a quote isn't closed.
    """
    found, at, fresh = [], 0, True
    straight = not _CONTROL.search(text)
    while at < len(text):
        character = text[at]
        if character in " \t\r\n;&|()":
            at, fresh = at + 1, True
        elif character == "#" and fresh:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            match = _ASSIGNMENT.match(text, at) if fresh else None
            start = match.end() if match else at
            end, value, simple = _shell_word(text, start)
            if match:
                begins = straight and (at == 0 or text[at - 1] == "\n")
                plain = simple and begins and not match.group().startswith("export") and match.group()[-2] != "+"
                found.append(Assignment(match.group(1), start, end, value, plain))
            at, fresh = max(end, at + 1), False
    return found


def _shell_word(text: str, start: int) -> tuple[int, str, bool]:
    """Return the end of a shell's word, its value without quotes, and whether it is simple."""
    at, value, parts = start, "", 0
    plain = True
    while at < len(text) and text[at] not in _BREAKS:
        character = text[at]
        if character in "\"'":
            end, inside, easy = _quoted(text, at)
            value, at, parts, plain = value + inside, end, parts + 1, plain and easy
            continue
        if character == "\\":
            # A line that goes on ends nothing.
            value, at, plain = value + text[at + 1 : at + 2].replace("\n", ""), at + 2, False
            continue
        if character == "$" and text[at + 1 : at + 2] == "(":
            end = _substitution(text, at + 1)
            value, at, plain = value + text[at:end], end, False
            continue
        if character in "$`*?[]{}~":
            plain = False
        value, at = value + character, at + 1
    # Text beside a quoted part is one value for a shell, but not for the tools that edit these files.
    whole = parts == 0 or (parts == 1 and text[start] in "\"'" and text[at - 1] == text[start])
    return at, value, plain and whole


def _quoted(text: str, start: int) -> tuple[int, str, bool]:
    mark, at, inside, plain = text[start], start + 1, "", True
    while at < len(text):
        character = text[at]
        if character == mark:
            return at + 1, inside, plain
        if mark == '"' and character == "\\":
            following = text[at + 1 : at + 2]
            inside += "" if following == "\n" else following if following in '$`"\\' else character + following
            at, plain = at + 2, plain and following in ("\n", '"')
            continue
        if mark == '"' and character == "`":
            plain = False
        if mark == '"' and character == "$" and text[at + 1 : at + 2] == "(":
            end = _substitution(text, at + 1)
            inside, at, plain = inside + text[at:end], end, False
            continue
        inside, at = inside + character, at + 1
    line = text.count("\n", 0, start) + 1
    raise BadInput(f"a quote that line {line} opens isn't closed")


def _substitution(text: str, start: int) -> int:
    """Return the end of what stands in parentheses."""
    depth, at = 0, start
    while at < len(text):
        if text[at] in "\"'":
            at = _quoted(text, at)[0]
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 2 if text[at] == "\\" else 1
        if depth == 0:
            return at
    return len(text)


class DefaultGrub:
    """/etc/default/grub and its drop-ins, which a shell reads: the words are those of two variables."""

    names = (VARIABLE, f"{VARIABLE}_DEFAULT")

    def read(self, path: str, text: str) -> list[str]:
        return [
            word
            for assignment in self._of(path, text)
            if assignment.name in self.names
            for word in words.split(assignment.value)
        ]

    def add(self, path: str, text: str, arguments: t.Sequence[str]) -> str:
        if not arguments:
            return text
        last = [assignment for assignment in self._of(path, text) if assignment.name == VARIABLE][-1:]
        # A value that a shell computes stays as it is; the line after it appends.
        if not last or not last[0].simple or not text[last[0].start : last[0].end]:
            end = "" if text.endswith("\n") or not text else "\n"
            return f'{text}{end}{VARIABLE}="${VARIABLE} {" ".join(arguments)}"\n'
        raw = text[last[0].start : last[0].end]
        mark = raw[0] if raw[0] in "\"'" else ""
        inside = words.add(raw[1:-1], arguments) if mark else words.add(raw, arguments)
        mark = mark or '"'
        return text[: last[0].start] + mark + inside + mark + text[last[0].end :]

    def remove(self, path: str, text: str, arguments: t.Collection[str]) -> str:
        for assignment in reversed([each for each in self._of(path, text) if each.name in self.names]):
            raw = text[assignment.start : assignment.end]
            mark = raw[:1] if raw[:1] in ('"', "'") and len(raw) > 1 and raw[-1] == raw[0] else ""
            rest = words.remove(raw[1:-1], arguments) if mark else words.remove(raw, arguments)
            begin = text.rfind("\n", 0, assignment.start) + 1
            appended = rest.strip() == f"${VARIABLE}" and text[begin : assignment.start] == f"{VARIABLE}="
            if mark and appended and rest != raw[1:-1]:
                end = text.find("\n", assignment.end)
                text = text[:begin] + (text[end + 1 :] if end >= 0 else "")
            else:
                text = text[: assignment.start] + mark + rest + mark + text[assignment.end :]
        return text

    def _of(self, path: str, text: str) -> list[Assignment]:
        try:
            return assignments(text)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error


class DropIn(DefaultGrub):
    """The file of this collection alone."""

    def add(self, path: str, text: str, arguments: t.Sequence[str]) -> str:
        return f'{OWN}{VARIABLE}="${VARIABLE} {" ".join(arguments)}"\n' if arguments else ""

    def remove(self, path: str, text: str, arguments: t.Collection[str]) -> str:
        return ""


def kind_of(path: str) -> File:
    """Return what a file is, by its path."""
    if path == DROP_IN:
        return DropIn()
    if path == CMDLINE:
        return Cmdline()
    if path == KERNELSTUB:
        return Kernelstub()
    return LoaderEntry() if is_entry(path) else DefaultGrub()
