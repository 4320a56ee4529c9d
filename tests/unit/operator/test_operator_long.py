# SPDX-License-Identifier: GPL-3.0-or-later
"""The operator by the real ansible-operator: pods that are killed, two versions, 5,000 nodes, and its rights."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_dedicated_role
import yaml
from operator_kit import OPENSHIFT, OPERATOR, RESOURCES, rules_used, running
from own_cluster import controllers
from real_apiserver import MERGE

pytestmark = pytest.mark.long
# How many pods are at least killed until a run is complete.
FEWEST = 5
DRIVER = "/apis/apps/v1/namespaces/gpushare-system/daemonsets/gpushare-dra-driver"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def test_killed_at_the_steps_of_a_run():
    """And of an uninstall: the next pod makes what is missing, and nothing twice."""
    with running() as operator:
        operator.create()
        kills = killed_until(operator, lambda: operator._well(operator.conditions()))
        assert kills >= FEWEST
        named = operator.cluster.named()
        assert named["daemonsets"] == {"gpushare-dra-driver"} and named["deployments"] == {"gpushare-dra-templates"}
        pod = operator.start("settled")
        operator.until(lambda: pod.metrics().get("kubegpu_operator_checks_total", 0) >= 1)
        assert "kubegpu_operator_changes_total" not in pod.metrics(), "what the killed pods left was complete"
        operator.until_well()
        pod.kill()
        operator.api.request("DELETE", f"{RESOURCES}/cluster")
        assert killed_until(operator, lambda: operator.get() is None) >= FEWEST
        assert operator.left() == {}
        assert operator.refusals() == []


def killed_until(operator, over):
    """Start pods, and kill each after one more request that changes something than the last, until all is done.

    The objects that are there aren't written again, so each is killed at another step.

    :returns: how many were killed.
    """
    kills = 0
    while not over():
        assert kills < 60, "it never ends"
        pod = operator.start(f"killed-{kills}")
        goal = operator.writes() + 1 + kills
        operator.until(lambda goal=goal: over() or operator.writes() >= goal)
        pod.kill()
        kills += 1
    return kills


def test_a_resource_that_is_deleted_during_its_first_run_leaves_nothing():
    """Its pods never become ready, so the run waits for them, ten minutes long."""
    with running() as operator:
        operator.cluster.has_ready_pods = lambda: None
        operator.start()
        operator.create(gpushareWaitTimeout=600)
        operator.until(lambda: "daemonsets" in operator.cluster.named())
        operator.api.request("DELETE", f"{RESOURCES}/cluster")
        operator.until(lambda: operator.get() is None)
        assert operator.left() == {}
        assert operator.refusals() == []


def test_what_somebody_has_deleted_or_changed_comes_back():
    with running() as operator:
        pod = operator.start()
        operator.create()
        operator.until_well()
        operator.until(lambda: pod.metrics().get("kubegpu_operator_checks_total", 0) >= 1)
        before = operator.api.request("GET", DRIVER)["metadata"]["uid"]
        operator.api.request("DELETE", DRIVER)
        operator.until(lambda: exists(operator.api, DRIVER, before))
        operator.until_well()
        # A run that changes nothing.
        operator.until(lambda: pod.metrics()["kubegpu_operator_runs_succeeded_total"] == 4)
        operator.until(lambda: pod.metrics()["kubegpu_operator_checks_total"] >= 2)
        first = pod.metrics()
        operator.api.request("PATCH", "/api/v1/nodes/gpu1", {"metadata": {"labels": {"x": "y"}}}, MERGE)
        operator.until(lambda: pod.metrics()["kubegpu_operator_runs_succeeded_total"] == 5)
        spent = pod.metrics()["kubegpu_operator_cpu_seconds_total"] - first["kubegpu_operator_cpu_seconds_total"]
        print(f"{spent:.1f} s of processor time for a run that changes nothing")
        assert spent <= 5
        # What site.yml changes nowhere else: the label of a node, and a rule of a server's account.
        operator.api.request("PATCH", "/api/v1/nodes/gpu1", {"metadata": {"labels": {"gpushare": None}}}, MERGE)
        operator.until(lambda: operator.cluster.labels().get("gpushare") == "dra")
        role = f"{RBAC}/clusterroles/gpushare:dra-driver"
        rules = operator.api.request("GET", role)["rules"]
        operator.api.request("PATCH", role, {"rules": []}, MERGE)
        operator.until(lambda: operator.api.request("GET", role)["rules"] == rules)
        operator.until_well()
        assert operator.refusals() == []


def exists(api, path, former):
    """Whether an object exists, and isn't a former one of its name."""
    status, text = api.ask("GET", path)
    metadata = json.loads(text)["metadata"] if status == 200 else {}
    return bool(metadata) and metadata["uid"] != former and "deletionTimestamp" not in metadata


