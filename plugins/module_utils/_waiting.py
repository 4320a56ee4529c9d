# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Waiting for what takes its time: one look after the other until a deadline."""

from __future__ import annotations

import dataclasses
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError

# What comes in a moment isn't seen yet, and what comes and goes isn't there: so many good looks make one outcome.
QUIET_LOOKS = 3


@dataclasses.dataclass
class Waiting:
    """How long to wait, and how long between two looks; time is injected for the tests."""

    timeout: float
    pause: float = 1.0
    sleep: t.Callable[[float], None] = time.sleep
    now: t.Callable[[], float] = time.monotonic

    def looks(self) -> t.Iterator[None]:
        """One item for each look that is due. There is always one, and the last one isn't before the deadline."""
        end = self.now() + self.timeout
        while True:
            yield
            if self.now() >= end:
                return
            self.sleep(self.pause)

    def until_quiet(self, look: t.Callable[[], tuple[str, bool]]) -> str:
        """Until several looks one after the other have nothing to say; why it didn't come to that, or nothing.

        :param look: what isn't so yet, and whether it won't ever be so.
        """
        said, quiet = "", 0
        for _look in self.looks():
            try:
                said, final = look()
            except ShareError as error:
                # The API server may be away for a moment.
                said, final = str(error), False
            if final:
                return said
            quiet = 0 if said else quiet + 1
            if quiet >= QUIET_LOOKS:
                return ""
        return f"not within {self.timeout:g} s: {said or 'it comes and goes'}"
