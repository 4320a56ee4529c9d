# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver's choice by recorded facts: every supported release, source, version and architecture of cards."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nvidia_smi
from ansible_collections.kubegpu.share.plugins.module_utils._driver.select import choose, verify
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins.table import driver_tables
from package_sets import package_set, plan

ROOT = Path(__file__).resolve().parents[3]
VARS = ROOT / "roles" / "driver" / "vars"
FACTS = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((Path(__file__).parent / "facts").glob("*.yml"))
}
# The flavour that auto chooses for an architecture, and the branches that support it.
GENERATIONS = {
    "maxwell": ("proprietary", 0, 580),
    "pascal": ("proprietary", 0, 580),
    "volta": ("proprietary", 0, 580),
    "turing": ("open", 410, 999),
    "ampere": ("open", 450, 999),
    "ada": ("open", 520, 999),
    "hopper": ("open", 520, 999),
    "blackwell": ("open", 570, 999),
}
# Prerequisites have tests of their own.
OPTIONS = {"host": "gpu1", "version": "580.95.05", "prerequisites": "ignore", "tables": driver_tables()}

# The options of pinned_packages that the role takes from the choice, and nodes on which nothing is installed.
SET_OPTIONS = ("repositories", "streams", "pins", "packages", "replaces", "hold", "hold_also", "never_upgrade")
APT = {"files": {}, "keys": {}, "sources": [], "interrupted": False, "unfinished": []}
RPM = {"manager": "dnf", "lock_path": "/locks", "lock_plugin": "enabled", "files": {}, "keys": {}, "streams": {}}
RPM |= {"imported": [], "repositories": [], "locks": [], "duplicates": []}
NO_PACKAGES = {"apt": {"apt": APT, "rpm": None, "packages": {}}, "rpm": {"apt": None, "rpm": RPM, "packages": {}}}


def catalog_name(distribution):
    """Return the file of the distribution's id, else of its family, as the role does; empty for none."""
    major = distribution["version"].split(".")[0]
    names = (f"{distribution[key]}_{major}.yml" for key in ("id", "family"))
    return next((name for name in names if (VARS / name).is_file()), "")


@functools.cache
def read_catalog(name):
    return yaml.safe_load((VARS / name).read_text())["__driver_catalog"] if name else {}


def node(release, *generations, **more):
    made = copy.deepcopy(FACTS[release]["gpu_node"])
    made["gpus"] = [
        {"address": f"0000:0{at}:00.0", "device": "0x1", "driver": None, "generation": generation}
        for at, generation in enumerate(generations, 1)
    ]
    defaults = {
        "driver": {"module_version": None, "module_open": None, "others": [], "library_version": ""},
        "packages": {},
        "secure_boot": None,
        "nvswitches": [],
        "apt": {"sources": [], "keys": {}, "files": {}} if made["distribution"]["family"] == "debian" else None,
        "rpm": None if made["distribution"]["family"] == "debian" else {"repositories": [], "keys": {}},
    }
    return {**made, **defaults, **more}


def chosen(observed, **changes):
    return choose(observed, read_catalog(catalog_name(observed["distribution"])), {**OPTIONS, **changes})


ROWS = [
    pytest.param(release, source, str(version), expected, id=f"{release} {source} {version}")
    for release, facts in FACTS.items()
    for source, row in facts["sources"].items()
    for version, expected in row["versions"].items()
]
SWITCHES = [{"address": "0000:c0:00.0", "device": "0x22a3", "driver": None}]


def refusal_of(release, source, version, expected, generation):
    """A part of the refusal that the facts expect; None where there is none."""
    row = FACTS[release]["sources"][source]
    if "refused" in row or "refused" in expected:
        return row.get("refused") or expected["refused"]
    flavour, first, last = GENERATIONS[generation]
    branch = int(version.split(".")[0])
    if branch > last:
        return f"supported up to branch {last}"
    if branch < first:
        return f"need branch {first} or later"
    arch = FACTS[release]["gpu_node"]["distribution"]["arch"]
    must = flavour == "proprietary" or generation == "blackwell" or (generation == "hopper" and arch == "arm64")
    if must and flavour not in expected:
        return f"need the {flavour} module"
    return None


def flavour_of(version, expected, generation):
    flavour = GENERATIONS[generation][0]
    if flavour == "open" and (int(version.split(".")[0]) < 515 or "open" not in expected):
        return "proprietary"
    return flavour


@pytest.mark.parametrize(("release", "source", "version", "expected"), ROWS)
def test_every_release_source_and_version_for_every_architecture_of_cards(release, source, version, expected):
    row, planned = FACTS[release]["sources"][source], set()
    for generation in GENERATIONS:
        found = chosen(node(release, generation), source=source, version=version)
        refusal = refusal_of(release, source, version, expected, generation)
        if refusal:
            assert any(refusal in message for message in found["refusals"]), (generation, found["refusals"])
            continue
        assert found["refusals"] == [] and found["conflicts"] == [] and found["maintenance"] == ""
        flavour = flavour_of(version, expected, generation)
        assert (found["manager"], found["flavour"]) == (FACTS[release]["manager"], flavour), generation
        assert found["packages"] == expected[flavour]
        streams = [f"{stream['module']}:{stream['stream']}" for stream in found["streams"]]
        assert streams == ([expected["streams"][flavour]] if "streams" in expected else [])
        headers = [name for header in found["headers"] for name in header["packages"]]
        assert headers == (FACTS[release]["headers"] if expected.get("built", row["built"]) else [])
        assert [repository["url"] for repository in found["repositories"]] == ([row["url"]] if "url" in row else [])
        assert [repository["key_url"] for repository in found["repositories"]] == ([row["key"]] if "key" in row else [])
        assert found["services"] == ["nvidia-persistenced"] and found["hold"]
        if flavour not in planned:
            planned.add(flavour)
            options = {option: found[option] for option in SET_OPTIONS}
            plan(package_set(name="driver", **options), NO_PACKAGES[found["manager"]])
            for header in found["headers"]:
                plan(package_set(name="driver-headers", packages=header["packages"]), NO_PACKAGES[found["manager"]])

        with_switches = node(release, generation, nvswitches=SWITCHES)
        found = chosen(with_switches, source=source, version=version)
        if expected.get("fabric") in (None, "refused"):
            assert "has NVSwitches" in found["refusals"][0]
            continue
        more = [package for package in found["packages"] if package in ("nvlsm", "infiniband-diags")]
        assert found["packages"] == [*expected[flavour], *expected["fabric"], *more]
        assert not more or generation == "blackwell"
        assert all(version in name for name in expected["fabric"])
        assert found["services"] == ["nvidia-persistenced", "nvidia-fabricmanager"]


