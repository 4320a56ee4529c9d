# SPDX-License-Identifier: GPL-3.0-or-later
"""A real headless browser for tests: Chromium over its DevTools protocol on a pipe, so that no port is opened.

The protocol on a pipe: JSON messages that end in NUL, to the browser on its descriptor 3, from it on 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "headless_shell")
PATIENCE = 120.0


def find() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page, in a folder of its own; gone with all that it started when the block ends."""

    def __enter__(self) -> Browser:
        command = find()
        assert command, "no browser here"
        self.folder = tempfile.mkdtemp(prefix="kubegpu-browser-")
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        options = [
            "--headless",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={self.folder}",
            "about:blank",
        ]
        # The shell moves our pipes to the descriptors that the browser expects, and the pipes' own ends end with it.
        moved = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
            env={**os.environ, "HOME": self.folder, "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._number, self.events = b"", 0, []
        self._session = ""
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log", "Security"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self._write, self._read):
            os.close(end)
        try:
            # Without its pipe the browser ends by itself.
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> JsonObject:
        """Send a command and return its result; events that arrive before it are kept in ``events``."""
        self._number += 1
        message: JsonObject = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._message(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event: str) -> JsonObject:
        """The event, seen already or awaited."""
        end = time.monotonic() + PATIENCE
        while True:
            for one in self.events:
                if one.get("method") == event:
                    return one
            self.events.append(self._message(end))

    def _message(self, end: float) -> JsonObject:
        while b"\0" not in self._rest:
            ready, _write, _error = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "no message of the browser in time"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path, width: int, height: int, scheme: str = "light", media: str = "") -> None:
        """Load a page in a window of a size; all its events are in ``events`` then."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression, in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """The URLs that the page requested."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]

    def complaints(self) -> list[str]:
        """The console's messages: errors, and requests that the page's policy blocked."""
        entries = [event["params"]["entry"]["text"] for event in self.events if event.get("method") == "Log.entryAdded"]
        raised = [str(event["params"]) for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        printed = [str(event["params"]) for event in self.events if event.get("method") == "Runtime.consoleAPICalled"]
        return entries + raised + printed
