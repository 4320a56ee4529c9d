# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Read protobuf's wire format, as far as kubelet's messages need it: nodes have no protobuf library. No I/O.

All that is wanted of kubelet's messages are texts, maps of texts and messages in messages, which are one wire type; the
rest is stepped over. Contract: protobuf.dev, "Encoding". Where a library is lenient (a known field of another wire type
counts as unknown), this reader refuses, so that a damaged message is never half of the truth.
"""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
WIDTHS = {FIXED64: 8, FIXED32: 4}
# A varint holds 64 bits in at most so many bytes; a field number is 29 bits.
VARINT_BYTES = 10
LARGEST_KEY = (1 << 32) - 1


class Broken(ShareError):
    """These bytes aren't such a message, in one sentence."""


def fields(data: bytes, wanted: t.Container[int]) -> dict[int, list[bytes]]:
    """The wanted fields of a message, each with its values in the order in which they stand.

    :param wanted: numbers of fields that are texts or messages.
    :raises Broken: the bytes end too early, or aren't a message, or a wanted field is neither text nor message.
    """
    found: dict[int, list[bytes]] = {}
    position, end = 0, len(data)
    while position < end:
        key = data[position]
        # Keys and lengths are nearly always one byte; a node of many small units has a million of them.
        if key < 0x80:
            position += 1
        else:
            key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if number == 0 or key > LARGEST_KEY:
            raise Broken(f"byte {position} begins no field")
        if kind == DELIMITED:
            if position < end and data[position] < 0x80:
                length = data[position]
                position += 1
            else:
                length, position = _varint(data, position)
            after = position + length
            if after > end:
                raise Broken(f"field {number} is cut short")
            if number in wanted:
                found.setdefault(number, []).append(data[position:after])
            position = after
            continue
        if number in wanted:
            raise Broken(f"field {number} has wire type {kind}")
        if kind == VARINT:
            _value, position = _varint(data, position)
        elif kind in WIDTHS:
            position += WIDTHS[kind]
            if position > end:
                raise Broken(f"field {number} is cut short")
        else:
            # Groups, which no message of kubelet has, and what was never given a meaning.
            raise Broken(f"field {number} has wire type {kind}")
    return found


def text(values: t.Sequence[bytes] | None) -> str:
    """A field that is one text: the last one counts, and none is the empty text.

    :raises Broken: it isn't UTF-8.
    """
    return texts(values[-1:])[0] if values else ""


def texts(values: t.Sequence[bytes] | None) -> list[str]:
    """A field that is a list of texts.

    :raises Broken: one isn't UTF-8.
    """
    try:
        return [one.decode("utf-8") for one in values or ()]
    except UnicodeDecodeError:
        raise Broken("a text isn't UTF-8") from None


def text_map(values: t.Sequence[bytes] | None) -> dict[str, str]:
    """A field that is a map of texts: on the wire a list of messages of key (1) and value (2).

    :raises Broken: one is no such message.
    """
    found = {}
    for one in values or ():
        pair = fields(one, (1, 2))
        found[text(pair.get(1))] = text(pair.get(2))
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for count in range(VARINT_BYTES):
        if position >= len(data):
            raise Broken("the message ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            if value >> 64:
                break
            return value, position
    raise Broken(f"byte {position} ends no number of 64 bits")
