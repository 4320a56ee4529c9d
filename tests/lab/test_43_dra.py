# SPDX-License-Identifier: GPL-3.0-or-later
"""Shares by the in-tree scheduler: gpushare_allocation: dra on the lab, with the real kubelet and NVIDIA's runtime.

The module removes what site.yml had left, deploys the DRA driver instead, and restores the first state at its end.
"""

from __future__ import annotations

import collections
import json
import random
import re
import threading
import time
import typing as t
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from _attacks import TABLE, Outcome, Try
from _greedy import images
from _hardware import fault
from _lab import INVENTORY, REPORT, ApiError, JsonObject, Lab, until, without_machines
from _pods import STRATEGIC, body, container, containers, delete_pods
from test_42_attacks import LIMIT, MAPS, TOO_MUCH, Result, Scene, check_outcome, played, started
from test_44_updates_and_leaders import DAEMONSETS, update

from lab import engine

SITE, UNINSTALL = "playbooks/site.yml", "playbooks/uninstall.yml"
VERIFY, INSPECT, ACCEPTANCE = "playbooks/verify.yml", "playbooks/inspect.yml", "playbooks/acceptance.yml"
DRIVER, COMMAND = "gpu.kubegpu.share", "gpushare-dra-driver"
FOLDER = f"/var/lib/kubelet/plugins/{DRIVER}"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
MANIFEST = "/etc/kubernetes/manifests/kube-scheduler.yaml"
GIB = 1 << 30
SPACE = "lab-dra"

pytestmark = pytest.mark.long


# --------------------------------------------------------------------------- what is there


def slices(lab: Lab, node: str) -> list[JsonObject]:
    """Return the devices of a node, in the scheduler's order."""
    found = lab.api.items(f"{SLICES}?fieldSelector=spec.nodeName%3D{node},spec.driver%3D{DRIVER}")
    ordered = sorted(found, key=lambda one: str(one["metadata"]["name"]))
    return [device for one in ordered for device in one["spec"].get("devices", [])]


def gib(quantity: str) -> int:
    """Parse a quantity of whole GiB."""
    number = re.fullmatch(r"(\d+)Gi", quantity)
    assert number, quantity
    return int(number[1])


def claims(lab: Lab) -> list[JsonObject]:
    return lab.api.items("/apis/resource.k8s.io/v1/resourceclaims")


def held(lab: Lab) -> dict[str, int]:
    """Return the GiB that claims have of each device."""
    found: collections.Counter[str] = collections.Counter()
    for claim in claims(lab):
        allocation = claim.get("status", {}).get("allocation") or {}
        for result in allocation.get("devices", {}).get("results", []):
            if result["driver"] == DRIVER:
                found[result["device"]] += gib(result["consumedCapacity"]["memory"])
    return dict(found)


def files(lab: Lab, node: str) -> tuple[set[str], set[str]]:
    """Return the UIDs of the claims that have a record, and of those that have a CDI specification."""
    script = f"ls {FOLDER}/claims /var/run/cdi 2>/dev/null; true"
    names = lab.ssh(node, script).split()
    specified = {name[len(DRIVER) + 7 : -5] for name in names if name.startswith(f"{DRIVER}-claim-")}
    return {name[:-5] for name in names if re.fullmatch(r"[0-9a-f-]{36}\.json", name)}, specified


def nothing_left(lab: Lab) -> bool:
    """Test whether neither claims nor files of claims are left."""
    found = {node: files(lab, node) for node in lab.gpu_nodes}
    assert found == {node: (set(), set()) for node in lab.gpu_nodes}, found
    assert held(lab) == {}
    return True


def announced(lab: Lab) -> bool:
    """Test whether every card is offered, with all of its memory."""
    for node in lab.gpu_nodes:
        found = slices(lab, node)
        assert [gib(one["capacity"]["memory"]["value"]) for one in found] == [16, 16], found
        assert not any("taints" in one for one in found), found
    return True


def requested(amount: int) -> JsonObject:
    """Return the spec of a claim of so many GiB."""
    exactly = {"deviceClassName": DRIVER, "capacity": {"requests": {"memory": f"{amount}Gi"}}}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


