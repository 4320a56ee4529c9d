# SPDX-License-Identifier: GPL-3.0-or-later
"""Reports and allocations for the tests of the renderings."""

from __future__ import annotations

from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject

LEVELS = ("FAIL", "WARN", "UNKNOWN", "PASS")
UUID = "GPU-5a4d7f2e-0000-4000-8000-0000000000{:02d}"


def check(name: str, result: str = "PASS", n: int = 12, backend: str = "gpushare", **more: Any) -> JsonObject:
    numbers = {"n": n, "fail": 0, "warn": 0, "unknown": 0}
    return {"id": name, "backend": backend, "title": f"{name} holds", "result": result, **numbers, **more}


def finding(name: str, level: str = "FAIL", **more: Any) -> JsonObject:
    place = {"node": "gpu1", "card": 0, "uuid": UUID.format(1), "pod": "", "container": ""}
    about = {"what": f"{name} doesn't hold.", "evidence": {}, "do": "Look at it.", "seen": 2}
    return {"check": name, "level": level, **place, **about, **more}


def pod(name: str, claimed: int | None, used: int | None = None) -> JsonObject:
    return {"pod": name, "uid": f"uid-{name}", "claimed_mib": claimed, "used_mib": used}


def card(index: int = 0, *pods: JsonObject, total: int = 16384, healthy: bool = True, **more: Any) -> JsonObject:
    used = [pod["used_mib"] for pod in pods]
    claimed = sum(pod["claimed_mib"] or 0 for pod in pods)
    memory = {"total_mib": total, "claimed_mib": claimed, "used_mib": None if None in used else sum(used)}
    about = {"uuid": UUID.format(index + 1), "model": "NVIDIA A100-SXM4-40GB", "healthy": healthy, "foreign_mib": 0}
    return {"index": index, **about, **memory, "pods": list(pods), **more}


def node(name: str, *cards: JsonObject, backend: str = "gpushare") -> JsonObject:
    return {"name": name, "backend": backend, "unit": "GiB", "unit_mib": 1024, "cards": list(cards)}


def report(
    checks: list[JsonObject], findings: list[JsonObject], nodes: list[JsonObject], result: str = "PASS", **more: Any
) -> JsonObject:
    head = {"result": result, "time": "2026-11-22T12:00:00Z", "cluster": "https://192.0.2.10:6443"}
    numbers = {"samples": 2, "grace_seconds": 30, "transient": 0, "counts": dict.fromkeys(LEVELS, 0)}
    return {**head, **numbers, "checks": checks, "findings": findings, "nodes": nodes, **more}


HEALTHY = report(
    [check("C2", backend="common"), check("G6", n=4), check("G10", n=0)],
    [],
    [
        node("gpu1", card(0, pod("ml/a", 4096, 3900), pod("ml/b", 8192, 8000)), card(1)),
        node("gpu2", card(0, pod("ml/c", 16384, 120), total=24576)),
    ],
)

TROUBLE = report(
    [
        check("C2", "FAIL", 31, "common", fail=1),
        check("C5", "UNKNOWN", 9, "common", unknown=1),
        check("G6", "FAIL", 6, fail=1),
        check("G7", "PASS", 14),
        check("G9", "WARN", 14, warn=1),
        check("G10", "PASS", 0),
        check("H1", "PASS", 0, "hami"),
        check("S1", "PASS", 3, "servers"),
    ],
    [
        finding(
            "G9",
            "WARN",
            card=1,
            uuid=UUID.format(2),
            pod="research/notebook-7d9c5b6f4-x2v8q",
            what="The pod uses more of the card than it was given.",
            evidence={"api": "4096 MiB claimed", "nvml": "6210 MiB in use by processes 4711 and 4712"},
            do="Tell its owner, or switch on hard limits (gpushare_memory_limit).",
        ),
        finding(
            "C2",
            uuid=UUID.format(1),
            what="A process uses the card outside any pod.",
            evidence={
                "nvml": "process 20817 (python3) holds 2048 MiB of card 0",
                "proc": "its cgroup is /user.slice/user-1000.slice/session-4.scope, which is no pod's",
            },
            do="Ask who runs process 20817 on gpu1, and stop it or move it into a pod.",
        ),
        finding(
            "G6",
            card=1,
            uuid=UUID.format(2),
            what="Pods were given 18432 MiB of a card that has 16384 MiB.",
            evidence={
                "api": "research/notebook-7d9c5b6f4-x2v8q 4096, training/resnet-0 8192, training/by-hand 6144",
                "kubelet": "the checkpoint has no entry for training/by-hand",
                "extender": "it counts 12288 MiB on this card",
            },
            do="Delete training/by-hand: it was put on the node around the scheduler (spec.nodeName).",
        ),
        finding(
            "C5",
            "UNKNOWN",
            node="gpu3",
            card=None,
            uuid="",
            what="The cards of the node couldn't be read.",
            evidence={"nvml": "the machine can't be reached: no route to host"},
            do="Start the machine or take the node out of the cluster.",
        ),
    ],
    [
        node(
            "gpu1",
            card(
                0,
                pod("training/bert-large-0", 8192, 7702),
                pod("training/bert-large-1", 4096, 3890),
                used_mib=13900,
                foreign_mib=2048,
            ),
            card(
                1,
                pod("research/notebook-7d9c5b6f4-x2v8q", 4096, 6210),
                pod("training/resnet-0", 8192, 5000),
                pod("training/by-hand", 6144, 900),
                used_mib=12400,
            ),
            card(2, pod("serving/triton-5f7b9-2kq", 2048, 1020), used_mib=1300, model="NVIDIA T4", total=15360),
            card(3, healthy=False, used_mib=None, foreign_mib=None, reason="XID 79: the GPU has fallen off the bus"),
        ),
        node("gpu2", card(0), card(1, pod("research/big", 40960, 39000), total=40960)),
        node(
            "gpu3",
            card(0, pod("serving/embed-1", 8192), pod("serving/embed-2", 4096), foreign_mib=None),
            backend="gpushare-upstream",
        ),
    ],
    "FAIL",
    transient=2,
)


