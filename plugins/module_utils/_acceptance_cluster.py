# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A door: acceptance's view of a cluster."""

from __future__ import annotations

import re
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

try:
    from kubernetes.client import CoreV1Api  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from kubernetes.stream import stream  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:
    # RealKube says what is missing before anything here is called.
    CoreV1Api = stream = None

MANAGER = "kubegpu-acceptance"
EXEC_SECONDS = 30
ACCOUNT_SECONDS = 30


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ApiCluster:
    """A cluster by its API."""

    def __init__(self, kube: RealKube) -> None:
        self._kube = kube

    def nodes(self) -> list[Json]:
        return self._kube.list_all("v1", "Node")

    def pods(self, namespace: str | None = None) -> list[Json]:
        return self._kube.list_all("v1", "Pod", namespace or "")

    def daemonsets(self) -> list[Json]:
        return self._kube.list_all("apps/v1", "DaemonSet")

    def events(self, namespace: str) -> list[Json]:
        return self._kube.list_all("v1", "Event", namespace)

    def namespaces(self, label: str) -> list[str]:
        return [str(one["metadata"]["name"]) for one in self._kube.list_all("v1", "Namespace", label_selector=label)]

    def create_namespace(self, manifest: Json) -> None:
        self._kube.apply(manifest, MANAGER)
        # Pods are refused until the controller manager has made the namespace's service account.
        account = Ref("v1", "ServiceAccount", manifest["metadata"]["name"], "default")
        for _look in Waiting(ACCOUNT_SECONDS, 0.2).looks():
            if self._kube.get(account) is not None:
                return
        raise ShareError(f"{account} isn't there {ACCOUNT_SECONDS} s after its namespace was made")

    def delete_namespace(self, name: str) -> None:
        ref = Ref("v1", "Namespace", "", name)
        found = self._kube.get(ref)
        if found is not None and not found["metadata"].get("deletionTimestamp"):
            self._kube.delete(ref)

    def create_pod(self, manifest: Json) -> None:
        self._kube.apply(manifest, MANAGER)

    def delete_pod(self, namespace: str, name: str) -> None:
        self._kube.delete(Ref("v1", "Pod", namespace, name))

    def execute(self, namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
        """What a command in a container prints, through the API's exec stream."""
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
        except Exception as error:  # the websocket below raises what it likes
            words = " ".join(str(getattr(error, "reason", None) or error).split())
            # The websocket's error carries the whole answer, in which the API server says it in one sentence.
            told = re.search(r'"message":"([^"]*)"', words)
            raise ShareError(f"exec in pod {pod}: {told.group(1) if told else words}") from error
        if code != 0:
            raise ShareError(f"exec in pod {pod}: {argv[0]} ended with {code}: {str(err).strip()}")
        return str(out)
