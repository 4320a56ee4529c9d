# SPDX-License-Identifier: GPL-3.0-or-later
"""Claims are prepared and unprepared in any order, and the process is killed at any point: nothing leaks.

Kubelet's side of it is modelled as it is in v1.36.3; the API frees a claim's memory when its pod is deleted by force.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import threading
import typing as t
from pathlib import Path
from unittest.mock import Mock

import pytest
from dra_kit import NODE, ClaimKube, make_claim, ref, result, uid, until
from gpushare.api.client import KubeError
from gpushare.dra import preparation, records
from gpushare.dra.claims import Claim, ClaimRefused, Code, Unbooked
from gpushare.dra.preparation import FORGOTTEN_SECONDS, Preparation
from gpushare.dra.specifications import Specifications, claim_of
from gpushare.kubelet import plugin_sockets
from gpushare.kubelet.dra import Device, PodClaims
from gpushare.kubelet.errors import InvalidIds
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

CARDS = (
    contract.Card(0, "GPU-AAAA", 0, 16384, 15, model="A", reserved_mib=1024),
    contract.Card(1, "GPU-BBBB", 1, 8192, 8, model="B"),
)
SIZES = {"gpu-aaaa": 15, "gpu-bbbb": 8}


class Node:
    """The driver's part of a node: its folders stay when it ends."""

    def __init__(self, root: Path) -> None:
        self.root, self.kube = root, ClaimKube()
        self.now = 0.0
        self.alive: set[str] = set()
        self.held: list[Claim] = []
        self.refused: list[str] = []
        self.injected: t.Callable[[t.Sequence[str]], t.Mapping[str, str]] = lambda uuids: {
            uuid: f"nvidia.com/gpu={uuid}" for uuid in uuids
        }
        self.cards: tuple[contract.Card, ...] = CARDS
        self.start()

    def start(self) -> None:
        """Start the process, after whatever end of the one before."""
        stores = records.Records(self.root / "claims"), Specifications(self.root / "cdi")
        self.driver = Preparation(NODE, "GiB", self.kube, *stores, lambda: self.now)
        self.driver.cards = lambda: self.cards
        self.driver.injected = self.injected
        self.driver.limits = lambda mib: {"NVIDIA_GPU_MEMORY_LIMIT": str(max(mib.values()))}
        self.driver.hold = self.held.append
        self.driver.on_refused = self.refused.append
        self.driver.restore()

    def prepare(self, *numbers: int) -> list[tuple[Device, ...] | str]:
        found = self.driver.prepare([ref(number) for number in numbers])
        assert list(found) == [uid(number) for number in numbers]
        return list(found.values())

    def unprepare(self, *numbers: int) -> list[str]:
        found = self.driver.unprepare([ref(number) for number in numbers])
        assert list(found) == [uid(number) for number in numbers]
        return list(found.values())

    def files(self) -> list[str]:
        """What the container runtime could read, and all else that is there."""
        return sorted(path.name for path in (self.root / "cdi").glob("*")) if (self.root / "cdi").is_dir() else []

    def specifications(self) -> dict[str, t.Any]:
        found = [json.loads((self.root / "cdi" / file).read_text()) for file in self.files()]
        return {entry["name"]: entry["containerEdits"] for one in found for entry in one["devices"]}

    def listing(self, *numbers: int, pod: int = 0) -> list[PodClaims]:
        """kubelet's list, with a pod for each claim that it has prepared."""
        names = {number: f"gpu.kubegpu.share/claim={uid(number)}-0" for number in numbers}
        return [
            PodClaims("default", f"pod{pod or one}", frozenset({name}), 1, frozenset({(name, f"claim{one}")}))
            for one, name in names.items()
        ]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def gib(number: int, card: str = "gpu-aaaa") -> t.Any:
    return result(card, f"{number}Gi")


def test_a_claim_as_kubelet_and_the_runtime_see_it(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4)))
    (devices,) = node.prepare(1)
    names = (f"gpu.kubegpu.share/claim={uid(1)}-0", "nvidia.com/gpu=GPU-AAAA")
    assert devices == (Device("gpu", NODE, "gpu-aaaa", names, uid(0xFFFF)),)
    (file,) = (node.root / "cdi").iterdir()
    assert file.name == f"gpu.kubegpu.share-claim-{uid(1)}.json"
    assert json.loads(file.read_text()) == {
        "cdiVersion": "0.5.0",
        "kind": "gpu.kubegpu.share/claim",
        "devices": [
            {
                "name": f"{uid(1)}-0",
                "containerEdits": {
                    "env": [
                        "NVIDIA_VISIBLE_DEVICES=void",
                        "ALIYUN_COM_GPU_MEM_IDX=0",
                        "ALIYUN_COM_GPU_MEM_DEV=15",
                        "ALIYUN_COM_GPU_MEM_POD=4",
                        "ALIYUN_COM_GPU_MEM_CONTAINER=4",
                        "NVIDIA_GPU_MEMORY_LIMIT=4096",
                    ]
                },
            }
        ],
    }
    assert [one.key for one in node.held] == ["default/claim1"]
    # Again, by the same process and the next one: the same answer, whatever has changed since.
    node.driver.injected = lambda uuids: {}
    for _turn in range(2):
        assert node.prepare(1) == [devices]
        node.start()
    assert node.unprepare(1) == [""] == node.unprepare(1) and node.files() == [] == node.driver.prepared()
    assert list((node.root / "claims").iterdir()) == []


