# SPDX-License-Identifier: GPL-3.0-or-later
"""Partial mirrors with the real apt, by sources of this test alone; what nodes get of them; the sets of a list.

The repositories are stubs: one as NVIDIA's, flat, and one as Debian's, with lists by their digest. dnf and zypper are
in ``test_packages_mirrors``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.server
import io
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import yaml
from action_plugins import act
from ansible_collections.kubegpu.share.plugins.action import airgap_packages
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host import file_limit
from ansible_collections.kubegpu.share.plugins.module_utils._host.facts import distribution
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors import (
    client,
    mirror,
    rpm_lists,
    types,
    wanted,
)
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors import store as stores
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors.store import Certificates, Store
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors.wanted import wanted_sets
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import download, formats, mirrored
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import needed
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.package_sets import facts_of, package_sets
from lab_repository import apt_root, skip_without
from ports import free_port, serving
from test_airgap_needed import LIST, machine, of

from lab.debs import Package, make_deb, make_index
from lab.packages import ARCHITECTURES, Signer
from lab.shell import run

DRIVER, DISTRIBUTION = "driver", "debian"
DIST = "dists/stable"
OS_RELEASE = 'ID=debian\nVERSION_ID="12"\n'
PACKAGES = ["nvidia-open=580.95.05-*", "linux-headers-6.1.0-37-amd64", "dkms"]


class Own(RealSystem):
    """This machine with another /etc, so that its own repositories aren't asked."""

    def __init__(self, etc: Path) -> None:
        super().__init__("/", self._run)
        self.etc = etc

    def _run(self, argv: list[str], data: str | None = None, environ_update: Any = None) -> tuple[int, str, str]:
        done = subprocess.run(
            argv, input=data, text=True, capture_output=True, check=False, env=environment(environ_update)
        )
        return done.returncode, done.stdout, done.stderr

    def _real(self, path: str) -> str:
        return f"{self.etc}{path.removeprefix('/etc')}" if path.startswith(("/etc/apt", "/etc/os-release")) else path


def environment(update: Any) -> dict[str, str]:
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **(update or {})}


class World(NamedTuple):
    base: Path
    url: str
    system: Own

    def make(self, **more: Any) -> dict[str, Any]:
        key = (self.base / "web/driver/key.asc").read_text()
        repository = {
            **{"name": "airgap-driver", "url": f"{self.url}/driver/", "suites": ["/"], "components": []},
            **{"architectures": ["amd64"], "targets": [], "signed": ["packages"], "key_text": key},
            "key_sha256": hashlib.sha256(key.encode()).hexdigest(),
        }
        one = {
            **{"name": "set-1", "hosts": ["gpu1"], "manager": "apt", "id": "debian", "version": "12"},
            **{"architectures": ["amd64"], "roles": {"airgap-driver": "driver"}, "repositories": [repository]},
            "pins": [{"package": "?*", "pin": "version 580.95.05-*", "priority": 1001}],
            **{"streams": [], "packages": PACKAGES, **more},
        }
        return mirror.ensure({"folder": str(self.base / "air"), "sets": [one]}, False, self.system)


def _stub(name: str, version: str, depends: str = "", **control: str) -> Package:
    fields = {name: value for name, value in {"Depends": depends, **control}.items() if value}
    return Package(name, version, "stub", "of a test", {}, fields)


