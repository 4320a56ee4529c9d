# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a suite, and remove everything it created, also after a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import typing as t

from .._allocation.allocators import ALLOCATORS, allocator_of
from .._contracts import backends, nvidia_plugin
from .._contracts.model import Node
from .._core.errors import BadInput, ShareError
from .._core.natural import natural
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.pod_exec import Execute
from . import result
from .client import CreatedPod, SuiteClient
from .hami import Hami
from .kata import Kata
from .kubevirt import KubeVirt
from .nodes import ALL, CANARY, DRA, HAMI, KATA, NVIDIA, PASSTHROUGH, VGPU, WORKLOADS, Options
from .nvidia import Nvidia, announced
from .result import Check, Finding
from .suite import Suite
from .workloads import Canary, Workloads

SUITES: dict[str, t.Callable[[SuiteClient, Execute, Options], Suite]] = {
    WORKLOADS: Workloads,
    CANARY: Canary,
    HAMI: Hami,
    NVIDIA: Nvidia,
    PASSTHROUGH: KubeVirt,
    VGPU: KubeVirt,
    KATA: Kata,
}
# The suite of a back end's nodes. Checks have a suite's back end by its name.
SUITE_OF = {
    backends.GPUSHARE: WORKLOADS,
    backends.HAMI: HAMI,
    backends.NVIDIA: NVIDIA,
    **{name: name for name in backends.VIRTUAL},
}
BACKENDS = {suite: backend for backend, suite in SUITE_OF.items()}
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
    suites: list[Acceptance]


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

    before = [signal.signal(number, interrupt) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before):
            signal.signal(number, handler)


def kinds(nodes: t.Iterable[Node]) -> list[tuple[str, str, list[str]]]:
    """Return the kinds of nodes that a cluster has: the suite for each, what distinguishes it, and the nodes' names.

    :param nodes: with cards by claims as they would be announced.
    """
    by_kind: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        allocator = allocator_of(node)
        if not allocator:
            continue
        suite = SUITE_OF[ALLOCATORS[allocator].backend]
        kind = allocator if suite == WORKLOADS else _configuration(node) if suite == NVIDIA else ""
        by_kind.setdefault((suite, kind), []).append(node.name)
    order = list(SUITES)
    return [(*key, by_kind[key]) for key in sorted(by_kind, key=lambda key: (order.index(key[0]), key[1]))]


def _configuration(node: Node) -> str:
    """Return what distinguishes a node of NVIDIA's device plugin: the name of its configuration, or how it shares."""
    named = node.labels.get(nvidia_plugin.LABEL_CONFIG)
    shared = announced(node, None)
    return str(named or (", ".join(sorted(shared.kinds)) if shared else "nothing announced"))


def run_all(kube: Kube, execute: Execute, options: Options, check: bool, waiting: Waiting | None = None) -> Outcome:
    """Run a suite for each kind of node that the cluster has, one after another; the parameters are those of ``run``.

    :raises BadInput: an option is invalid.
    :raises ShareError: a signal interrupted the run; the message names what is left.
    """
    client = SuiteClient(kube, options, waiting or Waiting(options.timeout), "")
    there = [node for node in client.all_nodes() if options.node in (None, node.name)]
    outcomes: list[Outcome] = []
    for suite, kind, names in kinds(there) or [(WORKLOADS, "", [node.name for node in there])]:
        here = dataclasses.replace(options, suite=suite, namespace=options.namespace, only=frozenset(names))
        try:
            outcome = run(kube, execute, here, check, waiting)
        except BadInput as error:
            # Of this suite alone, as an image that its nodes don't have.
            step = result.StepResult(result.WHOLE, result.UNKNOWN, str(error), "set it and run it again")
            outcome = _of_steps([step], here)
        heading = f"suite {suite}{f', {kind}' if kind else ''}: {', '.join(sorted(names, key=natural))}"
        outcome["table"] = f"{heading}\n{outcome['table']}"
        outcomes.append(outcome)
    acceptances = [outcome["acceptance"] for outcome in outcomes]
    steps = [
        {**step, "suite": acceptance["suite"], "node": acceptance["node"]}
        for acceptance in acceptances
        for step in acceptance["steps"]
    ]
    results = [acceptance["result"] for acceptance in acceptances]
    return {
        "changed": any(outcome["changed"] for outcome in outcomes),
        "acceptance": {
            **_of_steps([], options)["acceptance"],
            "suite": ALL,
            "result": next(
                candidate
                for candidate in (result.FAIL, result.UNKNOWN, result.PASS, result.SKIPPED)
                if candidate in results
            ),
            "steps": steps,
            "pods": [pod for acceptance in acceptances for pod in acceptance["pods"]],
            "suites": acceptances,
        },
        "table": "\n\n".join(outcome["table"] for outcome in outcomes),
        "findings": [finding for outcome in outcomes for finding in outcome["findings"]],
        "checks": [row for outcome in outcomes for row in outcome["checks"]],
    }


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


def _of_steps(steps: list[result.StepResult], options: Options) -> Outcome:
    """Return the outcome of a suite that couldn't begin."""
    return {
        "changed": False,
        "acceptance": {
            "suite": options.suite,
            "result": result.overall_result(steps),
            "steps": [step.as_dict() for step in steps],
            "node": "",
            "namespace": options.namespace,
            "units": 0,
            "pods": [],
            "untested": [],
            "suites": [],
        },
        "table": result.table(steps, ""),
        "findings": result.findings(steps, "", options.namespace),
        "checks": result.checks(steps, BACKENDS.get(options.suite, backends.GPUSHARE)),
    }


def _untested_text(suite: Suite) -> str:
    if not suite.untested:
        return ""
    by = "the extender" if suite.selected.allocation == DRA else "kube-scheduler by claims"
    return f"\nNot tested: {', '.join(suite.untested)}, whose cards {by} allocates; run it on one of them, too."


def _outcome(suite: Suite, client: SuiteClient, options: Options, would_change: bool) -> Outcome:
    steps = [suite.steps[name] for name in sorted(suite.steps)]
    outcome = _of_steps(steps, options)
    acceptance: Acceptance = {
        **outcome["acceptance"],
        "node": suite.node,
        "units": suite.units if suite.before else 0,
        "pods": list(client.created_pods.values()),
        "untested": suite.untested,
    }
    image = f", image {client.image}" if client.image else ""
    title = f"node {suite.node}{image}" if suite.node else ""
    return {
        **outcome,
        "acceptance": acceptance,
        "changed": client.changed or would_change,
        "table": result.table(steps, title) + _untested_text(suite),
        "findings": result.findings(steps, suite.node, options.namespace),
    }
