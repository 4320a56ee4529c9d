# SPDX-License-Identifier: GPL-3.0-or-later
"""The process that asks: it may do whatever it likes, and the module ends in time with what it said."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _nvml_child as child
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_read import Request, Tell

Json = dict[str, t.Any]
ROOT = Path(__file__).resolve().parents[4]


def run(work: t.Callable[[Tell], None], stall: float = 20, seconds: float = 20) -> child.Ended:
    return child.Forked(lambda _request, tell: work(tell)).run(Request(), stall, seconds)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_what_it_says_comes_in_order() -> None:
    def work(tell: Tell) -> None:
        for number in range(500):
            tell({"card": number, "text": "ü" * 500})
        tell({"end": True})

    ended = run(work)
    assert (ended.how, ended.words) == ("end", "")
    assert [one.get("card") for one in ended.messages] == [*range(500), None]


def test_it_knows_what_is_asked() -> None:
    request = Request(frozenset({3}), ((7, "x"),))
    ended = child.Forked(lambda asked, tell: tell({"end": list(asked.skip), "more": asked.processes})).run(
        request, 1, 20
    )
    assert ended.messages == [{"end": [3], "more": [[7, "x"]]}]


def test_one_that_hangs_is_killed_when_the_time_is_over() -> None:
    def work(tell: Tell) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell({"pid": os.getpid()})
        while True:
            time.sleep(60)

    ended = run(work, seconds=1)
    assert (ended.how, ended.words) == ("late", "")
    assert gone(ended.messages[0]["pid"])


def test_one_that_hangs_at_a_card_is_killed_before() -> None:
    def work(tell: Tell) -> None:
        tell({"begin": 0})
        tell({"card": 0})
        tell({"begin": 1})
        time.sleep(600)

    ended = run(work, stall=3, seconds=60)
    assert ended.how == "stalled" and ended.messages[-1] == {"begin": 1}


def test_without_a_card_only_the_whole_time_counts() -> None:
    def work(tell: Tell) -> None:
        time.sleep(1)
        tell({"end": True})

    assert run(work, stall=0.1).how == "end"


def test_one_that_crashes_says_by_what() -> None:
    ended = run(lambda _tell: ctypes.string_at(0) and None)
    assert (ended.how, ended.words) == ("died", "it was ended by SIGSEGV")


def test_one_that_just_ends() -> None:
    assert run(lambda _tell: os._exit(3)).words == "it exited with 3"
    assert run(lambda _tell: None).how == "died"


def test_one_that_fails_says_with_what() -> None:
    def work(tell: Tell) -> None:
        tell({"begin": 0})
        raise KeyError("card")

    ended = run(work)
    assert (ended.how, ended.words, list(ended.messages)) == ("died", "it failed with KeyError: 'card'", [{"begin": 0}])


def test_a_line_cut_short_is_nothing() -> None:
    def work(tell: Tell) -> None:
        tell({"begin": 0})
        # What a process that is killed while it writes leaves behind.
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                os.write(int(name), b'{"card": {"ind')
                os._exit(0)

    ended = run(work)
    assert (ended.how, list(ended.messages)) == ("died", [{"begin": 0}])


def test_more_than_any_answer_is_refused() -> None:
    def work(tell: Tell) -> None:
        while True:
            tell({"card": "x" * (1 << 20)})

    assert run(work, seconds=60).how == "died"


def test_it_takes_no_more_memory_than_is_sensible() -> None:
    def work(tell: Tell) -> None:
        try:
            kept = (ctypes.c_char * (16 << 30))()
        except MemoryError:
            tell({"end": "refused"})
        else:
            tell({"end": len(kept)})

    assert run(work).messages == [{"end": "refused"}]


def test_it_has_nothing_of_ours_open(tmp_path: Path) -> None:
    with (tmp_path / "ours").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)

        def work(tell: Tell) -> None:
            # The one that lists them is closed when it is looked at.
            links = [f"/proc/self/fd/{name}" for name in sorted(os.listdir("/proc/self/fd"), key=int)]
            names = [os.readlink(link) for link in links if os.path.islink(link)]
            tell({"end": names, "session": os.getsid(0) == os.getpid()})

        ended = run(work)
    names = ended.messages[0]["end"]
    assert names[:3] == ["/dev/null"] * 3 and len(names) == 4
    assert names[3].startswith("pipe:") and ended.messages[0]["session"]


def test_where_no_process_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def refuse() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    ended = run(lambda _tell: None)
    assert (ended.how, ended.words) == ("died", "it can't be started: Resource temporarily unavailable")
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_cant_be_ended_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in an uninterruptible sleep can't be made here: SIGKILL does nothing to this one instead."""
    killed: list[int] = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, _signal: killed.append(pid))
    try:
        ended = run(lambda _tell: time.sleep(60), seconds=0.2)
    finally:
        monkeypatch.undo()
        for pid in killed:
            kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert (
        ended.how == "late"
        and ended.words == f"process {killed[0]}, which asked, hangs in the kernel and can't be ended"
    )


def test_who_reads_our_output_doesnt_wait_for_it() -> None:
    """As sshd does: the module's output ends with the module, though the process that asks is still there."""
    script = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
_AnsibleCollectionFinder(paths=[sys.argv[1]])._install()
from ansible_collections.kubegpu.share.plugins.module_utils import _nvml_child as child
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_read import Request
kill, left = os.kill, []
os.kill = lambda pid, _signal: left.append(pid)
child.Forked(lambda _request, tell: time.sleep(120)).run(Request(), 1, 0.2)
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


def test_it_ends_by_itself_where_nobody_is_left_to_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE", 1)
    seconds: list[int] = []

    def work(tell: Tell) -> None:
        # What is left of the alarm that was set for it.
        seconds.append(signal.alarm(0))
        tell({"end": seconds[0], "default": signal.getsignal(signal.SIGALRM) == signal.SIG_DFL})

    told = run(work, seconds=20).messages[0]
    assert 1 <= told["end"] <= 21 and told["default"]


def test_nothing_stays_open_here() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for seconds in (20, 0.0):
        run(lambda tell: tell({"end": True}), seconds=seconds)
    assert len(os.listdir("/proc/self/fd")) == before
