# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapter: run a command in a container, through the API's exec stream."""

from __future__ import annotations

import re
import typing as t

from .._core.errors import ShareError
from .._kube.client import RealKube

try:
    from kubernetes.client import CoreV1Api  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from kubernetes.stream import stream  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:
    # RealKube reports the missing library before anything here is called.
    CoreV1Api = stream = None

EXEC_SECONDS = 30


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
    """``kubectl exec`` with a time limit."""

    def __init__(self, kube: RealKube) -> None:
        self._kube = kube

    def __call__(self, namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
        try:
            channel = stream(
                CoreV1Api(self._kube.api_client).connect_get_namespaced_pod_exec,
                pod,
                namespace,
                container=container,
                command=list(argv),
                stdin=False,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
            )
            channel.run_forever(timeout=EXEC_SECONDS)
            out, err = channel.read_stdout(timeout=1), channel.read_stderr(timeout=1)
            code = channel.returncode
            channel.close()
        except Exception as error:  # the websocket library raises many types
            text = " ".join(str(getattr(error, "reason", None) or error).split())
            # The websocket's error contains the whole response, with the API server's message as JSON.
            message = re.search(r'"message":"([^"]*)"', text)
            raise CommandFailed(f"exec in pod {pod}: {message.group(1) if message else text}") from error
        if code != 0:
            raise CommandFailed(f"exec in pod {pod}: {argv[0]} ended with {code}: {str(err).strip()}", code)
        return str(out)