def using(lab: Lab, name: str, claim: Mapping[str, str], node: str = "", **more: t.Any) -> JsonObject:
    """Return a pod whose container uses a claim, which is named as in the API's PodResourceClaim."""
    one = container(lab, 0, resources={"claims": [{"name": "gpu"}]}, **more)
    return body(name, one, node=node, resourceClaims=[{"name": "gpu", **claim}])


def claimed(lab: Lab, name: str, amount: int, node: str = "", **more: t.Any) -> JsonObject:
    """Return a pod with a claim of so many GiB by the template ``gib-<amount>``."""
    return using(lab, name, {"resourceClaimTemplateName": f"gib-{amount}"}, node, **more)


def cards_of(lab: Lab, pod: JsonObject) -> set[str]:
    """Return the UUIDs that a pod's container sees."""
    text = lab.inside(SPACE, pod["metadata"]["name"], "c0", "nvidia-smi", "-L")
    return set(re.findall(r"GPU-[0-9a-f-]+", text))


def given(lab: Lab, pod: JsonObject) -> set[str]:
    """Return the UUIDs of the cards that a pod's claims are allocated."""
    names = {status["resourceClaimName"] for status in pod["status"]["resourceClaimStatuses"]}
    return {
        f"GPU-{result['device'][4:]}"
        for claim in claims(lab)
        if claim["metadata"]["name"] in names and claim["metadata"]["namespace"] == pod["metadata"]["namespace"]
        for result in claim["status"]["allocation"]["devices"]["results"]
    }


def verified(lab: Lab, folder: Path, inventory: str = INVENTORY) -> JsonObject:
    """Run verify.yml, which must find no contradiction, and return its report."""
    path = folder / "report.json"
    words = ("-e", "gpushare_allocation=dra", "-e", "verify_grace=10", "-e", f"verify_json={path}")
    done = lab.playbook(VERIFY, *words, inventory=inventory)
    assert path.exists(), done.out[-8000:]
    report: JsonObject = json.loads(path.read_text())
    wrong = [finding for finding in report["findings"] if finding["level"] == "FAIL"]
    assert (done.rc, wrong) == (0, []), done.out[-8000:]
    return report


def compared(report: JsonObject) -> dict[str, int]:
    """Return how many things each check compared, without those that lacked evidence."""
    unknown = {finding["check"] for finding in report["findings"] if finding["level"] == "UNKNOWN"}
    return {check["id"]: check["n"] for check in report["checks"] if check["id"] not in unknown}


def inspected(lab: Lab) -> dict[str, dict[str, dict[str, int]]]:
    """Return inspect.yml's units by node, card (UUID in lower case) and pod."""
    done = lab.playbook(INSPECT, "-e", "gpushare_allocation=dra", "-e", "inspect_format=json")
    assert done.rc == 0, done.out[-8000:]
    shown, _end = json.JSONDecoder().raw_decode(done.out[done.out.index("\n{") + 1 :])
    assert not [node["problem"] for node in shown["nodes"] if node["problem"]], shown
    return {
        node["name"]: {
            card["uuid"].lower(): {f"{pod['namespace']}/{pod['name']}": pod["units"] for pod in card["pods"]}
            for card in node["cards"]
        }
        for node in shown["nodes"]
    }


def by_the_api(lab: Lab) -> dict[str, dict[str, dict[str, int]]]:
    """Return the same by the claims in the API."""
    found: dict[str, dict[str, dict[str, int]]] = {
        node: {one["name"]: {} for one in slices(lab, node)} for node in lab.gpu_nodes
    }
    for claim in claims(lab):
        status = claim.get("status", {})
        for result in (status.get("allocation") or {}).get("devices", {}).get("results", []):
            (user,) = status["reservedFor"]
            card = found[result["pool"]][result["device"]]
            key = f"{claim['metadata']['namespace']}/{user['name']}"
            card[key] = card.get(key, 0) + gib(result["consumedCapacity"]["memory"])
    return found


