# SPDX-License-Identifier: GPL-3.0-or-later
"""Errors by which a request of kubelet is refused."""

from __future__ import annotations

from gpushare.shared._contracts.gpushare import Reason, Refusal


class RequestRefused(Exception):
    """A request of kubelet can't be served; the message starts with the code."""

    def __init__(self, code: Reason, text: str) -> None:
        self.refusal = Refusal(code, text)
        super().__init__(str(self.refusal))


class InvalidIds(RequestRefused):
    """Device IDs that no container can be given."""


class NoDevices(RequestRefused):
    """No device IDs satisfy the pod's request."""
