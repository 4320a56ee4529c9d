# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of upstream's servers that show only with a real kubelet; each test has the fault's number.

Others are in test_40 (02), test_41 (04, 05), test_43 (16, 20) and test_44 (12).
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator

import pytest
from _hardware import fault
from _lab import RESOURCE, JsonObject, Lab, indices_of, until
from _pods import (
    MERGE,
    body,
    container,
    containers,
    create,
    delete_pods,
    inspect_units,
    is_announced,
    is_ready,
    plugin,
    plugin_page,
    plugin_pod_spec,
    pods,
    set_plugin_command,
    unschedulable,
    wait_empty,
    wait_settled,
)

NAMESPACE = "lab-faults"
INDEX = "ALIYUN_COM_GPU_MEM_IDX"
LATE = """# gpushare-device-plugin, told of every change half a second after kubelet was
import sys, time
from gpushare.api.client import KubeApi
from gpushare.plugin import command

class Late:
    def __init__(self, stream):
        self.stream, self.close = stream, stream.close

    def __iter__(self):
        for event in self.stream:
            time.sleep(0.5)
            yield event

watch = KubeApi.watch
KubeApi.watch = lambda api, path: Late(watch(api, path))
sys.exit(command.main())
"""


@pytest.fixture(scope="module")
def namespace(lab: Lab) -> Iterator[str]:
    with lab.api.namespace(NAMESPACE) as name:
        yield name


@pytest.fixture
def node(lab: Lab) -> str:
    name = lab.gpu_nodes[-1]
    assert [card["units"] for card in lab.cards(name)] == [16, 16]
    return name


def one_after_the_other(lab: Lab, namespace: str, node: str, **units: int) -> list[JsonObject]:
    """Create pods of one container each in turn; binpack fills card 0 first."""
    wait_empty(lab, node)
    for name, each in units.items():
        create(lab, namespace, body(name, container(lab, each), node=node))
        wait_settled(lab, namespace, [name])
    return [lab.api.pod(namespace, name) for name in units]


def test_fault_01_two_containers_of_a_pod_on_one_card(lab: Lab, namespace: str, node: str) -> None:
    with pods(lab, namespace, body("filler", container(lab, 10), node=node)) as (filler,):
        both = body("both", container(lab, 5, "c0"), container(lab, 5, "c1"), node=node)
        with pods(lab, namespace, both) as (pod,):
            assert (indices_of(filler), indices_of(pod)) == ([0], [1])
            uuid = lab.cards(node)[1]["uuid"]
            for name in ("c0", "c1"):
                given = lab.checkpoint(node)[pod["metadata"]["uid"], name].variables
                assert given["ALIYUN_COM_GPU_MEM_CONTAINER"] == "5" and given["ALIYUN_COM_GPU_MEM_POD"] == "10"
                assert re.findall(r"GPU-[0-9a-f-]+", lab.inside(namespace, "both", name, "nvidia-smi", "-L")) == [uuid]


@contextlib.contextmanager
def late_plugins(lab: Lab, node: str) -> Iterator[None]:
    """Delay the watch of all device plugins, and restore them afterwards."""
    before = plugin_pod_spec(lab)["containers"][0]["command"]

    def run(command: list[str]) -> None:
        set_plugin_command(lab, command)

        def at_work() -> bool:
            found = [plugin(lab, name) for name in lab.gpu_nodes]
            return all(pod["spec"]["containers"][0]["command"] == command and is_ready(pod) for pod in found)

        until(at_work, f"every plugin runs {command[0]}", 180)
        until(lambda: is_announced(lab, node, 2), "the cards", 60)

    try:
        run(["python3", "-c", LATE, *before[1:]])
        yield
    finally:
        run(before)


@pytest.mark.long
def test_fault_01_with_a_delayed_watch(lab: Lab, namespace: str, node: str) -> None:
    """kubelet asks for both containers before the watch reports the pod; best fit would split it over two cards."""
    with late_plugins(lab, node), pods(lab, namespace, body("filler", container(lab, 10), node=node)) as (filler,):
        own = plugin(lab, node)
        both = body("both", container(lab, 5, "c0"), container(lab, 5, "c1"), node=node)
        with pods(lab, namespace, both) as (pod,):
            assert (indices_of(filler), indices_of(pod)) == ([0], [1])
            assert "best fit" not in lab.log(own)


