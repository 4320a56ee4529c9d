# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers by containerd, runc and NVIDIA's container runtime: the plugin's answer, and what a pod can try.

Of the attacks of docs/gpushare.md those that one card shows: who has no share, and gets the card all the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import types
import typing as t
from collections.abc import Iterator
from pathlib import Path

import _runtime
import pytest
from _attacks import TABLE, Outcome
from _card import facts, first, record
from _runtime import Ran, Runtime
from check_worlds import pod_uid
from plugin_fakes import NODE, make_pod, until
from test_gpu_plugin import FAULT_XID, OnCards

VISIBLE, LEGACY, LIMIT = "NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION", "NVIDIA_GPU_MEMORY_LIMIT"
IDENTIFIER = "4" * 64
MODES = ("envvar", "cdi", "refusing")

pytestmark = pytest.mark.skipif(bool(_runtime.missing()), reason=_runtime.missing() or "containers run here")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, program: Path) -> Iterator[Runtime]:
    made = Runtime(tmp_path_factory.mktemp("r"), program)
    yield made
    record("containerd", made.logs()[-200000:])
    made.stop()


class Answer(t.NamedTuple):
    """What the plugin's Allocate answers for a container with a share."""

    environment: dict[str, str]
    devices: tuple[str, ...]


Answers = dict[str, Answer]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> Answers:
    """By the way of injection; the third is the second with another toolkit."""
    process = OnCards(tmp_path_factory.mktemp("a"))
    node = process.node
    try:
        node.kubelet.start()
        process.start()
        until(lambda: node.kubelet.healthy and process.ready() == "ok", 60)
        found = {}
        for way in MODES[:2]:
            if way == "cdi":
                node.specifications.mkdir()
                for path in runtime.specifications.iterdir():
                    (node.specifications / path.name).write_text(path.read_text())
            pod = node.run(make_pod(way, 3, booked=0))
            uid = pod["metadata"]["uid"]
            found[way] = Answer(node.kubelet.envs[uid]["c0"], tuple(node.kubelet.cdi[uid]["c0"]))
        record("allocate", found)
        return {**found, "refusing": found["cdi"]}
    finally:
        process.close()


Variables = t.Mapping[str, str]
How = dict[str, t.Any]
NONE: Variables = types.MappingProxyType({})


def lonely(mode: str, image: Variables = NONE, pod: Variables = NONE, *options: str) -> How:
    """A container without a share.

    :param image: the image's variables; the pod's own come later, and win.
    :param options: of ctr.
    """
    toolkit = "refusing" if mode == "refusing" else "accepting"
    return {"environment": {**image, **pod}, "toolkit": toolkit, "options": options}


def shared(answers: Answers, mode: str, image: Variables = NONE, pod: Variables = NONE, *options: str) -> How:
    """A container with a share: the plugin's variables come between the image's and the pod's."""
    given = answers[mode]
    return {**lonely(mode, image, {**given.environment, **pod}, *options), "devices": given.devices}


def cards_in(said: Ran) -> list[str]:
    return re.findall(r"^card (GPU-\S+)$", said.out, re.MULTILINE)


@pytest.mark.parametrize("mode", MODES)
def test_what_the_plugin_answers_gives_the_card_and_cuda_runs(runtime: Runtime, answers: Answers, mode: str) -> None:
    card, given = first(), answers[mode]
    assert given.devices == (() if mode == "envvar" else (f"nvidia.com/gpu={card['uuid']}",))
    assert given.environment[VISIBLE] == (card["uuid"] if mode == "envvar" else "void")
    uid = pod_uid(7)
    script = "echo /dev/nvidia*; nvidia-smi -L; exec /hold 2048"
    with runtime.holding(script, uid, IDENTIFIER, **shared(answers, mode)) as said:
        seen = facts()["cards"][0]["processes"]
    record(f"container-{mode}", {"said": said, "processes": seen})
    assert f"card {card['uuid']}" in said and "computed" in said, said
    assert any(card["uuid"] in line and line.startswith("GPU 0: ") for line in said), said
    (row,) = [one for one in seen if one["name"] == "hold"]
    assert (row["where"], row["pod_uid"], row["container_id"]) == ("pod", uid, IDENTIFIER)
    assert row["used_mib"] >= 2048


