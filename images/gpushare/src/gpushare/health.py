# SPDX-License-Identifier: GPL-3.0-or-later
"""What the driver's XID errors mean for a card, and for how long. Pure: times are given.

An error of the application says nothing of the card. After any other one the card isn't given to pods until it has been
quiet for a while; whether the driver has something to say against it by then, NVML is asked anyway.
"""

from __future__ import annotations

import re
import typing as t

# The program that ran did something wrong, or was ended.
APPLICATION_XIDS: t.Mapping[int, str] = {
    13: "a graphics engine exception of the application",
    31: "a page fault of the application",
    43: "the application's work stopped",
    45: "the application's work was cleaned up after another error",
    68: "an exception of the video processor",
    109: "a timeout of the application's context switch",
}
# "The recovery action has changed", to none as well: NVML says to which.
LOOK_XIDS = frozenset({154})
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

_REASON = re.compile(r"XID ([0-9]{1,9}) ")


def sentence(xid: int) -> str:
    """What stands as the reason on a card after an XID."""
    return f"XID {xid} ({CARD_XIDS.get(xid, 'an error that the driver reports of the card')})"


def xid_of(reason: str) -> int | None:
    """The XID of such a reason; None for any other."""
    found = _REASON.match(reason)
    return int(found[1]) if found else None


class Health:
    """The cards' last errors.

    :param quiet: seconds without a further error after which a card is given to pods again.
    :param ignored: XIDs that say nothing of a card, besides those of applications.
    """

    def __init__(self, quiet: float, ignored: t.Iterable[int] = ()) -> None:
        self._quiet = quiet
        self._ignored = frozenset(ignored) | frozenset(APPLICATION_XIDS) | LOOK_XIDS
        self._last: dict[str, tuple[int, float]] = {}

    def note(self, uuid: str, xid: int, now: float) -> bool:
        """An XID of a card; true if the card isn't given to pods for it."""
        if xid in self._ignored:
            return False
        self._last[uuid] = (xid, now)
        return True

    def reason(self, uuid: str, now: float) -> str:
        """Why a card isn't given to pods; empty if nothing is held against it."""
        xid, when = self._last.get(uuid, (0, 0.0))
        if not xid:
            return ""
        if now - when >= self._quiet:
            del self._last[uuid]
            return ""
        return sentence(xid)