def test_fault_03_an_edited_annotation_is_corrected(lab: Lab, namespace: str, node: str) -> None:
    """Another card written on a running pod is corrected, and no sum ever exceeds the card."""
    names = ["first", "second"]
    before = one_after_the_other(lab, namespace, node, **dict.fromkeys(names, 9))
    try:
        assert [indices_of(pod) for pod in before] == [[0], [1]]
        path = f"/api/v1/namespaces/{namespace}/pods/first"
        lab.api.call("PATCH", path, {"metadata": {"annotations": {INDEX: "1"}}}, MERGE)
        for _sample in range(5):
            for used in inspect_units(lab, lab.control_planes[0])[node].values():
                assert 0 <= used <= 18, used
        until(lambda: indices_of(lab.api.pod(namespace, "first")) == [0], "the annotation is corrected", 20, 0.2)
        until(lambda: "card 0" in "".join(lab.events(namespace, "first", "GpuCardCorrected")), "its Event", 20)
        # As much as is free, and no more, wherever the annotation pointed.
        with pods(lab, namespace, body("third", container(lab, 7), node=node)) as (third,):
            assert indices_of(third) in ([0], [1])
        assert containers(wait_settled(lab, namespace, names)) == containers(before)
    finally:
        delete_pods(lab, namespace, names)


