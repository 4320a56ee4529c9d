# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stages of site.yml: which roles each of its plays runs on which machines; a test compares the two."""

from __future__ import annotations

import dataclasses
import typing as t

from ...module_utils._core.types import JsonObject
from .walk import Walk

LOCALHOST = "localhost"
GPU_NODES = "gpu_nodes"
MAINTENANCE = "kubegpu_maintenance"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A role in a play.

    :param given: its parameters there.
    :param when: its condition; empty for none.
    :param tasks: the name of its file of tasks.
    """

    role: str
    given: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    when: str = ""
    tasks: str = "main"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A play.

    :param groups: the groups of its hosts; empty for localhost.
    :param serial: its hosts are changed one after another.
    """

    name: str
    groups: tuple[str, ...]
    entries: tuple[Entry, ...]
    serial: bool = False


ABSENT = {"gpushare_state": "absent"}
# What preflight has resolved: the parts that the cluster needs, and those that no node needs any more.
BACKENDS = "hostvars['localhost'].gpu_backends"
EXTENDER = f"{BACKENDS}.parts.extender"
DRA = f"{BACKENDS}.parts.dra"
HAMI = f"{BACKENDS}.parts.hami"
NVIDIA = f"{BACKENDS}.parts.nvidia"
EXTENDER_LEAVES = f"{BACKENDS}.leaving.extender"
DRA_LEAVES = f"{BACKENDS}.leaving.dra"
HAMI_LEAVES = f"{BACKENDS}.leaving.hami"
NVIDIA_LEAVES = f"{BACKENDS}.leaving.nvidia"
# A machine of gpushare's: a node that has it or is to have it, or one of a control plane that runs servers.
NODE = "gpu_node_name | default(inventory_hostname) | string"
IMAGE = (
    f"({BACKENDS}.control_plane_image | default(true) and inventory_hostname in groups['control_plane'] | default([]))"
    f" or {NODE} in {BACKENDS}.gpushare | default([{NODE}])"
)

# Roles install a machine's driver and toolkit, rather than the GPU Operator or the provider.
BY_ROLES = (
    f"{NODE} in {BACKENDS}.software.roles"
    f" | default([{NODE}] if gpu_node_software | default('auto') in ['auto', 'roles'] else [])"
)
# Roles install a driver for containers, or NVIDIA's vGPU manager: not where virtual machines have all cards.
DRIVER = (
    f"({BY_ROLES}) and ({NODE} not in {BACKENDS}.driverless"
    f" | default([{NODE}] if gpu_backend | default('') in ['passthrough', 'kata'] else [])"
    " or driver_state | default('') == 'absent')"
)
# A machine some or all of whose cards virtual machines get.
BINDING = (
    f"{NODE} in {BACKENDS}.binding | default([{NODE}] if gpu_backend | default('') in ['passthrough', 'kata']"
    " or passthrough_cards | default([]) | length > 0 else [])"
)
VGPU = f"{NODE} in {BACKENDS}.vgpu | default([{NODE}] if gpu_backend | default('') == 'vgpu' else [])"
KATA = f"{NODE} in {BACKENDS}.kata | default([{NODE}] if gpu_backend | default('') == 'kata' else [])"
# Its containers get cards.
CONTAINERS = (
    f"({BY_ROLES}) and {NODE} not in {BACKENDS}.virtual"
    f" | default([{NODE}] if gpu_backend | default('') in ['passthrough', 'vgpu', 'kata'] else [])"
)
VIRTUAL = f"{BACKENDS}.virtual | default([]) | length > 0"
KUBEVIRT = f"{BACKENDS}.parts.kubevirt | default(false)"
KATAS = f"{BACKENDS}.parts.kata | default(false)"
KATAS_LEAVE = f"{BACKENDS}.leaving.kata | default(false)"
KATAS_PLUGIN = {"sandbox_device_plugin_kind": "kata"}
# NVIDIA's device plugin announces the cards to KubeVirt.
EXTERNAL = f"{KUBEVIRT} and kubevirt_devices_external_provider | default(false) | bool"
KUBEVIRTS_PLUGIN = {"sandbox_device_plugin_kind": "kubevirt"}
KUBEVIRT_LEAVES = f"{BACKENDS}.leaving.kubevirt | default(false)"
OPERATOR = f"{BACKENDS}.software.installs | default(false)"

