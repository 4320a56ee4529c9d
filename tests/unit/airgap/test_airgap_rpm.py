# SPDX-License-Identifier: GPL-3.0-or-later
"""The real dnf 4 and zypper take an archive's packages by HTTP, in a network that has the server and nothing else.

airgap_push.yml serves the folders and writes the variables, and ``pinned_packages`` adds the repositories as on a node.
Packets of both families to anything else are counted. What somebody has changed on the way is refused by the package
manager itself; without its checks of signatures the same content is installed, so nothing else refuses it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import archives
import pytest
import rpm_tree
from _closed import ELSEWHERE, ELSEWHERE_6, NAMES, Member, run, served
from ansible_collections.kubegpu.share.plugins.module_utils._packages.options import fetch_key
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import needed
from ansible_runs import write_inventory
from package_sets import apply, package_set
from rpm_tree import Stub, Tree
from test_airgap_needed import LIST, machine, of
from test_airgap_push import evaluated, playbook
from test_packages_mirrors import make_mirror, sign_metadata

WHY = rpm_tree.missing() or ("" if hasattr(os, "setns") else "enters network namespaces by os.setns, of Python 3.12")
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(WHY), reason=WHY)]

PORT = 8090
ADDRESSES = {"server": "192.0.2.1", "node": "192.0.2.2"}
URL = f"http://{ADDRESSES['server']}:{PORT}"
RELEASES = {"dnf": ("rocky-9", "rocky", "9.4"), "zypper": ("sles-15", "sles", "15.6")}
PACKAGES = ["nvidia-driver-cuda=580.95", "kmod-nvidia-open-dkms=580.95"]
STREAM = {"module": "nvidia-driver", "stream": "580-open", "switch": True}
# Of the driver's repository, whose packages are signed, and of the distribution's, whose metadata is.
HELPER, TOOL = "nvidia-modprobe", "tool"
OTHER = "other@example.org"
CHANGED = "changed-on-the-way"


class Connected(Tree):
    """A system whose commands run in a network namespace."""

    def __init__(self, tree: Tree, network: str) -> None:
        super().__init__(tree.root, tree.kind)
        self._network = network

    def _inside(self, argv: Sequence[str]) -> list[str]:
        words = super()._inside(argv)
        words.remove("--net")
        return ["nsenter", f"--net={self._network}", "--", *words]


@contextlib.contextmanager
def cable() -> Iterator[tuple[Member, Member]]:
    """Two network namespaces with a cable between them, and nothing else; yields the server's and the node's."""
    spaces = {role: f"kubegpu-{role}-{os.getpid()}" for role in ADDRESSES}
    with contextlib.ExitStack() as stack:
        for space in spaces.values():
            run("ip", "netns", "add", space)
            stack.callback(run, "ip", "netns", "delete", space)
        ends = ("eth0", "netns", spaces["server"], "type", "veth", "peer", "name", "eth0", "netns", spaces["node"])
        run("ip", "link", "add", *ends)
        members = []
        for role, address in ADDRESSES.items():
            member = Member(role, address, f"/run/netns/{spaces[role]}")
            member.inside("ip", "link", "set", "lo", "up")
            member.inside("ip", "address", "add", f"{address}/24", "dev", "eth0")
            member.inside("ip", "link", "set", "eth0", "up")
            stack.callback(member.open)
            member.close()
            members.append(member)
        yield members[0], members[1]


class Node:
    """A machine without a repository but the archive's, and the folders that it is served."""

    def __init__(self, outside: Tree, folder: Path, server: Member, member: Member) -> None:
        """:param outside: the same system before it is in this network, which resolves the packages."""
        self.tree, self.server, self.member = Connected(outside, member.path), server, member
        self.folder, self.requests = folder / "served", list[str]()
        self._kept = folder / "kept"
        made = make_mirror(outside)["repositories"]
        self.rows = {row["role"]: row for row in made}
        shutil.copytree(self._pushed(folder, made), self._kept, symlinks=True)
        repositories = outside.root / ("etc/zypp/repos.d" if outside.kind == "zypper" else "etc/yum.repos.d")
        shutil.rmtree(repositories)
        repositories.mkdir()
        outside.write("/etc/resolv.conf", NAMES)
        # As any machine has it: rpm asks for its own name.
        outside.write("/etc/hosts", f"127.0.0.1 localhost {socket.gethostname()}\n")

    def _pushed(self, folder: Path, made: Sequence[dict[str, Any]]) -> Path:
        """Make an archive of the mirrors and have airgap_push.yml serve it; reads the variables that it writes."""
        row, distribution, version = RELEASES[self.tree.kind]
        maker = archives.Maker(folder / "archive")
        for path in sorted((self.tree.root / "srv/air/packages").rglob("*")):
            if path.is_file():
                maker.file(str(path.relative_to(self.tree.root / "srv/air")), path.read_bytes())
        driver = self.rows["driver"]
        key = self.tree.read(f"/srv/air/{driver['path']}/{driver['key']['path']}").encode()
        for item in needed(LIST, of(machine(row))):
            if item["id"].startswith("packages/driver/"):
                place = {"path": driver["path"], "bytes": 0, "sha256": "", "image": ""}
                maker.entries.append({**item, "source": driver["address"], **place})
            elif "driver_repo_key_url" in item["variables"]:
                maker.entries.append({**item, **maker.file("files/driver.asc", key)})
        facts = {"distribution": {"id": distribution, "version": version, "arch": "amd64"}}
        (folder / "inventory").mkdir()
        write_inventory(folder / "inventory", {"gpu_nodes": {"gpu1": {"gpu_node": facts}, "gpu2": None}})
        given = {"folder": maker.close(), "unsigned": True, "files_folder": str(self.folder), "files_url": URL}
        done = playbook(folder, **given)
        assert done.rc == 0, done.text
        names = ("airgap_distribution_sources", "driver_repo_url", "driver_repo_key_url")
        self.variables = evaluated(folder, names)["gpu1"]
        return self.folder

    def apply(self, **params: Any) -> dict[str, Any]:
        """Run ``pinned_packages`` on the node; its network is the node's, too."""
        spec = package_set(**params)
        return self.member.in_it(lambda: apply(spec, self.tree.system, "redhat", fetch=fetch_key))

    def set_up(self) -> list[bool]:
        """Do as roles airgap and driver; returns what has changed."""
        distribution = {"name": "airgap", "repositories": self.variables["airgap_distribution_sources"]}
        driver = {
            **{"name": "nvidia-cuda", "url": self.variables["driver_repo_url"], "signed": ["packages"]},
            **{"key_url": self.variables["driver_repo_key_url"], "key_sha256": self.rows["driver"]["key"]["sha256"]},
        }
        streams = [STREAM] if self.tree.kind == "dnf" else []
        wanted = {"name": "driver", "repositories": [driver], "packages": PACKAGES, "streams": streams}
        return [self.apply(**each)["changed"] for each in (distribution, wanted)]

    def install(self, name: str, unchecked: bool = False) -> None:
        """Install a package as a user does, and take it off.

        :param unchecked: without checks of signatures, which installs what somebody has changed.
        :raises AssertionError: it wasn't installed, or with another content.
        """
        self.tree.run("sh", "-c", f"rm -rf /var/cache/dnf /var/cache/zypp; rpm -e --nodeps {name} 2>/dev/null; true")
        dnf = ["dnf", "-y", *(["--setopt=*.gpgcheck=0", "--setopt=*.repo_gpgcheck=0"] if unchecked else [])]
        zypper = ["zypper", "--non-interactive", *(["--no-gpg-checks"] if unchecked else [])]
        said = self.tree.run(*(dnf if self.tree.kind == "dnf" else zypper), "install", name, rc=None)
        assert name in self.tree.packages(), said
        changed = self.tree.run("rpm", "-q", "--whatprovides", CHANGED, rc=None)
        assert ("no package provides" not in changed) == unchecked, changed
        self.tree.run("rpm", "-e", "--nodeps", name)

    def refuse(self, name: str) -> None:
        with pytest.raises(AssertionError):
            self.install(name)
        assert name not in self.tree.packages()

    # ------------------------------------------------------------------ who changes something on the way

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        yield
        shutil.rmtree(self.folder)
        shutil.copytree(self._kept, self.folder, symlinks=True)

    def place(self, role: str) -> Path:
        return self.folder / self.rows[role]["path"]

    def package(self, role: str, name: str) -> Path:
        [row] = [row for row in self.rows[role]["packages"] if row["name"] == name]
        return self.place(role) / row["path"]

    def replace(self, role: str, stub: Stub, signer: str = "") -> None:
        """Replace a package by another one of the same version, and make the metadata anew; its signature stays.

        :param signer: whose key signs the package.
        """
        place, tree = self.place(role), self.tree
        signature = place / "repodata/repomd.xml.asc"
        kept = signature.read_bytes() if signature.exists() else None
        work = tree.root / "root/changed"
        shutil.rmtree(work, ignore_errors=True)
        tree.write("/root/changed.spec", stub.spec())
        target = self.package(role, stub.name)
        where = f"--define '_rpmdir /root/changed' --define '_rpmfilename {target.name}'"
        tree.run("sh", "-c", f"rpmbuild -bb --quiet {where} /root/changed.spec")
        if signer:
            tree.run("sh", "-c", f"rpm --define '_gpg_name {signer}' --addsign /root/changed/{target.name}")
        shutil.copy(work / target.name, target)
        shutil.rmtree(work)
        shutil.copytree(place, work)
        tree.run("sh", "-c", "rm -rf /root/changed/repodata && createrepo_c -q /root/changed")
        shutil.rmtree(place / "repodata")
        shutil.copytree(work / "repodata", place / "repodata")
        if kept is not None:
            signature.write_bytes(kept)

    def sign(self, role: str) -> None:
        """Sign the metadata by another key."""
        folder = self.place(role) / "repodata"
        self.tree.write("/root/repomd.xml", (folder / "repomd.xml").read_text())
        sign = f"gpg -q --yes --armor --detach-sign -u {OTHER} /root/repomd.xml && gpgconf --kill all"
        self.tree.run("sh", "-c", sign)
        (folder / "repomd.xml.asc").write_text(self.tree.read("/root/repomd.xml.asc"))


