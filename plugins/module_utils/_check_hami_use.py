# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of HAMi: what holds pods to their parts, and what they use. No I/O."""

from __future__ import annotations

import json

from ansible_collections.kubegpu.share.plugins.module_utils import _hami as hami
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_hami import askers, given_to, register
from ansible_collections.kubegpu.share.plugins.module_utils._check_hami_pods import ANEW, OWN_MODES
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Node, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import (
    Reader,
    counted,
    kind,
    listed,
    shorten,
)
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally
from ansible_collections.kubegpu.share.plugins.module_utils._check_use import processes, use

MIG_ALLOCATIONS = "hami.io/vgpu-mig-allocations"
# HAMi's own accounting is this far from NVML's at most, and a context outside of it is this large.
PERCENT, CONTEXT_MIB = 5, 600


def library_is_loaded(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H8: what holds processes to their parts is in them."""
    _processes(node, tally, "whether HAMi's library is in them")
    modes = {gpu.uuid: gpu.mode for gpu in register(node).gpus}
    for pod in askers(node):
        off = [one.name for one in pod.containers if one.env.get("CUDA_DISABLE_CONTROL") in ("true", "1")]
        for gpu in node.nvml.gpus:
            if modes.get(gpu.uuid) in OWN_MODES:
                continue
            for one in processes(gpu, pod):
                tally.seen()
                place = {"pod": pod, "gpu": gpu, "proc": f"pid {one.pid}: libvgpu.so {_word(one.libvgpu)}"}
                if off:
                    tally.warn(
                        f"container {listed(off)} turns HAMi's limits off (CUDA_DISABLE_CONTROL)",
                        "refuse this variable by an admission policy",
                        **place,
                    )
                elif one.libvgpu is None:
                    tally.unknown(f"whether HAMi's library is in {one.label} can't be told", LOOK, **place)
                elif not one.libvgpu:
                    tally.fail(
                        f"{one.label} runs without HAMi's library, so nothing holds it to its part",
                        "see whether /etc/ld.so.preload is in the container and libvgpu.so isn't empty on the node; "
                        "statically linked programs and those started over ssh or sudo escape it",
                        **place,
                    )


def _word(loaded: bool | None) -> str:
    return "unknown" if loaded is None else "mapped" if loaded else "not mapped"


def _processes(node: Node, tally: Tally, what: str) -> None:
    """UNKNOWN where pods hold GPUs and NVML says nothing of processes."""
    mine = askers(node)
    blind = [gpu for gpu in node.nvml.gpus if gpu.processes is None]
    why = node.nvml.problem or (f"NVML doesn't list the processes of {blind[0].label}" if blind else "")
    if mine and why:
        tally.unknown(f"of {counted(len(mine), 'pod')} it can't be told {what}: {why}", LOOK)


def parts_are_kept(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H9: nobody uses more than his part."""
    _processes(node, tally, "what they use")
    gpus = {gpu.uuid: gpu for gpu in register(node).gpus}
    for pod in askers(node):
        given, _problem = given_to(pod)
        for uuid, part in hami.held(pod.json, given or []).items():
            real, listed_gpu = node.nvml.gpu(uuid), gpus.get(uuid)
            if real is None or real.processes is None:
                continue
            tally.seen()
            used = use(real, pod)
            most = part.mib + part.mib * PERCENT // 100 + CONTEXT_MIB * max(1, used.processes)
            place = {"pod": pod, "gpu": real, "api": f"{part.mib} MiB", "nvml": f"{used.mib} MiB"}
            if used.mib is None:
                tally.unknown(f"what it uses of {real.label} can't be told: NVML says N/A", LOOK, **place)
            elif used.mib > most:
                scaled = (
                    listed_gpu is not None and real.total_mib is not None and listed_gpu.devmem > real.total_mib + 1
                )
                say = tally.warn if scaled else tally.fail
                say(
                    f"it uses {used.mib} MiB of {real.label}, and its part is {part.mib} MiB",
                    "see H8; have the pod made anew",
                    **place,
                )


def mig_parts_exist(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H11: the MIG devices that HAMi chose are there, each for one."""
    seen: dict[tuple[str, int | None], str] = {}
    for pod in askers(node):
        text = pod.annotations.get(MIG_ALLOCATIONS)
        if not text or pod.terminating:
            continue
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError):
            rows = None
        reader = Reader()
        entries = reader.objs(rows, MIG_ALLOCATIONS)
        if rows is None or reader.damage:
            why = reader.damage[0] if reader.damage else f"{MIG_ALLOCATIONS} is {kind(text)}"
            tally.unknown(f"which MIG devices it holds can't be told: {why}", ANEW, pod=pod)
            continue
        for one in entries:
            tally.seen()
            if node.nvml.problem:
                tally.unknown(f"its MIG device can't be looked for: {node.nvml.problem}", LOOK, pod=pod)
                continue
            uuid = reader.text(one.get("migUUID"), "migUUID")
            gi, ci = reader.number(one.get("gpuInstanceID"), "GI"), reader.number(one.get("computeInstanceID"), "CI")
            card = reader.text(one.get("gpuUUID"), "gpuUUID")
            if not uuid and not pod.started:
                continue
            gpu = node.nvml.gpu(uuid)
            there = gpu is not None and any((mig.uuid, mig.gi, mig.ci) == (uuid, gi, ci) for mig in gpu.mig)
            place = {
                "pod": pod,
                "uuid": uuid,
                "api": f"{shorten(uuid) or 'no migUUID'} GI {gi} CI {ci} of {shorten(card)}",
            }
            have = listed(f"{m.uuid} GI {m.gi} CI {m.ci}" for g in node.nvml.gpus for m in g.mig) or "no MIG device"
            if gpu is None or not there or gpu.uuid != card:
                tally.fail("NVML doesn't have the MIG device that it was given", ANEW, nvml=have, **place)
            elif (card, gi) in seen:
                tally.fail(f"its GPU instance is also {seen[(card, gi)]}'s", ANEW, nvml=have, **place)
            seen[(card, gi)] = pod.key


CHECKS = (
    Check(
        "H8",
        "hami",
        "HAMi's library is in every process on a GPU",
        "memory maps of the pods' processes; CUDA_DISABLE_CONTROL",
        "FAIL; WARN turned off by the pod",
        node=library_is_loaded,
    ),
    Check(
        "H9",
        "hami",
        "No pod uses more than its part",
        f"memory of the pod's processes with its part, plus {PERCENT} % and {CONTEXT_MIB} MiB for each context",
        "FAIL; WARN where memory is scaled",
        node=parts_are_kept,
    ),
    Check(
        "H11",
        "hami",
        "The MIG devices that HAMi chose exist, each for one pod",
        "vgpu-mig-allocations (UUID, GI, CI) with NVML",
        "FAIL",
        node=mig_parts_exist,
    ),
)
