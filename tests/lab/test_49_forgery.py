# SPDX-License-Identifier: GPL-3.0-or-later
"""A tenant who writes the servers' annotations on his pods keeps no other tenant's pods from starting."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Iterator

import pytest
from _lab import ApiError, JsonObject, Lab, until
from _pods import MERGE, body, container, delete_pods, is_announced, restart_plugin, wait_empty, wait_settled

from lab.shell import in_background

# Tolerated by the device plugin, so that it comes back to a tainted node.
TAINT = "nvidia.com/gpu"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces"
CLAIM, INDEX = "kubegpu.share/claim", "ALIYUN_COM_GPU_MEM_IDX"
SECONDS = 600
POLICY = "'gpushare-annotations'"


@dataclasses.dataclass(frozen=True)
class Tenant:
    """A user with the rights of ``edit`` in one namespace, and one node that only his pods tolerate."""

    lab: Lab
    user: str
    node: str

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.user}/pods"

    def pod(self, name: str, units: int) -> JsonObject:
        tolerations = [{"key": TAINT, "operator": "Equal", "value": self.user, "effect": "NoSchedule"}]
        return body(name, container(self.lab, units), node=self.node, tolerations=tolerations)

    def call(self, method: str, path: str, wanted: JsonObject, kind: str = "application/json") -> JsonObject:
        return self.lab.api.call(method, path, wanted, kind, user=self.user)


@contextlib.contextmanager
def tenant(lab: Lab, user: str, node: str) -> Iterator[Tenant]:
    path = f"/api/v1/nodes/{node}"
    before = lab.api.node(node)["spec"].get("taints") or []
    taint = {"key": TAINT, "value": user, "effect": "NoSchedule"}
    with lab.api.namespace(user):
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
        binding = {"metadata": {"name": user}, "roleRef": role, "subjects": [subject]}
        lab.api.call("POST", f"{RBAC}/{user}/rolebindings", binding)
        lab.api.call("PATCH", path, {"spec": {"taints": [*before, taint]}}, MERGE)
        try:
            yield Tenant(lab, user, node)
        finally:
            lab.api.call("PATCH", path, {"spec": {"taints": before or None}}, MERGE)


@pytest.fixture(scope="module")
def tenants(lab: Lab) -> Iterator[tuple[Tenant, Tenant]]:
    """Two tenants, each with a node of his own."""
    for node in lab.gpu_nodes[:2]:
        wait_empty(lab, node)
    first, second = lab.gpu_nodes[:2]
    with tenant(lab, "lab-forger", first) as forger, tenant(lab, "lab-honest", second) as honest:
        yield forger, honest


class Forger:
    """Writes claims on another tenant's cards, and other cards on his own running pod, one after the other."""

    def __init__(self, forger: Tenant, victim: str) -> None:
        self._forger = forger
        cards = [card["index"] for card in forger.lab.cards(victim)]
        self._units = max(int(card["units"]) for card in forger.lab.cards(victim))
        self._claims = [json.dumps({"node": victim, "cards": [index], "victims": []}) for index in cards]
        self.refused, self.accepted = 0, list[str]()

    def prepare(self) -> None:
        """Create a pod that runs, and one that no node of the forger can hold."""
        wanted = [self._forger.pod("running", 1), self._forger.pod("waiting", self._units)]
        wanted[1]["spec"]["nodeSelector"] = {"lab-nowhere": "true"}
        for one in wanted:
            self._forger.call("POST", self._forger.pods, one)
        wait_settled(self._forger.lab, self._forger.user, ["running"])

    def tries(self) -> Iterator[tuple[str, str, JsonObject, str]]:
        """Endless requests: method, path, body, content type."""
        pods, number = self._forger.pods, itertools.count()
        for claim in itertools.cycle(self._claims):
            forged = {"annotations": {CLAIM: claim}, "labels": {CLAIM: "true"}}
            pod = self._forger.pod(f"claim-{next(number)}", self._units)
            pod["metadata"] |= forged
            yield "POST", pods, pod, "application/json"
            yield "PATCH", f"{pods}/waiting", {"metadata": forged}, MERGE
            for value in ("1", "99", None):
                yield "PATCH", f"{pods}/running", {"metadata": {"annotations": {INDEX: value}}}, MERGE

    def run(self, stop: threading.Event) -> None:
        for method, path, wanted, kind in self.tries():
            if stop.is_set():
                return
            try:
                self._forger.call(method, path, wanted, kind)
            except ApiError as error:
                if error.status == 403 and POLICY in str(error):
                    self.refused += 1
                else:
                    self.accepted.append(f"{method} {path}: {error}")
            else:
                self.accepted.append(f"{method} {path}")


def full_node(lab: Lab, honest: Tenant, round_: int) -> list[str]:
    """Fill every card of a tenant's node with one pod each; return their names."""
    wanted = [honest.pod(f"whole-{round_}-{card['index']}", int(card["units"])) for card in lab.cards(honest.node)]
    for one in wanted:
        honest.call("POST", honest.pods, one)
    names = [one["metadata"]["name"] for one in wanted]
    wait_settled(lab, honest.user, names)
    return names


@pytest.mark.long
def test_forged_claims_and_indices_keep_no_pod_from_starting(lab: Lab, tenants: tuple[Tenant, Tenant]) -> None:
    """For ten minutes, while the device plugins restart."""
    by, honest = tenants
    cards = {tenant.node: len(lab.cards(tenant.node)) for tenant in tenants}
    forger = Forger(by, honest.node)
    forger.prepare()
    try:
        stop = threading.Event()
        with in_background(lambda: forger.run(stop), stop, 60):
            end, rounds = time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                for tenant in tenants:
                    restart_plugin(lab, tenant.node)
                    until(
                        lambda one=tenant: is_announced(lab, one.node, cards[one.node]), f"{tenant.node} announces", 90
                    )
                names = full_node(lab, honest, rounds)
                delete_pods(lab, honest.user, names)
                rounds += 1
        assert forger.accepted == [] and forger.refused > 100 and rounds > 2, (forger.refused, rounds)
        assert lab.api.pod(by.user, "running")["metadata"]["annotations"][INDEX] != "99"
    finally:
        delete_pods(lab, by.user, ["running", "waiting"])


def test_a_tenants_forged_annotations_are_refused(lab: Lab, tenants: tuple[Tenant, Tenant]) -> None:
    by, honest = tenants
    forger = Forger(by, honest.node)
    forger.prepare()
    try:
        # One of each.
        for method, path, wanted, kind in itertools.islice(forger.tries(), 5):
            with pytest.raises(ApiError, match=POLICY) as refused:
                by.call(method, path, wanted, kind)
            assert refused.value.status == 403
        delete_pods(lab, honest.user, full_node(lab, honest, 0))
    finally:
        delete_pods(lab, by.user, ["running", "waiting"])