@pytest.fixture(params=["dnf", "zypper"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    with rpm_tree.borrowed(request.param) as borrowed, cable() as (server, member):
        rpm_tree.reset(borrowed)
        try:
            sign_metadata(borrowed)
            borrowed.write("/root/batch", rpm_tree.batch(OTHER))
            borrowed.run("sh", "-c", "gpg -q --batch --gen-key /root/batch 2>/dev/null; gpgconf --kill all")
            made = Node(borrowed, tmp_path, server, member)
            with served(server, made.folder, PORT) as made.requests:
                yield made
        finally:
            rpm_tree.reset(borrowed)


def _asked(node: Node) -> list[str]:
    """Return what was asked of anything but the server since the last call."""
    found = []
    for member in (node.server, node.member):
        seen, number = member.seen(), member.sent()
        assert len(seen) == number
        found += seen
    return found


def test_packages_come_from_the_served_folders_and_changed_ones_are_refused(node: Node) -> None:
    script = "import socket, sys; socket.create_connection((sys.argv[1], 443), 0.3)"
    for address, own, shown in (
        (ELSEWHERE, node.member.address, ELSEWHERE),
        (ELSEWHERE_6, node.member.address_6, f"[{ELSEWHERE_6}]"),
    ):
        node.member.inside(sys.executable, "-I", "-c", script, address, check=False)
        assert _asked(node) == [f"node: tcp {own} > {shown}:443"]
    assert node.set_up() == [True, True]
    assert node.set_up() == [False, False]
    found = node.tree.packages()
    assert {name: found[name] for name in ("nvidia-driver-cuda", HELPER)} == {
        **{"nvidia-driver-cuda": "580.95", HELPER: "590.44"}
    }
    for name in (HELPER, TOOL):
        node.install(name)
    asked = "\n".join(node.requests)
    for role, name in (("driver", HELPER), ("distribution", TOOL)):
        place = f"/{node.rows[role]['path']}"
        assert f'"GET {place}/repodata/repomd.xml HTTP/1.1" 200' in asked
        assert f'"GET {place}/{node.package(role, name).name} HTTP/1.1" 200' in asked
    assert f'"GET /{node.rows["distribution"]["path"]}/repodata/repomd.xml.asc HTTP/1.1" 200' in asked
    _check_changed(node)
    assert _asked(node) == []


def _check_changed(node: Node) -> None:
    helper = Stub(HELPER, "590.44", "3", (f"Provides: {CHANGED}",))
    tool = Stub(TOOL, "2", "", (f"Provides: {CHANGED}",))

    def bytes_of_a_package(role: str, name: str) -> None:
        path = node.package(role, name)
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def without_signature() -> None:
        node.replace("distribution", tool)
        (node.place("distribution") / "repodata/repomd.xml.asc").unlink()

    def signed_by_another() -> None:
        node.replace("distribution", tool)
        node.sign("distribution")

    # Name of the package, what is done, and whether signatures alone refuse it.
    cases: list[tuple[str, Callable[[], None], bool]] = [
        (HELPER, lambda: bytes_of_a_package("driver", HELPER), False),
        (TOOL, lambda: bytes_of_a_package("distribution", TOOL), False),
        (HELPER, lambda: node.replace("driver", helper), True),
        (HELPER, lambda: node.replace("driver", helper, OTHER), True),
        (TOOL, lambda: node.replace("distribution", tool), True),
        (TOOL, without_signature, True),
        (TOOL, signed_by_another, True),
    ]
    for name, change, by_signature in cases:
        with node.changed():
            change()
            node.refuse(name)
            if by_signature:
                # So nothing but the signature was in its way.
                node.install(name, unchecked=True)
        node.install(name)