# containerd's capabilities of a container.
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)


class InContainer(OnCards):
    """The plugin of the servers' image, with the rights and mounts of the DaemonSet where no limits are kept."""

    def __init__(self, folder: Path, runtime: Runtime, image: Path) -> None:
        super().__init__(folder)
        self._runtime, self._image, self._folder = runtime, image, folder

    def _launch(self, *arguments: str) -> subprocess.Popen[bytes]:
        options = [word for capability in CAPABILITIES for word in ("--cap-drop", f"CAP_{capability}")]
        for folder, how in ((self._folder, "rw"), (Path("/sys/fs/cgroup"), "ro")):
            options += ["--mount", f"type=bind,src={folder},dst={folder},options=rbind:{how}"]
        options += ["--mount", "type=tmpfs,src=tmpfs,dst=/tmp,options=rw", "--net-host", "--read-only", "--seccomp"]
        words = self._runtime.command(
            *("/opt/gpushare/bin/gpushare-device-plugin", "--node-name", NODE, "--log-format", "json"),
            *("--kubelet-dir", str(self.node.kubelet.root), *self._account),
            *("--cdi-folders", str(self.node.specifications), *arguments),
            environment={VISIBLE: "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"},
            options=options, identifier="plugin", root=self._image,
        )  # fmt: skip
        with self._log.open("ab") as stream:
            self._process = subprocess.Popen(words, stderr=stream, stdin=subprocess.DEVNULL)
        return self._process

    def close(self) -> None:
        self._runtime.kill("plugin")
        super().close()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file system of the servers' image, from its archive."""
    archive = os.environ.get("KUBEGPU_GPU_IMAGE")
    if not archive:
        pytest.skip("KUBEGPU_GPU_IMAGE isn't the path of an archive of the servers' image")
    folder = tmp_path_factory.mktemp("i")
    with tarfile.open(archive) as file:
        file.extractall(folder / "archive", filter="tar")
    (about,) = json.loads((folder / "archive" / "manifest.json").read_text())
    for layer in about["Layers"]:
        with tarfile.open(folder / "archive" / layer) as file:
            file.extractall(folder / "root", filter="tar")
    return folder / "root"


def test_the_servers_image_serves_the_card(
    runtime: Runtime, image: Path, tmp_path_factory: pytest.TempPathFactory, program: Path
) -> None:
    process = InContainer(tmp_path_factory.mktemp("s"), runtime, image)
    node = process.node
    try:
        node.kubelet.start()
        process.start()
        until(lambda: node.kubelet.healthy and process.ready() == "ok", 60)
        pod = node.run(make_pod("pod", 3, booked=0))
        until(lambda: node.agrees(pod), 60)
        assert process.gauge("card_memory_bytes") == first()["memory"]["total_mib"] << 20
        subprocess.run([program, "fault"], capture_output=True, check=False, timeout=60)
        until(lambda: f"XID {FAULT_XID} of card" in process.log, 20)
        record("image", {"log": process.log})
        assert "Traceback" not in process.log
    finally:
        process.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_container_without_a_share_has_no_card(runtime: Runtime, mode: str) -> None:
    said = runtime.run("/bin/sh", "-c", "echo /dev/nvidia*; /hold cards", **lonely(mode))
    assert said.code == 3 and said.out.split("\n")[:2] == ["/dev/nvidia*", "no libcuda"], said


FOLDER = "/var/run/nvidia-container-devices"


def mount(source: str, target: str) -> tuple[str, str]:
    return "--mount", f"type=bind,src={source},dst={target},options=rbind:rw"


