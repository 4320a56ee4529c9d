# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suites workloads and canary: small pods share cards, pods of known size fill them, one more is refused."""

from __future__ import annotations

import re
import typing as t

from .._contracts import gpushare as contract
from .._kube.pod_exec import CommandFailed, Execute
from . import assertions, nodes, result, sizing
from .assertions import CHECK_PLUGIN, CHECK_WIRING, PodState, extender_refusal
from .cases import OUT_OF_MEMORY
from .client import SuiteClient
from .nodes import DRA, NodeState, Options
from .result import Failed, Inconclusive, Skipped, StepOutcome, shorten
from .sizing import CanaryPlan
from .suite import NOT_RUN, Suite

# Nodes that are compared for a cheaper one, once one is known that can show the extender.
MORE_NODES = 10


class Canary(Suite):
    """See gpu_acceptance, suite ``canary``."""

    first, last = "Y1", "Y7"
    _plan: CanaryPlan | None = None
    _filled: t.Sequence[str] = ()

    def run(self) -> None:
        if not self.step("Y1", self.prepare):
            return
        if not self.step("Y2", self.fill):
            for identifier in ("Y3", "Y4", "Y5", "Y6"):
                self.skip(identifier, "the pods of Y2 don't run")
            return
        self.step("Y3", self.one_more)
        fragments = self._canary_plan.leaves_fragments
        if fragments:
            self.step("Y4", self.fragment)
        if self._options.allocate_command:
            self.step("Y5", self.over_allocate)
        else:
            self.skip("Y5", "allocate_command isn't set")
        released = self.step("Y6", self.release)
        if not fragments:
            self.step("Y4", self.fragment)
        if released:
            self.step("Y6", self.reallocate)

    @property
    def _canary_plan(self) -> CanaryPlan:
        if self._plan is None:
            raise Skipped("no node was selected")
        return self._plan

    @property
    def units(self) -> int:
        return self._plan.sizes.units if self._plan else 0

    def plan_text(self) -> str:
        sizes = self._canary_plan.sizes
        return f"run {sizes.pods} pods of {sizes.units} units on node {self.node}, request more than fits"

    def select(self) -> None:
        best: CanaryPlan | None = None
        reasons: dict[str, str] = {}
        more = MORE_NODES
        for node in self._client.sharing_nodes():
            state = self._client.usable_state(node)
            plan = state if isinstance(state, str) else sizing.plan_canary(state, self._options.namespace)
            if isinstance(plan, str):
                reasons[node.name] = plan
            elif best is None or plan.rank > best.rank:
                best = plan
            more -= int(best is not None and best.sizes.extender_decides)
            if best is not None and (best.best or more <= 0):
                break
        if best is None:
            raise Skipped(no_node_text(reasons))
        self._plan, self.before = best, best.state

    # ----------------------------------------------------------------- Y2

    def fill(self) -> str:
        """Fill the node's cards."""

        def attempt(attempts: int) -> str:
            if attempts:
                self.remove(set(self._client.created_pods))
                self.select()
            sizes, before = self._canary_plan.sizes, self._client.node_state(self.node)
            self._filled = [self.create("share", [sizes.units]) for _number in range(sizes.pods)]
            pods = self.wait_running(self._filled, sizes.units)
            after = self._client.node_state(self.node)
            for pod in pods:
                assertions.assert_not_overbooked(pod, before, after, self._options.namespace)
            return f"{_placement_text(pods, sizes.units)} of node {self.node}"

        return self.retried(attempt)

    # ----------------------------------------------------------------- Y3, Y4

    def one_more(self) -> str:
        """Request one pod more than fits; if others left meanwhile, it stays and the next one is one more."""
        units = self.units
        return self.retried(lambda _attempts: f"{units} units more: {self.refuse('more', units, keep=True)}")

    def fragment(self) -> str:
        """Request a pod that fits the node and no single card."""

        def attempt(_attempts: int) -> str:
            now = self._client.node_state(self.node)
            units = sizing.fragment_size(now)
            if units is None:
                raise Skipped(f"node {self.node} doesn't have two cards with free memory")
            return f"{units} of {now.total_free} units free: {self.refuse('fragmented', units, keep=False)}"

        return self.retried(attempt)

    # ----------------------------------------------------------------- Y5

    def over_allocate(self) -> str:
        """Run the command that tries to hold more than the container's share."""
        name = self._filled[0]
        enforced = self.selected.memory_limit == contract.LIMIT_ENFORCED
        try:
            self._execute(self._options.namespace, name, "c0", self._options.allocate_command)
        except CommandFailed as error:
            text = result.shorten(str(error))
            if error.status != OUT_OF_MEMORY:
                do = f"have it end with {OUT_OF_MEMORY} where CUDA refuses memory, and with 0 where it doesn't"
                raise StepOutcome(f"allocate_command showed no refusal: {text}", do, name) from error
            if not enforced:
                raise StepOutcome(
                    f"allocate_command failed on a node that enforces no shares: {text}", "", name
                ) from error
            return f"refused, as expected: {text}"
        if enforced:
            raise Failed(
                f"a container of pod {name} held more than its share, though node {self.node} announces that it "
                "enforces shares",
                "check that the command requested more than the share, and the driver's limits on that node",
                name,
            )
        return "it held more than its share: gpushare counts memory, and this node enforces no shares"


