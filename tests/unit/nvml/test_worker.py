# SPDX-License-Identifier: GPL-3.0-or-later
"""The child process: the module ends in time and returns its messages, even if the child hangs or crashes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import worker as child
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.facts import Request, Send

ROOT = Path(__file__).resolve().parents[3]


def run(work: t.Callable[[Send], None], stall: float = 20, seconds: float = 20) -> child.WorkerResult:
    return child.ForkedWorker(lambda _request, send: work(send)).run(Request(), stall, seconds)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_messages_arrive_in_order() -> None:
    def work(send: Send) -> None:
        for number in range(500):
            send({"card": number, "text": "ü" * 500})
        send({"end": True})

    ended = run(work)
    assert (ended.ending, ended.detail) == ("end", "")
    assert [message.get("card") for message in ended.messages] == [*range(500), None]


def test_the_child_receives_the_request() -> None:
    request = Request(frozenset({3}), ((7, "x"),))
    ended = child.ForkedWorker(lambda given, send: send({"end": list(given.skip), "more": given.processes})).run(
        request, 1, 20
    )
    assert ended.messages == [{"end": [3], "more": [[7, "x"]]}]


def test_a_hanging_child_is_killed_at_the_time_limit() -> None:
    def work(send: Send) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        send({"pid": os.getpid()})
        while True:
            time.sleep(60)

    ended = run(work, seconds=1)
    assert (ended.ending, ended.detail) == ("late", "")
    assert gone(ended.messages[0]["pid"])


def test_a_child_hanging_at_a_card_is_killed_before_the_time_limit() -> None:
    def work(send: Send) -> None:
        send({"begin": 0})
        send({"card": 0})
        send({"begin": 1})
        time.sleep(600)

    ended = run(work, stall=3, seconds=60)
    assert ended.ending == "stalled" and ended.messages[-1] == {"begin": 1}


def test_without_a_card_only_the_time_limit_counts() -> None:
    def work(send: Send) -> None:
        time.sleep(1)
        send({"end": True})

    assert run(work, stall=0.1).ending == "end"


def fail(send: Send) -> None:
    send({"begin": 0})
    raise KeyError("card")


@pytest.mark.parametrize(
    ("work", "messages", "detail"),
    [
        (lambda _send: ctypes.string_at(0) and None, [], "it was killed by SIGSEGV"),
        (lambda _send: os._exit(3), [], "it exited with 3"),
        (lambda _send: None, [], "it exited with 0"),
        (fail, [{"begin": 0}], "it failed with KeyError: 'card'"),
    ],
)
def test_an_early_end_is_reported(work: t.Callable[[Send], None], messages: list[JsonObject], detail: str) -> None:
    ended = run(work)
    assert (ended.ending, ended.detail, list(ended.messages)) == ("crashed", detail, messages)


def test_a_truncated_message_is_ignored() -> None:
    def work(send: Send) -> None:
        send({"begin": 0})
        # A process that is killed while it writes leaves this behind.
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                os.write(int(name), b'{"card": {"ind')
                os._exit(0)

    ended = run(work)
    assert (ended.ending, list(ended.messages)) == ("crashed", [{"begin": 0}])


def test_implausibly_many_messages_are_refused() -> None:
    def work(send: Send) -> None:
        while True:
            send({"card": "x" * (1 << 20)})

    assert run(work, seconds=60).ending == "crashed"


def test_the_childs_memory_is_limited() -> None:
    def work(send: Send) -> None:
        try:
            kept = (ctypes.c_char * (16 << 30))()
        except MemoryError:
            send({"end": "refused"})
        else:
            send({"end": len(kept)})

    assert run(work).messages == [{"end": "refused"}]


def test_the_child_keeps_no_file_of_the_module_open(tmp_path: Path) -> None:
    with (tmp_path / "ours").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)

        def work(send: Send) -> None:
            # The directory's own handle is closed by then.
            links = [f"/proc/self/fd/{name}" for name in sorted(os.listdir("/proc/self/fd"), key=int)]
            names = [os.readlink(link) for link in links if os.path.islink(link)]
            send({"end": names, "session": os.getsid(0) == os.getpid()})

        ended = run(work)
    names = ended.messages[0]["end"]
    assert names[:3] == ["/dev/null"] * 3 and len(names) == 4
    assert names[3].startswith("pipe:") and ended.messages[0]["session"]


def test_a_failed_fork_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", Mock(side_effect=OSError(11, "Resource temporarily unavailable")))
    ended = run(lambda _send: None)
    assert (ended.ending, ended.detail) == ("crashed", "the process can't be started: Resource temporarily unavailable")
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_unkillable_child_is_reported_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An uninterruptible sleep can't be created here: the test disables SIGKILL instead."""
    killed: list[int] = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, _signal: killed.append(pid))
    try:
        ended = run(lambda _send: time.sleep(60), seconds=0.2)
    finally:
        monkeypatch.undo()
        for pid in killed:
            kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert (
        ended.ending == "late"
        and ended.detail == f"process {killed[0]}, which called NVML, hangs in the kernel and can't be killed"
    )


def test_the_modules_output_ends_with_the_module() -> None:
    """sshd waits for the end of the output, which a child that still exists must not delay."""
    script = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
_AnsibleCollectionFinder(paths=[sys.argv[1]])._install()
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import worker as child
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.facts import Request
kill, left = os.kill, []
os.kill = lambda pid, _signal: left.append(pid)
child.ForkedWorker(lambda _request, send: time.sleep(120)).run(Request(), 1, 0.2)
print(left[0], flush=True)
os._exit(0)
"""
    began = time.monotonic()
    finished = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / ".collections")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    pid = int(finished.stdout)
    try:
        assert not gone(pid) and time.monotonic() - began < 60
    finally:
        os.kill(pid, signal.SIGKILL)


def test_the_child_has_an_alarm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE", 1)
    seconds: list[int] = []

    def work(send: Send) -> None:
        # The remaining seconds of its alarm.
        seconds.append(signal.alarm(0))
        send({"end": seconds[0], "default": signal.getsignal(signal.SIGALRM) == signal.SIG_DFL})

    message = run(work, seconds=20).messages[0]
    assert 1 <= message["end"] <= 21 and message["default"]


def test_the_module_closes_its_files() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for seconds in (20, 0.0):
        run(lambda send: send({"end": True}), seconds=seconds)
    assert len(os.listdir("/proc/self/fd")) == before
