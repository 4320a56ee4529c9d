# SPDX-License-Identifier: GPL-3.0-or-later
"""A load of short-lived pods, and an auditor that sums up each card at every event of the API.

The nodes exist only in the API, and their cards only in an annotation: schedulers and extenders do all their work, and
no container has to be started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import urllib3
from _lab import RESOURCE, Api, ApiError, JsonObject, Lab, indices_of, until
from _pods import MERGE, body, shares_of

from lab.shell import in_background

LABEL = "lab-cards"
# So many pods may wait: more would take minutes to be bound once no more come.
CROWD = 150
# Where the extenders write what they book.
LEDGER = "/apis/coordination.k8s.io/v1/namespaces/gpushare-system/leases/gpushare-ledger"
SIZES = {"lab-cards-1": (16, 16, 16, 16), "lab-cards-2": (16, 8, 24), "lab-cards-3": (8, 8)}


class Auditor:
    """Sum up what the pods' annotations book of each card at any moment; ``wrong`` lists impossible states."""

    def __init__(self, api: Api, sizes: dict[str, dict[int, int]]) -> None:
        self._api, self._sizes, self._stop = api, sizes, threading.Event()
        self._guard = threading.Lock()
        self._pods: dict[str, JsonObject] = {}
        self.used = {node: dict.fromkeys(cards, 0) for node, cards in sizes.items()}
        self.wrong: list[str] = []
        self.events = 0
        self.failed = ""

    def _take(self, kind: str, pod: JsonObject) -> None:
        uid = pod["metadata"]["uid"]
        before = self._pods.pop(uid, None)
        if before is not None:
            self._add(before, -1)
        # kubelet has let go of what has ended; what only is about to end still holds its memory.
        if kind != "DELETED" and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            self._pods[uid] = pod
            self._add(pod, 1)

    def _add(self, pod: JsonObject, sign: int) -> None:
        node, name = pod["spec"].get("nodeName", ""), pod["metadata"]["name"]
        wanted = any(
            RESOURCE in container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]
        )
        if node not in self._sizes or not wanted:
            return
        shares = shares_of(pod) if indices_of(pod) else {}
        if not shares and sign > 0:
            self.wrong.append(f"{name} is on {node} without a card")
        for index, units in shares.items():
            held = self.used[node][index] = self.used[node].get(index, 0) + sign * units
            size = self._sizes[node].get(index, 0)
            if sign > 0 and held > size:
                self.wrong.append(f"{name}: card {index} of {node} has {held} of {size}")

    def _follow(self) -> None:
        try:
            for kind, pod in self._api.watch("/api/v1/pods", self._stop):
                with self._guard:
                    self._take(kind, pod)
                    self.events += 1
        except Exception as error:  # whatever it is, nothing is recorded any more
            self.failed = repr(error)

    def following(self) -> contextlib.AbstractContextManager[None]:
        return in_background(self._follow, self._stop, 10)

    def now(self) -> dict[str, dict[int, int]]:
        with self._guard:
            return {node: dict(cards) for node, cards in self.used.items()}

    def assert_nothing_wrong(self) -> None:
        assert not self.failed, self.failed
        assert self.wrong == []


