# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A partial mirror of a package repository: its signed metadata whole, and only the packages that are needed. Pure.

``repository.json`` beside the files describes it. Its keys stay the vendor's, and so does every signature.
"""

from __future__ import annotations

import re
import typing as t

from .._core.errors import BadInput
from .._core.paths import LONGEST, file_path, safe_name
from .._core.types import JsonObject

APT, RPM = "apt", "rpm"
MANAGERS = (APT, RPM)
# Whose packages a repository has: the role's that names it, or the distribution.
DRIVER, TOOLKIT, DISTRIBUTION = "driver", "toolkit", "distribution"
ROLES = (DRIVER, TOOLKIT, DISTRIBUTION)
# Files of a mirror's folder that the repository hasn't.
DESCRIPTION, KEY = "repository.json", "repository.asc"
FOLDER = "packages"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[A-Za-z0-9/][\w.+~:/-]*", re.ASCII)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_ADDRESS = re.compile(r"[a-z+]+://?[^\s\x00-\x1f\x7f]+")


class MirroredFile(t.TypedDict):
    """:ivar path: below the mirror's folder; ``bytes`` and ``sha256`` (hexadecimal) are the file's."""

    path: str
    bytes: int
    sha256: str


class MirroredPackage(MirroredFile):
    """One package file. ``version`` is the manager's: with the epoch where it isn't 0."""

    name: str
    version: str
    architecture: str


class MirroredRepository(t.TypedDict):
    """What a partial mirror has, and what a machine needs to know to use it.

    :ivar manager: ``apt`` or ``rpm``.
    :ivar name: of the repository in a machine's files: lowercase letters, digits, ``-`` and ``_``.
    :ivar role: ``driver``, ``toolkit`` or ``distribution``.
    :ivar path: of its folder in the archive, ``packages/apt/...``.
    :ivar address: where the vendor has it.
    :ivar distribution: ``gpu_node.distribution.id`` of the machines that it is for; ``release`` is their version,
        ``architecture`` dpkg's name.
    :ivar suites: apt only, as are ``components``: those from which packages are taken.
    :ivar signed: what the vendor signs: ``metadata``, ``packages`` or both.
    :ivar key: the vendor's public keys, armoured, in the mirror's folder.
    :ivar metadata: byte for byte the vendor's.
    """

    manager: str
    name: str
    role: str
    path: str
    address: str
    distribution: str
    release: str
    architecture: str
    suites: list[str]
    components: list[str]
    signed: list[str]
    key: MirroredFile
    metadata: list[MirroredFile]
    packages: list[MirroredPackage]


def public_address(address: str) -> str:
    """Return an address without user, password and query: the archive is carried and served, and SUSE's have tokens."""
    scheme, mark, rest = re.split("[?#]", address, maxsplit=1)[0].partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{mark}{place.rpartition('@')[2]}{slash}{path}"


def folder_end(distribution: str, release: str, architecture: str) -> str:
    """Return what the name of a mirror's folder ends with: distributions may have parts of the same repository."""
    return "_" + safe_name(f"://{distribution}{release}-{architecture}")


def repository(value: t.Any, where: str) -> MirroredRepository:
    """Return the description of a mirror that came from a file or a machine.

    :param where: the file or machine, for the message.
    :raises BadInput: it isn't one.
    """
    try:
        return _repository(value)
    except (ValueError, KeyError, TypeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise BadInput(f"{where} isn't the description of a package repository: {what}") from error


def _repository(value: t.Any) -> MirroredRepository:
    if not isinstance(value, dict):
        raise ValueError("it is no mapping")
    manager = _one_of(value, "manager", MANAGERS)
    path = _text(value, "path", re.compile(rf"{FOLDER}/{manager}/[A-Za-z0-9][A-Za-z0-9._-]*"))
    packages = [_package(row) for row in _rows(value, "packages")]
    metadata = [_file(row) for row in _rows(value, "metadata")]
    if not packages or not metadata:
        raise ValueError("it has no packages, or no metadata")
    signed = _words(value, "signed")
    if not signed or not set(signed) <= {"metadata", "packages"}:
        raise ValueError("signed says neither metadata nor packages")
    machine = [_text(value, field, _WORD) for field in ("distribution", "release", "architecture")]
    if not path.endswith(folder_end(*machine)):
        raise ValueError(f"its folder {path} isn't one of {'-'.join(machine)}, which it is for")
    return {
        "manager": manager,
        "name": _text(value, "name", _NAME),
        "role": _one_of(value, "role", ROLES),
        "path": path,
        "address": _text(value, "address", _ADDRESS),
        "distribution": machine[0],
        "release": machine[1],
        "architecture": machine[2],
        "suites": _words(value, "suites"),
        "components": _words(value, "components"),
        "signed": signed,
        "key": _file(value["key"]),
        "metadata": metadata,
        "packages": packages,
    }


def _text(value: JsonObject, field: str, form: t.Pattern[str]) -> str:
    text = value[field]
    if not isinstance(text, str) or len(text) > LONGEST or not form.fullmatch(text):
        raise ValueError(f"{field} is {str(text)[:80]!r}")
    return text


def _one_of(value: JsonObject, field: str, known: t.Sequence[str]) -> str:
    if value[field] not in known:
        raise ValueError(f"{field} is none of {', '.join(known)}")
    return str(value[field])


def _rows(value: JsonObject, field: str) -> list[t.Any]:
    if not isinstance(value[field], list):
        raise ValueError(f"{field} is no list")
    return list(value[field])


def _words(value: JsonObject, field: str) -> list[str]:
    return [_text({field: word}, field, _WORD) for word in _rows(value, field)]


def _file(value: t.Any) -> MirroredFile:
    if not isinstance(value, dict) or type(value.get("bytes")) is not int or value["bytes"] < 0:
        raise ValueError("a file of it has no number of bytes")
    if not _SHA256.fullmatch(str(value.get("sha256"))):
        raise ValueError("a file of it has no SHA-256")
    return {"path": file_path(value.get("path")), "bytes": value["bytes"], "sha256": str(value["sha256"])}


def _package(value: t.Any) -> MirroredPackage:
    file = _file(value)
    name = _text(value, "name", re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII))
    version = _text(value, "version", re.compile(r"[\w.+~^:-]+", re.ASCII))
    return {**file, "name": name, "version": version, "architecture": _text(value, "architecture", _WORD)}
