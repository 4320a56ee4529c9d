# SPDX-License-Identifier: GPL-3.0-or-later
"""A scheduler's side of the extender, and waiting for what comes true in its own time."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

from gpushare.extender.command import Extender


class Client:
    """A scheduler's side of the extender."""

    def __init__(self, extender: Extender) -> None:
        self.extender = extender

    def raw(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.extender.service.port, timeout=20)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read(), response.headers.get("Content-Type", "")
        finally:
            connection.close()

    def json_of(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        status, answer, kind = self.raw(method, path, body)
        assert kind == "application/json"
        return status, json.loads(answer)

    def json(self, method: str, path: str, value: Any = ...) -> tuple[int, Any]:
        return self.json_of(method, path, b"" if value is ... else json.dumps(value).encode())

    def filter(self, pod: Any, *names: str) -> Any:
        status, value = self.json(
            "POST", "/gpushare-scheduler/filter", {"Pod": pod, "Nodes": None, "NodeNames": list(names)}
        )
        assert status == 200
        return value

    def bind(self, pod: Any, node: str) -> str:
        metadata = pod["metadata"]
        wanted = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata.get("uid", ""),
            "Node": node,
        }
        status, value = self.json("POST", "/gpushare-scheduler/bind", wanted)
        assert status == 200
        return value["Error"]

    def node(self, name: str) -> Any:
        status, value = self.json("GET", f"/gpushare-scheduler/inspect/{name}")
        assert status == 200
        return value["nodes"][0]

    def used(self, name: str) -> list[int]:
        return [card["usedGPU"] for card in self.node(name)["devs"]]

    def metric(self, line: str) -> float:
        text = self.raw("GET", "/metrics")[1].decode()
        found = [row.rsplit(" ", 1)[1] for row in text.splitlines() if row.startswith(line + " ")]
        assert found, f"no {line} in:\n{text}"
        return float(found[0])


def eventually(check: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true value that a check gives; its last one fails the test."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value or time.monotonic() > deadline:
            assert value, f"still {value!r} after {seconds} s"
            return value
        time.sleep(0.005)
