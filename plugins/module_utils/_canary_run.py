# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The canary: pods of known size through the real scheduler, judged step by step, and removed whatever happens."""

from __future__ import annotations

import contextlib
import random
import signal
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _canary_result as result
from ansible_collections.kubegpu.share.plugins.module_utils._canary_hands import Hands
from ansible_collections.kubegpu.share.plugins.module_utils._canary_objects import Wish
from ansible_collections.kubegpu.share.plugins.module_utils._canary_place import Execute
from ansible_collections.kubegpu.share.plugins.module_utils._canary_steps import Canary
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ended(BaseException):
    """A signal asked the run to end; no step may take it for its own failure."""


@contextlib.contextmanager
def _ended_politely(cleaning: list[bool]) -> t.Iterator[None]:
    """Turn the first signal that ends a run into an exception; the clean-up is never interrupted."""

    def end(number: int, frame: t.Any) -> None:
        if not cleaning:
            cleaning.append(True)
            raise Ended(f"ended by signal {number}")

    before = [signal.signal(one, end) for one in SIGNALS]
    try:
        yield
    finally:
        for one, handler in zip(SIGNALS, before):
            signal.signal(one, handler)


def run(kube: Kube, execute: Execute, wish: Wish, check: bool, patience: Waiting | None = None) -> Json:
    """Run the canary and leave nothing behind.

    :param check: make nothing; say what would be made.
    :param patience: with which clock to wait; its timeout doesn't matter.
    :returns: ``changed``, ``canary``, ``findings`` and ``checks``.
    :raises BadInput: an option can't be served.
    :raises ShareError: a signal ended it; what is left is in the message.
    """
    if wish.timeout < 1:
        raise BadInput("timeout: less than a second is no time to wait for anything")
    hands = Hands(kube, wish, patience or Waiting(wish.timeout), f"{random.SystemRandom().randrange(16**8):08x}")
    canary = Canary(hands, execute, wish)
    cleaning: list[bool] = []
    try:
        with _ended_politely(cleaning):
            try:
                try:
                    canary.step("Y1", lambda: canary.look(check))
                    if canary.ready and not check:
                        canary.run()
                finally:
                    # A signal that comes before this line is done still leads to the one below.
                    cleaning.append(True)
            finally:
                if hands.touched:
                    canary.finish()
    except Ended as end:
        left = canary.steps.get("Y7")
        said = f"{end}; {left.what if left else 'nothing was made'}"
        raise ShareError(said, **_result(canary, hands, wish)) from end
    found = _result(canary, hands, wish)
    return {**found, "changed": found["changed"] or (check and canary.ready)}


def _result(canary: Canary, hands: Hands, wish: Wish) -> Json:
    steps = [canary.steps[one] for one in sorted(canary.steps)]
    return {
        "changed": hands.changed,
        "canary": {
            "result": result.result_of(steps),
            "steps": [step.as_dict() for step in steps],
            "node": canary.node,
            "namespace": wish.namespace,
            "units": canary.chosen.sizes.units if canary.chosen else 0,
            "pods": list(hands.made.values()),
        },
        "findings": result.findings(steps, canary.node, wish.namespace),
        "checks": result.checks(steps),
    }
