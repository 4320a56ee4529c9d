# SPDX-License-Identifier: GPL-3.0-or-later
"""ansible-operator, which starts this program as ansible-runner: its call, its events and its metrics; ansible-runner.

The folder of a call has ``env/extravars`` and ``env/settings``; the second names the socket that takes events.
Of an event the engine reads: ``playbook_on_stats``, without which a call has failed; a failed task, after which it
calls again ever later; and the module ``requeue_after``, whose period decides when it calls again, whatever failed.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import typing as t
import uuid
from dataclasses import dataclass
from pathlib import Path

from .resource import JsonObject

# Where the engine takes metrics, which it publishes with its own.
METRICS = ("127.0.0.1", 5050)
# Runs of which the artifacts are kept, and the most bytes: of former runs before a run begins, and of a run. The volume
# has 256 MiB, and a pod that fills it is evicted.
KEPT = 5
MOST_KEPT, MOST_OF_A_RUN = 64 << 20, 128 << 20
# Seconds between looks at whether the engine lives, and at what else ends a run early.
LOOK, WATCH = 1.0, 10.0
# Why a run was ended.
TOO_LONG, TOO_LARGE, UNWANTED = "time-limit", "output-limit", "unwanted"


@dataclass(frozen=True)
class Call:
    """How the engine calls ansible-runner.

    :param folder: with env, inventory, project and artifacts.
    :param playbook: its path.
    :param ident: the run's name.
    """

    folder: Path
    playbook: Path
    ident: str

    @classmethod
    def parse(cls, words: t.Sequence[str]) -> Call | None:
        """Return a call's arguments; None where it is no call of the engine's. Verbosity and the number of kept
        artifacts, which annotations of a resource set, are left out."""
        if len(words) < 2 or words[0] != "run":
            return None
        options = dict(itertools.pairwise(words))
        if "-p" not in options or "-i" not in options:
            return None
        return cls(Path(words[1]), Path(options["-p"]), options["-i"])

    @property
    def variables(self) -> Path:
        return self.folder / "env" / "extravars"

    def read_variables(self) -> JsonObject:
        return t.cast(JsonObject, json.loads(self.variables.read_text()))

    def take_variables(self) -> JsonObject:
        """Return the variables and leave none: of a resource with a large spec each call would leave some MiB."""
        variables = self.read_variables()
        self.write_variables({})
        return variables

    def write_variables(self, variables: JsonObject) -> None:
        self.variables.write_text(json.dumps(variables))

    def remove_others(self, names: t.Container[str]) -> None:
        """Remove the folders of resources that are gone, which the engine leaves.

        :param names: of the resources that there are.
        """
        for path in self.folder.parent.iterdir():
            if path.name not in names and path != self.folder and (path / "env" / "extravars").is_file():
                shutil.rmtree(path, ignore_errors=True)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=15)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(15)
        self.sock.connect(self._path)


class Events:
    """The engine's socket for one call."""

    def __init__(self, call: Call) -> None:
        settings = json.loads((call.folder / "env" / "settings").read_text())
        self._socket, self._path = str(settings["runner_http_url"]), str(settings["runner_http_path"])

    def stats(self) -> None:
        """Tell the engine that the call succeeded without a run."""
        self._send("playbook_on_stats", {"ok": {"localhost": 1}})

    def again_after(self, seconds: float) -> None:
        """Tell the engine when to call again; the last that it reads of this call."""
        result = {"period": f"{max(1, round(seconds))}s"}
        self._send("runner_on_ok", {"task_action": "operator_sdk.util.requeue_after", "res": result})

    def _send(self, event: str, data: JsonObject) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f+00:00")
        body = {"uuid": str(uuid.uuid4()), "counter": 1, "event": event, "event_data": data, "created": now}
        connection = _Connection(self._socket)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", self._path, json.dumps({**body, "pid": os.getpid(), "stdout": ""}), headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status >= 300:
                raise OSError(f"the engine answers an event with {answer.status}")
        finally:
            connection.close()


def publish(metrics: t.Iterable[JsonObject]) -> None:
    """Give the engine metrics; one that can't be given is printed, since a run doesn't fail for it."""
    for metric in metrics:
        connection = http.client.HTTPConnection(*METRICS, timeout=5)
        try:
            connection.request("POST", "/metrics", json.dumps(metric), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status >= 300:
                print(f"metric {metric['name']}: {answer.status}", file=sys.stderr)
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            print(f"metric {metric['name']}: {error}", file=sys.stderr)
        finally:
            connection.close()


def run(call: Call, runner: t.Sequence[str], longest: float, is_wanted: t.Callable[[], bool]) -> str:
    """Run ansible-runner, and end with it where the engine has ended.

    A run that is ended leaves the cluster after one of its requests. The next one does what is missing, and an
    uninstall removes what is there, as after the end of a pod.

    :param runner: its command.
    :param longest: the seconds after which it is ended.
    :param is_wanted: whether it still has a purpose; it is asked every ``WATCH`` seconds.
    :returns: why it was ended: ``TOO_LONG``, ``TOO_LARGE`` or ``UNWANTED``; empty where it ended by itself.
    """
    _tidy(call.folder / "artifacts")
    # Its own rotation fails where the engine's link leads to the artifacts of a call that ran nothing.
    words = [*runner, "run", str(call.folder), "--rotate-artifacts", "0", "-p", str(call.playbook)]
    engine, began = os.getppid(), time.monotonic()
    looked = began
    process = subprocess.Popen([*words, "-i", call.ident], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK)
                return ""
            if os.getppid() != engine:
                # Another pod leads by now, and would change the same objects.
                raise SystemExit(1)
            now = time.monotonic()
            if now - began > longest:
                return TOO_LONG
            if now - looked < WATCH:
                continue
            looked = now
            if _size(call.folder / "artifacts" / call.ident) > MOST_OF_A_RUN:
                return TOO_LARGE
            if not is_wanted():
                return UNWANTED
    finally:
        _end(process)


def _tidy(folder: Path) -> None:
    """Remove all artifacts but the newest, by number and by size, so that the volume doesn't fill."""
    runs = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()] if folder.exists() else []
    size = 0
    for number, path in enumerate(sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)):
        size += _size(path)
        if number >= KEPT - 1 or size > MOST_KEPT:
            shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    """Return the bytes of a folder's files; those that go meanwhile don't count."""
    size = 0
    for parent, _folders, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        time.sleep(0.05)


def left(call: Call) -> tuple[list[JsonObject], int | None]:
    """Return the job events of a run in their order, and its exit status; None where it was killed."""
    folder = call.folder / "artifacts" / call.ident
    files = [path for path in (folder / "job_events").glob("*.json") if path.name.partition("-")[0].isdecimal()]
    events = []
    for path in sorted(files, key=lambda path: int(path.name.partition("-")[0])):
        # The last one of a run that was killed may be incomplete.
        with contextlib.suppress(ValueError):
            events.append(json.loads(path.read_text()))
    try:
        return events, int((folder / "rc").read_text())
    except (OSError, ValueError):
        return events, None
