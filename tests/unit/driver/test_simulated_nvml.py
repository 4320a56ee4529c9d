# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated NVML, queried by the real nvidia-ml-py as the device plugin does."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_driver import CARDS, FIRST, SECOND, Driver


def test_a_card_is_found_by_uuid_and_by_bus_address_in_any_form(driver: Driver) -> None:
    answer = driver.query(
        f"""
        by_uuid = n.nvmlDeviceGetHandleByUUID("{SECOND}")
        pci = n.nvmlDeviceGetPciInfo(by_uuid)
        report([
            n.nvmlDeviceGetIndex(by_uuid),
            [n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByPciBusId(form))
             for form in (pci.busId, pci.busIdLegacy, "0000:c1:00.0", "00000000:C1:00.0")],
            [pci.busId, pci.busIdLegacy, pci.bus, hex(pci.pciDeviceId)],
            code(n.nvmlDeviceGetHandleByUUID, "GPU-none"),
            code(n.nvmlDeviceGetHandleByPciBusId, "0000:07:00.0"),
            code(n.nvmlDeviceGetHandleByPciBusId, "nonsense"),
            code(n.nvmlDeviceGetHandleByIndex, 2),
        ])
        """
    )
    assert answer == [1, [SECOND] * 4, ["00000000:C1:00.0", "0000:C1:00.0", 0xC1, "0x1eb810de"], 6, 6, 2, 2]


def test_memory_counts_the_reserve_and_the_processes(driver: Driver) -> None:
    driver.describe("process 0 4711 3000", "process 0 4712 1000 graphics", "process 1 4713 999999")
    answer = driver.query(
        """
        answers = []
        for h in (first, second):
            one, two = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
            answers.append([[v >> 20 for v in (one.total, one.free, one.used)],
                            [v >> 20 for v in (two.total, two.reserved, two.free, two.used)]])
        report([answers, code(n.nvmlDeviceGetMemoryInfo, h, 0x1000028)])
        """
    )
    first = [[16384, 12128, 4256], [16384, 256, 12128, 4000]]
    # The processes' sum is capped at the card's memory.
    second = [[8192, 0, 8192], [8192, 256, 0, 7936]]
    assert answer == [[first, second], 13]


def test_a_buffer_that_is_too_small_returns_the_required_size(driver: Driver) -> None:
    driver.describe("process 0 4711 3000", "process 0 4712 5")
    answer = driver.query(
        """
        library = ctypes.CDLL("libnvidia-ml.so.1")
        buffer = (ctypes.c_uint64 * 64)()
        answers = []
        for name, words in (("", 2), ("_v2", 3), ("_v3", 3)):
            function = getattr(library, "nvmlDeviceGetComputeRunningProcesses" + name)
            count = ctypes.c_uint(1)
            short = function(first, ctypes.byref(count), buffer)
            required = count.value
            enough = function(first, ctypes.byref(count), buffer)
            answers.append([short, required, enough, buffer[0], buffer[words], buffer[words + 1] >> 20])
        report(answers)
        """
    )
    assert answer == [[7, 2, 0, 4711, 4712, 5]] * 3


def test_null_and_invalid_handles_are_refused(driver: Driver) -> None:
    answer = driver.query(
        """
        library = ctypes.CDLL("libnvidia-ml.so.1")
        text, number = ctypes.create_string_buffer(96), ctypes.c_uint()
        report([
            library.nvmlDeviceGetUUID(None, text, 96),
            library.nvmlDeviceGetUUID(ctypes.byref(number), text, 96),
            library.nvmlDeviceGetMinorNumber(None, ctypes.byref(number)),
            library.nvmlDeviceGetMinorNumber(first, None),
            library.nvmlDeviceGetName(first, None, 96),
            library.nvmlDeviceGetName(first, text, 4),
            library.nvmlEventSetWait_v2(None, text, 10),
        ])
        """
    )
    assert answer == [2, 2, 2, 2, 2, 7, 2]


def test_nothing_works_before_init_and_after_the_last_shutdown(driver: Driver) -> None:
    answer = driver.python(
        """
        before = code(n.nvmlDeviceGetCount)
        n.nvmlInit(); n.nvmlInit(); n.nvmlShutdown()
        between = n.nvmlDeviceGetCount()
        n.nvmlShutdown()
        report([before, between, code(n.nvmlDeviceGetCount), code(n.nvmlShutdown)])
        """
    )
    assert answer == [1, 2, 1, 1]


def test_mig_is_disabled_or_unsupported(driver: Driver) -> None:
    driver.cards.write_text(CARDS.replace("_8GiB", "_8GiB mig=disabled"))
    answer = driver.query(
        """
        report([
            code(n.nvmlDeviceGetMigMode, first), n.nvmlDeviceGetMigMode(second),
            n.nvmlDeviceIsMigDeviceHandle(first).value, n.nvmlDeviceGetMaxMigDeviceCount(first),
            code(n.nvmlDeviceGetMigDeviceHandleByIndex, first, 0), code(n.nvmlDeviceGetAttributes, first),
            n.nvmlDeviceGetCudaComputeCapability(first), code(n.nvmlDeviceGetNvLinkState, first, 0),
        ])
        """
    )
    assert answer == [3, [0, 0], 0, 0, 3, 3, [7, 5], 3]