def no_node_text(reasons: dict[str, str]) -> str:
    """Return why no node can be used, with the reasons of three nodes."""
    named = [f"{name}: {reason}" for name, reason in list(reasons.items())[:3]]
    rest = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return f"no node has free memory that can be used ({'; '.join(named)}{rest})"


def _placement_text(pods: t.Sequence[PodState], units: int) -> str:
    cards = sorted({pod.index for pod in pods if pod.index is not None})
    counted = [f"card {card} ({sum(1 for pod in pods if pod.index == card)})" for card in cards]
    return f"{len(pods)} pod{'s' if len(pods) > 1 else ''} of {units} units on {', '.join(counted)}"


DEVICE_FILE = re.compile(r"nvidia[0-9]+")


class Workloads(Suite):
    """See gpu_acceptance, suite ``workloads``."""

    first, last = "W1", "W8"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options)
        # The device node of each card by its index, as the first container on it had it.
        self._seen: dict[int, str] = {}

    def run(self) -> None:
        if not self.step("W1", self.prepare):
            return
        self.step("W2", self.placed)
        self.step("W3", self.fragment)
        self.step("W4", self.too_large)
        self.step("W5", self.devices)
        self.step("W6", self.two_containers)
        if self._options.program_command:
            self.step("W6a", self.computes)
        if self.step("W7", self.release):
            self.step("W7", self.reallocate)

    def plan_text(self) -> str:
        return f"run pods that share cards on node {self.node}"

    def select(self) -> None:
        states: list[NodeState] = []
        reasons: dict[str, str] = {}
        for node in self._client.sharing_nodes():
            state = self._client.usable_state(node)
            if isinstance(state, str):
                reasons[node.name] = state
            else:
                states.append(state)
                reasons[state.name] = "no card of it has free memory"
        selected = sizing.select_node(states, self._options.placement)
        if selected is None:
            raise Skipped(no_node_text(reasons))
        self.before = selected

    # ----------------------------------------------------------------- W2

    def placed(self) -> str:
        """Run three small pods, which binpack places on one card, and spread on several."""
        placement = self._options.placement

        def attempt(attempts: int) -> str:
            if attempts:
                self.remove(set(self._client.created_pods))
            before = self._client.node_state(self.node)
            three = sizing.three_pods(before.free, placement)
            expected = sorted(card for _units, card in three)
            if not expected:
                raise Skipped(f"node {self.node} has too little free memory for three pods that show {placement}")
            if placement == sizing.SPREAD:
                # By claims a card counts as fuller once kubelet has prepared it for a pod.
                pods = [self.start("share", [units]) for units, _card in three]
            else:
                pods = self.wait_running([self.create("share", [units]) for units, _card in three], 1)
            cards = sorted(pod.index for pod in pods if pod.index is not None)
            if cards == expected or (placement == sizing.BINPACK and len(set(cards)) == 1):
                return f"{_named(cards)} of node {self.node}"
            what = f"the pods are on {_named(cards)} of node {self.node}; {placement} has {_named(expected)}"
            if self._others(before) != self._others(self._client.node_state(self.node)):
                raise Inconclusive(f"{what}, and other pods came or went meanwhile")
            failure = Failed(what, f"check that the placement is {placement}", pods[0].name, pods[0].index)
            # The driver writes the order of cards for kube-scheduler a moment later.
            raise Inconclusive.unless_repeated(failure) if self.selected.allocation == DRA else failure

        return self.retried(attempt)

    def _others(self, state: NodeState) -> set[str]:
        """Return the UIDs of other namespaces' pods with a share."""
        return set(state.uids) - {pod["uid"] for pod in self._client.created_pods.values()}

    # ----------------------------------------------------------------- W3, W4

    def fragment(self) -> str:
        """Request a pod that fits the node and no single card, after pods that fill the cards."""

        def attempt(_attempts: int) -> str:
            planned = sizing.fragment_node(self._client.node_state(self.node), self._options.placement)
            if isinstance(planned, str):
                raise Skipped(planned)
            fillers, units = planned
            for filler in fillers:
                self.start("filler", [filler])
            now = self._client.node_state(self.node)
            if not now.largest_free < units <= now.total_free:
                free = ", ".join(f"card {card}: {left}" for card, left in sorted(now.free.items()))
                raise Inconclusive.unless_repeated(
                    Failed(
                        f"after pods of {fillers} units node {self.node} has other free memory than "
                        f"{self._options.placement} leaves ({free})",
                        f"check that the placement is {self._options.placement}",
                    )
                )
            return f"{units} of {now.total_free} units free: {self.refuse('fragmented', units, keep=False)}"

        return self.retried(attempt)

    def too_large(self) -> str:
        """Request a pod that is larger than the whole cluster, on any node."""
        units = 1 + sum(
            node.capacity.get(contract.RESOURCE_MEMORY, 0)
            for node in self._client.all_nodes()
            if nodes.shares_memory(node)
        )
        name = "too-large"
        self._client.create_pod(name, [units], None, self.selected.allocation)
        pod = self.wait_refused(name)
        self.remove({name})
        if pod.node:
            what = f"pod {name} of {units} units, more than the cluster has, was bound to node {pod.node}"
            raise Failed(what, CHECK_WIRING, name, pod.index, pod.summary)
        if not pod.refusals:
            what = f"pod {name} stayed Pending, and no scheduler gave a reason within {self._options.timeout:g} s"
            raise StepOutcome(what, "check that the scheduler that the pod names runs (option scheduler_name)", name)
        return f"{units} units: {shorten(extender_refusal(pod.refusals) or pod.refusals[-1])}"

    # ----------------------------------------------------------------- W5, W6

    def devices(self) -> str:
        """Validate the device nodes in all containers."""
        running = [pod for _name, pod in sorted(self._client.pods().items()) if pod.running]
        if not running:
            raise Skipped("none of the pods runs")
        return ", ".join(f"{pod.name} {self._assert_devices(pod, ['c0'])}" for pod in running)

    def two_containers(self) -> str:
        """Run a pod with two containers, which must get the same card."""

        def attempt(_attempts: int) -> str:
            units = sizing.container_sizes(self._client.node_state(self.node).free, self._options.placement)
            if units is None:
                raise Skipped(f"no card of node {self.node} has 2 units left")
            pod = self.start("pair", units)
            self._assert_devices(pod, ["c0", "c1"])
            return f"{units[0]} and {units[1]} units on card {pod.index}"

        return self.retried(attempt)

    def computes(self) -> str:
        """Run the user's program in a container with a share."""
        command = self._options.program_command

        def attempt(_attempts: int) -> str:
            pod = self.start("program", [1], self._options.program_image or "")
            try:
                output = self._execute(self._options.namespace, pod.name, "c0", command)
            except CommandFailed as error:
                text = shorten(str(error))
                if error.status is None or error.status in NOT_RUN:
                    raise StepOutcome(text, "name an image that has it (program_image)", pod.name, pod.index) from error
                raise Failed(text, CHECK_PLUGIN, pod.name, pod.index) from error
            return f"{command[0]} on card {pod.index}: {shorten(output) or 'it ended with 0'}"

        return self.retried(attempt)

    def _assert_devices(self, pod: PodState, containers: t.Sequence[str]) -> str:
        """Validate that the containers of a pod see the device node of the pod's card only, and return its name."""
        minors = {card.index: card.minor for card in self.selected.cards}
        expected = f"nvidia{minors[pod.index]}" if pod.index in minors else "no card"
        if self.selected.allocation == DRA and pod.index in minors:
            # A slice doesn't have the number: the first container on a card shows it, and all others must agree.
            expected = self._seen.get(pod.index, "")
        for container in containers:
            try:
                files = device_files(self._execute(self._options.namespace, pod.name, container, ["ls", "/dev"]))
            except CommandFailed as error:
                do = "check the right to create pods/exec, and the image (it needs ls)"
                raise StepOutcome(shorten(str(error)), do, pod.name, pod.index) from error
            if not expected and len(files) == 1 and files[0] not in self._seen.values():
                expected = self._seen[t.cast(int, pod.index)] = files[0]
            if files != [expected]:
                raise Failed(
                    f"container {container} of pod {pod.name}, on card {pod.index}, has {', '.join(files) or 'no card'}"
                    f", not {expected or 'one of its own'}",
                    CHECK_PLUGIN,
                    pod.name,
                    pod.index,
                    pod.booking,
                )
        return expected


def device_files(listing: str) -> list[str]:
    """Return the names of cards' device nodes in a listing of /dev."""
    return sorted(name for name in listing.split() if DEVICE_FILE.fullmatch(name))


def _named(cards: t.Sequence[int]) -> str:
    return f"card {cards[0]}" if len(set(cards)) == 1 else f"cards {', '.join(map(str, cards))}"
