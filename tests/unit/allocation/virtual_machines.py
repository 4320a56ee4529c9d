# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes, pods and machines with cards for virtual machines, as the API and the modules return them."""

from __future__ import annotations

import typing as t

A10, PGPU, VGPU = "nvidia.com/GA102GL_A10", "nvidia.com/pgpu", "nvidia.com/NVIDIA_A10-12Q"
NAME = "n1"
MADE = "c2b1a5f4-0000-4000-8000-0123456789ab"


def node(backend: str = "passthrough", name: str = NAME, **more: t.Any) -> dict[str, t.Any]:
    """A node that announces resources."""
    labels = {**({"kubegpu.share/backend": backend} if backend else {}), **more.pop("labels", {})}
    amounts = {key: str(value) for key, value in more.pop("resources", {A10: 2}).items()}
    return {
        "metadata": {"name": name, "labels": labels, "annotations": {}},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "addresses": [{"type": "InternalIP", "address": "192.0.2.7"}],
        },
    }


def pod(name: str, resource: str = A10, count: int = 1, **more: t.Any) -> dict[str, t.Any]:
    """A pod; ``machine`` makes it KubeVirt's of that VirtualMachineInstance, ``runtime`` names a RuntimeClass."""
    metadata: dict[str, t.Any] = {"name": name, "namespace": "team", "uid": f"uid-{name}"}
    machine = more.pop("machine", "")
    if machine:
        owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": machine, "uid": "u"}
        metadata |= {"labels": {"kubevirt.io": "virt-launcher"}, "ownerReferences": [owner]}
    runtime = more.pop("runtime", "")
    return {
        "metadata": metadata,
        "spec": {
            "nodeName": NAME,
            "containers": [{"name": "compute", "resources": {"limits": {resource: str(count)} if resource else {}}}],
            **({"runtimeClassName": runtime} if runtime else {}),
            **more.pop("spec", {}),
        },
        "status": {"phase": "Running", **more.pop("status", {})},
    }


def gpu(address: str, group: int, driver: str = "vfio-pci", **more: t.Any) -> dict[str, t.Any]:
    """A card as ``gpu_node_info`` returns it."""
    return {
        "address": address,
        "vendor": "0x10de",
        "device": "0x2236",
        "driver": driver,
        "driver_override": driver if "vfio" in driver else "",
        "iommu_group": group,
        "virtual_functions": {"total": 0, "enabled": []},
        "vgpu_host": {"framework": "none", "types": [], "vgpus": []},
        **more,
    }


def divided(address: str, function: str, uuid: str | None, group: int) -> dict[str, t.Any]:
    """A card with one vGPU: a mediated device, or a virtual function."""
    kind = "nvidia-592" if uuid else "592"
    vgpu = {"address": function, "uuid": uuid, "type": kind, "iommu_group": group}
    enabled = [] if function == address else [{"address": function, "driver": "nvidia", "iommu_group": group}]
    return gpu(
        address,
        20,
        "nvidia",
        virtual_functions={"total": 16, "enabled": enabled},
        vgpu_host={
            "framework": "mdev" if uuid else "vendor",
            "types": [{"id": kind, "name": "NVIDIA A10-12Q", "available": 0}],
            "vgpus": [vgpu],
        },
    )


def machine(*gpus: dict[str, t.Any], **kubelet: t.Any) -> dict[str, t.Any]:
    """What role inspect collects.

    :param kubelet: ``registered`` (IDs by resource), ``entries`` (pod's UID and IDs) of the checkpoint, and ``listed``
        (pod's name and IDs) of PodResources, which otherwise isn't there.
    """
    entries = [
        {"pod_uid": uid, "container": "compute", "resource": A10, "ids": ids}
        for uid, ids in kubelet.get("entries", {}).items()
    ]
    listed = kubelet.get("listed")
    pods = [
        {"namespace": "team", "name": name, "containers": [{"name": "c", "devices": [{"resource": A10, "ids": ids}]}]}
        for name, ids in (listed or {}).items()
    ]
    checkpoint = {"state": "ok", "problem": "", "entries": entries, "registered": kubelet.get("registered", {})}
    return {
        "gpus": list(gpus),
        "functions": kubelet.get("functions", []),
        "kubelet": {
            "checkpoint": kubelet.get("checkpoint", checkpoint),
            "pod_resources": {"state": "missing" if listed is None else "ok", "problem": "", "pods": pods},
        },
    }


CLAIM = {
    "metadata": {"namespace": "team", "name": "desktop-gpu", "uid": "uid-claim"},
    "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "vfio.gpu.nvidia.com"}}]}},
    "status": {
        "allocation": {
            "devices": {
                "results": [{"request": "gpu", "driver": "gpu.nvidia.com", "pool": NAME, "device": "gpu-vfio-0"}]
            }
        },
        "reservedFor": [{"resource": "pods", "name": "virt-launcher-desktop", "uid": "uid-virt-launcher-desktop"}],
    },
}


def in_slice(*addresses: str) -> dict[str, t.Any]:
    """A slice of NVIDIA's DRA driver, with each card for containers and for virtual machines."""
    devices = []
    for number, address in enumerate(addresses):
        for name, kind in ((f"gpu-{number}", "gpu"), (f"gpu-vfio-{number}", "vfio")):
            texts = {"type": kind, "productName": "NVIDIA A10", "vendorID": "0x10de", "deviceID": "0x2236"}
            texts["resource.kubernetes.io/pciBusID"] = address
            devices.append({"name": name, "attributes": {key: {"string": text} for key, text in texts.items()}})
    pool = {"name": NAME, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.nvidia.com", "nodeName": NAME, "pool": pool, "devices": devices}
    return {"metadata": {"name": "s"}, "spec": spec}
