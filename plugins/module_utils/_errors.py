# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The one family of errors: raised anywhere inside, turned into ``fail_json`` only at the edge."""

from __future__ import annotations

import typing as t


class ShareError(Exception):
    """Something a person can act on, in one sentence.

    :param message: the sentence; it names the variable, file and line where there is one.
    :param details: what a machine may want beside it; becomes keys of the module's failure.
    """

    def __init__(self, message: str, **details: t.Any) -> None:
        super().__init__(message)
        self.details = details


class BadInput(ShareError):
    """What the user gave can't be served; nothing was changed."""


class NotInEffect(ShareError):
    """A change was made and the component it was made for doesn't show it."""
