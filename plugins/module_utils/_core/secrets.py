# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Replace credentials in a text by numbered placeholders before it is shown or edited, and restore them. Pure."""

from __future__ import annotations

import re
import typing as t

PLACEHOLDER = "kubegpu-share-masked"


class Masking:
    """The credentials of one kind of file.

    :param secret: matches the text before a credential and the credential, as its only two non-empty groups.
    :param quote: the quote around each placeholder, for files in which ``secret`` matches quoted values.
    """

    def __init__(self, secret: t.Pattern[str], quote: str = "") -> None:
        self._secret = secret
        self._quote = quote

    def mask(self, text: str) -> str:
        """Replace each credential by a numbered placeholder."""
        return self._replaced(text, lambda placeholder, _value: placeholder)

    def unmask(self, text: str, real: str) -> str:
        """Restore the credentials of a masked text, which may have been edited.

        :param real: the file from which ``text`` was masked.
        """
        secrets: dict[str, str] = {}

        def collect(placeholder: str, value: str) -> str:
            secrets[placeholder] = value
            return value

        self._replaced(real, collect)
        placeholders = rf"{self._quote}{PLACEHOLDER}-[0-9]+{self._quote}"
        return re.sub(placeholders, lambda found: secrets.get(found.group(), found.group()), text)

    def _replaced(self, text: str, value_of: t.Callable[[str, str], str]) -> str:
        count = 0

        def one(found: t.Match[str]) -> str:
            nonlocal count
            count += 1
            before, value = (group for group in found.groups() if group is not None)
            return before + value_of(f"{self._quote}{PLACEHOLDER}-{count}{self._quote}", value)

        return self._secret.sub(one, text)
