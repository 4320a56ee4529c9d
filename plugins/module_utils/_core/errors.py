# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The errors of the collection; ``run_module`` and the action plugins turn them into a failed task."""

from __future__ import annotations

import typing as t


class ShareError(Exception):
    """An error that the user can act on.

    :param message: one sentence that names the variable, file or line concerned.
    :param details: more keys for the result of the failed module.
    """

    def __init__(self, message: str, **details: t.Any) -> None:
        super().__init__(message)
        self.details = details


class BadInput(ShareError):
    """The input is invalid or unsupported; nothing was changed."""


class NotInEffect(ShareError):
    """A change was made, but the component does not show it."""
