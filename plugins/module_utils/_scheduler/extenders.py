# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The extenders in a kube-scheduler's configuration or Policy: ours among the user's own. Pure."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import re
import typing as t

from .._contracts.gpushare import RESOURCE_MEMORY
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._documents import json_editor
from .._documents.yaml_editor import Document
from .decode import is_json

KEY = "extenders"
# The way out of refusals: nothing of the cluster's own scheduler is changed then.
BESIDE = "scheduler_mode: dedicated runs a second scheduler with the extender beside it"
RESOURCES = "managedResources"
# kube-scheduler's own accounting of the resource stays on: no pod may be placed on a node without free GPU memory.
RESOURCE: JsonObject = {"name": RESOURCE_MEMORY, "ignoredByScheduler": False}
# In JSON, what our extender's list replaced, by the blanks after the opening bracket.
REPLACED = {1: "[]", 2: "null"}
# Keys that are removed where our entry doesn't have them: calls that our extender doesn't serve.
UNSERVED = ("prioritizeVerb", "weight", "preemptVerb", "tlsConfig")


class AnotherBinds(BadInput):
    """Another extender of the file binds pods."""


class Extenders:
    """The extenders of a file under edit.

    :param path: of the file, for messages.
    :param fold: keys may be written in lower and upper case.
    :raises BadInput: the file can't be parsed, or they aren't a list of mappings.
    """

    def __init__(self, path: str, text: str, *, fold: bool) -> None:
        self._file, self._fold = path, fold
        self._list: _InYaml | _InJson = _InJson(path, text) if is_json(text) else _InYaml(path, text)

    def checked(self) -> str:
        """Return the edited text.

        :raises BadInput: it can't be edited safely.
        """
        return self._list.checked()

    def put_in(self, entry: JsonObject) -> None:
        """Add our extender to the list, or update it: its position and its other keys stay unchanged.

        :raises AnotherBinds: another extender binds pods.
        :raises BadInput: two are for our resource.
        """
        items = self._list.items
        mine = self._only(entry["urlPrefix"])
        binders = [item for number, item in enumerate(items) if number not in mine and self._value(item, "bindVerb")]
        if binders:
            raise AnotherBinds(
                f"scheduler_mode: {self._file} has an extender that binds pods already "
                f"({self._value(binders[0], 'urlPrefix')}), and kube-scheduler accepts only one of these"
            )
        if not mine:
            self._list.append(entry)
            return
        [number] = mine
        for key, value in entry.items():
            there = self._keys(items[number], key)
            # kube-scheduler reads the last of several keys that differ only in case.
            for extra in there[:-1]:
                self._list.delete(number, extra)
            name = there[-1] if there else key
            if key == RESOURCES:
                self._refresh_resources(number, name, items[number].get(name) or [])
            elif not there or items[number][name] != value:
                self._list.set(number, name, value)
        for key in (name for name in UNSERVED if name not in entry):
            for name in self._keys(items[number], key):
                self._list.delete(number, name)

    def remove(self) -> None:
        """Remove our extender."""
        for number in self._only(None):
            self._list.remove(number)

    def undo(self, before: Extenders, url: str) -> None:
        """Replace our extender by the user's that it replaced, or remove it.

        :param before: the file before our extender was added.
        :param url: of our extender.
        """
        was = before._list.items
        theirs = [was[number] for number in before._ours(url)]
        for number in self._only(None):
            if theirs:
                self._rewrite(number, theirs[0])
            else:
                self._list.remove(number)
        if not self._list.items and not was:
            self._list.leave(before._list.written())

    def has(self, entry: JsonObject) -> bool:
        """Return whether one equals this extender, apart from timeout and preemption, which may have changed."""

        def compared(item: JsonObject) -> JsonObject:
            named = {(key.lower() if self._fold else key): value for key, value in item.items()}
            return {
                key: value
                for key, value in named.items()
                if key.lower() != "httptimeout" and (key.lower(), value) != ("preemptverb", "preempt")
            }

        return compared(entry) in [compared(item) for item in self._list.items]

    def _rewrite(self, number: int, wanted: JsonObject) -> None:
        there = dict(self._list.items[number])
        for key in there:
            if key not in wanted:
                self._list.delete(number, key)
        for key, value in wanted.items():
            if key in there and there[key] == value:
                continue
            if key == RESOURCES and key in there:
                self._list.set_resources(number, key, value)
            else:
                self._list.set(number, key, value)

    def _only(self, url: str | None) -> list[int]:
        """Return the number of gpushare's extender, if there is one.

        :raises BadInput: there are several.
        """
        mine = self._ours(url)
        if len(mine) > 1:
            raise BadInput(
                f"{self._file} has {len(mine)} extenders for {RESOURCE_MEMORY}, and kube-scheduler accepts one"
            )
        return mine

    def _ours(self, url: str | None) -> list[int]:
        """Return the numbers of gpushare's extenders: they manage the resource, or have our URL."""
        return [
            number
            for number, item in enumerate(self._list.items)
            if any(self._value(held, "name") == RESOURCE_MEMORY for held in self._value(item, RESOURCES) or [])
            or (url and self._value(item, "urlPrefix") == url)
        ]

    def _refresh_resources(self, number: int, key: str, held: list[JsonObject]) -> None:
        resources = [dict(resource) for resource in held]
        for resource in resources:
            if self._value(resource, "name") == RESOURCE_MEMORY:
                for ignored in self._keys(resource, "ignoredByScheduler"):
                    resource[ignored] = False
                break
        else:
            resources.append(RESOURCE)
        if resources != held:
            self._list.set_resources(number, key, resources)

    def _keys(self, item: JsonObject, name: str) -> list[str]:
        return [key for key in item if key == name or (self._fold and key.lower() == name.lower())]

    def _value(self, item: JsonObject, name: str) -> t.Any:
        keys = self._keys(item, name)
        return item[keys[-1]] if keys else None


