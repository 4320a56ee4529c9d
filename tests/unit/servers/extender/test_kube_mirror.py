# SPDX-License-Identifier: GPL-3.0-or-later
"""Mirrors over the API double, and the real client over real HTTP."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_double import ApiDouble, Failure, make_pod, served
from extender_kit import eventually
from gpushare.api import account
from gpushare.api import mirror as mirror_module
from gpushare.api.account import Account
from gpushare.api.client import FIRST_PAGE, WATCH_SILENCE_SECONDS, KubeApi, KubeError, connect
from gpushare.api.mirror import (
    AGAIN_SECONDS,
    FAILING_SECONDS,
    LIVED_SECONDS,
    RELIST_SECONDS,
    SHORTEST_WATCH_SECONDS,
    SILENT_SECONDS,
    STALE_SECONDS,
    TOO_LARGE,
    WATCH_SECONDS,
    Mirror,
    object_key,
)
from gpushare.shared._core.types import JsonObject
from real_apiserver import ApiServer, _Authority, api_server
from service_account import service_account

__all__ = ["api_server"]

Follow = Callable[..., Mirror[Any]]


@pytest.fixture
def follow(api: ApiDouble) -> Iterator[Follow]:
    mirrors: list[Mirror[Any]] = []

    def begin(path: str = "/api/v1/pods", on: Any = None, wait: bool = True, **options: Any) -> Mirror[Any]:
        mirror: Mirror[Any] = Mirror(on or api, path, **{"backoff": (0.01, 0.05), **options})
        mirrors.append(mirror)
        mirror.start()
        if wait:
            assert mirror.wait_synced(10)
        return mirror

    yield begin
    for mirror in mirrors:
        mirror.stop()


class Changes(list[tuple[str, str]]):
    """A callback that records the key, and whether the object was added, changed or removed."""

    def __call__(self, key: str, before: Any, after: Any) -> None:
        self.append((key, "new" if before is None else "gone" if after is None else "other"))


# ----------------------------------------------------------------- following


def test_it_follows_additions_changes_and_removals(api: ApiDouble, follow: Follow) -> None:
    api.put("pods", make_pod("p", 1))
    changes = Changes()
    mirror = follow(on_change=changes)
    assert [object_key(pod) for pod in mirror.items()] == ["default/p"]
    api.put("pods", make_pod("q", 1))
    api.change("pods", "p", "default", lambda pod: pod["status"].update(phase="Running"))
    api.remove("pods", "q", "default")
    eventually(lambda: mirror.get("default/q") is None and mirror.get("default/p")["status"]["phase"] == "Running")
    assert changes == [("default/p", "new"), ("default/q", "new"), ("default/p", "other"), ("default/q", "gone")]


def test_only_changes_of_the_trimmed_object_are_reported(api: ApiDouble, follow: Follow) -> None:
    changes = Changes()

    def phase(pod: JsonObject) -> str | None:
        return pod["status"]["phase"] if pod["metadata"]["name"] != "never" else None

    mirror = follow(trim=phase, on_change=changes)
    api.put("pods", make_pod("never", 1))
    api.put("pods", make_pod("p", 1))
    api.change("pods", "p", "default", lambda pod: pod["metadata"].update(labels={"a": "b"}))
    api.change("pods", "p", "default", lambda pod: pod["status"].update(phase="Running"))
    eventually(lambda: mirror.get("default/p") == "Running")
    assert mirror.items() == ["Running"]
    assert changes == [("default/p", "new"), ("default/p", "other")]


def test_a_selector_that_an_object_leaves_is_a_removal(api: ApiDouble, follow: Follow) -> None:
    mirror = follow(query={"fieldSelector": "spec.nodeName!=,status.phase!=Failed"})
    api.put("pods", make_pod("p", 1))
    api.change("pods", "p", "default", lambda pod: pod["spec"].update(nodeName="a"))
    eventually(lambda: mirror.get("default/p"))
    api.change("pods", "p", "default", lambda pod: pod["status"].update(phase="Failed"))
    eventually(lambda: not mirror.items())


def test_prerequisites_are_read_before_the_first_list(api: ApiDouble, follow: Follow) -> None:
    """Not before later ones: the mirror may already contain what is booked while they are read."""
    api.put("pods", make_pod("p", 1))
    api.fail("GET", "/api/v1/pods", 500, times=2)
    calls: list[int] = []
    mirror = follow(before_list=lambda: calls.append(len(api.asked("GET", "/api/v1/pods"))))
    assert calls == [0, 1, 2]
    with api.outage():
        api.put("pods", make_pod("q", 1))
        api.compact()
    eventually(lambda: mirror.lists == 2)
    assert len(calls) == 3


@pytest.mark.parametrize("expired", [False, True], ids=["complete", "expired in between"])
def test_lists_come_in_pages(api: ApiDouble, follow: Follow, expired: bool) -> None:
    for number in range(25):
        api.put("pods", make_pod(f"p{number}", 1))
    if expired:
        api.before("GET", "continue=", api.compact)
    mirror = follow(page=10)
    assert (len(mirror), mirror.lists) == (25, 1)
    assert len(api.asked("GET", "limit=10")) == (5 if expired else 3)


def test_fault_12_a_page_is_delivered_before_its_callbacks_run(api: ApiDouble, follow: Follow) -> None:
    """The ledger tells other extenders this version as soon as a callback has released a booking."""
    delivered: list[tuple[int, int]] = []

    def record(_key: str, _before: Any, after: Any) -> None:
        if after is not None:
            delivered.append((mirror.delivered, int(after["metadata"]["resourceVersion"])))

    mirror = follow(on_change=record, page=2)
    with api.outage():
        for number in range(4):
            api.put("pods", make_pod(f"p{number}", 1))
        api.compact()
    eventually(lambda: len(delivered) == 4)
    assert all(told >= version for told, version in delivered)


def test_no_more_rows_are_kept_than_allowed(api: ApiDouble, follow: Follow) -> None:
    """By a list, an event and a list beside the watch: the state counts as wrong at once, and comes back by itself."""

    def gpu(pod: JsonObject) -> str | None:
        return None if pod["metadata"]["name"].startswith("other") else pod["metadata"]["name"]

    for number in range(20):
        api.put("pods", make_pod(f"other{number}", 1))
    for number in range(3):
        api.put("pods", make_pod(f"p{number}", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror_module, "TOO_MANY_SECONDS", 0.05)
        mirror = follow(trim=gpu, most=3)
        assert (len(mirror), mirror.stale) == (3, "")
        api.put("pods", make_pod("p3", 1))
        eventually(lambda: "more than the 3" in mirror.stale)
        time.sleep(0.3)
        assert len(mirror) <= 3 and "more than the 3" in mirror.stale
        api.remove("pods", "p0", "default")
        eventually(lambda: not mirror.stale)
        assert sorted(mirror.items()) == ["p1", "p2", "p3"]
        # All of them replaced while the watch was away.
        with api.outage():
            for number in range(1, 4):
                api.remove("pods", f"p{number}", "default")
                api.put("pods", make_pod(f"q{number}", 1))
            api.compact()
        eventually(lambda: sorted(mirror.items()) == ["q1", "q2", "q3"] and not mirror.stale)
        late = follow(trim=gpu, most=2, wait=False)
        eventually(lambda: "more than the 2" in late.stale)
        assert not late.synced


# ----------------------------------------------------------------- failures


def test_a_broken_watch_resumes_at_its_version(api: ApiDouble, follow: Follow) -> None:
    changes = Changes()
    mirror = follow(on_change=changes)
    for number in range(5):
        api.cut()
        api.put("pods", make_pod(f"p{number}", 1))
        eventually(lambda number=number: mirror.get(f"default/p{number}"))
    assert mirror.lists == 1
    assert changes == [(f"default/p{number}", "new") for number in range(5)]


def test_an_expired_version_is_listed_again_and_reports_differences_only(api: ApiDouble, follow: Follow) -> None:
    changes = Changes()
    api.put("pods", make_pod("stays", 1))
    api.put("pods", make_pod("goes", 1))
    mirror = follow(on_change=changes)
    with api.outage():
        eventually(lambda: mirror.error)
        api.remove("pods", "goes", "default")
        api.put("pods", make_pod("comes", 1))
        api.compact()
        assert mirror.get("default/goes"), "the last state stays while the API is away"
        assert mirror.synced
    eventually(lambda: mirror.get("default/comes") and not mirror.get("default/goes"))
    assert mirror.lists == 2
    assert changes[2:] == [("default/comes", "new"), ("default/goes", "gone")]
    assert mirror.error == ""


def test_bookmarks_move_the_version_on(api: ApiDouble, follow: Follow) -> None:
    api.bookmarks = True
    mirror = follow(query={"fieldSelector": "spec.nodeName=mine"})
    for number in range(5):
        api.put("pods", make_pod(f"p{number}", 1, "other"))
    at = api.version
    eventually(lambda: mirror.age < 0.5)
    time.sleep(0.1)
    api.compact()
    api.cut()
    eventually(lambda: [path for _method, path, _body in api.requests if f"resourceVersion={at}&" in path])
    assert mirror.lists == 1


def test_it_reports_the_seconds_since_the_last_response(api: ApiDouble, follow: Follow) -> None:
    now = [50.0]
    api.down = True
    mirror = follow(clock=lambda: now[0], wait=False)
    eventually(lambda: mirror.error)
    assert (mirror.synced, mirror.age, mirror.error) == (False, float("inf"), "connection refused")
    api.down = False
    assert mirror.wait_synced(10)
    now[0] += 42
    assert mirror.age == 42


@pytest.mark.parametrize(
    ("path", "one"),
    [("/api/v1/pods", "/api/v1/namespaces/default/pods"), ("/api/v1/nodes", "/api/v1/nodes")],
)
def test_the_current_version_costs_one_object(api: ApiDouble, follow: Follow, path: str, one: str) -> None:
    """A list of all namespaces with a selector and a limit would have the API server read every object."""
    follow(path)
    api.cut()
    eventually(lambda: len(api.asked("WATCH", path)) == 2)
    assert [at for method, at, _body in api.requests if method == "GET"][1:] == [
        f"{one}?fieldSelector=metadata.name%3Dgpushare&limit=1"
    ]


def queries(api: ApiDouble) -> list[str]:
    """Of the lists of pods so far; the check of the version before a watch isn't one."""
    return [at.partition("?")[2] for verb, at, _body in api.requests if verb == "GET" and at.startswith("/api/v1/pods")]


