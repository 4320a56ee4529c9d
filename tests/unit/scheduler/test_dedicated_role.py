# SPDX-License-Identifier: GPL-3.0-or-later
"""The role's dedicated mode by real ansible-playbook, on a real API server with its real controllers.

Only the nodes are simulated: a thread binds the Deployment's pods, sets them ready, renews the lease for one of them,
and completes deletions.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from dedicated_kit import LEDGER, NAME, VARIABLES, node
from gpushare.extender import ledger
from own_cluster import controllers, run_playbook, until
from real_apiserver import MERGE, Refused, own_api_server

CONTROLLERS = ["deployment", "replicaset", "garbage-collector", "namespace", "resourcequota", "disruption"]
NODES = ("cp1", "gpu1", "gpu2")
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"


class Cluster(threading.Thread):
    """An API server, its controllers, and nodes on which every pod is ready at once but for those of a broken image."""

    def __init__(self, api):
        super().__init__(daemon=True)
        self.api, self.broken, self.leading, self._over = api, "\0", True, threading.Event()
        for name in NODES:
            self.api.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": node(name)["labels"]}})
        self.start()

    def end(self):
        self._over.set()
        self.join(10)

    def run(self):
        while not self._over.wait(0.2):
            # Objects may disappear between two requests.
            with contextlib.suppress(Refused, OSError, KeyError):
                self._step()

    def _step(self):
        pods = self.api.request("GET", f"/api/v1/pods?labelSelector=app.kubernetes.io/name={NAME}")["items"]
        for pod in pods:
            metadata, spec = pod["metadata"], pod["spec"]
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
            if metadata.get("deletionTimestamp"):
                self.api.request("DELETE", path, {"gracePeriodSeconds": 0})
            elif not spec.get("nodeName"):
                free = sorted(set(NODES) - {each["spec"].get("nodeName") for each in pods})
                target = {"apiVersion": "v1", "kind": "Node", "name": free[0]}
                binding = {"apiVersion": "v1", "kind": "Binding", "target": target}
                self.api.request("POST", f"{path}/binding", {**binding, "metadata": {"name": metadata["name"]}})
                return
            elif self.broken not in spec["containers"][1]["image"] and not _ready(pod):
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": _now()}
                status = {"phase": "Running", "conditions": [ready]}
                self.api.request("PATCH", f"{path}/status", {"status": status}, MERGE)
        leaders = [each for each in pods if _ready(each) and not each["metadata"].get("deletionTimestamp")]
        if self.leading and leaders:
            self._lead(leaders[0]["metadata"])

    def _lead(self, metadata):
        self.lease(NAME, metadata["namespace"], holderIdentity=f"{metadata['name']}_0b1c", renewTime=_now())

    def lease(self, name, namespace, annotations=None, **spec):
        metadata = {"name": name, "namespace": namespace, "annotations": annotations or {}}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        self.api.apply(lease)
        return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"

    # ----------------------------------------------------------------- the role

    def play(self, folder, *words, role="scheduler", **variables):
        """Run the role by ansible-playbook with these variables."""
        given = {
            **VARIABLES,
            "scheduler_step": "cluster",
            "scheduler_detection": {"mode": "dedicated"},
            "scheduler_version": "",
            "scheduler_extender_timeout": 30,
            "scheduler_dedicated_image": "registry.k8s.io/kube-scheduler",
            "scheduler_dedicated_timeout": 120,
            "gpu_kubeconfig": str(self.api.kubeconfig),
            **variables,
        }
        task = {"name": "Run the role", "ansible.builtin.include_role": {"name": f"kubegpu.share.{role}"}}
        play = {"name": "Play", "hosts": "localhost", "gather_facts": False, "vars": given, "tasks": [task]}
        return run_playbook(folder, [play], *words)

    # ----------------------------------------------------------------- observation

    def exists(self, path):
        return self.api.ask("GET", path)[0] == 200

    def configurations(self, namespace=NAME):
        found = self.api.request("GET", f"/api/v1/namespaces/{namespace}/configmaps")["items"]
        return {each["metadata"]["name"] for each in found if each["metadata"]["name"].startswith(f"{NAME}-")}

    def everything(self):
        """Return all objects that the mode could leave, by name and label."""
        kinds = "ns,sa,cm,quota,deploy,rs,po,pdb,lease,role,rolebinding,clusterrole,clusterrolebinding"
        kinds += ",validatingadmissionpolicy,validatingadmissionpolicybinding"
        done = self.api.kubectl("get", kinds, "--all-namespaces", "--output=json")
        found = json.loads(done.stdout)["items"]
        return {
            f"{each['kind']} {each['metadata'].get('namespace', '')}/{each['metadata']['name']}"
            for each in found
            if NAME in each["metadata"]["name"] or "gpushare" in json.dumps(each["metadata"].get("labels", {}))
        }

    def ledger(self, namespace=LEDGER):
        """Create the ledger that an extender leaves."""
        return self.lease(ledger.NAME, namespace, {contract.LEDGER: "[]"})

    def uninstall(self, folder, **variables):
        """Run the last step of an uninstall."""
        gone = {"gpushare_component": "extender", "gpushare_state": "absent", "gpushare_image_delivery": "registry"}
        done = self.play(folder, role="gpushare", **gone, **variables)
        assert done.rc == 0, done.text
        return done


def _ready(pod):
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


def _now():
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@pytest.fixture(scope="module")
def cluster():
    with own_api_server() as api, controllers(api, *CONTROLLERS, "serviceaccount"):
        made = Cluster(api)
        yield made
        made.end()


def test_install_change_failure_and_removal(cluster, tmp_path):
    """From nothing to a running scheduler, through changes that work and changes that don't, and back to nothing."""
    before = cluster.everything()
    assert before == set()

    made = cluster.play(tmp_path)
    assert made.rc == 0, made.text
    assert cluster.exists(f"{POLICIES}/{NAME}")
    first = cluster.configurations()
    assert len(first) == 1

    # A change whose pods don't come up: one of the old ones goes on, with a configuration that is still there.
    cluster.broken = "broken"
    change = {"scheduler_name": "cards", "scheduler_extender_image": "localhost/broken:1"}
    failed = cluster.play(tmp_path, scheduler_dedicated_timeout=10, **change)
    assert failed.rc == 2 and "not in effect within 10 s" in failed.text, failed.text
    pods = cluster.api.request("GET", f"/api/v1/namespaces/{NAME}/pods")["items"]
    old = [each for each in pods if _ready(each)]
    assert len(old) == 1 and "broken" not in json.dumps(old[0]["spec"])
    assert first < cluster.configurations()

    bookings = cluster.ledger()
    gone = cluster.play(tmp_path, scheduler_state="absent")
    assert gone.rc == 0, gone.text
    assert cluster.everything() == {f"Namespace /{LEDGER}"} and cluster.exists(bookings), (
        "other modes may use the ledger"
    )
    assert cluster.uninstall(tmp_path).changed == 1
    assert cluster.everything() == before


