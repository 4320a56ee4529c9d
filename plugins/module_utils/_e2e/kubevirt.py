# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suites ``passthrough`` and ``vgpu``: a virtual machine of KubeVirt gets what a node announces, or says why not.

Nothing is created where KubeVirt's definitions and a control plane that is ready aren't there, or its node has no KVM:
each of these is a code (``SKIPS``), and no pass.
"""

from __future__ import annotations

import typing as t

from .._allocation.pods import nvidia_counts
from .._contracts import backends, virtual
from .._contracts.model import Node
from .._core.types import JsonObject
from .._kube.errors import KubeError
from .._kube.pod_exec import Execute
from . import nodes, result
from .client import SuiteClient
from .nodes import Options
from .result import Failed, NoBackend, Skipped, StepOutcome, Unshown
from .suite import Suite

# What KubeVirt's virt-handler announces on a node with KVM.
KVM = "devices.kubevirt.io/kvm"
DEFINITION = "virtualmachineinstances.kubevirt.io"
DEPLOYED = "Deployed"
RUNNING, ENDED = "Running", ("Succeeded", "Failed")
# Why nothing could be shown, by code.
SKIPS: t.Mapping[str, str] = {
    "no_resource": "node {node} announces no card or vGPU that is free",
    "no_kubevirt": f"the cluster has no definition {DEFINITION}: KubeVirt isn't installed",
    "kubevirt_not_ready": "KubeVirt's control plane isn't ready: {state}",
    "not_schedulable": "KubeVirt runs no virtual machines on node {node} (label " + virtual.SCHEDULABLE + "=true)",
    "no_kvm": "node {node} has no KVM (" + KVM + "), without which no card can be given to a virtual machine",
    "no_second": "node {node} has {free} free of {resource}, and the suite starts 2 virtual machines at most",
}
# A virtual machine holds a card for the test only as long as it must.
MEMORY = "256Mi"


def ready_state(kubevirts: t.Sequence[JsonObject]) -> str:
    """Return why KubeVirt's control plane isn't ready; empty where it is."""
    if not kubevirts:
        return "there is no KubeVirt object"
    status = kubevirts[0].get("status") or {}
    conditions = {str(row.get("type")): str(row.get("status")) for row in status.get("conditions") or ()}
    if status.get("phase") == DEPLOYED and conditions.get("Available") == "True":
        return ""
    available = conditions.get("Available") or "unknown"
    return f"phase {result.shorten(str(status.get('phase') or 'none'))}, Available {result.shorten(available)}"


def machine(name: str, resource: str, node: str, options: Options) -> JsonObject:
    """Return a virtual machine that boots nothing, or the image that the user names, with one device.

    :param resource: KubeVirt's name of the device.
    """
    devices: JsonObject = {"gpus": [{"name": "gpu", "deviceName": resource}], "autoattachGraphicsDevice": False}
    spec: JsonObject = {
        "domain": {"devices": devices, "resources": {"requests": {"memory": MEMORY}}},
        "nodeSelector": {"kubernetes.io/hostname": node, **options.node_selector},
        "tolerations": [dict(toleration) for toleration in options.tolerations],
        "terminationGracePeriodSeconds": 0,
    }
    if options.machine_image:
        devices["disks"] = [{"name": "disk", "disk": {"bus": "virtio"}}]
        spec["volumes"] = [{"name": "disk", "containerDisk": {"image": options.machine_image}}]
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    metadata = {"name": name, "namespace": options.namespace}
    return {"apiVersion": virtual.API, "kind": virtual.INSTANCE, "metadata": metadata, "spec": spec}


class KubeVirt(Suite):
    """See gpu_acceptance, suites ``passthrough`` and ``vgpu``."""

    first, last = "M00", "M99"
    title: t.ClassVar[str] = "KubeVirt's virtual machines"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options)
        self._name = self._hostname = self._resource = ""
        self._free = 0

    @property
    def node(self) -> str:
        return self._name

    @property
    def ready(self) -> bool:
        return bool(self._resource) and self.steps[self.first].result == result.SKIPPED

    def plan_text(self) -> str:
        return f"start a virtual machine with {self._resource} on node {self.node}"

    def find_image(self) -> None:
        """Leave out the image: no pod of the suite's own runs."""
        self._client.image = self._options.machine_image or ""

    def select(self) -> None:
        wanted = self._options.suite
        there = [
            node
            for node in self._client.all_nodes()
            if self._options.node in (None, node.name)
            and (node.labels.get(backends.LABEL) == wanted or node.name == self._options.node)
        ]
        if not there:
            raise NoBackend(f"the cluster has no node whose back end is {wanted}")
        if not self._client.has_definition(DEFINITION):
            raise Skipped.by_code("no_kubevirt", SKIPS)
        state = ready_state(self._client.kubevirts())
        if state:
            raise Skipped.by_code("kubevirt_not_ready", SKIPS, state=state)
        reasons: list[Skipped] = []
        for node in there:
            refusal = self._refusal(node)
            if refusal is None:
                return
            reasons.append(refusal)
        raise reasons[0]

    def _refusal(self, node: Node) -> Skipped | None:
        """Return why a node can't be used, or keep it."""
        refusal = nodes.refusal(node, self._options.node_selector, self._options.tolerations)
        if refusal:
            return Skipped(f"node {node.name} can't be used: {refusal}")
        if node.labels.get(virtual.SCHEDULABLE) != "true":
            return Skipped.by_code("not_schedulable", SKIPS, node=node.name)
        if node.allocatable.get(KVM, 0) < 1:
            return Skipped.by_code("no_kvm", SKIPS, node=node.name)
        pods = self._client.unfinished_pods(node.name)
        free = {
            name: count - sum(nvidia_counts(pod, virtual.is_resource)[0].get(name, 0) for pod in pods)
            for name, count in sorted(node.allocatable.items())
            if virtual.is_resource(name) and name != virtual.KATA_RESOURCE
        }
        resource = next((name for name, left in free.items() if left > 0), "")
        if not resource:
            return Skipped.by_code("no_resource", SKIPS, node=node.name)
        self._name, self._resource, self._free = node.name, resource, free[resource]
        self._hostname = node.labels.get("kubernetes.io/hostname", node.name)
        return None

    def run(self) -> None:
        if not self.step(self.first, self.prepare):
            return
        steps: tuple[tuple[str, str, str, tuple[str, ...], t.Callable[[], str]], ...] = (
            (
                "M01",
                "A virtual machine that requests the announced resource runs",
                "KubeVirt gives a virtual machine a card or a vGPU of the node, and QEMU starts with it",
                ("scheduling", "admission"),
                self._starts,
            ),
            (
                "M02",
                "A virtual machine more than there are cards or vGPUs waits",
                "nobody else gets a device that a virtual machine has",
                ("scheduling",),
                self._waits,
            ),
            (
                "M03",
                "The driver in the virtual machine sees the card",
                "the card works in the guest",
                ("silicon",),
                self._works,
            ),
        )
        for identifier, title, proves, by, work in steps:
            self.describe(identifier, title, proves, by)
            self.step(identifier, work)

    def _starts(self) -> str:
        state = self._start("machine-1")
        if state.get("phase") != RUNNING:
            raise self._not_running("machine-1", state)
        where = str(state.get("nodeName") or "")
        if where != self.node:
            raise Failed(f"virtual machine machine-1 runs on node {where}, not on {self.node}", "", "machine-1")
        held = {
            pod.machine: nvidia_counts(pod, virtual.is_resource)[0] for pod in self._client.unfinished_pods(self.node)
        }
        if held.get("machine-1", {}).get(self._resource) != 1:
            raise Failed(f"the pod of virtual machine machine-1 doesn't hold one {self._resource}", "", "machine-1")
        return f"it runs on node {self.node} with one {self._resource}"

    def _waits(self) -> str:
        if self.steps["M01"].result != result.PASS:
            raise Skipped("the first virtual machine doesn't run")
        if self._free != 1:
            raise Skipped.by_code("no_second", SKIPS, node=self.node, free=self._free, resource=self._resource)
        state = self._start("machine-2", lambda seen: bool(self._unscheduled("machine-2")))
        reason = self._unscheduled("machine-2")
        if state.get("phase") == RUNNING or not reason:
            shown = result.shorten(str(state.get("phase") or "no phase"))
            raise Failed(f"virtual machine machine-2 doesn't wait for {self._resource}: {shown}", "", "machine-2")
        return result.shorten(reason)

    def _works(self) -> str:
        raise Unshown("only a guest with NVIDIA's driver can show it", "run a program that computes in such a guest")

    def _start(self, name: str, done: t.Callable[[JsonObject], bool] = lambda seen: False) -> JsonObject:
        """Create a virtual machine, and return its status once it runs, has ended, or ``done`` says so."""
        try:
            self._client.create_machine(machine(name, self._resource, self._hostname, self._options))
        except KubeError as error:
            if not error.admission and error.status != 422:
                raise
            do = f"have KubeVirt permit {self._resource} (role kubevirt_devices)"
            raise Failed(f"KubeVirt refuses the virtual machine: {result.shorten(str(error))}", do, name) from error
        status: JsonObject = {}
        for _poll in self._client.wait().attempts():
            status = self._client.machine_status(name)
            if status.get("phase") in (RUNNING, *ENDED) or done(status):
                break
        return status

    def _unscheduled(self, name: str) -> str:
        """Return the scheduler's reason why a virtual machine's pod waits; empty where it doesn't."""
        return next((pod.unscheduled for pod in self._client.own_pods() if pod.machine == name), "")

    def _not_running(self, name: str, status: JsonObject) -> StepOutcome:
        rows = [row for row in status.get("conditions") or () if row.get("status") == "False" and row.get("message")]
        told = self._unscheduled(name) or next((str(row["message"]) for row in rows), "")
        shown = result.shorten(f"{status.get('phase') or 'no phase'}{f': {told}' if told else ''}")
        what = f"virtual machine {name} doesn't run within {self._options.timeout:g} s: {shown}"
        return Failed(what, f"kubectl describe vmi {name}, while a run waits", name)
