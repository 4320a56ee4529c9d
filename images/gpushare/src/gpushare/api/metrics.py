# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure requests to the Kubernetes API: a :class:`Kube` that wraps another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gpushare.api.client import Kube, KubeError, Listing, Stream
from gpushare.shared._core.types import JsonObject
from prometheus_client import CollectorRegistry, Counter, Histogram

BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
T = TypeVar("T")


class MeasuredKube:
    """Forwards all requests; one that couldn't be sent, or got no answer, has the code 0."""

    def __init__(self, kube: Kube, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter) -> None:
        self._kube, self._clock = kube, clock
        self._seconds = Histogram(
            "gpushare_api_request_seconds",
            "Time that the Kubernetes API took to answer",
            ["method"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._answers = Counter(
            "gpushare_api_requests",
            "Requests to the Kubernetes API by the HTTP status of the answer; 0 is no answer",
            ["method", "code"],
            registry=registry,
        )

    def get(self, path: str) -> JsonObject:
        return self._measured("GET", lambda: self._kube.get(path))

    def listing(self, path: str) -> Listing:
        # Until the answer begins: its objects take as long as the caller has work with them.
        return self._measured("GET", lambda: self._kube.listing(path))

    def post(self, path: str, body: JsonObject) -> JsonObject:
        return self._measured("POST", lambda: self._kube.post(path, body))

    def put(self, path: str, body: JsonObject) -> JsonObject:
        return self._measured("PUT", lambda: self._kube.put(path, body))

    def patch(self, path: str, body: JsonObject) -> JsonObject:
        return self._measured("PATCH", lambda: self._kube.patch(path, body))

    def delete(self, path: str) -> JsonObject:
        return self._measured("DELETE", lambda: self._kube.delete(path))

    def watch(self, path: str) -> Stream:
        # The duration of a watch is meaningless; whether it was opened isn't.
        return self._measured("WATCH", lambda: self._kube.watch(path))

    def _measured(self, method: str, request: Callable[[], T]) -> T:
        began, code = self._clock(), 0
        try:
            answer = request()
            code = 200
            return answer
        except KubeError as error:
            code = error.status
            raise
        finally:
            self._seconds.labels(method).observe(self._clock() - began)
            self._answers.labels(method, str(code)).inc()
