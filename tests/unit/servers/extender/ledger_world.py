# SPDX-License-Identifier: GPL-3.0-or-later
"""Extenders over the API double whose every request waits until a test decides its outcome.

One thread runs at any time, so a run is determined by its random numbers alone. A request is executed, refused,
executed with its answer lost, or executed at some later time; an extender may be killed at each of them, pauses until
the test resumes it, and receives the watch as late as possible. After each step the sums of all bound pods are computed
again from the API's objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable
from typing import Any

from api_double import FIRST, ApiDouble, make_node, make_pod
from gpushare.api.client import KubeError
from gpushare.api.events import Events
from gpushare.extender.bind import Binder, BindRequest, Outcome
from gpushare.extender.ledger import Ledger
from gpushare.extender.state import PodRow, State, node_row, pod_row
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

NODES = {"a": (8,), "b": (6, 6)}
PODS = 12
LIMIT = 60.0


class Killed(BaseException):
    """The process of an extender ends, wherever it is."""


class Overbooked(AssertionError):
    """A card has more bound to it than it holds."""


@dataclasses.dataclass
class Call:
    """A request that waits until a test decides its outcome."""

    what: str
    action: Callable[[], Any]
    go: threading.Event = dataclasses.field(default_factory=threading.Event)
    outcome: str = ""


class DeferredClient:
    """The API of one extender: get, post, put and patch wait until the test resumes them."""

    def __init__(self, extender: Extender) -> None:
        self._extender = extender

    def __getattr__(self, method: str) -> Callable[..., Any]:
        assert method in ("get", "post", "put", "patch"), "the world itself delivers changes"
        return lambda path, *body: self._ask(method, path, *body)

    def _ask(self, method: str, path: str, *body: Any) -> Any:
        extender, world = self._extender, self._extender.world
        call = Call(f"{method.upper()} {path}", lambda: getattr(world.api, method)(path, *body))
        extender.call = call
        world.parked.set()
        assert call.go.wait(LIMIT)
        if call.outcome == "do":
            return call.action()
        if call.outcome == "lost":
            _quietly(call.action)
        elif call.outcome in ("late", "killed late"):
            world.retries.append(call)
        elif call.outcome.isdigit():
            raise KubeError(int(call.outcome), "Injected", f"injected {call.outcome}")
        if call.outcome.startswith("killed"):
            raise Killed
        raise KubeError(0, "Lost", "the answer was lost")


def _quietly(action: Callable[[], Any]) -> None:
    with contextlib.suppress(KubeError):
        action()


class NoWait(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class Watch:
    """The watch of pods, which delivers each change as late as the ledger allows."""

    def __init__(self, extender: Extender) -> None:
        self._extender = extender
        self.delivered = self._lists = 0

    def wait_for(self, version: int, seconds: float) -> bool:
        extender = self._extender
        if extender.world.random.random() < 0.7:
            while extender.version < version and extender.at < len(extender.world.api.log):
                extender.see(1)
        return extender.version >= version

    def relist(self) -> int:
        return self._lists + 1

    def wait_listed(self, number: int, seconds: float) -> bool:
        if self._lists < number and self._extender.world.random.random() < 0.7:
            self._extender.see_all()
            self._lists = number
        return self._lists >= number


class Extender:
    """One process: its state is lost when it is killed."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.name = world, f"e{number}"
        self.call: Call | None = None
        self.outcome: Outcome | None = None
        self.state = State()
        deferred: Any = DeferredClient(self)
        self.watch = Watch(self)
        self.ledger = Ledger(deferred, self.state, self.watch, "gpushare", self.name, world.clock, world.now_ms)

        def now_ns() -> int:
            return world.now_ms() * 10**6

        events = Events(deferred, "tests")
        self.binder = Binder(deferred, self.state, "binpack", events, self.ledger, world.clock, now_ns)
        self.ledger._stopped = self.ledger._enough = self.binder._stopped = NoWait()
        with world.api.lock:
            self.at = len(world.api.log)
            for name in NODES:
                self.state.node_changed(name, None, node_row(world.api.objects[("nodes", "", name)]))
        self.rows: dict[str, PodRow] = {}
        # Pods of a list that weren't delivered yet, the names of all, their highest version, and the log's end then.
        self.page: list[JsonObject] | None = None
        self.listed, self.listed_version, self.listed_at = set[str](), 0, 0
        self.list_pods(10**6)

    def see(self, count: int) -> None:
        """The watch delivers the next changes, or a list that has begun the next pods."""
        if self.page is not None:
            self.list_pods(count)
            return
        for change in self.world.api.log[self.at : self.at + count]:
            pod = change.after or change.before
            if change.kind == "pods" and pod is not None:
                self.apply(pod["metadata"]["name"], change.after)
        self.at = min(self.at + count, len(self.world.api.log))

    def see_all(self) -> None:
        if self.page is not None:
            self.see(10**6)
        self.see(10**6)

    def list_pods(self, count: int) -> None:
        """List all pods instead of watching them; the next ones are delivered."""
        if self.page is None:
            with self.world.api.lock:
                self.page = [pod for pod in self.world.api.pods() if pod_row(pod)]
                self.listed_at = len(self.world.api.log)
            self.listed = {pod["metadata"]["name"] for pod in self.page}
            self.listed_version = max((int(pod["metadata"]["resourceVersion"]) for pod in self.page), default=0)
        page, self.page = self.page[:count], self.page[count:]
        for pod in page:
            self.apply(pod["metadata"]["name"], pod)
        if not self.page:
            for name in [name for name in self.rows if name not in self.listed]:
                self.apply(name, None)
            self.page, self.at, self.watch.delivered = None, self.listed_at, self.listed_version

    def apply(self, name: str, pod: JsonObject | None) -> None:
        """Change the state as the mirror does; the selector of its watch matches what has a row."""
        before, row = self.rows.pop(name, None), pod_row(pod) if pod else None
        if pod is not None and row is not None:
            self.rows[name] = row
            self.watch.delivered = max(self.watch.delivered, int(pod["metadata"]["resourceVersion"]))
        if before != row:
            self.state.pod_changed("", before, row)

    @property
    def version(self) -> int:
        """Of the last delivered change."""
        return self.world.api.log[self.at - 1].version if self.at else FIRST

    def begin(self, action: Callable[[], Any]) -> None:
        def run() -> None:
            with contextlib.suppress(Killed):
                action()
            self.call = None
            self.world.parked.set()

        self.world.parked.clear()
        threading.Thread(target=run, daemon=True).start()
        assert self.world.parked.wait(LIMIT)

    def resume(self, outcome: str) -> None:
        call = self.call
        assert call is not None
        self.world.parked.clear()
        self.call = None
        call.outcome = outcome
        call.go.set()
        assert self.world.parked.wait(LIMIT)