def test_small_collections_are_listed_from_the_cache(follow: Follow) -> None:
    """In one answer that is at least as new as the known state; etcd isn't read."""
    api = Untrusted()
    api.put("pods", make_pod("p", 1))
    mirror = follow(on=api)
    assert queries(api) == ["resourceVersion=0&resourceVersionMatch=NotOlderThan"]
    eventually(lambda: api.asked("WATCH", "pods"))
    api.answer = error_event(500)
    api.cut()
    eventually(lambda: mirror.lists == 2)
    assert queries(api)[1] == f"resourceVersion={api.version}&resourceVersionMatch=NotOlderThan"
    api.answer = None
    # Those that are answered with the error aren't recorded.
    eventually(lambda: len(api.asked("WATCH", "pods")) > 1)
    last = [at for verb, at, _body in api.requests if verb == "WATCH"][-1]
    assert int(last.partition("timeoutSeconds=")[2]) > WATCH_SECONDS / 2, "an error at once isn't a proxy's time"


def test_a_cache_that_is_behind_is_left_out(follow: Follow) -> None:
    """Its API server can't answer with a state that is new enough: pages of etcd's state."""
    api = Untrusted()
    mirror = follow(on=api)
    behind = KubeError(504, "Timeout", "Too large resource version", ["ResourceVersionTooLarge"])
    api.failures.append(Failure("GET", re.compile("NotOlderThan"), behind, 1, False))
    api.put("pods", make_pod("p", 1))
    eventually(lambda: mirror.version == api.version)
    api.answer = error_event(500)
    api.cut()
    eventually(lambda: mirror.lists == 2)
    known = f"resourceVersion={api.version}&resourceVersionMatch=NotOlderThan"
    assert queries(api)[1:3] == [known, f"limit={FIRST_PAGE}"]


