# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite ``kata``: pods whose RuntimeClass starts a virtual machine get the cards that a node announces."""

from __future__ import annotations

import dataclasses
import functools
import typing as t

from .._allocation.pods import nvidia_counts
from .._contracts import backends, virtual
from .._contracts.model import Node
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._kube.pod_exec import Execute
from .assertions import PodState
from .case_suite import CaseSuite
from .cases import COMPUTE, Case
from .client import SuiteClient
from .nodes import Options
from .result import Failed, Skipped

CARD = "card"
LIST = ("nvidia-smi", "-L")
# Of node feature discovery, which says what a node's processors can do; KVM needs the one or the other.
FEATURES = "feature.node.kubernetes.io/cpu-"
VIRTUALIZATION = ("feature.node.kubernetes.io/cpu-cpuid.VMX", "feature.node.kubernetes.io/cpu-cpuid.SVM")
# Why nothing could be shown, by code.
SKIPS: t.Mapping[str, str] = {
    "no_runtime_class": "the cluster has no RuntimeClass whose handler is Kata's for NVIDIA's cards: name one "
    "(kata_runtime_class)",
    "not_selected": "RuntimeClass {name} is for nodes with {selector}, and node {node} hasn't these labels",
    "no_kvm": "node {node} has processors without virtualization, so that Kata can't start a virtual machine there",
    "no_second": "node {node} has {free} free cards, and each pod boots a virtual machine",
}


def runtime_class(classes: t.Mapping[str, str], named: str | None) -> str:
    """Return the RuntimeClass of the suite's pods.

    :param classes: handlers by name.
    :param named: by the user; None for the only one whose handler is Kata's with NVIDIA's cards.
    :raises BadInput: there is none of that name, it isn't Kata's, or there are several.
    """
    if named:
        if named not in classes:
            raise BadInput(f"kata_runtime_class: the cluster has no RuntimeClass {named}")
        if not virtual.is_kata(classes[named]):
            raise BadInput(f"kata_runtime_class: the handler of {named} is {classes[named]}, which isn't Kata's")
        return named
    fitting = sorted(name for name, handler in classes.items() if virtual.is_kata(handler) and "nvidia" in handler)
    # With confidential computing a pod needs a card and a processor that can do it.
    usual = [name for name in fitting if not classes[name].endswith(("-snp", "-tdx"))] or fitting
    if len(usual) > 1:
        raise BadInput(f"kata_runtime_class: the cluster has {', '.join(usual)}: name one of them")
    return usual[0] if usual else ""


_ONE = functools.partial(Case, limits={CARD: 1}, at_most=1)
CASES = (
    _ONE(
        "starts",
        "A pod of Kata's RuntimeClass with a card runs",
        "the card is given to a virtual machine, which starts with it",
        ("scheduling", "admission"),
    ),
    Case(
        "one_more",
        "Where one card is free, a second pod waits",
        "nobody else gets a card that a pod has",
        ("scheduling",),
        {CARD: 1},
        more=1,
        reason="Insufficient nvidia.com/",
    ),
    _ONE(
        "another_kernel",
        "The container's kernel is another one than the node's",
        "the container is in a virtual machine",
        ("exit code",),
        command=("uname", "-r"),
    ),
    _ONE(
        "device_node",
        "A container has the device node of one card",
        "the guest's driver has the card, and the container gets it",
        ("device nodes",),
        command=("ls", "/dev"),
        finds=r"^nvidia\d+$",
    ),
    _ONE(
        "one_card",
        "nvidia-smi in a container lists one card",
        "the guest's driver and the card work together",
        ("NVML",),
        command=LIST,
        finds=r"^GPU \d+: ",
    ),
    _ONE(
        "computes",
        "A program that computes runs in a container",
        "CUDA works in a container of a virtual machine",
        ("exit code",),
        command=COMPUTE,
    ),
)


@dataclasses.dataclass(frozen=True)
class Announced:
    """What a node announces.

    :param kernel: the node's own.
    """

    resource: str
    kernel: str


class Kata(CaseSuite[Announced]):
    """See gpu_acceptance, suite ``kata``."""

    backend, title, log = backends.KATA, "Kata's virtual machines", "containerd and Kata's runtime"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options, CASES, Announced("", ""))
        self._class = ""

    def select(self) -> None:
        super().select()
        name, self._name = self._name, ""
        classes = self._client.runtime_classes()
        handlers = {key: str(item["handler"]) for key, item in classes.items()}
        self._class = runtime_class(handlers, self._options.kata_runtime_class)
        if not self._class:
            raise Skipped.by_code("no_runtime_class", SKIPS)
        labels = (self._client.node(name) or Node(name)).labels
        wanted = (classes[self._class].get("scheduling") or {}).get("nodeSelector") or {}
        if any(labels.get(key) != value for key, value in wanted.items()):
            selector = ", ".join(f"{key}={value}" for key, value in sorted(wanted.items()))
            raise Skipped.by_code("not_selected", SKIPS, name=self._class, node=name, selector=selector)
        if any(key.startswith(FEATURES) for key in labels) and not any(key in labels for key in VIRTUALIZATION):
            raise Skipped.by_code("no_kvm", SKIPS, node=name)
        self._name = name

    def see(self, node: Node) -> tuple[int, Announced] | str:
        # One resource for all models, or one for each.
        free = {
            name: count - self._held(node.name, name)
            for name, count in node.allocatable.items()
            if virtual.is_resource(name)
        }
        if not free:
            return "it announces no card"
        resource = max(sorted(free), key=lambda name: free[name])
        return free[resource], Announced(resource, node.kernel)

    def default_image(self) -> str:
        raise BadInput("image: not set; the image of the device plugin has no sleep, so name one that has it")

    def _held(self, node: str, resource: str) -> int:
        pods = self._client.unfinished_pods(node)
        return sum(nvidia_counts(pod, virtual.is_resource)[0].get(resource, 0) for pod in pods)

    def fits(self, case: Case) -> int:
        node = self._client.node(self.node)
        if node is None:
            return 0
        return max(0, node.allocatable.get(self._seen.resource, 0) - self._held(self.node, self._seen.resource))

    def limits(self, case: Case) -> t.Mapping[str, int]:
        return {self._seen.resource if key == CARD else key: value for key, value in case.limits.items()}

    def keep_to_back_end(self, spec: JsonObject) -> None:
        spec["runtimeClassName"] = self._class

    def assert_room(self, case: Case, fitting: int) -> None:
        if case.more and fitting != 1:
            raise Skipped.by_code("no_second", SKIPS, node=self.node, free=fitting)

    def assert_output(self, case: Case, output: str, pod: PodState) -> None:
        if case.id == "another_kernel" and output in ("", self._seen.kernel):
            raise Failed(f"the container has the node's kernel {self._seen.kernel or '(unknown)'}", "", pod.name)
