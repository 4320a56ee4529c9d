# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The canary's book: each step is done, and what came of it is kept, whatever it is. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _canary_result as result
from ansible_collections.kubegpu.share.plugins.module_utils._canary import NONSENSE
from ansible_collections.kubegpu.share.plugins.module_utils._canary_result import NotShown, Step, Told
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError


class Book:
    """
    :ivar steps: what was found, by id.
    :ivar may_fail: nothing was made yet, so that what the user has to mend ends the run.
    """

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}
        self.may_fail = True
        self._deaf = ""

    def step(self, identifier: str, work: t.Callable[[], str]) -> bool:
        """Do one step and keep what came of it; whether it went well."""
        step = Step(identifier, result.PASS, "")
        try:
            if self._deaf:
                raise NotShown(f"the API server's last word was: {self._deaf}")
            step = Step(identifier, result.PASS, work())
        except Told as told:
            step = Step(identifier, told.result, told.what, told.do, told.pod, told.card, told.evidence)
        except BadInput as error:
            if self.may_fail:
                raise
            step = self._unheard(identifier, error)
        except ShareError as error:
            step = self._unheard(identifier, error)
        except NONSENSE as error:
            step = Step(identifier, result.UNKNOWN, f"what the API answered can't be read ({type(error).__name__})")
        self.steps[identifier] = step
        return step.result == result.PASS

    def _unheard(self, identifier: str, error: ShareError) -> Step:
        self._deaf = result.short(str(error))
        refused = "may not do this" in self._deaf
        do = "give the canary's user the rights that gpu_canary lists" if refused else "see how the API server is"
        return Step(identifier, result.UNKNOWN, self._deaf, do)

    def skip(self, identifier: str, why: str) -> None:
        self.steps[identifier] = Step(identifier, result.SKIPPED, why)