class Cutter(ApiDouble):
    """An API behind a proxy that ends a watch after some seconds without an event; time passes with each watch.

    :param bookmarks: an API server sends none while nothing of the kind changes.
    """

    def __init__(self, cut: float, now: list[float], bookmarks: bool = True) -> None:
        super().__init__()
        self.cut_after, self.now, self.bookmarks = cut, now, bookmarks
        self.seconds: list[int] = []
        self.end = now[0] + 1800

    def watch(self, path: str) -> Any:
        super().watch(path)
        self.seconds.append(int(path.partition("timeoutSeconds=")[2]))
        return self._watch(self.seconds[-1])

    def _watch(self, seconds: int) -> Any:
        return Sent(iter(self._events(seconds)))

    def _events(self, seconds: int) -> Iterator[JsonObject]:
        # The API server sends a bookmark after a minute, and two seconds before the end.
        if self.now[0] > self.end:
            time.sleep(0.05)
            return
        passed = 0.0
        for at in [*range(60, seconds - 2, 60), seconds - 2] if self.bookmarks else ():
            if self.cut_after < at - passed:
                break
            self.now[0] += at - passed
            passed = at
            yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}
        self.now[0] += min(self.cut_after, seconds - passed)
        if self.cut_after < seconds - passed:
            raise KubeError(0, "Cut", "connection reset")


