# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards between two looks, NVML's door over a library of our own, corrections as a table, and the command line."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import types
import typing as t
from pathlib import Path

import gpushare
import pytest
from gpushare import contract, device_plugin, nvml, reconcile
from gpushare.admission import slim_pod
from gpushare.podresources import Entry
from plugin_fakes import FakeNvml, container, make_pod, seen, until

# --------------------------------------------------------------------------- cards


def test_merge_keeps_lost_cards_and_their_index() -> None:
    first = nvml.merge([], [seen(0), seen(1), seen(2)], "GiB")
    assert [(one.index, one.units, one.healthy) for one in first] == [(0, 16, True), (1, 16, True), (2, 16, True)]
    # NVML counts anew after a card has fallen off the bus.
    shifted = [dataclasses.replace(seen(2), index=1), seen(0)]
    second = nvml.merge(first, shifted, "GiB")
    assert [(one.uuid, one.index, one.healthy) for one in second] == [
        (seen(0).uuid, 0, True),
        (seen(1).uuid, 1, False),
        (seen(2).uuid, 2, True),
    ]
    third = nvml.merge(second, [*shifted, dataclasses.replace(seen(3, 40), index=2)], "GiB")
    assert [(one.index, one.units) for one in third] == [(0, 16), (1, 16), (2, 16), (3, 40)]
    assert nvml.merge(third, [seen(n, 40 if n == 3 else 16) for n in range(4)], "GiB")[1].healthy


def test_merge_follows_a_changed_memory() -> None:
    before = nvml.merge([], [seen(0, 16)], "GiB")
    assert nvml.merge(before, [seen(0, 15)], "GiB")[0].units == 15


def test_inventory_says_why_and_announces_nothing_it_cannot() -> None:
    door = FakeNvml()
    door.trouble = "no driver"
    inventory = nvml.Inventory(door, "GiB")
    assert inventory.reason == "the cards haven't been looked at yet"
    assert not inventory.look() and inventory.reason == "no driver" and inventory.cards == ()
    door.trouble, door.found = "", [seen(0), dataclasses.replace(seen(1), uuid=seen(0).uuid + "-")]
    inventory.look()
    assert inventory.reason is not None and "same UUID" in inventory.reason and inventory.cards == ()


def test_inventory_of_cards_below_one_unit() -> None:
    inventory = nvml.Inventory(FakeNvml(dataclasses.replace(seen(0), memory_mib=1000)), "GiB")
    assert not inventory.look()
    assert inventory.reason == "no card of this node holds one whole unit of 1 GiB"


def test_inventory_changes_wake_who_waits() -> None:
    door = FakeNvml(seen(0))
    inventory = nvml.Inventory(door, "GiB")
    assert inventory.look() and not inventory.look()
    door.found = []
    assert inventory.look()
    assert [one.healthy for one in inventory.cards] == [False]
    door.found = [seen(0)]
    assert inventory.look() and inventory.reason is None


# --------------------------------------------------------------------------- NVML