# --------------------------------------------------------------------------- the deployment


@pytest.fixture(scope="module")
def dra(lab: Lab) -> Iterator[dict[str, list[JsonObject]]]:
    """The cluster in mode dra; the cards of each node as the device plugin described them before.

    Nothing of the control plane is changed by it.
    """
    cards = {name: lab.cards(name) for name in lab.gpu_nodes}
    gone = lab.playbook(UNINSTALL)
    assert gone.rc == 0, gone.out[-8000:]
    lab.wait_ready()
    before = {name: lab.ssh(name, f"cat {MANIFEST}") for name in lab.control_planes}
    try:
        done = lab.playbook(SITE, "-e", "gpushare_allocation=dra")
        assert done.rc == 0, done.out[-8000:]
        until(lambda: announced(lab), "every card in a slice", 120)
        assert {name: lab.ssh(name, f"cat {MANIFEST}") for name in lab.control_planes} == before
        yield cards
        assert {name: lab.ssh(name, f"cat {MANIFEST}") for name in lab.control_planes} == before
    finally:
        removed = lab.playbook(UNINSTALL, "-e", "gpushare_allocation=dra")
        left = {name: lab.ssh(name, f"ls -d {FOLDER} 2>/dev/null; true") for name in lab.gpu_nodes}
        restored = lab.playbook(SITE)
        assert (removed.rc, restored.rc) == (0, 0), removed.out[-4000:] + restored.out[-4000:]
        assert set(left.values()) == {""}


@pytest.fixture(scope="module")
def space(lab: Lab, dra: None) -> Iterator[str]:
    """A namespace with templates of 1, 2, 4 and 8 GiB."""
    with lab.api.namespace(SPACE) as name:
        for amount in (1, 2, 4, 8):
            template = {"metadata": {"name": f"gib-{amount}"}, "spec": {"spec": requested(amount)}}
            lab.api.call("POST", f"/apis/resource.k8s.io/v1/namespaces/{name}/resourceclaimtemplates", template)
        yield name


@pytest.fixture(autouse=True)
def _no_pods_stay(lab: Lab, space: str) -> Iterator[None]:
    """A test that fails leaves no pods to the others, which fill the cards."""
    yield
    delete_pods(lab, space, [pod["metadata"]["name"] for pod in lab.api.pods(space)])


def make(lab: Lab, *bodies: JsonObject) -> list[str]:
    for one in bodies:
        lab.api.call("POST", f"/api/v1/namespaces/{SPACE}/pods", one)
    return [one["metadata"]["name"] for one in bodies]


# --------------------------------------------------------------------------- tests


def test_packed_to_the_last_gib_and_nothing_beyond(lab: Lab, space: str) -> None:
    names = make(lab, *(claimed(lab, f"pack-{number}", 4) for number in range(18)))

    def full() -> list[JsonObject]:
        found = [one for one in lab.api.pods(space) if one["status"].get("phase") == "Running"]
        assert len(found) == 16, len(found)
        return found

    running: list[JsonObject] = until(full, "16 of 18 pods run", 180)
    try:
        amounts = held(lab)
        assert sorted(amounts.values()) == [16, 16, 16, 16], amounts
        for pod in running:
            assert cards_of(lab, pod) == given(lab, pod)
        # The two that wait are told why, and nobody gives them memory meanwhile.
        waiting = [one for one in lab.api.pods(space) if one not in running and not one["spec"].get("nodeName")]
        assert len(waiting) == 2
        for pod in waiting:
            until(
                lambda pod=pod: "cannot allocate all claims" in "".join(lab.events(space, pod["metadata"]["name"])),
                "an Event says why it waits",
                60,
            )
        time.sleep(10)
        assert held(lab) == amounts
        # What one gives back the next one gets.
        delete_pods(lab, space, [running[0]["metadata"]["name"]])
        until(lambda: len(held(lab)) == 4 and sum(held(lab).values()) == 64, "the memory is used again", 60)
    finally:
        delete_pods(lab, space, names)
    until(lambda: nothing_left(lab), "no claim, record or specification is left", 120)