def test_upgrade_of_the_operator_between_two_versions():
    """Both pods run at once; the new one takes over, and runs once in full."""
    former = OPERATOR.parent / ".cache" / "operator-former"
    shutil.rmtree(former, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "config")
    shutil.copytree(OPERATOR, former, ignore=ignored)
    package = former / "src" / "kubegpu_operator" / "__init__.py"
    package.write_text(package.read_text().replace('__version__ = "1', '__version__ = "0'))
    try:
        with running() as operator:
            old = operator.start("old", former)
            operator.create()
            operator.until_well()
            operator.until(lambda: old.metrics().get("kubegpu_operator_checks_total", 0) >= 1)
            new = operator.start("new")
            operator.until(lambda: "attempting to acquire leader lease" in new.text())
            checks = old.metrics()["kubegpu_operator_checks_total"]
            operator.until(lambda: old.metrics()["kubegpu_operator_checks_total"] >= checks + 2)
            assert "kubegpu_operator_checks_total" not in new.metrics(), "one of them leads"
            before = deployed(operator)
            old.kill()
            operator.until(lambda: new.metrics().get("kubegpu_operator_checks_total", 0) >= 1)
            assert new.metrics()["kubegpu_operator_runs_succeeded_total"] == 1
            assert deployed(operator) == before
            operator.until_well()
            assert operator.refusals() == []
    finally:
        shutil.rmtree(former, ignore_errors=True)


def deployed(operator):
    """The versions of all objects that runs deploy."""
    paths = ("apps/v1/daemonsets", "apps/v1/deployments", "rbac.authorization.k8s.io/v1/clusterroles")
    label = "?labelSelector=app.kubernetes.io/part-of=gpushare"
    return {
        item["metadata"]["uid"]: item["metadata"].get("generation") or item["metadata"]["resourceVersion"]
        for path in paths
        for item in operator.api.request("GET", f"/apis/{path}{label}")["items"]
    }


def test_processor_time_with_5000_nodes():
    with running() as operator:

        def make(number):
            labels = {f"label-{at}.example.org/{number}": str(at) for at in range(20)}
            metadata = {"name": f"node-{number}", "labels": labels, "annotations": {"a": "b" * 400}}
            operator.api.request("POST", "/api/v1/nodes", {"metadata": metadata})

        pod = operator.start()
        operator.create()
        operator.until_well()
        operator.until(lambda: pod.metrics().get("kubegpu_operator_checks_total", 0) >= 1)
        # The played kubelets would ask for a pod of each node.
        operator.cluster.has_ready_pods = lambda: None
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(make, range(5000)))
        operator.until(lambda: pod.metrics()["kubegpu_operator_nodes"] == 5001)
        number = pod.metrics()["kubegpu_operator_checks_total"]
        operator.until(lambda: pod.metrics()["kubegpu_operator_checks_total"] > number, 240)
        before = pod.metrics()
        number = before["kubegpu_operator_checks_total"]
        operator.until(lambda: pod.metrics()["kubegpu_operator_checks_total"] >= number + 3)
        after = pod.metrics()
        calls = after["kubegpu_operator_checks_total"] - number
        spent = (after["kubegpu_operator_cpu_seconds_total"] - before["kubegpu_operator_cpu_seconds_total"]) / calls
        assert after["kubegpu_operator_nodes"] == 5001 and spent <= 1, f"{spent} s where nothing has changed"
        # Nodes come as pages.
        lists = [one["requestURI"] for one in operator.audit() if one["verb"] == "list"]
        nodes = [uri for uri in lists if uri.startswith("/api/v1/nodes?")]
        assert nodes and all("limit=" in uri for uri in nodes)
        assert not [one for one in operator.audit() if one["verb"] == "watch" and "/pods" in one["requestURI"]]
        # A run that changes nothing.
        runs = after["kubegpu_operator_runs_succeeded_total"]
        operator.api.request("PATCH", "/api/v1/nodes/gpu1", {"metadata": {"labels": {"x": "y"}}}, MERGE)
        operator.until(lambda: pod.metrics()["kubegpu_operator_runs_succeeded_total"] > runs)
        last = pod.metrics()
        beside = (last["kubegpu_operator_checks_total"] - after["kubegpu_operator_checks_total"]) * spent
        ran = last["kubegpu_operator_cpu_seconds_total"] - after["kubegpu_operator_cpu_seconds_total"] - beside
        print(f"5,000 nodes: {spent:.2f} s of processor time without, {ran:.1f} s with a run of Ansible")
        assert ran <= 5