def test_the_tables_have_a_row_for_every_catalogue():
    used = {catalog_name(facts["gpu_node"]["distribution"]) for facts in FACTS.values()}
    assert used == {path.name for path in VARS.glob("*.yml")} - {"main.yml"}


# --------------------------------------------------------------------------- flavour and branch


FLAVOURS = [
    # release, cards, changed options, flavour or part of the refusal
    ("debian-12", ["ampere", "volta", "hopper"], {}, "proprietary"),
    ("debian-12", ["volta", "blackwell"], {}, "no driver supports both"),
    ("ubuntu-24.04-arm64", ["volta", "hopper"], {}, "no driver supports both"),
    ("debian-12", ["turing", "pascal"], {"version": "590.48.01"}, "Pascal (host gpu1) are supported up to branch 580"),
    ("debian-12", ["pascal"], {"flavour": "open"}, "cards of Pascal need the proprietary module"),
    ("debian-12", ["blackwell"], {"flavour": "proprietary"}, "cards of Blackwell need the open module"),
    ("ubuntu-24.04-arm64", ["hopper"], {"flavour": "proprietary"}, "cards of Hopper need the open module"),
    ("debian-12", ["hopper"], {"flavour": "proprietary"}, "proprietary"),
    ("debian-12", ["ampere"], {"flavour": "proprietary", "version": "615.71.09"}, "proprietary"),
    ("debian-12", ["ampere"], {"flavour": "proprietary", "version": "620.10.01"}, "have no proprietary module"),
    ("debian-12", ["ampere"], {"version": "620.10.01"}, "open"),
    ("debian-12", ["ampere"], {"flavour": "open", "version": "470.256.02"}, "open module exists from branch 515 on"),
    ("debian-12", ["ampere"], {"version": "470.256.02"}, "proprietary"),
    ("debian-12", ["blackwell"], {"version": "550.163.01"}, "need branch 570 or later"),
    ("debian-12", ["kepler"], {}, "supported up to branch 470"),
    ("debian-12", ["kepler"], {"version": "470.256.02"}, "proprietary"),
    ("debian-12", ["unknown"], {}, "open"),
    ("debian-12", [], {}, "open"),
    ("almalinux-9", ["volta"], {"source": "distribution"}, "the proprietary module, and driver_source has no packages"),
    ("debian-12", ["turing"], {"version": "580"}, "isn't a driver version such as"),
    ("debian-12", ["turing"], {"source": "ppa"}, "driver_source is ppa, which is invalid"),
    ("debian-12", ["turing"], {"maintenance": "now"}, "driver_maintenance is now, which is invalid"),
    ("debian-12", ["turing"], {"source": "packages"}, "driver_packages_dir is empty"),
    ("debian-12", ["turing"], {"source": "runfile", "runfile": "/x.run"}, "driver_runfile_sha256 isn't a SHA-256"),
]


@pytest.mark.parametrize(("release", "cards", "changes", "expected"), FLAVOURS)
def test_flavour_and_branch(release, cards, changes, expected):
    found = chosen(node(release, *cards), **changes)
    if expected in ("open", "proprietary"):
        assert (found["refusals"], found["flavour"]) == ([], expected)
    else:
        assert len(found["refusals"]) == 1, found["refusals"]
        assert expected in found["refusals"][0] and found["refusals"][0].endswith(".")


def test_an_unknown_card_or_branch_warns_and_a_card_of_a_virtual_machine_is_ignored():
    assert "unknown architecture" in chosen(node("debian-12", "unknown"))["notes"][0]
    assert chosen(node("ubuntu-22.04", "turing"))["notes"] == []
    observed = node("debian-12", "turing", "volta")
    observed["gpus"][1]["driver"] = "nvgrace_gpu_vfio_pci"
    assert chosen(observed)["flavour"] == "open"


def test_a_distribution_without_a_catalogue_is_refused():
    observed = node("debian-12", "turing")
    observed["distribution"].update(id="gentoo", family="gentoo", version="2.17")
    found = chosen(observed)
    assert found["refusals"] == [
        "Host gpu1 runs gentoo 2.17, which role driver has no packages for: install the driver and set driver_state to "
        "external."
    ]
    assert chosen(observed, state="external")["refusals"] == []
    # Releases between those with long support have the same major number.
    observed = node("ubuntu-24.04", "turing")
    observed["distribution"]["version"] = "24.10"
    assert "runs ubuntu 24.10, which role driver has no packages for" in chosen(observed)["refusals"][0]


@pytest.mark.parametrize(
    ("id", "family", "version"),
    [
        ("azurelinux", "azurelinux", "3.0"),
        ("fedora", "redhat", "43"),
        ("debian", "debian", "14"),
        ("ubuntu", "debian", "26.04"),
        ("ubuntu", "debian", "22.10"),
        ("sles", "suse", "16.0"),
        ("sle-micro", "suse", "5.5"),
        ("opensuse-tumbleweed", "suse", "20261120"),
        ("pop", "debian", "22.04"),
        ("amzn", "redhat", "2"),
    ],
)
def test_every_other_release_is_refused_by_its_name(id, family, version):
    observed = node("debian-12", "turing")
    observed["distribution"].update(id=id, family=family, version=version)
    [refusal] = chosen(observed)["refusals"]
    assert f"runs {id} {version}, which role driver has no packages for" in refusal


# --------------------------------------------------------------------------- sources, pins, prerequisites