def test_several_cards_requests_and_claims_of_one_pod(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4), gib(4, "gpu-bbbb"), pods=(9,)))
    node.kube.put(make_claim(2, gib(1), result("gpu-aaaa", "2Gi", request="two/b"), pods=(9,)))
    one, two = node.prepare(1, 2)
    assert isinstance(one, tuple) and [device.cdi[1] for device in one] == [f"nvidia.com/gpu={c.uuid}" for c in CARDS]
    assert isinstance(two, tuple) and [device.request for device in two] == ["gpu", "two"]
    assert len({name for device in (*one, *two) for name in device.cdi[:1]}) == 4


def test_where_the_variable_names_the_cards(node: Node) -> None:
    """One claim with one request is exact; what can't be exact is refused."""
    node.driver.injected = lambda uuids: {}
    node.kube.put(make_claim(1, gib(4), gib(4, "gpu-bbbb"), pods=(9,)))
    node.kube.put(make_claim(2, gib(1), pods=(9,)))
    node.kube.put(make_claim(3, gib(1), result("gpu-bbbb", "1Gi", request="two")))
    node.kube.put(make_claim(5, gib(2), result("gpu-aaaa", "1Gi", request="two")))
    (devices,) = node.prepare(1)
    assert isinstance(devices, tuple) and [len(device.cdi) for device in devices] == [1, 1]
    for edits in node.specifications().values():
        assert edits["env"][0] == "NVIDIA_VISIBLE_DEVICES=GPU-AAAA,GPU-BBBB"
    # As admission asks for several cards of several containers.
    node.kube.put(
        make_claim(
            6,
            *(
                result(f"gpu-{card}", f"{mib}Gi", request=f"gpu-{number}-{at}")
                for at, card in enumerate(("aaaa", "bbbb"))
                for number, mib in enumerate((2, 1))
            ),
        )
    )
    of_pod, of_requests = node.prepare(2, 3)
    assert "CDIRequired: claims default/claim2 and default/claim1 are of one pod" in of_pod
    assert "CDIRequired: claim default/claim3 has requests of different cards" in of_requests
    node.unprepare(1)
    both = "GPU-AAAA,GPU-BBBB"
    for number, wanted in (
        (5, [("GPU-AAAA", "3", "2", "2048"), ("GPU-AAAA", "3", "1", "1024")]),
        (6, [(both, "6", "4", "2048"), (both, "6", "2", "1024")] * 2),
    ):
        (same,) = node.prepare(number)
        assert isinstance(same, tuple)
        names = [device.cdi[0].partition("=")[2] for device in same]
        for name, (visible, pod, container, limit) in zip(names, wanted, strict=True):
            found = dict(one.split("=") for one in node.specifications()[name]["env"])
            assert found["NVIDIA_VISIBLE_DEVICES"] == visible and found["NVIDIA_GPU_MEMORY_LIMIT"] == limit
            assert (found["ALIYUN_COM_GPU_MEM_POD"], found["ALIYUN_COM_GPU_MEM_CONTAINER"]) == (pod, container)

    def required(uuids: t.Sequence[str]) -> t.Mapping[str, str]:
        raise InvalidIds(Reason.CDI_UNAVAILABLE, "no CDI specification names it")

    node.driver.injected = required
    node.kube.put(make_claim(4, gib(1)))
    assert node.prepare(4) == ["CDIUnavailable: claim default/claim4: no CDI specification names it"]