def _checked_items(path: str, items: t.Any) -> list[JsonObject]:
    if items is not None and (not isinstance(items, list) or [item for item in items if not isinstance(item, dict)]):
        raise BadInput(f"{path}: {KEY} isn't a list of mappings")
    return items or []


class _InYaml:
    def __init__(self, path: str, text: str) -> None:
        self._file, self._document = path, Document(path, text)

    @property
    def items(self) -> list[JsonObject]:
        return _checked_items(self._file, self._document.get((KEY,)))

    def append(self, entry: JsonObject) -> None:
        self._document.append((KEY,), entry)

    def remove(self, number: int) -> None:
        self._document.delete((KEY, number))

    def set(self, number: int, key: str, value: t.Any) -> None:
        self._document.set((KEY, number, key), value)

    def delete(self, number: int, key: str) -> None:
        self._document.delete((KEY, number, key))

    def set_resources(self, number: int, key: str, resources: list[JsonObject]) -> None:
        here = (KEY, number, key)
        held = copy.deepcopy(self._document.get(here) or [])
        for index, resource in reversed(list(enumerate(held))):
            if index >= len(resources):
                self._document.delete((*here, index))
                continue
            for name in set(resource) - set(resources[index]):
                self._document.delete((*here, index, name))
            for name, value in resources[index].items():
                if name not in resource or resource[name] != value:
                    self._document.set((*here, index, name), value)
        for resource in resources[len(held) :]:
            self._document.append(here, resource)

    def written(self) -> str | None:
        return None

    def leave(self, written: str | None) -> None:
        """Do nothing: the YAML editor restores an emptied list itself."""

    def checked(self) -> str:
        return self._document.checked()