def test_old_and_new_manifests_side_by_side(lab: Lab, space: str, tmp_path: Path) -> None:
    """Unchanged pods with the resource, several containers, two cards, and pods with claims of their own."""
    old = [body(f"old-{number}", container(lab, 3)) for number in range(4)]
    two = body("old-two", container(lab, 2), container(lab, 1, name="c1"))
    cards = body("old-cards", container(lab, 4), annotations={"kubegpu.share/card-count": "2"})
    both = {"kubegpu.share/card-count": "2"}
    grid = body("old-grid", container(lab, 4), container(lab, 2, name="c1"), annotations=both)
    new = [claimed(lab, f"new-{number}", amount) for number, amount in enumerate((1, 2, 4))]
    names = make(lab, *old, two, cards, grid, *new)
    try:
        running = lab.api.wait_running(space, names, 180)
        for pod in running:
            assert cards_of(lab, pod) == given(lab, pod)
        assert len(given(lab, lab.api.pod(space, "old-cards"))) == 2
        # Each container of the last one sees both cards, with its own half of its units on each.
        seen = [set(re.findall(r"GPU-[0-9a-f-]+", lab.inside(space, "old-grid", one, "nvidia-smi", "-L")))
                for one in ("c0", "c1")]  # fmt: skip
        assert seen == [given(lab, lab.api.pod(space, "old-grid"))] * 2 and len(seen[0]) == 2
        units = [lab.inside(space, "old-grid", one, "printenv", "ALIYUN_COM_GPU_MEM_CONTAINER") for one in ("c0", "c1")]
        assert [unit.strip() for unit in units] == ["4", "2"]
        assert inspected(lab) == by_the_api(lab)
        assert sum(held(lab).values()) == 4 * 3 + 3 + 4 + 6 + 7
        numbers = compared(verified(lab, tmp_path))
        least = {"D1": 4, "D2": 2, "D3": 4, "D4": len(names), "D5": len(names), "D6": len(names), "D7": len(names) + 1}
        least |= {"D8": len(names), "D9": 4, "D10": 9, "D11": len(names), "S1": 3, "S4": 2}
        assert {check: numbers.get(check) for check, number in least.items() if numbers.get(check, 0) < number} == {}
        # Nobody logs in to a machine: the drivers' pods have the same to tell, but whose processes there are.
        told = verified(lab, tmp_path, without_machines(lab, tmp_path))
        assert all(node["source"].startswith("pod gpushare-system/gpushare-dra-driver-") for node in told["nodes"])
        by_pods = compared(told)
        assert {
            check for check in ("D1", "D2", "D4", "D5", "D6", "D11") if by_pods.get(check, 0) < least[check]
        } == set()
        # A pod that says which node doesn't ask kube-scheduler, and is refused in one sentence.
        wrong = body("old-bound", container(lab, 1), nodeName=lab.gpu_nodes[0])
        with pytest.raises(ApiError, match="only kube-scheduler allocates claims"):
            make(lab, wrong)
    finally:
        delete_pods(lab, space, names)
    until(lambda: nothing_left(lab), "no claim, record or specification is left", 120)


def test_spread_offers_the_emptiest_card_first(lab: Lab, space: str) -> None:
    node = lab.gpu_nodes[0]

    def place(value: str) -> None:
        done = lab.playbook(SITE, "-e", "gpushare_allocation=dra", "-e", f"gpushare_placement={value}")
        assert done.rc == 0, done.out[-8000:]

    def ordered() -> bool:
        amounts = held(lab)
        found = [amounts.get(one["name"], 0) for one in slices(lab, node)]
        assert found == sorted(found), found
        return True

    names: list[str] = []
    place("spread")
    try:
        for number in range(4):
            names += make(lab, body(f"spread-{number}", container(lab, 3), node=node))
            lab.api.wait_running(space, names[-1:], 120)
            until(ordered, "the emptiest card comes first", 30)
        assert sorted(held(lab).values()) == [6, 6]
    finally:
        delete_pods(lab, space, names)
        place("binpack")
    until(lambda: nothing_left(lab), "no claim, record or specification is left", 120)
    assert [one["attributes"]["index"]["int"] for one in slices(lab, node)] == [0, 1]