def test_an_error_is_of_one_claim(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4)))
    node.kube.put(make_claim(3, gib(4), result("gpu-cccc", "1Gi")))
    good, gone, unknown = node.prepare(1, 2, 3)
    assert isinstance(good, tuple)
    assert gone == "ClaimNotFound: claim default/claim2 doesn't exist any more"
    assert str(unknown).startswith("UnknownCard: claim default/claim3 has a part of card gpu-cccc")
    node.kube.error = KubeError(503, "ServiceUnavailable", "try later")
    assert node.prepare(1) == ["KubernetesAPIError: claim default/claim1 can't be read from the API: try later"]
    assert node.refused == [Code.CLAIM_NOT_FOUND, Code.UNKNOWN_CARD, Code.API_ERROR]
    odd = ref(1)._replace(uid="../../x")
    for answers in (node.driver.prepare([odd]), node.driver.unprepare([odd])):
        assert str(answers["../../x"]).startswith("InvalidRequest: ")
    assert node.unprepare(1, 2, 3) == ["", "", ""]


def test_a_prepared_claim_whose_card_is_gone_after_a_reboot(node: Node) -> None:
    """containerd's sentence about a CDI device that can't be resolved would be all that the pod's Events say."""
    node.kube.put(make_claim(1, gib(4)))
    (devices,) = node.prepare(1)
    # The card has another UUID; or the machine doesn't show it any more, and its slice kept it with a taint.
    fresh = dataclasses.replace(CARDS[0], uuid="GPU-EEEE")
    lost = dataclasses.replace(CARDS[0], healthy=False, code="CardLost", reason="NVML doesn't answer for it")
    for cards, code in (((fresh, CARDS[1]), "UnknownCard"), ((lost, fresh), "CardLost")):
        node.cards = cards
        node.start()
        (answer,) = node.prepare(1)
        assert str(answer).startswith(f"{code}: claim default/claim1") and "delete the pod" in str(answer)
    # It is back.
    node.cards = CARDS
    assert node.prepare(1) == [devices] and node.unprepare(1) == [""] and node.files() == []


def test_before_the_cards_are_known_none_is_unknown(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4)))

    def unread() -> tuple[contract.Card, ...]:
        raise ClaimRefused(Code.NOT_READY, "the cards haven't been read yet")

    node.driver.cards = unread
    assert node.prepare(1) == ["NotReady: the cards haven't been read yet"] and node.files() == []