# By the names of the table's last column; what only kubelet or the API server distinguishes isn't here.
PLAYS: dict[str, t.Callable[[Answers, str], How]] = {
    "share, env: all": lambda given, mode: shared(given, mode, pod={VISIBLE: "all"}),
    "env: all": lambda given, mode: lonely(mode, pod={VISIBLE: "all"}),
    "env: CUDA_VERSION": lambda given, mode: lonely(mode, pod={LEGACY: "12.4.1"}),
    "image: CUDA_VERSION, env: void": lambda given, mode: lonely(mode, {LEGACY: "12.4.1"}, {VISIBLE: "void"}),
    "share, env: CUDA_VERSION": lambda given, mode: shared(given, mode, pod={LEGACY: "12.4.1"}),
    "share, image: all": lambda given, mode: shared(given, mode, {VISIBLE: "all"}),
    "image: all": lambda given, mode: lonely(mode, {VISIBLE: "all"}),
    "image: all, env: void": lambda given, mode: lonely(mode, {VISIBLE: "all"}, {VISIBLE: "void"}),
    "share, env: limit": lambda given, mode: shared(given, mode, pod={LIMIT: "999999"}),
    "share, mount": lambda given, mode: shared(given, mode, NONE, NONE, *mount("/dev/null", f"{FOLDER}/all")),
    "mount": lambda given, mode: lonely(mode, NONE, NONE, *mount("/dev/null", f"{FOLDER}/all")),
    "mount: cdi": lambda given, mode: lonely(mode, NONE, NONE, *mount("/dev/null", f"{FOLDER}/cdi/nvidia.com/gpu/all")),
    "env: all, SYS_ADMIN": lambda given, mode: lonely(mode, NONE, {VISIBLE: "all"}, "--cap-add", "CAP_SYS_ADMIN"),
    "privileged": lambda given, mode: lonely(mode, NONE, NONE, "--privileged"),
    "share, privileged": lambda given, mode: shared(given, mode, NONE, NONE, "--privileged"),
}
EXPECTED = {play: row for row in TABLE for play in row.plays}


@pytest.mark.parametrize("play", PLAYS)
@pytest.mark.parametrize("mode", MODES)
def test_attack(runtime: Runtime, answers: Answers, mode: str, play: str) -> None:
    said = runtime.run("/bin/sh", "-c", "echo /dev/nvidia*; /hold cards", **PLAYS[play](answers, mode))
    outcome = getattr(EXPECTED[play], mode).outcome
    record(f"attack-{mode}-{re.sub('[^a-z]+', '-', play.lower())}", {"outcome": outcome.name, **said._asdict()})
    device = f"/dev/nvidia{first()['minor']}"
    sees = device in said.out.split("\n")[0].split()
    if outcome is Outcome.NO_START:
        assert said.code and not said.out and "hook" in said.err, said
    elif outcome is Outcome.FAILS:
        assert sees == play.startswith("share"), said
        assert bool(cards_in(said)) == sees, said
    else:
        assert sees, said
        # A privileged container has the device files without any file of the driver.
        assert cards_in(said) or play == "privileged", said


def test_the_nodes_dev_opens_no_card_without_a_share(runtime: Runtime, answers: Answers) -> None:
    device = f"nvidia{first()['minor']}"
    # A shell ends when it can't open a file: each attempt has its own.
    script = f"(: </node-dev/{device}) && echo opened; (: </node-dev/null) && echo null"
    options = mount("/dev", "/node-dev")
    without = runtime.run("/bin/sh", "-c", script, **lonely("envvar", NONE, NONE, *options))
    assert without.out.split() == ["null"] and "Operation not permitted" in without.err, without
    for mode in MODES[:2]:
        own = runtime.run("/bin/sh", "-c", script, **shared(answers, mode, NONE, NONE, *options))
        assert own.out.split() == ["opened", "null"], own