class _InJson:
    """``_parts`` are the extenders' texts, ``_gaps`` the text before, between and after them."""

    def __init__(self, path: str, text: str) -> None:
        self._file, self._document = path, json_editor.Document(path, text)
        self._text = text
        if _checked_items(path, self._document.get((KEY,))):
            self._parts, self._gaps = _split(self._document.written((KEY,)))
        else:
            self._parts, self._gaps = [], []

    @property
    def items(self) -> list[JsonObject]:
        return [json.loads(part) for part in self._parts]

    def append(self, entry: JsonObject) -> None:
        if not self._parts:
            was = self.written()
            blanks = next((number for number, literal in REPLACED.items() if literal == was), 0)
            self._document.restore((KEY,), "[" + " " * blanks + self._first(entry)[1:])
            self._parts, self._gaps = _split(self._document.written((KEY,)))
            return
        between = self._gaps[-2] if len(self._parts) > 1 else "," + self._gaps[0][1:]
        before = re.match(r"\{(\s*\n[ \t]*)", self._parts[-1])
        after = re.search(r"(\r?\n[ \t]*)\}$", self._parts[-1])
        if before and after:
            new = "{" + before[1] + ("," + before[1]).join(_members(entry)) + after[1] + "}"
        else:
            new = json.dumps(entry)
        self._parts.append(new)
        self._gaps.insert(len(self._gaps) - 1, between)
        self._joined()

    def remove(self, number: int) -> None:
        blanks = re.match(r"\[( *)", self._gaps[0])
        del self._parts[number]
        # Its comma and the space around it, which the first one has behind it.
        del self._gaps[max(number, 1)]
        if self._parts:
            self._joined()
        elif blanks and len(blanks[1]) in REPLACED:
            self._document.restore((KEY,), REPLACED[len(blanks[1])])
        else:
            self._document.delete((KEY,))

    def set(self, number: int, key: str, value: t.Any) -> None:
        document = json_editor.Document(self._file, self._parts[number])
        document.restore((key,), json.dumps(value))
        self._parts[number] = document.checked()
        self._joined()

    def delete(self, number: int, key: str) -> None:
        document = json_editor.Document(self._file, self._parts[number])
        document.delete((key,))
        self._parts[number] = document.checked()
        self._joined()

    def set_resources(self, number: int, key: str, resources: list[JsonObject]) -> None:
        self.set(number, key, resources)

    def written(self) -> str | None:
        return self._document.written((KEY,)) if self._document.has((KEY,)) else None

    def leave(self, written: str | None) -> None:
        if written is not None and self.written() != written:
            self._document.restore((KEY,), written)

    def checked(self) -> str:
        return self._document.checked()

    def _joined(self) -> None:
        pieces = [gap + part for gap, part in zip(self._gaps, [*self._parts, ""], strict=True)]
        self._document.restore((KEY,), "".join(pieces))

    def _first(self, entry: JsonObject) -> str:
        """Return a list of one extender in the file's own layout."""
        unit = re.search(r'\{\s*?(\r?\n)([ \t]+)"', self._text)
        if not unit:
            return f"[{json.dumps(entry)}]"
        line = [unit[1] + unit[2] * depth for depth in range(4)]
        members = ("," + line[3]).join(_members(entry))
        return "[" + line[2] + "{" + line[3] + members + line[2] + "}" + line[1] + "]"


def _members(entry: JsonObject) -> list[str]:
    return [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()]


def _split(literal: str) -> tuple[list[str], list[str]]:
    """Split a valid JSON list into its items and the text around them."""
    decoder = json.JSONDecoder()
    parts: list[str] = []
    gaps: list[str] = []
    at = 0
    match = re.compile(r"[\[,]\s*(?=[^\s\]])").match(literal, at)
    while match:
        _value, end = decoder.raw_decode(literal, match.end())
        gaps.append(literal[at : match.end()])
        parts.append(literal[match.end() : end])
        at = end
        match = re.compile(r"\s*,\s*").match(literal, at)
    return parts, [*gaps, literal[at:]]


NANOSECONDS = 10**9


@dataclasses.dataclass(frozen=True)
class Tls:
    """The certificates by which kube-scheduler and the extender authenticate each other, each as PEM text.

    :param authority: the authority that signed the extender's certificate.
    """

    authority: str
    certificate: str
    key: str

    def entry(self) -> JsonObject:
        parts = {"caData": self.authority, "certData": self.certificate, "keyData": self.key}
        return {name: base64.b64encode(text.encode()).decode() for name, text in parts.items()}


@dataclasses.dataclass(frozen=True)
class Extender:
    """How kube-scheduler reaches the extender.

    :param preempts: whether kube-scheduler asks it which pods to evict. Without that it evicts by a node's totals, and
        may free memory on several cards of which none has enough.
    :param tls: None where they talk over a loopback address.
    """

    url: str
    timeout_seconds: int
    preempts: bool = False
    tls: Tls | None = None

    def entry(self) -> JsonObject:
        """Return the extender as a KubeSchedulerConfiguration has it."""
        return {
            "urlPrefix": self.url,
            "filterVerb": "filter",
            **({"preemptVerb": "preempt"} if self.preempts else {}),
            "bindVerb": "bind",
            "enableHTTPS": self.tls is not None,
            **({"tlsConfig": self.tls.entry()} if self.tls else {}),
            "httpTimeout": f"{self.timeout_seconds}s",
            "nodeCacheCapable": True,
            # Only the extender knows which card a pod gets, so no pod may be bound without it.
            "ignorable": False,
            "managedResources": [dict(RESOURCE)],
        }

    def policy_entry(self) -> JsonObject:
        """Return the extender as a Policy has it, and a KubeSchedulerConfiguration of v1alpha2."""
        names = {"enableHTTPS": "enableHttps"}
        entry = {names.get(key, key): value for key, value in self.entry().items()}
        return {**entry, "httpTimeout": self.timeout_seconds * NANOSECONDS}
