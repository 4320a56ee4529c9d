# SPDX-License-Identifier: GPL-3.0-or-later
"""The plugin's metrics for others, by a process that has neither the plugin's capability nor its sockets of kubelet."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import typing as t
from pathlib import Path

import gpushare
import pytest
from api_double import served
from gpushare.plugin import command
from metrics_reader import TOKEN, Reviewer
from plugin_fakes import NODE, Node, until
from service_account import service_account


def ask(port: int, token: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_another_process_serves_the_plugins_metrics(make: t.Callable[..., Node], tmp_path: Path) -> None:
    node, log = make().up(), tmp_path / "log"
    with served(Reviewer()) as url, log.open("wb") as stream:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpushare.plugin.command", "--serve-metrics", "--node-name", NODE),
                *("--status-socket", str(node.status_socket), "--metrics-address", "127.0.0.1", "--metrics-port", "0"),
                *("--log-format", "json", *service_account(tmp_path / "account", url)),
            ],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(gpushare.__file__).parents[1])},
            stderr=stream,
        )
        try:
            until(lambda: '"message":"started"' in log.read_text(), 60)
            port = json.loads(log.read_text().splitlines()[0])["metrics"]
            found, page = ask(port, TOKEN)
            assert (
                found == 200
                and f'gpushare_plugin_card_units{{card="0",model="Simulated NVIDIA GPU",node="{NODE}"' in page
            )
            assert ask(port, "unknown")[0] == 401
            node.stop_plugin()
            until(lambda: ask(port, TOKEN)[0] == 503)
            assert "gpushare-device-plugin doesn't answer on" in ask(port, TOKEN)[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()


def test_it_needs_an_address_and_the_plugins_socket(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--status-socket=/tmp/s"], ["--metrics-address=127.0.0.1"]):
        with pytest.raises(SystemExit):
            command.parse(["--node-name=n", "--serve-metrics", *more])
        assert "--serve-metrics needs --metrics-address and --status-socket" in capsys.readouterr().err
