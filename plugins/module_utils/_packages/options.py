# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of the module ``pinned_packages`` and their validation.

What only one package manager restricts is validated by its planner (``apt``, ``rpm``).
"""

from __future__ import annotations

import re
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .signing_key import check_key
from .spec import Package, PackageSet, Pin, Repository, Stream

_WORDS: JsonObject = {"type": "list", "elements": "str", "default": []}

ARGUMENTS: JsonObject = {
    "name": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent", "verified"], "default": "present"},
    "repositories": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "suites": {**_WORDS, "default": ["/"]},
            "components": _WORDS,
            "architectures": _WORDS,
            "signed": {**_WORDS, "choices": ["packages", "metadata"], "default": ["packages"]},
            "key_url": {"type": "str", "no_log": False},
            "key_text": {"type": "str", "no_log": False},
            "key_sha256": {"type": "str", "no_log": False},
            "key_fingerprint": {"type": "str", "no_log": False},
        },
        "mutually_exclusive": [("key_url", "key_text")],
        "required_one_of": [("key_url", "key_text")],
    },
    "pins": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "package": {"type": "str", "required": True},
            "pin": {"type": "str", "required": True},
            "priority": {"type": "int", "default": 1001},
        },
    },
    "streams": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "module": {"type": "str", "required": True},
            "stream": {"type": "str", "required": True},
            "switch": {"type": "bool", "default": False},
        },
    },
    "packages": _WORDS,
    "hold": {"type": "bool", "default": True},
    "hold_also": _WORDS,
    "never_upgrade": _WORDS,
    "conflicts": _WORDS,
    "replaces": _WORDS,
    "source_dir": {"type": "path"},
    "node_dir": {"type": "path"},
    "keep": _WORDS,
    "erase_dependencies": {"type": "bool", "default": False},
    "observed": {"type": "dict"},
}


def package_set(params: JsonObject) -> PackageSet:
    """Return the desired state that the module's options describe.

    :raises BadInput: an option is invalid; the message names it.
    """
    check_word("name", params["name"])
    repositories = tuple(_repository(one) for one in params["repositories"])
    packages = tuple(_package(text) for text in params["packages"])
    _refuse_twice("repositories", [one.name for one in repositories])
    _refuse_twice("packages", [one.name for one in packages])
    for pin in params["pins"]:
        for field in ("package", "pin"):
            if not pin[field].strip() or "\n" in pin[field]:
                raise BadInput(f"pins: {field}: {pin[field]!r} isn't one line of text")
    for pattern in params["never_upgrade"]:
        if not re.fullmatch(r'[^"\s]+', pattern):
            raise BadInput(f"never_upgrade: {pattern!r} isn't a pattern of package names")
    for option in ("hold_also", "conflicts", "replaces", "keep"):
        for pattern in params[option]:
            if not re.fullmatch(r"[A-Za-z0-9_.+*?\[\]!-]+", pattern):
                raise BadInput(f"{option}: {pattern!r} isn't a pattern of package names")
    return PackageSet(
        name=params["name"],
        present=params["state"] == "present",
        repositories=repositories,
        pins=tuple(Pin(pin["package"], pin["pin"], pin["priority"]) for pin in params["pins"]),
        streams=tuple(_stream(one) for one in params["streams"]),
        packages=packages,
        hold=params["hold"],
        hold_also=tuple(params["hold_also"]),
        never_upgrade=tuple(params["never_upgrade"]),
        conflicts=tuple(params["conflicts"]),
        replaces=tuple(params["replaces"]),
        node_dir=params["node_dir"] or "",
        keep=tuple(params["keep"]),
        erase_dependencies=params["erase_dependencies"],
        verified=params["state"] == "verified",
    )


def check_word(option: str, value: str) -> None:
    """Refuse a name that can't be part of the name of a file that package managers read.

    :raises BadInput: it holds something else than lowercase letters, digits, ``-`` and ``_``.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", value):
        raise BadInput(f"{option}: {value!r} may contain only lowercase letters, digits, - and _")


def _refuse_twice(option: str, names: t.Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"{option}: {', '.join(twice)} is given twice")


def _repository(option: JsonObject) -> Repository:
    name = option["name"]
    check_word("repositories: name", name)
    where = f"repositories: {name}:"
    if not re.fullmatch(r"[a-z+]+://?[^\s]+", option["url"]):
        raise BadInput(f"{where} url {option['url']!r} isn't the URL of a repository")
    if option.get("key_url") and not re.fullmatch(r"(https?|file)://[^\s]+", option["key_url"]):
        raise BadInput(f"{where} key_url {option['key_url']!r} isn't the URL of a key")
    sha256 = (option.get("key_sha256") or "").lower()
    if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise BadInput(f"{where} key_sha256 isn't 64 hexadecimal digits")
    fingerprint = (option.get("key_fingerprint") or "").replace(" ", "").upper()
    if fingerprint and not re.fullmatch(r"[0-9A-F]{40}", fingerprint):
        raise BadInput(f"{where} key_fingerprint isn't 40 hexadecimal digits")
    for field in ("suites", "components", "architectures"):
        for word in option[field]:
            if not re.fullmatch(r"[^\s]+", word):
                raise BadInput(f"{where} {field}: {word!r} isn't one word")
    text = (option.get("key_text") or "").strip()
    repository = Repository(
        name=name,
        url=option["url"],
        suites=tuple(option["suites"]),
        components=tuple(option["components"]),
        architectures=tuple(option["architectures"]),
        signed=tuple(option["signed"]),
        key_url=option.get("key_url") or "",
        key_text=text + "\n" if text else "",
        key_sha256=sha256,
        key_fingerprint=fingerprint,
    )
    if repository.key_text:
        check_key(repository, repository.key_text)
    return repository


def _package(text: str) -> Package:
    found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9_.+-]*)(?:=([0-9A-Za-z][0-9A-Za-z._+~^:-]*\*?))?", text)
    if not found:
        raise BadInput(f"packages: {text!r} is neither a package name nor name=version")
    return Package(found.group(1), found.group(2) or "")


def _stream(option: JsonObject) -> Stream:
    for field in ("module", "stream"):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", option[field]):
            raise BadInput(f"streams: {field} {option[field]!r} isn't one word")
    return Stream(option["module"], option["stream"], option["switch"])
