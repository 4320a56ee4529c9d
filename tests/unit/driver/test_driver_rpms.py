# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's RPM repositories, validated by rpm, gpgv and dnf's own parser of module streams."""

from __future__ import annotations

import gzip
import re
import stat
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from lab_repository import OLDER, TOOLKIT, VERSION, assert_signed, make_toolkit, output, skip_without

from lab import publish, rpms

OPEN, CLOSED = "kmod-nvidia-open-dkms", "kmod-nvidia-latest-dkms"


def build(folder: Path, distribution: str) -> publish.Folders:
    skip_without("gcc", "rpm", "rpmbuild", "rpmsign", "rpmkeys", "createrepo_c", "gpg", "gpgv")
    tree = publish.tree(distribution)
    publish.build(folder / "repo", make_toolkit(folder / "toolkit"), VERSION, TOOLKIT, tree)
    return publish.folders(folder / "repo", tree, publish.architecture_here())


@pytest.fixture(scope="module")
def el(tmp_path_factory: pytest.TempPathFactory) -> publish.Folders:
    return build(tmp_path_factory.mktemp("el"), "rhel9")


@pytest.fixture(scope="module")
def suse(tmp_path_factory: pytest.TempPathFactory) -> publish.Folders:
    return build(tmp_path_factory.mktemp("suse"), "opensuse15")


def query(path: Path, field: str) -> list[str]:
    return output("rpm", "-qp", f"--{field}", path).splitlines()


def rpm(folder: Path, name: str, version: str) -> Path:
    (found,) = folder.glob(f"{name}-{version}-*.rpm")
    return found


def test_every_package_exists_in_both_versions(el: publish.Folders, suse: publish.Folders) -> None:
    found = {tuple(path.name.split("-1.")[0].rsplit("-", 1)) for path in el.cuda.glob("*.rpm")}
    names = {name for name, _version in found}
    assert found == {(name, version) for name in names for version in (VERSION, OLDER)}
    assert {"nvidia-driver-cuda", "nvidia-driver-cuda-libs", "nvidia-persistenced", OPEN, CLOSED} <= names
    assert len(list(suse.cuda.glob("*.rpm"))) == 14
    assert len(list(el.toolkit.glob("*.rpm"))) == len(list(suse.toolkit.glob("*.rpm"))) == 4


def test_packages_require_the_same_version_of_each_other(el: publish.Folders, suse: publish.Folders) -> None:
    for version in (VERSION, OLDER):
        needs = query(rpm(el.cuda, "nvidia-driver-cuda", version), "requires")
        assert f"nvidia-driver-cuda-libs = 3:{version}-1.el9" in needs
        assert f"nvidia-persistenced = 3:{version}-1.el9" in needs
        assert f"nvidia-kmod = 3:{version}-1.el9" in query(rpm(el.cuda, "nvidia-kmod-common", version), "requires")
        assert f"nvidia-kmod = 3:{version}-1.el9" in query(rpm(el.cuda, OPEN, version), "provides")
        of_suse = query(rpm(suse.cuda, "nvidia-compute-utils-G06", version), "requires")
        assert f"nvidia-compute-G06 = {version}-1" in of_suse
    toolkit = query(rpm(el.toolkit, "nvidia-container-toolkit", TOOLKIT), "requires")
    assert f"nvidia-container-toolkit-base = {TOOLKIT}-1" in toolkit


def test_only_one_kernel_module_can_be_installed(el: publish.Folders, suse: publish.Folders) -> None:
    assert query(rpm(el.cuda, OPEN, VERSION), "conflicts") == [CLOSED]
    assert query(rpm(el.cuda, CLOSED, VERSION), "conflicts") == [OPEN]
    assert query(rpm(suse.cuda, "nvidia-driver-G06", VERSION), "conflicts") == ["nvidia-open-driver-G06"]


def test_files_are_those_of_the_debian_packages_at_this_familys_paths(el: publish.Folders, tmp_path: Path) -> None:
    for path in (*el.cuda.glob(f"*-{VERSION}-*.rpm"), *el.toolkit.glob("*.rpm")):
        if CLOSED not in path.name:
            subprocess.run(f"rpm2archive - < {path} | tar -C {tmp_path} -xz", shell=True, check=True)
    for name in ("libnvidia-ml.so", "libcuda.so"):
        assert (tmp_path / "usr" / "lib64" / f"{name}.1").readlink() == Path(f"{name}.{VERSION}")
        assert (tmp_path / "usr" / "lib64" / f"{name}.{VERSION}").is_file()
    for name in ("nvidia-smi", "nvidia-persistenced", "nvidia-ctk", "nvidia-container-runtime"):
        assert stat.S_IMODE((tmp_path / "usr" / "bin" / name).stat().st_mode) == 0o755
    assert "blacklist nouveau" in (tmp_path / "usr" / "lib" / "modprobe.d" / "nvidia.conf").read_text()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"@VERSION@" in path.read_bytes()]


