# SPDX-License-Identifier: GPL-3.0-or-later
"""A scheduler's side of the extender, its preemption step by step, and its command as a process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpushare
from gpushare.extender.command import Extender
from gpushare.extender.preemption import Preemption
from gpushare.extender.state import Claim


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


class Client:
    """A scheduler's side of the extender."""

    def __init__(self, extender: Extender) -> None:
        self.extender = extender

    def raw(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.extender.service.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read(), response.headers.get("Content-Type", "")

    def json_of(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        status, answer, kind = self.raw(method, path, body)
        assert kind == "application/json"
        return status, json.loads(answer)

    def json(self, method: str, path: str, value: Any = ...) -> tuple[int, Any]:
        return self.json_of(method, path, b"" if value is ... else json.dumps(value).encode())

    def filter(self, pod: Any, *names: str) -> Any:
        body = {"Pod": pod, "Nodes": None, "NodeNames": list(names)}
        status, value = self.json("POST", "/gpushare-scheduler/filter", body)
        assert status == 200
        return value

    def bind(self, pod: Any, node: str = "a") -> str:
        status, value = self.json("POST", "/gpushare-scheduler/bind", bind_request(pod, node))
        assert status == 200
        return value["Error"]

    def filter_and_bind(self, pod: Any, node: str = "a") -> str:
        """Both, as a scheduler does it."""
        assert node in self.filter(pod, node)["NodeNames"]
        return self.bind(pod, node)

    def node(self, name: str) -> Any:
        status, value = self.json("GET", f"/gpushare-scheduler/inspect/{name}")
        assert status == 200
        return value["nodes"][0]

    def used(self, name: str = "a") -> list[int]:
        return [card["usedGPU"] for card in self.node(name)["devs"]]

    def metric(self, line: str) -> float:
        text = self.raw("GET", "/metrics")[1].decode()
        found = [row.rsplit(" ", 1)[1] for row in text.splitlines() if row.startswith(line + " ")]
        assert found, f"no {line} in:\n{text}"
        return float(found[0])


Start = Callable[..., Client]


def bind_request(pod: Any, node: str = "a") -> dict[str, str]:
    metadata = pod["metadata"]
    names = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"]}
    return {**names, "PodUID": metadata.get("uid", ""), "Node": node}


def content_length(head: bytes) -> int:
    """The length of the body after an HTTP head, in bytes."""
    return int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)


class Clock:
    """A clock that only a test moves, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scheduler:
    """A scheduler and its extender, whose preemption runs only on the test's tick."""

    def __init__(self, client: Client, **options: Any) -> None:
        self.client, self.clock, extender = client, Clock(), client.extender
        self.state = extender.state
        extender.preemption.stop()
        kube, options = extender.binder._kube, {"clock": self.clock, **options}
        self.preemption = Preemption(kube, self.state, extender.events, **options)
        extender.preemption = extender.api._preemption = self.preemption
        extender.api._refused = (self.preemption.refused,)

    def filter(self, pod: Any, *names: str) -> list[str]:
        """The nodes that pass; node ``a`` is the default."""
        return list(self.client.filter(pod, *(names or "a"))["NodeNames"])

    def tick(self, seconds: float = 2.0) -> None:
        """Let some time pass and run the preemption once."""
        self.clock.now += seconds
        self.preemption.tick()

    def refuse(self, pod: Any, *names: str) -> None:
        """Have a pod filtered, and the preemption run after kube-scheduler's time for it."""
        assert self.filter(pod, *names) == []
        self.tick()

    def claims(self) -> list[Claim]:
        return self.state.claims()


def eventually(check: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true value of a check; its last one fails the test."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value or time.monotonic() > deadline:
            assert value, f"still {value!r} after {seconds} s"
            return value
        time.sleep(0.005)


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that runs the servers' sources."""
    return {**os.environ, "PYTHONPATH": str(Path(gpushare.__file__).parents[1]), **more}


COMMAND = (sys.executable, "-m", "gpushare.extender.command")


class CommandLog:
    """Reads a command's log line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self) -> Any:
        assert self.process.stderr is not None
        return json.loads(self.process.stderr.readline())


@contextlib.contextmanager
def command_process(*options: str, **variables: str) -> Iterator[CommandLog]:
    """Run the command, and end it by SIGTERM; after a minute it is killed, which ends its log."""
    command = [*COMMAND, "--port=0", "--log-format=json", *options]
    process = subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True)
    limit = threading.Timer(60, process.kill)
    limit.start()
    try:
        yield CommandLog(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        limit.cancel()
        process.kill()
        process.communicate()


def message(log: Callable[[], Any], text: str) -> Any:
    """Read a command's log up to the line of a message; whether claims are exchanged is logged at any time."""
    return next(line for line in iter(log, None) if line["message"] == text)