def share(space: str, name: str, units: int, **more: Any) -> JsonObject:
    """A pod of an allocation."""
    usual = {"phase": "Running", "terminating": False, "problem": ""}
    return {"namespace": space, "name": name, "units": units, **usual, **more}


def allocated(name: str, used: int, cards: list[JsonObject], pending: list[JsonObject], **more: Any) -> JsonObject:
    """A node of an allocation."""
    about = {"name": name, "address": "192.0.2.12", "unit": "GiB", "backend": "gpushare", "memory_limit": ""}
    return {**about, "total": 16, "used": used, "cards": cards, "pending": pending, **more}


IDLE = {**card(0), "memory_mib": 16276, "total": 15, "used": 0, "reason": "", "pods": []}
SICK: JsonObject = {
    **{"index": 0, "uuid": UUID.format(1), "model": "NVIDIA T4", "memory_mib": 16384, "total": 16, "used": 12},
    **{"healthy": False, "reason": "ECC errors"},
    "pods": [share("a", "one", 4), share("a", "two", 8, terminating=True)],
}
ALLOCATION: JsonObject = {
    **{"unit": "GiB", "total": 32, "used": 14, "table": "…", "requests": {"GET": 2}},
    "nodes": [
        allocated("gpu10", 0, [IDLE], [], memory_limit="enforced"),
        allocated("gpu2", 14, [SICK], [share("b", "late", 2, phase="Pending")]),
    ],
    "waiting": [{"namespace": "b", "name": "big", "units": 64, "reason": "no card has so much"}],
}
NVIDIA_PODS = [share("a", "one", 2), share("a", "two", 1, problem="it asks twice")]
GPUS = {"product": "NVIDIA-H200", "memory_mib": 143771, "count": 2, "replicas": 4, "sharing": "mps"}
DGX = allocated(
    *("dgx1", 3, [], NVIDIA_PODS),
    **{"unit": "count", "backend": "nvidia", "total": 8, "problem": "its label nvidia.com/gpu.memory is no number"},
    resources=[{"name": "nvidia.com/gpu.shared", "capacity": 8, "allocatable": 8, "used": 3}],
    gpus=GPUS,
    also=[],
)
NVIDIA: JsonObject = {"unit": "count", "total": 8, "used": 3, "nodes": [DGX], "waiting": []}


def large(nodes: int = 1000, cards: int = 8) -> JsonObject:
    """A cluster of many cards with some 20,000 pods, and something wrong on every hundredth node."""
    listed = []
    for number in range(nodes):
        shares = [[4096] * ((number + place) % 4) + [2048] * (place % 2 * 2) for place in range(cards)]
        listed.append(
            node(
                f"gpu-{number}.rack.example.com",
                *(
                    card(
                        place,
                        *(
                            pod(f"team-{number % 40}/worker-{number}-{place}-{n}", share, share - 300)
                            for n, share in enumerate(mine)
                        ),
                        total=40960,
                        uuid=f"GPU-{number:08x}-{place:04x}-4000-8000-000000000000",
                    )
                    for place, mine in enumerate(shares)
                ),
            )
        )
    wrong = [
        finding("C2", node=f"gpu-{number}.rack.example.com", uuid=f"GPU-{number:08x}-0000-4000-8000-000000000000")
        for number in range(0, nodes, 10)
    ]
    checks = [check("C2", "FAIL", nodes * cards, "common", fail=len(wrong)), check("G6", n=nodes * cards)]
    return report(checks, wrong, listed, "FAIL")
