# SPDX-License-Identifier: GPL-3.0-or-later
"""The migration with the real dpkg, apt and rpm: Docker's configuration survives the removal of its package."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from test_toolkit_legacy import DOCKER_LIST, LISTS, TOOLKIT_LIST, restore, work
from test_toolkit_legacy import KEY as KEYRING

from lab.paths import cache_root

# The file of the package nvidia-docker2, and one of a user.
STOCK = """{
    "runtimes": {
        "nvidia": {
            "path": "nvidia-container-runtime",
            "runtimeArgs": []
        }
    }
}
"""
USERS = """{ "log-driver": "journald", "default-runtime" : "nvidia",
  "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}"""
WANT = ("nvidia-docker2", "nvidia-container-runtime")


class Debian(RealSystem):
    """A Debian in a folder, whose commands run in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(str(root), self._chrooted)

    def _chrooted(self, argv: Sequence[str], data: str | None = None, environ_update: dict[str, str] | None = None):
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **(environ_update or {})}
        done = subprocess.run(
            ["chroot", str(self.root), *argv], input=data, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    def do(self, *argv: str) -> str:
        done = self.run(argv, timeout=120)
        assert done.rc == 0, f"{argv}: {done.out}{done.err}"
        return done.out

    def install(self, name: str, version: str, files: dict[str, str], control: str = "", conffiles: str = "") -> None:
        """Build a package of a few files and install it."""
        tree = self.root / "tmp" / name
        for path, text in files.items():
            (tree / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            (tree / path.lstrip("/")).write_text(text)
        (tree / "DEBIAN").mkdir(parents=True)
        fields = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: A <a@example.org>\n{control}"
        (tree / "DEBIAN" / "control").write_text(fields + "Description: stub\n")
        if conffiles:
            (tree / "DEBIAN" / "conffiles").write_text(conffiles)
        subprocess.run(["dpkg-deb", "-Zgzip", "-b", str(tree)], check=True, capture_output=True)
        self.do("dpkg", "--install", f"/tmp/{name}.deb")


def rootfs() -> Path | None:
    """Return the lab's Debian from the cache; creating one takes a minute and the network."""
    found = sorted((cache_root() / "rootfs").glob("base-*/rootfs.tar"))
    return found[-1] if found else None


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root for chroot")
    if not shutil.which("dpkg-deb"):
        pytest.skip("needs dpkg-deb")
    archive = rootfs()
    if archive is None:
        pytest.skip("needs a root filesystem of the lab in the cache (make lab-up makes it)")
    root = tmp_path_factory.mktemp("debian")
    # Most directories aren't needed.
    folders = ("share/zoneinfo", "share/doc", "include", "lib/gcc", "lib/python3*")
    useless = [f"--exclude=./usr/{each}" for each in folders]
    subprocess.run(["tar", "-C", str(root), *useless, "-xf", str(archive)], check=True)
    (root / "dev" / "null").touch()
    (root / "etc" / "apt" / "sources.list").write_text("")
    for path in (root / LISTS.lstrip("/")).iterdir():
        path.unlink()
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def debian(unpacked: Path) -> Iterator[Debian]:
    node = Debian(unpacked)
    node.install("nvidia-container-toolkit", "1.13.5-1", {"/usr/bin/nvidia-container-runtime": "#!/bin/sh\n"})
    node.install(
        "nvidia-docker2",
        "2.13.0-1",
        {"/etc/docker/daemon.json": STOCK, "/usr/bin/nvidia-docker": "#!/bin/sh\n"},
        "Depends: nvidia-container-toolkit (>= 1.13.0-1), nvidia-container-toolkit (<< 2.0.0)\n",
        "/etc/docker/daemon.json\n",
    )
    node.install("nvidia-container-runtime", "3.13.0-1", {}, "Depends: nvidia-container-toolkit (>= 1.13.0-1)\n")
    node.write(f"{LISTS}/nvidia-docker.list", DOCKER_LIST)
    node.write(f"{LISTS}/nvidia-container-toolkit.list", TOOLKIT_LIST)
    (unpacked / KEYRING.lstrip("/")).write_bytes(b"\x99\x02\x0d\x04\xff\x00binary")
    yield node
    node.run(["dpkg", "--purge", "nvidia-docker2", "nvidia-container-runtime", "nvidia-container-toolkit"])
    for path in ("etc/docker", "var/lib/kubegpu-share", "tmp", *(f"etc/apt/{each}.d" for each in ("sources.list",))):
        shutil.rmtree(unpacked / path, ignore_errors=True)
        (unpacked / path).mkdir(mode=0o755)


def snapshot(node: Debian) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, owner and bytes of the files in /etc and of the keyrings."""
    found = {}
    for folder in ("etc/docker", "etc/apt", "usr/share/keyrings"):
        for path in sorted((node.root / folder).rglob("*")):
            if path.is_file():
                about = path.stat()
                found[str(path.relative_to(node.root))] = (about.st_mode, about.st_uid, path.read_bytes())
    return found


def status(node: Debian, name: str) -> str:
    return node.run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}${Version}", name]).out


@pytest.mark.parametrize(("text", "mode"), [(STOCK, 0o644), (USERS, 0o600)], ids=["as delivered", "the user's"])
def test_dockers_configuration_is_kept_and_sources_are_restored(debian: Debian, text: str, mode: int) -> None:
    daemon = debian.root / "etc/docker/daemon.json"
    daemon.write_text(text)
    daemon.chmod(mode)
    os.chown(daemon, 1000, 1000)
    debian.do("apt-mark", "hold", "nvidia-docker2")
    before = snapshot(debian)

    predicted = work(WANT, True, debian)
    assert predicted["changed"] and snapshot(debian) == before and status(debian, "nvidia-docker2") == "hi 2.13.0-1"
    done = work(WANT, False, debian)

    assert done["packages"] == {"nvidia-docker2": "2.13.0-1", "nvidia-container-runtime": "3.13.0-1"}
    assert status(debian, "nvidia-docker2")[1] == "c", "removed, not purged"
    assert status(debian, "nvidia-container-toolkit") == "ii 1.13.5-1", "no other package is removed"
    assert snapshot(debian) == {"etc/docker/daemon.json": before["etc/docker/daemon.json"], **others(before)}
    assert debian.do("apt-get", "indextargets") == "", "apt reads its lists"
    assert not work(WANT, False, debian)["changed"]

    restore(debian)
    assert snapshot(debian) == before
    assert not (debian.root / "var/lib/kubegpu-share/legacy").exists()


def others(before: dict[str, tuple[int, int, bytes]]) -> dict[str, tuple[int, int, bytes]]:
    gone = ("etc/apt/sources.list.d/nvidia-", "usr/share/keyrings/nvidia-", "etc/docker/")
    return {path: one for path, one in before.items() if not path.startswith(gone)}


def test_apt_rejects_two_sources_with_different_keys_only_before(debian: Debian) -> None:
    ours = f"{LISTS}/kubegpu-nvidia-container-toolkit.sources"
    key = "-----BEGIN PGP PUBLIC KEY BLOCK-----"
    debian.write(
        ours,
        "Types: deb\nURIs: https://nvidia.github.io/libnvidia-container/stable/deb/amd64\nSuites: /\n"
        f"Signed-By: /etc/apt/keyrings/kubegpu-{len(key)}.asc\n",
    )
    assert "Conflicting values set for option Signed-By" in debian.run(["apt-get", "indextargets"]).err
    work(WANT, False, debian)
    assert debian.run(["apt-get", "indextargets"]).rc == 0
    assert debian.read(ours) is not None


def test_a_later_purge_by_the_user(debian: Debian) -> None:
    work(WANT, False, debian)
    debian.do("dpkg", "--purge", "nvidia-docker2")
    assert debian.read("/etc/docker/daemon.json") is None
    # Which is why the role leaves the package's configuration registered and never purges it.
    assert not work(WANT, False, debian)["changed"]


# --------------------------------------------------------------------------- rpm

SPEC = """Name: nvidia-docker2
Version: 2.13.0
Release: 1
Summary: stub
License: none
BuildArch: noarch
%description
%install
mkdir -p %{buildroot}/etc/docker
cp DAEMON %{buildroot}/etc/docker/daemon.json
%files
%config /etc/docker/daemon.json
"""


class RpmTree(RealSystem):
    """A directory that is rpm's root; other commands work on the directory's files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(str(root), self._inside)

    def _inside(self, argv: Sequence[str], data: str | None = None, environ_update: dict[str, str] | None = None):
        start = argv.index("rpm") if "rpm" in argv else None
        words = [str(self.root / word.lstrip("/")) if word.startswith("/") else word for word in argv]
        if start is not None:
            words[start + 1 : start + 1] = ["--root", str(self.root), "--dbpath", "/var/lib/rpm"]
        done = subprocess.run(
            words, env={**os.environ, **(environ_update or {})}, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root: rpm works on a root folder of its own")
    if not shutil.which("rpmbuild"):
        pytest.skip("needs rpmbuild")
    folder = tmp_path_factory.mktemp("rpm")
    (folder / "daemon.json").write_text(STOCK)
    (folder / "a.spec").write_text(SPEC.replace("DAEMON", str(folder / "daemon.json")))
    defined = ("--define", f"_topdir {folder}", "--define", "_build_id_links none")
    subprocess.run(["rpmbuild", "-bb", *defined, str(folder / "a.spec")], check=True, capture_output=True)
    return next(folder.glob("RPMS/*/*.rpm"))


@pytest.mark.parametrize("text", [STOCK, USERS], ids=["as delivered", "the user's"])
def test_dockers_configuration_that_rpm_deletes_is_restored(package: Path, tmp_path: Path, text: str) -> None:
    """Without our module, rpm removes the file or renames it to .rpmsave."""
    for ours in (False, True):
        root = tmp_path / str(ours)
        (root / "var/lib/rpm").mkdir(parents=True)
        install = ["rpm", "--root", str(root), "--dbpath", "/var/lib/rpm", "-i", "--nodeps", str(package)]
        subprocess.run(install, check=True, capture_output=True)
        daemon = root / "etc/docker/daemon.json"
        daemon.write_text(text)
        daemon.chmod(0o600)
        node = RpmTree(root)
        if not ours:
            assert node.run(["rpm", "-e", "nvidia-docker2"]).rc == 0
            assert not daemon.exists()
            continue
        done = work(WANT, False, node)
        assert done["packages"] == {"nvidia-docker2": "2.13.0-1"}
        assert daemon.read_text() == text and daemon.stat().st_mode & 0o777 == 0o600
        assert [path.name for path in daemon.parent.iterdir()] == ["daemon.json"]
        assert node.run(["rpm", "-q", "nvidia-docker2"]).rc != 0
        assert not work(WANT, False, node)["changed"]
