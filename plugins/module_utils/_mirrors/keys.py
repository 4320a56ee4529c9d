# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keys as text: what a package manager has as binary files becomes one armoured block. Pure."""

from __future__ import annotations

import base64
import binascii
import typing as t

from .._core.errors import ShareError
from .._packages.options import ARMOUR


def armoured(files: t.Sequence[bytes], where: str) -> str:
    """Return the public keys of several files, binary or armoured, as one armoured block (RFC 9580, section 6).

    apt reads only the first block of a file.

    :param where: what the keys are of, for the message.
    :raises ShareError: there is no key, or a file isn't one.
    """
    data = b"".join(_packets(file, where) for file in files)
    if not data:
        raise ShareError(f"{where}: there is no key that verifies it")
    text = base64.b64encode(data).decode()
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    check = base64.b64encode(_crc24(data).to_bytes(3, "big")).decode()
    return "\n".join([ARMOUR[0], "", *lines, f"={check}", ARMOUR[1], ""])


def _packets(file: bytes, where: str) -> bytes:
    if ARMOUR[0].encode() not in file:
        # The first bit of an OpenPGP packet is set.
        if file and not file[0] & 0x80:
            raise ShareError(f"{where}: a file of its keys is no OpenPGP key")
        return file
    found = b""
    inside, body = False, [""]
    for line in file.decode("ascii", "replace").splitlines():
        word = line.strip()
        if word == ARMOUR[0]:
            inside, body = True, []
        elif word == ARMOUR[1] and inside:
            inside = False
            # Headers end with an empty line; the checksum begins with =.
            start = body.index("") + 1 if "" in body else 0
            text = "".join(row for row in body[start:] if not row.startswith("="))
            try:
                found += base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError) as error:
                raise ShareError(f"{where}: a file of its keys is no OpenPGP key") from error
        elif inside:
            body.append(word)
    return found


def _crc24(data: bytes) -> int:
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _bit in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
    return crc
