# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes whose cards can go to virtual machines, and stand-ins for KubeVirt and for a machine that has a card.

Everything of the cards is SIMULATED (lab/README.md). The definition of KubeVirt's object has the fields that role
kubevirt_devices and the stand-in use, as KubeVirt's own has them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _lab import JsonObject, Lab, until
from _pods import MERGE, body, container

from lab import hardware

PROGRAM = Path(__file__).with_name("virt_handler.py")
NAMESPACE = "kubevirt"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
KUBEVIRT = f"/apis/kubevirt.io/v1/namespaces/{NAMESPACE}/kubevirts"
INSTANCES = "virtualmachineinstances"
ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterrole"
HANDLER = "lab-virt-handler"
UNIT = "kubegpu-lab-pci"
# What answers for VFIO's groups (lab/driver/vfio_group.c).
LIBRARY, PRELOAD = "/usr/local/lib/kubegpu-lab/vfio_group.so", "/etc/ld.so.preload"
RELEASE = os.uname().release
# A kernel as its package leaves it, with VFIO built in and an initramfs of the real tool: a node without one is taken
# for a container, whose cards are its host's.
KERNEL = f"""\
set -eu
mkdir -p /lib/modules/{RELEASE}
cd /lib/modules/{RELEASE}
touch modules.order modules.builtin.modinfo
printf 'kernel/drivers/vfio/%s.ko\\n' vfio vfio_iommu_type1 pci/vfio-pci >modules.builtin
depmod {RELEASE}
echo 'No kernel: the node is a container.' >/boot/vmlinuz-{RELEASE}
printf 'CONFIG_RD_GZIP=y\\nCONFIG_RD_ZSTD=y\\n' >/boot/config-{RELEASE}
mkdir -p /usr/src/linux-headers-{RELEASE}
echo '# A stub: nothing can be built with it.' >/usr/src/linux-headers-{RELEASE}/Makefile
ln -sfn /usr/src/linux-headers-{RELEASE} build
update-initramfs -c -k {RELEASE}
"""
NO_KERNEL = f"""\
update-initramfs -d -k {RELEASE}
rm -rf /lib/modules/{RELEASE} /usr/src/linux-headers-{RELEASE}
rm -f /boot/vmlinuz-{RELEASE} /boot/config-{RELEASE} /boot/initrd.img-{RELEASE}*
rmdir --ignore-fail-on-non-empty /lib/modules
"""


@contextlib.contextmanager
def changeable_cards(lab: Lab, node: str) -> Iterator[None]:
    """Give a node a kernel, and cards that change drivers; both are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        library = base64.b64encode(hardware.group_library(Path(folder) / "vfio_group.so").read_bytes()).decode()
    try:
        lab.ssh(node, KERNEL, seconds=120)
        lab.ssh(node, f"echo {library} | base64 -d >{LIBRARY} && chmod 755 {LIBRARY} && echo {LIBRARY} >{PRELOAD}")
        lab.ssh(node, f"systemctl start {UNIT}")
        yield
    finally:
        lab.ssh(node, f"systemctl stop {UNIT}; rm -f {PRELOAD} {LIBRARY}")
        lab.ssh(node, NO_KERNEL, seconds=120)


def drivers(lab: Lab, node: str) -> dict[str, str]:
    """Return the driver of each function of a node, by address; empty without one."""
    script = 'cd /sys/bus/pci/devices; for one in *; do echo "$one $(basename "$(readlink $one/driver)")"; done'
    lines = [line.split(" ") for line in lab.ssh(node, script).splitlines()]
    return {address: driver for address, driver in lines}


def definition() -> JsonObject:
    """Return the definition of KubeVirt's object."""
    text, flag = {"type": "string"}, {"type": "boolean"}

    def fields(**properties: JsonObject) -> JsonObject:
        return {"type": "object", "properties": properties}

    def rows(selector: str) -> JsonObject:
        row = fields(**{selector: text, "resourceName": text, "externalResourceProvider": flag})
        return {"type": "array", "items": {**row, "required": [selector, "resourceName"]}}

    configuration = fields(
        permittedHostDevices=fields(pciHostDevices=rows("pciVendorSelector"), mediatedDevices=rows("mdevNameSelector")),
        mediatedDevicesConfiguration=fields(enabled=flag, mediatedDeviceTypes={"type": "array", "items": text}),
        developerConfiguration=fields(featureGates={"type": "array", "items": text}),
    )
    schema = fields(spec=fields(configuration=configuration))
    names = {"plural": "kubevirts", "singular": "kubevirt", "kind": "KubeVirt", "listKind": "KubeVirtList"}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    spec = {"group": "kubevirt.io", "scope": "Namespaced", "names": names, "versions": [version]}
    return {"metadata": {"name": "kubevirts.kubevirt.io"}, "spec": spec}