def test_a_mirror_replaces_nvidias_url():
    mirror = "https://mirror.example.org/"
    apt = {"suites": ["stable"], "components": ["main"]}
    key = {"key_url": f"{mirror}key.asc", "key_sha256": "0" * 64}
    changes = {f"repo_{name}": value for name, value in {"url": f"{mirror}cuda//", **apt, **key}.items()}
    found = chosen(node("debian-12", "turing"), **changes)["repositories"]
    own = {"key_fingerprint": "", **key}
    assert found == [{"name": "cuda", "url": f"{mirror}cuda/", "architectures": ["amd64"], **apt, **own}]
    found = chosen(node("rocky-9", "turing"), repo_url=f"{mirror}el9")["repositories"]
    key = {"key_url": f"{mirror}el9/D42D0685.pub", "key_sha256": "", "key_fingerprint": ""}
    assert found == [{"name": "cuda", "url": f"{mirror}el9/", **key}]


PINNED_KEYS = {
    "ubuntu2404/3bf863cc.pub": {"sha256": "a" * 64, "fingerprint": "B" * 40},
    "rhel9/D42D0685.pub": {"sha256": "", "fingerprint": "C" * 40},
}


@pytest.mark.parametrize(
    ("system", "given", "key"),
    [
        ("ubuntu-24.04", "pinned", ("a" * 64, "B" * 40)),
        ("rocky-9", "pinned", ("", "C" * 40)),
        ("rocky-9", "d" * 64, ("d" * 64, "")),
        ("rocky-9", "", ("", "")),
        # Nothing is known of this key, which the notes say.
        ("rhel-10", "pinned", ("", "")),
    ],
)
@pytest.mark.parametrize("mirror", ["", "https://mirror.example.org/cuda"])
def test_the_key_is_held_to_the_table_unless_the_user_gives_its_digest(system, given, key, mirror):
    tables = {**driver_tables(), "keys": PINNED_KEYS}
    found = chosen(node(system, "turing"), repo_key_sha256=given, repo_url=mirror, tables=tables)
    [repository] = found["repositories"]
    assert (repository["key_sha256"], repository["key_fingerprint"]) == key and not found["refusals"]
    unknown = [note for note in found["notes"] if "is in no table of the collection" in note]
    assert len(unknown) == (system == "rhel-10")


def test_a_digest_that_is_none_is_refused():
    refused = chosen(node("rocky-9", "turing"), repo_key_sha256="abc")["refusals"]
    assert refused == ["driver_repo_key_sha256 is abc, which is neither a SHA-256, nor pinned, nor empty."]


def test_a_directory_of_packages_needs_no_repository_and_no_prerequisite():
    found = chosen(node("rocky-9", "ampere"), source="packages", packages_dir="/srv/el9", prerequisites="report")
    assert (found["refusals"], found["repositories"], found["streams"]) == ([], [], [])
    assert found["source_dir"] == "/srv/el9" and "kmod-nvidia-open-dkms=580.95.05-*" in found["packages"]


def test_pins_exclude_the_other_source_on_ubuntu():
    of_nvidia = chosen(node("ubuntu-22.04", "turing"))["pins"]
    assert (of_nvidia[0]["pin"], of_nvidia[0]["priority"]) == ("release o=Ubuntu", -1)
    assert of_nvidia[1]["pin"] == "version 580.95.05-*"
    of_ubuntu = chosen(node("ubuntu-22.04", "turing"), source="distribution")["pins"]
    assert (of_ubuntu[0]["pin"], of_ubuntu[0]["priority"]) == ("release l=NVIDIA CUDA", -1)
    assert [pin["pin"] for pin in chosen(node("debian-12", "turing"))["pins"]] == ["version 580.95.05-*"]


def test_the_users_own_package_names_get_the_version():
    found = chosen(node("debian-12", "turing"), packages=["nvidia-open", "nvidia-kernel-open-dkms"])
    assert found["packages"] == ["nvidia-open=580.95.05-*", "nvidia-kernel-open-dkms=580.95.05-*"]
    assert found["headers"]
    assert chosen(node("debian-12", "turing"), packages=["nvidia-driver-cuda"])["headers"] == []


@pytest.mark.parametrize("release", [name for name, facts in FACTS.items() if "enable" in facts])
def test_missing_prerequisites_are_reported_with_the_command_or_installed(release):
    observed = node(release, "volta")
    commands = FACTS[release]["enable"]
    reported = chosen(observed, prerequisites="report")
    assert len(reported["refusals"]) == 1 and f"run '{' && '.join(commands)}' there" in reported["refusals"][0]
    assert reported["prerequisites"] == []
    run = chosen(observed, prerequisites="install")
    assert run["refusals"] == []
    assert [
        " ".join(command) for prerequisite in run["prerequisites"] for command in prerequisite["commands"]
    ] == commands
    observed["packages"] = {"dkms": {"version": "3.2.1-1.el9"}}
    assert chosen(observed, prerequisites="report")["refusals"] == []


def test_an_enabled_repository_satisfies_a_prerequisite():
    observed = node("rocky-9", "turing")
    observed["rpm"] = {"repositories": [{"id": "epel", "enabled": True}, {"id": "crb", "enabled": False}]}
    assert "CRB" in chosen(observed, prerequisites="report")["refusals"][0]
    assert "EPEL, which has dkms" not in chosen(observed, prerequisites="report")["refusals"][0]
    observed["rpm"]["repositories"][1]["enabled"] = True
    assert chosen(observed, prerequisites="report")["refusals"] == []
    found = chosen(node("almalinux-9", "turing"), source="distribution", prerequisites="install")
    assert found["prerequisites"][0]["commands"] == [["dnf", "-y", "install", "almalinux-release-nvidia-driver"]]


# --------------------------------------------------------------------------- headers, a container, services


def test_headers_of_the_running_and_of_the_newest_kernel():
    observed = node("rocky-9", "turing")
    old, running, newest = kernels = [
        f"5.14.0-{one}.x86_64" for one in ("70.13.1.el9_0", "503.40.1.el9_5", "570.12.1.el9_6")
    ]
    modules = {one: {"headers": False} for one in (running, newest, old)}
    observed["kernel"] = {"release": running, "installed": kernels, "modules": modules}
    assert chosen(observed)["headers"] == [
        {"kernel": running, "packages": ["kernel-devel=5.14.0-503.40.1.el9_5"]},
        {"kernel": newest, "packages": ["kernel-devel-matched=5.14.0-570.12.1.el9_6"]},
    ]
    assert chosen(observed, install_headers="never")["headers"] == []
    for module in observed["kernel"]["modules"].values():
        module["headers"] = True
    assert chosen(observed)["headers"] == []