# Without a bookmark the client ends a watch after WATCH_SILENCE_SECONDS.
@pytest.mark.parametrize(
    ("cut", "bookmarks", "lists"),
    [(1.0, True, 21), (20.0, True, 1), (45.0, True, 1), (59.0, True, 1), (WATCH_SILENCE_SECONDS, False, 21)],
)
def test_a_watch_that_is_cut_early_causes_few_lists(follow: Follow, cut: float, bookmarks: bool, lists: int) -> None:
    """The watches become shorter than the proxy's time, so that each gets a bookmark."""
    now, late, mirrors = [1000.0], 0.0, list[Mirror[Any]]()
    api = Cutter(cut, now, bookmarks)
    opened = api._events

    def events(seconds: int) -> Iterator[JsonObject]:
        nonlocal late
        yield from opened(seconds)
        late = max(late, mirrors[0].age if mirrors else 0.0)

    api._events = events  # type: ignore[method-assign]
    mirrors.append(follow(on=api, clock=lambda: now[0], backoff=(0.0, 0.0), wait=False))
    eventually(lambda: now[0] > api.end)
    assert mirrors[0].lists <= lists, api.seconds
    assert late < STALE_SECONDS
    assert min(api.seconds) >= SHORTEST_WATCH_SECONDS


def test_a_watch_that_lived_for_seconds_is_opened_again_soon(follow: Follow) -> None:
    """Without an event too: pauses that grow with each watch would let every pod wait for seconds."""
    now = [1000.0]
    api = Cutter(LIVED_SECONDS + 1, now)
    follow(on=api, clock=lambda: now[0], backoff=(0.01, 60.0))
    eventually(lambda: len(api.seconds) >= 15, 5)


def test_a_failing_callback_leaves_the_watch_running(api: ApiDouble, follow: Follow) -> None:
    changes = Changes()

    def fails(*_: Any) -> None:
        raise RuntimeError("boom")

    mirror: Mirror[JsonObject] = follow(on_change=fails, wait=False)
    mirror.on_change(changes)
    api.put("pods", make_pod("p", 1))
    eventually(lambda: changes)


def test_an_unexpected_object_leaves_the_watch_running(api: ApiDouble, follow: Follow) -> None:
    seen: list[str] = []

    def trim(pod: JsonObject) -> str:
        if pod["metadata"]["name"] == "odd" and not seen:
            seen.append("odd")
            raise TypeError("boom")
        return "kept"

    mirror = follow(trim=trim)
    api.put("pods", make_pod("odd", 1))
    api.put("pods", make_pod("p", 1))
    eventually(lambda: len(mirror) == 2)


# ----------------------------------------------------------------- a watch that can't be trusted


class Untrusted(ApiDouble):
    """An API whose watches answer what a test says: events, or a refusal."""

    answer: JsonObject | KubeError | None = None

    def watch(self, path: str) -> Any:
        if isinstance(self.answer, KubeError):
            raise self.answer
        return super().watch(path) if self.answer is None else Sent(iter([self.answer]))