def test_every_code_has_its_message(driver: Driver) -> None:
    answer = driver.python(
        """
        library = ctypes.CDLL("libnvidia-ml.so.1")
        library.nvmlErrorString.restype = ctypes.c_char_p
        report([library.nvmlErrorString(value).decode() for value in (*range(30), 999, -1)])
        """
    )
    assert len(set(answer[:30])) == 30
    assert all(answer)
    messages = ["Success", "Driver Not Loaded", "GPU is lost", "Driver/library version mismatch"]
    assert [answer[code] for code in (0, 9, 15, 18)] == messages
    assert answer[30:] == ["Unknown Error", "Unknown Error"]


def test_driver_that_fails_or_has_no_cards_recovers(driver: Driver) -> None:
    script = f"first = code(n.nvmlInit); rewrite({CARDS!r}); report([first, code(n.nvmlInit), n.nvmlDeviceGetCount()])"
    for value in (9, 18, 999):
        driver.describe(f"fault init:{value}")
        assert driver.python(script) == [value, 0, 2]
    driver.cards.unlink()
    assert driver.python(script) == [9, 0, 2]
    driver.describe("fault count0")
    answer = driver.python("n.nvmlInit(); report([n.nvmlDeviceGetCount(), code(n.nvmlDeviceGetHandleByIndex, 0)])")
    assert answer == [0, 2]


def test_failed_card_leaves_the_other_usable(driver: Driver) -> None:
    answer = driver.query(
        f"""
        append("fault card:1:15")
        lost = [code(n.nvmlDeviceGetMemoryInfo, h) for h in (first, second)]
        reopened = [code(n.nvmlDeviceGetHandleByIndex, i) for i in (0, 1)]
        rewrite({CARDS!r})
        report([lost, reopened, [code(n.nvmlDeviceGetMemoryInfo, h) for h in (first, second)]])
        """
    )
    assert answer == [[0, 15], [0, 15], [0, 0]]