def test_scripts_are_valid_shell_and_belong_to_root(el: publish.Folders, suse: publish.Folders) -> None:
    scripts = 0
    for path in (*el.cuda.glob("*.rpm"), *suse.cuda.glob("*.rpm"), *el.toolkit.glob("*.rpm")):
        for kind in ("PREIN", "POSTIN", "PREUN", "POSTUN"):
            text = output("rpm", "-qp", "--qf", f"%{{{kind}}}", path)
            if text != "(none)":
                subprocess.run(["sh", "-n"], input=text, text=True, check=True)
                assert not re.search(r"@[A-Z]+@", text)
                scripts += 1
        assert set(output("rpm", "-qp", "--qf", "[%{FILEUSERNAME}:%{FILEGROUPNAME}\n]", path).split()) == {"root:root"}
    assert scripts > 20


def test_packages_and_metadata_are_signed_by_the_repositorys_key(
    el: publish.Folders, suse: publish.Folders, tmp_path: Path
) -> None:
    keys = {el.cuda: el.cuda_key, el.toolkit: el.toolkit_key, suse.cuda: suse.cuda_key, el.own: el.own_key}
    for number, (folder, key) in enumerate(keys.items()):
        database = tmp_path / f"db{number}"
        output("rpmkeys", "--dbpath", database, "--import", key)
        for path in folder.glob("*.rpm"):
            assert "digests signatures OK" in output("rpmkeys", "--dbpath", database, "--checksig", path)
        signed, foreign = folder / "repodata" / "repomd.xml", suse.toolkit / "repodata" / "repomd.xml.asc"
        assert_signed(tmp_path / f"home{number}", key, (signed.with_name("repomd.xml.asc"), signed), other=foreign)
        check = ["rpmkeys", "--dbpath", database, "--checksig", next(suse.toolkit.glob("*.rpm"))]
        assert subprocess.run(check, capture_output=True, check=False).returncode != 0


def test_module_streams_contain_their_flavour_and_every_version(el: publish.Folders) -> None:
    (listed,) = (el.cuda / "repodata").glob("*modules.yaml.gz")
    documents = list(yaml.safe_load_all(gzip.decompress(listed.read_bytes())))
    streams = {str(one["data"]["stream"]): one["data"] for one in documents if one["document"] == "modulemd"}
    assert set(streams) == {"open-dkms", "latest-dkms", "580-open", "580-dkms"}
    for stream, data in streams.items():
        artifacts = " ".join(data["artifacts"]["rpms"])
        ours, other = (OPEN, CLOSED) if "open" in stream else (CLOSED, OPEN)
        assert ours in artifacts and other not in artifacts
        assert all(f"nvidia-driver-cuda-3:{version}-1.el9" in artifacts for version in (VERSION, OLDER))
    # Every package of a stream is in the repository.
    primary = next((el.cuda / "repodata").glob("*primary.xml.gz"))
    root = ElementTree.fromstring(gzip.decompress(primary.read_bytes()))
    space = {"c": "http://linux.duke.edu/metadata/common"}
    known = set()
    for package in root.findall("c:package", space):
        evr = package.find("c:version", space)
        assert evr is not None
        name, machine = package.findtext("c:name", "", space), package.findtext("c:arch", "", space)
        known.add(f"{name}-{evr.get('epoch')}:{evr.get('ver')}-{evr.get('rel')}.{machine}")
    assert {nevra for data in streams.values() for nevra in data["artifacts"]["rpms"]} == known


def test_rpms_are_reproducible(tmp_path: Path) -> None:
    """The lab caches a machine's system by a digest of its content, which includes these."""
    skip_without("rpmbuild")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for each in (*rpms.system(), rpms.el_release(), rpms.suse_release()):
            rpms.make_rpm(each, "x86_64", tmp_path / name)
    made = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(made) == 4
    assert [(tmp_path / "one" / name).read_bytes() for name in made] == [
        (tmp_path / "two" / name).read_bytes() for name in made
    ]
