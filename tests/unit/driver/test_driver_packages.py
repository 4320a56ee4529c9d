# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's apt repositories, validated by dpkg, gpgv and apt themselves; the toolkit's programs are stand-ins."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from lab_repository import OLDER, TOOLKIT, VERSION, apt_root, assert_signed, make_toolkit, output, skip_without

from lab import debs, packages, publish
from lab.shell import LabError

DEBIAN = publish.tree("debian12", own=True)
DRIVER_PACKAGES = {
    *("firmware-nvidia-gsp", "libcuda1", "libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms"),
    *("nvidia-kernel-support", "nvidia-open", "nvidia-persistenced"),
}
TOOLKIT_PACKAGES = {
    *("libnvidia-container-tools", "libnvidia-container1", "nvidia-container-toolkit", "nvidia-container-toolkit-base")
}


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


@pytest.fixture(scope="module")
def container(repository: Path) -> Path:
    (folder,) = (repository / "libnvidia-container" / "stable" / "deb").iterdir()
    return folder


def fields(deb: Path) -> dict[str, str]:
    lines = [line for line in output("dpkg-deb", "-f", deb).splitlines() if not line.startswith(" ")]
    return dict(line.split(": ", 1) for line in lines)


def deb(folder: Path, name: str, version: str) -> Path:
    (found,) = folder.glob(f"{name}_{version}-1_*.deb")
    return found


def test_every_package_exists_in_both_versions_and_is_marked_as_simulation(cuda: Path, container: Path) -> None:
    found = [fields(path) for path in (*cuda.glob("*.deb"), *container.glob("*.deb"))]
    assert all("(simulated, of the kubegpu.share lab)" in entry["Description"] for entry in found)
    versions = {(entry["Package"], entry["Version"]) for entry in found}
    assert versions == {
        *((name, f"{v}-1") for name in DRIVER_PACKAGES for v in (VERSION, OLDER)),
        *((name, f"{TOOLKIT}-1") for name in TOOLKIT_PACKAGES),
        *((f"nvidia-driver-pinning-{v}", f"{v}-1") for v in (VERSION, OLDER, "580")),
    }


def test_packages_depend_on_the_same_version_of_each_other(cuda: Path, container: Path) -> None:
    for version in (VERSION, OLDER):
        depends = fields(deb(cuda, "nvidia-driver-cuda", version))["Depends"]
        for name in ("libcuda1", "libnvidia-ml1", "nvidia-persistenced", "nvidia-kernel-open-dkms"):
            assert f"{name} (= {version}-1)" in depends
        module = fields(deb(cuda, "nvidia-kernel-open-dkms", version))
        assert f"firmware-nvidia-gsp (= {version}-1)" in module["Depends"]
    toolkit = fields(deb(container, "nvidia-container-toolkit", TOOLKIT))
    assert "nvidia-container-toolkit-base (= 1.20.2-1)" in toolkit["Depends"]
    assert "libnvidia-container-tools (= 1.20.2-1)" in toolkit["Depends"]
    smi = fields(deb(cuda, "nvidia-driver-cuda", VERSION))
    assert smi["Conflicts"] == smi["Provides"] == "nvidia-smi"


def test_files_have_debians_paths(cuda: Path, container: Path, tmp_path: Path) -> None:
    for folder, names, version in ((cuda, DRIVER_PACKAGES, VERSION), (container, TOOLKIT_PACKAGES, TOOLKIT)):
        for name in names:
            output("dpkg-deb", "-x", deb(folder, name, version), tmp_path)
    triplet = output("gcc", "-dumpmachine").strip()
    libraries = tmp_path / "usr" / "lib" / triplet
    for name in ("libnvidia-ml.so", "libcuda.so"):
        assert (libraries / f"{name}.1").readlink() == Path(f"{name}.{VERSION}")
        assert (libraries / f"{name}.{VERSION}").is_file()
    firmware = tmp_path / "usr" / "lib" / "firmware" / "nvidia" / VERSION / "gsp_sim.bin"
    assert firmware.readlink() == Path(packages.CARDS)
    for name in ("nvidia-smi", "nvidia-persistenced", "nvidia-ctk", "nvidia-container-runtime", "nvidia-cdi-hook"):
        assert stat.S_IMODE((tmp_path / "usr" / "bin" / name).stat().st_mode) == 0o755
    assert (tmp_path / "usr" / "bin" / "nvidia-container-toolkit").readlink() == Path("nvidia-container-runtime-hook")
    unit = (tmp_path / "usr" / "lib" / "systemd" / "system" / "nvidia-sim.service").read_text()
    assert "Before=containerd.service kubelet.service" in unit and "WantedBy=multi-user.target" in unit
    script = tmp_path / "usr" / "lib" / "nvidia-sim" / "nvidia-sim"
    assert f"VERSION={VERSION}\n" in script.read_text()


def test_scripts_are_valid_shell_and_belong_to_root(cuda: Path, container: Path, tmp_path: Path) -> None:
    checked = 0
    for path in (*cuda.glob(f"*_{VERSION}-1_*.deb"), *container.glob("*.deb")):
        assert {line.split()[1] for line in output("dpkg-deb", "-c", path).splitlines()} == {"root/root"}
        output("dpkg-deb", "-R", path, tmp_path / path.stem)
        for file in (tmp_path / path.stem).rglob("*"):
            if file.is_file() and not file.is_symlink() and file.read_bytes().startswith(b"#!/bin/sh"):
                output("sh", "-n", file)
                assert not re.search(rb"@[A-Z]+@", file.read_bytes())
                checked += 1
    assert checked >= 9


