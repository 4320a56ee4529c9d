# SPDX-License-Identifier: GPL-3.0-or-later
"""Corrections as a table, what is kept of objects, and the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import typing as t
from pathlib import Path

import gpushare
import pytest
from gpushare.kubelet.pod_resources import Entry
from gpushare.plugin import command, reconcile
from gpushare.plugin.admission import trim_pod
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import container, make_pod, until
from service_account import service_account

# --------------------------------------------------------------------------- corrections

CARDS = [contract.Card(n, f"GPU-{n:08x}-aaaa", n, 16384, 16) for n in range(2)]
NOW = 42


def fixes(pod: dict[str, t.Any], *entries: Entry, granted: t.Mapping[str, tuple[str, ...]] | None = None) -> t.Any:
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
    assert one.annotations == {
        contract.POD_INDEX: "1",
        contract.POD_CARD_UNITS: "16",
        contract.POD_UNITS: "6",
        contract.POD_ASSIGNED: "true",
        contract.POD_ASSUME_TIME: str(NOW),
    }
    assert one.notice.reason == "GpuCardAssigned"


def test_units_of_two_cards_are_reported_and_not_written() -> None:
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


def test_finished_pods_are_not_corrected() -> None:
    pod = make_pod("pod", 4, booked=0, started=True)
    pod["status"]["phase"] = "Failed"
    assert fixes(pod, held((1, 4))) == []


def test_granted_units_replace_kubelets_list() -> None:
    pod = make_pod("pod", 4, booked=0)
    (one,) = fixes(pod, held((1, 4)), granted={contract.pod_uid(pod): (CARDS[1].uuid,)})
    assert one.annotations[contract.POD_INDEX] == "1"


def test_hidden_units_are_known_only_from_our_response() -> None:
    pod = make_pod("pod", 0, inits=[container("i", 4)], booked=0, started=True)
    entry = Entry("default/pod", {"c0": ()})
    assert fixes(pod, entry) == []
    (one,) = fixes(pod, entry, granted={contract.pod_uid(pod): (CARDS[1].uuid,)})
    assert one.annotations[contract.POD_INDEX] == "1"


def test_slim_pod_keeps_what_is_needed() -> None:
    pod = make_pod("pod", 4, 2, inits=[container("i", 4), container("s", 1, "Always")], booked=1, started=True)
    trim = trim_pod({**pod, "metadata": {**pod["metadata"], "managedFields": [{}]}})
    assert contract.pod_units(trim) == contract.pod_units(pod) == 7
    assert contract.booking(trim) == contract.booking(pod)
    assert contract.counts(trim) and contract.pod_uid(trim) == contract.pod_uid(pod)
    assert "managedFields" not in trim["metadata"] and "kept" not in trim["metadata"]["annotations"]


def test_slim_pod_of_nothing() -> None:
    assert contract.pod_units(trim_pod({})) == 0


# --------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory-unit", "GB"], "--memory-unit: 'GB' is none of GiB, MiB"),
        (["--port", "70000"], "--port: 70000 is no port"),
        (["--resync", "0"], "--resync: 0 isn't between 1 and 3600 seconds"),
        (["--look", "0"], "--look: 0 isn't between 0.1 and 60 seconds"),
        (["--log-format", "xml"], "--log-format: 'xml' is none of text, json"),
        (["--node-name", ""], "NODE_NAME must name this node"),
    ],
)
def test_bad_options(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--node-name", "gpu1", *arguments])
    assert sentence in capsys.readouterr().err


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu7")
    monkeypatch.setenv("GPUSHARE_MEMORY_UNIT", "MiB")
    options = command.parse([])
    assert (options.node_name, options.memory_unit, options.kubelet_dir) == ("gpu7", "MiB", "/var/lib/kubelet")


def started(tmp_path: Path, number: int = 0) -> tuple[subprocess.Popen[bytes], Path]:
    """The real process with nothing around it, and its log."""
    log = tmp_path / f"log{number}"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpushare.plugin.command", "--node-name", "gpu1", "--log-format", "json"),
                *("--address", "127.0.0.1", "--port", "0"),
                *("--kubelet-dir", str(tmp_path), *service_account(tmp_path, "http://127.0.0.1:1")),
            ],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(gpushare.__file__).parents[1])},
            stderr=stream,
        )
    return process, log


def test_command_runs_without_driver_kubelet_or_api_and_ends_on_sigterm(tmp_path: Path) -> None:
    """It waits, reports the reason, and ends cleanly."""
    process, log = started(tmp_path)
    try:
        until(lambda: '"message":"started"' in log.read_text() and "can't be reached" in log.read_text(), 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert "Traceback" not in log.read_text()


def test_command_ends_on_an_early_sigterm(tmp_path: Path) -> None:
    """A node that is drained or updated sends one then; kubelet would wait half a minute before it kills."""
    plugins = [started(tmp_path, number) for number in range(4)]
    try:
        for process, log in plugins:
            until(lambda log=log: '"message":"started"' in log.read_text(), 60)
            process.send_signal(signal.SIGTERM)
        assert [process.wait(10) for process, _log in plugins] == [0] * 4
    finally:
        for process, _log in plugins:
            process.kill()