class Schedulers(test_dedicated_role.Cluster):
    """The dedicated scheduler's pods, beside nodes that exist."""

    def __init__(self, api):
        threading.Thread.__init__(self, daemon=True)
        self.api, self.broken, self.leading, self._over = api, "\0", True, threading.Event()
        self.start()


CONTROLLERS = ("deployment", "replicaset", "disruption", "resourcequota")


# Needed only where the namespace was there before and stays: else the ledger goes with it.
OF_A_NAMESPACE_THAT_STAYS = {
    "apiGroups": ["coordination.k8s.io"],
    "resources": ["leases"],
    "resourceNames": ["gpushare-ledger"],
    "verbs": ["delete"],
}


def granted(api):
    """What the deployed servers are granted: rules, and names of Kubernetes' own roles."""
    label = "?labelSelector=app.kubernetes.io/part-of=gpushare"
    kinds = ("roles", "clusterroles", "rolebindings", "clusterrolebindings")
    found = {kind: api.request("GET", f"{RBAC}/{kind}{label}")["items"] for kind in kinds}
    rules = [rule for kind in kinds[:2] for one in found[kind] for rule in one["rules"]]
    return rules, {one["roleRef"]["name"] for kind in kinds[2:] for one in found[kind]}


def is_granted(rule, rules, bound):
    """Whether a rule of the operator's has only what servers are granted."""
    if rule["verbs"] == ["bind"]:
        return set(rule["resourceNames"]) <= bound
    one = {(group, kind, verb) for group in rule["apiGroups"] for kind in rule["resources"] for verb in rule["verbs"]}
    all_of_them = {
        (group, kind, verb)
        for other in rules
        for group in other["apiGroups"]
        for kind in other["resources"]
        for verb in other["verbs"]
    }
    return one <= all_of_them


def test_each_allocation_from_nothing_to_nothing_and_no_right_too_many():
    with running() as operator:
        api = operator.api
        for name in ("cp1", "gpu2"):
            api.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        pod, rules, bound = operator.start(), [], set()
        metrics = {"gpushareDevicePluginMetrics": True}
        extender = {
            "gpushareExtenderMetrics": True,
            "gpushareAllocation": "extender",
            "schedulerMode": "dedicated",
            "schedulerReplicas": 2,
        }
        for given, server in (
            ({**extender, "schedulerDedicatedTimeout": 120}, "gpushare-device-plugin"),
            ({}, "gpushare-dra-driver"),
        ):
            schedulers = Schedulers(api) if given else None
            # What the device plugin announces while it is there.
            amounts = {"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"} if given else None
            status = {"status": {"capacity": amounts, "allocatable": amounts}}
            api.request("PATCH", "/api/v1/nodes/gpu1/status", status, MERGE)
            with controllers(api, *CONTROLLERS) if given else contextlib.nullcontext():
                try:
                    operator.create(**given, **metrics)
                    operator.until_well(240)
                    assert operator.cluster.named()["daemonsets"] == {server}
                    more, names = granted(api)
                    rules, bound = rules + more, bound | names
                    assert pod.metrics()
                    api.request("DELETE", f"{RESOURCES}/cluster")
                    operator.until(lambda: operator.get() is None, 180)
                finally:
                    if schedulers:
                        schedulers.end()
        assert operator.refusals() == []
        assert operator.left() == {}
        everywhere = yaml.safe_load((OPERATOR / "rights.yml").read_text())
        own = [rule for rule in everywhere if not OPENSHIFT.issuperset(rule["apiGroups"])]
        used = rules_used(own, operator.audit())
        too_many = [
            rule for rule, is_used in zip(own, used, strict=True) if not is_used and not is_granted(rule, rules, bound)
        ]
        assert too_many == [OF_A_NAMESPACE_THAT_STAYS]
        assert pod.runs()