class Sent:
    """A watch that delivers some events and ends."""

    def __init__(self, events: Iterator[JsonObject]) -> None:
        self.events = events

    def __iter__(self) -> Iterator[JsonObject]:
        return self.events

    def close(self) -> None: ...


def error_event(code: int) -> JsonObject:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "reason": "Injected", "message": "injected"}}


def older(kind: str) -> JsonObject:
    return {"type": kind, "object": {"metadata": {"name": "odd", "resourceVersion": "7"}}}


@pytest.mark.parametrize(
    "answer",
    [
        *map(error_event, (410, 500, 504)),
        older("BOOKMARK"),
        older("MODIFIED"),
        *(KubeError(status, "Injected", "injected") for status in (400, 403, 410)),
    ],
    ids=["error 410", "error 500", "error 504", "older bookmark", "older event", "HTTP 400", "HTTP 403", "HTTP 410"],
)
def test_a_watch_that_fails_for_ever_leaves_the_state_equal_to_the_api(
    tmp_path: Path, follow: Follow, answer: JsonObject | KubeError
) -> None:
    """Over real HTTP; deleted objects leave the mirror, and its listeners are told."""
    api, changes = Untrusted(), Changes()
    api.put("pods", make_pod("goes", 1))
    api.answer = answer
    with served(api, lambda: "good") as address:
        mirror = follow(on=client_of(tmp_path, address), on_change=changes)
        api.remove("pods", "goes", "default")
        api.put("pods", make_pod("comes", 1))
        eventually(lambda: [object_key(pod) for pod in mirror.items()] == ["default/comes"])
        assert changes == [("default/goes", "new"), ("default/comes", "new"), ("default/goes", "gone")]
        mirror.stop()


def test_an_older_state_of_etcd_is_listed_when_a_watch_is_opened_again(api: ApiDouble, follow: Follow) -> None:
    """A watch from a version in the future says nothing, so the current version is compared before."""
    api.put("pods", make_pod("stays", 1))
    log, objects, version = list(api.log), dict(api.objects), api.version
    api.put("pods", make_pod("goes", 1))
    mirror = follow()
    with api.outage():
        eventually(lambda: mirror.error)
        api.log[:], api.objects, api.version = log, objects, version
    eventually(lambda: [object_key(pod) for pod in mirror.items()] == ["default/stays"])
    assert mirror.lists == 2
    assert queries(api)[-1] == f"limit={FIRST_PAGE}", "an API server's cache may still have the newer state"


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_an_api_that_fails_for_ever_makes_the_state_stale(follow: Follow, status: int) -> None:
    """A watch that is refused isn't contact; while it is only overloaded, no list is added to its load."""
    api, now = Untrusted(), [1000.0]
    mirror = follow(on=api, clock=lambda: now[0])
    api.fail("GET", "/pods", status, times=1_000_000)
    api.answer = KubeError(status, "Injected", "injected failure")
    api.cut()
    eventually(lambda: "injected" in mirror.error)
    now[0] += FAILING_SECONDS - 1
    assert (mirror.stale, mirror.lists) == ("", 1)
    now[0] += 2
    assert mirror.stale == f"they can't be read from the API for 41 s: injected failure {status}"
    api.failures.clear()
    api.answer = None
    # Listed at once: the first bookmark of the new watch may take a minute.
    eventually(lambda: not mirror.stale)
    assert (mirror.lists, mirror.error) == (2, "")


def test_an_open_watch_without_events_becomes_stale(api: ApiDouble, follow: Follow) -> None:
    now = [1000.0]
    mirror = follow(clock=lambda: now[0])
    eventually(lambda: api.asked("WATCH", "pods"))
    now[0] += STALE_SECONDS + 1
    assert mirror.stale == f"the API sent nothing about them for {STALE_SECONDS + 1:.0f} s: no answer"
    api.put("pods", make_pod("p", 1))
    eventually(lambda: not mirror.stale)