def _build(folder: Path) -> None:
    """Make both repositories, each with a key of its own."""
    machine = ARCHITECTURES["amd64"]
    driver, pool = folder / "web/driver", folder / "web/debian/pool"
    driver.mkdir(parents=True)
    pool.mkdir(parents=True)
    for version in ("570.10.01-1", "580.95.05-1", "590.44.01-1"):
        make_deb(_stub("nvidia-open", version, f"nvidia-kernel (= {version}), dkms"), machine, driver)
        make_deb(_stub("nvidia-kernel", version), machine, driver)
    # libc-bin, which every Debian has, is of glibc as well; nobody needs apache2.
    for package in (
        _stub("dkms", "3.0", "gcc"),
        _stub("gcc", "4:12", "libc6"),
        _stub("libc6", "2.99", Source="glibc"),
        _stub("libc-bin", "2.99", Source="glibc"),
        _stub("linux-headers-6.1.0-37-amd64", "6.1.140-1"),
        _stub("linux-headers-6.1.0-40-amd64", "6.1.150-1"),
        _stub("apache2", "2.4"),
    ):
        make_deb(package, machine, pool)
    for name, where in ((DRIVER, driver), (DISTRIBUTION, folder / "web/debian")):
        signer = Signer(folder / f"gnupg-{name}", f"{name} <{name}@example.org>")
        signer.export(where / "key.asc")
        if name == DRIVER:
            make_index(driver, signer, {"Codename": "stub"})
        else:
            _lists(where, signer)
        signer.close()
    shutil.copytree(folder / "web", folder / "vendor")


def _lists(top: Path, signer: Signer) -> None:
    """Make lists as Debian has them: Release names one that isn't there, and a list of another kind."""
    dist = top / "dists/stable"
    binary = dist / "main/binary-amd64"
    binary.mkdir(parents=True)
    packages = subprocess.run(["apt-ftparchive", "packages", "pool"], cwd=top, capture_output=True, check=True).stdout
    (binary / "Packages").write_bytes(packages)
    subprocess.run(["xz", "-k", str(binary / "Packages")], check=True)
    (dist / "main/i18n").mkdir()
    (dist / "main/i18n/Translation-en").write_text("Package: dkms\n")
    options = [f"APT::FTPArchive::Release::{row}" for row in ("Suite=stable", "Acquire-By-Hash=yes", "Components=main")]
    argv = ["apt-ftparchive", *(word for option in options for word in ("-o", option)), "release", "."]
    (dist / "Release").write_text(run(argv, cwd=str(dist)).stdout)
    (binary / "Packages").unlink()
    signer.sign(dist / "InRelease", dist / "Release", "--clearsign")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without("apt-get", "apt-ftparchive", "dpkg-deb", "gpg", "xz")
    folder = tmp_path_factory.mktemp("repositories")
    _build(folder)
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def world(built: Path, tmp_path: Path) -> Iterator[World]:
    shutil.copytree(built / "vendor", tmp_path / "web")
    (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "etc/os-release").write_text(OS_RELEASE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), partial(Quiet, directory=str(tmp_path)))
    url = f"http://127.0.0.1:{server.server_address[1]}"
    (tmp_path / "etc/apt/sources.list.d/debian.sources").write_text(
        f"Types: deb\nURIs: {url}/web/debian\nSuites: stable\nComponents: main\n"
        f"Signed-By: {tmp_path}/web/debian/key.asc\n"
    )
    with serving(server):
        yield World(tmp_path, f"{url}/web", Own(tmp_path / "etc"))


class Node:
    """apt of a machine on which nothing is installed, with the mirrors and nothing else."""

    def __init__(self, world: World, repositories: list[dict[str, Any]]) -> None:
        self.root = world.base / "node"
        shutil.rmtree(self.root, ignore_errors=True)
        self.options = apt_root(self.root)
        (self.root / "etc/preferences").write_text("Package: nvidia-*\nPin: version 580.95.05-*\nPin-Priority: 1001\n")
        base = world.url.removesuffix("/web") + "/air"
        for described in repositories:
            repository = types.repository(described, "test")
            path, text = client.source_text(repository, base, "apt")
            key = self.root / f"{repository['name']}.asc"
            key.write_bytes((world.base / "air" / repository["path"] / repository["key"]["path"]).read_bytes())
            text = text.replace(f"/etc/apt/keyrings/kubegpu-airgap-{repository['name']}.asc", str(key))
            (self.root / "etc/sources.list.d" / Path(path).name).write_text(text)

    def update(self) -> tuple[int, str]:
        shutil.rmtree(self.root / "lib/lists")
        (self.root / "lib/lists/partial").mkdir(parents=True)
        # As a usual machine has it, which asks for translations where a source doesn't say otherwise.
        return self._run("-o", "Acquire::Languages=en", "-o", "APT::Update::Error-Mode=any", "update")

    def download(self, *names: str) -> tuple[int, str]:
        for path in (self.root / "cache/archives").glob("*.deb"):
            path.unlink()
        return self._run("-y", "--no-install-recommends", "--download-only", "install", *names)

    def _run(self, *words: str) -> tuple[int, str]:
        argv = ["apt-get", "-q", *self.options, *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment({"LC_ALL": "C"}))
        return done.returncode, done.stdout + done.stderr


