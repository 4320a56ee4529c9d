# SPDX-License-Identifier: GPL-3.0-or-later
"""What no user of the lab's repositories of packages would notice: the same bytes again, no secret, input refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from lab_repository import TOOLKIT, VERSION, make_toolkit, skip_without

from lab import debs, packages, publish, rpms
from lab.shell import LabError

DEBIAN = publish.tree("debian12", own=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without("gcc", "dpkg-deb", "apt-ftparchive", "apt-get", "gpg", "gpgv")
    folder = tmp_path_factory.mktemp("repository")
    publish.build(folder / "repo", make_toolkit(folder / "toolkit"), VERSION, TOOLKIT, DEBIAN)
    return folder / "repo"


@pytest.fixture(scope="module")
def cuda(repository: Path) -> Path:
    (folder,) = (repository / "cuda" / "debian12").iterdir()
    return folder


def test_no_secret_key_is_left(repository: Path) -> None:
    for path in repository.rglob("*"):
        if path.is_file():
            assert b"PRIVATE KEY" not in path.read_bytes()[:200]
            assert path.suffix not in (".key", ".gnupg", ".kbx")


def test_only_a_changed_repository_is_rebuilt(repository: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(repository, repo)
    toolkit = make_toolkit(tmp_path / "toolkit")
    (served,) = (repo / "libnvidia-container" / "stable" / "deb").iterdir()
    (repo / "other-file").write_text("kept")
    before = (served / "InRelease").read_bytes()
    publish.build(repo, toolkit, VERSION, TOOLKIT, DEBIAN)
    assert (served / "InRelease").read_bytes() == before
    (toolkit / "nvidia-ctk").write_text("#!/bin/sh\necho another\n")
    publish.build(repo, toolkit, VERSION, TOOLKIT, DEBIAN)
    assert (served / "InRelease").read_bytes() != before
    assert (repo / "other-file").read_text() == "kept"
    assert {path.name for path in repo.iterdir()} == {".made-from", "cuda", "libnvidia-container", "other-file"}


def test_packages_are_reproducible(repository: Path, cuda: Path, tmp_path: Path) -> None:
    architecture = next(each for each in packages.ARCHITECTURES.values() if each.cuda == cuda.name)
    # gcc's output has to be the same, too.
    packages.compiled.cache_clear()
    packages.compile_driver(tmp_path / "built", VERSION)
    for package in debs.driver_packages(tmp_path / "built", VERSION, architecture):
        debs.make_deb(package, architecture, tmp_path)
        (again,) = tmp_path.glob(f"{package.name}_*.deb")
        assert again.read_bytes() == (cuda / again.name).read_bytes()
        again.unlink()


def test_rpms_are_reproducible(tmp_path: Path) -> None:
    """The lab caches a machine's system by a digest of its content, which includes these."""
    skip_without("rpmbuild")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for package in (*rpms.system(), rpms.el_release(), rpms.suse_release()):
            rpms.make_rpm(package, "x86_64", tmp_path / name)
    made = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(made) == 4
    assert [(tmp_path / "one" / name).read_bytes() for name in made] == [
        (tmp_path / "two" / name).read_bytes() for name in made
    ]


@pytest.mark.parametrize(
    ("version", "older"), [("580.95.05", "580.82.07"), ("580.200.01", "580.178.04"), ("615.71.09", "615.70.01")]
)
def test_the_older_version_is_of_the_same_branch(version: str, older: str) -> None:
    assert packages.older_than(version) == older


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"driver_version": "580"}, "driver version '580'"),
        ({"driver_version": "580.95.05; rm -r /"}, "driver version"),
        ({"toolkit_bin": Path("/nonexistent")}, "has no nvidia-ctk"),
    ],
)
def test_invalid_input_is_refused_before_building(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    versions = {"driver_version": VERSION, "toolkit_version": TOOLKIT}
    arguments = {"toolkit_bin": make_toolkit(tmp_path / "toolkit"), "wanted": DEBIAN, **versions, **changed}
    with pytest.raises(LabError, match=message):
        publish.build(tmp_path / "repo", **arguments)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["toolkit"]