def test_a_full_disk_is_an_error_of_the_claim(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.kube.put(make_claim(1, gib(4)))
    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", Mock(side_effect=OSError(28, "No space left")))
        (answer,) = node.prepare(1)
    assert str(answer).startswith("StateNotWritten: the record of claim default/claim1 can't be written: [Errno 28]")
    assert node.files() == [] and list((node.root / "claims").iterdir()) == []
    assert isinstance(node.prepare(1)[0], tuple)


def test_a_specification_that_cannot_be_written_keeps_no_other_claim(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot the folder in memory is empty, and may be full or read-only."""
    for number in (1, 2):
        node.kube.put(make_claim(number, gib(4)))
    node.prepare(1, 2)
    shutil.rmtree(node.root / "cdi")
    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", Mock(side_effect=OSError(28, "No space left")))
        node.start()
        assert str(node.driver.problem).startswith("the CDI specification of claim default/claim1 can't be written: [")
    assert node.unprepare(1) == [""]
    node.driver.observe(node.listing(2), lambda pod: True)
    assert node.driver.problem is None and list(node.specifications()) == [f"{uid(2)}-0"]


def test_a_specification_that_somebody_removed_is_written_again(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4)))
    node.prepare(1)
    before = node.specifications()
    for file in (node.root / "cdi").iterdir():
        file.unlink()
    node.driver.observe(node.listing(1), lambda pod: True)
    assert node.specifications() == before and node.driver.removed == ""


def test_a_folder_that_was_removed_under_its_mount(tmp_path: Path) -> None:
    """rm -r /var/run/cdi on the node: only a new container has the folder that is made again."""
    (tmp_path / "cdi").mkdir()
    mounted = os.open(tmp_path / "cdi", os.O_RDONLY)
    try:
        specs = Specifications(Path(f"/proc/self/fd/{mounted}"))
        assert specs.removed == ""
        (tmp_path / "cdi").rmdir()
        assert "was removed on the node" in specs.removed
        with pytest.raises(OSError, match="No such file"):
            specs.put(uid(1), {})
    finally:
        os.close(mounted)


def test_an_unforeseen_failure_is_of_one_claim(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4)))
    node.kube.put({"metadata": ["no object"]} | {"metadata": {"name": "claim2", "uid": uid(2)}, "status": "odd"})
    good, odd = node.prepare(1, 2)
    assert isinstance(good, tuple) and str(odd).startswith("NotReady: AttributeError")


def test_a_call_that_kubelet_has_given_up_prepares_nothing(node: Node) -> None:
    """Its unprepare may come before a slow API has answered."""
    node.kube.put(make_claim(1, gib(4)))
    reached, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        reached.set()
        assert go_on.wait(20)

    node.kube.before = slow
    waits, prepared, undone = [True], list[t.Any](), list[list[str]]()
    call = threading.Thread(target=lambda: prepared.append(node.driver.prepare([ref(1)], lambda: waits[0])))
    call.start()
    assert reached.wait(20)
    waits[0] = False
    undo = threading.Thread(target=lambda: undone.append(node.unprepare(1)))
    undo.start()
    go_on.set()
    call.join(20)
    undo.join(20)
    assert prepared[0][uid(1)].startswith("CallEnded: ") and undone == [[""]] and node.files() == []


def test_a_call_waits_for_the_memory_of_a_pod_that_is_ending(node: Node) -> None:
    """kubelet would repeat a refused call after more than a minute only."""
    node.kube.put(make_claim(1, gib(12)))
    node.kube.put(make_claim(2, gib(12)))
    node.prepare(1)
    answers, is_wanted = list[t.Any](), [True]

    def call() -> threading.Thread:
        reads = node.kube.reads
        thread = threading.Thread(target=lambda: answers.append(node.driver.prepare([ref(2)], lambda: is_wanted[0])))
        thread.start()
        until(lambda: node.kube.reads > reads + 1)
        return thread

    waiting = call()
    # It is the memory that is waited for: another claim is prepared and unprepared meanwhile.
    node.kube.put(make_claim(3, gib(1)))
    assert isinstance(node.prepare(3)[0], tuple) and node.unprepare(3) == [""] and not answers
    is_wanted[0] = False
    waiting.join(20)
    assert answers.pop()[uid(2)].startswith("CallEnded: ") and node.refused == ["CallEnded"]
    is_wanted[0] = True
    waiting = call()
    assert node.unprepare(1) == [""]
    waiting.join(20)
    assert isinstance(answers.pop()[uid(2)], tuple) and node.refused == ["CallEnded"]


@pytest.mark.parametrize("what", ["cards", "api"])
def test_a_call_waits_for_the_cards_and_for_the_api(node: Node, what: str) -> None:
    """After a reboot kubelet may ask before NVML has answered."""
    node.kube.put(make_claim(1, gib(4)))
    tries = list[int]()

    def cards() -> tuple[contract.Card, ...]:
        tries.append(1)
        if what == "cards" and len(tries) < 2:
            raise ClaimRefused(Code.NOT_READY, "the cards haven't been read yet")
        return CARDS

    def before() -> None:
        node.kube.error = KubeError(0, "Unreachable", "no route") if what == "api" and not node.kube.reads else None

    node.driver.cards, node.kube.before = cards, before
    assert isinstance(node.driver.prepare([ref(1)], lambda: True)[uid(1)], tuple) and node.refused == []


def test_calls_that_wait_leave_threads_for_the_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preparation.WAITING_CALLS < plugin_sockets.THREADS
    monkeypatch.setattr(preparation, "WAITING_CALLS", 0)
    node.kube.put(make_claim(1, gib(12)))
    node.kube.put(make_claim(2, gib(12)))
    node.prepare(1)
    assert node.driver.prepare([ref(2)], lambda: True)[uid(2)].startswith("CardFull: ")


def test_claims_of_a_call_that_has_ended_are_not_read(node: Node) -> None:
    """Each read of an API that hangs takes seconds, and the thread with them."""
    for number in (1, 2, 3):
        node.kube.put(make_claim(number, gib(1)))
    answers = node.driver.prepare([ref(one) for one in (1, 2, 3)], lambda: node.kube.reads < 1)
    assert [str(answer).partition(":")[0] for answer in answers.values()] == ["CallEnded"] * 3 and node.kube.reads == 1


def test_the_limit_of_the_pod_is_set_before_kubelet_gets_its_answer(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4)))

    def fail(claim: Claim) -> None:
        raise ClaimRefused(Reason.MEMORY_LIMIT_FAILED, "the driver refuses")

    node.driver.hold = fail
    assert node.prepare(1) == ["MemoryLimitFailed: the driver refuses"]
    node.driver.hold = node.held.append
    assert isinstance(node.prepare(1)[0], tuple) and [one.key for one in node.held] == ["default/claim1"]


def test_before_the_records_are_read_nothing_is_answered(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4)))
    fresh = Preparation(NODE, "GiB", node.kube, records.Records(node.root / "c"), Specifications(node.root / "d"))
    for answers in (fresh.prepare([ref(1)]), fresh.unprepare([ref(1)])):
        assert str(answers[uid(1)]).startswith("NotReady: the driver has just started")
    assert not fresh.restored


def test_a_damaged_record_is_set_aside(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.kube.put(make_claim(1, gib(4)))
    node.kube.put(make_claim(2, gib(4)))
    node.prepare(1, 2)
    for file, text in ((f"{uid(1)}.json", "{"), ("x.json", (node.root / "claims" / f"{uid(2)}.json").read_text())):
        (node.root / "claims" / file).write_text(text)
    (node.root / "claims" / ".y.json.tmp").write_text("half")
    (node.root / "cdi" / ".gpu.kubegpu.share-claim-z.json.tmp").write_text("half")
    (node.root / "cdi" / "nvidia.yaml").write_text("another's")
    node.start()
    assert [one.uid for one in node.driver.prepared()] == [uid(2)] and caplog.text.count("is renamed") == 2
    left = [f"{uid(1)}.json.damaged", f"{uid(2)}.json", "x.json.damaged"]
    assert sorted(path.name for path in (node.root / "claims").iterdir()) == left
    assert node.files() == [f"gpu.kubegpu.share-claim-{uid(2)}.json", "nvidia.yaml"]
    assert isinstance(node.prepare(1)[0], tuple)


# --------------------------------------------------------------------------- what kubelet lists


def test_a_claim_without_a_record_that_kubelet_lists_is_prepared_once_more(node: Node) -> None:
    """Its record was damaged, or written by a later version; kubelet asks for it only when it starts itself."""
    node.kube.put(make_claim(1, gib(4)))
    node.kube.put(make_claim(2, gib(4)))
    node.prepare(1, 2)
    before = node.specifications()
    for number in (1, 2):
        file = node.root / "claims" / f"{uid(number)}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "version": 2}))
    node.start()
    assert node.specifications() == {}
    # A pod that kubelet is just ending isn't listed for long, and of 2 the pod has gone.
    node.driver.observe(node.listing(1, 2), lambda pod: True)
    assert node.specifications() == {}
    node.driver.observe(node.listing(1), lambda pod: True)
    assert node.specifications() == {name: value for name, value in before.items() if uid(1) in name}
    assert [one.uid for one in node.driver.prepared()] == [uid(1)] == [one.uid for one in node.held[2:]]
    # Its memory isn't given away a second time.
    node.kube.put(make_claim(3, gib(12)))
    assert "CardFull" in str(node.prepare(3)[0])


def test_a_claim_that_kubelet_has_forgotten_is_undone(node: Node) -> None:
    """kubelet's checkpoint is gone, for example because the node was set up again."""
    for number in (1, 2, 3, 4):
        node.kube.put(make_claim(number, gib(1)))
    node.prepare(1, 2, 3, 4)
    # Of 1 the API knows nothing any more, of 2 another one; 3 is still allocated; a process of 4's pod runs.
    del node.kube.claims["claim1"], node.kube.claims["claim4"]
    node.kube.claims["claim2"]["metadata"]["uid"] = uid(22)
    node.alive = {"pod4"}
    assert node.driver.observe([], lambda pod: pod.name in node.alive) == []
    node.now = FORGOTTEN_SECONDS - 1
    # It is listed for a moment: the time begins again.
    node.driver.observe(node.listing(1), lambda pod: pod.name in {*node.alive, "pod1"})
    node.now += 2
    assert node.driver.observe([], lambda pod: pod.name in node.alive) == [uid(2)]
    node.now += FORGOTTEN_SECONDS
    assert node.driver.observe([], lambda pod: pod.name in node.alive) == [uid(1)]
    assert [one.uid for one in node.driver.prepared()] == [uid(3), uid(4)]
    assert {claim_of(f"gpu.kubegpu.share/claim={name}") for name in node.specifications()} == {uid(3), uid(4)}
    # While the API doesn't answer nothing is undone.
    node.kube.error = KubeError(0, "Unreachable", "no route")
    node.alive, node.now = set(), node.now + FORGOTTEN_SECONDS
    assert node.driver.observe([], lambda pod: False) == []


def gone(node: Node) -> None:
    del node.kube.claims["claim1"]


def replaced(node: Node) -> None:
    node.kube.put({**make_claim(2, gib(4)), "metadata": {"namespace": "default", "name": "claim1", "uid": uid(2)}})


def freed(node: Node) -> None:
    node.kube.claims["claim1"]["status"] = {}


def moved(node: Node) -> None:
    node.kube.put(make_claim(1, {**gib(4), "pool": "gpu2"}))


def shrunk(node: Node) -> None:
    node.kube.put(make_claim(1, gib(3), gib(5, "gpu-bbbb")))


@pytest.mark.parametrize(
    ("change", "code", "mib"),
    [
        (gone, "ClaimNotFound", 4096),
        (replaced, "ClaimReplaced", 4096),
        (freed, "ClaimNotAllocated", 4096),
        (moved, "ClaimOfOtherNode", 4096),
        (shrunk, "ClaimNotAllocated", 1024),
    ],
)
def test_a_prepared_claim_that_has_its_memory_no_more_in_the_api(
    node: Node, change: t.Callable[[Node], None], code: str, mib: int, caplog: pytest.LogCaptureFixture
) -> None:
    changes = list[int]()
    node.driver.on_changed = lambda: changes.append(1)
    node.kube.put(make_claim(1, gib(4)))
    node.prepare(1)
    before = node.kube.reads
    # It was read a moment ago.
    node.driver.check_booking()
    assert node.kube.reads == before
    change(node)
    node.now += 11
    # Without an answer nobody knows: an unreachable server, a refusal, a version that isn't served, a proxy's 404.
    for status, reason in ((0, "Unreachable"), (403, "Forbidden"), (404, "NotFound"), (404, "Not Found"), (503, "")):
        node.kube.error = KubeError(status, reason, "")
        node.driver.check_booking()
        assert node.driver.unbooked() == []
        node.now += 11
    node.kube.error = None
    del changes[:]
    node.driver.check_booking()
    ((claim, lost),) = node.driver.unbooked()
    assert (claim.key, lost) == ("default/claim1", Unbooked(code, {"gpu-aaaa": mib})) and changes == [1]
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (warning.__dict__["data"]["pods"], warning.__dict__["data"]["code"]) == (["pod1"], code)
    # What was known stays while there is no answer, also for the next process, which asks at once.
    node.start()
    assert node.driver.unbooked() == [(claim, lost)]
    node.kube.error = KubeError(0, "Unreachable", "no route")
    node.driver.check_booking()
    assert node.driver.unbooked() == [(claim, lost)]
    node.kube.error = None
    # Somebody else gets the memory: the Event of that pod has the numbers, and no name.
    node.kube.put(make_claim(3, gib(15)))
    (answer,) = node.prepare(3)
    assert str(answer).startswith(
        "CardFull: claim default/claim3 is allocated 15360 MiB of card 0, and 11264 of its 15360 MiB are free, since "
        f"claims of pods that haven't ended (1) hold 4096 MiB, {mib} of them without having these in the API (any more)"
    )
    assert "claim1" not in str(answer) and "pod1" not in str(answer)
    # kubelet has ended the pod.
    node.unprepare(1)
    assert node.driver.unbooked() == [] and not isinstance(node.prepare(3)[0], str)


def test_a_claim_is_back_and_a_cache_is_behind(node: Node) -> None:
    node.kube.put(make_claim(1, gib(4)))
    node.prepare(1)
    claim = node.kube.claims.pop("claim1")
    node.now += 11
    # The API server's cache doesn't have it yet; its store has.
    paths = list[str]()
    get = node.kube.get

    def store(path: str) -> t.Any:
        paths.append(path.rpartition("/")[2])
        if "?" not in path:
            node.kube.put(claim)
        return get(path)

    node.kube.get = store  # type: ignore[method-assign]
    node.driver.check_booking()
    assert node.driver.unbooked() == [] and paths == ["claim1?resourceVersion=0", "claim1"]
    node.kube.get = get  # type: ignore[method-assign]
    freed(node)
    node.now += 11
    node.driver.check_booking()
    assert len(node.driver.unbooked()) == 1
    node.kube.put(make_claim(1, gib(4)))
    node.now += 11
    node.driver.check_booking()
    assert node.driver.unbooked() == []


def test_the_claims_on_a_full_card_are_read_at_once(node: Node) -> None:
    """The API has given the same memory to two, so one of them may be gone."""
    for number in (1, 2):
        node.kube.put(make_claim(number, gib(7)))
    node.prepare(1, 2)
    gone(node)
    node.kube.put(make_claim(3, gib(7)))
    assert "CardFull: " in str(node.prepare(3)[0])
    for _pass in range(4):
        node.driver.check_booking()
    assert [(claim.name, lost.code) for claim, lost in node.driver.unbooked()] == [("claim1", "ClaimNotFound")]
    assert "7168 of them without having these in the API" in str(node.prepare(3)[0])
    # Calls that are refused again and again keep no other claim from being read.
    node.kube.put(make_claim(4, gib(1, "gpu-bbbb")))
    node.prepare(4)
    node.now += 11
    del node.kube.claims["claim4"]
    for _pass in range(4):
        node.prepare(3)
        node.driver.check_booking()
    assert [claim.name for claim, _lost in node.driver.unbooked()] == ["claim1", "claim4"]


def test_many_claims_elsewhere_do_not_delay_those_on_a_full_card(node: Node) -> None:
    """A claim may be a MiB, so somebody may have thousands: a turn of all takes minutes."""
    many = range(100, 300)
    for number in many:
        node.kube.put(make_claim(number, result("gpu-bbbb", "1Mi")))
    for number in (1, 2):
        node.kube.put(make_claim(number, gib(7)))
    node.prepare(*many)
    node.now += 1
    node.prepare(1, 2)
    gone(node)
    node.kube.put(make_claim(3, gib(7)))
    # All others are due, and were read longer ago.
    node.now += 30
    assert "CardFull: " in str(node.prepare(3)[0])
    for _pass in range(5):
        node.driver.check_booking()
    assert [claim.name for claim, _lost in node.driver.unbooked()] == ["claim1"]
    before = node.kube.reads
    for _pass in range(200):
        node.driver.check_booking()
    # Three of the others were read meanwhile.
    assert node.kube.reads == before + 197


def test_many_claims_are_read_in_turn(node: Node) -> None:
    for number in range(1, 9):
        node.kube.put(make_claim(number, gib(1)))
    node.prepare(*range(1, 9))
    node.now, before = 10.0, node.kube.reads
    seen = list[str]()
    node.kube.before = lambda: seen.append("read")
    for _pass in range(20):
        node.driver.check_booking()
    assert node.kube.reads == before + 8
    del node.kube.claims["claim5"]
    node.now = 20.0
    for _pass in range(8):
        node.driver.check_booking()
    assert [claim.name for claim, _lost in node.driver.unbooked()] == ["claim5"]


def test_a_claim_that_is_gone_and_whose_pod_does_not_start_after_a_reboot(node: Node) -> None:
    """kubelet lists it as long as the API has the pod, and can't prepare it: no process holds the memory."""
    node.kube.put(make_claim(1, gib(4)))
    node.prepare(1)
    gone(node)
    node.now += 11
    node.driver.check_booking()
    listing, there = node.listing(1), {uid(0x1001)}

    def observe(processes: bool) -> list[str]:
        return node.driver.observe(listing, lambda pod: pod.uid in there, lambda pod: processes)

    for _pass in range(3):
        assert observe(True) == []
        node.now += 61
    assert observe(False) == [] and len(node.driver.unbooked()) == 1
    node.now += 61
    assert observe(False) == [uid(1)] and node.driver.unbooked() == [] and node.files() == []
    # One that the API has stays, whatever its pod does.
    node.kube.put(make_claim(2, gib(4)))
    node.prepare(2)
    listing = node.listing(2)
    for _pass in range(3):
        node.now += 61
        assert observe(False) == [] and len(node.driver.prepared()) == 1


def test_a_second_pod_of_a_claim_is_held_too(node: Node) -> None:
    """kubelet prepares a claim once, whatever pods come later."""
    node.kube.put(make_claim(1, gib(1), pods=(5,)))
    node.prepare(1)
    node.kube.put(make_claim(1, gib(1), pods=(5, 6)))
    reads = node.kube.reads
    listing = node.listing(1, pod=5) + node.listing(1, pod=6)
    node.driver.observe(listing, lambda pod: True)
    assert [pod.name for pod in node.held[-1].pods] == ["pod5", "pod6"] and node.kube.reads == reads + 1
    for _turn in range(3):
        node.driver.observe(listing, lambda pod: True)
    # A pod without a cgroup, or one that the API doesn't name, isn't asked for again and again.
    for _turn in range(3):
        node.driver.observe([*listing, *node.listing(1, pod=7)], lambda pod: False)
    assert node.kube.reads == reads + 2
    node.start()
    assert [pod.name for one in node.driver.prepared() for pod in one.pods] == ["pod5", "pod6"]


# --------------------------------------------------------------------------- any order, killed at any point


class Killed(BaseException):
    """SIGKILL."""


class Disk:
    """Ends the process at a chosen access to the disk: before it, in the middle of a write, or after it."""

    def __init__(self) -> None:
        self.left = -1
        self._write, self._remove = records.write, records.remove

    @contextlib.contextmanager
    def ending(self, accesses: int) -> t.Iterator[None]:
        """Kill after so many steps of accesses; each has three."""
        self.left = accesses
        records.write, records.remove = self.write, self.remove
        try:
            yield
        finally:
            records.write, records.remove = self._write, self._remove

    def step(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1

    def write(self, path: Path, text: str) -> None:
        self.step()
        if self.left == 0:
            path.with_name(f".{path.name}.tmp").write_text(text[: len(text) // 2])
        self.step()
        self._write(path, text)
        self.step()

    def remove(self, path: Path) -> None:
        self.step()
        self._remove(path)
        self.step()


class AnyOrder(RuleBasedStateMachine):
    """The scheduler gives memory of claims that the API has; kubelet prepares and unprepares."""

    numbers = st.integers(1, 6)
    kills = st.none() | st.integers(0, 7)

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.node = Node(Path(self._folder.name))
        self.disk = Disk()
        # By the claim's number: what the API has, and what kubelet has in its checkpoint and has prepared.
        self.allocated: dict[int, dict[str, int]] = {}
        self.known: dict[int, dict[str, int]] = {}
        self.prepared: dict[int, tuple[Device, ...]] = {}
        self.generation = dict.fromkeys(range(1, 7), 0)

    def teardown(self) -> None:
        self._folder.cleanup()

    def number(self, number: int) -> int:
        """The number of the claim of this name that is there now, as its UID has it."""
        return number + 10 * self.generation[number]

    @rule(number=numbers, shares=st.dictionaries(st.sampled_from(sorted(SIZES)), st.integers(1, 9), min_size=1))
    def allocate(self, number: int, shares: dict[str, int]) -> None:
        if number in self.allocated or any(
            sum(one.get(card, 0) for one in self.allocated.values()) + size > SIZES[card]
            for card, size in shares.items()
        ):
            return
        if number in self.known:
            # A claim of this name that kubelet still knows has another UID.
            return
        self.generation[number] += 1
        claim = make_claim(self.number(number), *(gib(size, card) for card, size in shares.items()))
        self.node.kube.put(claim)
        self.allocated[number] = shares

    @rule(number=numbers, kill=kills)
    def prepare(self, number: int, kill: int | None) -> None:
        if number not in self.allocated:
            return
        self.known[number] = self.allocated[number]
        answers = self._call(kill, lambda: self.node.prepare(self.number(number)))
        if answers is None:
            return
        (answer,) = answers
        if isinstance(answer, tuple):
            if number in self.prepared:
                assert answer == self.prepared[number], "kubelet keeps the first answer"
            self.prepared[number] = answer
            return
        # Only a pod that was deleted by force may be in the way.
        assert answer.startswith("CardFull: ") and number not in self.prepared
        held = [one for one, shares in self.known.items() if one not in self.allocated]
        assert held

    @rule(number=numbers, kill=kills)
    def unprepare(self, number: int, kill: int | None) -> None:
        """A pod has ended: kubelet unprepares, and the claim's controller frees it."""
        if number not in self.known:
            return
        if self._call(kill, lambda: self.node.unprepare(self.number(number))) != [""]:
            # kubelet tries again.
            return
        del self.known[number]
        self.prepared.pop(number, None)
        self.node.kube.claims.pop(f"claim{self.number(number)}", None)
        self.allocated.pop(number, None)

    @rule(number=numbers)
    def delete_by_force(self, number: int) -> None:
        if self.allocated.pop(number, None) is not None:
            self.node.kube.claims.pop(f"claim{self.number(number)}")

    @rule()
    def kill(self) -> None:
        self.node.start()

    @rule()
    def reboot(self) -> None:
        """The folder of CDI specifications is in memory."""
        for file in (self.node.root / "cdi").glob("*"):
            file.unlink()
        self.node.start()

    @rule()
    @precondition(lambda self: self.known)
    def kubelet_forgets(self) -> None:
        """Its checkpoint is lost while no container runs."""
        self.known, self.prepared = {}, {}
        for number in list(self.allocated):
            self.delete_by_force(number)
        self.node.driver.observe([], lambda pod: False)
        self.node.now += FORGOTTEN_SECONDS
        self.node.driver.observe([], lambda pod: False)
        assert self.node.files() == [] == self.node.driver.prepared()

    def _call(self, kill: int | None, call: t.Callable[[], t.Any]) -> t.Any:
        """Call the driver; None if it was killed meanwhile, after which it is started again."""
        try:
            with self.disk.ending(-1 if kill is None else kill):
                return call()
        except Killed:
            self.node.start()
            return None

    @invariant()
    def nothing_leaks(self) -> None:
        there = {
            int(claim_of(f"gpu.kubegpu.share/claim={specification}")[:8], 16)
            for specification in self.node.specifications()
        }
        known, prepared = {self.number(one) for one in self.known}, {self.number(one) for one in self.prepared}
        assert prepared <= there <= known
        assert there == {int(one.uid[:8], 16) for one in self.node.driver.prepared()}
        assert len(self.node.files()) == len(there)

    @invariant()
    def nothing_is_used_twice(self) -> None:
        for card, size in SIZES.items():
            used = sum(one.mib().get(card, 0) for one in self.node.driver.prepared())
            assert used <= size * 1024


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)
