# SPDX-License-Identifier: GPL-3.0-or-later
"""Any order of any number of extenders' requests, with faults and kills at each: no card is ever over its size.

KUBEGPU_EXPLORE=1 explores other orders than the fixed ones, and many more.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import pytest
from api_double import ApiDouble, make_pod
from gpushare.extender.bind import Binder, BindRequest
from gpushare.extender.ledger import Ledger
from gpushare.extender.register import Register
from gpushare.shared._core.types import JsonObject
from ledger_world import Overbooked, Watch, World

EXPLORE = bool(os.environ.get("KUBEGPU_EXPLORE"))
RUNS, STEPS = (4000 if EXPLORE else 60), 250
FIRST = random.SystemRandom().randrange(10**9) if EXPLORE else 0


@pytest.mark.parametrize("extenders", [2, 3])
def test_fault_12_no_order_books_memory_twice(extenders: int) -> None:
    bound = 0
    for seed in range(FIRST, FIRST + RUNS):
        world = World(seed, extenders=extenders)
        try:
            world.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        bound += sum("result='bound'" in text for text in world.history)
    assert bound > RUNS * 5, "too few pods were bound to prove anything"


def found(api: type[ApiDouble] = ApiDouble, runs: int = 200, first: int = 0) -> bool:
    """Whether one of several random orders books memory twice.

    :param first: the seed of the first order; one that did saves those before it.
    """
    for seed in range(first, first + runs):
        world = World(seed, api())
        try:
            world.run(STEPS)
        except Overbooked:
            return True
        except AssertionError:
            # Other consequences of a broken ledger don't count.
            continue
        finally:
            world.close()
    return False


class AnyVersion(ApiDouble):
    """A register without compare-and-swap."""

    def _put(self, path: str, body: Any) -> Any:
        lease = self.objects.get(self._key("leases", body))
        if lease is not None:
            body["metadata"]["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return super()._put(path, body)


class AnyPod(ApiDouble):
    """An API server that takes a Binding whatever the pod's version."""

    def _bind(self, path: str, body: Any) -> Any:
        body["metadata"].pop("resourceVersion", None)
        return super()._bind(path, body)


def test_fault_12_detected_without_compare_and_swap() -> None:
    assert found(AnyVersion)


@pytest.mark.parametrize(("api", "held"), [(ApiDouble, 5), (AnyPod, 10)])
def test_fault_12_the_fence_stops_a_paused_extender(api: type[ApiDouble], held: int) -> None:
    """A pause just before the Binding, so long that its memory is reassigned; random orders rarely contain it."""
    world = World(0, api())
    for name in ("p0", "p1"):
        world.api.remove("pods", name, "default")
        world.api.put("pods", make_pod(name, 5))
    paused, other = world.extenders
    world.bind(paused, "p0", "a")
    while paused.call is not None and not paused.call.what.endswith("/binding"):
        paused.resume("do")
    assert paused.call is not None
    world.bind(other, "p1", "a")
    world.finish(other)
    assert other.outcome is not None and "3 of 5" in other.outcome.error
    world.time += 60
    for action in (lambda: other.begin(other.ledger.collect_garbage), lambda: world.bind(other, "p1", "a")):
        action()
        world.finish(other)
    assert other.outcome.result == "bound"
    while paused.call is not None:
        paused.resume("do")
    assert world.used("a") == {0: held}


def test_fault_12_detected_without_waiting_for_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extender that relies on its watch however far it is books memory twice."""
    monkeypatch.setattr(Ledger, "_wait_for_pods", lambda _self: None)
    assert found()


def test_fault_12_detected_without_the_version_of_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Register, "to_text", lambda self, to_text=Register.to_text: to_text(dataclasses.replace(self, pods=0))
    )
    assert found()


def test_fault_12_detected_when_the_version_of_a_listed_page_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's pods release their bookings, and the Lease carries a version from before the list."""
    monkeypatch.setattr(Watch, "late", True)
    assert found(runs=600, first=358)


def test_fault_12_detected_when_a_booking_is_removed_before_its_pod_is_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drop(self: Ledger) -> None:
        self._own = {uid: entry for uid, entry in self._own.items() if entry not in self._finished}
        self._finished.clear()

    monkeypatch.setattr(Ledger, "_drop_delivered", drop)
    assert found(runs=600)


def test_fault_12_detected_without_reading_possibly_bound_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that missed the response of a bind repeats it, with the pod as it was before."""

    def known(self: Binder, request: BindRequest) -> JsonObject | None:
        return self._filtered.pop(request.uid, (0.0, {}))[1] or None

    monkeypatch.setattr(Binder, "_known", known)
    assert found(runs=600, first=319)