def test_verify_names_what_somebody_damaged(lab: Lab, space: str, tmp_path: Path) -> None:
    """A CDI specification that was edited on the node, and one that nobody prepared."""
    names = make(lab, claimed(lab, "damaged", 2, lab.gpu_nodes[0]))
    try:
        lab.api.wait_running(space, names, 90)
        files_ = f"/var/run/cdi/{DRIVER}-claim-"
        lab.ssh(
            lab.gpu_nodes[0],
            f"set -e; file=$(ls {files_}*.json); cp $file /root/before.json; cp $file {files_}of-nobody.json;"
            " sed -i 's/NVIDIA_VISIBLE_DEVICES=[^\"]*/NVIDIA_VISIBLE_DEVICES=all/' $file",
        )
        path = tmp_path / "report.json"
        words = ("-e", "gpushare_allocation=dra", "-e", "verify_grace=3", "-e", f"verify_json={path}")
        assert lab.playbook(VERIFY, *words).rc == 2
        wrong = [finding for finding in json.loads(path.read_text())["findings"] if finding["level"] == "FAIL"]
        assert {(one["check"], one["cause"]) for one in wrong} == {
            ("D5", "specification_differs"),
            ("D5", "leaked_specification"),
        }, wrong
    finally:
        lab.ssh(
            lab.gpu_nodes[0],
            f"rm -f {files_}of-nobody.json; cp /root/before.json $(ls {files_}*.json); rm /root/before.json",
            check=False,
        )
        delete_pods(lab, space, names)
    until(lambda: nothing_left(lab), "nothing is left", 120)


def test_acceptance_passes_and_leaves_nothing(lab: Lab, space: str) -> None:
    done = lab.playbook(ACCEPTANCE, "-e", "gpushare_allocation=dra")
    assert done.rc == 0 and "PASS" in done.out, done.out[-8000:]
    assert not [name for name in lab.api.namespaces() if name.startswith("kubegpu-acceptance")]
    until(lambda: nothing_left(lab), "no claim, record or specification is left", 120)


