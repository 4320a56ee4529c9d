# SPDX-License-Identifier: GPL-3.0-or-later
"""Partial mirrors with the real dnf 4 and zypper: resolved, copied, and used by the same program as a node uses them.

The repositories are stubs that are built and signed here. What dnf 5 prints isn't known here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import rpm_tree
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host import file_limit
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors import client, mirror, types
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors.store import Absent, Certificates
from package_sets import apply, package_set
from rpm_tree import Tree

WHY = rpm_tree.missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

FOLDER = "/srv/air"
PACKAGES = ["nvidia-driver-cuda=580.95-*", "kmod-nvidia-open-dkms=580.95-*", "kernel-devel=5.14.0-*", "tool"]
# By what is needed: nvidia-persistenced and nvidia-modprobe are named by nobody.
DRIVER = [
    "kernel-devel-5.14.0.rpm",
    "kmod-nvidia-open-dkms-580.95.rpm",
    "nvidia-driver-cuda-580.95.rpm",
    "nvidia-modprobe-590.44.rpm",
    "nvidia-persistenced-590.44.rpm",
]


@pytest.fixture(params=["dnf", "zypper"])
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    with rpm_tree.borrowed(request.param) as borrowed:
        rpm_tree.reset(borrowed)
        sign_metadata(borrowed)
        yield borrowed
        rpm_tree.reset(borrowed)


def sign_metadata(tree: Tree) -> None:
    """Give the distribution's own repository, in which only the metadata is signed, a key of its own."""
    tree.write("/root/batch", rpm_tree.batch("distribution@example.org"))
    sign = "gpg -q --armor --detach-sign -u distribution@example.org /srv/foreign/repodata/repomd.xml"
    make = "gpg -q --batch --gen-key /root/batch 2>/dev/null"
    export = "gpg --armor --export distribution@example.org > /root/own.asc"
    tree.run("sh", "-c", f"{make} && {export} && {sign} && gpgconf --kill all")
    where = "zypp/repos.d" if tree.kind == "zypper" else "yum.repos.d"
    tree.write("/etc/zypp/vars.d/place" if tree.kind == "zypper" else "/etc/dnf/vars/place", "foreign\n")
    tree.write(
        f"/etc/{where}/mine.repo",
        "[mine]\nname=mine\nbaseurl=file:///srv/$place\nenabled=1\ngpgcheck=0\nrepo_gpgcheck=1\n"
        "gpgkey=file:///root/own.asc\n[off]\nname=off\nbaseurl=http://127.0.0.1:1/\nenabled=0\n",
    )
    if tree.kind == "zypper":
        # It trusts what is in rpm's database, and nothing that a repository brings.
        tree.run("rpm", "--import", "/root/own.asc")
        tree.run("sh", "-c", "sed -i 's/^gpgcheck=0/gpgcheck=1\\npkg_gpgcheck=0/' /etc/zypp/repos.d/mine.repo")


def make_mirror(tree: Tree, **more: Any) -> dict[str, Any]:
    def open_file(url: str, _certificates: Certificates) -> IO[bytes]:
        path = tree.root / url.removeprefix("file:///")
        if not path.is_file():
            raise Absent(f"{url} answers 404")
        return path.open("rb")

    version = "15.6" if tree.kind == "zypper" else "9.4"
    name = "sles" if tree.kind == "zypper" else "rocky"
    repository = {"name": "cuda", "url": "file:///srv/modular/", "key_text": tree.read(rpm_tree.KEY), "suites": ["/"]}
    repository |= {"components": [], "architectures": [], "targets": [], "signed": ["packages"]}
    stream = {"module": "nvidia-driver", "stream": "580-open", "switch": True}
    one = {
        **{"name": "set-1", "hosts": ["gpu-node-1"], "manager": "rpm", "architectures": ["amd64"]},
        **{"id": name, "version": version},
        "roles": {"cuda": "driver"},
        "repositories": [repository],
        "pins": [],
        "streams": [stream] if tree.kind == "dnf" else [],
        "packages": PACKAGES,
        **more,
    }
    return mirror.ensure({"folder": FOLDER, "sets": [one]}, False, tree.system, str(tree.root), open_file)


def _names(repository: dict[str, Any]) -> list[str]:
    return sorted(row["path"] for row in repository["packages"])


def _use(tree: Tree, repositories: list[dict[str, Any]]) -> None:
    """Make the tree a node that has the mirrors and nothing else."""
    where = "/etc/zypp/repos.d" if tree.kind == "zypper" else "/etc/yum.repos.d"
    shutil.rmtree(tree.root / where.lstrip("/"))
    for described in repositories:
        repository = types.repository(described, "test")
        path, text = client.source_text(repository, f"file://{FOLDER}", tree.kind)
        tree.write(path, text)
        name = f"/etc/pki/rpm-gpg/KUBEGPU-airgap-{repository['name']}.asc"
        assert f"gpgkey=file://{name}" in text
        tree.write(name, tree.read(f"{FOLDER}/{repository['path']}/{repository['key']['path']}"))
        # As pinned_packages does.
        tree.run("rpm", "--import", name)


def _install(tree: Tree, *names: str) -> tuple[int, str]:
    dnf = ["dnf", "-y", "--setopt=install_weak_deps=False", "install"]
    zypper = ["zypper", "--non-interactive", "install", "--no-recommends"]
    done = tree.system.run([*(zypper if tree.kind == "zypper" else dnf), *names], timeout=100)
    return done.rc, done.out + done.err