def test_everything_is_listed_again_within_an_hour(api: ApiDouble, follow: Follow) -> None:
    """Also what no event has told; the watch goes on."""
    api.put("pods", make_pod("p", 1))
    now = [1000.0]
    mirror = follow(clock=lambda: now[0])
    del api.objects[("pods", "default", "p")]
    api.put("pods", make_pod("q", 1))
    eventually(lambda: mirror.get("default/q"))
    assert mirror.get("default/p") and mirror.lists == 1
    now[0] += RELIST_SECONDS - WATCH_SECONDS
    for name in ("r", "s"):
        # The first event begins the list, the next one applies it.
        api.put("pods", make_pod(name, 1))
        eventually(lambda name=name: mirror.get(f"default/{name}"))
        eventually(lambda: mirror._listing is None or mirror._listing.done)
    eventually(lambda: mirror.lists == 2 and not mirror.get("default/p"))
    assert len(api.asked("WATCH", "pods")) == 1


@pytest.mark.parametrize("page", [0, 2], ids=["whole", "pages"])
def test_the_watch_goes_on_while_everything_is_listed(api: ApiDouble, follow: Follow, page: int) -> None:
    """What the watch has delivered since then wins over the list, which a slow API server answers late."""
    for name in ("changes", "goes", "missed", "stays", "wrong"):
        api.put("pods", make_pod(name, 1))
    now, changes = [1000.0], Changes()
    mirror = follow(clock=lambda: now[0], on_change=changes, page=page)
    # What the watch has missed.
    del api.objects[("pods", "default", "missed")]
    api.objects[("pods", "default", "wrong")]["status"]["phase"] = "Running"
    reached, resume = api.pause("GET", "limit=2|NotOlderThan")
    now[0] += RELIST_SECONDS - WATCH_SECONDS
    api.put("pods", make_pod("first", 1))
    assert reached.wait(5)
    if page:
        # It has this list's version from its first page on.
        second, go = api.pause("GET", "continue=")
        resume.set()
        assert second.wait(5)
        resume = go
    api.remove("pods", "goes", "default")
    api.change("pods", "changes", "default", lambda pod: pod["status"].update(phase="Running"))
    eventually(lambda: not mirror.get("default/goes") and mirror.get("default/changes")["status"]["phase"] == "Running")
    assert mirror.lists == 1 and mirror.get("default/missed"), "the list hasn't ended"
    resume.set()
    eventually(lambda: mirror._listing is not None and mirror._listing.done)
    before = len(changes)
    api.put("pods", make_pod("last", 1))
    eventually(lambda: mirror.lists == 2)
    assert sorted(changes[before:]) == [("default/last", "new"), ("default/missed", "gone"), ("default/wrong", "other")]
    names = ["default/changes", "default/first", "default/last", "default/stays", "default/wrong"]
    assert sorted(object_key(pod) for pod in mirror.items()) == names
    assert len(api.asked("WATCH", "pods")) == 1


def test_a_list_beside_the_watch_that_fails_is_tried_again(api: ApiDouble, follow: Follow) -> None:
    now = [1000.0]
    mirror = follow(clock=lambda: now[0])
    api.fail("GET", "NotOlderThan", 500)
    now[0] += RELIST_SECONDS - WATCH_SECONDS
    for number in range(4):
        api.put("pods", make_pod(f"p{number}", 1))
        eventually(lambda number=number: mirror.get(f"default/p{number}"))
        eventually(lambda: mirror._listing is None or mirror._listing.done or mirror._listing.failed)
        now[0] += AGAIN_SECONDS
    eventually(lambda: mirror.lists == 2)
    assert len(api.asked("WATCH", "pods")) == 1


def test_without_any_sign_everything_is_listed_again(api: ApiDouble, follow: Follow) -> None:
    """A change of which the watch has sent nothing is found before the hour is over."""
    now = [1000.0]
    api.put("pods", make_pod("p", 1))
    mirror = follow(backoff=(0.05, 0.1), clock=lambda: now[0])
    eventually(lambda: len(api.asked("WATCH", "pods")) == 1)
    api.objects.pop(("pods", "default", "p"))
    api.cut()
    eventually(lambda: len(api.asked("WATCH", "pods")) == 2)
    assert mirror.lists == 1 and mirror.get("default/p")
    now[0] += SILENT_SECONDS
    api.cut()
    eventually(lambda: mirror.lists == 2 and not mirror.get("default/p"))