EL8, EL9, EL10 = "4.18.0-553.5.1.el8_10", "5.14.0-570.12.1.el9_6", "6.12.0-55.9.1.el10_0"
EL8_RT, EL9_RT = "4.18.0-553.5.1.rt7.346.el8_10", "5.14.0-284.11.1.rt14.296.el9_2"
# A node, the end of "uname -r" after the version, and the packages of the newest and of another kernel's headers.
KERNELS = [
    ("rhel-8", EL8, ".x86_64", "kernel-devel", "kernel-devel"),
    ("rhel-8", EL8, ".aarch64", "kernel-devel", "kernel-devel"),
    ("rhel-8", EL8, ".x86_64+debug", "kernel-debug-devel", "kernel-debug-devel"),
    ("rhel-8", EL8_RT, ".x86_64", "kernel-rt-devel", "kernel-rt-devel"),
    ("rhel-8", EL8_RT, ".x86_64+debug", "kernel-rt-debug-devel", "kernel-rt-debug-devel"),
    ("rhel-8", "5.15.0-209.161.7.2.el8uek", ".x86_64", "kernel-uek-devel", "kernel-uek-devel"),
    ("ol-9", "5.15.0-306.177.4.1.el9uek", ".aarch64.64k", "kernel-uek64k-devel", "kernel-uek64k-devel"),
    ("rhel-10", "6.12.0-100.28.2.el10uek", ".aarch64.64k", "kernel-uek64k-devel", "kernel-uek64k-devel"),
    ("ol-9", "6.12.0-1.23.3.2.el9uek", ".x86_64.debug", "kernel-uek-debug-devel", "kernel-uek-debug-devel"),
    ("rhel-10", EL10, ".x86_64_v2", "kernel-devel-matched", "kernel-devel"),
    ("rocky-9", EL9, ".x86_64", "kernel-devel-matched", "kernel-devel"),
    ("rocky-9", EL9, ".aarch64", "kernel-devel-matched", "kernel-devel"),
    ("rocky-9", "5.14.0-601.el9", ".x86_64", "kernel-devel-matched", "kernel-devel"),
    ("rocky-9", EL9, ".x86_64+debug", "kernel-debug-devel-matched", "kernel-debug-devel"),
    ("rocky-9", EL9, ".aarch64+64k", "kernel-64k-devel-matched", "kernel-64k-devel"),
    ("rocky-9", EL9, ".aarch64+64k-debug", "kernel-64k-debug-devel-matched", "kernel-64k-debug-devel"),
    ("rocky-9", EL9, ".x86_64+rt", "kernel-rt-devel", "kernel-rt-devel"),
    ("rocky-9", EL9, ".x86_64+rt-debug", "kernel-rt-debug-devel", "kernel-rt-debug-devel"),
    ("rocky-9", EL9_RT, ".x86_64", "kernel-rt-devel", "kernel-rt-devel"),
    ("rocky-9", EL9_RT, ".x86_64+debug", "kernel-rt-debug-devel", "kernel-rt-debug-devel"),
    ("ol-9", "6.12.0-1.23.3.2.el9uek", ".aarch64", "kernel-uek-devel", "kernel-uek-devel"),
    ("rhel-10", EL10, ".x86_64", "kernel-devel-matched", "kernel-devel"),
    ("rhel-10", EL10, ".aarch64+64k", "kernel-64k-devel-matched", "kernel-64k-devel"),
    ("rhel-10", EL10, ".aarch64+64k-debug", "kernel-64k-debug-devel-matched", "kernel-64k-debug-devel"),
    ("rhel-10", EL10, ".x86_64+debug", "kernel-debug-devel-matched", "kernel-debug-devel"),
    ("rhel-10", EL10, ".x86_64+rt", "kernel-rt-devel", "kernel-rt-devel"),
    ("rhel-10", EL10, ".x86_64+rt-debug", "kernel-rt-debug-devel", "kernel-rt-debug-devel"),
    ("rhel-10", EL10, ".aarch64+rt-64k", "kernel-rt-64k-devel", "kernel-rt-64k-devel"),
    ("rhel-10", EL10, ".aarch64+rt-64k-debug", "kernel-rt-64k-debug-devel", "kernel-rt-64k-debug-devel"),
]


@pytest.mark.parametrize(
    ("release", "version", "end", "newest", "each"), KERNELS, ids=[f"{row[0]} {row[1]}{row[2]}" for row in KERNELS]
)
def test_headers_of_enterprise_linux_fit_the_kernels_variant(release, version, end, newest, each):
    kernel, later = f"{version}{end}", f"99.{version}{end}"
    observed = node(release, "turing")
    modules = {one: {"headers": False} for one in (kernel, later)}
    observed["kernel"] = {"release": kernel, "installed": [kernel], "modules": modules}
    assert chosen(observed)["headers"] == [{"kernel": kernel, "packages": [f"{newest}={version}"]}]
    observed["kernel"]["installed"] = [kernel, later]
    assert chosen(observed)["headers"] == [
        {"kernel": kernel, "packages": [f"{each}={version}"]},
        {"kernel": later, "packages": [f"{newest}=99.{version}"]},
    ]


