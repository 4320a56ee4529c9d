# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole way of an air gap: nodes, a controller and a registry reach each other and nothing else.

An archive is made outside, by the lab's vendors and by PyPI and Debian, and carried in. Each packet of IPv4 and IPv6 to
anything else is counted on each node, on the controller and on this machine, and so are questions for names. Real are
nodes, cluster, package managers, registry, skopeo, helm and the controller's environment; the driver, the charts of
HAMi and NVIDIA and Galaxy are stand-ins. It begins with a cluster that knows nothing of the collection, and ends so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import typing as t
from collections.abc import Iterator
from pathlib import Path

import _airgap as airgap
import pytest
from _airgap import Inside, Vendors
from _closed import (
    ELSEWHERE,
    ELSEWHERE_6,
    FAR,
    GATEWAY_6,
    NAME_SERVER,
    NAME_SERVER_6,
    Closed,
    Member,
    joined,
    members_of,
)
from _lab import ROOT, Done, JsonObject, Lab, until
from _snapshot import cluster_objects, node_state

from lab import build

pytestmark = pytest.mark.long

OLDER, NEWER = "580.82.07", "580.95.05"
CHARTS = {
    "hami": ROOT / "tests/unit/hami/standin_chart",
    "nvidia-device-plugin": ROOT / "tests/unit/nvidia/chart",
}
# Their images and the programs in them, which a stand-in plays.
BACKENDS = {
    "docker.io/projecthami/hami:v2.10.0": ("scheduler", "nvidia-device-plugin"),
    "nvcr.io/nvidia/k8s-device-plugin:v0.20.0": ("nvidia-device-plugin",),
}
STAND_IN = ROOT / "tests/lab/backend_stand_in.py"
# As docs/howto/air-gap.md has it.
INSTALL = """\
gpg --dearmor <key.asc >key.gpg
mkdir archive && tar -xf archive.tar -C archive
gpgv --keyring $PWD/key.gpg archive/SHA256SUMS.asc archive/SHA256SUMS &&
  (cd archive && grep -E '^[0-9a-f]{64}  install-controller[.]sh$' SHA256SUMS | sha256sum --check --strict) &&
  sh archive/install-controller.sh ~/kubegpu-share
"""
# What uninstall.yml gives back of a node; images stay.
GIVEN_BACK = ("files", "packages", "held", "default runtime", "half-written", "unfinished")


@dataclasses.dataclass
class Gap:
    """Both sides.

    :ivar hosts: an inventory with the machine that resolves packages outside.
    :ivar before: what nodes and cluster had.
    """

    lab: Lab
    vendors: Vendors
    hosts: Path
    inside: Inside
    closed: Closed
    folder: Path
    before: JsonObject = dataclasses.field(repr=False)

    def silent(self) -> None:
        """Require that nothing was asked of anything else since the last call."""
        found = self.closed.asked()
        assert found == [], found

    def run(self, playbook: str, *arguments: str, **variables: t.Any) -> Done:
        """Run a playbook inside, which has to succeed without a question to anything else."""
        done = self.inside.playbook(playbook, *arguments, **variables)
        assert done.rc == 0, done.out[-8000:]
        self.silent()
        return done

    def own(self, **more: t.Any) -> dict[str, t.Any]:
        """The variables of the inventory's owner."""
        helm = str(build.built(build.HELM) / "helm")
        return {
            **{"gpushare_image_delivery": "import", "gpushare_image": self.lab.state["gpushare_image"]},
            **{"acceptance_image": airgap.BASE, "maintenance_services": ["nvidia-sim"]},
            **{"driver_version": OLDER, "hami_helm": helm, "nvidia_device_plugin_helm": helm},
            **{f"{name.replace('-', '_')}_chart_sha256": airgap.chart_digest(CHARTS[name], name) for name in CHARTS},
            **self.vendors.key_digests,
            **more,
        }

    def archive(self, name: str, **variables: t.Any) -> Path:
        """Carry the list out, make the archive, and carry it in; returns its path there."""
        needed = self.folder / f"{name}.yml"
        shutil.copy(self.inside.home / "needed.yml", needed)
        self.vendors.sell(needed)
        made = self.folder / f"{name}.tar"
        done = airgap.download(self.lab, self.vendors, self.hosts, needed, made, **variables)
        assert done.rc == 0, done.out[-8000:]
        target = self.inside.home / "archive.tar"
        shutil.copy(made, target)
        return target