def stops_quickly(mirror: Mirror[Any]) -> None:
    began = time.monotonic()
    mirror.stop()
    assert time.monotonic() - began < 3
    assert mirror._thread is not None and not mirror._thread.is_alive()


def test_a_watch_that_ends_at_once_is_delayed_before_the_next(follow: Follow) -> None:
    class Short(ApiDouble):
        def watch(self, path: str) -> Any:
            stream = super().watch(path)
            stream.close()
            return stream

    short = Short()
    follow(on=short, backoff=(0.1, 1.0))
    time.sleep(0.5)
    assert len(short.asked("WATCH", "pods")) < 10


# ----------------------------------------------------------------- the real client


@pytest.fixture
def real(api: ApiDouble, tmp_path: Path) -> Iterator[KubeApi]:
    with served(api, lambda: "good") as address:
        client = client_of(tmp_path, address)
        yield client
        client.close()


def client_of(folder: Path, address: str) -> KubeApi:
    service_account(folder, address, "good")
    return connect(address, str(folder))


def test_requests_over_http(api: ApiDouble, real: KubeApi) -> None:
    pod = real.post("/api/v1/namespaces/default/pods", make_pod("p", 3))
    assert real.get("/api/v1/namespaces/default/pods/p") == pod
    uid = pod["metadata"]["uid"]
    real.patch(
        "/api/v1/namespaces/default/pods/p/status", {"metadata": {"uid": uid, "annotations": {"a": "b", "c": "d"}}}
    )
    patched = real.patch("/api/v1/namespaces/default/pods/p/status", {"metadata": {"annotations": {"a": None}}})
    assert patched["metadata"]["annotations"] == {"c": "d"}, "null must reach the server"
    assert [pod["metadata"]["name"] for pod in real.get("/api/v1/pods?limit=5")["items"]] == ["p"]
    with pytest.raises(KubeError) as caught:
        real.patch("/api/v1/namespaces/default/pods/p/status", {"metadata": {"uid": "other"}})
    assert (caught.value.status, caught.value.outcome_unknown) == (409, False)
    real.delete("/api/v1/namespaces/default/pods/p")
    with pytest.raises(KubeError) as caught:
        real.get("/api/v1/namespaces/default/pods/p")
    assert (caught.value.status, caught.value.reason) == (404, "NotFound")
    assert '"p" not found' in str(caught.value)


def test_an_unreachable_api_is_status_0(api: ApiDouble, tmp_path: Path) -> None:
    with served(api) as address:
        client = client_of(tmp_path, address)
        api.put("pods", make_pod("p", 3))
        with api.outage(), pytest.raises(KubeError) as caught:
            client.get("/api/v1/pods")
        assert caught.value.status == 0 and caught.value.outcome_unknown
        assert client.get("/api/v1/pods")["items"]
    with pytest.raises(KubeError) as caught:
        client_of(tmp_path, address).get("/api/v1/pods")
    assert caught.value.status == 0
    assert "can't be reached" in str(caught.value)


def test_a_mirror_over_http(api: ApiDouble, real: KubeApi, follow: Follow) -> None:
    for number in range(7):
        api.put("pods", make_pod(f"p{number}", 1))
    mirror = follow(on=real, page=3)
    assert len(mirror) == 7
    # A line of more than one read, with characters of more than one byte.
    api.change("pods", "p1", "default", lambda pod: pod["metadata"].update(labels={"long": "ü" * 200_000}))
    eventually(lambda: mirror.get("default/p1")["metadata"].get("labels", {}).get("long") == "ü" * 200_000)
    with api.outage():
        eventually(lambda: mirror.error)
        api.put("pods", make_pod("late", 1))
        api.compact()
    eventually(lambda: mirror.get("default/late"))
    stops_quickly(mirror)


