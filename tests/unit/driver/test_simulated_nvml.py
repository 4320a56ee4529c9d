# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated NVML, queried by the real nvidia-ml-py as the device plugin does."""

from __future__ import annotations

from pathlib import Path

from simulated_driver import CARDS, FIRST, SECOND, Driver


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
