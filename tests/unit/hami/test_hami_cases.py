# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite of HAMi's cases over a simulated cluster that books as HAMi's scheduler does, and over broken ones."""

from __future__ import annotations

import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import hami
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.cases import parse
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.hami import CASES, Free, Request, fits
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import HAMI, Options
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.run import run
from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import CommandFailed
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from fake_clock import FakeClock
from fake_kube import FakeKube

GIB16 = 16384
REGISTER = "hami.io/node-nvidia-register"


def card(number, scaling=1, count=10):
    size = {
        "count": count,
        "devmem": GIB16 * scaling,
        "devcore": 100,
        "type": "NVIDIA-T4",
        "mode": "hami-core",
        "health": True,
    }
    return {"id": f"GPU-{number}", **({"index": number} if number else {}), **size}


class Cluster(FakeKube):
    """One node; pods are booked card by card when they are created, and retried when others go.

    :ivar overbooks: cards are never full.
    :ivar preloads: containers have HAMi's library.
    :ivar refusal: with what a program that allocates more than its container has ends.
    """

    def __init__(self, cards, overbooks=False, preloads=True, refusal=102):
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "gpu1", "annotations": {REGISTER: json.dumps(cards)}},
        }
        node["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
        labels = {"app.kubernetes.io/component": "hami-device-plugin"}
        template = {
            "metadata": {"labels": labels},
            "spec": {"containers": [{"name": "p", "image": "example.com/hami:1"}]},
        }
        plugin = {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "p", "namespace": "h"},
            "spec": {"template": template},
        }
        super().__init__(node, plugin)
        self.cards, self.overbooks, self.preloads, self.refusal = cards, overbooks, preloads, refusal

    def apply(self, definition, manager):
        done = super().apply(definition, manager)
        if definition["kind"] == "Pod":
            self.schedule(Ref("v1", "Pod", definition["metadata"]["namespace"], definition["metadata"]["name"]))
        return done

    def schedule(self, ref):
        pod = self.objects[ref]
        assert pod["spec"]["schedulerName"] == "hami-scheduler", "the webhook may leave other pods alone"
        limits = {
            key: int(value)
            for key, value in pod["spec"]["containers"][0]["resources"]["limits"].items()
            if "gpu" in key
        }
        count, memory = limits.get("nvidia.com/gpu", 1), limits.get("nvidia.com/gpumem")
        cores = limits.get("nvidia.com/gpucores", 0 if memory else 100)
        chosen, reasons = [], []
        for card in self.cards:
            held = [part for uuid, part in self.held() if uuid == card["id"]]
            wanted = memory or card["devmem"]
            if not self.overbooks and sum(mib for mib, _cores in held) + wanted > card["devmem"]:
                reasons.append("CardInsufficientMemory")
            elif sum(cores for _mib, cores in held) + cores > card["devcore"] or (cores == 100 and held):
                reasons.append("CardInsufficientCore")
            elif any(cores == 100 for _mib, cores in held) or len(held) >= card["count"]:
                reasons.append("CardTimeSlicingExhausted")
            else:
                chosen.append(f"{card['id']},NVIDIA,{wanted},{cores}")
        if len(chosen) < count:
            message = f"0/1 nodes are available: 1 {reasons[0] if reasons else 'NodeInsufficientDevice'}."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
            return
        pod["metadata"].setdefault("annotations", {})["hami.io/vgpu-devices-allocated"] = (
            ":".join(chosen[:count]) + ":;"
        )
        pod["spec"]["nodeName"] = "gpu1"
        pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "c0", "state": {"running": {}}}]}

    def held(self):
        for pod in self.list_all("v1", "Pod", field_selector="spec.nodeName=gpu1"):
            for container in hami.allocated(pod["metadata"]["annotations"]["hami.io/vgpu-devices-allocated"]):
                for uuid, mib, cores in container:
                    yield uuid, (mib, cores)

    def execute(self, namespace, pod, container, argv):
        limits = self.objects[Ref("v1", "Pod", namespace, pod)]["spec"]["containers"][0]["resources"]["limits"]
        memory = int(limits["nvidia.com/gpumem"]) if self.preloads else GIB16
        if argv[0] == "printenv":
            return f"{limits['nvidia.com/gpumem']}m\n"
        if argv[0] == "nvidia-smi":
            return f"{memory} MiB\n"
        if memory < 2000:
            raise CommandFailed(f"allocate ended with {self.refusal}: out of memory", self.refusal)
        return ""


def suite(kube, **options):
    clock = FakeClock()
    given = {"suite": HAMI, "allocate_command": ["hold", "2000"], "program_command": ["vectorAdd"], **options}
    done = run(kube, kube.execute, Options(**given), False, Waiting(60, sleep=clock.sleep, now=clock.now))
    assert not [ref for ref in kube.objects if ref.kind in ("Pod", "Namespace")], "everything is removed"
    return done