STAGES = (
    Stage(
        "image",
        (GPU_NODES, "control_plane"),
        (Entry("gpushare", {"gpushare_component": "image"}, IMAGE),),
    ),
    Stage(
        "driver",
        (GPU_NODES,),
        (
            Entry("node_baseline", when=BY_ROLES),
            Entry("airgap", when=DRIVER, tasks="node_sources"),
            Entry("nouveau", when=BY_ROLES),
            # Before the driver, which would have the cards.
            Entry("passthrough", when=BINDING),
            Entry("driver", when=DRIVER),
            Entry("maintenance", when=BY_ROLES, tasks="unfinished"),
        ),
    ),
    # Its hosts are those that the stage before adds to its group.
    Stage("maintenance", (MAINTENANCE,), (Entry("maintenance"),), serial=True),
    Stage("runtime", (GPU_NODES,), (Entry("toolkit", when=CONTAINERS), Entry("runtime", when=CONTAINERS))),
    Stage("virtual", (GPU_NODES,), (Entry("vgpu", when=VGPU), Entry("kata", {"kata_step": "node"}, KATA))),
    Stage("gpu_operator", (), (Entry("gpu_operator", {"gpu_operator_step": "cluster"}, OPERATOR),)),
    Stage(
        "extender",
        (),
        (
            Entry(
                "scheduler",
                {"scheduler_step": "openshift_access"},
                f"{EXTENDER} and scheduler_detected.mode == 'openshift'",
            ),
            Entry(
                "gpushare",
                {"gpushare_component": "extender"},
                f"{EXTENDER} and (scheduler_detected.on_machines or scheduler_detected.takes_policy)",
            ),
        ),
    ),
    Stage("scheduler", ("kubegpu_schedulers",), (Entry("scheduler", when=EXTENDER),), serial=True),
    Stage("cluster_scheduler", (), (Entry("scheduler", {"scheduler_step": "cluster"}, EXTENDER),)),
    Stage(
        "device_plugin",
        (),
        (
            Entry(
                "gpushare",
                {"gpushare_component": "gpu_operator"},
                f"(({EXTENDER} or {DRA}) and {BACKENDS}.openshift | length > 0)"
                f" or ({BACKENDS}.software.ours and ({EXTENDER} or {DRA} or {HAMI}))",
            ),
            Entry("gpushare", {"gpushare_component": "device_plugin"}, EXTENDER),
        ),
    ),
    Stage("dra", (), (Entry("gpushare", {"gpushare_component": "dra"}, DRA),)),
    Stage("hami", (), (Entry("hami", {"hami_step": "cluster"}, HAMI), Entry("hami", {"hami_step": "nodes"}, HAMI))),
    Stage(
        "nvidia",
        (),
        (
            Entry("nvidia_device_plugin", {"nvidia_device_plugin_step": "cluster"}, NVIDIA),
            Entry("nvidia_device_plugin", {"nvidia_device_plugin_step": "nodes"}, NVIDIA),
        ),
    ),
    Stage(
        "virtual_nodes",
        (),
        (
            Entry("passthrough", when=VIRTUAL, tasks="nodes"),
            Entry("kubevirt_devices", when=KUBEVIRT),
            Entry("sandbox_device_plugin", {**KUBEVIRTS_PLUGIN, "sandbox_device_plugin_step": "cluster"}, EXTERNAL),
            Entry("sandbox_device_plugin", {**KUBEVIRTS_PLUGIN, "sandbox_device_plugin_step": "nodes"}, EXTERNAL),
            Entry("kata", {"kata_step": "cluster"}, KATAS),
            Entry("sandbox_device_plugin", {**KATAS_PLUGIN, "sandbox_device_plugin_step": "cluster"}, KATAS),
            Entry("sandbox_device_plugin", {**KATAS_PLUGIN, "sandbox_device_plugin_step": "nodes"}, KATAS),
            Entry("kata", {"kata_step": "nodes"}, KATAS),
        ),
    ),
    # What no node needs any more, in the reverse order: no node has a card of it.
    Stage(
        "leaving",
        (),
        (
            Entry("kubevirt_devices", {"kubevirt_devices_state": "absent"}, KUBEVIRT_LEAVES),
            Entry(
                "sandbox_device_plugin", {**KUBEVIRTS_PLUGIN, "sandbox_device_plugin_step": "remove"}, KUBEVIRT_LEAVES
            ),
            Entry("sandbox_device_plugin", {**KATAS_PLUGIN, "sandbox_device_plugin_step": "remove"}, KATAS_LEAVE),
            Entry("kata", {"kata_step": "remove"}, KATAS_LEAVE),
            Entry("gpushare", {"gpushare_component": "dra", **ABSENT}, DRA_LEAVES),
            Entry("gpushare", {"gpushare_component": "device_plugin", **ABSENT}, EXTENDER_LEAVES),
            Entry("scheduler", {"scheduler_step": "cluster", "scheduler_state": "absent"}, EXTENDER_LEAVES),
            Entry("hami", {"hami_step": "remove"}, HAMI_LEAVES),
            Entry("nvidia_device_plugin", {"nvidia_device_plugin_step": "remove"}, NVIDIA_LEAVES),
        ),
    ),
    Stage(
        "leaving_scheduler",
        ("kubegpu_schedulers",),
        (Entry("scheduler", {"scheduler_state": "absent"}, EXTENDER_LEAVES),),
        serial=True,
    ),
    Stage(
        "leaving_extender",
        (),
        (
            Entry("gpushare", {"gpushare_component": "extender", **ABSENT}, EXTENDER_LEAVES),
            Entry(
                "scheduler",
                {"scheduler_step": "openshift_access", "scheduler_state": "absent"},
                f"{EXTENDER_LEAVES} and {BACKENDS}.openshift | length > 0",
            ),
        ),
    ),
)


def walk_stages(
    walk: Walk, groups: t.Collection[str], cluster: bool, trusted: t.Callable[[str], str]
) -> list[JsonObject]:
    """Plan the stages of a host and return the steps as data, each with its stage.

    :param walk: of the host.
    :param groups: the inventory's groups in which the host is.
    :param cluster: plan the stages of localhost.
    :param trusted: marks a condition as one that may be evaluated.
    """
    steps: list[JsonObject] = []
    for stage in STAGES:
        if not (cluster if not stage.groups else (set(groups) | walk.groups) & set(stage.groups)):
            continue
        before = len(walk.steps)
        for entry in stage.entries:
            walk.role(entry.role, entry.given, trusted(entry.when) if entry.when else None, entry.tasks)
        steps += [{"stage": stage.name, **step.result()} for step in walk.steps[before:]]
    return steps
