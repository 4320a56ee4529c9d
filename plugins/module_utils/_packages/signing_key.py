# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The armoured OpenPGP key that signs a package repository."""

from __future__ import annotations

import base64
import binascii
import hashlib
import typing as t

from .._core.digest import digest
from .._core.errors import ShareError
from .spec import Repository

ARMOUR = ("-----BEGIN PGP PUBLIC KEY BLOCK-----", "-----END PGP PUBLIC KEY BLOCK-----")

Fetch = t.Callable[[str], bytes]


def check_key(repository: Repository, text: str) -> None:
    """Validate a repository's key.

    :raises ShareError: it isn't an armoured key, or its SHA-256 differs from ``key_sha256``.
    """
    lines = [line.strip() for line in text.splitlines()]
    if any(line not in lines for line in ARMOUR):
        raise ShareError(
            f"repositories: {repository.name}: the key ({repository.key_origin}) isn't an armoured OpenPGP public key"
        )
    if repository.key_sha256 and digest(text) != repository.key_sha256:
        raise ShareError(
            f"repositories: {repository.name}: the key ({repository.key_origin}) has SHA-256 {digest(text)}, "
            f"and key_sha256 is {repository.key_sha256}"
        )


def fetch_key(url: str) -> bytes:
    """Download a key; proxies are those of the environment."""
    from ansible.module_utils.urls import open_url

    with open_url(url, timeout=30) as answer:
        return t.cast(bytes, answer.read())


def key_of(repository: Repository, fetch: Fetch) -> str:
    """Return the repository's key, downloaded unless the options contain it.

    :raises ShareError: it can't be downloaded, or isn't the expected key.
    """
    text = repository.key_text
    if not text:
        try:
            text = fetch(repository.key_url).decode("utf-8", "replace")
        except Exception as error:
            raise ShareError(
                f"repositories: {repository.name}: the key at {repository.key_url} can't be downloaded: {error}"
            ) from error
    check_key(repository, text)
    return text


def rpm_names(text: str) -> list[str]:
    """Return rpm's names of the keys of an armoured block: ``<last 8 digits of the key id>-<creation time>``.

    Only version 4 keys, which are all that rpm 4 reads; others are left out.
    """
    names: list[str] = []
    body: list[str] = []
    inside = False
    for line in [*text.splitlines(), ARMOUR[1]]:
        word = line.strip()
        if word == ARMOUR[0]:
            inside, body = True, []
        elif word == ARMOUR[1] and inside:
            inside = False
            names += _names(body)
        elif inside:
            body.append(word)
    return names


def _names(lines: t.Sequence[str]) -> t.Iterator[str]:
    # Headers end with an empty line; the checksum begins with =.
    start = lines.index("") + 1 if "" in lines else 0
    try:
        data = base64.b64decode("".join(line for line in lines[start:] if not line.startswith("=")))
    except (binascii.Error, ValueError):
        return
    for tag, packet in _packets(data):
        if tag == 6 and packet[:1] == b"\x04":
            digest = hashlib.sha1(b"\x99" + len(packet).to_bytes(2, "big") + packet).hexdigest()
            yield f"{digest[-8:]}-{packet[1:5].hex()}"


def _packets(data: bytes) -> t.Iterator[tuple[int, bytes]]:
    """Yield tag and body of each packet of an OpenPGP message (RFC 9580, section 4.2)."""
    while len(data) > 1 and data[0] & 0x80:
        first = data[0]
        if first & 0x40:
            tag, size, start = first & 0x3F, data[1], 2
            if 192 <= size < 224 and len(data) > 2:
                size, start = ((size - 192) << 8) + data[2] + 192, 3
            elif size == 255:
                size, start = int.from_bytes(data[2:6], "big"), 6
            elif size >= 224:
                return
        else:
            width = (1, 2, 4, 0)[first & 3]
            tag, start = (first & 0x3C) >> 2, 1 + width
            size = int.from_bytes(data[1:start], "big") if width else len(data) - 1
        yield tag, data[start : start + size]
        data = data[start + size :]
