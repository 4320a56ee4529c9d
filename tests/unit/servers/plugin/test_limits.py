# SPDX-License-Identifier: GPL-3.0-or-later
"""The limit of each container, and its cgroup in the trees that runtimes create."""

from __future__ import annotations

import os
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
from gpushare.kubelet.pod_resources import Entry
from gpushare.node import cgroups as cgroups_module
from gpushare.node import limits as node_limits
from gpushare.node.cgroups import NodeCgroups
from gpushare.plugin import limits
from gpushare.shared._contracts import gpushare as contract
from limit_fakes import CARDS, FIRST, SECOND, entry, identifier, ids, pod

ONE, TWO = identifier(1), identifier(2)


# --------------------------------------------------------------------------- containers and their limits


def held(one: dict[str, t.Any], *listing: Entry) -> dict[str, t.Mapping[str, int] | None]:
    """The limits of a pod's containers by name; None where its cards aren't known."""
    return {target.container: target.mib for target in limits.targets(CARDS, [one], listing, "GiB")}


def test_each_container_has_the_limit_of_its_units() -> None:
    both = pod("a", {"x": 3, "y": 2, "z": 0}, {"x": ONE, "y": TWO, "z": identifier(3)})
    listing = [entry("a", x=ids(SECOND, 0, 3), y=ids(SECOND, 3, 2), z=())]
    found = {target.container: target for target in limits.targets(CARDS, [both], listing, "GiB")}
    assert {name: one.mib for name, one in found.items()} == {"x": {SECOND: 3072}, "y": {SECOND: 2048}, "z": {}}
    assert (found["x"].container_id, found["x"].pod, found["x"].uid) == (ONE, "default/a", "uid-a")
    in_mib = {target.container: target.mib for target in limits.targets(CARDS, [both], listing, "MiB")}
    assert in_mib == {"x": {SECOND: 3}, "y": {SECOND: 2}, "z": {}}
    # Neither kubelet's list nor a share elsewhere matters to a container without units, nor a pod without any.
    assert held(both) == {"x": None, "y": None, "z": {}}
    without = pod("b", {"x": 0}, {"x": ONE})
    assert held(without) == {"x": {}}
    assert [target.exempt for target in limits.targets(CARDS, [without], [], "GiB", {"default"})] == [True]
    assert [target.exempt for target in limits.targets(CARDS, [both], listing, "GiB", {"default"})] == [False] * 3


def test_a_container_of_several_cards_has_a_limit_on_each() -> None:
    wide = pod("a", {"x": 6}, {"x": ONE})
    found = limits.targets(CARDS, [wide], [entry("a", x=ids(FIRST, 4, 3) + ids(SECOND, 0, 3))], "GiB")
    assert [one.mib for one in found] == [{FIRST: 3072, SECOND: 3072}]


@pytest.mark.parametrize(
    ("given", "expected", "why"),
    [
        (pod("a", {"x": 3}, {}), {}, "it doesn't run"),
        (pod("b", {"x": 3}, {"x": ONE}), {"x": None}, "kubelet doesn't list it"),
        (pod("a", {"x": 4}, {"x": ONE}), {"x": None}, "kubelet lists another pod of this name"),
        ({**pod("a", {"x": 3}, {"x": ONE}), "status": {"phase": "Failed"}}, {}, "it is over"),
    ],
)
def test_nothing_is_limited_on_a_guess(given: dict[str, t.Any], expected: dict[str, None], why: str) -> None:
    assert held(given, entry("a", x=ids(FIRST, 0, 3))) == expected, why


def test_ids_of_another_plugin_or_two_pods_of_one_name_are_no_basis() -> None:
    mine = pod("a", {"x": 3}, {"x": ONE})
    foreign = [Entry("default/a", {"x": ("deadbeef-0", "deadbeef-1", "deadbeef-2")})]
    assert held(mine, *foreign) == {"x": None}
    assert held(mine, entry("a", x=ids(FIRST, 0, 3)), entry("a", x=ids(FIRST, 3, 3))) == {"x": None}


def test_a_pod_that_upstreams_plugin_assigned_is_limited_by_its_annotation() -> None:
    """Its device IDs name a card's UUID and a number, but not the one that the pod was given."""
    old = pod("a", {"x": 3}, {"x": ONE})
    booked = contract.booking_annotations([CARDS[1]], old, 1, True)
    old["metadata"]["annotations"] = {key: value for key, value in booked.items() if value}
    listing = [Entry("default/a", {"x": tuple(f"{FIRST}-_-{slot}" for slot in range(3))})]
    assert [target.mib for target in limits.targets(CARDS, [old], listing, "GiB")] == [{SECOND: 3072}]


