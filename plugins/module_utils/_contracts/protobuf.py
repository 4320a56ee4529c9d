# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decode protobuf's wire format as far as kubelet's messages need it. Standard library only, no I/O.

Nodes have no protobuf library: kubelet's checkpoint holds protobuf messages on every node, and ``python3-grpcio``
doesn't depend on the protobuf runtime. Only strings, maps of strings and nested messages are needed, which share one
wire type; other fields are skipped. Where the library is lenient (a known field of another wire type is taken as
unknown), this decoder refuses, so that a damaged message is never half decoded. Format: https://protobuf.dev,
"Encoding". The servers' image takes this file.
"""

from __future__ import annotations

import typing as t

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
WIDTHS = {FIXED64: 8, FIXED32: 4}
# A varint holds 64 bits in at most this many bytes; a field number has 29 bits.
VARINT_BYTES = 10
LARGEST_KEY = (1 << 32) - 1


class MalformedMessage(ValueError):
    """The bytes aren't the expected message; the text completes a sentence."""


def decode_fields(data: bytes, wanted: t.Container[int]) -> dict[int, list[bytes]]:
    """Return the wanted fields of a message, each with its values in the order of the message.

    :param wanted: numbers of fields that are strings or messages.
    :raises MalformedMessage: the message is truncated or damaged, or a wanted field has another wire type.
    """
    fields: dict[int, list[bytes]] = {}
    position, end = 0, len(data)
    while position < end:
        key = data[position]
        # Keys and lengths mostly take one byte; a node with many small units has a million of them.
        if key < 0x80:
            position += 1
        else:
            key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if number == 0 or key > LARGEST_KEY:
            raise MalformedMessage(f"no field begins at byte {position}")
        if wire_type == DELIMITED:
            if position < end and data[position] < 0x80:
                length = data[position]
                position += 1
            else:
                length, position = _varint(data, position)
            after = position + length
            if after > end:
                raise MalformedMessage(f"field {number} is truncated")
            if number in wanted:
                fields.setdefault(number, []).append(data[position:after])
            position = after
            continue
        if number in wanted:
            raise MalformedMessage(f"field {number} has wire type {wire_type}")
        if wire_type == VARINT:
            _value, position = _varint(data, position)
        elif wire_type in WIDTHS:
            position += WIDTHS[wire_type]
            if position > end:
                raise MalformedMessage(f"field {number} is truncated")
        else:
            # Groups, which no message of kubelet has, and undefined types.
            raise MalformedMessage(f"field {number} has wire type {wire_type}")
    return fields


def decode_string(values: t.Sequence[bytes] | None) -> str:
    """Decode a string field: the last value counts, and a missing field is the empty string.

    :raises MalformedMessage: it isn't UTF-8.
    """
    return decode_strings(values[-1:])[0] if values else ""


def decode_strings(values: t.Sequence[bytes] | None) -> list[str]:
    """Decode a repeated string field.

    :raises MalformedMessage: a value isn't UTF-8.
    """
    try:
        return [value.decode("utf-8") for value in values or ()]
    except UnicodeDecodeError:
        raise MalformedMessage("a string isn't UTF-8") from None


def decode_string_map(values: t.Sequence[bytes] | None) -> dict[str, str]:
    """Decode a map of strings, which is a repeated message of key (1) and value (2).

    :raises MalformedMessage: an entry isn't such a message.
    """
    pairs = {}
    for message in values or ():
        pair = decode_fields(message, (1, 2))
        pairs[decode_string(pair.get(1))] = decode_string(pair.get(2))
    return pairs


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for count in range(VARINT_BYTES):
        if position >= len(data):
            raise MalformedMessage("the message ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            if value >> 64:
                break
            return value, position
    raise MalformedMessage(f"the number that ends at byte {position} exceeds 64 bits")