def results(done):
    return {step["title"]: step["result"] for step in done["acceptance"]["steps"] if step.get("proves")}


SILICON = {case.title for case in CASES if "silicon" in case.evidence}


def test_the_table_on_two_cards():
    """Six run and four wait; what only silicon shows is UNKNOWN, and so is the whole."""
    done = suite(Cluster([card(0), card(1)]))
    assert results(done) == {case.title: "UNKNOWN" if case.title in SILICON else "PASS" for case in CASES}
    steps = {step["title"]: step for step in done["acceptance"]["steps"]}
    first = steps[CASES[0].title]
    assert (first["what"], first["by"]) == ("6 run, 4 wait", ["scheduling", "annotation"]) and first["proves"] == CASES[
        0
    ].proves
    assert done["acceptance"]["result"] == "UNKNOWN" and done["acceptance"]["node"] == "gpu1"
    assert {check["backend"] for check in done["checks"]} == {"hami"}


def test_scaled_memory_and_split_count_run_more():
    case = {
        "id": "ten",
        "title": "ten",
        "proves": "p",
        "evidence": ["scheduling"],
        "limits": {"nvidia.com/gpumem": 5000},
        "at_most": 10,
    }
    done = suite(Cluster([card(0, 3), card(1, 3)]), cases=[case])
    steps = {step["title"]: step["what"] for step in done["acceptance"]["steps"]}
    assert steps["ten"] == "10 run, 0 wait" and steps[CASES[0].title] == "18 run, 4 wait"
    case |= {
        "title": "slots",
        "limits": {"nvidia.com/gpumem": 1},
        "at_most": 0,
        "more": 1,
        "reason": "CardTimeSlicingExhausted",
    }
    done = suite(Cluster([card(0, count=2)]), cases=[case])
    assert {step["title"]: step["what"] for step in done["acceptance"]["steps"]}["slots"] == "2 run, 1 wait"


def test_a_scheduler_that_overbooks_fails():
    found = results(suite(Cluster([card(0), card(1)], overbooks=True)))
    assert {found[case.title] for case in CASES if case.id in ("memory", "too_much")} == {"FAIL"}
    assert found[next(case.title for case in CASES if case.id == "cores")] == "PASS"


def test_a_library_that_isnt_loaded_fails():
    found = results(suite(Cluster([card(0)], preloads=False)))
    assert {case.id for case in CASES if found[case.title] == "FAIL"} == {"library", "allocation_fails"}


@pytest.mark.parametrize("status", [1, 127, 134, 139])
def test_a_program_that_crashes_or_isnt_there_shows_no_refusal(status):
    found = results(suite(Cluster([card(0)], refusal=status)))
    unknown = {case.id for case in CASES if found[case.title] == "UNKNOWN"}
    assert unknown == {"allocation_fails", "throttled", "swaps"}


def test_without_a_program_nothing_is_said_about_allocations():
    found = results(suite(Cluster([card(0)]), allocate_command=[], program_command=[]))
    unknown = {case.id for case in CASES if found[case.title] == "UNKNOWN"}
    assert unknown == {"allocation_fails", "allocation_runs", "computes", "throttled", "swaps"}
    # One card can't show two.
    assert found[next(case.title for case in CASES if case.id == "two_cards")] == "skipped"


def test_without_hami_nothing_is_tested():
    kube = Cluster([card(0)])
    kube.objects[Ref("v1", "Node", "", "gpu1")]["metadata"]["annotations"] = {}
    assert suite(kube)["acceptance"]["result"] == "skipped"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(1, 5000, 0), 3 + 1),
        (Request(1, 1, 0), 10 + 2),
        (Request(1, 1000, 60), 1 + 0),
        (Request(1, None, 100), 1),
        (Request(2, 1000, 0), 2),
        (Request(2, 5000, 0), 1),
        (Request(3, 1, 0), 0),
    ],
)
def test_what_fits_is_hamis_rule(request_, expected):
    cards = [Free("a", GIB16, 100, 10, True), Free("b", 6000, 40, 2, False)]
    assert fits(request_, cards) == expected


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"id": "x"}, "number 1 isn't a case"),
        ({"id": "x", "title": "t", "proves": "p", "evidence": ["hope"], "limits": {}}, "evidence is one or more of"),
        ({"id": "x", "title": "t", "proves": "p", "evidence": ["scheduling"], "limits": {"a": "b"}}, "isn't a case"),
    ],
)
def test_a_case_of_another_form_is_refused(case, words):
    with pytest.raises(BadInput, match=words):
        parse([case])