def test_fault_10_the_service_accounts_token_is_read_again(api: ApiDouble, tmp_path: Path) -> None:
    accepted, now = ["first"], [0.0]
    with served(api, lambda: accepted[0]) as address:
        token = tmp_path / "token"
        token.write_text("first\n")
        own = Account(tmp_path, lambda: now[0], address)
        client = KubeApi(own)
        client.get("/api/v1/pods")
        accepted[0] = "second"
        token.write_text("second")
        with pytest.raises(KubeError) as caught:
            client.get("/api/v1/pods")
        assert caught.value.status == 401
        # The file is checked again after a minute.
        now[0] += 60
        client.get("/api/v1/pods")
        token.write_text("")
        now[0] += 60
        with pytest.raises(KubeError, match="is empty"):
            client.get("/api/v1/pods")


def test_a_pod_reaches_the_api_with_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "FOLDER", tmp_path)
    with pytest.raises(KubeError, match="neither --api-server nor KUBERNETES_SERVICE_HOST"):
        connect()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for missing in ("ca.crt", "token"):
        with pytest.raises(KubeError, match=f"no way to reach the Kubernetes API.*{missing}"):
            connect()
        (tmp_path / missing).write_text("x")
    assert Account(tmp_path).url == "https://[fd00::1]:443"


@pytest.mark.parametrize("url", ["http://10.0.0.1:8080", "ftp://127.0.0.1", "127.0.0.1:6443"])
def test_a_token_is_never_sent_in_the_clear_to_another_machine(tmp_path: Path, url: str) -> None:
    (tmp_path / "token").write_text("x")
    with pytest.raises(KubeError, match="neither an https URL nor an http URL of this machine"):
        connect(url, str(tmp_path))


def test_a_service_account_of_a_real_api_server(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = api_server.namespace()
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    api_server.request("POST", accounts, {"metadata": {"name": "server"}})
    api_server.token(tmp_path, namespace, "server")
    host, _colon, port = api_server.url.partition("//")[2].partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(account, "FOLDER", tmp_path)
    client = connect()
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    user = client.post("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)["status"]["userInfo"]["username"]
    assert user == f"system:serviceaccount:{namespace}:server"
    with pytest.raises(KubeError) as refused:
        client.get("/api/v1/pods")
    assert refused.value.status == 403
    client.close()
    # A server with a certificate of another authority is refused.
    shutil.copy(_Authority(tmp_path / "pki").folder / "ca.crt", tmp_path)
    with pytest.raises(KubeError, match="certificate verify failed"):
        connect().get("/api/v1/pods")


def test_a_real_api_server_answers_as_the_mirror_expects(api_server: ApiServer, tmp_path: Path) -> None:
    """The version of the state at the cost of one object, and the refusal of a version that its cache doesn't have."""
    namespace = api_server.namespace()
    api_server.service_account(tmp_path, namespace)
    client = connect(api_server.url, str(tmp_path))
    one = "?fieldSelector=metadata.name%3Dgpushare&limit=1"
    for path in ("/api/v1/namespaces/default/pods", "/api/v1/nodes"):
        made = client.post(f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"generateName": "one-"}})
        now = int(client.get(path + one)["metadata"]["resourceVersion"])
        assert now >= int(made["metadata"]["resourceVersion"]), "also of other kinds: it is etcd's"
    with pytest.raises(KubeError) as caught:
        client.get(f"/api/v1/pods?resourceVersion={now + 10**6}&resourceVersionMatch=NotOlderThan")
    assert TOO_LARGE in caught.value.causes
    client.close()


@pytest.mark.long
def test_a_real_api_server_sends_a_bookmark_before_the_end_of_a_watch(api_server: ApiServer, tmp_path: Path) -> None:
    """Long: only another API server breaks it."""
    namespace = api_server.namespace()
    api_server.service_account(tmp_path, namespace)
    client = connect(api_server.url, str(tmp_path))
    made = [
        {"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "none"}]}} for name in ("p", "q")
    ]
    pods = f"/api/v1/namespaces/{namespace}/pods"
    version = client.post(pods, made[0])["metadata"]["resourceVersion"]
    # It sends none if no object of the kind changes during the watch.
    threading.Timer(2, client.post, (pods, made[1])).start()
    query = f"watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds={SHORTEST_WATCH_SECONDS}"
    events = [event["type"] for event in client.watch(f"/api/v1/pods?fieldSelector=spec.nodeName%3Dnobody&{query}")]
    assert {*events} == {"BOOKMARK"}
    client.close()