def test_a_caller_has_only_the_cards_of_its_device_nodes(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia3").touch()
    answer = driver.python(
        f"""
        os.environ["KUBEGPU_SIM_DEV"] = "{tmp_path}/dev"
        without = code(n.nvmlInit)
        open("{tmp_path}/dev/nvidiactl", "w").close()
        n.nvmlInit()
        first = n.nvmlDeviceGetHandleByIndex(0)
        own = [n.nvmlDeviceGetCount(), n.nvmlDeviceGetUUID(first), n.nvmlDeviceGetIndex(first)]
        other = code(n.nvmlDeviceGetHandleByUUID, "{FIRST}")
        open("{tmp_path}/dev/nvidia1", "w").close()
        report([without, own, other, n.nvmlDeviceGetCount(), n.nvmlDeviceGetIndex(first)])
        """
    )
    assert answer == [9, [1, SECOND, 0], 6, 2, 1]


def test_slow_driver_delays_every_call_by_itself(driver: Driver) -> None:
    answer = driver.python(
        """
        import threading
        n.nvmlInit()
        append("fault slow:0.5")
        threads = [threading.Thread(target=n.nvmlDeviceGetCount) for _ in range(8)]
        began = time.monotonic()
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        report(time.monotonic() - began)
        """
    )
    assert 0.5 <= answer < 2


def test_a_changed_file_is_read_again_and_handles_stay_with_their_cards(driver: Driver) -> None:
    answer = driver.query(
        f"""
        keep = [line for line in {CARDS!r}.splitlines() if "{FIRST}" not in line]
        rewrite("\\n".join(keep).replace("memory=8192", "memory=4096") + "\\nprocess 1 77 100\\n")
        alone = [n.nvmlDeviceGetCount(), n.nvmlDeviceGetUUID(second), n.nvmlDeviceGetIndex(second),
                 n.nvmlDeviceGetMemoryInfo(second).total >> 20]
        rewrite({CARDS!r}.replace("{SECOND}", "GPU-other"))
        report([alone, code(n.nvmlDeviceGetMemoryInfo, second)])
        """
    )
    # The handle of a removed card reports that the card has fallen off the bus.
    assert answer == [[1, SECOND, 0, 4096], 15]


@pytest.mark.parametrize(
    "line",
    [
        "card 5 uuid=GPU-x minor=9 memory=1",
        f"card 5 uuid={FIRST} minor=9 memory=1024 bus=0000:09:00.0 name=Twin",
        "card 5 uuid=GPU-x minor=3 memory=1024 bus=0000:09:00.0 name=Same_minor",
        "card 5 uuid=GPU-x minor=9 memory=much bus=0000:09:00.0 name=X",
        "fault explode",
        "fault card:0:many",
        "process 0 1",
        "xid 0",
        "gpu 0",
    ],
)
def test_an_invalid_file_is_reported_with_its_line_and_the_last_valid_state_stays(driver: Driver, line: str) -> None:
    driver.describe(line)
    assert driver.python("report(code(n.nvmlInit))") == 999
    done = driver.smi("-L")
    assert done.returncode == 255
    assert f"{driver.cards}:{len(CARDS.splitlines()) + 1}: " in done.stderr
    # An incomplete file changes nothing, too.
    for change in (f"append({line!r})", "rewrite('')"):
        driver.describe()
        assert driver.python(f"n.nvmlInit(); {change}; report(n.nvmlDeviceGetCount())") == 2


def test_waiting_for_events_takes_the_given_time(driver: Driver) -> None:
    answer = driver.query(
        """
        events, answers = watch(first, second), []
        for ms in (0, 250, 600):
            began = time.monotonic()
            value = wait(events, ms)
            answers.append([value, time.monotonic() - began])
        report(answers)
        """
    )
    assert [value for value, _seconds in answer] == [10, 10, 10]
    assert answer[0][1] < 0.2
    assert 0.25 <= answer[1][1] < 0.55
    assert 0.6 <= answer[2][1] < 1.2


def test_an_xid_reaches_each_event_set_once(driver: Driver) -> None:
    driver.describe("xid 0 31")
    answer = driver.query(
        """
        both, one = watch(first, second), watch(first)
        before = wait(both, 0)
        append("xid 1 79")
        append("xid 0 31")
        report([before, wait(both, 1000), wait(both, 1000), wait(both, 0), wait(one, 1000), wait(one, 0)])
        """
    )
    # An error from before the registration isn't an event; the same code again is one.
    assert answer == [10, [SECOND, 8, 79], [FIRST, 8, 31], 10, [FIRST, 8, 31], 10]


def test_an_xid_that_was_removed_can_occur_again(driver: Driver) -> None:
    answer = driver.query(
        f"""
        events = watch(first)
        append("xid 0 79")
        once = wait(events, 1000)
        rewrite({CARDS!r})
        none = wait(events, 150)
        append("xid 0 79")
        report([once, none, wait(events, 1000)])
        """
    )
    assert answer == [[FIRST, 8, 79], 10, [FIRST, 8, 79]]


def test_an_xid_ends_a_wait_immediately_and_delays_no_other_call(driver: Driver) -> None:
    answer = driver.query(
        """
        import threading
        events = watch(first, second)
        began = time.monotonic()
        threading.Timer(0.3, append, ["xid 1 48"]).start()
        threading.Timer(0.1, n.nvmlDeviceGetCount).start()
        report([wait(events, 20000), time.monotonic() - began])
        """
    )
    assert answer[0] == [SECOND, 8, 48]
    assert 0.3 <= answer[1] < 3


def test_the_old_wait_fills_24_bytes(driver: Driver) -> None:
    answer = driver.query(
        """
        events = watch(second)
        append("xid 1 79")
        data = (ctypes.c_uint64 * 4)(*[0x5A] * 4)
        library = ctypes.CDLL("libnvidia-ml.so.1")
        value = library.nvmlEventSetWait(events, data, 1000)
        after = (ctypes.c_uint64 * 4)(*[0x5A] * 4)
        late = library.nvmlEventSetWait(events, after, 0)
        same = ctypes.cast(data[0], ctypes.c_void_p).value == ctypes.cast(second, ctypes.c_void_p).value
        report([value, same, list(data[1:]), late, list(after)])
        """
    )
    assert answer == [0, True, [8, 79, 0x5A], 10, [0, 0, 0, 0x5A]]


def test_waiting_for_a_lost_card_fails_without_spinning(driver: Driver) -> None:
    answer = driver.query(
        """
        events, other = watch(first), watch(second)
        append("fault card:0:15")
        began = time.monotonic()
        value = wait(events, 5000)
        report([value, time.monotonic() - began, wait(other, 0), code(n.nvmlEventSetFree, events), wait(events, 0)])
        """
    )
    assert answer[0] == 15
    assert 0.1 <= answer[1] < 2
    assert answer[2:] == [10, 0, 2]


def test_many_threads_agree_while_the_file_changes(driver: Driver) -> None:
    answer = driver.python(
        f"""
        import threading
        n.nvmlInit()
        wrong, stop = [], threading.Event()
        def query():
            while not stop.is_set():
                h = n.nvmlDeviceGetHandleByUUID("{FIRST}")
                memory = n.nvmlDeviceGetMemoryInfo(h)
                if memory.total - memory.free != memory.used or n.nvmlDeviceGetMinorNumber(h) != 1:
                    wrong.append(1)
        threads = [threading.Thread(target=query) for _ in range(6)]
        [thread.start() for thread in threads]
        for i in range(60):
            rewrite({CARDS!r} + f"process 0 {{i + 1}} {{i}}\\n" * (i % 4))
            time.sleep(0.01)
        stop.set()
        [thread.join() for thread in threads]
        report(len(wrong))
        """
    )
    assert answer == 0