def instances() -> JsonObject:
    """Return the definition of a virtual machine's object, which nobody acts on here."""
    kind = "VirtualMachineInstance"
    names = {"plural": INSTANCES, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
    spec = {"group": "kubevirt.io", "scope": "Namespaced", "names": names, "versions": [version]}
    return {"metadata": {"name": f"{INSTANCES}.kubevirt.io"}, "spec": spec}


def _handler(image: str) -> JsonObject:
    """Return the stand-in's DaemonSet, on the nodes of cards."""
    paths = {"socket": "/var/lib/kubelet/device-plugins", "pci": "/sys/bus/pci", "dev": "/dev"}
    inside = {**paths, "pci": "/host/pci", "dev": "/host/dev", "program": "/program"}
    one = {
        "name": "virt-handler",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", f"/program/{PROGRAM.name}"],
        "securityContext": {"privileged": True, "runAsUser": 0},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in inside.items()],
    }
    volumes: list[JsonObject] = [{"name": name, "hostPath": {"path": path}} for name, path in paths.items()]
    volumes.append({"name": "program", "configMap": {"name": "program"}})
    labels = {"kubevirt.io": "virt-handler"}
    spec = {
        "containers": [one],
        "volumes": volumes,
        "terminationGracePeriodSeconds": 1,
        "affinity": {"nodeAffinity": _NO_CONTROL_PLANE},
    }
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {"metadata": {"name": "virt-handler"}, "spec": {"selector": {"matchLabels": labels}, "template": template}}


_NO_CONTROL_PLANE: JsonObject = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [
            {"matchExpressions": [{"key": "node-role.kubernetes.io/control-plane", "operator": "DoesNotExist"}]}
        ]
    }
}


def _label(lab: Lab, value: str | None) -> None:
    for name in lab.gpu_nodes:
        labels = {"metadata": {"labels": {"kubevirt.io/schedulable": value}}}
        lab.api.call("PATCH", f"/api/v1/nodes/{name}", labels, MERGE)


@contextlib.contextmanager
def kubevirt(lab: Lab, image: str) -> Iterator[None]:
    """Have KubeVirt's object in the cluster, and its stand-in on the nodes of cards.

    :param image: of the servers, which is on these nodes.
    """
    sets = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"
    try:
        for wanted in (definition(), instances()):
            lab.api.call("POST", DEFINITIONS, wanted)
        with lab.api.namespace(NAMESPACE):
            until(lambda: lab.api.call("GET", KUBEVIRT)["items"] == [], "KubeVirt's objects are served", 30)
            wanted = {"metadata": {"name": "kubevirt"}, "spec": {"configuration": {}}}
            lab.api.call("POST", KUBEVIRT, {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", **wanted})
            rules = [{"apiGroups": ["kubevirt.io"], "resources": ["kubevirts"], "verbs": ["get", "list"]}]
            lab.api.call("POST", f"{ROLE}s", {"metadata": {"name": HANDLER}, "rules": rules})
            subject = {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}
            reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": HANDLER}
            binding = {"metadata": {"name": HANDLER}, "subjects": [subject], "roleRef": reference}
            lab.api.call("POST", f"{ROLE}bindings", binding)
            program = {"metadata": {"name": "program"}, "data": {PROGRAM.name: PROGRAM.read_text()}}
            lab.api.call("POST", f"/api/v1/namespaces/{NAMESPACE}/configmaps", program)
            lab.api.call("POST", sets, _handler(image))

            def ready() -> bool:
                status = lab.api.call("GET", f"{sets}/virt-handler")["status"]
                return bool(status.get("numberReady", 0) == len(lab.gpu_nodes))

            until(ready, "virt-handler's stand-in runs on each node of cards", 90)
            # As virt-handler does.
            _label(lab, "true")
            yield
            lab.api.delete(f"{KUBEVIRT}/kubevirt")
            lab.api.delete(f"{sets}/virt-handler")
    finally:
        _label(lab, None)
        for kind in ("roles", "rolebindings"):
            lab.api.delete(f"{ROLE.removesuffix('role')}{kind}/{HANDLER}")
        for name in ("kubevirts", INSTANCES):
            lab.api.delete(f"{DEFINITIONS}/{name}.kubevirt.io")


def machine(lab: Lab, space: str, name: str, node: str, resource: str) -> JsonObject:
    """Create a virtual machine's object, and return its pod.

    That has the device file of its card open, as virt-launcher's has while a virtual machine runs.
    """
    path = f"/apis/kubevirt.io/v1/namespaces/{space}/{INSTANCES}"
    made = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": name}}
    owner = {**made, **lab.api.call("POST", path, made)}
    hold = "exec 3</dev/vfio/$(ls /dev/vfio | grep -v vfio) && exec sleep 3600"
    wanted = body(
        name,
        container(lab, command=["sh", "-c", hold], resources={"limits": {resource: "1"}}),
        node=node,
    )
    wanted["metadata"]["labels"] = {"kubevirt.io": "virt-launcher"}
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": name}
    wanted["metadata"]["ownerReferences"] = [{**reference, "uid": owner["metadata"]["uid"], "controller": True}]
    # Whoever drains a node finds it as a pod like any other's: no toleration of the cordon.
    del wanted["spec"]["tolerations"]
    return wanted