# A node, "uname -r", and the package of its headers.
FLAVOURED = [
    ("amzn-2023", "6.1.155-176.282.amzn2023.x86_64", "kernel-devel=6.1.155-176.282.amzn2023"),
    ("amzn-2023", "6.12.55-74.119.amzn2023.aarch64", "kernel6.12-devel=6.12.55-74.119.amzn2023"),
    ("amzn-2023", "6.18.3-12.41.amzn2023.x86_64", "kernel6.18-devel=6.18.3-12.41.amzn2023"),
    ("sles-15", "6.4.0-150600.8.48-azure", "kernel-azure-devel=6.4.0-150600.8.48.*"),
    ("sles-15", "6.4.0-150600.10.17-rt", "kernel-rt-devel=6.4.0-150600.10.17.*"),
    ("sles-15", "6.4.0-150600.23.25-64kb", "kernel-64kb-devel=6.4.0-150600.23.25.*"),
    ("opensuse-leap-15", "6.4.0-150600.23.25-default", "kernel-default-devel=6.4.0-150600.23.25.*"),
    ("debian-11", "5.15.158-2-pve", "pve-headers-5.15.158-2-pve"),
    ("debian-12", "6.8.12-29-pve", "proxmox-headers-6.8.12-29-pve"),
    ("debian-12", "6.12.9+bpo-amd64", "linux-headers-6.12.9+bpo-amd64"),
    ("debian-12", "6.1.0-39-cloud-amd64", "linux-headers-6.1.0-39-cloud-amd64"),
    ("debian-12", "6.1.0-39-rt-amd64", "linux-headers-6.1.0-39-rt-amd64"),
    *(
        ("ubuntu-24.04", f"6.8.0-1028-{flavour}", f"linux-headers-6.8.0-1028-{flavour}")
        for flavour in (
            "aws",
            "azure",
            "azure-fde",
            "gcp",
            "gke",
            "oracle",
            "lowlatency",
            "nvidia",
            "nvidia-lowlatency",
        )
    ),
]


@pytest.mark.parametrize(("release", "kernel", "package"), FLAVOURED, ids=[f"{row[0]} {row[1]}" for row in FLAVOURED])
def test_headers_fit_the_kernels_flavour(release, kernel, package):
    observed = node(release, "turing")
    observed["kernel"] = {"release": kernel, "installed": [kernel], "modules": {kernel: {"headers": False}}}
    version = {"debian-11": "570.133.20"}.get(release, "580.95.05")
    found = chosen(observed, version=version)
    assert (found["refusals"], found["headers"]) == ([], [{"kernel": kernel, "packages": [package]}])


FOREIGN = [
    ("rocky-9", "6.19.5-1.el9.elrepo.x86_64"),
    ("rhel-10", "7.2.6-1.el10.elrepo.x86_64"),
    ("rocky-9", "6.6.1"),
    ("amzn-2023", "6.6.1-custom"),
    ("sles-15", "6.6.1"),
]


@pytest.mark.parametrize(("release", "kernel"), FOREIGN)
def test_a_kernel_of_others_is_refused_until_its_headers_are_there(release, kernel):
    observed = node(release, "turing")
    observed["kernel"] = {"release": kernel, "installed": [kernel], "modules": {kernel: {"headers": False}}}
    [refusal] = chosen(observed)["refusals"]
    assert f"lacks the headers of kernel {kernel}, " in refusal and "no kernel of" in refusal
    assert chosen(observed, install_headers="never")["refusals"] == []
    observed["kernel"]["modules"][kernel]["headers"] = True
    assert chosen(observed)["refusals"] == []


# --------------------------------------------------------------------------- what the repositories hold


@pytest.mark.parametrize(
    ("release", "kernel", "package"),
    [
        ("sles-15", "6.4.0-150600.8.48-azure", "nvidia-open-driver-G06-signed-cuda-kmp-azure=580.95.05_*"),
        (
            "opensuse-leap-15-arm64",
            "6.4.0-150600.23.25-64kb",
            "nvidia-open-driver-G06-signed-cuda-kmp-64kb=580.95.05_*",
        ),
        ("sles-15", "6.4.0-150600.10.17-rt", ""),
        ("sles-15", "6.4.0-150600.10.17-longterm", ""),
    ],
)
def test_suses_compiled_module_is_that_of_the_kernels_flavour(release, kernel, package):
    observed = node(release, "turing")
    observed["kernel"] = {"release": kernel, "installed": [kernel], "modules": {kernel: {"headers": False}}}
    found = chosen(observed, source="distribution")
    if package:
        assert found["refusals"] == [] and package in found["packages"]
    else:
        assert f"has kernel {kernel}, and the compiled modules" in found["refusals"][0]
        assert "set driver_source to repository" in found["refusals"][0]


HELD = [
    # release, architecture, source, version, part of the refusal and its end
    ("debian-13", "amd64", "repository", "580.95.05", "begin with branch 590", "whose packages are of branch 550."),
    ("debian-13", "arm64", "repository", "590.48.01", "for amd64 only", "whose packages are of branch 550."),
    ("debian-11", "arm64", "repository", "570.133.20", "for amd64 only", "whose packages are of branch 470."),
    ("debian-11", "amd64", "repository", "580.95.05", "end with branch 575", "whose packages are of branch 470."),
    (
        "ubuntu-20.04",
        "arm64",
        "repository",
        "580.95.05",
        "end with branch 575",
        "whose packages are from branch 535 on.",
    ),
    ("debian-12", "amd64", "distribution", "580.95.05", "are of branch 535", "set driver_source to repository."),
    ("rhel-10", "riscv64", "repository", "580.95.05", "exists for amd64 and arm64 only", "amd64 and arm64 only."),
]


@pytest.mark.parametrize(("release", "arch", "source", "version", "words", "end"), HELD)
def test_what_a_repository_does_not_hold_is_refused_with_what_there_is(release, arch, source, version, words, end):
    observed = node(release, "turing")
    observed["distribution"]["arch"] = arch
    [refusal] = chosen(observed, source=source, version=version)["refusals"]
    assert words in refusal and refusal.endswith(end)
    # A mirror, a directory and a .run file have what the user put there.
    if arch != "riscv64" and source == "repository":
        assert chosen(observed, version=version, repo_url="https://mirror.example.org/")["refusals"] == []
        assert chosen(observed, version=version, source="packages", packages_dir="/srv")["refusals"] == []


def test_cards_that_no_branch_of_the_repository_supports_get_no_advice_to_take_one():
    found = chosen(node("debian-13", "pascal"))["refusals"]
    assert len(found) == 1 and "none of them supports its cards: set driver_source to distribution" in found[0]
    # And vice versa.
    found = chosen(node("debian-12", "blackwell"), source="distribution", version="535.261.03")["refusals"]
    assert "need branch 570 or later" in found[0]


def test_without_a_row_nothing_is_chosen():
    found = chosen(node("debian-12", "turing"), tables={})
    assert "has no packages that the collection knows of" in found["refusals"][0]


