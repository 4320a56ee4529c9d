# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's list of pods over real gRPC: the connection that is kept, and the pods that aren't parsed twice."""

from __future__ import annotations

import contextlib
import threading
import time
import typing as t
from pathlib import Path

import grpc
import pytest
import real_kubelet
from gpushare.kubelet import pod_resources, wire
from gpushare.kubelet.pod_resources import Entry, KubeletPodResources, Unreadable
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.pod_resources import split_pods
from pod_resources_messages import MESSAGES


class Lister:
    """kubelet's socket; ``rows`` are pods, their containers and the IDs of those."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.rows: dict[str, dict[str, tuple[str, ...]]] = {}
        self.calls = 0
        self.pause = 0.0
        self.error: grpc.StatusCode | None = None
        self._server = contextlib.ExitStack()

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._server.enter_context(real_kubelet.pod_resources(str(self.socket), self._list))

    def stop(self) -> None:
        self._server.close()

    def _list(self, request: t.Any, context: grpc.ServicerContext) -> bytes:
        self.calls += 1
        time.sleep(self.pause)
        if self.error is not None:
            context.abort(self.error, "out of order")
        return real_kubelet.list_response(
            {
                key: {name: {contract.RESOURCE_MEMORY: list(ids)} for name, ids in containers.items()}
                for key, containers in self.rows.items()
            }
        )


@pytest.fixture
def lister(tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[Lister]:
    one = Lister(tmp_path_factory.mktemp("k") / "kubelet.sock")
    one.start()
    yield one
    one.stop()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pods that were read, one after the other."""
    found: list[str] = []
    real = pod_resources.entry

    def noted(pod: t.Any) -> Entry:
        found.append(pod.name)
        return real(pod)

    monkeypatch.setattr(pod_resources, "entry", noted)
    return found


def test_a_pod_is_parsed_once_per_distinct_content(lister: Lister, read: list[str]) -> None:
    client = KubeletPodResources(str(lister.socket))
    lister.rows = {"a/x": {"c": ("00000000-1", "00000000-2")}, "a/y": {"c": ()}}
    for _turn in range(3):
        assert [(one.key, one.containers) for one in client.list()] == list(lister.rows.items())
    assert read == ["x", "y"]
    lister.rows["a/y"] = {"c": ("00000001-7",)}
    assert client.list()[1].ids == ("00000001-7",)
    assert read == ["x", "y", "y"]
    # A removed pod is dropped; a successor of its name is read.
    del lister.rows["a/y"]
    assert [one.key for one in client.list()] == ["a/x"]
    lister.rows["a/y"] = {"c": ("00000001-7",)}
    client.list()
    assert read == ["x", "y", "y", "y"]


def test_two_equal_pods_of_one_name_stay_two(lister: Lister) -> None:
    """kubelet names no UID: only the count shows the readers that the name is ambiguous."""
    pod = MESSAGES["v1.PodResources"](name="x", namespace="a").SerializeToString()
    row = b"\x0a" + bytes([len(pod)]) + pod
    client = KubeletPodResources(str(lister.socket))
    client._connection.call = lambda request, timeout: row + row  # type: ignore[method-assign]
    assert [one.key for one in client.list()] == ["a/x", "a/x"]


def test_one_connection_for_many_calls(lister: Lister) -> None:
    client = KubeletPodResources(str(lister.socket))
    inodes = []
    for _turn in range(5):
        client.list()
        inodes.append(accepted(lister.socket))
    assert lister.calls == 5
    assert inodes[0] and inodes == inodes[:1] * 5


def accepted(socket: Path) -> list[str]:
    """The connections to a unix socket that are open, by inode."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(str(socket))]
    # The one that is listened on has a flag for it.
    return sorted(row[6] for row in rows if row[3] != "00010000")


@pytest.mark.parametrize("away", [0.0, 1.5])
def test_a_restarted_kubelet_responds_at_once(lister: Lister, away: float) -> None:
    """A pod's admission doesn't wait for gRPC's back-off after a failed connection."""
    client = KubeletPodResources(str(lister.socket))
    client.list()
    lister.stop()
    for _turn in range(3 if away else 0):
        with pytest.raises(Unreadable, match="UNAVAILABLE"):
            client.list()
    time.sleep(away)
    lister.rows = {"a/x": {"c": ("00000000-1",)}}
    lister.start()
    began = time.monotonic()
    assert [one.key for one in client.list()] == ["a/x"]
    assert time.monotonic() - began < 1


def test_a_timeout_is_reported_in_time(lister: Lister) -> None:
    client = KubeletPodResources(str(lister.socket), timeout=0.3)
    lister.pause = 1.0
    began = time.monotonic()
    with pytest.raises(Unreadable, match="DEADLINE_EXCEEDED"):
        client.list()
    assert time.monotonic() - began < 0.9
    lister.pause = 0
    assert client.list() == []


def test_an_error_response_is_not_requested_twice(lister: Lister) -> None:
    client = KubeletPodResources(str(lister.socket))
    lister.error = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(Unreadable, match="PERMISSION_DENIED: out of order"):
        client.list()
    assert lister.calls == 1


def test_a_failed_call_leaves_other_calls_running(lister: Lister) -> None:
    """Two threads on one connection: the one's time is up, and the other still has its answer."""
    connection = wire.Connection(str(lister.socket), wire.POD_RESOURCES)
    request = b""
    connection.call(request, 2)
    lister.rows, lister.pause = {"a/x": {}}, 0.6
    answers: list[t.Any] = []
    slow = threading.Thread(target=lambda: answers.append(connection.call(request, 5)))
    slow.start()
    time.sleep(0.2)
    with pytest.raises(grpc.RpcError):
        connection.call(request, 0.1)
    slow.join(5)
    assert [len(split_pods(answer)) for answer in answers] == [1]


def test_ids_are_grouped_by_their_card() -> None:
    found = pod_resources.grouped(["0a-1", "0b-0", "0a-12", "nothing", "-3", "0a-x", "GPU-1_-_-4"])
    assert found == {
        "0a": ["0a-1", "0a-12"],
        "0b": ["0b-0"],
        "": ["nothing", "-3", "0a-x"],
        "GPU-1_-_": ["GPU-1_-_-4"],
    }
    entry = Entry("a/x", {"c": ("0a-1", "0b-0"), "d": ("0a-2",), "e": ()})
    assert entry.counts == {"c": {"0a": 1, "0b": 1}, "d": {"0a": 1}, "e": {}}
    assert entry.total == {"0a": 2, "0b": 1}