def _paths(repository: dict[str, Any]) -> list[str]:
    return [row["path"].rpartition("/")[2] for row in repository["packages"]]


def test_a_mirror_has_what_is_needed_and_apt_installs_from_it(world: World) -> None:
    made = world.make()
    assert made["changed"]
    assert made["left_out"] == []
    by_role = {row["role"]: row for row in made["repositories"]}
    assert _paths(by_role["driver"]) == ["nvidia-kernel_580.95.05-1_amd64.deb", "nvidia-open_580.95.05-1_amd64.deb"]
    # Headers of the node's kernel, not the newest; libc-bin because this machine has one of the same source.
    assert {name.split("_")[0] for name in _paths(by_role["distribution"])} == {
        *("dkms", "gcc", "libc6", "libc-bin", "linux-headers-6.1.0-37-amd64")
    }
    assert [by_role["distribution"][name] for name in ("suites", "components", "distribution", "release")] == [
        *(["stable"], ["main"], "debian", "12")
    ]
    air = world.base / "air"
    for role, vendor, release in (("driver", DRIVER, "InRelease"), ("distribution", DISTRIBUTION, f"{DIST}/InRelease")):
        folder = air / by_role[role]["path"]
        assert (folder / release).read_bytes() == (world.base / "web" / vendor / release).read_bytes()
        for row in by_role[role]["metadata"]:
            if "by-hash" not in row["path"]:
                assert (folder / row["path"]).read_bytes() == (world.base / "web" / vendor / row["path"]).read_bytes()
    # Again: nothing is taken anew. Then the vendor has a newer driver list, and only that is.
    kept = {path: path.stat().st_ino for path in (air / "packages").rglob("*") if path.is_file()}
    assert not world.make()["changed"]
    assert {path: path.stat().st_ino for path in kept} == kept
    node = Node(world, made["repositories"])
    assert node.update()[0] == 0
    rc, said = node.download("nvidia-open=580.95.05-1", "linux-headers-6.1.0-37-amd64")
    assert rc == 0, said
    rc, said = node.download("apache2")
    assert rc != 0
    assert "404" in said
    _check_refusals(node, air / by_role["driver"]["path"])


def _check_refusals(node: Node, folder: Path) -> None:
    """A package that was changed or cut, and lists that were changed or cut: apt takes none of them."""
    for path, where in (
        ("nvidia-kernel_580.95.05-1_amd64.deb", "package"),
        ("Packages.gz", "list"),
        ("InRelease", "list"),
    ):
        content = (folder / path).read_bytes()
        for bad in (content[:-1] + bytes([content[-1] ^ 1]), content[:-10]):
            if path == "InRelease":
                bad = content.replace(b"SHA256", b"SHA257") if len(bad) == len(content) else bad
            (folder / path).unlink()
            (folder / path).write_bytes(bad)
            rc, said = node.update()
            assert (rc == 0) == (where == "package"), said
            if where == "package":
                rc, said = node.download("nvidia-open=580.95.05-1")
                assert rc != 0, said
        (folder / path).write_bytes(content)
    assert node.update()[0] == 0


