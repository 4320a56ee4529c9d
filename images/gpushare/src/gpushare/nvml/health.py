# SPDX-License-Identifier: GPL-3.0-or-later
"""Decide by the driver's XID errors whether a card is given to pods. No I/O: times are parameters.

An error of the application doesn't concern the card. After any other error the card isn't given to pods until no
further one has been reported for a while; NVML is queried for persistent problems in any case.
"""

from __future__ import annotations

import typing as t

# Errors of the program, or its end.
APPLICATION_XIDS: t.Mapping[int, str] = {
    13: "a graphics engine exception of the application",
    31: "a page fault of the application",
    43: "the application's work stopped",
    45: "the application's work was cleaned up after another error",
    68: "an exception of the video processor",
    109: "a timeout of the application's context switch",
}
# The recovery action has changed, perhaps to none: NVML is queried for it.
QUERY_XIDS = frozenset({154})
CARD_XIDS: t.Mapping[int, str] = {
    46: "the card stopped processing",
    48: "a double-bit memory error",
    61: "a fault of the card's own micro-controller",
    62: "the card's own micro-controller has halted",
    63: "a memory row or page is to be retired",
    64: "a memory row or page can't be retired",
    74: "an error on NVLink",
    79: "the card has fallen off the bus",
    92: "many single-bit memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the card's GSP doesn't answer",
    120: "the card's GSP has failed",
    121: "an error on the link between chips",
    140: "an uncorrected memory error",
    143: "the card couldn't be initialised",
}


def sentence(xid: int) -> str:
    """Return the reason of a card after an XID error."""
    return f"XID {xid} ({CARD_XIDS.get(xid, 'an error that the driver reports of the card')})"


class Health:
    """The cards' last errors.

    :param quiet: seconds without a further error after which a card is given to pods again.
    :param ignored: XIDs that don't concern the card, in addition to those of applications.
    """

    def __init__(self, quiet: float, ignored: t.Iterable[int] = ()) -> None:
        self._quiet = quiet
        self._ignored = frozenset(ignored) | frozenset(APPLICATION_XIDS) | QUERY_XIDS
        self._last: dict[str, tuple[int, float]] = {}

    def note(self, uuid: str, xid: int, now: float) -> bool:
        """Record an XID error; true if the card isn't given to pods because of it."""
        if xid in self._ignored:
            return False
        self._last[uuid] = (xid, now)
        return True

    def xid(self, uuid: str, now: float) -> int | None:
        """Return the error because of which a card isn't given to pods; None if there is none."""
        xid, when = self._last.get(uuid, (None, 0.0))
        if xid is not None and now - when >= self._quiet:
            del self._last[uuid]
            return None
        return xid
