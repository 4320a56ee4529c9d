# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's tables: ``meta/pins.yml``, the digests of what its roles download by default, and
``meta/repositories.yml``, what the package repositories of the driver and the toolkit hold.
"""

from __future__ import annotations

import functools
import re
import typing as t
from pathlib import Path

import yaml

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject

META = Path(__file__).resolve().parents[3] / "meta"
FILE, REPOSITORIES_FILE = META / "pins.yml", META / "repositories.yml"
# The value of a role's variable that stands for the digest of this table.
PINNED = "pinned"
SHA256, FINGERPRINT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9A-F]{40}")
_TEXT = re.compile(r"\S(.*\S)?")
_URL = re.compile(r"https://\S+")
_EMPTY = re.compile("")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
Valid = t.Callable[[object], bool]
# Of an image, by dpkg's name of an architecture: the digest of its manifest, and the bytes that are downloaded.
ARCHITECTURES = ("amd64", "arm64")


def _text(*patterns: re.Pattern[str]) -> Valid:
    return lambda value: isinstance(value, str) and any(pattern.fullmatch(value) for pattern in patterns)


def _branch(value: object) -> bool:
    return value is None or (isinstance(value, int) and 0 < value < 10000)


def _words(*known: str) -> Valid:
    """Return what accepts a list of words that isn't empty, of the known ones where there are any."""
    return lambda value: (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, str) and (not known or one in known) for one in value)
    )


def _platforms(value: object) -> bool:
    """Accept digest and size for some of the architectures."""
    return isinstance(value, dict) and all(
        name in ARCHITECTURES
        and isinstance(row, dict)
        and set(row) == {"digest", "bytes"}
        and _text(_DIGEST)(row["digest"])
        and isinstance(row["bytes"], int)
        and row["bytes"] > 0
        for name, row in value.items()
    )


# A digest that isn't known is empty.
_PIN: dict[str, Valid] = {"url": _text(_TEXT), "known": _text(_TEXT)}
_HELD: dict[str, Valid] = {"source": _text(_URL), "date": _text(re.compile(r"20\d\d-[01]\d-[0-3]\d"))}
_ROW: dict[str, Valid] = {"arch": _text(re.compile("amd64|arm64")), "key": _text(_TEXT)}
_DRIVER: dict[str, Valid] = {
    "first": _branch,
    "last": _branch,
    "modules": _words("open", "proprietary"),
    "kernels": lambda value: value is None or _words()(value),
    **_HELD,
}
# By section the fields of an entry, and what each has to look like.
FIELDS: t.Mapping[str, t.Mapping[str, Valid]] = {
    "keys": {**_PIN, "sha256": _text(SHA256, _EMPTY), "fingerprint": _text(FINGERPRINT, _EMPTY)},
    "charts": {**_PIN, "sha256": _text(SHA256, _EMPTY), "version": _text(_TEXT)},
    "programs": {
        **_PIN,
        "url": _text(re.compile(r"https?://\S*\{architecture\}\S*")),
        "version": _text(_TEXT),
        **dict.fromkeys(ARCHITECTURES, _text(SHA256, _EMPTY)),
    },
    # The chart that names an image is one of the section before; empty where a role or a file names it.
    "images": {
        **_PIN,
        "digest": _text(_DIGEST, _EMPTY),
        "platforms": _platforms,
        "chart": _text(_TEXT, _EMPTY),
    },
}
REPOSITORIES: t.Mapping[str, t.Mapping[str, Valid]] = {
    "nvidia": {"url": _text(_URL), **_ROW, **_DRIVER},
    # What a distribution has in its own lists has no URL.
    "distribution": {"url": _text(_URL, _EMPTY), **_ROW, "key": _text(_TEXT, _EMPTY), **_DRIVER},
    "toolkit": {"url": _text(_URL), **_ROW, **_HELD},
}
_FILES = {FILE: FIELDS, REPOSITORIES_FILE: REPOSITORIES}


def section(name: str) -> JsonObject:
    """Return the entries of a section by their names.

    :param name: of ``FIELDS`` or of ``REPOSITORIES``.
    :raises BadInput: there is no such section, or the file isn't as it has to be.
    """
    for path, sections in _FILES.items():
        if name in sections:
            return t.cast(JsonObject, _table(path)[name])
    raise BadInput(f"{name!r} isn't a section of {META}, which has {', '.join((*FIELDS, *REPOSITORIES))}")


def load(text: str, where: str, sections: t.Mapping[str, t.Mapping[str, Valid]] = FIELDS) -> JsonObject:
    """Return the table that a text contains.

    :param where: the file, for errors.
    :param sections: ``FIELDS`` or ``REPOSITORIES``.
    :raises BadInput: it isn't as they have it; an invalid digest would otherwise be one that nothing is held to.
    """
    try:
        # libyaml's, where it is installed: the longest of these tables has a thousand lines.
        table = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise BadInput(f"{where} isn't YAML: {error}") from error
    if not isinstance(table, dict) or set(table) != set(sections):
        raise BadInput(f"{where}: it needs the sections {', '.join(sections)}, and no other")
    for name, fields in sections.items():
        rows = table[name] or {}
        if not isinstance(rows, dict):
            raise BadInput(f"{where}: section {name} needs rows by their names")
        for key, entry in rows.items():
            if not isinstance(entry, dict) or set(entry) != set(fields):
                raise BadInput(f"{where}: {name}: {key} needs the fields {', '.join(fields)}, and no other")
            for field, valid in fields.items():
                if not valid(entry[field]):
                    raise BadInput(f"{where}: {name}: {key}: {field} is {entry[field]!r}, which isn't valid")
    return table


@functools.cache
def _table(path: Path) -> JsonObject:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} can't be read: {error.strerror}") from error
    return load(text, str(path), _FILES[path])


def driver_tables() -> JsonObject:
    """Return what ``choose`` of the driver reads of the tables: ``keys``, ``nvidia`` and ``distribution``."""
    return {name: section(name) for name in ("keys", "nvidia", "distribution")}


def image(name: str) -> str:
    """Return the reference of a pinned image, with its digest where that is known."""
    pin = section("images")[name]
    return f"{pin['url']}@{pin['digest']}" if pin["digest"] else str(pin["url"])
