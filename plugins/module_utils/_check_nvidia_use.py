# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of NVIDIA's device plugin: MPS and MIG at work. No I/O."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils import _nvidia_plugin as nvidia
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_grant import given
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Gpu, Node, Process, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_nvidia import (
    ANEW,
    RESTART,
    SLACK_MIB,
    holders,
    sharing,
    slots,
)
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import listed, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally
from ansible_collections.kubegpu.share.plugins.module_utils._check_use import processes

MIG_STATE = "nvidia.com/mig.config.state"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_SERVER = "nvidia-cuda-mps-server"


def mps_holds(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """N6: pods' processes go through MPS, and keep to its limit."""
    if sharing(node) != "mps":
        return
    tally.seen(len(node.nvml.gpus))
    if node.nvml.problem:
        tally.unknown(f"whether MPS is at work can't be told: {node.nvml.problem}", LOOK)
        return
    for pod, entry in holders(node):
        if entry.envs is not None and PIPE not in entry.envs:
            tally.fail(
                f"container {entry.container} isn't told where MPS is ({PIPE})",
                RESTART,
                pod=pod,
                container=entry.container,
                kubelet=f"{PIPE} missing",
            )
    for gpu in node.nvml.gpus:
        if gpu.compute_mode != "exclusive_process":
            say = tally.unknown if gpu.compute_mode in ("", "unknown") else tally.fail
            say(
                f"{gpu.label} is in compute mode {gpu.compute_mode or 'unknown'}: programs can get past MPS",
                "restart the MPS control daemon on the node",
                gpu=gpu,
                nvml=f"compute mode {gpu.compute_mode}",
            )
        _clients(node, gpu, tally)


def _clients(node: Node, gpu: Gpu, tally: Tally) -> None:
    mine = [(pod, one) for pod in node.pods if pod.active for one in processes(gpu, pod) if MPS_SERVER not in one.name]
    serving = any(MPS_SERVER in one.name for one in gpu.processes or ())
    replicas = slots(node)
    if gpu.processes is None:
        tally.unknown(f"who uses {gpu.label} by MPS can't be told: NVML doesn't list processes", LOOK, gpu=gpu)
    if mine and not serving:
        tally.fail(
            f"programs use {gpu.label}, and no {MPS_SERVER} does",
            "restart the MPS control daemon on the node",
            gpu=gpu,
            key="server",
            parts={str(one.pid): 1 for _pod, one in mine},
            most=0,
            nvml=listed(f"pid {one.pid} {one.name}" for one in gpu.processes or ()),
        )
    for pod, one in mine:
        place = {"pod": pod, "gpu": gpu, "nvml": f"pid {one.pid}: {one.used_mib} MiB, {listed(one.types)}"}
        if not one.types:
            tally.unknown(f"whether {one.label} uses {gpu.label} by MPS can't be told", LOOK, **place)
        elif "mps" not in one.types:
            tally.fail(f"{one.label} uses {gpu.label} past MPS", ANEW, **place)
        elif replicas and gpu.total_mib is not None:
            most = gpu.total_mib // replicas
            if one.used_mib is None:
                tally.unknown(f"what {one.label} uses can't be told: NVML says N/A", LOOK, **place)
            elif one.used_mib > most + SLACK_MIB:
                tally.fail(f"{one.label} uses {one.used_mib} MiB, and MPS should allow it {most}", ANEW, **place)


def mig_is_kept(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """N7: MIG is as it was asked for, and each process in its pod's device."""
    state = node.labels.get(MIG_STATE)
    if state is not None:
        tally.seen()
        if state != "success":
            say = tally.warn if state in ("pending", "rebooting") else tally.fail
            say(
                f"the MIG layout that was asked for isn't there ({MIG_STATE}={shorten(state)})",
                "see the MIG manager's log",
                api=f"{MIG_STATE}={shorten(state)}",
            )
    if node.nvml.problem and any(one.startswith(nvidia.RESOURCE_MIG) for one in node.resources()):
        tally.unknown(f"who uses which MIG device can't be told: {node.nvml.problem}", LOOK)
    for gpu in node.nvml.gpus:
        if gpu.mig_mode != "enabled":
            continue
        for pod in node.pods:
            for one in processes(gpu, pod) if pod.active else ():
                grant = given(node, pod).uuids
                if grant is None or not any(uuid.startswith("MIG-") for uuid in grant):
                    continue
                tally.seen()
                device = _device(gpu, one)
                place = {"pod": pod, "gpu": gpu, "nvml": f"pid {one.pid}: GI {one.gi}, CI {one.ci} {one.mig_uuid}"}
                if not device:
                    tally.unknown(f"in which MIG device {one.label} is can't be told", LOOK, **place)
                elif device not in grant:
                    tally.fail(
                        f"{one.label} is in {device}, and its pod was given {listed(sorted(grant))}",
                        ANEW,
                        kubelet=listed(sorted(grant)),
                        **place,
                    )


def _device(gpu: Gpu, one: Process) -> str:
    """The MIG device of a process, by its UUID or its instances; empty where neither tells."""
    if one.mig_uuid:
        return one.mig_uuid
    found = [mig.uuid for mig in gpu.mig if (mig.gi, mig.ci) == (one.gi, one.ci) and one.gi is not None]
    return found[0] if len(found) == 1 else ""


CHECKS = (
    Check(
        "N6",
        "nvidia",
        "MPS holds the pods' processes",
        f"compute mode, {MPS_SERVER}, types and memory of the processes, {PIPE} in kubelet's answer",
        "FAIL",
        node=mps_holds,
    ),
    Check(
        "N7",
        "nvidia",
        "MIG is as asked for, and every process in its pod's device",
        f"{MIG_STATE}, and the processes' instances with kubelet's answer",
        "FAIL; WARN while it changes",
        node=mig_is_kept,
    ),
)