def test_what_cannot_be_had_is_one_sentence_and_the_next_run_goes_on(world: World) -> None:
    index = world.base / "web/driver/InRelease"
    content = index.read_bytes()
    index.write_bytes(content.replace(b"SHA256", b"SHA257"))
    with pytest.raises(
        ShareError, match=r"^repository airgap-driver: apt-get update has no list of .*/driver/ that its key"
    ):
        world.make()
    index.write_bytes(content)
    with pytest.raises(ShareError, match=r"set-1: apt can't resolve nowhere: .*Unable to locate package nowhere"):
        world.make(packages=["nowhere"])
    # A package that isn't what the signed list names.
    package = next((world.base / "web/debian/pool").glob("dkms_*.deb"))
    whole = package.read_bytes()
    package.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ShareError) as raised:
        world.make()
    assert "\n" not in str(raised.value)
    assert not (world.base / "air/packages").exists()
    package.write_bytes(whole)
    assert world.make()["changed"]


@pytest.mark.long
def test_debians_own_repositories_with_its_keys(world: World) -> None:
    """What a module is built with, from this machine's own sources; apt checks it with Debian's keys at both ends."""
    if "ID=debian" not in Path("/etc/os-release").read_text().splitlines():
        pytest.skip("this machine's sources aren't Debian's")
    packages = ["dkms", "gcc", "libc6-dev", "make", "linux-headers-amd64"]
    system = Own(Path("/etc"))
    host = distribution(system)
    one = {"name": "set-1", "manager": "apt", "architectures": [host["arch"]], "id": host["id"]}
    one["version"] = host["version"]
    made = mirror.ensure({"folder": str(world.base / "air"), "sets": [{**one, "packages": packages}]}, False, system)
    assert {row["role"] for row in made["repositories"]} == {"distribution"}
    # Only what is needed: Debian has sixty thousand packages.
    assert 100 < made["count"] < 400
    node = Node(world, made["repositories"])
    assert node.update()[0] == 0
    rc, said = node.download(*packages)
    assert rc == 0, said
    assert "404" in node.download("apache2")[1]


def test_another_distribution_is_refused_before_anything_is_asked(world: World) -> None:
    with pytest.raises(BadInput, match=r"has debian 12 amd64, and the GPU nodes have ubuntu 22.04 amd64: packages are"):
        world.make(id="ubuntu", version="22.04")
    with pytest.raises(BadInput, match="the GPU nodes have debian 11 amd64"):
        world.make(version="11")
    assert not (world.base / "air").exists()


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ('type="sha256"', 'type="shake_128"', "has the digest 'shake_128', which isn't one of a repository"),
        ('package="10"', 'package="many"', "a package of 'many' bytes"),
        ('package="10"', f'package="{"9" * 5000}"', "a package of '9999"),
    ],
)
def test_nonsense_of_a_mirror_is_a_sentence(was: str, now: str, why: str) -> None:
    """Metadata that nobody signs is what a mirror's owner writes."""
    text = (
        '<metadata xmlns="http://linux.duke.edu/metadata/common"><package><name>x</name><arch>noarch</arch>'
        '<version epoch="0" ver="1" rel="1"/><checksum type="sha256">0</checksum><size package="10"/>'
        '<location href="x.rpm"/></package></metadata>'
    )
    assert [rpm.size for rpm in rpm_lists.rpms(io.BytesIO(text.encode()), "r")] == [10]
    with pytest.raises(ShareError, match=why):
        list(rpm_lists.rpms(io.BytesIO(text.replace(was, now).encode()), "r"))


def downloading(folder: Path, *streams: IO[bytes], **more: Any) -> Callable[[], bool]:
    """Return what downloads a file whose metadata names four bytes; each call gets the next stream."""
    left = list(streams)
    store = Store(str(folder), RealSystem(), open_file=lambda _url, _certificates: left.pop(0))
    digest = hashlib.sha256(b"true").hexdigest()
    given = {"algorithm": "sha256", "digest": digest, "size": 4, **more}
    return partial(store.download, "a/b.rpm", "http://x/b.rpm", Certificates(), **given)