def test_a_container_has_no_kernel_to_build_for():
    observed = node("debian-12", "turing", secure_boot=True)
    observed["kernel"] = {"release": "6.1.0-9-amd64", "installed": [], "headers": False}
    found = chosen(observed)
    assert (found["refusals"], found["headers"]) == ([], [])
    ubuntu = node("ubuntu-24.04", "turing")
    ubuntu["kernel"] = {"release": "6.8.0-64-generic", "installed": []}
    assert not any("linux-modules" in package for package in chosen(ubuntu, source="distribution")["packages"])


def test_facts_without_modules_still_have_the_running_kernels_headers():
    observed = node("debian-12", "turing")
    observed["kernel"] = {"release": "6.1.0-9-amd64", "installed": ["6.1.0-9-amd64"], "headers": False}
    assert chosen(observed)["headers"] == [{"kernel": "6.1.0-9-amd64", "packages": ["linux-headers-6.1.0-9-amd64"]}]


def test_ubuntus_persistence_daemon_gets_a_drop_in():
    assert "--persistence-mode" in chosen(node("ubuntu-22.04", "turing"))["persistence_override"]
    assert chosen(node("debian-12", "turing"))["persistence_override"] == ""


def test_nvswitches_of_nvlink_5_need_modules_of_the_kernel():
    observed = node("rocky-9", "blackwell")
    observed["driver"]["fabric"] = {"version": "", "needed": True, "nvlink5": True, "missing": []}
    assert chosen(observed)["modules"] == ["mlx5_ib", "ib_umad"]
    assert chosen(observed, fabric_manager="absent")["modules"] == []
    assert chosen(node("rocky-9", "hopper"), fabric_manager="present")["modules"] == []
    observed["driver"]["fabric"]["missing"] = ["mlx5_ib", "ib_umad"]
    assert "has no mlx5_ib and no ib_umad: without it no fabric manager starts" in chosen(observed)["refusals"][0]
    assert chosen(observed, fabric_manager="absent")["refusals"] == []
    # A container has its host's modules.
    observed["kernel"]["installed"] = []
    assert chosen(observed)["refusals"] == [] and chosen(observed)["modules"] == []


def test_the_fabric_manager_can_be_required_and_excluded():
    assert "nvidia-fabricmanager" in chosen(node("rocky-9", "hopper"), fabric_manager="present")["services"]
    observed = node("rocky-9", "hopper", nvswitches=[{"address": "0000:c0:00.0"}])
    assert chosen(observed, fabric_manager="absent")["services"] == ["nvidia-persistenced"]
    observed = node("rocky-9", "blackwell")
    observed["driver"]["fabric"] = {"version": "", "needed": True}
    assert {"nvlsm", "infiniband-diags"} <= set(chosen(observed)["packages"])


# --------------------------------------------------------------------------- Secure Boot


SECURE = [
    # release, source, mok, part of the refusal or None
    ("ubuntu-22.04", "distribution", {}, None),
    ("sles-15", "distribution", {}, None),
    ("almalinux-9", "distribution", {}, None),
    ("ubuntu-22.04", "repository", {"key": "/MOK.der", "enrolled": True}, None),
    (
        "ubuntu-22.04",
        "repository",
        {"key": "/MOK.der", "enrolled": False, "pending": False},
        "run 'mokutil --import /MOK.der', reboot it and confirm 'Enroll MOK' at its console (or set driver_source to "
        "distribution, whose module is signed), then run this again.",
    ),
    ("debian-12", "repository", {"key": "/mok.pub", "enrolled": False, "pending": True},
     "reboot it and confirm 'Enroll MOK' at its console, then run this again."),
    ("rocky-9", "repository", {"key": "", "enrolled": None, "pending": None}, "create a key for DKMS"),
    ("debian-12", "distribution", {}, "create a key for DKMS"),
    ("sles-15", "repository", {}, "set driver_source to distribution"),
]  # fmt: skip


@pytest.mark.parametrize(("release", "source", "mok", "message"), SECURE)
def test_secure_boot(release, source, mok, message):
    version = "535.261.03" if (release, source) == ("debian-12", "distribution") else "580.95.05"
    found = chosen(node(release, "ampere", secure_boot=True, mok=mok), source=source, version=version)
    if message is None:
        assert found["refusals"] == []
    else:
        assert len(found["refusals"]) == 1 and message in found["refusals"][0]


# --------------------------------------------------------------------------- another driver is loaded


LOADED = [
    # own kernels, loaded version, its module is open, maintenance, in maintenance, expected
    (True, None, None, "never", False, None),
    (True, "580.95.05", True, "never", False, None),
    (True, "580.95.05", None, "never", False, None),
    (True, "570.133.20", True, "never", False, "refused"),
    (True, "580.95.05", False, "never", False, "refused"),
    (True, "570.133.20", True, "drain", False, "maintenance"),
    (True, "570.133.20", True, "reboot", False, "maintenance"),
    (True, "580.95.05", False, "drain", False, "maintenance"),
    (True, "570.133.20", True, "drain", True, None),
    (True, "570.133.20", True, "never", True, None),
    # A container's module is simulated.
    (False, "570.133.20", True, "never", False, None),
    (False, "570.133.20", True, "drain", False, "maintenance"),
    (False, "580.95.05", False, "drain", False, None),
]


@pytest.mark.parametrize(("kernels", "loaded", "is_open", "maintenance", "inside", "expected"), LOADED)
def test_a_loaded_driver_is_kept_until_the_node_is_drained(kernels, loaded, is_open, maintenance, inside, expected):
    observed = node("debian-12", "turing")
    observed["driver"].update(module_version=loaded, module_open=is_open)
    if not kernels:
        observed["kernel"]["installed"] = []
    found = chosen(observed, maintenance=maintenance, in_maintenance=inside)
    if expected == "refused":
        assert found["maintenance"] == "" and "set gpu_maintenance to drain or reboot" in found["refusals"][0]
    else:
        assert found["refusals"] == []
        assert bool(found["maintenance"]) == (expected == "maintenance")
    if expected:
        reported = found["maintenance"] or found["refusals"][0]
        assert reported.startswith("Host gpu1 has ") and (loaded != "580.95.05") == (str(loaded) in reported)


# --------------------------------------------------------------------------- from one branch and flavour to another