def test_fault_06_init_containers_count_as_kubernetes_counts_them(lab: Lab, namespace: str, node: str) -> None:
    load = container(lab, 6, "load", command=["true"])
    beside = container(lab, 2, "beside", restartPolicy="Always")
    wanted = body("init", container(lab, 5, "c0"), container(lab, 1, "c1"), node=node, initContainers=[load, beside])
    only = container(lab, 4, "load", command=["true"])
    with_only = body("only", container(lab, 0), node=node, initContainers=[only])
    names = create(lab, namespace, wanted, with_only)
    try:
        lab.api.wait_running(namespace, names)

        def summary() -> dict[str, dict[str, str]]:
            found = {name: lab.api.pod(namespace, name)["metadata"]["annotations"] for name in names}
            assert all(one["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true" for one in found.values()), found
            return found

        found: dict[str, dict[str, str]] = until(summary, "both are assigned", 40)
        assert found["init"]["ALIYUN_COM_GPU_MEM_POD"] == "8" and found["only"]["ALIYUN_COM_GPU_MEM_POD"] == "4"
        records, uid = lab.checkpoint(node), lab.api.pod(namespace, "init")["metadata"]["uid"]
        held = {name: records[uid, name] for name in ("beside", "c0", "c1")}
        assert {name: len(given.ids) for name, given in held.items()} == {"beside": 2, "c0": 5, "c1": 1}
        uuid = lab.cards(node)[int(found["init"][INDEX])]["uuid"]
        assert {given.variables["NVIDIA_VISIBLE_DEVICES"] for given in held.values()} == {uuid}
        # Nobody else is taken for the pod whose only units were its init container's.
        with pods(lab, namespace, body("same-size", container(lab, 4), node=node)) as (pod,):
            assert pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_POD"] == "4"
    finally:
        delete_pods(lab, namespace, names)


@pytest.mark.long
def test_fault_07_a_card_breaks_and_recovers(lab: Lab, namespace: str, node: str) -> None:
    before = one_after_the_other(lab, namespace, node, filler=9, victim=9)
    assert [indices_of(pod) for pod in before] == [[0], [1]]
    uuid = lab.cards(node)[1]["uuid"]
    try:
        with fault(lab, node, "card:1:15"):

            def gone() -> bool:
                card = lab.cards(node)[1]
                assert not card["healthy"] and card["reason"], card
                return lab.allocatable(node) == 16

            until(gone, "the card isn't given away any more", 40)
            for space, name in ((namespace, "victim"), ("default", node)):
                until(
                    lambda space=space, name=name: uuid in "".join(lab.events(space, name, "GpuCardUnhealthy")),
                    f"an Event on {name}",
                    20,
                )
            assert not lab.events(namespace, "filler", "GpuCardUnhealthy"), "it has another card"
            # Kubernetes counts the victim's units as used until the victim is gone, on whichever card they were.
            create(lab, namespace, body("healthy", container(lab, 7), node=node))
            until(lambda: unschedulable(lab, namespace, "healthy"), "16 units, and 18 of them used", 20)
            delete_pods(lab, namespace, ["victim"])
            (pod,) = wait_settled(lab, namespace, ["healthy"], 60)
            assert indices_of(pod) == [0]
            create(lab, namespace, body("waits", container(lab, 7), node=node))
            until(lambda: unschedulable(lab, namespace, "waits"), "nothing is left", 20)
        # The card is back: so is its memory, and who waits gets it.
        until(lambda: is_announced(lab, node, 2), "the card again", 60)
        (pod,) = wait_settled(lab, namespace, ["waits"], 60)
        assert indices_of(pod) == [1]
        until(lambda: uuid in "".join(lab.events("default", node, "GpuCardHealthy")), "its Event", 20)
        assert containers(wait_settled(lab, namespace, ["filler"])) == containers(before[:1])
    finally:
        delete_pods(lab, namespace, ["filler", "victim", "healthy", "waits"])


@pytest.mark.long
def test_fault_08_a_terminating_pod_keeps_its_memory(lab: Lab, namespace: str, node: str) -> None:
    ignores_term = 'trap "" TERM; sleep 3600 & while :; do wait; done'
    stubborn = body(
        "stubborn", container(lab, 12, command=["sh", "-c", ignores_term]), node=node, terminationGracePeriodSeconds=8
    )
    create(lab, namespace, stubborn, body("other", container(lab, 12), node=node))
    names = ["stubborn", "other", "next"]
    try:
        wait_settled(lab, namespace, names[:2])
        lab.api.delete(f"/api/v1/namespaces/{namespace}/pods/stubborn")
        began = time.monotonic()
        create(lab, namespace, body("next", container(lab, 9), node=node))

        def there() -> bool:
            """Test whether a pod may still hold its memory; nothing runs of a pod that has ended."""
            found = [pod for pod in lab.api.pods(namespace) if pod["metadata"]["name"] == "stubborn"]
            return any(one["status"]["phase"] not in ("Succeeded", "Failed") for one in found)

        def bound() -> bool:
            if not lab.api.pod(namespace, "next")["spec"].get("nodeName"):
                return False
            # Read after it was bound: who is there now, was there then.
            assert not there(), "two have one memory"
            return True

        end = began + 60
        while not bound():
            used = inspect_units(lab, lab.control_planes[0])[node]
            # Asked while it was certainly there.
            assert not there() or sorted(used.values()) == [12, 12], used
            assert time.monotonic() < end
            time.sleep(0.2)
        assert time.monotonic() - began > 6, "nobody waited for it"
        wait_settled(lab, namespace, ["next"])
    finally:
        delete_pods(lab, namespace, names)


@pytest.mark.long
def test_fault_09_without_a_driver_the_plugin_is_not_ready_and_comes_back(lab: Lab, namespace: str, node: str) -> None:
    with pods(lab, namespace, body("tenant", container(lab, 3), node=node)) as before:
        own = plugin(lab, node)
        # A plugin that has asked before stays with what it has loaded; so its cards go.
        with fault(lab, node, "count0"):
            until(lambda: not is_ready(plugin(lab, node)), "it isn't ready", 40)
            until(lambda: lab.allocatable(node) == 0, "no memory is given away", 40)
            said = plugin_page(lab, node, "/readyz")
            assert "NVML" in said, said
        until(lambda: is_announced(lab, node, 2) and is_ready(plugin(lab, node)), "it is back", 60)
        assert containers([plugin(lab, node)]) == containers([own]), "by itself, without a new container"
        assert containers(wait_settled(lab, namespace, ["tenant"])) == containers(before)


@pytest.mark.long
def test_fault_09_a_plugin_that_starts_without_a_driver_waits_for_it(lab: Lab, namespace: str, node: str) -> None:
    with pods(lab, namespace, body("tenant", container(lab, 3), node=node)) as before:
        old = plugin(lab, node)["metadata"]
        with fault(lab, node, "init:9"):
            lab.api.delete(f"/api/v1/namespaces/{old['namespace']}/pods/{old['name']}")
            until(lambda: plugin(lab, node)["metadata"]["uid"] != old["uid"], "another plugin", 40)
            until(lambda: lab.allocatable(node) == 0, "no memory is given away", 40)
            # NVIDIA's runtime asks the same driver, so that the container may not even start.
            for _sample in range(5):
                assert not is_ready(plugin(lab, node))
                time.sleep(1)
        until(lambda: is_announced(lab, node, 2) and is_ready(plugin(lab, node)), "it is at work", 150)
        assert containers(wait_settled(lab, namespace, ["tenant"])) == containers(before)


@pytest.mark.long
def test_fault_15_two_equal_pods_after_a_kubelet_restart(lab: Lab, namespace: str, node: str) -> None:
    """The plugin uses the new kubelet's list at once: two equal pods get a card each."""
    before = one_after_the_other(lab, namespace, node, here=9, there=8)
    names = ["here", "there", "left", "right"]
    try:

        def registrations() -> float:
            text = plugin_page(lab, node, "/metrics")
            return float(re.findall(r"^gpushare_plugin_registrations\S* ([0-9.]+)$", text, re.MULTILINE)[0])

        had = registrations()
        lab.ssh(node, "systemctl restart kubelet")
        # Before, kubelet has no device to give, and sends pods away.
        until(lambda: registrations() > had, "the plugin has registered again", 60, 0.1)
        until(lambda: is_announced(lab, node, 2), "the cards", 60, 0.1)
        create(lab, namespace, *(body(name, container(lab, 7), node=node) for name in names[2:]))
        after = wait_settled(lab, namespace, names, 120)
        assert containers(after[:2]) == containers(before)
        assert sorted(indices_of(pod) for pod in after[2:]) == [[0], [1]]
        for name in names[2:]:
            assert not lab.events(namespace, name, "GpuCardCorrected"), "kubelet gave another card than was booked"
    finally:
        delete_pods(lab, namespace, names)


def test_fault_18_both_servers_report_health_and_metrics(lab: Lab, namespace: str, node: str) -> None:
    counted = r'^gpushare_plugin_call_seconds_count\{.*call="allocate".*\} ([0-9.]+)$'

    def allocated() -> float:
        text = plugin_page(lab, node, "/metrics")
        found = re.findall(counted, text, re.MULTILINE)
        return float(found[0]) if found else 0.0

    before = allocated()
    with pods(lab, namespace, body("two", container(lab, 1, "c0"), container(lab, 1, "c1"), node=node)):
        assert allocated() == before + 2
    assert plugin_page(lab, node, "/readyz").strip() == "ok"
    for name in lab.control_planes:
        assert lab.ssh(name, "curl -sf -m 5 http://127.0.0.1:12345/readyz")
        text = lab.ssh(name, "curl -sf -m 5 http://127.0.0.1:12345/metrics")
        cards = re.findall(rf'^gpushare_card_capacity_units\{{.*node="{node}".*\}} 16$', text, re.MULTILINE)
        assert len(cards) == 2, text[:2000]


def test_fault_19_least_privilege(lab: Lab) -> None:
    """No capability but the one that limits need, a read-only file system, seccomp; and the servers work."""
    for command, capabilities in (("gpushare-extender", 0), ("gpushare-device-plugin", 1 << 21)):
        pod = lab.server_pods(command)[0]
        metadata, name = pod["metadata"], pod["spec"]["containers"][0]["name"]

        def shell(script: str, metadata: JsonObject = metadata, name: str = name) -> str:
            return lab.inside(metadata["namespace"], metadata["name"], name, "sh", "-c", script, check=False)

        status = dict(re.findall(r"^(\w+):\s+(\S+)", shell("cat /proc/1/status"), re.MULTILINE))
        for kind in ("CapEff", "CapPrm", "CapBnd"):
            assert int(status[kind], 16) & ~capabilities == 0, f"{command}: {kind} is {status[kind]}"
        # A filter of system calls.
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert "Read-only file system" in shell("touch /x")
        assert is_ready(pod)


@pytest.mark.long
def test_a_force_deleted_pods_memory_is_given_when_its_process_has_ended(lab: Lab, namespace: str, node: str) -> None:
    """Scenario j: kubelet frees the devices at once, and kills a process that ignores SIGTERM two seconds later."""
    wait_empty(lab, node)
    script = "trap '' TERM; while :; do sleep 0.1; done; : ignores-sigterm"

    def left() -> str:
        return lab.ssh(node, "pgrep -f '[i]gnores-sigterm' || true").strip()

    stubborn = container(lab, 12, command=["sh", "-c", script])
    wanted = [body("stubborn", stubborn, node=node, terminationGracePeriodSeconds=60)]
    wanted.append(body("beside", container(lab, 12), node=node))
    with pods(lab, namespace, *wanted) as (first, _beside):
        assert left()
        path = f"/api/v1/namespaces/{namespace}/pods/stubborn"

        def recorded() -> bool:
            lines = lab.log(plugin(lab, node)).splitlines()
            return any("container recorded" in line and f"{namespace}/stubborn" in line for line in lines)

        # The device plugin only keeps the memory of containers that it has seen running.
        until(recorded, "the device plugin has seen the container", 30)
        lab.api.call("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})
        # No other card has the units.
        with pods(lab, namespace, body("next", container(lab, 12), node=node)) as (after,):
            assert indices_of(after) == indices_of(first)
            assert not left(), "the memory was given to another pod while the process ran"
    until(lambda: "unreleasedUnits" not in json.dumps(lab.cards(node)), "all units are given away", 40)


def test_tests_leave_nothing_behind(lab: Lab, namespace: str) -> None:
    assert lab.api.pods(namespace) == []
    for name in lab.gpu_nodes:
        assert is_announced(lab, name, len(lab.nodes[name]["cards"]))
        cards = json.dumps(lab.cards(name))
        assert "reason" not in cards and RESOURCE in lab.api.node(name)["status"]["capacity"]