def test_a_mirror_has_what_is_needed_and_a_node_installs_from_it(tree: Tree) -> None:
    made = make_mirror(tree)
    assert made["changed"]
    assert made["left_out"] == []
    by_role = {row["role"]: row for row in made["repositories"]}
    assert _names(by_role["driver"]) == DRIVER
    assert _names(by_role["distribution"]) == ["tool-2.rpm"]
    assert by_role["driver"]["signed"] == ["packages"]
    assert by_role["distribution"]["signed"] == ["metadata"]
    # The vendor's metadata, byte for byte, with all that it names.
    for role, source in (("driver", "modular"), ("distribution", "foreign")):
        folder = tree.root / "srv/air" / by_role[role]["path"]
        for path in (tree.root / "srv" / source / "repodata").iterdir():
            assert (folder / "repodata" / path.name).read_bytes() == path.read_bytes()
    # Again: nothing is taken anew.
    kept = {path: path.stat().st_ino for path in (tree.root / "srv/air/packages").rglob("*") if path.is_file()}
    assert not make_mirror(tree)["changed"]
    assert {path: path.stat().st_ino for path in kept} == kept
    _use(tree, made["repositories"])
    if tree.kind == "dnf":
        # A repository of the node's own that isn't reached: dnf alone fails, and pinned_packages goes on.
        text = "[gone]\nname=gone\nbaseurl=http://127.0.0.1:1/\nenabled=1\ngpgcheck=1\nretries=1\n"
        tree.write("/etc/yum.repos.d/gone.repo", text)
        assert _install(tree, "tool")[0] != 0
        apply(package_set(name="driver", packages=["tool"], hold=False), tree.system, "redhat")
        assert tree.packages()["tool"] == "2"
        tree.run("sh", "-c", "rm /etc/yum.repos.d/gone.repo; rpm -e tool")
    if tree.kind == "dnf":
        tree.run("dnf", "-y", "-q", "module", "enable", "nvidia-driver:580-open")
    versions = {row["name"]: row["version"] for each in made["repositories"] for row in each["packages"]}
    pair = "-" if tree.kind == "dnf" else "="
    rc, said = _install(tree, *(f"{name}{pair}{versions[name]}" for name in (row.split("=")[0] for row in PACKAGES)))
    assert rc == 0, said
    installed = tree.packages()
    assert installed["nvidia-driver-cuda"] == "580.95"
    assert installed["kernel-devel"] == "5.14.0"
    assert installed["nvidia-persistenced"] == "590.44"
    _check_refusals(tree, by_role)


def _check_refusals(tree: Tree, by_role: dict[str, Any]) -> None:
    """A package that isn't there, one that was changed, and changed metadata."""
    rc, said = _install(tree, "cuda-toolkit")
    assert rc != 0, said
    folder = tree.root / "srv/air" / by_role["distribution"]["path"]
    tree.run("sh", "-c", "rm -rf /var/cache/dnf /var/cache/zypp; rpm -e tool || true")
    package = folder / "tool-2.rpm"
    content = package.read_bytes()
    _replace(package, content[:-1] + bytes([content[-1] ^ 1]))
    rc, said = _install(tree, "tool")
    assert rc != 0
    assert "tool" not in tree.packages(), said
    _replace(package, content)
    index = folder / "repodata/repomd.xml"
    _replace(index, index.read_bytes() + b"\n")
    tree.run("sh", "-c", "rm -rf /var/cache/dnf /var/cache/zypp")
    rc, said = _install(tree, "tool")
    assert rc != 0
    assert "tool" not in tree.packages(), said


def _replace(path: Path, content: bytes) -> None:
    """Write a file anew: it may have another name in the cache."""
    path.unlink()
    path.write_bytes(content)


def test_what_cannot_be_had_or_verified_is_one_sentence_and_the_next_run_goes_on(tree: Tree) -> None:
    with pytest.raises(ShareError, match=r"can't resolve .*nowhere") as raised:
        make_mirror(tree, packages=["nowhere"])
    assert raised.value.details["code"] == "unresolved"
    # Signed, but not by the key that was announced.
    with pytest.raises(ShareError) as refused:
        make_mirror(tree, repositories=[_other_key(tree)])
    assert "\n" not in str(refused.value)
    assert not list((tree.root / "srv/air/packages").rglob("*.rpm"))
    where = "/etc/zypp/repos.d/mine.repo" if tree.kind == "zypper" else "/etc/yum.repos.d/mine.repo"
    text = tree.read(where)
    tree.write(where, text.replace("repo_gpgcheck=1", "repo_gpgcheck=0"))
    with pytest.raises(ShareError, match=r"repository mine is needed for tool, .* neither its packages nor its"):
        make_mirror(tree)
    tree.write(where, text)
    assert make_mirror(tree)["changed"]


def test_metadata_that_never_ends_is_stopped(tree: Tree) -> None:
    """dnf takes a repomd.xml of any length, unlike zypper: the system's limit stops it."""
    if tree.kind == "zypper":
        pytest.skip("zypper reads a folder without copying it; by HTTP it stops after 20 MB by itself")
    index = tree.root / "srv/foreign/repodata/repomd.xml"
    content = index.read_bytes()
    with index.open("wb") as file:
        file.truncate(64 << 20)
    with (
        file_limit.largest_file(16 << 20),
        pytest.raises(ShareError, match=r" makecache failed: .*/repomd\.xml") as raised,
    ):
        make_mirror(tree)
    assert "\n" not in str(raised.value)
    assert all(path.stat().st_size <= 16 << 20 for path in (tree.root / "srv/air").rglob("*") if path.is_file())
    index.write_bytes(content)
    assert make_mirror(tree)["changed"]


def _other_key(tree: Tree) -> dict[str, Any]:
    return {
        **{"name": "cuda", "url": "file:///srv/modular/", "key_text": tree.read("/root/own.asc"), "suites": ["/"]},
        **{"components": [], "architectures": [], "targets": [], "signed": ["packages"]},
    }