def test_an_init_container_that_kubelet_hides_is_limited_by_the_pods_card_once_that_is_certain() -> None:
    one = pod("a", {"x": 3}, {})
    one["spec"]["initContainers"] = [
        {"name": "init", "resources": {"limits": {contract.RESOURCE_MEMORY: "2"}}},
        {"name": "side", "restartPolicy": "Always", "resources": {"limits": {contract.RESOURCE_MEMORY: "1"}}},
    ]
    one["status"]["initContainerStatuses"] = [
        {"name": "init", "containerID": f"containerd://{ONE}", "state": {"running": {}}},
        {"name": "side", "containerID": f"containerd://{TWO}", "state": {"running": {}}},
    ]
    listing = [entry("a", side=ids(SECOND, 0, 1))]
    assert held(one, *listing) == {"init": None, "side": {SECOND: 1024}}
    for assigned in (False, True):
        booked = contract.booking_annotations([CARDS[1]], one, 1, assigned)
        one["metadata"]["annotations"] = {key: value for key, value in booked.items() if value}
        assert held(one, *listing) == {"side": {SECOND: 1024}, "init": {SECOND: 2048} if assigned else None}


def test_only_running_containers_are_kept_of_a_status() -> None:
    status = {
        "phase": "Running",
        "containerStatuses": [
            {"name": "x", "containerID": f"cri-o://{ONE}", "state": {"running": {"startedAt": "now"}}, "image": "i"},
            {"name": "y", "containerID": f"docker://{TWO}", "state": {"terminated": {"exitCode": 1}}},
            {"name": "z", "state": {"waiting": {}}},
        ],
    }
    trim = limits.trim_statuses(status)
    assert set(trim) == {"containerStatuses"}
    assert trim["containerStatuses"][0] == {"name": "x", "containerID": f"cri-o://{ONE}", "state": {"running": {}}}
    assert limits.running({"status": trim}) == limits.running({"status": status}) == {"x": ONE}
    assert limits.running({}) == {}


# --------------------------------------------------------------------------- messages


def test_the_toolkits_variables() -> None:
    assert node_limits.environment({FIRST: 3072}) == {
        "NVIDIA_GPU_MEMORY_LIMIT": "3072",
        "NVIDIA_GPU_MEMORY_REQUEST": "0",
    }
    assert node_limits.environment({}) == {}
    # The toolkit sets one value on all cards; a lower one would take units from the pod.
    assert node_limits.environment({FIRST: 2048, SECOND: 1024})["NVIDIA_GPU_MEMORY_LIMIT"] == "2048"


def test_drivers_with_and_without_limits() -> None:
    assert {node_limits.driver_problem(version) for version in ("615.71.09", "615.0", "700.10.01")} == {None}
    for version in ("610.57.04", "", "unknown", "6150"):
        assert f"{version or 'unknown'}, and limits need 615" in (node_limits.driver_problem(version) or "")


def test_the_nodes_message() -> None:
    assert node_limits.state("off", ["x"]) == contract.LIMIT_OFF
    assert node_limits.state("auto", []) == contract.LIMIT_ENFORCED
    assert node_limits.state("auto", ["the driver is old"]) == "unenforced: the driver is old"
    assert node_limits.state("required", ["one isn't held", "b", "c"]) == "unenforced: one isn't held (and 2 more)"


# --------------------------------------------------------------------------- the tree of cgroups

SYSTEMD = "kubepods.slice/kubepods-podaa_bb.slice/cri-containerd-{id}.scope"
CRIO = "kubepods.slice/kubepods-podaa_bb.slice/crio-{id}.scope"
LAYOUTS = {
    "containerd, systemd": SYSTEMD,
    "containerd, cgroupfs": "kubepods/burstable/podaa-bb/{id}",
    "CRI-O, systemd": CRIO,
    "CRI-O, cgroupfs": "kubepods/besteffort/podaa-bb/crio-{id}",
    "Docker, systemd": "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podaa_bb.slice/docker-{id}.scope",
    "kubelet with a root of its own": f"kubelet.slice/kubelet-{SYSTEMD}",
    "two drivers": "kubepods-besteffort-podaa_bb.slice:cri-containerd:{id}",
}


def tree(root: Path, version: int) -> Path:
    """An empty hierarchy as a container's folders are in it."""
    if version == 2:
        (root / "cgroup.controllers").write_text("cpu memory misc\n")
        return root
    (root / "memory").mkdir()
    return root / "memory"