def test_both_repositories_are_signed_by_keys_of_their_own(cuda: Path, container: Path, tmp_path: Path) -> None:
    keys = {cuda: cuda / packages.CUDA_KEY, container: container.parents[2] / packages.TOOLKIT_KEY}
    assert keys[container].parent.name == "libnvidia-container"
    for folder, key in keys.items():
        assert key.read_text().startswith("-----BEGIN PGP PUBLIC KEY BLOCK-----")
        signed = (folder / "InRelease",), (folder / "Release.gpg", folder / "Release")
        (other,) = [one / "InRelease" for one in keys if one != folder]
        assert_signed(tmp_path / f"home-{key.name}", key, *signed, other=other)


def test_no_secret_key_is_left(repository: Path) -> None:
    for path in repository.rglob("*"):
        if path.is_file():
            assert b"PRIVATE KEY" not in path.read_bytes()[:200]
            assert path.suffix not in (".key", ".gnupg", ".kbx")


@pytest.fixture
def apt(cuda: Path, container: Path, tmp_path: Path) -> list[str]:
    """apt-get's options for a separate root with the two repositories as the roles write them."""
    options = apt_root(tmp_path)
    # apt detects an armoured key by the ending of its name, so the roles rename it.
    shutil.copy(container.parents[2] / packages.TOOLKIT_KEY, tmp_path / "etc" / "toolkit.asc")
    (tmp_path / "etc" / "sources.list").write_text(
        f"deb [signed-by={cuda / packages.CUDA_KEY}] file:{cuda}/ /\n"
        f"deb [signed-by={tmp_path}/etc/toolkit.asc] file:{container}/ /\n"
    )
    return options


def test_apt_lists_both_versions_and_trusts_them(apt: list[str], tmp_path: Path) -> None:
    output("apt-get", *apt, "-qq", "--error-on=any", "update")
    policy = output("apt-cache", *apt, "policy", "nvidia-driver-cuda", "nvidia-container-toolkit")
    assert not [
        one for one in (f"Candidate: {VERSION}-1", f"{OLDER}-1 500", f"Candidate: {TOOLKIT}-1") if one not in policy
    ]


def test_pin_selects_one_version_of_the_whole_driver(apt: list[str], cuda: Path, tmp_path: Path) -> None:
    output("apt-get", *apt, "-qq", "update")
    pinned = tmp_path / "pin"
    output("dpkg-deb", "-x", deb(cuda, f"nvidia-driver-pinning-{OLDER}", OLDER), pinned)
    (preferences,) = (pinned / "etc" / "apt" / "preferences.d").iterdir()
    before = output("apt-cache", *apt, "policy", *sorted(DRIVER_PACKAGES))
    shutil.copy(preferences, tmp_path / "etc" / "preferences.d")
    after = output("apt-cache", *apt, "policy", *sorted(DRIVER_PACKAGES))
    assert before.count(f"Candidate: {VERSION}-1") == len(DRIVER_PACKAGES)
    assert after.count(f"Candidate: {OLDER}-1") == len(DRIVER_PACKAGES)


def test_a_tampered_repository_is_refused(apt: list[str], cuda: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tampered"
    shutil.copytree(cuda, copy)
    packages_file = copy / "Packages"
    packages_file.write_text(packages_file.read_text().replace("580.95.05-1", "580.95.06-1"))
    (copy / "Packages.gz").unlink()
    (tmp_path / "etc" / "sources.list").write_text(f"deb [signed-by={copy / packages.CUDA_KEY}] file:{copy}/ /\n")
    done = subprocess.run(["apt-get", *apt, "-qq", "--error-on=any", "update"], capture_output=True, check=False)
    assert done.returncode != 0


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


def test_the_same_programs_are_compiled_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("gcc")
    packages.compile_driver(tmp_path / "one", VERSION)
    monkeypatch.setattr(packages, "run", lambda command: pytest.fail(f"executed: {command}"))
    packages.compile_driver(tmp_path / "two", VERSION)
    made = sorted((tmp_path / "one").iterdir())
    assert len(made) == 4
    for path in made:
        again = tmp_path / "two" / path.name
        assert again.read_bytes() == path.read_bytes() and stat.S_IMODE(again.stat().st_mode) == 0o755


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


def test_each_distribution_has_its_own_directories() -> None:
    architecture = packages.ARCHITECTURES["amd64"]
    machine = os.uname().machine
    wanted = {
        publish.tree("debian12", own=True): ("cuda/debian12/x86_64", "stable/deb/amd64", "gpgkey"),
        # This release has its own key and C library.
        publish.tree("debian11"): ("cuda/debian11/x86_64", "stable/debian11/amd64", "stable/debian11/gpgkey"),
        publish.tree("rhel9"): ("cuda/rhel9/x86_64", f"stable/rpm/{machine}", "stable/rpm/gpgkey"),
        publish.tree("opensuse15"): (
            "cuda/opensuse15/x86_64",
            f"stable/opensuse15/{machine}",
            "stable/opensuse15/gpgkey",
        ),
    }
    container = Path("/r/libnvidia-container")
    for tree, (cuda, toolkit, key) in wanted.items():
        found = publish.folders(Path("/r"), tree, architecture)
        assert (found.cuda, found.toolkit, found.toolkit_key) == (
            Path("/r", cuda),
            container / toolkit,
            container / key,
        )
    with pytest.raises(LabError, match="'potato'"):
        publish.tree("potato")
