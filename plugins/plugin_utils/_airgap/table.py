# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's list of all that it fetches, ``meta/airgap.yml``; the file's head says what its fields mean."""

from __future__ import annotations

import functools
import typing as t

from ...module_utils._core.errors import BadInput
from .._pins import table as tables
from .._pins.table import ARCHITECTURES, META, SHA256, Valid

FILE = META / "airgap.yml"
Row = dict[str, t.Any]
Table = dict[str, dict[str, Row]]


def _text(value: object) -> bool:
    return isinstance(value, str)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _when(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(values, list) and bool(values) for name, values in value.items()
    )


def _platforms(value: object) -> bool:
    return isinstance(value, dict) and all(
        name in ARCHITECTURES and isinstance(row, dict) and set(row) == {"digest", "bytes"}
        for name, row in value.items()
    )


def _digests(value: object) -> bool:
    """Accept the SHA-256 of a file by architecture, where its address has {architecture}."""
    return isinstance(value, dict) and all(
        name in ARCHITECTURES and isinstance(sha256, str) and bool(SHA256.fullmatch(sha256))
        for name, sha256 in value.items()
    )


def _folders(value: object) -> bool:
    return isinstance(value, dict) and all(_texts(folders) for folders in value.values())


def _repositories(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(row, dict) and set(row) == {"url", "arch", "key"} and all(map(_text, row.values()))
        for row in value.values()
    )


_COMMON: dict[str, Valid] = {"when": _when, "variables": _texts, "licence": _text}
# By section the fields of a row, and what each has to look like.
FIELDS: t.Mapping[str, t.Mapping[str, Valid]] = {
    "images": {
        "reference": _text,
        "digest": _text,
        "platforms": _platforms,
        "made_by": _text,
        "path": _text,
        **_COMMON,
    },
    "charts": {"url": _text, "version": _text, "sha256": _text, **_COMMON},
    "packages": {
        "distribution": _text,
        "manager": lambda value: value in ("apt", "rpm"),
        "folders": _folders,
        "repositories": _repositories,
        "names": lambda value: _texts(value) and bool(value),
        **_COMMON,
    },
    "files": {"url": _text, "sha256": _text, "fingerprint": _text, "digests": _digests, **_COMMON},
    "wheels": {"name": _text, "version": _text, "sha256": _texts, **_COMMON},
    "collections": {"version": _text, **_COMMON},
    "operators": {"catalog": _text, "channel": _text, **_COMMON},
}


def load(text: str, where: str) -> Table:
    """Return the list that a text contains.

    :param where: the file, for errors.
    :raises BadInput: it isn't as ``FIELDS`` has it.
    """
    table: Table = tables.load(text, where, FIELDS)
    for name, rows in table.items():
        if not rows:
            raise BadInput(f"{where}: section {name} is empty")
    return table


@functools.cache
def listed() -> Table:
    """Return the collection's list.

    :raises BadInput: the file can't be read, or isn't as it has to be.
    """
    try:
        text = FILE.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{FILE} can't be read: {error.strerror}") from error
    return load(text, str(FILE))