def test_a_download_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = downloading(tmp_path, *(io.BytesIO(content) for content in (b"true", b"tru", b"true", b"never read")))
    with monkeypatch.context() as patch:

        def full(_handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises(
            ShareError, match=rf"^the disk of {tmp_path} is full: a/b.rpm isn't there; make room and run again"
        ):
            what()
    with pytest.raises(ShareError, match="isn't what its repository's metadata names") as raised:
        what()
    assert raised.value.details["code"] == "other_content"
    assert not list((tmp_path / "a").iterdir())
    assert what() is True
    assert what() is False
    assert (tmp_path / "a/b.rpm").read_bytes() == b"true"


class Endless(io.BytesIO):
    """What never ends; counts what is read of it."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert 0 < size <= 1 << 20
        self.count += size
        return b"x" * size


def test_what_is_longer_than_its_metadata_says_is_stopped_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LARGEST", 3 << 20)
    for more, largest, said, most in (
        ({}, 4, "the 4 bytes that its repository's metadata names; the download was stopped there", 1 << 20),
        ({"size": 0, "digest": ""}, 3 << 20, "3 MiB, and nothing says which size it has; the download was ", 4 << 20),
    ):
        stream = Endless()
        with pytest.raises(ShareError, match=said) as raised:
            downloading(tmp_path, stream, **more)()
        assert raised.value.details == {"code": "too_large", "origin": "http://x/b.rpm", "largest": largest}
        assert 0 < stream.count <= most
        assert not list((tmp_path / "a").iterdir())


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that sends these bytes, one after the other, and then closes the connection."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(left.pop(0))
            self.close_connection = True

        def log_message(self, *_args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/b.rpm"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"Content-Length: 9\r\n\r\ntrue", "too_large"),
        (b"Content-Length: 4\r\n\r\ntru", "cut_off"),
        (b"Content-Length: 3\r\n\r\ntrue", "other_content"),
        (b"Transfer-Encoding: chunked\r\n\r\n4\r\ntr", "cut_off"),
        (b"Transfer-Encoding: chunked\r\n\r\n8\r\ntruetrue\r\n0\r\n\r\n", "too_large"),
        (b"\r\ntruetrue", "too_large"),
    ],
)
def test_a_length_that_a_server_lies_about_is_one_sentence_and_the_next_run_goes_on(
    tmp_path: Path, answer: bytes, code: str
) -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    store = Store(str(tmp_path), RealSystem())
    with answering(head + answer, head + b"Content-Length: 4\r\n\r\ntrue") as url:
        what = partial(
            store.download, "b.rpm", url, Certificates(), "sha256", hashlib.sha256(b"true").hexdigest(), size=4
        )
        with pytest.raises(ShareError) as raised:
            what()
        assert raised.value.details["code"] == code
        assert "\n" not in str(raised.value)
        assert not list(tmp_path.iterdir())
        assert what() is True


def test_no_program_writes_a_file_without_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with file_limit.largest_file(1 << 20), file_limit.largest_file(1 << 30):
        # As a package manager that takes what comes.
        done = subprocess.run(["sh", "-c", f"exec cat /dev/zero >{path}"], check=False)
        assert done.returncode == -signal.SIGXFSZ
        with pytest.raises(OSError, match="File too large"), path.open("ab") as file:
            file.write(b"x")
    assert path.stat().st_size == 1 << 20
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_a_list_of_packages_that_never_ends_is_stopped_where_release_says(world: World) -> None:
    """apt-helper takes what comes: it is ended, and the next run goes on."""
    dist = world.base / f"web/debian/{DIST}"
    real = (dist / "main/binary-amd64/Packages.xz").read_bytes()
    asked, sent = [], []

    class Endless(Quiet):
        def do_GET(self) -> None:
            # apt-get asks first.
            asked.extend([self.path] if self.path.endswith("/Packages.xz") else [])
            if not self.path.endswith("/Packages.xz") or len(asked) == 1:
                return super().do_GET()
            self.send_response(200)
            # Without a length apt takes nothing.
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
            with contextlib.suppress(OSError):
                for _number in range(1000):
                    self.wfile.write(b"x" * 65536)
                    sent.append(65536)
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), partial(Endless, directory=str(world.base)))
    with serving(server):
        url = f"http://127.0.0.1:{server.server_address[1]}/web"
        source = world.base / "etc/apt/sources.list.d/debian.sources"
        text = source.read_text()
        source.write_text(text.replace(world.url, url))
        with pytest.raises(ShareError, match=rf"^http://.*Packages\.xz has more than the {len(real)} bytes") as e:
            world.make()
        assert e.value.details["code"] == "too_large"
        assert sent
        assert sum(sent) < 1000 * 65536
    sizes = [path.stat().st_size for path in (world.base / "air").rglob("*") if path.is_file()]
    assert max(sizes) < 1 << 20
    source.write_text(text)
    assert world.make()["changed"]


# --------------------------------------------------------------------------- what nodes get


# What the name of a folder ends with, of the machine that it is for.
END = "_debian12-amd64"


def described(**more: Any) -> dict[str, Any]:
    file = {"path": "repository.asc", "bytes": 1, "sha256": "a" * 64}
    package = {**file, "path": "pool/gcc.deb", "name": "gcc", "version": "4:12", "architecture": "amd64"}
    return {
        **{
            "manager": "apt",
            "name": "deb-example-org",
            "role": "distribution",
            "path": f"packages/apt/deb.example.org{END}",
        },
        **{"address": "http://deb.example.org/", "distribution": "debian", "release": "12", "architecture": "amd64"},
        **{"suites": ["bookworm"], "components": ["main"], "signed": ["metadata"], "key": file},
        **{"metadata": [{**file, "path": "dists/bookworm/InRelease"}], "packages": [package], **more},
    }


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"path": "packages/apt/../../etc"}, "path is"),
        ({"packages": []}, "no packages"),
        ({"metadata": [{"path": "../x", "bytes": 1, "sha256": "a" * 64}]}, "isn't a path below a folder"),
        ({"suites": ["a\nSigned-By: /x"]}, "suites is"),
        ({"signed": []}, "signed says neither"),
        ({"key": {"path": "k", "bytes": True, "sha256": "a" * 64}}, "no number of bytes"),
        ({"name": "A b"}, "name is"),
        ({"release": "13"}, "isn't one of debian-13-amd64, which it is for"),
    ],
)
def test_a_description_from_elsewhere_is_held_to_its_form(more: dict[str, Any], why: str) -> None:
    assert types.repository(described(), "x")["name"] == "deb-example-org"
    with pytest.raises(BadInput, match=why):
        types.repository(described(**more), "packages/x/repository.json")


@pytest.mark.parametrize(
    "address",
    [
        "https://me:tok@deb.example.org/debian/",
        "https://deb.example.org/debian/?tok",
        "https://tok@deb.example.org/debian/#",
    ],
)
def test_a_description_has_no_credentials(tmp_path: Path, address: str) -> None:
    """The folder is carried, and served to everybody."""
    local = tmp_path / "x"
    local.write_bytes(b"x")
    part = wanted.Part("dists/x", local=str(local), digest=hashlib.sha256(b"x").hexdigest())
    packages = [wanted.Package(part._replace(path="pool/x.deb"), "x", "1", "amd64")]
    found = wanted.Resolved(address, "distribution", "key", ("metadata",), packages=packages, metadata=[part])
    # Of the machine only files are used, which are real.
    store = Store(str(tmp_path / "air"), None)  # type: ignore[arg-type]
    host = {"id": "debian", "version": "12", "arch": "amd64"}
    result = mirror._Mirrors(store, "apt", host).put(wanted.Outcome([found], []), False)
    [row] = result["repositories"]
    assert row["address"] == "https://deb.example.org/debian/"
    assert row["path"] == "packages/apt/deb.example.org_debian_debian12-amd64"
    assert "tok" not in json.dumps(result)
    assert not [path for path in (tmp_path / "air").rglob("*") if "tok" in path.name]
    assert "tok" not in (tmp_path / "air" / row["path"] / "repository.json").read_text()


def test_the_descriptions_of_an_archive_are_those_of_its_files(tmp_path: Path) -> None:
    row = described()
    folder = tmp_path / row["path"]
    folder.mkdir(parents=True)

    def write(description: dict[str, Any]) -> str:
        (folder / "repository.json").write_text(json.dumps(description))
        return hashlib.sha256((folder / "repository.json").read_bytes()).hexdigest()

    sums = {f"{row['path']}/{one['path']}": one["sha256"] for one in (row["key"], *row["metadata"], *row["packages"])}
    sums[f"{row['path']}/repository.json"] = write(row)
    assert [one["name"] for one in mirrored.repositories(str(tmp_path), sums)] == ["deb-example-org"]
    with pytest.raises(BadInput, match=r"names pool/gcc.deb, which the archive hasn't"):
        mirrored.repositories(str(tmp_path), {**sums, f"{row['path']}/pool/gcc.deb": "c" * 64})
    other = write(described(path=f"packages/apt/other{END}"))
    with pytest.raises(BadInput, match=f"describes packages/apt/other{END}"):
        mirrored.repositories(str(tmp_path), {**sums, f"{row['path']}/repository.json": other})
    # Not even where it was compared before.
    with pytest.raises(BadInput, match=r"repository\.json has another content"):
        mirrored.repositories(str(tmp_path), sums)


def test_the_sources_of_nodes_by_manager() -> None:
    apt = types.repository(described(), "x")
    path, text = client.source_text(apt, "http://files:8080/", "apt")
    assert path == "/etc/apt/sources.list.d/kubegpu-airgap-deb-example-org.sources"
    assert f"URIs: http://files:8080/packages/apt/deb.example.org{END}/\nSuites: bookworm\nComponents: main\n" in text
    assert "Targets: Packages\nSigned-By: /etc/apt/keyrings/kubegpu-airgap-deb-example-org.asc\n" in text
    rpm = types.repository(described(manager="rpm", path=f"packages/rpm/x{END}", suites=[], components=[]), "x")
    assert "gpgcheck=0\nrepo_gpgcheck=1\n" in client.source_text(rpm, "http://f", "dnf")[1]
    assert "gpgcheck=1\nrepo_gpgcheck=1\npkg_gpgcheck=0\n" in client.source_text(rpm, "http://f", "zypper")[1]


def test_the_sets_of_a_list() -> None:
    known = of(machine("debian-12", "gpu1"), machine("debian-12", "gpu2"), machine("rocky-9", "gpu3"))
    items = needed(LIST, known)
    facts = [facts_of(machine) for machine in known.machines]
    sets = package_sets(LIST, items, facts)
    assert [row["hosts"] for row in sets] == [["gpu1", "gpu2"], ["gpu3"]]
    apt, rpm = sets
    assert [apt[name] for name in ("manager", "id", "version", "architectures")] == ["apt", "debian", "12", ["amd64"]]
    assert apt["roles"] == {"airgap-driver": "driver", "airgap-toolkit": "toolkit"}
    assert {"dkms", "gcc", "linux-headers-6.1.0-10-amd64", "nvidia-driver-cuda=580.95.05-*"} <= set(apt["packages"])
    driver, toolkit = rpm["repositories"]
    assert (driver["signed"], toolkit["signed"]) == (["packages"], ["metadata"])
    assert driver["key_fingerprint"] == LIST["files"]["key/rhel9/D42D0685.pub"]["fingerprint"]
    assert [row["module"] for row in rpm["streams"]] == ["nvidia-driver"]
    with pytest.raises(BadInput, match="doesn't say which distribution host gpu3 has: make it again by"):
        package_sets(LIST, items, facts[:2])


def test_a_list_that_was_made_elsewhere_makes_the_same_sets(tmp_path: Path) -> None:
    """With releases, preferences and module streams, which no item has."""
    machines = (machine("ubuntu-22.04", "gpu1"), machine("rocky-9", "gpu2"), machine("sles-15", "gpu3"))
    known = of(*machines)
    items = needed(LIST, known)
    (tmp_path / "needed.yml").write_text(formats.text("yaml", items, known))
    listed = download.listed(str(tmp_path / "needed.yml"))
    sets = package_sets(LIST, listed.items, listed.machines)
    assert sets == package_sets(LIST, items, map(facts_of, machines))
    assert {row["hosts"][0]: row["version"] for row in sets} == {
        one.host: one.distribution["version"] for one in machines
    }
    assert any(row["pins"] for row in sets)
    assert any(row["streams"] for row in sets)


@pytest.mark.parametrize(
    ("nodes", "host", "same"),
    [
        # By year and month: 22.10 is another distribution than 22.04.
        (("ubuntu", "22.04"), "22.04", True),
        (("ubuntu", "22.04"), "22.10", False),
        # A service pack.
        (("sles", "15.6"), "15.6", True),
        (("sles", "15.6"), "15.5", False),
        (("opensuse-leap", "15.6"), "15.5", False),
        # Kernels of a minor release, and the libraries of what is newer.
        (("rocky", "9.4"), "9.4", True),
        (("rocky", "9.4"), "9.5", False),
        (("rhel", "8.10"), "8.1", False),
        (("debian", "12"), "12", True),
        (("debian", "12"), "13", False),
    ],
)
def test_a_host_resolves_for_its_own_whole_release(nodes: tuple[str, str], host: str, same: bool) -> None:
    id_, version = nodes
    one = {"name": "set-1", "manager": "rpm", "id": id_, "version": version, "architectures": ["amd64"]}
    given = {"sets": [{**one, "packages": ["gcc"]}]}
    facts = {"id": id_, "version": host, "major": int(host.partition(".")[0]), "family": "any", "arch": "amd64"}
    if same:
        assert len(wanted_sets(given, facts, "rpm")) == 1
        return
    with pytest.raises(BadInput, match=f"has {id_} {host} amd64, and the GPU nodes have {id_} {version} amd64:"):
        wanted_sets(given, facts, "rpm")


@pytest.mark.parametrize(
    "damage",
    [
        *({"host": 1}, {"version": 22.04}, {"pins": None}, {"pins": [{"package": "x"}]}, {"streams": ["a"]}),
        {"streams": [{"module": "m", "stream": "s", "switch": "yes"}]},
    ],
)
def test_a_machine_of_a_list_is_one(tmp_path: Path, damage: dict[str, Any]) -> None:
    known = of(machine("rocky-9", "gpu1"))
    content = yaml.safe_load(formats.text("yaml", needed(LIST, known), known))
    content["machines"][0] |= damage
    (tmp_path / "needed.yml").write_text(yaml.safe_dump(content))
    with pytest.raises(BadInput, match=r"airgap_needed: .*needed\.yml isn't a list"):
        download.listed(str(tmp_path / "needed.yml"))


def test_the_action_gives_the_module_the_sets_of_a_list_and_what_is_to_be_taken_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = of(machine("debian-12", "gpu1"))
    items = needed(LIST, known)
    for name, rows in (("all", items), ("images", [item for item in items if item["kind"] == "image"])):
        (tmp_path / name).write_text(formats.text("yaml", rows, known))
    given = {"gpu_nodes": [], "folder": "/var/cache/x", "also": ["locales", "gcc"]}
    done, executed = act(airgap_packages, {**given, "needed": str(tmp_path / "all")}, monkeypatch)
    assert done["changed"] is True
    [arguments] = executed
    assert arguments["folder"] == "/var/cache/x"
    assert [row["hosts"] for row in arguments["sets"]] == [["gpu1"]]
    packages = arguments["sets"][0]["packages"]
    assert "locales" in packages
    assert packages.count("gcc") == 1
    # They are what the module takes.
    assert len(wanted_sets(arguments, {"id": "debian", "version": "12", "arch": "amd64"}, "apt")) == 1
    done, executed = act(airgap_packages, {**given, "needed": str(tmp_path / "images")}, monkeypatch)
    assert (done["changed"], executed) == (False, [])