@pytest.mark.long
def test_a_renamed_scheduler_leaves_no_configuration_and_is_removed_once(cluster, tmp_path):
    assert cluster.play(tmp_path).rc == 0
    first = cluster.configurations()
    renamed = cluster.play(tmp_path, scheduler_name="cards")
    assert renamed.rc == 0, renamed.text
    second = cluster.configurations()
    assert len(second) == 1 and second != first, "the old one has gone with its pods"
    for changed in (True, False):
        gone = cluster.play(tmp_path, scheduler_state="absent")
        assert (gone.rc, gone.changed > 0) == (0, changed), gone.text
    cluster.uninstall(tmp_path)
    until(lambda: cluster.everything() == set())


@pytest.mark.long
def test_existing_namespace_stays_unchanged(cluster, tmp_path):
    name = cluster.api.namespace("theirs", {"team": "a"})
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "pull", "namespace": name}}
    cluster.api.apply(theirs)
    until(lambda: cluster.exists(f"/api/v1/namespaces/{name}/serviceaccounts/default"))

    def shape():
        metadata = cluster.api.request("GET", f"/api/v1/namespaces/{name}")["metadata"]
        return {key: metadata.get(key) for key in ("labels", "annotations", "resourceVersion")}

    before = shape()
    made = cluster.play(tmp_path, scheduler_dedicated_namespace=name)
    assert made.rc == 0, made.text
    assert len(cluster.configurations(name)) == 1
    assert cluster.exists(f"{POLICIES}/{NAME}")
    unguarded = cluster.play(tmp_path, scheduler_dedicated_namespace=name, scheduler_dedicated_admission="none")
    assert (unguarded.rc, unguarded.changed) == (0, 1), unguarded.text
    assert not cluster.exists(f"{POLICIES}/{NAME}")
    gone = cluster.play(tmp_path, scheduler_dedicated_namespace=name, scheduler_state="absent")
    assert gone.rc == 0, gone.text
    assert shape() == before
    assert cluster.exists(f"/api/v1/namespaces/{name}/secrets/pull")
    cluster.uninstall(tmp_path)
    until(lambda: cluster.everything() == set())