def test_the_canary_of_verify_passes(lab: Lab, space: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = ("-e", "gpushare_allocation=dra", "-e", "verify_canary=true", "-e", f"verify_json={path}")
    done = lab.playbook(VERIFY, *words)
    steps = {check["id"]: check["result"] for check in json.loads(path.read_text())["checks"] if check["id"][0] == "Y"}
    assert done.rc == 0 and steps and "FAIL" not in steps.values(), done.out[-8000:]


def test_driver_and_kubelet_killed_in_bursts(lab: Lab, space: str, tmp_path: Path) -> None:
    """200 pods are made and deleted, some by force, while both are killed: nothing leaks, and nothing is used twice."""
    dice, alive, number = random.Random(5), list[str](), 0
    most: collections.Counter[str] = collections.Counter()
    for burst in range(20):
        fresh = []
        for _pod in range(10):
            number += 1
            fresh.append(claimed(lab, f"burst-{number}", dice.choice((1, 2, 4, 8))))
        alive += make(lab, *fresh)
        node = lab.gpu_nodes[burst // 4 % len(lab.gpu_nodes)]
        if burst % 2:
            # Without waiting for its successor, which kubelet starts later after each kill.
            lab.ssh(node, f"pkill -KILL -f '[{COMMAND[0]}]{COMMAND[1:]}'; true")
        elif burst % 4 == 2:
            lab.ssh(node, "systemctl kill --signal=KILL kubelet")
        most |= collections.Counter(held(lab))
        dice.shuffle(alive)
        gone, alive = alive[:9], alive[9:]
        for name in gone:
            grace = {"gracePeriodSeconds": 0} if dice.random() < 0.3 else {}
            lab.api.call("DELETE", f"/api/v1/namespaces/{space}/pods/{name}", grace)
        time.sleep(dice.uniform(0, 3))
    assert max(most.values()) <= 16, most
    until(lambda: announced(lab), "every card in a slice again", 330)
    # Those that fit run, each on its own card.
    until(
        lambda: all(
            one["status"].get("phase") == "Running" for one in lab.api.pods(space) if one["spec"].get("nodeName")
        ),
        "all pods that have a node run",
        240,
    )
    for pod in lab.api.pods(space):
        if pod["spec"].get("nodeName"):
            assert cards_of(lab, pod) == given(lab, pod)
    by_node = collections.defaultdict(set)
    for claim in claims(lab):
        allocation = claim.get("status", {}).get("allocation") or {}
        for result in allocation.get("devices", {}).get("results", []):
            by_node[result["pool"]].add(claim["metadata"]["uid"])
    for node in lab.gpu_nodes:
        until(
            lambda node=node: files(lab, node) == (by_node[node], by_node[node]),
            f"the records and specifications of {node} are those of its claims",
            120,
        )
    assert inspected(lab) == by_the_api(lab)
    verified(lab, tmp_path)
    delete_pods(lab, space, [one["metadata"]["name"] for one in lab.api.pods(space)])
    until(lambda: nothing_left(lab), "no claim, record or specification is left", 180)


def test_the_machine_reboots(lab: Lab, space: str) -> None:
    """The node's container is restarted, with an empty /run: its pods start again with the same card."""
    node = lab.gpu_nodes[0]
    names = make(lab, claimed(lab, "reboot", 2, node))
    try:
        lab.api.wait_running(space, names, 90)
        before = given(lab, lab.api.pod(space, "reboot"))
        machine = engine.find()
        assert machine is not None
        machine.docker("restart", f"{engine.NAME}-{node}")

        def again() -> bool:
            pod = lab.api.pod(space, "reboot")
            assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [1], pod["status"]
            assert started(pod) and all(files(lab, node))
            return True

        until(again, "the pod runs again", 300)
        assert cards_of(lab, lab.api.pod(space, "reboot")) == given(lab, lab.api.pod(space, "reboot")) == before
        until(lambda: announced(lab), "every card in a slice", 60)
    finally:
        delete_pods(lab, space, names)
    until(lambda: nothing_left(lab), "nothing is left", 120)


def test_two_pods_of_one_claim(lab: Lab, space: str, tmp_path: Path) -> None:
    """They share its card, each with half of its memory where that is limited, and keep it until the last has ended."""
    path = f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims"
    lab.api.call("POST", path, {"metadata": {"name": "common"}, "spec": requested(8)})
    common = {"resourceClaimName": "common"}

    def most(name: str, mib: int) -> bool:
        """Test whether a pod may allocate so much, and nothing more where memory is limited."""
        for amount, possible in ((mib - 1024, True), (mib + 1024, not limited)):
            # It ends at once where nothing is allocated.
            words = ("sh", "-c", f"timeout 3 nvidia-smi simulated-allocation {amount} -i 0; true")
            said = lab.inside(space, name, "c0", *words)
            assert ("holding" in said) == possible, (name, amount, said)
        return True

    names = make(lab, using(lab, "first", common))
    try:
        (first,) = lab.api.wait_running(space, names, 90)
        (device,) = held(lab)
        limited = {one["attributes"]["memoryLimit"]["string"] for one in slices(lab, first["spec"]["nodeName"])} == {
            "enforced"
        }
        until(lambda: most("first", 8192), "the first pod has the whole claim", 60)
        names += make(lab, using(lab, "second", common))
        second = lab.api.wait_running(space, names, 90)[1]
        assert second["spec"]["nodeName"] == first["spec"]["nodeName"]
        assert cards_of(lab, first) == cards_of(lab, second) == {f"GPU-{device[4:]}"}
        assert held(lab) == {device: 8}
        until(lambda: most("first", 4096) and most("second", 4096), "each pod has half of the claim", 90)
        assert compared(verified(lab, tmp_path))["D6"] >= 2
        (shown,) = (one for node in inspected(lab).values() for one in node.values() if one)
        assert set(shown) == {f"{space}/first", f"{space}/second"}, shown

        delete_pods(lab, space, ["first"])
        until(lambda: most("second", 8192), "the second pod has the whole claim", 90)
        (after,) = lab.api.wait_running(space, ["second"])
        assert containers([after]) == containers([second]) and held(lab) == {device: 8}
    finally:
        delete_pods(lab, space, names)
        lab.api.delete(f"{path}/common")
    until(lambda: nothing_left(lab), "no claim, record or specification is left", 120)


def test_a_node_leaves_and_joins_again(lab: Lab, space: str) -> None:
    """Its Node is deleted, and kubelet registers a new one: site.yml offers its cards again, each once."""
    node = lab.gpu_nodes[-1]
    before = {one["name"] for one in slices(lab, node)}
    names = make(lab, claimed(lab, "stays", 2, lab.gpu_nodes[0]))
    try:
        running = lab.api.wait_running(space, names, 90)
        lab.ssh(node, "systemctl stop kubelet")
        try:
            lab.api.delete(f"/api/v1/nodes/{node}")
            until(lambda: not slices(lab, node), "the slices went with the Node", 90)
        finally:
            lab.ssh(node, "systemctl start kubelet")
        lab.wait_ready()
        done = lab.playbook(SITE, "-e", "gpushare_allocation=dra")
        assert done.rc == 0, done.out[-8000:]
        until(lambda: announced(lab), "every card in a slice", 120)
        assert {one["name"] for one in slices(lab, node)} == before

        def written() -> list[tuple[str, str]]:
            return [(one["metadata"]["name"], one["metadata"]["resourceVersion"]) for one in lab.api.items(SLICES)]

        first = written()
        time.sleep(20)
        assert written() == first, "slices are written over and over"
        names += make(lab, claimed(lab, "back", 2, node))
        lab.api.wait_running(space, names, 90)
        assert cards_of(lab, lab.api.pod(space, "back")) == given(lab, lab.api.pod(space, "back"))
        assert containers([lab.api.pod(space, "stays")]) == containers(running)
    finally:
        delete_pods(lab, space, names)
    until(lambda: nothing_left(lab), "nothing is left", 120)


def test_the_drivers_image_is_updated_under_load(lab: Lab, space: str) -> None:
    """To another image and back while pods come and go: those that run stay, and each new one gets its card."""
    template = lab.api.call("GET", f"{DAEMONSETS}/{COMMAND}")["spec"]["template"]["spec"]
    before = {one["name"]: one["image"] for one in template["containers"]}
    after = {name: f"{image}-next" for name, image in before.items()}
    for node in lab.gpu_nodes:
        for name, image in after.items():
            lab.ssh(node, f"ctr -n k8s.io images tag --force {before[name]} {image}")
    names = make(lab, *(claimed(lab, f"stays-{node}", 2, node) for node in lab.gpu_nodes))
    running = lab.api.wait_running(space, names, 90)
    stop, waits, failed = threading.Event(), list[float](), list[str]()

    def load(worker: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            began, name = time.monotonic(), f"load-{worker}-{number}"
            try:
                make(lab, claimed(lab, name, 4))
                lab.api.wait_running(space, [name], 120)
                waits.append(time.monotonic() - began)
                assert cards_of(lab, lab.api.pod(space, name)) == given(lab, lab.api.pod(space, name))
            except Exception as error:  # reported by the test
                failed.append(f"{name}: {error}")
            lab.api.delete(f"/api/v1/namespaces/{space}/pods/{name}")

    workers = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    try:
        for one in workers:
            one.start()
        until(lambda: len(waits) > 3 or failed, "pods come and go", 90)
        took = []
        for wanted in (after, before):
            patch = {"containers": [{"name": name, "image": image} for name, image in wanted.items()]}
            took.append(update(lab, COMMAND, {"spec": {"template": {"spec": patch}}}, STRATEGIC))
        count = len(waits)
        until(lambda: len(waits) > count + 3 or failed, "pods still come and go", 90)
    finally:
        stop.set()
        for one in workers:
            one.join(180)
    assert not failed, failed
    kept = [lab.api.pod(space, name) for name in names]
    assert containers(kept) == containers(running)
    until(lambda: announced(lab), "every card in a slice", 60)
    delete_pods(lab, space, [pod["metadata"]["name"] for pod in lab.api.pods(space)])
    until(lambda: nothing_left(lab), "nothing is left", 120)
    REPORT.append(
        f"the DRA driver's image updated twice in {took[0]:.0f} and {took[1]:.0f} s: {len(waits)} pods started "
        f"meanwhile, the slowest after {max(waits):.1f} s"
    )


@pytest.fixture(scope="module")
def attacks(lab: Lab, dra: Mapping[str, list[JsonObject]]) -> dict[str, Result]:
    """What became of each of the attacks, whose pods ask for their shares as ever."""
    node = lab.gpu_nodes[-1]
    cards = {card["uuid"]: card["index"] for card in dra[node]}

    def own(pod: JsonObject) -> set[int]:
        return {cards[uuid] for uuid in given(lab, pod)} if pod["spec"].get("resourceClaims") else set()

    wanted = {tag: f"{name}={value}" for tag, data in MAPS.items() for name, value in data.items()}
    with images(lab, node, wanted) as names:
        scene = Scene(lab, node, dra[node][-1]["uuid"], names)
        results = played(lab, scene, {card["index"]: card["minor"] for card in dra[node]}, own)
    until(lambda: nothing_left(lab), "nothing is left of the attacks", 120)
    return results


@pytest.mark.parametrize(("row", "play"), [pytest.param(row, play, id=play) for row in TABLE for play in row.plays])
def test_attack_on_a_claim(
    lab: Lab, dra: Mapping[str, list[JsonObject]], attacks: Mapping[str, Result], row: Try, play: str
) -> None:
    """As with the device plugin in mode ``cdi``: the claim's specification comes after the container's environment."""
    every = {card["minor"] for card in dra[lab.gpu_nodes[-1]]}
    outcome = row.cdi.outcome
    limited = slices(lab, lab.gpu_nodes[-1])[0]["attributes"]["memoryLimit"]["string"] == "enforced"
    # Where the driver limits memory the claim's value replaces the pod's.
    check_outcome(attacks[play], Outcome.FAILS if outcome is Outcome.NO_START and limited else outcome, row, every)


def test_a_raised_limit(lab: Lab, space: str) -> None:
    """Where the driver limits memory, the claim's value replaces the pod's; else the toolkit refuses the container."""
    (limited,) = {one["attributes"]["memoryLimit"]["string"] for node in lab.gpu_nodes for one in slices(lab, node)}
    names = make(lab, claimed(lab, "try-limit", 1, env=[{"name": LIMIT, "value": TOO_MUCH}]))
    try:
        until(lambda: started(lab.api.pod(space, "try-limit")) is not None, "it runs, or doesn't", 90)
        assert started(lab.api.pod(space, "try-limit")) == (limited == "enforced")
        if limited == "enforced":
            environment = lab.inside(space, "try-limit", "c0", "sh", "-c", "tr '\\0' '\\n' </proc/1/environ")
            assert f"{LIMIT}=1024" in environment.splitlines()
    finally:
        delete_pods(lab, space, names)


def test_a_card_dies_and_comes_back(lab: Lab, space: str) -> None:
    node = lab.gpu_nodes[0]
    # NVML's "GPU is lost", for the second card.
    with fault(lab, node, "card:1:15"):
        until(
            lambda: (
                [[taint["value"] for taint in one.get("taints", [])] for one in slices(lab, node)] == [[], ["CardLost"]]
            ),
            "the card is tainted",
            60,
        )
        names = make(lab, *(claimed(lab, f"sick-{number}", 8) for number in range(6)))

        def full() -> bool:
            amounts = held(lab)
            assert sorted(amounts.values()) == [16, 16, 16], amounts
            return True

        until(full, "three healthy cards are full", 120)
        lost = slices(lab, node)[1]["name"]
        assert lost not in held(lab)
        delete_pods(lab, space, names)
    until(lambda: announced(lab), "the card is offered again", 60)
