# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decode a configuration file as kube-scheduler does: fields, types, and the line of each. Pure."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
import typing as t

from .._core.errors import BadInput
from .._core.libraries import yaml
from .._core.types import JsonObject
from .._documents import json_editor
from .._documents.yaml_tree import Loader, fault, refuse_large
from .schema import Kind, ListOf, MapOf, Shape, Struct, args_of

_WORDS: dict[Kind, str] = {
    "string": "a string",
    "bool": "true or false",
    "int32": "a whole number",
    "int64": "a whole number",
    "float": "a number",
    "duration": "a duration such as 30s",
    "pointer to duration": "a duration such as 30s",
    "bytes": "base64",
}
_DURATION = re.compile(r"[+-]?(?:0|(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+)")


class _Loader(Loader):
    """Parses scalars as Kubernetes does: y is true, 1:30 and 2001-01-01 are strings, 5e1 is a number."""


_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"(?:[yYnN]|[yY]es|YES|[nN]o|NO|[tT]rue|TRUE|[fF]alse|FALSE|[oO]n|ON|[oO]ff|OFF)$", "yYnNtTfFoO"),
    ("null", r"(?:~|[nN]ull|NULL|)$", ["~", "n", "N", ""]),
    (
        "int",
        r"[-+]?(?:0[bB]_?[01][01_]*|0[xX]_?[0-9a-fA-F][0-9a-fA-F_]*|0[oO]?_?[0-7][0-7_]*|0|[1-9][0-9_]*)$",
        "-+0123456789",
    ),
    ("float", r"[-+]?(?:(?:\.[0-9_]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$", None),
    ("float", r"\.(?:nan|NaN|NAN)$", "."),
    ("merge", r"<<$", "<"),
):
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), list(_first or "-+0123456789."))


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A decoded file: its values, and the line of each field."""

    file: str
    tree: JsonObject
    lines: dict[str, int]

    def fault(self, place: str, reason: str) -> BadInput:
        """Return an error with the line of the field, or of its parent."""
        above = place
        while above and above not in self.lines:
            above = above[: max(above.rfind("."), above.rfind("["), 0)]
        return BadInput(f"{self.file}, line {self.lines.get(above, 1)}: {place} {reason}")


class Source:
    """A file that kube-scheduler reads.

    :raises BadInput: it can't be parsed, isn't a mapping, or holds more, which kube-scheduler would ignore.
    """

    def __init__(self, path: str, text: str) -> None:
        self._file = path
        refuse_large(path, text)
        self.is_json = is_json(text)
        if self.is_json:
            # PyYAML, which reports lines, refuses JSON with tabs between the values.
            text = json_editor.Document(path, text).text.replace("\t", " ")
        try:
            loader: t.Any = _Loader(text)
            documents = list(iter(lambda: loader.get_node() if loader.check_node() else None, None))
        except yaml.YAMLError as error:
            raise self._unparsable(*fault(text, error)) from error
        except RecursionError as error:
            raise self._unparsable(1, "it is nested too deeply") from error
        for node in documents[1:]:
            # Behind a mark at the end there is an empty document.
            if node.tag != _TAG + "null":
                raise self._unparsable(node.start_mark.line + 1, "it holds several documents")
        if not documents or not isinstance(documents[0], yaml.MappingNode):
            raise self._unparsable(1, "it isn't a mapping")
        self._root = documents[0]

    def top(self, name: str) -> t.Any:
        """Return a scalar of the top level; None where there is none."""
        for key, value in self._root.value:
            if key.value == name and isinstance(value, yaml.ScalarNode):
                return self._scalar(value)
        return None

    def decode(self, shape: Struct, minor: int, version: str = "", *, strict: bool) -> Decoded:
        """Check fields and types.

        :param shape: the expected fields.
        :param minor: of kube-scheduler 1.``minor``.
        :param version: of the configuration.
        :param strict: refuse unknown fields; otherwise, and where keys may be written in lower and upper case, they are
            ignored.
        """
        reader = _Reader(self, minor, version, strict)
        try:
            tree = reader.value(self._root, shape, "")
        except RecursionError as error:
            raise self._unparsable(1, "an anchor's value holds itself, or it is nested too deeply") from error
        return Decoded(self._file, tree or {}, reader.lines)

    def refusal(self, node: yaml.Node, reason: str) -> BadInput:
        """Return an error with the line of the node."""
        return BadInput(f"{self._file}, line {node.start_mark.line + 1}: {reason}")

    def _scalar(self, node: yaml.ScalarNode) -> t.Any:
        tag, text = node.tag, str(node.value)
        if tag == _TAG + "null":
            return None
        if tag == _TAG + "bool":
            return text.lower() in ("y", "yes", "true", "on")
        try:
            if tag == _TAG + "int":
                return _whole(text.replace("_", ""))
            if tag == _TAG + "float":
                number = _float(text)
                # Kubernetes converts YAML to JSON, where 50.0 becomes 50.
                return int(number) if not self.is_json and number.is_integer() and abs(number) < 1e21 else number
        except ValueError:
            # It only looks like a number, as 0b_ does, or is longer than any number of a field.
            return text
        return text

    def _unparsable(self, line: int, reason: str) -> BadInput:
        return BadInput(f"{self._file}, line {line}, can't be parsed ({reason}); it is left as it is")


def is_json(text: str) -> bool:
    """Whether kube-scheduler reads a text as JSON: it begins with a brace."""
    return text.lstrip().startswith("{")


def _float(text: str) -> float:
    word = text.lower().lstrip("+-")
    if word in (".inf", ".nan"):
        return float(("-" if text.startswith("-") else "") + word[1:])
    return float(text.replace("_", ""))


def _whole(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-").lower()
    if re.fullmatch(r"0[0-7]+", digits):
        return sign * int(digits, 8)
    return sign * int(digits, 0)


class _Reader:
    """Decodes a file's nodes; ``lines`` has the line of each field."""

    def __init__(self, source: Source, minor: int, version: str, strict: bool) -> None:
        self._source, self._minor, self._version, self._strict = source, minor, version, strict
        self.lines: dict[str, int] = {}

    def value(self, node: yaml.Node, shape: Shape, place: str) -> t.Any:
        self.lines[place] = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null" and shape != "duration":
            return None
        if isinstance(shape, Struct):
            return self._struct(node, shape, place)
        if isinstance(shape, ListOf):
            if not isinstance(node, yaml.SequenceNode):
                raise self._source.refusal(node, f"{place} isn't a list")
            return [self.value(item, shape.item, f"{place}[{number}]") for number, item in enumerate(node.value)]
        if isinstance(shape, MapOf):
            pairs = self._pairs(node, place)
            return {key: self.value(child, shape.value, f"{place}.{key}") for key, (_key, child) in pairs.items()}
        if shape in ("args", "any"):
            return None
        return self._plain(node, shape, place)

    def _plain(self, node: yaml.Node, kind: Kind, place: str) -> t.Any:
        value = self._source._scalar(node) if isinstance(node, yaml.ScalarNode) else node
        if not _fits(value, kind):
            raise self._source.refusal(node, f"{place} isn't {_WORDS[kind]}")
        return value

    def _struct(self, node: yaml.Node, shape: Struct, place: str) -> JsonObject:
        known = shape.of(self._minor, self._version)
        folded = {name.lower(): name for name in known} if shape.fold else {}
        values: JsonObject = {}
        pairs = self._pairs(node, place)
        for key, (key_node, value) in pairs.items():
            here = f"{place}.{key}" if place else key
            name = folded.get(key.lower(), key)
            inner = known.get(name)
            if inner is None:
                if self._strict and not shape.fold:
                    raise self._source.refusal(key_node, f"kube-scheduler 1.{self._minor} has no field {here}")
                continue
            if inner == "args":
                inner = self._args(pairs, value, here)
            values[name] = self.value(value, inner, here)
            self.lines[here] = key_node.start_mark.line + 1
        return values

    def _args(self, beside: t.Mapping[str, tuple[yaml.Node, yaml.Node]], node: yaml.Node, place: str) -> Shape:
        """Return the shape of a plugin's arguments, which may have a version of their own."""
        name = str(beside["name"][1].value) if "name" in beside else ""
        shape = args_of(name, self._minor, self._version)
        if shape is None:
            return "any"
        pairs = self._pairs(node, place) if isinstance(node, yaml.MappingNode) else {}
        kind = pairs.get("kind")
        if kind and kind[1].value not in ("", f"{name}Args"):
            raise self._source.refusal(kind[1], f"{place}.kind isn't {name}Args")
        if "apiVersion" in pairs and pairs["apiVersion"][1].value.rpartition("/")[2] not in ("", self._version):
            # A version other than the file's, whose fields may differ.
            return "any"
        return shape

    def _pairs(self, node: yaml.Node, place: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._source.refusal(node, f"{place} isn't a mapping")
        seen: set[str] = set()
        for key, _value in node.value:
            if str(key.value) in seen:
                raise self._source.refusal(key, f"{place + '.' if place else ''}{key.value} is there twice")
            seen.add(str(key.value))
        merged = yaml.MappingNode(node.tag, list(node.value), node.start_mark, node.end_mark)
        untyped: t.Any = _Loader("")
        try:
            untyped.flatten_mapping(merged)
        except yaml.YAMLError as error:
            raise self._source._unparsable(*fault("", error)) from error
        return {str(key.value): (key, value) for key, value in merged.value}


def _fits(value: t.Any, kind: Kind) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int32", "int64"):
        bits = 31 if kind == "int32" else 63
        return isinstance(value, int) and not isinstance(value, bool) and -(1 << bits) <= value < 1 << bits
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3.5e38
    if kind == "bytes":
        return isinstance(value, str) and _is_base64(value)
    if kind in ("duration", "pointer to duration"):
        return isinstance(value, str) and bool(_DURATION.fullmatch(value))
    return isinstance(value, str)


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True
