# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's MPS control daemon with folders of its own: what NVML lists of its clients, and what verify makes of it.

The card's compute mode stays as it is, so what an exclusive card adds isn't seen here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from _card import CGROUPFS, ROOT, SYSTEMD, Holders, facts, first, place, record, until
from ansible_collections.kubegpu.share.plugins.module_utils._check.nvidia import MPS_SERVER, has_name
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from check_kit import checked, found
from check_worlds import GPU, nvidia, pod_uid
from test_gpu_library import compare
from test_gpu_processes import CONTEXT_MIB, IDS, listed, needs_v2

CONTROL = "nvidia-cuda-mps-control"
# What the daemon of driver 580.159.04 answered, which the lab's stand-in is compared with.
ANSWERS = ROOT / "tests/unit/driver/recordings/mps-control/580.159.04.json"
# CUDA_ERROR_OUT_OF_MEMORY, as the program that holds memory prints it.
REFUSED = "cuMemAlloc_v2 answers 2"

pytestmark = pytest.mark.skipif(not shutil.which(CONTROL), reason=f"{CONTROL} isn't on the PATH")


class Mps:
    """A control daemon; its servers start with the first client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        for variable in self.variables.values():
            Path(variable).mkdir()
        done = subprocess.run(
            [CONTROL, "-d"], env=os.environ | self.variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def ask(self, command: str) -> str:
        """Send a command to the daemon, and return what it answers."""
        done = subprocess.run(
            [CONTROL], input=f"{command}\n", capture_output=True, text=True, check=False, timeout=60,
            env=os.environ | self.variables,
        )  # fmt: skip
        return done.stdout + done.stderr

    @property
    def client(self) -> tuple[str, ...]:
        """The command that starts a client."""
        return ("env", *(f"{name}={value}" for name, value in self.variables.items()))

    def files(self) -> dict[str, str]:
        return {
            f"{path.parent.name}/{path.name}": path.read_text(errors="replace") if path.parent.name == "log" else ""
            for path in sorted(self.folder.glob("*/*"))
            if path.parent.name == "pipe" or path.is_file()
        }

    def stop(self) -> None:
        pids = [int(one) for one in self.ask("get_server_list").split() if one.isdigit()]
        self.ask("quit -t 2")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mps]:
    # Short names: the daemon's socket is in this folder.
    made = Mps(tmp_path_factory.mktemp("m"))
    yield made
    made.stop()


def verified(card: JsonObject, mps: Mps) -> JsonObject:
    """What verify reports of a node with this card, of whose four replicas two pods have one each."""
    labels = {"gpu.count": "1", "gpu.replicas": "4", "gpu.sharing-strategy": "mps"}
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": mps.variables["CUDA_MPS_PIPE_DIRECTORY"]}
    held = {at + 1: [f"{card['uuid']}::{at}"] for at in range(2)}
    return checked(nvidia(GPU, labels, held, [card], {GPU: 4}, pipe))


def test_the_daemons_answers(mps: Mps) -> None:
    uuid = first()["uuid"]
    recorded: list[list[str]] = json.loads(ANSWERS.read_text())
    commands = [command for command, _answer in recorded]
    answers = [[command, mps.ask(command.format(uuid=uuid)).replace(uuid, "{uuid}")] for command in commands]
    record("mps-control", {"answers": answers, "files": mps.files()})
    assert answers == recorded


@needs_v2
def test_clients_are_listed_with_their_memory_and_their_pods(mps: Mps, holders: Holders) -> None:
    sizes, forms = (2048, 4096), (SYSTEMD, CGROUPFS)
    pids = [
        holders.start(sizes[at], place(forms[at], pod_uid(at + 1), IDS[at]), mps.client).pid for at in range(2)
    ]  # fmt: skip
    seen = facts()
    record("mps-facts", {"facts": seen, "raw": listed("processes"), "files": mps.files()})
    card = seen["cards"][0]
    rows = {row["pid"]: row for row in card["processes"]}
    servers = [int(one) for one in mps.ask("get_server_list").split()]
    assert len(servers) == 1 and rows[servers[0]]["types"] == ["compute"] and rows[servers[0]]["where"] == "host"
    assert has_name(rows[servers[0]]["name"], (MPS_SERVER,)), rows[servers[0]]
    for at, pid in enumerate(pids):
        row = rows[pid]
        assert (row["where"], row["pod_uid"], row["container_id"]) == ("pod", pod_uid(at + 1), IDS[at])
        assert row["name"] == "hold" and row["types"] == ["compute", "mps"]
        assert sizes[at] <= row["used_mib"] <= sizes[at] + CONTEXT_MIB
    report = verified(card, mps)
    record("mps-verify", report)
    failed = found(report, "FAIL")
    assert [text.split()[0] for text in failed] == ["N6"] * (card["compute_mode"] != "exclusive_process"), failed
    assert all("compute mode" in text for text in failed), failed


@needs_v2
def test_a_program_without_the_daemon_is_found(mps: Mps, holders: Holders) -> None:
    with_mps = holders.start(1024, place(SYSTEMD, pod_uid(1), IDS[0]), mps.client).pid
    without = holders.start(1024, place(CGROUPFS, pod_uid(2), IDS[1])).pid
    card = first()
    types = {row["pid"]: row["types"] for row in card["processes"]}
    record("mps-mixed", card)
    assert types[with_mps] == ["compute", "mps"] and types[without] == ["compute"]
    (text,) = [one for one in found(verified(card, mps), "FAIL") if "without MPS" in one and str(without) in one]
    assert text.startswith("N6 ")


def test_memory_above_the_limit_is_refused(mps: Mps, program: Path, holders: Holders) -> None:
    mps.ask("set_default_device_pinned_mem_limit 0 3G")
    small = holders.start(1024, before=mps.client)
    done = subprocess.run([*mps.client, program, "4096"], capture_output=True, text=True, check=False, timeout=60)
    record("mps-limit", {"small": small.said, "large": done.stdout, "files": mps.files(), "card": first()})
    assert done.returncode == 4 and done.stdout.splitlines()[-1] == REFUSED, done.stdout
    assert small.process.poll() is None


def test_the_server_ends_with_the_daemon(mps: Mps, holders: Holders) -> None:
    one = holders.start(1024, before=mps.client)
    (server,) = [int(each) for each in mps.ask("get_server_list").split()]
    one.kill()
    mps.ask("quit -t 2")
    until(lambda: server not in {row["pid"] for row in first()["processes"]}, 20, "the server is gone")


def test_the_stand_in_of_the_library_lists_clients_as_the_library(mps: Mps, holders: Holders, tmp_path: Path) -> None:
    for number in range(2):
        holders.start(1024 * (number + 1), before=mps.client)
    compare("library-mps", tmp_path)
