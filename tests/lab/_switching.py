# SPDX-License-Identifier: GPL-3.0-or-later
"""A load of pods during a switch, and an eye on who gives away each node's cards."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

from _lab import ApiError, JsonObject, Lab, until
from _pods import body, container

from lab.shell import in_background


class Load:
    """A pod every two seconds, each of which has to run, and samples of who gives away the cards.

    :param space: the namespace of the pods.
    :param given_twice: returns the nodes whose cards two servers give away.
    :param units: memory of a card that each pod requests; without it they have no card.
    """

    def __init__(self, lab: Lab, space: str, given_twice: Callable[[], set[str]], units: int = 0) -> None:
        self._lab, self._space, self._given_twice, self._units = lab, space, given_twice, units
        self._stop = threading.Event()
        self.wrong: list[str] = []
        self.made = 0
        # Of them, those that a switch has evicted before they ran.
        self.evicted = 0
        self.samples = 0

    def _sample(self) -> None:
        while not self._stop.wait(0.2):
            with contextlib.suppress(ApiError, OSError):
                self.wrong += [f"{name} is sold twice" for name in self._given_twice()]
                self.samples += 1

    def _make(self) -> None:
        """Create pods, and delete each when it runs."""
        for number in itertools.count():
            if self._stop.wait(2):
                return
            name = f"plain-{number}"
            wanted = body(name, container(self._lab, self._units))
            # No node of a switch is wanted while it is cordoned.
            del wanted["spec"]["tolerations"]
            self._lab.api.call("POST", f"/api/v1/namespaces/{self._space}/pods", wanted)
            try:
                self._settle(name)
            except AssertionError as error:
                self.wrong.append(f"{name}: {error}")
            self._lab.api.delete(f"/api/v1/namespaces/{self._space}/pods/{name}")
            self.made += 1

    def _settle(self, name: str) -> None:
        """Wait until a pod runs, or is gone: one with a card is evicted from a node that is switched."""

        def settled() -> bool:
            pods = [pod for pod in self._lab.api.pods(self._space) if pod["metadata"]["name"] == name]
            if self._units and (not pods or "deletionTimestamp" in pods[0]["metadata"]):
                self.evicted += 1
                return True
            assert pods, f"pod {name} is gone"
            phase = pods[0]["status"].get("phase")
            assert phase == "Running", f"pod {name} is {phase}: {pods[0]['status']}"
            return True

        until(settled, f"pod {name} runs", 60)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with in_background(self._sample, self._stop), in_background(self._make, self._stop):
            yield


def announced(node: JsonObject) -> set[str]:
    """Return the resources of cards of which a node gives some away."""
    free = node["status"].get("allocatable", {})
    prefixes = ("aliyun.com/gpu", "nvidia.com/gpu", "nvidia.com/mig-")
    return {name for name, number in free.items() if name.startswith(prefixes) and str(number) != "0"}