@pytest.mark.long
def test_ledger_in_an_existing_namespace(cluster, tmp_path):
    """The role observes the namespace itself, and claims no existing one."""
    name = cluster.api.namespace("ledger", {"team": "b"})
    path = f"/api/v1/namespaces/{name}"
    before = cluster.api.request("GET", path)["metadata"]
    made = cluster.play(tmp_path, gpushare_namespace=name)
    assert made.rc == 0, made.text
    assert "kubegpu.share/created" not in cluster.api.request("GET", path)["metadata"]["annotations"]
    again = cluster.play(tmp_path, gpushare_namespace=name)
    assert (again.rc, again.changed) == (0, 0), again.text
    bookings, theirs = cluster.ledger(name), cluster.lease("theirs", name)
    gone = cluster.play(tmp_path, gpushare_namespace=name, scheduler_state="absent")
    assert gone.rc == 0, gone.text
    assert cluster.exists(bookings)
    cluster.uninstall(tmp_path, gpushare_namespace=name)
    assert not cluster.exists(bookings) and cluster.exists(theirs)
    after = cluster.api.request("GET", path)["metadata"]
    assert (after["labels"], after.get("annotations")) == (before["labels"], before.get("annotations"))
    until(lambda: cluster.everything() == set())


@pytest.mark.long
def test_lease_and_policy_are_verified_beyond_ready_pods(cluster, tmp_path):
    """Neither that one of them leads, nor that the policy guards."""
    try:
        cluster.leading = False
        idle = cluster.play(tmp_path, scheduler_replicas=1, scheduler_dedicated_timeout=20)
        assert idle.rc == 2 and "is held by nobody" in idle.text, idle.text
        cluster.leading = True
        # Another client narrowed the binding, in a field that isn't ours.
        narrowed = {"spec": {"matchResources": {"namespaceSelector": {"matchLabels": {"only": "here"}}}}}
        cluster.api.request("PATCH", f"{POLICIES.replace('policies', 'policybindings')}/{NAME}", narrowed, MERGE)
        time.sleep(3)
        passed = cluster.play(tmp_path, scheduler_replicas=1, scheduler_dedicated_timeout=20)
        assert passed.rc == 2 and "isn't in effect" in passed.text and "is accepted" in passed.text, passed.text
    finally:
        cluster.leading = True
        gone = cluster.play(tmp_path, scheduler_state="absent")
    assert gone.rc == 0, gone.text
