# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's ``meta/pins.yml``: the digests of what its roles download by default."""

from __future__ import annotations

import functools
import re
import typing as t
from pathlib import Path

import yaml

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject

FILE = Path(__file__).resolve().parents[3] / "meta/pins.yml"
# The value of a role's variable that stands for the digest of this table.
PINNED = "pinned"
SHA256, FINGERPRINT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9A-F]{40}")
# By section the fields of a pin, and what each has to look like.
_TEXT = re.compile(r"\S(.*\S)?")
FIELDS: t.Mapping[str, t.Mapping[str, re.Pattern[str]]] = {
    "keys": {"url": _TEXT, "known": _TEXT, "sha256": SHA256, "fingerprint": FINGERPRINT},
    "charts": {"url": _TEXT, "known": _TEXT, "sha256": SHA256, "version": _TEXT},
    "images": {"url": _TEXT, "known": _TEXT, "digest": re.compile(r"sha256:[0-9a-f]{64}")},
}
# A digest that isn't known is empty.
MAY_BE_EMPTY = ("sha256", "fingerprint", "digest")


def section(name: str) -> JsonObject:
    """Return the pins of a section by their names.

    :param name: ``keys``, ``charts`` or ``images``.
    :raises BadInput: there is no such section, or the file isn't as it has to be.
    """
    pins = _table()
    if name not in pins:
        raise BadInput(f"{name!r} isn't a section of {FILE}, which has {', '.join(pins)}")
    return t.cast(JsonObject, pins[name])


def load(text: str, where: str) -> JsonObject:
    """Return the table that a text contains.

    :param where: the file, for errors.
    :raises BadInput: it isn't as ``FIELDS`` has it; an invalid digest would otherwise be one that nothing is held to.
    """
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(f"{where} isn't YAML: {error}") from error
    if not isinstance(table, dict) or set(table) != set(FIELDS):
        raise BadInput(f"{where}: it needs the sections {', '.join(FIELDS)}, and no other")
    for name, fields in FIELDS.items():
        for key, pin in (table[name] or {}).items():
            if not isinstance(pin, dict) or set(pin) != set(fields):
                raise BadInput(f"{where}: {name}: {key} needs the fields {', '.join(fields)}, and no other")
            for field, pattern in fields.items():
                value = pin[field]
                if not isinstance(value, str) or not (
                    pattern.fullmatch(value) or (field in MAY_BE_EMPTY and not value)
                ):
                    raise BadInput(f"{where}: {name}: {key}: {field} is {value!r}, which isn't valid")
    return table


@functools.cache
def _table() -> JsonObject:
    try:
        text = FILE.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{FILE} can't be read: {error.strerror}") from error
    return load(text, str(FILE))


def image(name: str) -> str:
    """Return the reference of a pinned image, with its digest where that is known."""
    pin = section("images")[name]
    return f"{pin['url']}@{pin['digest']}" if pin["digest"] else str(pin["url"])
