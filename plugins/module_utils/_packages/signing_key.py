# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The armoured OpenPGP key that signs a package repository."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import typing as t

from .._core.digest import digest
from .._core.errors import ShareError
from .spec import Repository

ARMOUR = ("-----BEGIN PGP PUBLIC KEY BLOCK-----", "-----END PGP PUBLIC KEY BLOCK-----")

# Bytes; the keys of distributions and of NVIDIA have 1 to 30 KiB.
LARGEST = 1 << 20
# The packets of a key without subkeys: the key, a name, a signature.
PLAIN_KEY = (6, 13, 2)

Fetch = t.Callable[[str], bytes]


def check_key(repository: Repository, text: str) -> None:
    """Validate a repository's key.

    :raises KeyRefused: it isn't the key that ``key_sha256`` or, without it, ``key_fingerprint`` names.
    :raises ShareError: it isn't an armoured key.
    """
    lines = [line.strip() for line in text.splitlines()]
    if any(line not in lines for line in ARMOUR):
        raise _not_a_key(repository)
    if repository.key_sha256:
        if digest(text) != repository.key_sha256:
            raise KeyRefused(repository, "key_sha256", repository.key_sha256, digest(text))
    elif repository.key_fingerprint:
        found = fingerprint(text)
        if found != repository.key_fingerprint:
            raise KeyRefused(repository, "key_fingerprint", repository.key_fingerprint, found or "no single key")


def _not_a_key(repository: Repository) -> ShareError:
    return ShareError(
        f"repositories: {repository.name}: the key ({repository.key_origin}) isn't an armoured OpenPGP public key"
    )


class KeyRefused(ShareError):
    """A key that isn't the pinned one."""

    def __init__(self, repository: Repository, option: str, expected: str, found: str) -> None:
        what = "SHA-256" if option == "key_sha256" else "fingerprint"
        super().__init__(
            f"repositories: {repository.name}: the key ({repository.key_origin}) has {what} {found}, and {option} is "
            f"{expected}: nothing was changed; where the repository's owner announces this key, set {option} to it "
            "(the roles' variables end with repo_key_sha256), and otherwise don't use this repository",
            code="key_refused",
            repository=repository.name,
            origin=repository.key_origin,
            expected=expected,
            found=found,
        )


def fetch_key(url: str) -> bytes:
    """Download a key; proxies are those of the environment.

    :raises ShareError: it is larger than any key.
    """
    from ansible.module_utils.urls import open_url

    with open_url(url, timeout=30) as answer:
        found = t.cast(bytes, answer.read(LARGEST + 1))
    if len(found) > LARGEST:
        raise ShareError(f"it has more than {LARGEST >> 10} KiB")
    return found


def key_of(repository: Repository, fetch: Fetch) -> str:
    """Return the repository's key, downloaded unless the options contain it.

    :raises ShareError: it can't be downloaded, or isn't the expected key.
    """
    text = repository.key_text
    if not text:
        try:
            text = fetch(repository.key_url).decode()
        except UnicodeDecodeError as error:
            raise _not_a_key(repository) from error
        except Exception as error:
            raise ShareError(
                f"repositories: {repository.name}: the key at {repository.key_url} can't be downloaded: {error}"
            ) from error
    check_key(repository, text)
    return text


def fingerprint(text: str) -> str:
    """Return the fingerprint of the version 4 key that a text consists of, in capital hexadecimal digits.

    Empty where the text has anything beside that key, its names and their signatures: a package manager might read more
    keys in it than this function.
    """
    rows = [line.strip() for line in text.splitlines() if line.strip()]
    if not text.isascii() or len(rows) < 3 or (rows[0], rows[-1]) != ARMOUR:
        return ""
    body = [line.strip() for line in text.strip().splitlines()[1:-1]]
    # Headers end with an empty line; the checksum begins with =.
    end = body.index("") if "" in body else -1
    if any(not re.fullmatch(r"[A-Z][A-Za-z]*: [ -~]*", line) for line in body[: max(end, 0)]):
        return ""
    lines = body[end + 1 :]
    if lines and re.fullmatch(r"=[A-Za-z0-9+/]{4}", lines[-1]):
        lines.pop()
    try:
        data = base64.b64decode("".join(lines), validate=True)
    except (binascii.Error, ValueError):
        return ""
    packets = list(_packets(data))
    whole = sum(size for _tag, _body, size in packets) == len(data)
    tags = [tag for tag, _body, _size in packets]
    if not whole or tags[:1] != [6] or tags.count(6) != 1 or any(tag not in PLAIN_KEY for tag in tags):
        return ""
    return _fingerprint(packets[0][1]).upper()


def _fingerprint(packet: bytes) -> str:
    """Return the fingerprint of a version 4 key packet (RFC 9580, section 5.5.4.2); empty for another version."""
    if packet[:1] != b"\x04":
        return ""
    return hashlib.sha1(b"\x99" + len(packet).to_bytes(2, "big") + packet).hexdigest()


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
    for tag, packet, _size in _packets(data):
        if tag == 6 and packet[:1] == b"\x04":
            yield f"{_fingerprint(packet)[-8:]}-{packet[1:5].hex()}"


def _packets(data: bytes) -> t.Iterator[tuple[int, bytes, int]]:
    """Yield tag, body and size of each packet of an OpenPGP message (RFC 9580, section 4.2) that is whole."""
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
        if start + size > len(data):
            return
        yield tag, data[start : start + size], start + size
        data = data[start + size :]