def held(*names, **versions):
    loose = {name: {"version": version} for name, version in versions.items()}
    return {**{name: {"version": "1", "held": True} for name in names}, **loose}


REPLACED = [
    # release, source, cards, installed packages, removed packages
    ("ubuntu-22.04", "repository", "turing",
     held("libnvidia-compute-570", "nvidia-compute-utils-570", "nvidia-dkms-570-open", "nvidia-utils-570", dkms="3"),
     ["libnvidia-compute-570", "nvidia-compute-utils-570", "nvidia-dkms-570-open", "nvidia-utils-570"]),
    ("ubuntu-22.04", "repository", "volta",
     held("libnvidia-compute-580", "nvidia-dkms-580-open", "nvidia-container-toolkit"), ["nvidia-dkms-580-open"]),
    ("ubuntu-22.04", "distribution", "turing",
     held("nvidia-utils-580-server", *(f"linux-modules-nvidia-{branch}-server-open-5.15.0-140-generic"
                                       for branch in (575, 580)), "nvidia-headless-no-dkms-575-server-open"),
     ["linux-modules-nvidia-575-server-open-5.15.0-140-generic", "nvidia-headless-no-dkms-575-server-open"]),
    # libcuda1 as a dependency isn't held and stays; held for an older driver it would keep its version.
    ("debian-12", "repository", "turing", held("nvidia-driver-cuda", "nvidia-kernel-open-dkms", libcuda1="1"), []),
    ("debian-12", "repository", "turing", held("nvidia-smi", "libcuda1"), ["libcuda1", "nvidia-smi"]),
    ("debian-12", "repository", "turing", held("nvidia-kernel-dkms"), ["nvidia-kernel-dkms"]),
    ("rocky-9", "repository", "turing", held("kmod-nvidia-latest-dkms", "dkms"), ["kmod-nvidia-latest-dkms"]),
    ("sles-15", "repository", "turing", held("nvidia-compute-utils-G07", "nvidia-open-driver-G07"),
     ["nvidia-compute-utils-G07", "nvidia-open-driver-G07"]),
]  # fmt: skip


@pytest.mark.parametrize(("release", "source", "generation", "installed", "expected"), REPLACED)
def test_packages_under_another_name_are_removed_first(release, source, generation, installed, expected):
    found = chosen(node(release, generation, packages=installed), source=source)
    assert found["replaced"] == expected
    assert not {name.split("=")[0] for name in found["packages"]} & set(found["replaced"])
    assert chosen(node(release, generation, packages=installed), source=source, packages=["x"])["replaced"] == []
    # The other flavour's module may be replaced.
    modules = {"kmod-nvidia-open-dkms", "kmod-nvidia-latest-dkms"}
    assert release != "rocky-9" or modules <= set(found["replaces"])


# --------------------------------------------------------------------------- the .run file


def test_a_runfile_needs_compiler_and_headers_and_no_packages():
    changes = {"source": "runfile", "runfile": "/srv/x.run", "runfile_sha256": "a" * 64, "prerequisites": "ignore"}
    found = chosen(node("debian-12", "volta"), **changes)
    assert (found["refusals"], found["manager"], found["flavour"]) == ([], "runfile", "proprietary")
    assert found["packages"] == [] and found["repositories"] == [] and found["pins"] == []
    assert {"gcc", "make", "dkms"} <= set(found["build"])
    assert found["headers"][0]["packages"] == ["linux-headers-6.1.0-10-amd64"]
    installed = node("debian-12", "volta")
    installed["driver"].update(others=["runfile"], library_version="580.95.05")
    assert chosen(installed, **changes)["build"] == []
    # The .run file has no fabric manager.
    switches = node("debian-12", "hopper", nvswitches=[{"address": "0000:c0:00.0"}])
    assert "has NVSwitches" in chosen(switches, **changes)["refusals"][0]


# --------------------------------------------------------------------------- removal


INSTALLED = {"apt": {"files": {"/etc/apt/apt.conf.d/90kubegpu-driver": ""}, "keys": {}, "sources": []}}


def test_absent_lists_every_package_of_the_role():
    observed = node("ubuntu-22.04", "turing", **INSTALLED)
    observed["packages"] = {
        "linux-modules-nvidia-580-server-open-5.15.0-140-generic": {"version": "5.15.0-140.150+1"},
        "linux-headers-5.15.0-144-generic": {"version": "5.15.0-144.157"},
    }
    found = chosen(observed, state="absent", source="distribution")
    assert (found["refusals"], found["manager"]) == ([], "apt")
    assert "linux-modules-nvidia-580-server-open-5.15.0-140-generic" in found["packages"]
    assert {"nvidia-utils-580-server", "nvidia-headless-no-dkms-580-server"} <= set(found["packages"])
    assert not any("=" in name for name in found["packages"])
    # Headers are removed only with a baseline.
    assert found["build"] == []
    kept = chosen(observed, state="absent", keep=["linux-image-5.15.0-144-generic"])
    assert kept["build"] == ["linux-headers-5.15.0-144-generic"]
    assert kept["repositories"][0]["name"] == "cuda" and "nvidia-persistenced" in kept["services"]


def test_absent_keeps_packages_of_the_baseline():
    kept = ["nvidia-driver-cuda", "nvidia-kernel-open-dkms"]
    found = chosen(node("debian-12", "turing", **INSTALLED), state="absent", keep=kept)
    assert "nvidia-driver-cuda" not in found["packages"] and "nvidia-kernel-dkms" in found["packages"]
    assert found["services"] == []


def test_absent_keeps_a_driver_that_was_installed_otherwise():
    foreign = node("debian-12", "turing", packages=held("nvidia-driver-cuda"))
    foreign["apt"]["files"] = {"/etc/apt/sources.list.d/kubegpu-nvidia-container-toolkit.sources": ""}
    found = chosen(foreign, state="absent")
    assert (found["refusals"], found["packages"], found["services"], found["repositories"]) == ([], [], [], [])
    locked = node("rocky-9", "turing")
    locked["rpm"]["locks"] = [{"name": "nvidia-container-toolkit", "version": "1", "ours": True}]
    assert chosen(locked, state="absent")["packages"] == []
    locked["rpm"]["locks"] += [{"name": "kmod-nvidia-open-dkms", "version": "1", "ours": True}]
    assert "kmod-nvidia-open-dkms" in chosen(locked, state="absent")["packages"]
    unsupported = node("debian-12", "turing")
    unsupported["distribution"].update(id="gentoo", family="gentoo")
    found = chosen(unsupported, state="absent")
    assert (found["refusals"], found["manager"]) == ([], "none")