class Load:
    """Create pods at a rate, some with two cards, and delete them so that memory is nearly always a little short.

    :param rate: pods per second.
    """

    def __init__(self, lab: Lab, namespace: str, auditor: Auditor, rate: float) -> None:
        self._lab, self._namespace, self._auditor, self._rate = lab, namespace, auditor, rate
        self._apis = [lab.api_of(lab.control_planes[0], 10) for _number in range(2)]
        self._stop, self._random = threading.Event(), random.Random(7)
        self.made = 0
        self._waiting = 0
        self.bound: set[str] = set()
        self.writers: set[str] = set()
        self.failed = ""

    def _body(self, number: int) -> JsonObject:
        units, annotations = self._random.randint(1, 6), {}
        if number % 8 == 0:
            units, annotations = 2 * units, {"kubegpu.share/card-count": "2"}
        one = {
            "name": "c0",
            "image": "localhost/none:0",
            "resources": {"limits": {RESOURCE: str(units)}, "requests": {"cpu": "0"}},
        }
        return body(f"load-{number}", one, annotations=annotations, nodeSelector={LABEL: "true"})

    def _make(self) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        for number in itertools.count():
            if self._stop.wait(1 / self._rate):
                return
            if self._waiting > CROWD:
                continue
            with contextlib.suppress(OSError, urllib3.exceptions.HTTPError, ApiError):
                self._apis[0].call("POST", path, self._body(number))
                self.made += 1

    def _reap(self) -> None:
        """Delete pods faster the fuller the cards are, but never so many that everything fits."""
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        capacity = sum(sum(sizes) for sizes in SIZES.values())
        while not self._stop.wait(0.5):
            with contextlib.suppress(OSError, urllib3.exceptions.HTTPError, ApiError):
                pods = self._apis[1].items(path)
                bound = [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName")]
                self.bound |= set(bound)
                self._waiting = len(pods) - len(bound)
                held = sum(sum(cards.values()) for node, cards in self._auditor.now().items() if node in SIZES)
                if held > 0.8 * capacity:
                    for name in self._random.sample(bound, max(1, len(bound) // 8)):
                        self._apis[1].call("DELETE", f"{path}/{name}")
                self.writers.add(str(self._apis[1].call("GET", LEDGER)["spec"].get("holderIdentity", "")))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.failed = repr(error)

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        make, reap = partial(self._guarded, self._make), partial(self._guarded, self._reap)
        with in_background(make, self._stop, 30), in_background(reap, self._stop, 30):
            yield

    def waiting(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self._lab.api.pods(self._namespace) if "nodeName" not in pod["spec"]]

    def all_bound(self, seconds: float) -> None:
        """Stop creating pods, and wait until every pending one is bound as others are deleted."""
        path = f"/api/v1/namespaces/{self._namespace}/pods"

        def none_waits() -> bool:
            waiting = self.waiting()
            if waiting:
                bound = [pod["metadata"]["name"] for pod in self._lab.api.pods(self._namespace)]
                for name in [one for one in bound if one not in waiting][:3]:
                    self._lab.api.delete(f"{path}/{name}")
            return not waiting

        until(none_waits, "no pod waits for a node", seconds, 0.5)


@contextlib.contextmanager
def nodes(lab: Lab) -> Iterator[dict[str, dict[int, int]]]:
    """Create nodes with cards and without a kubelet; return the sizes of their cards in GiB."""
    for name, sizes in SIZES.items():
        cards = [
            {
                "index": index,
                "uuid": f"GPU-{name}-{index}",
                "minor": index,
                "memoryMiB": units * 1024,
                "units": units,
                "healthy": True,
                "model": "Nobody's",
            }
            for index, units in enumerate(sizes)
        ]
        metadata = {
            "name": name,
            "labels": {LABEL: "true"},
            "annotations": {"kubegpu.share/cards": json.dumps(cards, separators=(",", ":"))},
        }
        lab.api.delete(f"/api/v1/nodes/{name}")
        lab.api.call("POST", "/api/v1/nodes", {"metadata": metadata})
        capacity = {"pods": "500", "cpu": "64", "memory": "64Gi", RESOURCE: str(sum(sizes))}
        status = {"status": {"capacity": capacity, "allocatable": capacity}}
        lab.api.call("PATCH", f"/api/v1/nodes/{name}/status", status, MERGE)
    try:
        yield {name: dict(enumerate(sizes)) for name, sizes in SIZES.items()}
    finally:
        for name in SIZES:
            lab.api.delete(f"/api/v1/nodes/{name}")


class Pulse:
    """Create a pod of one unit on real nodes every few seconds, and record how long each waits to run."""

    def __init__(self, lab: Lab, namespace: str, pause: float) -> None:
        self._lab, self._namespace, self._pause = lab, namespace, pause
        self._api, self._stop = lab.api_of(lab.control_planes[0], 10), threading.Event()
        self.waits: list[float] = []
        # kubelet's messages of pods that came to it while it had no plugin; it doesn't take such a pod later either.
        self.rejected: list[str] = []
        self.failed = ""

    def _beat(self) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        image = self._lab.state["base_image"]
        for number in itertools.count():
            if self._stop.wait(self._pause):
                return
            name = f"pulse-{number}"
            one = {
                "name": "c0",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", "3600"],
                "resources": {"limits": {RESOURCE: "1"}},
            }
            node = self._lab.gpu_nodes[number % len(self._lab.gpu_nodes)]
            self._api.call("POST", path, body(name, one, node=node))
            began = time.monotonic()

            def decided(name: str = name) -> JsonObject | None:
                pod = self._api.call("GET", f"{path}/{name}")
                assigned = pod["metadata"].get("annotations", {}).get("ALIYUN_COM_GPU_MEM_ASSIGNED")
                phase = pod["status"].get("phase")
                return pod if phase == "Failed" or (phase == "Running" and assigned == "true") else None

            pod: JsonObject = until(decided, f"{name} on {node}", 90, 0.2)
            if pod["status"]["phase"] == "Failed":
                self.rejected.append(f"{pod['status'].get('reason')}: {pod['status'].get('message')}")
            else:
                self.waits.append(time.monotonic() - began)
            self._api.call("DELETE", f"{path}/{name}")

    def _guarded(self) -> None:
        try:
            self._beat()
        except Exception as error:
            self.failed = repr(error)

    def beating(self) -> contextlib.AbstractContextManager[None]:
        return in_background(self._guarded, self._stop, 100)
