# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole way of an air gap: nodes, a controller and a registry reach each other and nothing else.

An archive is made outside, by the lab's vendors and by PyPI and Debian, and carried in. Each packet to anything else is
counted on each node, on the controller and on this machine, and so are questions for names. Real are nodes, cluster,
package manager, registry, skopeo and the controller's environment; the driver and Galaxy are stand-ins. It begins with
a cluster that knows nothing of the collection, and ends with it.
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
from _closed import ELSEWHERE, Closed, joined, members_of
from _lab import ROOT, Done, JsonObject, Lab, until
from _snapshot import cluster_objects, node_files

pytestmark = pytest.mark.long

OLDER, NEWER = "580.82.07", "580.95.05"
# As docs/howto/air-gap.md has it.
INSTALL = """\
gpg --dearmor <key.asc >key.gpg
mkdir archive && tar -xf archive.tar -C archive
gpgv --keyring $PWD/key.gpg archive/SHA256SUMS.asc archive/SHA256SUMS &&
  (cd archive && grep -E '^[0-9a-f]{64}  install-controller[.]sh$' SHA256SUMS | sha256sum --check --strict) &&
  sh archive/install-controller.sh ~/kubegpu-share
"""
# kubelet's own record of what it gave away.
LEFT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"


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
        return {
            **{"gpushare_image_delivery": "import", "gpushare_image": self.lab.state["gpushare_image"]},
            **{"acceptance_image": airgap.BASE, "maintenance_services": ["nvidia-sim"]},
            "driver_version": OLDER,
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
    before = {"objects": cluster_objects(lab), **{name: node_files(lab, name) for name in lab.nodes}}
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        vendors = enter(airgap.vendors(lab, folder / "outside"))
        hosts = enter(airgap.machine_with_access(lab, folder))
        controller = enter(joined(lab, "controller", airgap.CONTROLLER))
        beside = enter(joined(lab, "registry", airgap.REGISTRY))
        within = ["nsenter", f"--net={beside.path}", "--"]
        registry = enter(airgap.real_skopeo.registry(folder / "registry", beside.address, within))
        airgap.trusted(lab, registry)
        stack.callback(airgap.trusted, lab, registry, there=False)
        enter(airgap.without_sources(lab))
        outside = airgap.machine_address(lab.state["settings"]["subnet"], airgap.OUTSIDE)
        closed = Closed(lab, *members_of(lab.nodes), controller, beside, outside=outside)
        inside = Inside(lab, controller, folder / "controller", registry)
        inside.home.mkdir()
        shutil.copy(folder / "outside/key.asc", inside.home)
        made = Gap(lab, vendors, hosts, inside, closed, folder, before)
        inside.settle(made.own())
        enter(closed.closed())
        yield made


def test_a_question_for_anything_else_is_counted(gap: Gap, lab: Lab) -> None:
    """Each node, the controller and the registry ask on purpose: without that a zero would say nothing."""
    gap.silent()
    for member in gap.closed.members:
        assert gap.closed.tried(member) == [f"{member.name}: tcp {member.address} > {ELSEWHERE}:443"]
    [node] = [member for member in gap.closed.members if member.name == lab.gpu_nodes[0]]
    lab.ssh(node.name, "timeout 2 getent hosts packages.example.org || true")
    assert any(line.endswith(":53 name packages.example.org") for line in gap.closed.asked())
    assert gap.inside.run("asks", "timeout 2 getent hosts registry.example.org || true").rc == 0
    assert any(line.endswith(":53 name registry.example.org") for line in gap.closed.asked())
    # The packages' repository, and this machine.
    repository = lab.state["repository"]["address"]
    assert gap.closed.tried(node, repository, 8080) == [f"{node.name}: tcp {node.address} > {repository}:8080"]
    assert gap.closed.tried(node, lab.state["gateway"], 9) == ["INPUT of this machine: 1 packets"]
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
    gap.inside.say(gap.own(driver_version=NEWER))
    # What the archive's variables name inside has its name of outside in the list.
    outside = {"acceptance_image": airgap.BASE, "gpushare_image_archive": str(airgap.LAB / "images/gpushare.tar")}
    gap.run("airgap_list", airgap_output=str(gap.inside.home / "needed.yml"), **outside)
    done = gap.inside.push(gap.archive("second"))
    assert done.rc == 0, done.out[-8000:]
    gap.silent()
    gap.run("nodes", gpu_maintenance="drain")
    for name in lab.gpu_nodes:
        assert NEWER in lab.ssh(name, "nvidia-smi --query-gpu=driver_version --format=csv,noheader")


def test_uninstall_leaves_nothing(gap: Gap, lab: Lab) -> None:
    gap.run("uninstall")
    until(lambda: "gpushare-system" not in lab.api.namespaces(), "the namespace goes")
    assert cluster_objects(lab) == gap.before["objects"]
    done = gap.inside.push(gap.inside.home / "archive.tar", airgap_state="absent")
    assert done.rc == 0, done.out[-4000:]
    assert not (gap.inside.inventory.parent / airgap.VARIABLES).exists()
    for name in lab.nodes:
        now = {path: text for path, text in node_files(lab, name).items() if path != LEFT}
        was = {path: text for path, text in gap.before[name].items() if path != LEFT}
        assert {path: text for path, text in now.items() if was.get(path) != text} == {}
        assert lab.ssh(name, "ls -d /var/lib/kubegpu-airgap 2>/dev/null; true") == ""
    gap.silent()