def test_absent_resets_the_streams_of_both_flavours_and_removes_dependencies():
    observed = node("rocky-9", "turing")
    assert (chosen(observed, state="absent")["streams"], chosen(observed, state="absent")["hold_also"]) == ([], [])
    observed["rpm"]["locks"] = [{"name": "kmod-nvidia-open-dkms", "version": "1", "ours": True}]
    found = chosen(observed, state="absent")
    assert found["streams"] == [
        {"module": "nvidia-driver", "stream": name, "switch": True} for name in ("580-open", "580-dkms")
    ]
    assert "nvidia-compute-G*" in found["hold_also"]
    # The version was changed since the installation.
    for enabled, more in (("570-dkms", ["570-dkms"]), ("580-open", []), ("latest", [])):
        observed["rpm"]["streams"] = {"nvidia-driver": enabled}
        names = [stream["stream"] for stream in chosen(observed, state="absent")["streams"]]
        assert names == ["580-open", "580-dkms", *more]
    assert chosen(observed, state="absent", keep=["nvidia-driver-cuda"])["streams"] == []
    assert chosen(observed, state="absent", source="distribution")["streams"] == []


def test_absent_validates_neither_cards_nor_conflicts():
    observed = node("debian-12", "kepler", secure_boot=True)
    observed["driver"].update(module_version="570.133.20", others=["gpu-operator"])
    found = chosen(observed, state="absent")
    assert (found["refusals"], found["conflicts"], found["maintenance"]) == ([], [], "")


@pytest.mark.parametrize("provider", [provider.id for provider in nvidia_smi.PROVIDERS])
def test_a_driver_that_others_provide_is_left_alone_on_any_distribution(provider):
    observed = node("debian-12", "turing", secure_boot=True)
    observed["distribution"] = {"id": "bottlerocket", "family": "", "version": "1"}
    observed["driver"].update(module_version="570.133.20", others=[provider])
    found = chosen(observed, version="not-a-version")
    empty = {name: found[name] for name in ("refusals", "conflicts", "packages", "repositories", "services")}
    assert not any(empty.values()) and found["maintenance"] == "" and found["provided"] == provider
    [note] = found["notes"]
    assert f"(570.133.20, and not driver_version not-a-version) from {nvidia_smi.of([provider]).who}" in note
    # Without it the same machine is refused.
    observed["driver"]["others"] = []
    assert chosen(observed)["refusals"]


@pytest.mark.parametrize("also", ["nvidia", "runfile"])
def test_the_driver_of_a_vgpu_guest_stays_however_it_was_installed(also):
    observed = node("ubuntu-22.04", "ampere")
    observed["driver"].update(module_version="570.172.08", others=["vgpu", also])
    found = chosen(observed)
    assert (found["refusals"], found["conflicts"], found["packages"]) == ([], [], []) and found["provided"] == "vgpu"


# --------------------------------------------------------------------------- verification


def proof(cards=1, pci=1, version="580.95.05", **more):
    found = {"module_version": version, "version": version, "error": None, "cards": [{}] * cards, **more}
    return node("debian-12", *["turing"] * pci, driver=found)


PROBLEMS = [
    (proof(), {}, None),
    (proof(cards=1, pci=2), {}, "has 2 NVIDIA cards on PCI and nvidia-smi lists 1."),
    (proof(cards=1, pci=2), {"ignore": ["card-lost"]}, None),
    (proof(cards=1, pci=2), {"ignore": [f"card-lost@{OPTIONS['host']}"]}, None),
    (proof(cards=1, pci=2), {"ignore": ["card-lost@another"]}, "nvidia-smi lists 1."),
    (proof(version="570.133.20"), {}, "driver_version is 580.95.05 and nvidia-smi of host gpu1 reports 570.133.20."),
    (proof(version="570.133.20"), {"state": "external"}, None),
    (proof(version="570.133.20", others=["eks", "nvidia"]), {}, None),
    (proof(module_version="570.133.20"), {}, "has kernel module 570.133.20 loaded, and nvidia-smi reports 580.95.05"),
    (proof(cards=0, error="mismatch", code=18), {}, "reboot it and run this again."),
    (proof(cards=0, version=None, error="couldn't communicate"), {}, "nvidia-smi reports: couldn't communicate"),
]


@pytest.mark.parametrize(("observed", "changes", "message"), PROBLEMS)
def test_problems_of_the_driver(observed, changes, message):
    found = verify(observed, {**OPTIONS, **changes})
    assert found == [] if message is None else message in found[0]


def test_problems_begin_with_nouveau_and_mention_secure_boot():
    observed = proof(cards=0, version=None, error="no devices")
    observed["gpus"][0]["driver"] = "nouveau"
    observed["secure_boot"] = True
    found = verify(observed, OPTIONS)
    assert found[0].startswith("Nouveau still drives GPUs") and "Secure Boot is on" in found[1]
    observed["gpus"][0]["driver"] = "nova_core"
    assert verify(observed, OPTIONS)[0].startswith("Nova (nova_core) still drives GPUs of host gpu1: reboot it")
    observed["gpus"][0]["driver"] = "vfio-pci"
    assert not any("Nouveau" in one for one in verify(observed, OPTIONS))


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A40-4Q", "GRID T4-16C", "NVIDIA L4-12Q", "GRID T4-2B4", "NVIDIA A100-1-5CME", "NVIDIA L40S-48A"],
)
def test_a_vgpu_by_the_drivers_name_of_it(name):
    assert nvidia_smi.is_vgpu({"name": name})


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-40GB", "Tesla V100-PCIE-16GB", "NVIDIA H100 80GB HBM3", "NVIDIA GB10", "NVIDIA A800-SXM4-80GB"],
)
def test_a_card_that_is_no_vgpu(name):
    assert not nvidia_smi.is_vgpu({"name": name})
