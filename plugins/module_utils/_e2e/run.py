# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Run a suite, and remove everything it created, also after a signal."""

from __future__ import annotations

import contextlib
import random
import signal
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.wait import Waiting
from .._kube.client import Kube
from . import result
from .canary import Canary
from .client import CreatedPod, SuiteClient
from .exec import Execute
from .hami import Hami
from .objects import CANARY, DRA, HAMI, WORKLOADS, Options
from .result import Check, Finding
from .suite import Suite
from .workloads import Workloads

SUITES: dict[str, type[Suite]] = {WORKLOADS: Workloads, CANARY: Canary, HAMI: Hami}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Acceptance(t.TypedDict):
    """The suite's outcome."""

    suite: str
    result: str
    steps: list[dict[str, t.Any]]
    node: str
    namespace: str
    units: int
    pods: list[CreatedPod]
    untested: list[str]


class Outcome(t.TypedDict):
    """The module's result."""

    changed: bool
    acceptance: Acceptance
    table: str
    findings: list[Finding]
    checks: list[Check]


class Interrupted(BaseException):
    """A signal asked the run to end; no step handles it."""


@contextlib.contextmanager
def _interruptible(cleaning: list[bool]) -> t.Iterator[None]:
    """Turn the first signal into an exception; the clean-up is never interrupted."""

    def interrupt(number: int, frame: t.Any) -> None:
        if not cleaning:
            cleaning.append(True)
            raise Interrupted(f"interrupted by signal {number}")

    before = [signal.signal(one, interrupt) for one in SIGNALS]
    try:
        yield
    finally:
        for one, handler in zip(SIGNALS, before):
            signal.signal(one, handler)


def run(kube: Kube, execute: Execute, options: Options, check: bool, waiting: Waiting | None = None) -> Outcome:
    """Run a suite and remove everything it created.

    :param check: create nothing; describe what would be created.
    :param waiting: clock and interval of polling; its timeout isn't used.
    :raises BadInput: an option is invalid.
    :raises ShareError: a signal interrupted the run; the message names what is left.
    """
    if options.timeout < 1:
        raise BadInput("timeout: must be at least 1 second")
    identifier = f"{random.SystemRandom().randrange(16**8):08x}"
    client = SuiteClient(kube, options, waiting or Waiting(options.timeout), identifier)
    suite = SUITES[options.suite](client, execute, options)
    cleaning: list[bool] = []
    try:
        with _interruptible(cleaning):
            try:
                try:
                    suite.step(suite.first, lambda: suite.plan(check))
                    if suite.ready and not check:
                        suite.run()
                finally:
                    # A signal before this line completes still reaches the clean-up below.
                    cleaning.append(True)
            finally:
                if client.touched:
                    suite.clean()
    except Interrupted as error:
        last = suite.steps.get(suite.last)
        text = f"{error}; {last.what if last else 'nothing was created'}"
        raise ShareError(text, **_outcome(suite, client, options, False)) from error
    return _outcome(suite, client, options, check and suite.ready)


def _untested_text(suite: Suite) -> str:
    if not suite.untested:
        return ""
    by = "the extender" if suite.selected.allocation == DRA else "kube-scheduler by claims"
    return f"\nNot tested: {', '.join(suite.untested)}, whose cards {by} allocates; run it on one of them, too."


def _outcome(suite: Suite, client: SuiteClient, options: Options, would_change: bool) -> Outcome:
    steps = [suite.steps[one] for one in sorted(suite.steps)]
    return {
        "changed": client.changed or would_change,
        "acceptance": {
            "suite": options.suite,
            "result": result.overall_result(steps),
            "steps": [step.as_dict() for step in steps],
            "node": suite.node,
            "namespace": options.namespace,
            "units": suite.units if suite.before else 0,
            "pods": list(client.created_pods.values()),
            "untested": suite.untested,
        },
        "table": result.table(steps, f"node {suite.node}, image {client.image}" if suite.node else "")
        + _untested_text(suite),
        "findings": result.findings(steps, suite.node, options.namespace),
        "checks": result.checks(steps, options.suite if options.suite == HAMI else "gpushare"),
    }
