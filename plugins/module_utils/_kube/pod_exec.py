# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapter: run a command in a container, as ``kubectl exec`` does.

What comes back is a node's word: a kubelet that somebody has taken can send what it likes, as much and as slowly as it
likes. So bytes and seconds are limited here, whatever the websocket library does with a frame.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import socket
import threading
import typing as t

from .._core.errors import ShareError
from .client import RealKube

try:
    from kubernetes.client import CoreV1Api  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from kubernetes.stream import stream  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:
    # RealKube reports the missing library before anything here is called.
    CoreV1Api = stream = None

EXEC_SECONDS = 30
# Of all that a command writes. The library keeps it twice.
MOST_BYTES = 16 * 1024 * 1024
# Of the channel on which kubelet sends how the command ended.
ERRORS, LONGEST_ERROR = 3, 64 * 1024
# Characters that a message has of what a command wrote.
QUOTED = 300


class CommandFailed(ShareError):
    """A command couldn't be run, or ended with another status than 0.

    :ivar status: its exit status; None if it couldn't be run or didn't end in time.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Execute(t.Protocol):
    """Runs commands in containers."""

    def __call__(self, namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
        """Run a command and return its output.

        :param argv: the command's words.
        :raises CommandFailed: it can't be run, or its exit status isn't 0.
        """


class PodExec:
    """``kubectl exec`` with a limit of time and size. Each call has a connection of its own, so calls may overlap.

    :param seconds: from the request to the end of the output.
    :param most: bytes of all that arrives.
    """

    def __init__(self, kube: RealKube, seconds: float = EXEC_SECONDS, most: int = MOST_BYTES) -> None:
        self._kube, self._seconds, self._most = kube, seconds, most

    def __call__(self, namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
        call = _Call(self._kube.api_client, self._most)
        # Neither the library's handshake nor its wait for the rest of a frame has a limit: whoever is late is left.
        thread = threading.Thread(target=call.run, args=(namespace, pod, container, list(argv)), daemon=True)
        thread.start()
        thread.join(self._seconds)
        if thread.is_alive():
            call.shut()
            raise CommandFailed(f"exec in pod {pod}: {argv[0]} didn't end within {self._seconds:g} s")
        if call.error is not None:
            raise CommandFailed(f"exec in pod {pod}: {_reason(call.error)}") from call.error
        if call.code != 0:
            shown = " ".join(call.err.split())[:QUOTED]
            raise CommandFailed(f"exec in pod {pod}: {argv[0]} ended with {call.code}: {shown}", call.code)
        return call.out


class _Call:
    """One call, and what came of it.

    :ivar code: the exit status.
    :ivar error: why there is none.
    """

    def __init__(self, client: t.Any, most: int) -> None:
        # The library replaces a method of its client meanwhile.
        self._client, self._most = copy.copy(client), most
        self._channel: t.Any = None
        self.out, self.err = "", ""
        self.code: int | None = None
        self.error: Exception | None = None

    def run(self, namespace: str, pod: str, container: str, argv: list[str]) -> None:
        try:
            self._channel = stream(
                CoreV1Api(self._client).connect_get_namespaced_pod_exec,
                pod,
                namespace,
                container=container,
                command=argv,
                stdin=False,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
            )
            self._read(self._channel)
        except Exception as error:  # the websocket library raises many types
            self.error = error

    def _read(self, channel: t.Any) -> None:
        frames = channel.sock.frame_buffer
        frames.recv = _limited(frames.recv, self._most)
        try:
            while channel.is_open():
                channel.update(timeout=None)
            if len(channel.peek_channel(ERRORS)) > LONGEST_ERROR:
                raise ShareError("kubelet's report of its end is too long")
            self.out, self.err = str(channel.read_stdout()), str(channel.read_stderr())
            self.code = _exit_status(str(channel.read_channel(ERRORS)))
        finally:
            channel.close()

    def shut(self) -> None:
        """End the connection, if there is one."""
        # Closing it wouldn't wake up the thread that reads; a connection that ended meanwhile has no socket.
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self._channel.sock.sock.shutdown(socket.SHUT_RDWR)


def _exit_status(report: str) -> int:
    """Return the exit status in kubelet's report of a command's end, a Status of the API as JSON.

    The library would read it as YAML, of which a few hundred bytes with merge keys take hours, and all memory.

    :raises ShareError: it has none.
    """
    try:
        status = json.loads(report)
        return 0 if status["status"] == "Success" else int(status["details"]["causes"][0]["message"])
    except (TypeError, KeyError, IndexError, ValueError, OverflowError, RecursionError) as error:
        raise ShareError("the connection ended before the command") from error


def _limited(receive: t.Callable[[int], bytes], most: int) -> t.Callable[[int], bytes]:
    """Return a function that receives as another one does, but so many bytes at most."""
    left = most

    def limited(size: int) -> bytes:
        nonlocal left
        data = receive(size)
        left -= len(data)
        if left < 0:
            raise ShareError(f"its output is larger than {most} bytes")
        return data

    return limited


def _reason(error: Exception) -> str:
    text = " ".join(str(getattr(error, "reason", None) or error).split())
    # The websocket's error contains the whole response, with the API server's message as JSON.
    message = re.search(r'"message":"([^"]*)"', text)
    return (message.group(1) if message else text)[:QUOTED]
