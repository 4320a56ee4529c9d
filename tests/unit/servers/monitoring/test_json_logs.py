# SPDX-License-Identifier: GPL-3.0-or-later
"""Logs in JSON: each line of the real commands is one object that a collector can parse."""

from __future__ import annotations

import datetime
import http.client
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import gpushare
import pytest
from api_double import ApiDouble, make_node, make_pod, served
from gpushare.http.service import logger
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_account import service_account

Row = dict[str, t.Any]


def rows(text: str) -> list[Row]:
    """Parse every line, which must be an object with the common fields."""
    assert text.endswith("\n")
    found = []
    # Not splitlines, which splits at further characters that a message may contain.
    for line in text[:-1].split("\n"):
        row = json.loads(line)
        assert list(row)[:4] == ["time", "level", "logger", "message"], line
        assert row["level"] in ("debug", "info", "warning", "error", "critical")
        when = datetime.datetime.fromisoformat(row["time"])
        assert when.utcoffset() == datetime.timedelta(0)
        found.append(row)
    return found


@pytest.fixture
def stream() -> t.Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = before
    root.setLevel(level)


def test_lines_exceptions_and_fields_of_any_type(stream: io.StringIO) -> None:
    log = logger("gpushare", "json", "info", stream)
    log.debug("not shown")
    log.info("two\nlines and \u2028 \x00 \ud800", extra={"data": {"pod": "default/p", "path": Path("/x"), "n": 3}})
    try:
        raise ValueError("with\na line")
    except ValueError:
        log.exception("failed: %s", "ä")
    first, second = rows(stream.getvalue())
    assert (first["pod"], first["path"], first["n"]) == ("default/p", "/x", 3)
    assert first["message"].startswith("two\nlines") and (first["level"], first["logger"]) == ("info", "gpushare")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "ValueError: with\na line" in second["exception"] and second["level"] == "error"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(), st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.floats(), st.binary())))
def test_any_text_is_one_line(stream: io.StringIO, message: str, facts: dict[str, t.Any]) -> None:
    stream.seek(0)
    stream.truncate()
    hidden = {"time", "level", "logger", "message"}
    log = logger("gpushare", "json", "info", stream)
    log.info("%s", message, extra={"data": {key: fact for key, fact in facts.items() if key not in hidden}})
    (row,) = rows(stream.getvalue())
    assert row["message"] == message


def start(module: str, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    source = str(Path(gpushare.__file__).parents[1])
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", module, "--log-format", "json", *flags],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": source, "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def wait_for(log: Path, message: str) -> Row:
    end = time.monotonic() + 60
    while True:
        found = [row for row in log.read_text().split("\n")[:-1] if message in row]
        if found:
            return t.cast(Row, json.loads(found[0]))
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def test_fault_18_every_log_line_of_the_extender_is_json(tmp_path: Path) -> None:
    api, log = ApiDouble(), tmp_path / "log"
    api.put("nodes", make_node("a", 16))
    pod, large = api.put("pods", make_pod("p", 2)), api.put("pods", make_pod("large", 17))
    with served(api) as url:
        process = start(
            "gpushare.extender.command", log, "--port=0", *service_account(tmp_path, url), "--log-level=debug"
        )
        try:
            port = wait_for(log, '"message":"serving"')["port"]
            wait_for(log, '"message":"ready"')
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            for one in (pod, large):
                name, uid = one["metadata"]["name"], one["metadata"]["uid"]
                binding = {"PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": "a"}
                connection.request("POST", "/gpushare-scheduler/bind", json.dumps(binding))
                connection.getresponse().read()
            for nonsense in (b"", b"\xff\xfe", b"[" * 100_000):
                connection.request("POST", "/gpushare-scheduler/filter", nonsense)
                connection.getresponse().read()
            with api.outage():
                wait_for(log, "trying again")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
    logged = rows(log.read_text())
    bound = next(row for row in logged if row["message"] == "bound")
    assert (bound["pod"], bound["node"]) == ("default/p", "a")
    messages = [row["message"] for row in logged]
    # It is stopped after that, so only a mirror may log one more retry.
    assert all("trying again" in message for message in messages[messages.index("stopping") + 1 :]), messages
    assert not [row for row in logged if "exception" in row]


def test_fault_18_every_log_line_of_the_plugin_is_json(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ["--node-name=gpu1", f"--kubelet-dir={tmp_path}"]
    flags += service_account(tmp_path, "http://127.0.0.1:1")
    process = start("gpushare.plugin.command", log, *flags, "--log-level=debug")
    try:
        wait_for(log, '"message":"started"')
        # It reaches neither the API nor the driver, and logs each retry.
        wait_for(log, "trying again")
        wait_for(log, "NVIDIA's driver")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert not [row for row in rows(log.read_text()) if "exception" in row]
