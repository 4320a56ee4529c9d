# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster whose cards are allocated by claims, with a real API server.

No kubelet runs; the servers' pods are reported as ready in its place.
"""

from __future__ import annotations

import contextlib
import json
import threading

from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from dra_objects import slices_of
from own_cluster import ROOT, run_playbook
from real_apiserver import MERGE, Refused

PLAYBOOKS = ROOT / "playbooks"
GIVEN = {
    "gpushare_allocation": "dra",
    "gpushare_nodes": ["gpu1"],
    "gpushare_image_delivery": "registry",
    "preflight_ignore": ["runtime"],
    "gpushare_wait_timeout": 60,
}
CARDS = [contract.Card(at, f"GPU-5a4d7f2{at}", at, 16384, 16, model="NVIDIA T4") for at in (0, 1)]
# Each with the values of the nodes' label that it selects.
SERVERS = {
    "gpushare-system/daemonsets/gpushare-dra-driver": ("dra",),
    "gpushare-system/deployments/gpushare-dra-templates": ("dra", "true"),
    "gpushare-system/daemonsets/gpushare-device-plugin": ("true",),
}
CLUSTER_WIDE = (
    "resource.k8s.io/v1/deviceclasses",
    "resource.k8s.io/v1/resourceslices",
    "resource.k8s.io/v1/resourceclaimtemplates",
    "admissionregistration.k8s.io/v1/mutatingadmissionpolicies",
    "admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings",
    "admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "rbac.authorization.k8s.io/v1/clusterroles",
    "rbac.authorization.k8s.io/v1/clusterrolebindings",
    "apps/v1/daemonsets",
    "apps/v1/deployments",
)


def owned_by(owner):
    """The metadata of a server's pod: one that nobody owns would be somebody else's, whose namespace stays."""
    about = {key: owner["metadata"][key] for key in ("name", "uid")}
    reference = {"apiVersion": "apps/v1", "kind": owner["kind"], "controller": True, **about}
    return {"labels": owner["spec"]["template"]["metadata"]["labels"], "ownerReferences": [reference]}


class Cluster:
    def __init__(self, server):
        self.server = server
        server.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu1"}})

    def play(self, folder, name, *words, **variables):
        given = {**GIVEN, "gpu_kubeconfig": str(self.server.kubeconfig), **variables}
        return run_playbook(folder, PLAYBOOKS / name, *words, **given)

    def named(self):
        """The names of all objects that are the collection's, by their kind."""
        found = {}
        for path in CLUSTER_WIDE:
            items = self.server.request("GET", f"/apis/{path}")["items"]
            names = {item["metadata"]["name"] for item in items}
            mine = {name for name in names if "gpushare" in name or "gpu-mem" in name or "kubegpu" in name}
            if mine:
                found[path.rpartition("/")[2]] = mine
        return found

    def labels(self, node="gpu1"):
        return self.server.request("GET", f"/api/v1/nodes/{node}")["metadata"].get("labels", {})

    def has_pods(self, path, owner):
        """Have a pod of a server run on each of its nodes while it is deployed; with a driver, the cards in slices."""
        for item in self.server.request("GET", "/api/v1/nodes")["items"]:
            node = item["metadata"]["name"]
            is_its = item["metadata"].get("labels", {}).get("gpushare") in SERVERS[path]
            self.has_pod(path.rpartition("/")[2], owner if is_its else None, node)

    def has_pod(self, server, owner, node):
        at, name = "/api/v1/namespaces/gpushare-system/pods", f"{server}-{node}"
        if owner is None:
            self.server.ask("DELETE", f"{at}/{name}", {"gracePeriodSeconds": 0})
            return
        made = {
            "metadata": {"name": name, **owned_by(owner)},
            # Without a grace it goes at once, whoever deletes it: no kubelet ends it.
            "spec": {
                "nodeName": node,
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "c", "image": "i"}],
            },
        }
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        # A namespace that is on its way out takes no new pod.
        if self.server.ask("POST", at, made)[0] != 201:
            return
        self.server.request("PATCH", f"{at}/{name}/status", {"status": ready}, MERGE)
        for one in slices_of(node, CARDS) if server == "gpushare-dra-driver" else []:
            body = {**one, "metadata": {"name": one["metadata"]["name"]}}
            self.server.ask("POST", "/apis/resource.k8s.io/v1/resourceslices", body)

    def has_ready_pods(self):
        """Report the pods of the servers as ready, as far as they are deployed."""
        for path in SERVERS:
            at = f"/apis/apps/v1/namespaces/{path}"
            with contextlib.suppress(Refused, OSError):
                status, text = self.server.ask("GET", at)
                one = json.loads(text) if status == 200 else None
                self.has_pods(path, one)
                if one is None:
                    continue
                number = one["spec"].get("replicas", 1)
                pods = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), number)
                if one["kind"] == "DaemonSet":
                    pods = dict.fromkeys(
                        (
                            *("currentNumberScheduled", "desiredNumberScheduled", "updatedNumberScheduled"),
                            *("numberReady", "numberAvailable"),
                        ),
                        1,
                    ) | {"numberMisscheduled": 0}
                status = {"observedGeneration": one["metadata"]["generation"], **pods}
                if status.items() - one.get("status", {}).items():
                    self.server.request("PATCH", f"{at}/status", {"status": status}, MERGE)

    @contextlib.contextmanager
    def kubelets(self):
        stopped = threading.Event()

        def run():
            while not stopped.wait(1):
                self.has_ready_pods()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def words_of(done):
    return " ".join(done.text.split())
