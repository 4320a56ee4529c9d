# SPDX-License-Identifier: GPL-3.0-or-later
"""Corrections of annotations, trimmed pods, and the command line."""

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
from gpushare.plugin import command
from gpushare.plugin.admission import trim_pod
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import card, container, fixes, ids, make_pod, until
from service_account import service_account

# --------------------------------------------------------------------------- corrections


def held(*each: tuple[int, int]) -> Entry:
    """Containers c0, c1, … with so many units of a card."""
    given = {f"c{n}": ids(index, *range(n * 100, n * 100 + units)) for n, (index, units) in enumerate(each)}
    return Entry("default/pod", given)


FINISHED = make_pod("pod", 4, booked=0, started=True)
FINISHED["status"]["phase"] = "Failed"


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
        contract.POD_ASSUME_TIME: "42",
    }
    assert one.notice.reason == "GpuCardAssigned"


def test_units_of_two_cards_are_reported_and_not_written() -> None:
    (one,) = fixes(make_pod("pod", 4, 2, booked=0, started=True), held((1, 4), (0, 2)))
    assert one.annotations == {} and one.notice.reason == "GpuCardAmbiguous" and one.notice.warning


@pytest.mark.parametrize(
    ("pod", "entries"),
    [
        pytest.param(make_pod("pod", 4, booked=1, assigned=True, started=True), [held((1, 4))], id="agrees"),
        pytest.param(FINISHED, [held((1, 4))], id="finished"),
        pytest.param(make_pod("pod", 4, booked=0), [held((1, 4))], id="not started by UID"),
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


def test_granted_units_replace_kubelets_list() -> None:
    pod = make_pod("pod", 4, booked=0)
    (one,) = fixes(pod, held((1, 4)), granted={contract.pod_uid(pod): (card(1).uuid,)})
    assert one.annotations[contract.POD_INDEX] == "1"


@pytest.mark.parametrize(("granted", "written"), [((1,), None), ((1, 2), "1,2")])
def test_hidden_units_are_known_only_from_our_response(granted: tuple[int, ...], written: str | None) -> None:
    pod = make_pod("pod", 0, inits=[container("i", 4)], booked=0, started=True)
    entry = Entry("default/pod", {"c0": ()})
    assert fixes(pod, entry) == []
    (one,) = fixes(pod, entry, granted={contract.pod_uid(pod): tuple(card(index).uuid for index in granted)})
    assert (one.annotations[contract.POD_INDEX], one.annotations.get(contract.POD_INDICES)) == ("1", written)


def test_a_trimmed_pod_keeps_what_is_needed() -> None:
    pod = make_pod("pod", 4, 2, inits=[container("i", 4), container("s", 1, "Always")], booked=1, started=True)
    trim = trim_pod({**pod, "metadata": {**pod["metadata"], "managedFields": [{}]}})
    assert contract.pod_units(trim) == contract.pod_units(pod) == 7
    assert contract.booking(trim) == contract.booking(pod)
    assert contract.counts(trim) and contract.pod_uid(trim) == contract.pod_uid(pod)
    assert "managedFields" not in trim["metadata"] and "kept" not in trim["metadata"]["annotations"]
    assert contract.pod_units(trim_pod({})) == 0


# --------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory-unit", "GB"], "--memory-unit: 'GB' is none of GiB, MiB"),
        (["--metrics-port", "70000"], "--metrics-port: 70000 is no port"),
        (["--metrics-address", "0.0.0.0"], "--metrics-tls-cert and --metrics-tls-key are needed"),
        (["--metrics-tls-key", "k"], "--metrics-tls-cert and --metrics-tls-key go together"),
        (["--resync", "0"], "--resync: 0 isn't between 1 and 3600 seconds"),
        (["--query-interval", "0"], "--query-interval: 0 isn't between 0.1 and 60 seconds"),
        (["--log-format", "xml"], "--log-format: 'xml' is none of text, json"),
        (["--node-name", ""], "NODE_NAME must name this node"),
        (["--exclude-cards", "x"], "isn't a JSON object with nodes and cards"),
        (["--exclude-cards", '{"nodes": ["gpu1"], "cards": ["1"]}'], "is an index"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--node-name", "gpu1", *arguments])
    assert message in capsys.readouterr().err


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu7")
    monkeypatch.setenv("GPUSHARE_MEMORY_UNIT", "MiB")
    options = command.parse([])
    assert (options.node_name, options.memory_unit, options.kubelet_dir) == ("gpu7", "MiB", "/var/lib/kubelet")


def test_command_ends_on_an_early_sigterm(tmp_path: Path) -> None:
    """A node that is drained or updated sends one then; kubelet would wait half a minute before it kills."""
    source = str(Path(gpushare.__file__).parents[1])
    command = [sys.executable, "-m", "gpushare.plugin.command", "--node-name=gpu1"]
    command += [f"--kubelet-dir={tmp_path}", *service_account(tmp_path, "http://127.0.0.1:1"), "--log-format=json"]
    for turn in range(2):
        log = tmp_path / f"log{turn}"
        with log.open("wb") as stream:
            process = subprocess.Popen(command, env={"PATH": os.environ["PATH"], "PYTHONPATH": source}, stderr=stream)
        try:
            until(lambda log=log: '"message":"started"' in log.read_text(), 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