class World:
    """The API and all extenders; ``history`` lists every step, to explain a failure."""

    def __init__(self, seed: int, extenders: int = 2) -> None:
        self.random, self.api, self.time = random.Random(seed), ApiDouble(), 1000.0
        self.parked = threading.Event()
        self.retries: list[Call] = []
        self.history: list[str] = []
        self.made = 0
        self.faults = 0.12
        self.checked = 0
        for name, sizes in NODES.items():
            self.api.put("nodes", make_node(name, *sizes))
        for number in range(PODS):
            self.make_pod(number)
        self.extenders = [self.extender() for _number in range(extenders)]

    def clock(self) -> float:
        return self.time

    def now_ms(self) -> int:
        return int(self.time * 1000)

    def make_pod(self, number: int) -> None:
        self.api.put("pods", make_pod(f"p{number}", self.random.randint(2, 5)))

    def extender(self) -> Extender:
        self.made += 1
        return Extender(self, self.made)

    def run(self, steps: int) -> None:
        """Take random steps, and check all invariants after each.

        :raises Overbooked: after a step.
        """
        for _step in range(steps):
            self.step()
            self.check()
        self.drain()

    def step(self) -> None:
        extender = self.random.choice(self.extenders)
        chance = self.random.random()
        if chance < 0.62:
            self.advance(extender)
        elif chance < 0.78:
            extender.see(self.random.randint(1, 4))
        elif chance < 0.83 and self.retries:
            call = self.retries.pop(self.random.randrange(len(self.retries)))
            self.note(f"late: {call.what}")
            _quietly(call.action)
        elif chance < 0.88:
            self.time += self.random.choice((0.1, 3.0, 12.0))
        elif chance < 0.93:
            self.end_pod()
        elif chance < 0.95 and extender.call is not None:
            self.restart(extender)
        elif chance >= 0.97:
            extender.list_pods(self.random.randint(1, 3))

    def advance(self, extender: Extender) -> None:
        if extender.call is not None:
            outcome = "do"
            if self.random.random() < self.faults:
                outcome = self.random.choice(("lost", "late", "409", "429", "500"))
            self.note(f"{extender.name} {outcome}: {extender.call.what}")
            extender.resume(outcome)
        elif self.random.random() < 0.15:
            self.note(f"{extender.name} resumes the remaining bookings")
            extender.begin(extender.ledger.collect_garbage)
        else:
            pod = f"p{self.random.randrange(PODS)}"
            uid = self.ask(extender, pod) if self.random.random() < 0.7 else ""
            self.bind(extender, pod, self.random.choice(list(NODES)), uid)

    def ask(self, extender: Extender, pod: str) -> str:
        """Pass a version of a pod to an extender as a scheduler's filter does, often an old one.

        :returns: the pod's UID.
        """
        with self.api.lock:
            versions = [one.after for one in self.api.log if one.after and one.after["metadata"]["name"] == pod]
        old = self.random.choice(versions) if self.random.random() < 0.3 else versions[-1]
        if contract.pod_node(old):
            return ""
        extender.binder.keep_filtered(old)
        return contract.pod_uid(old)

    def bind(self, extender: Extender, pod: str, node: str, uid: str = "") -> None:
        def bind() -> None:
            extender.outcome = extender.binder.bind(BindRequest("default", pod, uid, node))
            self.note(f"{extender.name} {pod} on {node}: {extender.outcome}")

        self.note(f"{extender.name} binds {pod} to {node}")
        extender.outcome = None
        extender.begin(bind)

    def end_pod(self) -> None:
        """Delete a pod and create another one of its name."""
        number = self.random.randrange(PODS)
        self.note(f"p{number} is replaced")
        self.api.remove("pods", f"p{number}", "default")
        self.make_pod(number)

    def restart(self, extender: Extender) -> None:
        assert extender.call is not None
        outcome = self.random.choice(("killed", "killed late"))
        self.note(f"{extender.name} {outcome}: {extender.call.what}")
        extender.resume(outcome)
        self.extenders[self.extenders.index(extender)] = self.extender()

    def check(self) -> None:
        if self.checked == self.api.version:
            return
        self.checked = self.api.version
        for name, sizes in NODES.items():
            used = self.used(name)
            if any(used[index] > size for index, size in enumerate(sizes)):
                raise Overbooked(f"{name} has {used} of {sizes}\n" + "\n".join(self.history[-80:]))

    def used(self, node: str) -> dict[int, int]:
        cards = contract.node_cards(self.api.objects[("nodes", "", node)])
        pods = [pod for (kind, _namespace, _name), pod in self.api.objects.items() if kind == "pods"]
        used, unknown = contract.used_units(cards, [pod for pod in pods if contract.pod_node(pod) == node])
        assert unknown == 0
        return used

    def drain(self) -> None:
        """Finish all requests; no reservation remains without its pod."""
        for extender in self.extenders:
            self.finish(extender)
        for call in self.retries:
            _quietly(call.action)
            self.check()
        for extender in self.extenders:
            extender.see_all()
            self.time += 100
            for action in (extender.binder.settle, extender.ledger.collect_garbage, extender.ledger.collect_garbage):
                extender.begin(action)
                self.finish(extender)
            assert extender.state.holds == 0 and not extender.ledger._unresolved, "\n".join(self.history[-80:])
            for name in NODES:
                view = extender.state.viewer("")(name)
                assert view is not None and view.unplaced == 0
                assert list(view.used) == list(self.used(name).values()), "\n".join(self.history[-80:])

    def finish(self, extender: Extender) -> None:
        while extender.call is not None:
            extender.resume("do")
            self.check()

    def note(self, text: str) -> None:
        self.history.append(text)
