# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Acceptance: real workloads on a cluster, in a namespace of their own that is removed whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import signal
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_plan as plan
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._acceptance_plan import NodeView, Row
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

# How long a pod that must stay Pending is watched after the scheduler's first refusal.
HOLD_SECONDS = 3.0
POLL_SECONDS = 0.5
# A namespace takes its time to go, however little patience the checks have.
CLEAN_SECONDS = 120.0


class Cluster(t.Protocol):
    """What acceptance needs of a cluster. Objects are plain JSON."""

    def nodes(self) -> list[Json]: ...

    def pods(self, namespace: str | None = None) -> list[Json]:
        """All pods, or those of one namespace."""

    def daemonsets(self) -> list[Json]: ...

    def events(self, namespace: str) -> list[Json]: ...

    def namespaces(self, label: str) -> list[str]:
        """Names of those that carry ``key=value``."""

    def create_namespace(self, manifest: Json) -> None:
        """Returns once pods can be created in it."""

    def delete_namespace(self, name: str) -> None:
        """Ask for its removal; nothing happens where it doesn't exist."""

    def create_pod(self, manifest: Json) -> None: ...

    def delete_pod(self, namespace: str, name: str) -> None:
        """Ask for its removal; nothing happens where it doesn't exist."""

    def execute(self, namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
        """What a command in a container prints.

        :raises ShareError: it can't be run or ends with another status than 0.
        """


class Clock(t.Protocol):
    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the user may choose.

    :param image: of the workloads; None takes the device plugin's own.
    :param timeout: seconds that each check may wait for something.
    """

    image: str | None = None
    node_selector: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    runtime_class: str | None = None
    scheduler_name: str | None = None
    timeout: float = 120.0


class Failed(ShareError):
    """A check found something else than it should; its text is the row's detail."""


class Ended(BaseException):
    """A signal asked the run to end; no check may take it for its own failure."""


class Skipped(Exception):
    """A check can't be made on this cluster; its text says why."""


class Acceptance:
    """The six checks, in order, on one node."""

    def __init__(self, cluster: Cluster, clock: Clock, wish: Wish, suffix: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._wish = wish
        self.namespace = plan.NAMESPACE_PREFIX + suffix
        self._workload = plan.Workload(
            self.namespace, self._image(), wish.node_selector, wish.runtime_class, wish.scheduler_name
        )
        chosen = plan.choose_node([plan.view(one, cluster.pods()) for one in self._candidates()])
        if chosen is None:
            who = (
                "acceptance_node_selector: no node that matches it" if wish.node_selector else "no node of the cluster"
            )
            raise BadInput(f"{who} is Ready, open to pods and has {contract.RESOURCE_MEMORY} free")
        self.before = chosen
        self._allocatable = self._advertised(chosen.name)
        self._touched: set[int] = set()

    # ----------------------------------------------------------------- looking

    def _image(self) -> str:
        image = self._wish.image or plan.plugin_image(self._cluster.daemonsets())
        if not image:
            raise BadInput(
                "acceptance_image: not set, and the cluster has no DaemonSet that runs "
                f"{plan.PLUGIN_WORDS} whose image could be taken"
            )
        return image

    def _candidates(self) -> list[Json]:
        return [one for one in self._cluster.nodes() if plan.usable(one, self._wish.node_selector)]

    def _node(self, name: str) -> Json:
        for one in self._cluster.nodes():
            if one["metadata"]["name"] == name:
                return one
        raise Failed(f"node {name} is gone")

    def _view(self) -> NodeView:
        return plan.view(self._node(self.before.name), self._cluster.pods())

    def _advertised(self, name: str) -> tuple[int, int]:
        """Allocatable units and the units of all cards of a node."""
        node = self._node(name)
        units = contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable")
        return units, sum(card.units for card in contract.node_cards(node))

    def _ours(self) -> dict[str, Json]:
        return {str(one["metadata"]["name"]): one for one in self._cluster.pods(self.namespace)}

    def _until(self, true: t.Callable[[], bool], words: t.Callable[[], str]) -> None:
        """Wait for something.

        :raises Failed: not within the time given; ``words`` says what is missing.
        """
        end = self._clock.now() + self._wish.timeout
        while not true():
            if self._clock.now() >= end:
                raise Failed(f"{words()} (after {self._wish.timeout:g} s)")
            self._clock.sleep(POLL_SECONDS)

    # ----------------------------------------------------------------- workloads

    def _start(self, wanted: t.Mapping[str, t.Sequence[int]]) -> None:
        """Create pods on the node at once, and wait until each runs and its card is known."""
        for name, units in wanted.items():
            self._cluster.create_pod(self._workload.pod(name, units, self.before.name))
        for name in wanted:
            self._until(functools.partial(self._settled, name), functools.partial(self._state, name))
            self._touched.add(self._card(name))

    def _start_in_order(self, prefix: str, sizes: t.Iterable[int]) -> None:
        """Sizes that were planned for pods coming in this order are started so."""
        for number, units in enumerate(sizes):
            self._start({f"{prefix}-{number}": [units]})

    def _settled(self, name: str) -> bool:
        pod = self._ours().get(name)
        if pod is None:
            raise Failed(f"pod {name} is gone")
        if contract.finished(pod):
            raise Failed(f"pod {name} ended: {plan.why(pod)}")
        held = contract.booking(pod)
        return plan.running(pod) and held is not None and held.assigned

    def _state(self, name: str) -> str:
        pod = self._ours().get(name, {})
        if plan.running(pod):
            return f"pod {name} runs, but {contract.POD_INDEX} and {contract.POD_ASSIGNED} don't say on which card"
        return f"pod {name}: {plan.why(pod)}"

    def _card(self, name: str) -> int:
        held = contract.booking(self._ours()[name])
        if held is None or held.index not in self.before.minors:
            raise Failed(f"pod {name} has no card of node {self.before.name} in its annotations")
        return held.index

    def _stays_pending(self, name: str, units: int, node: str | None) -> list[str]:
        """The scheduler's refusals of a pod of this size, which is removed again.

        :raises Failed: the pod was bound.
        """
        self._cluster.create_pod(self._workload.pod(name, [units], node))
        try:
            return self._refused(name)
        finally:
            self._remove([name])

    def _refused(self, name: str) -> list[str]:
        """Wait for the scheduler's refusal, then make sure that it stands."""
        texts: list[str] = []

        def refused() -> bool:
            pod = self._ours().get(name)
            if pod is None:
                raise Failed(f"pod {name} is gone")
            if contract.pod_node(pod):
                raise Failed(f"pod {name} was bound to {contract.pod_node(pod)}: {plan.why(pod)}")
            texts[:] = plan.refusals(pod, self._cluster.events(self.namespace))
            return bool(texts)

        self._until(refused, lambda: f"pod {name} is Pending, but the scheduler hasn't said why")
        end = self._clock.now() + HOLD_SECONDS
        while self._clock.now() < end:
            self._clock.sleep(POLL_SECONDS)
            refused()
        return texts

    def _remove(self, names: t.Iterable[str]) -> None:
        gone = list(names)
        for name in gone:
            self._cluster.delete_pod(self.namespace, name)
        self._until(
            lambda: not set(gone) & set(self._ours()),
            lambda: f"pods still there: {', '.join(sorted(set(gone) & set(self._ours())))}",
        )
        # The scheduler and the extender hear of it by their own watches.
        self._clock.sleep(POLL_SECONDS)

    # ----------------------------------------------------------------- the checks

    def one_card(self) -> str:
        names = ["share-1", "share-2", "share-3"]
        if not plan.same_card(self.before.free, [1, 1, 1]):
            raise Skipped(f"no card of node {self.before.name} would take three more pods of 1 unit in a row")
        self._start({name: [1] for name in names})
        cards = [self._card(name) for name in names]
        if len(set(cards)) != 1:
            raise Failed(f"cards {', '.join(map(str, cards))} of node {self.before.name}")
        return f"card {cards[0]} of node {self.before.name}"

    def fragmented(self) -> str:
        planned = plan.fragment(self._view())
        if isinstance(planned, str):
            raise Skipped(planned)
        fillers, units = planned
        self._start_in_order("filler", fillers)
        now = self._view()
        if not max(now.free.values()) < units <= now.total_free:
            raise Failed(
                f"after pods of {fillers} units the cards have {now.free} left: not binpack, or others came in"
            )
        texts = self._stays_pending("fragmented", units, now.name)
        reason = plan.by_extender(texts)
        if reason is None:
            raise Failed(f"Pending, but not for the extender's reason: {texts[-1]}")
        return f"{units} of {now.total_free} units free: {reason}"

    def too_large(self) -> str:
        units = plan.cluster_units(self._cluster.nodes()) + 1
        texts = self._stays_pending("too-large", units, None)
        return f"{units} units: {texts[-1]}"

    def devices(self) -> str:
        seen = []
        for name, pod in sorted(self._ours().items()):
            if not plan.running(pod):
                continue
            card = self._card(name)
            wanted = [f"nvidia{self.before.minors[card]}"]
            for container in pod["spec"]["containers"]:
                found = self._devices_in(name, container["name"])
                if found != wanted:
                    raise Failed(f"pod {name}, card {card}, sees {', '.join(found) or 'no card'}, not {wanted[0]}")
            seen.append(f"{name} {wanted[0]}")
        if not seen:
            raise Failed("none of the pods runs")
        return ", ".join(seen)

    def _devices_in(self, pod: str, container: str) -> list[str]:
        return plan.device_files(self._cluster.execute(self.namespace, pod, container, ["ls", "/dev"]))

    def two_containers(self) -> str:
        now = self._view()
        units = plan.two_containers(now.free)
        if units is None:
            raise Skipped(f"no card of node {now.name} has 2 units left")
        self._start({"pair": units})
        card = self._card("pair")
        wanted = [f"nvidia{now.minors[card]}"]
        found = [self._devices_in("pair", f"c{number}") for number in range(len(units))]
        if found != [wanted] * len(units):
            told = " and ".join(", ".join(one) or "no card" for one in found)
            raise Failed(f"the pod is on card {card} ({wanted[0]}), its containers see {told}")
        return f"{units[0]} and {units[1]} units on card {card}"

    def freed(self) -> str:
        """All that was taken is free again, and not only on paper: as much as before fits once more."""
        held = sum(contract.pod_units(one) for one in self._ours().values() if contract.counts(one))
        self._remove(self._ours())
        if self._advertised(self.before.name) != self._allocatable:
            raise Failed(f"node {self.before.name} doesn't advertise what it did: {self._allocatable[0]} units")
        now = self._view()
        # A card on which somebody else came in between has less to show.
        sizes = {card: min(self.before.free[card], now.free.get(card, 0)) for card in sorted(self._touched)}
        again = sorted((units for units in sizes.values() if units > 0), reverse=True)
        if not again:
            raise Skipped("no pod of the earlier checks had a card")
        self._start_in_order("again", again)
        self._remove(self._ours())
        return f"{held} units given back; pods of {', '.join(map(str, again))} units ran after them"

    # ----------------------------------------------------------------- the run

    def rows(self) -> list[Row]:
        checks = {
            "a": self.one_card,
            "b": self.fragmented,
            "c": self.too_large,
            "d": self.devices,
            "e": self.two_containers,
            "f": self.freed,
        }
        return [_row(letter, check) for letter, check in checks.items()]

    def planned(self) -> list[Row]:
        """What check mode shows: every check is skipped."""
        return [Row(letter, "skip", f"check mode; would run on node {self.before.name}") for letter in plan.CHECKS]

    @property
    def about(self) -> str:
        return f"node {self.before.name}, image {self._workload.image}"


def _row(letter: str, check: t.Callable[[], str]) -> Row:
    try:
        return Row(letter, "pass", check())
    except Skipped as reason:
        return Row(letter, "skip", str(reason))
    except ShareError as reason:
        return Row(letter, "fail", " ".join(str(reason).split()))


def clean(cluster: Cluster, clock: Clock) -> list[str]:
    """Remove every namespace of acceptance, of this run or of one that was killed, and wait until they are gone.

    :raises ShareError: one is still there when the time is over.
    """
    label = f"{plan.LABEL}={plan.LABEL_VALUE}"
    found = cluster.namespaces(label)
    for name in found:
        cluster.delete_namespace(name)
    end = clock.now() + CLEAN_SECONDS
    left = cluster.namespaces(label) if found else []
    while left:
        if clock.now() >= end:
            raise ShareError(f"namespace {', '.join(left)} is still there {CLEAN_SECONDS:g} s after its deletion")
        clock.sleep(POLL_SECONDS)
        left = cluster.namespaces(label)
    return found


@contextlib.contextmanager
def _ended_politely() -> t.Iterator[None]:
    """Turn the signals that end a run into an exception, so that what it made is removed all the same."""

    def end(number: int, frame: t.Any) -> t.NoReturn:
        raise Ended(f"ended by signal {number}")

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, end) for one in signals]
    try:
        yield
    finally:
        for one, handler in zip(signals, before):
            signal.signal(one, handler)


