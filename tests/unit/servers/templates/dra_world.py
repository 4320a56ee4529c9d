# SPDX-License-Identifier: GPL-3.0-or-later
"""A real API server with the objects of role gpushare for shares by claims, and nodes with cards in ResourceSlices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpushare.shared._contracts import claim_templates as contract
from gpushare.shared._contracts import gpushare as shares
from gpushare_objects import rendered
from own_cluster import controllers, scheduler, until
from real_apiserver import ApiServer, own_api_server

NAMESPACE = "gpushare-system"
TEMPLATES = "resourceclaimtemplates"
MEMORY = shares.RESOURCE_MEMORY
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/gpushare-dra-templates"


@contextlib.contextmanager
def dra_server() -> Iterator[ApiServer]:
    """Run an API server with the role's objects, when its policies are in effect."""
    with own_api_server() as server:
        server.apply(*rendered("namespace", "dra", "dra_admission"))
        path = "/api/v1/namespaces/default/pods?dryRun=All"
        until(lambda: "resourceClaims" in server.ask("POST", path, pod("p", 1))[1])
        yield server


def pod(name: str, *units: Any, annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a pod with a container for each number of units."""
    containers = [
        {"name": f"c{number}", "image": "i", "resources": {"limits": {MEMORY: unit}}}
        for number, unit in enumerate(units)
    ]
    metadata = {"name": name, **({"annotations": annotations} if annotations else {})}
    return {"metadata": metadata, "spec": {"containers": containers, **spec}}


def names(server: ApiServer, namespace: str) -> set[str]:
    """Return the names of the templates in a namespace."""
    return set(templates(server, namespace))


def templates(server: ApiServer, namespace: str) -> dict[str, dict[str, Any]]:
    """Return the templates in a namespace by name."""
    path = f"/apis/{contract.API_VERSION}/namespaces/{namespace}/{TEMPLATES}"
    return {item["metadata"]["name"]: item for item in server.request("GET", path)["items"]}


def node(server: ApiServer, name: str, *models: str, memory: str = "16Gi", unit: str = "1Gi") -> None:
    """Create a node whose driver announces a card for each model, as card 0 and so on."""
    status = {"capacity": {"cpu": "8", "memory": "8Gi", "pods": "110"}}
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
    path = f"/api/v1/nodes/{name}"
    server.request("PATCH", f"{path}/status", {"status": status}, content="application/merge-patch+json")
    # Of the API server: nobody says that the node is ready.
    server.request("PATCH", path, {"spec": {"taints": None}}, content="application/merge-patch+json")
    policy = {"default": memory, "validRange": {"min": unit, "step": unit}}
    devices = [
        {
            "name": f"gpu-{name}-{number}",
            "attributes": {
                "uuid": {"string": f"GPU-{name}-{number}"},
                **({"model": {"string": model}} if model else {}),
            },
            "capacity": {contract.CAPACITY: {"value": memory, "requestPolicy": policy}},
            "allowMultipleAllocations": True,
        }
        for number, model in enumerate(models)
    ]
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": contract.DRIVER, "nodeName": name, "pool": pool, "devices": devices}
    server.apply(
        {"apiVersion": contract.API_VERSION, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}
    )


@contextlib.contextmanager
def scheduling(server: ApiServer) -> Iterator[None]:
    """Run kube-scheduler and the controller of claims, with their defaults."""
    with controllers(server, "resourceclaim"), scheduler(server):
        yield


def allocated(server: ApiServer, namespace: str, name: str) -> list[tuple[str, str, str]]:
    """Return what a pod's claim got, as request, device and memory; empty while it waits."""
    status = server.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}").get("status", {})
    found = []
    for one in status.get("resourceClaimStatuses", []):
        path = f"/apis/{contract.API_VERSION}/namespaces/{namespace}/resourceclaims/{one.get('resourceClaimName')}"
        claim = server.request("GET", path)
        for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", []):
            found.append((result["request"], result["device"], result["consumedCapacity"][contract.CAPACITY]))
    return sorted(found)


def events(server: ApiServer, namespace: str, reason: str) -> list[str]:
    """Return the messages of the Events of a reason."""
    listed = server.request("GET", f"/api/v1/namespaces/{namespace}/events?fieldSelector=reason%3D{reason}")
    return [item["message"] for item in listed["items"]]


def account(server: ApiServer, folder: Path) -> Path:
    """Write the files of the account of the server of templates, as kubelet does."""
    return server.token(folder, NAMESPACE, "gpushare-dra-templates")