@pytest.fixture(scope="module")
def gap(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gap]:
    bare = lab.playbook("playbooks/uninstall.yml")
    assert bare.rc == 0, bare.out[-4000:]
    folder = tmp_path_factory.mktemp("gap")
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        vendors = enter(airgap.vendors(lab, folder / "outside", CHARTS))
        kube_scheduler = f"registry.k8s.io/kube-scheduler:v{lab.state['versions']['kubernetes']}"
        for image, names in {**BACKENDS, kube_scheduler: ("kube-scheduler",)}.items():
            vendors.program(image, STAND_IN, *names)
        hosts = enter(airgap.machine_with_access(lab, folder))
        controller = enter(joined(lab, "controller", airgap.CONTROLLER))
        beside = enter(joined(lab, "registry", airgap.REGISTRY))
        within = ["nsenter", f"--net={beside.path}", "--"]
        registry = enter(airgap.real_skopeo.registry(folder / "registry", beside.address, within))
        airgap.trusted(lab, registry)
        stack.callback(airgap.trusted, lab, registry, there=False)
        enter(airgap.without_sources(lab))
        before = {"objects": cluster_objects(lab), **{name: node_state(lab, name) for name in lab.nodes}}
        outside = airgap.machine_address(lab.state["settings"]["subnet"], airgap.OUTSIDE)
        closed = Closed(lab, *members_of(lab.nodes), controller, beside, outside=outside)
        inside = Inside(lab, controller, folder / "controller", registry)
        inside.home.mkdir()
        shutil.copy(folder / "outside/key.asc", inside.home)
        made = Gap(lab, vendors, hosts, inside, closed, folder, before)
        inside.settle(made.own())
        enter(closed.closed())
        yield made


def _names_asked(gap: Gap, member: Member, name: str) -> None:
    """Require that a question for a name was counted at both name servers, and nothing else."""
    found = set(gap.closed.asked())
    pairs = ((member.address, NAME_SERVER), (member.address_6, f"[{NAME_SERVER_6}]"))
    assert found == {f"{member.name}: udp {own} > {server}:53 name {name}" for own, server in pairs}, found


def test_a_question_for_anything_else_is_counted(gap: Gap, lab: Lab) -> None:
    """Each node, the controller and the registry ask on purpose: without that a zero would say nothing."""
    gap.silent()
    closed, gateway = gap.closed, lab.state["gateway"]
    for member in closed.members:
        assert closed.tried(member) == [f"{member.name}: tcp {member.address} > {ELSEWHERE}:443"]
        found = closed.tried(member, ELSEWHERE_6)
        assert found == [f"{member.name}: tcp {member.address_6} > [{ELSEWHERE_6}]:443"]
    members = {member.name: member for member in closed.members}
    node, controller = members[lab.gpu_nodes[0]], gap.inside.member
    for member in (members[name] for name in lab.nodes):
        lab.ssh(member.name, "timeout 5 getent hosts packages.example.org || true")
        _names_asked(gap, member, "packages.example.org")
    assert gap.inside.run("asks", "timeout 5 getent hosts registry.example.org || true").rc == 0
    _names_asked(gap, controller, "registry.example.org")
    # The packages' repository; this machine, and what is behind it.
    repository = lab.state["repository"]["address"]
    assert closed.tried(node, repository, 8080) == [f"{node.name}: tcp {node.address} > {repository}:8080"]
    assert closed.tried(node, gateway, 9) == ["INPUT of this machine: 1 packets"]
    assert closed.tried(controller, GATEWAY_6, 9) == ["INPUT of this machine (IPv6): 1 packets"]
    with controller.led(FAR, gateway):
        # Something on the way may answer, and the connection then has several.
        [counted] = closed.tried(controller, FAR)
        assert re.fullmatch("FORWARD of this machine: [1-9] packets", counted), counted
        until(lambda: not closed.asked(), "the connection has ended", 10, 1)
    gap.silent()


def test_the_controller_is_made_of_the_archive_alone(gap: Gap, lab: Lab) -> None:
    output = gap.inside.home / "needed.yml"
    archive = lab.state["gpushare_image"], str(airgap.LAB / "images/gpushare.tar")
    known = ["-e", f"airgap_output={output}", "-e", f"gpushare_image_archive={archive[1]}"]
    done = lab.playbook("playbooks/airgap_list.yml", *known, inventory=str(gap.inside.inventory))
    assert done.rc == 0, done.out[-4000:]
    gap.silent()
    made = gap.archive("first")
    contents = airgap.listed(made.with_name("needed.yml"))["items"]
    assert {item["kind"] for item in contents} >= {"apt", "file", "image", "wheel", "collection"}
    done = gap.inside.run("install", INSTALL)
    assert done.rc == 0 and "ERROR" not in done.out, done.out[-4000:]
    found = gap.inside.run("where", f"ansible-galaxy collection list; ls -A {ROOT}; command -v ansible-playbook")
    assert str(gap.inside.home / "kubegpu-share/bin/ansible-playbook") in found.out
    assert re.search(r"kubegpu\.share +\d", found.out) and re.search(r"kubernetes\.core +\d", found.out), found.out
    gap.silent()


def test_the_archive_is_pushed(gap: Gap, lab: Lab) -> None:
    archive = gap.inside.home / "archive.tar"
    done = gap.inside.push(archive)
    assert done.rc == 0, done.out[-8000:]
    gap.silent()
    again = gap.inside.push(archive)
    again.assert_unchanged()
    written = gap.inside.written()
    assert written["acceptance_image"].startswith(f"{gap.inside.registry.host}/gpu/kubegpu-lab/base:1@sha256:")
    assert written["driver_repo_url"].startswith(f"http://{gap.inside.files_address}/packages/apt/")
    gap.silent()


