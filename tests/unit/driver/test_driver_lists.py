# SPDX-License-Identifier: GPL-3.0-or-later
"""What the node's own package lists have, asked of the real apt, dnf and zypper, and what role driver makes of it."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import rpm_tree
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._driver.available import IDS
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._packages import lists
from ansible_collections.kubegpu.share.plugins.module_utils._packages.names import DRIVER
from lab_repository import apt_root, output, skip_without
from test_driver_choice import APT, VARS, chosen, node

KERNEL = "6.8.0-64-generic"
APT_FACTS = {"apt": APT, "rpm": None, "packages": {"linux-image-generic": {"version": "6.8.0-64.67", "held": False}}}
USER = ("nvidia-utils-{b}-server", "nvidia-headless-no-dkms-{b}-server{o}", "linux-modules-nvidia-{b}-server{o}-{k}")
CUDA = ("libnvidia-compute-{b}", "nvidia-utils-{b}", "nvidia-compute-utils-{b}", "nvidia-dkms-{b}{o}")
HEADER = [(f"linux-headers-{KERNEL}", "6.8.0-64.67"), ("bash", "5.2"), ("linux-headers-6.8.0-10-generic", "6.8.0-10.1")]


def packages(names: Sequence[str], *versions: str, kernels: Sequence[str] = (KERNEL,), flavours: str = "op") -> list:
    """The packages of versions in the open (o) and the proprietary (p) flavour."""
    found = []
    for version in versions:
        for flavour in flavours:
            for name in names:
                for kernel in kernels:
                    end = {"o": "-open", "p": ""}[flavour]
                    full = name.format(b=version.split(".")[0], o=end, k=kernel)
                    found.append((full, "6.8.0-64.67+1" if name.startswith("linux-") else f"{version}-0ubuntu1"))
    return list(dict.fromkeys(found))


class AptSystem:
    """The machine's apt with a root of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.words, self.ran = folder, apt_root(folder), []
        self.sources: list[str] = []

    def repository(self, name: str, rows: Sequence[tuple[str, str]]) -> str:
        """Add a repository; return its URL."""
        (self.folder / name).mkdir(parents=True)
        (self.folder / name / "Packages").write_text(
            "\n".join(
                f"Package: {package}\nVersion: {version}\nArchitecture: all\nFilename: ./{package}.deb\nSize: 1\n"
                f"SHA256: {'0' * 64}\nDescription: stand-in\n"
                for package, version in rows
            )
        )
        (self.folder / name / "Release").write_text("Origin: x\nLabel: x\nSuite: stable\n")
        self.sources.append(f"deb [trusted=yes] file:{self.folder / name} ./\n")
        (self.folder / "etc" / "sources.list").write_text("".join(self.sources))
        output("apt-get", *self.words, "-qq", "update")
        return f"file:{self.folder / name}"

    def names(self, path: str) -> list[str]:
        return []

    def run(self, argv: Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        argv = [word.replace("/var/lib/apt", f"{self.folder}/lib") for word in argv]
        self.ran.append(argv[:2])
        own = self.words if argv[0] == "apt-cache" else []
        done = subprocess.run([argv[0], *own, *argv[1:]], capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    def asked(self) -> Any:
        return lists.observe(self, APT_FACTS, [KERNEL])  # type: ignore[arg-type]


@pytest.fixture
def apt(tmp_path: Path) -> AptSystem:
    skip_without("apt-get", "apt-cache")
    return AptSystem(tmp_path)


def found(given: Any, release: str = "ubuntu-24.04", card: str = "turing", **options: Any) -> Mapping[str, Any]:
    return chosen(node(release, card, package_lists=given), **options)


def one(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    assert choice["refusals"] == []
    [finding] = choice["lists"]
    return finding


def test_every_name_of_the_catalogues_is_asked_for() -> None:
    asked = 0
    for path in VARS.glob("*_*.yml"):
        for source in yaml.safe_load(path.read_text())["__driver_catalog"]["sources"].values():
            for row in source["rows"]:
                several = [row.get("per_kernel") or {}, row]
                names = [
                    name
                    for part in several
                    for key in ("driver", "open", "proprietary", "fabric")
                    for name in part.get(key) or ()
                ]
                for name in names:
                    plain = name.partition("=")[0].replace("{branch}", "580").replace("{kernel}", KERNEL)
                    assert any(fnmatch.fnmatchcase(plain.replace("{flavour}", "azure"), one) for one in DRIVER), name
                    asked += 1
    assert asked > 100


# --------------------------------------------------------------------------- the real apt


def test_apts_lists_are_reported_with_the_repositories_of_each_version(apt: AptSystem) -> None:
    archive = apt.repository("archive", [*packages(USER, "580.95.05", "570.133.20"), *HEADER])
    other = apt.repository("more", packages(USER, "580.105.08"))
    got = apt.asked()
    assert got["packages"]["nvidia-utils-580-server"] == {
        "580.95.05-0ubuntu1": [archive],
        "580.105.08-0ubuntu1": [other],
    }
    assert got["packages"][f"linux-headers-{KERNEL}"] == {"6.8.0-64.67": [archive]}
    assert "bash" not in got["packages"] and "linux-headers-6.8.0-10-generic" not in got["packages"]
    assert got["error"] == "" and got["age_hours"] is not None and got["age_hours"] < 1
    assert [argv[:2] for argv in apt.ran] == [
        ["apt-cache", "pkgnames"],
        ["apt-cache", "madison"],
        ["stat", "-L"],
        ["date", "+%s"],
    ]


def test_a_version_that_the_archive_does_not_have_is_named_with_those_that_it_has(apt: AptSystem) -> None:
    """apt fails in the middle of the run with: Version '580.95.05-*' for 'nvidia-utils-580-server' was not found."""
    apt.repository("archive", [*packages(USER, "570.172.08", "580.105.08", "590.48.01"), *HEADER])
    finding = one(found(apt.asked(), source="distribution"))
    assert (finding["id"], finding["severity"]) == ("driver-version-missing", "problem")
    assert finding["versions"] == ["590.48.01", "580.105.08", "570.172.08"]
    assert "of version 580.95.05 in its package lists, which have 590.48.01, 580.105.08, 570.172.08" in finding["found"]
    assert finding["remedy"] == "set driver_version to 580.105.08"
    assert found(apt.asked(), source="distribution", version="580.105.08")["lists"] == []
    # What isn't the distribution's doesn't count for it.
    apt.repository("compute/cuda/repos/ubuntu2404/x86_64", packages(USER, "580.95.05"))
    assert one(found(apt.asked(), source="distribution"))["versions"] == finding["versions"]
    ignored = found(apt.asked(), source="distribution", ignore=["driver-version-missing@gpu1"])
    assert ignored["lists"] == []


CONTENTS = [
    # What a mirror has, the cards, driver_flavour, and what the finding says; None: nothing.
    (("580.95.05",), "op", "turing", "auto", None, ""),
    (("570.133.20",), "op", "turing", "auto", "which have 570.133.20", "set driver_version to 570.133.20"),
    (
        ("570.133.20", "580.82.07"),
        "op",
        "turing",
        "auto",
        "have 580.82.07, 570.133.20",
        "set driver_version to 580.82.07",
    ),
    (
        ("580.95.05",),
        "p",
        "turing",
        "auto",
        "which have its proprietary module only",
        "set driver_flavour to proprietary",
    ),
    (("570.133.20",), "p", "turing", "auto", "the proprietary module only, of 570.133.20", "or add a repository"),
    (("580.95.05",), "o", "volta", "auto", "which have its open module only", "where the cards allow it"),
    (("580.95.05",), "p", "volta", "auto", None, ""),
]


@pytest.mark.parametrize(("versions", "flavours", "card", "flavour", "words", "remedy"), CONTENTS)
def test_what_a_mirror_has(apt: AptSystem, versions, flavours, card, flavour, words, remedy) -> None:
    apt.repository("archive", HEADER)
    url = apt.repository("mirror", packages(CUDA, *versions, flavours=flavours))
    choice = found(apt.asked(), card=card, flavour=flavour, repo_url=url)
    if words is None:
        assert (choice["refusals"], choice["lists"]) == ([], [])
    else:
        finding = one(choice)
        assert finding["id"] == "driver-version-missing" and words in finding["found"] and remedy in finding["remedy"]


def test_a_version_without_its_fabric_manager_is_none_for_a_machine_with_nvswitches(apt: AptSystem) -> None:
    rows = [*packages(USER, "580.95.05", "570.172.08"), ("nvidia-fabricmanager-570", "570.172.08-0ubuntu1"), *HEADER]
    apt.repository("archive", rows)
    switches = [{"address": "0000:c0:00.0", "device": "0x22a3", "driver": None}]
    observed = node("ubuntu-24.04", "hopper", nvswitches=switches, package_lists=apt.asked())
    finding = one(chosen(observed, source="distribution"))
    assert (finding["packages"], finding["versions"]) == (["nvidia-fabricmanager-580"], ["570.172.08"])
    assert chosen(observed, source="distribution", version="570.172.08")["lists"] == []


def test_a_repository_that_the_node_does_not_have_yet_is_unknown(apt: AptSystem) -> None:
    apt.repository("archive", [*packages(USER, "570.133.20"), *HEADER])
    assert found(apt.asked())["lists"] == []
    assert found(apt.asked(), repo_url="https://mirror.example.org/cuda")["lists"] == []


def test_a_mirror_without_any_driver_is_unknown_as_long_as_nothing_of_it_is_listed(apt: AptSystem) -> None:
    apt.repository("archive", HEADER)
    url = apt.repository("mirror", [("cuda-toolkit", "13")])
    assert found(apt.asked(), repo_url=url)["lists"] == []


def test_headers_that_no_list_has_are_found_before_anything_changes(apt: AptSystem) -> None:
    apt.repository("archive", [("linux-headers-6.8.0-99-generic", "6.8.0-99.99"), *packages(USER, "580.95.05")])
    finding = one(found(apt.asked()))
    assert (finding["id"], finding["severity"]) == ("kernel-package-missing", "problem")
    assert (finding["packages"], finding["kernels"]) == ([f"linux-headers-{KERNEL}"], [KERNEL])
    assert found(apt.asked(), install_headers="never")["lists"] == []


def test_compiled_modules_that_no_list_has_for_the_kernel_are_found_with_the_branches_that_there_are(
    apt: AptSystem,
) -> None:
    rows = packages(USER, "580.95.05", kernels=["6.8.0-99-generic"]) + packages(USER, "570.172.08")
    apt.repository("archive", [*rows, *HEADER])
    finding = one(found(apt.asked(), source="distribution"))
    assert finding["id"] == "kernel-package-missing"
    assert finding["packages"] == [f"linux-modules-nvidia-580-server-open-{KERNEL}"]
    assert finding["versions"] == ["570.172.08"] and finding["remedy"].startswith(
        "set driver_version to 570.172.08, or "
    )


def test_empty_lists_say_nothing_and_old_ones_only_warn(apt: AptSystem) -> None:
    apt.repository("archive", [("bash", "5.2")])
    empty = apt.asked()
    assert (empty["packages"], empty["age_hours"]) == ({}, None)
    finding = one(found(empty, source="distribution"))
    assert (finding["id"], finding["severity"]) == ("package-lists-unknown", "note") and "are empty" in finding["found"]
    apt.repository("more", [*packages(USER, "570.172.08"), *HEADER])
    ago = time.time() - 9 * 24 * 3600
    for path in (apt.folder / "lib" / "lists", apt.folder / "lib" / "lists" / "partial"):
        os.utime(path, (ago, ago))
    old = apt.asked()
    assert 9 * 24 - 1 < old["age_hours"] < 9 * 24 + 1
    finding = one(found(old, source="distribution"))
    assert (finding["id"], finding["severity"]) == ("package-lists-old", "warning")
    assert "are 9 days old; by these it has no nvidia-utils-580-server" in finding["found"]
    # Where nothing is missing, their age doesn't matter.
    assert found(old, source="distribution", version="570.172.08")["lists"] == []


def test_lists_that_cannot_be_read_say_nothing(apt: AptSystem) -> None:
    (apt.folder / "etc" / "sources.list").write_text("deb [ broken\n")
    finding = one(found(apt.asked(), source="distribution"))
    assert finding["id"] == "package-lists-unknown" and "can't be read (" in finding["found"]


def at(release: str, kernel: str, installed: Mapping[str, str], given: Any, held: Sequence[str] = ()) -> Any:
    rows = {name: {"version": version, "held": name in held} for name, version in installed.items()}
    observed = node(release, "turing", packages=rows, package_lists=given)
    observed["kernel"] = {"release": kernel, "installed": [kernel], "modules": {kernel: {"headers": True}}}
    return observed


FOLLOWED = [
    # release, kernel, the metapackage of the kernel, that of its headers
    ("ubuntu-24.04", "6.8.0-64-generic", "linux-image-generic", "linux-headers-generic"),
    ("ubuntu-22.04", "6.8.0-64-generic", "linux-image-generic-hwe-22.04", "linux-headers-generic-hwe-22.04"),
    ("ubuntu-24.04", "6.8.0-1028-aws", "linux-image-aws", "linux-headers-aws"),
    ("ubuntu-24.04", "6.8.0-1028-gke", "linux-image-gke", "linux-headers-gke"),
    ("ubuntu-24.04", "6.8.0-1028-azure", "linux-image-azure-lts-24.04", "linux-headers-azure-lts-24.04"),
    ("ubuntu-24.04-arm64", "6.8.0-1028-nvidia-64k", "linux-image-nvidia-64k", "linux-headers-nvidia-64k"),
    ("debian-12", "6.1.0-39-amd64", "linux-image-amd64", "linux-headers-amd64"),
    ("debian-12", "6.1.0-39-cloud-amd64", "linux-image-cloud-amd64", "linux-headers-cloud-amd64"),
    ("debian-12", "6.8.12-29-pve", "proxmox-default-kernel", "proxmox-default-headers"),
    ("debian-12", "6.8.12-29-pve", "proxmox-kernel-6.8", "proxmox-headers-6.8"),
]


@pytest.mark.parametrize(("release", "kernel", "image", "headers"), FOLLOWED)
def test_headers_of_the_next_kernel_come_with_a_metapackage(
    release: str, kernel: str, image: str, headers: str
) -> None:
    installed = {image: "6.8.0-64.67", f"linux-image-{kernel}": "1", "linux-image-extra-virtual": "1"}
    wanted = [{"kernel": image, "packages": [headers]}]
    assert chosen(at(release, kernel, installed, None))["headers"] == wanted
    given = {"age_hours": 1, "error": "", "packages": {headers: {"6.8": ["u"]}}}
    assert chosen(at(release, kernel, installed, given))["headers"] == wanted
    # Held by the user, there already, unknown to the lists, or not to be installed.
    assert chosen(at(release, kernel, installed, None, held=[image]))["headers"] == []
    assert chosen(at(release, kernel, {**installed, headers: "6.8"}, None))["headers"] == []
    assert chosen(at(release, kernel, installed, {**given, "packages": {"dkms": {"3": ["u"]}}}))["headers"] == []
    assert chosen(at(release, kernel, installed, None), install_headers="never")["headers"] == []


def test_compiled_modules_follow_the_kernel_and_are_not_held(apt: AptSystem) -> None:
    module, meta = f"linux-modules-nvidia-580-server-open-{KERNEL}", "linux-modules-nvidia-580-server-open-generic"
    other = f"{meta}-hwe-24.04"
    apt.repository("archive", [*packages(USER, "580.95.05"), (meta, "6.8.0-64.67+1"), (other, "6.11.0-9.9+1"), *HEADER])
    observed = at("ubuntu-24.04", KERNEL, {"linux-image-generic": "6.8.0-64.67"}, apt.asked())
    found = chosen(observed, source="distribution")
    assert (found["refusals"], found["lists"], found["headers"]) == ([], [], [])
    assert found["follows"] == [module, meta] and module in found["packages"] and meta not in found["packages"]
    assert not any("linux-modules-nvidia-x".startswith(one) for one in found["never_upgrade"])
    # With a newer one another kernel would come, and what the user holds has none.
    for version, held in (("6.8.0-60.63", ()), ("6.8.0-64.67", ["linux-image-generic"])):
        observed = at("ubuntu-24.04", KERNEL, {"linux-image-generic": version}, apt.asked(), held)
        assert chosen(observed, source="distribution")["follows"] == [module]
    # Unasked lists say nothing of a metapackage; one that is there stays.
    observed = at("ubuntu-24.04", KERNEL, {"linux-image-generic": "6.8.0-60.63", meta: "6.8.0-60.63+1"}, None)
    assert chosen(observed, source="distribution")["follows"] == [module, meta]
    # NVIDIA's packages are built on the node.
    assert chosen(observed)["follows"] == []


def test_the_metapackage_of_another_branch_is_removed_with_it() -> None:
    old = "linux-modules-nvidia-570-server-open"
    installed = {
        "linux-image-generic": "6.8.0-64.67",
        f"{old}-generic": "6.8.0-64.67+1",
        "nvidia-utils-570-server": "570",
    }
    observed = at("ubuntu-24.04", KERNEL, installed, None, held=["nvidia-utils-570-server"])
    assert chosen(observed, source="distribution")["replaced"] == [f"{old}-generic", "nvidia-utils-570-server"]
    # Without packages that the role holds it is somebody else's.
    assert chosen(at("ubuntu-24.04", KERNEL, installed, None), source="distribution")["replaced"] == []


def test_what_a_repository_will_have_that_is_added_or_enabled_first_is_not_missing() -> None:
    """NVIDIA's part of SUSE's driver, and AlmaLinux's repository of drivers, which a run enables."""
    sles = {"nvidia-open-driver-G06-signed-cuda-kmp-default": {"580.95.05_k6.4.0_150600.21-1.1": ["sle-updates"]}}
    given = {"age_hours": 1, "error": "", "packages": {**sles, "nvidia-smi": {"1": ["sle-updates"]}}}
    assert found(given, "sles-15", source="distribution")["lists"] == []
    given["packages"]["nvidia-compute-utils-G06"] = {"570.133.20-0": ["kubegpu-cuda"]}
    assert one(found(given, "sles-15", source="distribution"))["id"] == "driver-version-missing"
    given["packages"] = {"kernel-devel-matched": {"5.14.0-570.12.1.el9_6": ["appstream"]}}
    alma = found(given, "almalinux-9", source="distribution", prerequisites="install", install_headers="never")
    assert alma["prerequisites"] and (alma["refusals"], alma["lists"]) == ([], [])
    alma = found(given, "almalinux-9", source="distribution", prerequisites="ignore", install_headers="never")
    assert one(alma)["id"] == "driver-version-missing"


def test_lists_that_were_not_asked_say_nothing() -> None:
    assert found(None, source="distribution")["lists"] == [] and node("debian-12").get("package_lists") is None


def test_the_ids_are_those_of_the_findings() -> None:
    assert set(IDS) == {
        "driver-version-missing",
        "kernel-package-missing",
        "package-lists-old",
        "package-lists-unknown",
    }


# --------------------------------------------------------------------------- when they are asked

KERNEL_FACTS = {"release": KERNEL, "installed": [KERNEL], "modules": {KERNEL: {"headers": True, "nvidia": True}}}
LACKING = {**KERNEL_FACTS, "modules": {KERNEL: {"headers": True, "nvidia": False}}}
INSTALLED = {"nvidia-utils-580-server": {"version": "580.95.05-0ubuntu0.24.04.2"}, "bash": {"version": "5"}}


@pytest.mark.parametrize(
    ("version", "installed", "kernel", "expected"),
    [
        ("580.95.05", INSTALLED, KERNEL_FACTS, False),
        ("580.95.05", {"kmod-nvidia-open-dkms": {"version": "3:580.95.05-1.el9"}}, KERNEL_FACTS, False),
        (
            "580.95.05",
            {"nvidia-open-driver-G06-signed-kmp-default": {"version": "580.95.05_k6.4-1"}},
            KERNEL_FACTS,
            False,
        ),
        ("580.95.05", INSTALLED, {"release": "6.1", "installed": [], "modules": {}}, False),
        ("", {}, LACKING, False),
        ("580.95.05", {}, KERNEL_FACTS, True),
        ("580.105.08", INSTALLED, KERNEL_FACTS, True),
        ("580.95", INSTALLED, KERNEL_FACTS, True),
        ("580.95.05", INSTALLED, LACKING, True),
    ],
)
def test_lists_are_asked_only_where_something_has_to_be_installed(version, installed, kernel, expected) -> None:
    assert lists.wanted(version, installed, kernel, kernel["installed"]) is expected


# --------------------------------------------------------------------------- the real dnf and zypper

RPM_KERNEL = "5.14.0-570.12.1.el9_6.x86_64"


@pytest.fixture(params=["dnf", "zypper"])
def tree(request) -> Iterator[rpm_tree.Tree]:
    why = rpm_tree.missing()
    if why:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(rpm_tree.borrowed(request.param))
        rpm_tree.reset(made)
        yield made


def rpm_facts(tree: rpm_tree.Tree) -> Any:
    repositories = [{"id": name, "enabled": True} for name in ("mine", "cuda", "modular")]
    return {"apt": None, "rpm": {"manager": tree.kind, "repositories": repositories}, "packages": {}}


def test_rpm_lists_have_the_versions_of_every_stream_and_are_not_downloaded(tree: rpm_tree.Tree) -> None:
    folder = "/etc/zypp/repos.d" if tree.kind == "zypper" else "/etc/yum.repos.d"
    for name in ("cuda", "modular"):
        tree.write(
            f"{folder}/{name}.repo", f"[{name}]\nname={name}\nbaseurl=file:///srv/{name}\nenabled=1\ngpgcheck=0\n"
        )
    # Never downloaded: nothing is known.
    got = lists.observe(tree.system, rpm_facts(tree), [RPM_KERNEL])
    assert got["packages"] == {}
    refresh = (
        ("zypper", "--non-interactive", "--no-gpg-checks", "refresh") if tree.kind == "zypper" else ("dnf", "makecache")
    )
    tree.run(*refresh)
    got = lists.observe(tree.system, rpm_facts(tree), [RPM_KERNEL])
    assert got["error"] == "" and got["age_hours"] is not None and got["age_hours"] < 1
    open_module = got["packages"]["kmod-nvidia-open-dkms"]
    assert set(open_module) == {f"3:{version}-1.el9" for version in rpm_tree.DRIVER}
    assert {source for sources in open_module.values() for source in sources} == {"cuda", "modular"}
    # Of kernels' headers, those of the node's kernels only.
    assert "kernel-devel" not in got["packages"]
    kernel = lists.observe(tree.system, rpm_facts(tree), ["5.14.1-1.el9.x86_64"])["packages"]["kernel-devel"]
    assert set(kernel) == {"5.14.1-1.el9"}
    if tree.kind == "dnf":
        rpm = {"repositories": [{"id": "cuda", "url": "file:///srv/cuda/", "enabled": True}], "keys": {}, "streams": {}}
        observed = node("rocky-9", "turing", package_lists=got, rpm=rpm)
        observed["kernel"]["modules"] = {}
        observed["kernel"]["headers"] = True
        finding = one(chosen(observed, version="575.57.08", repo_url="file:///srv/cuda"))
        assert finding["id"] == "driver-version-missing" and "kmod-nvidia-open-dkms" in finding["packages"]


# --------------------------------------------------------------------------- a machine that was taken


def test_lists_of_any_size_take_no_time() -> None:
    """They come from the machine, and its plan is made on the controller: each version was compared with all others."""
    names = (*(one.format(b="580", o="-open", k=KERNEL) for one in USER), "nvidia-utils-570-server")
    every = {name: {f"580.{number}.1-0ubuntu1": ["file:/x"] for number in range(20_000)} for name in names}
    begun = time.process_time()
    finding = one(found({"age_hours": 1.0, "error": "", "packages": every}, source="distribution"))
    assert time.process_time() - begun < 20
    assert finding["id"] == "driver-version-missing" and finding["versions"][0] == "580.19999.1"


@pytest.mark.parametrize(
    "version", ["\u0665\u0668\u0660.\u0669\u0665-1", "580.\u0669-1", "{{ 7 * 7 }}", "580.95.06;reboot", "x" * 200_000]
)
def test_what_is_no_version_of_the_driver_is_not_proposed(version: str) -> None:
    names = [one.format(b="580", o="-open", k=KERNEL) for one in USER]
    finding = one(
        found(
            {"age_hours": 1.0, "error": "", "packages": {name: {version: ["file:/x"]} for name in names}},
            source="distribution",
        )
    )
    assert finding["versions"] == [] and version not in finding["found"] + finding["remedy"]
