# SPDX-License-Identifier: GPL-3.0-or-later
"""Mirrors over the API double, and the real client over real HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod, served
from extender_kit import eventually
from gpushare import account, kube
from gpushare.account import Account
from gpushare.kube import Json, KubeApi, KubeError, Mirror, from_environment, object_key
from real_apiserver import ApiServer, _Authority, api_server

__all__ = ["api_server"]

Follow = Callable[..., Mirror[Any]]


@pytest.fixture
def follow(api: ApiDouble) -> Iterator[Follow]:
    mirrors: list[Mirror[Any]] = []

    def begin(path: str = "/api/v1/pods", on: Any = None, wait: bool = True, **options: Any) -> Mirror[Any]:
        mirror: Mirror[Any] = Mirror(on or api, path, backoff=(0.01, 0.05), **options)
        mirrors.append(mirror)
        mirror.start()
        if wait:
            assert mirror.wait_synced(10)
        return mirror

    yield begin
    for mirror in mirrors:
        mirror.stop()


class Heard(list[tuple[str, str]]):
    """What a callback was told: the key, and whether the object is new, other or gone."""

    def __call__(self, key: str, before: Any, after: Any) -> None:
        self.append((key, "new" if before is None else "gone" if after is None else "other"))


# ----------------------------------------------------------------- following


def test_it_follows_additions_changes_and_removals(api: ApiDouble, follow: Follow) -> None:
    api.put("pods", make_pod("p", 1))
    heard = Heard()
    mirror = follow(on_change=heard)
    assert [object_key(pod) for pod in mirror.items()] == ["default/p"]
    api.put("pods", make_pod("q", 1))
    api.change("pods", "p", "default", lambda pod: pod["status"].update(phase="Running"))
    api.remove("pods", "q", "default")
    eventually(lambda: mirror.get("default/q") is None and mirror.get("default/p")["status"]["phase"] == "Running")
    assert heard == [("default/p", "new"), ("default/q", "new"), ("default/p", "other"), ("default/q", "gone")]


def test_objects_without_a_namespace_go_by_name(api: ApiDouble, follow: Follow) -> None:
    api.put("nodes", make_node("a", 1))
    assert follow("/api/v1/nodes").get("a")["metadata"]["name"] == "a"


def test_slim_keeps_what_it_gives_and_unchanged_is_no_change(api: ApiDouble, follow: Follow) -> None:
    heard = Heard()

    def phase(pod: Json) -> str | None:
        return pod["status"]["phase"] if pod["metadata"]["name"] != "never" else None

    mirror = follow(slim=phase, on_change=heard)
    api.put("pods", make_pod("never", 1))
    api.put("pods", make_pod("p", 1))
    api.change("pods", "p", "default", lambda pod: pod["metadata"].update(labels={"a": "b"}))
    api.change("pods", "p", "default", lambda pod: pod["status"].update(phase="Running"))
    eventually(lambda: mirror.get("default/p") == "Running")
    assert mirror.items() == ["Running"]
    assert heard == [("default/p", "new"), ("default/p", "other")]


def test_a_selector_that_an_object_leaves_is_a_removal(api: ApiDouble, follow: Follow) -> None:
    mirror = follow(query={"fieldSelector": "spec.nodeName!=,status.phase!=Failed"})
    api.put("pods", make_pod("p", 1))
    api.change("pods", "p", "default", lambda pod: pod["spec"].update(nodeName="a"))
    eventually(lambda: mirror.get("default/p"))
    api.change("pods", "p", "default", lambda pod: pod["status"].update(phase="Failed"))
    eventually(lambda: not mirror.items())


def test_what_has_to_be_read_before_the_first_list_is(api: ApiDouble) -> None:
    """Not before later ones: what is booked while they are read, they may or may not show."""
    api.put("pods", make_pod("p", 1))
    api.fail("GET", "/api/v1/pods", 500, times=2)
    calls: list[tuple[int, bool]] = []

    def before() -> None:
        calls.append((len(api.asked("GET", "/api/v1/pods")), mirror.synced))

    mirror: Mirror[Any] = Mirror(api, "/api/v1/pods", backoff=(0.01, 0.05), before_list=before)
    mirror.start()
    try:
        eventually(lambda: mirror.synced)
        assert calls == [(0, False), (1, False), (2, False)]
        with api.outage():
            api.put("pods", make_pod("q", 1))
            api.compact()
        eventually(lambda: mirror.lists == 2)
        assert len(calls) == 3
    finally:
        mirror.stop()


def test_lists_come_in_pages(api: ApiDouble, follow: Follow) -> None:
    for number in range(25):
        api.put("pods", make_pod(f"p{number}", 1))
    assert len(follow(page=10)) == 25
    assert len(api.asked("GET", "limit=10")) == 3


def test_pages_that_expired_are_listed_again(api: ApiDouble, follow: Follow) -> None:
    for number in range(25):
        api.put("pods", make_pod(f"p{number}", 1))

    def expire(method: str, path: str) -> None:
        if "continue=" in path:
            api.hooks.remove(expire)
            api.compact()

    api.hooks.append(expire)
    mirror = follow(page=10)
    assert (len(mirror), mirror.lists) == (25, 1)


# ----------------------------------------------------------------- what goes wrong


def test_a_broken_watch_goes_on_where_it_was(api: ApiDouble, follow: Follow) -> None:
    heard = Heard()
    mirror = follow(on_change=heard)
    for number in range(5):
        api.cut()
        api.put("pods", make_pod(f"p{number}", 1))
        eventually(lambda number=number: mirror.get(f"default/p{number}"))
    assert mirror.lists == 1
    assert heard == [(f"default/p{number}", "new") for number in range(5)]


def test_too_old_a_version_is_listed_again_and_only_differences_are_told(api: ApiDouble, follow: Follow) -> None:
    heard = Heard()
    api.put("pods", make_pod("stays", 1))
    api.put("pods", make_pod("goes", 1))
    mirror = follow(on_change=heard)
    with api.outage():
        eventually(lambda: mirror.error)
        api.remove("pods", "goes", "default")
        api.put("pods", make_pod("comes", 1))
        api.compact()
        assert mirror.get("default/goes"), "the last state stays while the API is away"
        assert mirror.synced
    eventually(lambda: mirror.get("default/comes") and not mirror.get("default/goes"))
    assert mirror.lists == 2
    assert heard[2:] == [("default/comes", "new"), ("default/goes", "gone")]
    assert mirror.error == ""


def test_bookmarks_move_the_version_on(api: ApiDouble, follow: Follow) -> None:
    api.bookmarks = True
    mirror = follow(query={"fieldSelector": "spec.nodeName=mine"})
    for number in range(5):
        api.put("pods", make_pod(f"p{number}", 1, "other"))
    at = api.version
    eventually(lambda: mirror.fresh < 0.5)
    time.sleep(0.1)
    api.compact()
    api.cut()
    eventually(lambda: [path for _method, path, _body in api.requests if f"resourceVersion={at}&" in path])
    assert mirror.lists == 1


def test_it_knows_how_long_it_has_heard_nothing(api: ApiDouble, follow: Follow) -> None:
    now = [50.0]
    api.down = True
    mirror = follow(clock=lambda: now[0], wait=False)
    eventually(lambda: mirror.error)
    assert (mirror.synced, mirror.fresh, mirror.error) == (False, float("inf"), "connection refused")
    api.down = False
    assert mirror.wait_synced(10)
    now[0] += 42
    assert mirror.fresh == 42


def test_a_callback_that_fails_ends_nothing(api: ApiDouble, follow: Follow) -> None:
    heard = Heard()

    def fails(*_: Any) -> None:
        raise RuntimeError("boom")

    mirror: Mirror[Json] = follow(on_change=fails, wait=False)
    mirror.on_change(heard)
    api.put("pods", make_pod("p", 1))
    eventually(lambda: heard)


def test_an_object_nobody_expected_ends_nothing(api: ApiDouble, follow: Follow) -> None:
    seen: list[str] = []

    def slim(pod: Json) -> str:
        if pod["metadata"]["name"] == "odd" and not seen:
            seen.append("odd")
            raise TypeError("boom")
        return "kept"

    mirror = follow(slim=slim)
    api.put("pods", make_pod("odd", 1))
    api.put("pods", make_pod("p", 1))
    eventually(lambda: len(mirror) == 2)


def test_stop_ends_a_watch_that_waits(api: ApiDouble, follow: Follow) -> None:
    mirror = follow()
    eventually(lambda: mirror._stream is not None)
    began = time.monotonic()
    mirror.stop()
    assert time.monotonic() - began < 3
    assert mirror._thread is not None and not mirror._thread.is_alive()


def test_a_watch_that_ends_at_once_is_not_asked_for_without_a_break(api: ApiDouble, follow: Follow) -> None:
    class Short(ApiDouble):
        def watch(self, path: str) -> Any:
            stream = super().watch(path)
            stream.close()
            return stream

    short = Short()
    mirror: Mirror[Json] = Mirror(short, "/api/v1/pods", backoff=(0.1, 1.0))
    mirror.start()
    assert mirror.wait_synced(5)
    time.sleep(0.5)
    mirror.stop()
    assert len(short.asked("WATCH", "pods")) < 10


# ----------------------------------------------------------------- the real client


def kubeconfig(folder: Path, address: str, token: str) -> str:
    path = folder / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": address}}],
                "users": [{"name": "u", "user": {"token": token}}],
            }
        )
    )
    return str(path)


@pytest.fixture(params=["kubeconfig", "account"])
def real(
    request: pytest.FixtureRequest, api: ApiDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubeApi]:
    """By the official client, as with a kubeconfig, and by ours, as in a pod."""
    with served(api, lambda: "good") as address:
        if request.param == "kubeconfig":
            client = from_environment(kubeconfig(tmp_path, address, "good"))
        else:
            client = KubeApi(in_a_pod(tmp_path, monkeypatch, address))
        yield client
        client.close()


def in_a_pod(folder: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> Account:
    (folder / "token").write_text("good\n")
    (folder / "ca.crt").write_text("unused: the double speaks plain HTTP")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    return Account(folder, url=address)


def test_requests_over_http(api: ApiDouble, real: KubeApi) -> None:
    pod = real.post("/api/v1/namespaces/default/pods", make_pod("p", 3))
    assert real.get("/api/v1/namespaces/default/pods/p") == pod
    uid = pod["metadata"]["uid"]
    real.patch("/api/v1/namespaces/default/pods/p", {"metadata": {"uid": uid, "annotations": {"a": "b", "c": "d"}}})
    patched = real.patch("/api/v1/namespaces/default/pods/p", {"metadata": {"annotations": {"a": None}}})
    assert patched["metadata"]["annotations"] == {"c": "d"}, "null must reach the server"
    assert [pod["metadata"]["name"] for pod in real.get("/api/v1/pods?limit=5")["items"]] == ["p"]
    real.delete("/api/v1/namespaces/default/pods/p")
    with pytest.raises(KubeError) as caught:
        real.get("/api/v1/namespaces/default/pods/p")
    assert (caught.value.status, caught.value.reason) == (404, "NotFound")
    assert '"p" not found' in str(caught.value)


def test_a_conflict_over_http(api: ApiDouble, real: KubeApi) -> None:
    api.put("pods", make_pod("p", 3))
    with pytest.raises(KubeError) as caught:
        real.patch("/api/v1/namespaces/default/pods/p", {"metadata": {"uid": "other", "annotations": {"a": "b"}}})
    assert caught.value.status == 409
    assert not caught.value.unsure


def test_an_api_that_is_away_is_status_0(api: ApiDouble, tmp_path: Path) -> None:
    with served(api) as address:
        client = from_environment(kubeconfig(tmp_path, address, "good"))
        api.put("pods", make_pod("p", 3))
        with api.outage(), pytest.raises(KubeError) as caught:
            client.get("/api/v1/pods")
        assert caught.value.unreachable and caught.value.unsure
        assert client.get("/api/v1/pods")["items"]
    with pytest.raises(KubeError) as caught:
        from_environment(kubeconfig(tmp_path, address, "good")).get("/api/v1/pods")
    assert caught.value.unreachable
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
    began = time.monotonic()
    mirror.stop()
    assert time.monotonic() - began < 3
    assert mirror._thread is not None and not mirror._thread.is_alive()


def test_closing_a_stream_ends_a_read_that_waits(api: ApiDouble, real: KubeApi) -> None:
    stream = real.watch(f"/api/v1/pods?watch=1&resourceVersion={api.version}")
    ended = threading.Event()

    def read() -> None:
        assert list(stream) == []
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.2)
    assert not ended.is_set()
    stream.close()
    assert ended.wait(5)


def test_fault_10_the_service_accounts_token_is_read_again(
    api: ApiDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, now = ["first"], [0.0]
    with served(api, lambda: accepted[0]) as address:
        token = tmp_path / "token"
        token.write_text("first\n")
        (tmp_path / "ca.crt").write_text("unused: the double speaks plain HTTP")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
        own = Account(tmp_path, lambda: now[0], address)
        client = KubeApi(own)
        client.get("/api/v1/pods")
        accepted[0] = "second"
        token.write_text("second")
        with pytest.raises(KubeError) as caught:
            client.get("/api/v1/pods")
        assert caught.value.status == 401
        # The file is looked at again after a minute.
        now[0] += 60
        client.get("/api/v1/pods")
        token.write_text("")
        now[0] += 60
        with pytest.raises(KubeError, match="is empty"):
            client.get("/api/v1/pods")


def test_a_pod_reaches_the_api_by_its_account(api: ApiDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(account, "FOLDER", tmp_path)
    for missing in ("ca.crt", "token"):
        with pytest.raises(KubeError, match=f"no way to reach the Kubernetes API.*{missing}"):
            from_environment()
        (tmp_path / missing).write_text("x")
    assert Account(tmp_path).url == "https://[fd00::1]:443"
    # A kubeconfig that is named comes first.
    with served(api) as address:
        named = from_environment(kubeconfig(tmp_path, address, "t"))
        assert named.get("/api/v1/pods")["items"] == []


def test_a_service_account_of_a_real_api_server(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = api_server.namespace()
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    api_server.request("POST", accounts, {"metadata": {"name": "server"}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    token = api_server.request("POST", f"{accounts}/server/token", request)["status"]["token"]
    (tmp_path / "token").write_text(token)
    (tmp_path / "ca.crt").write_bytes((api_server.folder / "pki" / "ca.crt").read_bytes())
    host, _colon, port = api_server.url.partition("//")[2].partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(account, "FOLDER", tmp_path)
    client = from_environment()
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    who = client.post("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)["status"]["userInfo"]["username"]
    assert who == f"system:serviceaccount:{namespace}:server"
    with pytest.raises(KubeError) as refused:
        client.get("/api/v1/pods")
    assert refused.value.status == 403
    client.close()
    # Another authority's server isn't talked to.
    (tmp_path / "ca.crt").write_text(_other_authority())
    with pytest.raises(KubeError, match="certificate verify failed"):
        from_environment().get("/api/v1/pods")


def _other_authority() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return (_Authority(Path(folder) / "pki").folder / "ca.crt").read_text()


def test_in_a_pod_the_large_client_is_not_loaded() -> None:
    code = "import sys, gpushare.extender, gpushare.device_plugin; print('kubernetes' in sys.modules)"
    source = str(Path(kube.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, check=True)
    assert done.stdout.strip() == b"False"


def test_no_configuration_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(KubeError) as caught:
        from_environment(str(tmp_path / "nothing"))
    assert "no way to reach the Kubernetes API" in str(caught.value)


def test_an_api_that_never_answers_is_given_up_once(tmp_path: Path) -> None:
    tries = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    tries.append(listener.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        client = from_environment(kubeconfig(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}", "t"))
        client._timeout = (0.3, 0.3)
        with pytest.raises(KubeError) as caught:
            client.get("/api/v1/pods")
        assert caught.value.unreachable and "timed out" in str(caught.value)
        with pytest.raises(KubeError):
            client.post("/api/v1/pods", {})
        assert len(tries) == 2
        for connection in tries:
            connection.close()


def test_a_write_on_a_dead_connection_is_not_repeated(api: ApiDouble, real: KubeApi) -> None:
    api.put("pods", make_pod("p", 1))
    path = "/api/v1/namespaces/default/pods/p"
    real.get(path)
    api.fail("PATCH", "/pods/p", 0, done=True)
    with pytest.raises(KubeError) as caught:
        real.patch(path, {"metadata": {"annotations": {"a": "b"}}})
    assert caught.value.unsure
    assert len(api.asked("PATCH", "/pods/p")) == 1
