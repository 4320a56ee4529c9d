# SPDX-License-Identifier: GPL-3.0-or-later
"""Common parts of the servers' benchmarks: processes, their memory and CPU time, and percentiles."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "images" / "gpushare" / "src"
sys.path[:0] = [str(SOURCE), str(ROOT), str(ROOT / "tests" / "unit")]

from gpushare.shared._core.types import JsonObject  # noqa: E402
from real_apiserver import ApiServer, _Authority  # noqa: E402

# A program behind these ends with this script, even if that is killed.
TIED = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()


class NoResult(Exception):
    """A benchmark has no result; the message has the reason."""


class Server:
    """A server in a process of its own, with its log in JSON.

    :param account: the folder of its service account, with the API server's URL in the file ``url``.
    """

    def __init__(self, module: str, *flags: str, account: Path, environment: Mapping[str, str] | None = None) -> None:
        self.module = module
        url = (account / "url").read_text()
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [
                *TIED,
                *(sys.executable, "-m", module, "--log-format=json"),
                *(f"--api-server={url}", f"--service-account={account}", *flags),
            ],
            env={**os.environ, "PYTHONPATH": str(SOURCE), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: deque[str] = deque(maxlen=20)
        self._rows: dict[str, JsonObject] = {}
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._news:
                self._lines.append(line.rstrip())
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self._rows.setdefault(row["message"], row)
                self._news.notify_all()

    def wait_for(self, message: str, seconds: float = 300) -> JsonObject:
        """Return the first line of its log with this message.

        :raises NoResult: it ended, or didn't log the message in time.
        """
        end = time.monotonic() + seconds
        with self._news:
            while message not in self._rows:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise NoResult(f"{self.module} doesn't log {message!r}; {self.log_end()}")
                self._news.wait(0.2)
            return self._rows[message]

    def log_end(self) -> str:
        return f"the end of the log of {self.module}: {' '.join(self._lines)}"

    def stop(self) -> None:
        end_process(self._process)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def end_process(process: subprocess.Popen[Any]) -> None:
    """End a process, after 20 seconds by SIGKILL."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def watch_without_events(handler: BaseHTTPRequestHandler) -> None:
    """Answer a watch of recorded lists: bookmarks alone, without which the extender's state counts as outdated."""
    handler.send_response(200)
    handler.end_headers()
    # Until the client ends.
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"1"}}}\n')
            handler.wfile.flush()
            time.sleep(30)
    handler.close_connection = True


def check_filtered(answer: bytes) -> None:
    """Check an answer of filter.

    :raises NoResult: it is an error, as of an extender whose state is outdated: that is made in no time.
    """
    error = json.loads(answer)["Error"]
    if error:
        raise NoResult(f"filter answers with an error: {error}")


def memory(pid: int, field: str = "VmRSS") -> float:
    """Return a process's memory in MB (1,000,000 bytes); VmHWM is its maximum."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def cpu(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    # The kernel scheduler's statistics are in nanoseconds; /proc/<pid>/stat has ticks of 10 ms.
    taken = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            taken += int((task / "schedstat").read_text().split()[0])
    return taken / 1e9


def cpu_for(pid: int, seconds: float) -> float:
    """Wait, and return the part of one processor that a process used meanwhile."""
    before, began = cpu(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu(pid) - before) / (time.perf_counter() - began)


def percentiles(times: Sequence[float]) -> str:
    """Format median, 99th percentile and maximum of seconds in milliseconds."""
    found = sorted(times)
    return f"p50 {found[len(found) // 2] * 1000:7.2f}  p99 {p99(found) * 1000:7.2f}  max {found[-1] * 1000:7.2f} ms"


def p99(times: Sequence[float]) -> float:
    found = sorted(times)
    return found[min(len(found) - 1, int(len(found) * 0.99))]


def service_account(folder: Path, server: ThreadingHTTPServer) -> Path:
    """Add TLS to a benchmark's API server, and return the folder of a service account for it."""
    authority = _Authority(folder / "pki")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("serving", "kube-apiserver", server=True))
    # Not here but in the connection's own thread: one that says nothing would hold up all others.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    account = folder / "account"
    account.mkdir()
    shutil.copy(folder / "pki" / "ca.crt", account)
    (account / "token").write_text("any")
    (account / "url").write_text(f"https://127.0.0.1:{server.server_address[1]}")
    return account


def account_of(api: ApiServer, folder: Path) -> Path:
    """Create a service account at a real API server; its permissions don't affect the result."""
    account = api.service_account(folder / "account")
    (account / "url").write_text(api.url)
    return account


def verdict(goals: Sequence[tuple[str, bool]]) -> int:
    """Print which goals are met, and return the exit status."""
    for what, met in goals:
        print(f"{'met   ' if met else 'MISSED'}  {what}")
    return 0 if all(met for _what, met in goals) else 1