def run(cluster: Cluster, clock: Clock, wish: Wish, check: bool) -> dict[str, t.Any]:
    """Run acceptance and leave nothing behind.

    :param check: create nothing; say where it would run.
    :returns: ``changed`` (never: nothing is left), ``rows`` and ``table``.
    :raises ShareError: a row failed; the table is in the message, rows and table in its details.
    """
    try:
        with _ended_politely():
            return _run(cluster, clock, wish, check)
    except Ended as end:
        raise ShareError(str(end)) from end


def _run(cluster: Cluster, clock: Clock, wish: Wish, check: bool) -> dict[str, t.Any]:
    if check:
        one = Acceptance(cluster, clock, wish, "check")
        return _result(one.planned(), one.about)
    clean(cluster, clock)
    one = Acceptance(cluster, clock, wish, f"{random.SystemRandom().randrange(16**6):06x}")
    rows: list[Row] = []
    problems: list[str] = []
    try:
        cluster.create_namespace(plan.namespace(one.namespace))
        rows = one.rows()
    finally:
        try:
            clean(cluster, clock)
        except ShareError as error:
            problems.append(str(error))
    result = _result(rows, one.about)
    failed = [row.id for row in rows if row.result == "fail"]
    if failed:
        problems.insert(0, f"acceptance failed: {', '.join(failed)}")
    elif not any(row.result == "pass" for row in rows):
        problems.insert(0, "acceptance could show nothing on this cluster")
    if problems:
        raise ShareError("\n".join([*problems, result["table"]]), **result)
    return result


def _result(rows: t.Sequence[Row], about: str) -> dict[str, t.Any]:
    return {"changed": False, "rows": [row.as_dict() for row in rows], "table": plan.table(rows, about)}
