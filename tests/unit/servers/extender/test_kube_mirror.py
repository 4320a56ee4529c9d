# SPDX-License-Identifier: GPL-3.0-or-later
"""Mirrors over the API double, and the real client over real HTTP."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_double import ApiDouble, make_pod, served
from extender_kit import eventually
from gpushare.api import account
from gpushare.api.account import Account
from gpushare.api.client import KubeApi, KubeError, connect
from gpushare.api.mirror import FAILING_SECONDS, RELIST_SECONDS, STALE_SECONDS, WATCH_SECONDS, Mirror, object_key
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
            delivered.append((mirrors[0].delivered, int(after["metadata"]["resourceVersion"])))

    mirror = follow(on_change=record, page=2, wait=False)
    mirrors = [mirror]
    with api.outage():
        for number in range(4):
            api.put("pods", make_pod(f"p{number}", 1))
        api.compact()
    eventually(lambda: len(delivered) == 4)
    assert all(told >= version for told, version in delivered)


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
        return super().watch(path) if self.answer is None else Sent(self.answer)


class Sent:
    """A watch that delivers one event and ends."""

    def __init__(self, event: JsonObject) -> None:
        self.event = event

    def __iter__(self) -> Iterator[JsonObject]:
        yield self.event

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


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_an_api_that_fails_for_ever_makes_the_state_stale(follow: Follow, status: int) -> None:
    """A watch that is refused isn't contact; while it is only overloaded, no list is added to its load."""
    api, now = Untrusted(), [1000.0]
    mirror = follow(on=api, clock=lambda: now[0])
    api.fail("GET", "/api/v1/pods", status, times=1_000_000)
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
    """Also what no event has told; the next watch begins after at most ``WATCH_SECONDS``."""
    api.put("pods", make_pod("p", 1))
    now = [1000.0]
    mirror = follow(clock=lambda: now[0])
    del api.objects[("pods", "default", "p")]
    api.put("pods", make_pod("q", 1))
    eventually(lambda: mirror.get("default/q"))
    assert mirror.get("default/p") and mirror.lists == 1
    now[0] += RELIST_SECONDS - WATCH_SECONDS
    # Events keep it from being silent until its end.
    api.put("pods", make_pod("r", 1))
    eventually(lambda: mirror.get("default/r"))
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
    api.change("pods", "p1", "default", lambda pod: pod["metadata"].update(labels={"long": "ü" * 300_000}))
    eventually(lambda: mirror.get("default/p1")["metadata"].get("labels", {}).get("long") == "ü" * 300_000)
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