def cgroup(folder: Path, *pids: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return folder


def folder(cgroups: NodeCgroups, container: str) -> str | None:
    return cgroups.folders([container]).get(container)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_container_is_found_in_every_runtimes_layout(tmp_path: Path, layout: str, version: int) -> None:
    top = tree(tmp_path, version)
    wanted = cgroup(top / layout.format(id=ONE), 0)
    cgroup(top / layout.format(id=TWO), 0)
    cgroup(top / "system.slice" / f"docker-{identifier(7)}.scope", 0)
    cgroups = NodeCgroups(str(tmp_path))
    assert cgroups.version() == version
    assert folder(cgroups, ONE) == str(wanted)
    assert folder(cgroups, identifier(9)) is None
    assert folder(cgroups, "../../etc") is None
    assert folder(cgroups, identifier(7)) is None


def test_a_later_container_and_a_removed_one(tmp_path: Path) -> None:
    top, cgroups = tree(tmp_path, 2), NodeCgroups(str(tmp_path))
    assert folder(cgroups, ONE) is None
    made = cgroup(top / SYSTEMD.format(id=ONE), 0)
    assert folder(cgroups, ONE) == str(made)
    (made / "cgroup.procs").unlink()
    made.rmdir()
    assert folder(cgroups, ONE) is None


def test_the_tree_is_searched_once_however_many_containers_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup(tree(tmp_path, 2) / SYSTEMD.format(id=ONE), 0)
    walks: list[str] = []
    walk = cgroups_module._walk
    monkeypatch.setattr(
        cgroups_module, "_walk", lambda top, depth, without: [walks.append(top), *walk(top, depth, without)][1:]
    )
    missing = [identifier(number) for number in range(3, 40)]
    assert set(NodeCgroups(str(tmp_path)).folders([*missing, ONE])) == {ONE}
    assert walks.count(str(tmp_path)) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_has_processes_until_they_end(tmp_path: Path, version: int) -> None:
    one = cgroup(tree(tmp_path, version) / SYSTEMD.format(id=ONE))
    cgroups = NodeCgroups(str(tmp_path))
    if version == 2:
        (one / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert cgroups.populated(str(one))
    if version == 2:
        (one / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    else:
        (one / "cgroup.procs").unlink()
        one.rmdir()
    assert not cgroups.populated(str(one))


def test_crun_has_the_processes_one_level_lower(tmp_path: Path) -> None:
    scope = cgroup(tree(tmp_path, 2) / CRIO.format(id=ONE))
    inner, cgroups = cgroup(scope / "container", 0, 0), NodeCgroups(str(tmp_path))
    assert folder(cgroups, ONE) == str(inner)
    # Where the scope has processes of its own, the container created the lower one.
    cgroup(scope, 0)
    assert folder(cgroups, ONE) == str(scope)


def test_monitors_and_cgroups_inside_a_container_are_ignored(tmp_path: Path) -> None:
    top, cgroups = tree(tmp_path, 2), NodeCgroups(str(tmp_path))
    cgroup(top / f"kubepods.slice/kubepods-podaa_bb.slice/crio-conmon-{ONE}.scope", 0)
    cgroup(top / SYSTEMD.format(id=identifier(3)) / "kubepods" / "podcc" / TWO, 0)
    assert folder(cgroups, ONE) is None and folder(cgroups, TWO) is None


def test_hybrid_and_missing_hierarchies(tmp_path: Path) -> None:
    assert NodeCgroups(str(tmp_path)).version() == 0
    for one in ("memory", "unified", "systemd"):
        (tmp_path / one).mkdir()
    (tmp_path / "unified" / "cgroup.controllers").write_text("")
    assert NodeCgroups(str(tmp_path)).version() == 1
    assert NodeCgroups(str(tmp_path)).own() is None


def test_the_plugins_own_cgroup_is_the_one_with_its_process(tmp_path: Path) -> None:
    top = tree(tmp_path, 2)
    pods = top / "kubepods.slice" / "kubepods-podaa_bb.slice"
    # Other PID namespaces' processes are shown as 0.
    cgroup(pods / f"cri-containerd-{ONE}.scope", 0, 0)
    mine = cgroup(pods / f"cri-containerd-{TWO}.scope", 0, os.getpid())
    assert NodeCgroups(str(tmp_path)).own() == str(mine)


def test_a_containers_own_view_is_not_the_nodes_root(tmp_path: Path) -> None:
    cgroup(tree(tmp_path, 2), os.getpid())
    assert NodeCgroups(str(tmp_path)).own() is None


def test_the_modules_are_found_without_nvidias_library() -> None:
    """The pure modules import without a driver and open nothing."""
    script = (
        "import sys; sys.modules['pynvml'] = None; "
        "from gpushare.node import limit_enforcer; print(limit_enforcer.BLOCKED.hard)"
    )
    source = str(Path(limits.__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.stdout.strip() == str(1 << 20)