def test_site_sets_the_cluster_up(gap: Gap, lab: Lab) -> None:
    gap.run("site")
    for name in lab.gpu_nodes:
        assert OLDER in lab.ssh(name, "nvidia-smi --query-gpu=driver_version --format=csv,noheader")
        origin = lab.ssh(name, "apt-cache policy nvidia-container-toolkit libnvidia-ml1")
        assert f"http://{gap.inside.files_address}/packages/apt/" in origin, origin
    gap.run("site").assert_unchanged()


def test_acceptance_and_verify_pass(gap: Gap, lab: Lab) -> None:
    until(lambda: all(lab.allocatable(name) for name in lab.gpu_nodes), "the cards are announced", 90)
    done = gap.run("acceptance")
    results = re.findall(r"^\W*(W[1-8])  .*  (PASS|FAIL|UNKNOWN|skipped)  ", done.out, re.MULTILINE)
    assert results == [(f"W{number}", "PASS") for number in range(1, 9)], done.out[-6000:]
    # They ran by an image that the nodes have pulled from the registry inside.
    used = lab.ssh(lab.gpu_nodes[0], "ctr -n k8s.io images ls -q")
    assert gap.inside.written()["acceptance_image"].partition("@")[2] in used
    done = gap.run("verify")
    assert not re.search(r"^(FAIL|UNKNOWN) ", done.out, re.MULTILINE), done.out[-8000:]


def test_a_newer_driver_comes_with_a_second_archive(gap: Gap, lab: Lab) -> None:
    """With it come the charts and images of HAMi and of NVIDIA, for which the nodes are switched later."""
    first, second = lab.gpu_nodes[:2]
    gap.inside.say(gap.own(driver_version=NEWER), {first: {"gpu_backend": "hami"}, second: {"gpu_backend": "nvidia"}})
    gap.run("airgap_list", airgap_output=str(gap.inside.home / "needed.yml"))
    done = gap.inside.push(gap.archive("second"))
    assert done.rc == 0, done.out[-8000:]
    gap.silent()
    gap.run("nodes", gpu_maintenance="drain")
    for name in lab.gpu_nodes:
        assert NEWER in lab.ssh(name, "nvidia-smi --query-gpu=driver_version --format=csv,noheader")


def test_hami_and_nvidias_plugin_are_deployed_by_the_mirrored_charts(gap: Gap, lab: Lab) -> None:
    first, second = lab.gpu_nodes[:2]
    gap.run("switch")
    gap.run("site")
    cards = {name: len(lab.nodes[name]["cards"]) for name in (first, second)}
    found = {name: lab.api.node(name)["status"]["allocatable"]["nvidia.com/gpu"] for name in cards}
    assert found == {first: str(10 * cards[first]), second: str(cards[second])}
    own = f"{gap.inside.registry.host}/gpu/"
    for space, paths in (
        ("hami-system", {"projecthami/hami", "kube-scheduler"}),
        ("nvidia-device-plugin", {"nvidia/k8s-device-plugin"}),
    ):
        pulled = {status["imageID"] for pod in lab.api.pods(space) for status in pod["status"]["containerStatuses"]}
        assert {image.partition("@sha256:")[0] for image in pulled} == {own + path for path in paths}, pulled
    gap.run("site").assert_unchanged()


def test_uninstall_leaves_nothing(gap: Gap, lab: Lab) -> None:
    gap.run("uninstall")
    spaces = {"gpushare-system", "hami-system", "nvidia-device-plugin"}
    until(lambda: not spaces & set(lab.api.namespaces()), "the namespaces go", 120)
    assert cluster_objects(lab) == gap.before["objects"]
    done = gap.inside.push(gap.inside.home / "archive.tar", airgap_state="absent")
    assert done.rc == 0, done.out[-4000:]
    assert not (gap.inside.inventory.parent / airgap.VARIABLES).exists()
    for name in lab.nodes:
        now, was = node_state(lab, name), gap.before[name]
        different = {key: _difference(was[key], now[key]) for key in GIVEN_BACK if was[key] != now[key]}
        assert different == {}, f"{name}: {different}"
        assert "nvidia" not in lab.ssh(name, "ls /etc/apt/sources.list.d /etc/apt/keyrings 2>/dev/null; true")
        assert lab.ssh(name, "ls -d /var/lib/kubegpu-airgap 2>/dev/null; true") == ""
        node = lab.api.node(name)
        assert not [key for key in node["metadata"].get("annotations", {}) if "kubegpu" in key or "hami" in key]
    gap.silent()


def _difference(was: t.Any, now: t.Any) -> JsonObject:
    """Return what is new and what is gone, of files by their path and content, or of lines."""
    before, after = (set(each.items()) if isinstance(each, dict) else set(each) for each in (was, now))
    return {"new": sorted(after - before), "gone": sorted(before - after)}
