# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What makes a plan of NVIDIA's device plugin impossible. Pure."""

from __future__ import annotations

from ...module_utils._core.types import JsonObject


class Problem(Exception):
    """A reason, where it is and what to do.

    :param code: what kind of problem it is.
    :param where: the variable, with the keys below it.
    :param text: one sentence, which is printed after ``where``.
    """

    def __init__(self, code: str, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")
        self.code, self.where = code, where

    def result(self) -> JsonObject:
        """Return it as data, with the whole sentence as ``message``."""
        return {"code": self.code, "where": self.where, "message": str(self)}