class Library(types.ModuleType):
    """What nvidia-ml-py offers, as far as we use it."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_Uninitialized(NVMLError):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.inits = self.shutdowns = 0
        self.init_error: Exception | None = None
        self.errors: dict[int, Exception] = {}
        self.count_errors: list[Exception] = []

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.init_error
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        if self.count_errors:
            raise self.count_errors.pop()
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.errors:
            raise self.errors[index]
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        return handle + 3

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> t.Any:
        return types.SimpleNamespace(total=(16 << 30) + 12345)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "Card"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    one = Library()
    monkeypatch.setitem(sys.modules, "pynvml", one)
    return one


def test_nvml_cards(library: Library) -> None:
    door = nvml.NvidiaMl()
    assert door.cards() == [nvml.Seen(0, "GPU-0", 3, 16384, "Card"), nvml.Seen(1, "GPU-1", 4, 16384, "Card")]
    door.cards()
    assert (library.inits, library.shutdowns) == (1, 0)


def test_nvml_without_library_or_driver(library: Library) -> None:
    door = nvml.NvidiaMl()
    library.init_error = library.NVMLError_LibraryNotFound()
    with pytest.raises(nvml.NoCards, match=r"libnvidia-ml\.so\.1 can't be loaded"):
        door.cards()
    library.init_error = library.NVMLError("Driver Not Loaded")
    with pytest.raises(nvml.NoCards, match="doesn't answer: Driver Not Loaded"):
        door.cards()
    library.init_error = None
    assert len(door.cards()) == 2


def test_nvml_one_lost_card_leaves_the_other(library: Library) -> None:
    door = nvml.NvidiaMl()
    library.errors[0] = library.NVMLError("GPU is lost")
    assert [one.index for one in door.cards()] == [1]


def test_nvml_is_initialised_again(library: Library) -> None:
    door = nvml.NvidiaMl()
    door.cards()
    library.count_errors.append(library.NVMLError_Uninitialized())
    assert len(door.cards()) == 2 and (library.inits, library.shutdowns) == (2, 1)


def test_nvml_real_library_is_what_we_take_it_for() -> None:
    import pynvml

    for name in (
        "nvmlInit",
        "nvmlShutdown",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetName",
    ):
        assert callable(getattr(pynvml, name))
    assert issubclass(pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError)
    assert issubclass(pynvml.NVMLError_Uninitialized, pynvml.NVMLError)


# --------------------------------------------------------------------------- corrections

CARDS = [contract.Card(n, f"GPU-{n:08x}-aaaa", n, 16384, 16) for n in range(2)]
NOW = 42


def fixes(pod: dict[str, t.Any], *entries: Entry, granted: t.Mapping[str, str] | None = None) -> t.Any:
    pods = {contract.pod_key(pod): pod}
    return reconcile.corrections(CARDS, pods, entries, granted or {}, NOW)


def held(*each: tuple[int, int], first: int = 0) -> Entry:
    """Containers c0, c1, … with so many units of a card."""
    containers = {
        f"c{n}": tuple(f"{card:08x}-{first + n * 100 + slot}" for slot in range(units))
        for n, (card, units) in enumerate(each)
    }
    return Entry("default/pod", containers)


def test_corrected() -> None:
    (one,) = fixes(make_pod("pod", 4, booked=0, started=True), held((1, 4)))
    assert one.annotations == {contract.POD_INDEX: "1", contract.POD_ASSIGNED: "true"}
    assert (one.notice.reason, one.notice.warning) == ("GpuCardCorrected", False)
    assert one.notice.message == "kubelet gave this pod units of card 1 (GPU-00000001-aaaa), not of card 0"


def test_confirmed() -> None:
    (one,) = fixes(make_pod("pod", 4, booked=1, started=True), held((1, 4)))
    assert one.annotations == {contract.POD_ASSIGNED: "true"} and one.notice is None


def test_assigned_without_extender() -> None:
    (one,) = fixes(make_pod("pod", 4, 2, started=True), held((1, 4), (1, 2)))
    assert one.annotations == contract.booking_annotations(CARDS[1], 6, NOW, True)
    assert one.notice.reason == "GpuCardAssigned"


def test_two_cards_are_told_and_not_written() -> None:
    (one,) = fixes(make_pod("pod", 4, 2, booked=0, started=True), held((1, 4), (0, 2)))
    assert one.annotations == {} and one.notice.reason == "GpuCardAmbiguous" and one.notice.warning


@pytest.mark.parametrize(
    ("pod", "entries"),
    [
        pytest.param(make_pod("pod", 4, booked=1, assigned=True, started=True), [held((1, 4))], id="agrees"),
        pytest.param(make_pod("pod", 4, booked=0), [held((1, 4))], id="kubelet hasn't spoken of this UID"),
        pytest.param(make_pod("pod", 5, booked=0, started=True), [held((1, 4))], id="another size"),
        pytest.param(make_pod("pod", 4, 4, booked=0, started=True), [held((1, 4))], id="not complete"),
        pytest.param(make_pod("pod", 4, booked=0, started=True), [held((1, 0))], id="nothing given"),
        pytest.param(make_pod("pod", 4, booked=0, started=True), [], id="not listed"),
        pytest.param(make_pod("other", 4, booked=0, started=True), [held((1, 4))], id="not in the API"),
        pytest.param(make_pod("pod", 0, started=True), [held((1, 0))], id="wants nothing"),
        pytest.param(make_pod("pod", 4, booked=0, started=True), [held((1, 4)), held((0, 4))], id="listed twice"),
        pytest.param(
            make_pod("pod", 2, booked=0, started=True),
            [Entry("default/pod", {"c0": ("GPU-x-_-0", "GPU-x-_-1")})],
            id="IDs of another plugin",
        ),
        pytest.param(make_pod("pod", 2, booked=0, started=True), [held((7, 2))], id="a card that isn't here"),
    ],
)
def test_nothing_to_correct(pod: dict[str, t.Any], entries: list[Entry]) -> None:
    assert fixes(pod, *entries) == []


def test_finished_pods_are_left() -> None:
    pod = make_pod("pod", 4, booked=0, started=True)
    pod["status"]["phase"] = "Failed"
    assert fixes(pod, held((1, 4))) == []


def test_granted_stands_for_kubelets_word() -> None:
    pod = make_pod("pod", 4, booked=0)
    (one,) = fixes(pod, held((1, 4)), granted={contract.pod_uid(pod): CARDS[1].uuid})
    assert one.annotations[contract.POD_INDEX] == "1"


def test_hidden_units_are_known_only_from_our_answer() -> None:
    pod = make_pod("pod", 0, inits=[container("i", 4)], booked=0, started=True)
    entry = Entry("default/pod", {"c0": ()})
    assert fixes(pod, entry) == []
    (one,) = fixes(pod, entry, granted={contract.pod_uid(pod): CARDS[1].uuid})
    assert one.annotations[contract.POD_INDEX] == "1"


def test_slim_pod_keeps_what_is_needed() -> None:
    pod = make_pod("pod", 4, 2, inits=[container("i", 4), container("s", 1, "Always")], booked=1, started=True)
    slim = slim_pod({**pod, "metadata": {**pod["metadata"], "managedFields": [{}]}})
    assert contract.pod_units(slim) == contract.pod_units(pod) == 7
    assert contract.booking(slim) == contract.booking(pod)
    assert contract.counts(slim) and contract.pod_uid(slim) == contract.pod_uid(pod)
    assert "managedFields" not in slim["metadata"] and "kept" not in slim["metadata"]["annotations"]


def test_slim_pod_of_nothing() -> None:
    assert contract.pod_units(slim_pod({})) == 0


# --------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory-unit", "GB"], "--memory-unit: 'GB' is none of GiB, MiB"),
        (["--port", "70000"], "--port: 70000 is no port"),
        (["--resync", "0"], "--resync: 0 isn't between 1 and 3600 seconds"),
        (["--look", "0"], "--look: 0 isn't between 0.1 and 3600 seconds"),
        (["--log-format", "xml"], "--log-format: 'xml' is none of text, json"),
        (["--node-name", ""], "NODE_NAME must name this node"),
    ],
)
def test_bad_options(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        device_plugin.parse(["--node-name", "gpu1", *arguments])
    assert sentence in capsys.readouterr().err


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu7")
    monkeypatch.setenv("GPUSHARE_MEMORY_UNIT", "MiB")
    options = device_plugin.parse([])
    assert (options.node_name, options.memory_unit, options.kubelet_dir) == ("gpu7", "MiB", "/var/lib/kubelet")


def test_command_runs_without_driver_kubelet_or_api_and_ends_on_sigterm(tmp_path: Path) -> None:
    """The real process with nothing around it: it waits, says what for, and ends cleanly."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        "clusters: [{name: x, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: x, user: {}}]\ncontexts: [{name: x, context: {cluster: x, user: x}}]\n"
    )
    log = tmp_path / "log"
    source = str(Path(gpushare.__file__).parents[1])
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpushare.device_plugin", "--node-name", "gpu1", "--log-format", "json"),
                *("--address", "127.0.0.1", "--port", "0"),
                *("--kubelet-dir", str(tmp_path), "--kubeconfig", str(kubeconfig)),
            ],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": source},
            stderr=stream,
        )
        try:
            until(lambda: '"message":"started"' in log.read_text() and "can't be reached" in log.read_text(), 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()
