# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Credentials in a text, replaced by numbered words so that it may be shown and edited, and put back. Pure."""

from __future__ import annotations

import re
import typing as t

WORD = "kubegpu-share-masked"


class Masking:
    """One kind of file's credentials.

    :param secret: matches what stands before a credential and the credential, as the two groups that aren't empty.
    :param quote: stands around each word, where the credential that it takes the place of has its own.
    """

    def __init__(self, secret: t.Pattern[str], quote: str = "") -> None:
        self._secret = secret
        self._quote = quote

    def mask(self, text: str) -> str:
        """The text with each credential replaced by a numbered word."""
        return self._replaced(text, lambda word, _value: word)

    def unmask(self, text: str, real: str) -> str:
        """A masked text (edited meanwhile) with the credentials of the file that it was made from."""
        secrets: dict[str, str] = {}

        def remember(word: str, value: str) -> str:
            secrets[word] = value
            return value

        self._replaced(real, remember)
        words = rf"{self._quote}{WORD}-[0-9]+{self._quote}"
        return re.sub(words, lambda found: secrets.get(found.group(), found.group()), text)

    def _replaced(self, text: str, value_of: t.Callable[[str, str], str]) -> str:
        count = 0

        def one(found: t.Match[str]) -> str:
            nonlocal count
            count += 1
            before, value = (group for group in found.groups() if group is not None)
            return before + value_of(f"{self._quote}{WORD}-{count}{self._quote}", value)

        return self._secret.sub(one, text)
