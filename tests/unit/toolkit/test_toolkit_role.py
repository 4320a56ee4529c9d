# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables of the role toolkit for every supported system, and its tasks on hosts that can't be reached."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.config import MARKER, with_flag
from node_fakes import AptMachine
from package_sets import KEY, package_set, reconciler
from toolkit_kit import ROOT, run_playbook

ROLE = ROOT / "roles" / "toolkit"
DEFAULTS = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
VERSION, NAMES = DEFAULTS["toolkit_version"], DEFAULTS["toolkit_packages"]
DEB = "https://nvidia.github.io/libnvidia-container/stable/deb/"
RPM = "https://nvidia.github.io/libnvidia-container/stable/rpm/"


def node(id="debian", version="12", family="debian", arch="amd64", **sections):
    """The facts that the role reads."""
    return {
        "distribution": {"id": id, "version": version, "family": family, "arch": arch, "major": 0},
        "toolkit": {"version": None, "binaries": [], "operator": False, "config": None, "packages": {}},
        "driver": {"root": "/"},
        "runtimes": {"containerd": {"version": "2.1.9"}, "docker": None, "crio": None},
        "packages": {},
        "cdi": {"specs": [], "refresh_env": None},
        "sources_stale": [],
        "toolkit_legacy": {"record": "", "drop_ins": []},
        **sections,
    }


def runtimes(**versions):
    return {"runtimes": {name: {"version": version} for name, version in versions.items()}}


SYSTEMS = {
    "debian11": (node(version="11"), "apt", DEB + "amd64/"),
    "debian13-arm": (node(version="13", arch="arm64"), "apt", DEB + "arm64/"),
    "ubuntu2004": (node("ubuntu", "20.04"), "apt", DEB + "amd64/"),
    "ubuntu2404": (node("ubuntu", "24.04"), "apt", DEB + "amd64/"),
    "rocky8": (node("rocky", "8.10", "redhat"), "rpm", RPM + "x86_64/"),
    "alma9-arm": (node("almalinux", "9.6", "redhat", "arm64"), "rpm", RPM + "aarch64/"),
    "rhel10": (node("rhel", "10.0", "redhat"), "rpm", RPM + "x86_64/"),
    "al2023": (node("amzn", "2023", "redhat"), "rpm", RPM + "x86_64/"),
    "leap15": (node("opensuse-leap", "15.6", "suse"), "rpm", RPM + "x86_64/"),
    "sles15": (node("sles", "15.6", "suse"), "rpm", RPM + "x86_64/"),
}

# Facts and variables of a host, and a part of the message; empty without an unmet requirement.
REFUSALS = {
    "arch": (node("arch", "", "arch"), {}, "installs packages only on the families debian, redhat, suse"),
    "architecture": (
        node(arch="riscv64"),
        {},
        "is of architecture riscv64, which NVIDIA's repository of the toolkit has no packages for",
    ),
    "no-version": (node(), {"toolkit_version": "latest"}, "toolkit_version is latest"),
    "no-folder": (node(), {"toolkit_source": "packages"}, "set toolkit_source_dir to the directory"),
    "folder": (node(), {"toolkit_source": "packages", "toolkit_source_dir": "/x"}, ""),
    "operator": (node(toolkit={"operator": True, "binaries": []}), {}, "The GPU Operator manages the toolkit"),
    "environment": (node(), {"toolkit_accept_unprivileged": False}, "set gpushare_device_injection to cdi"),
    "environment-auto": (
        node(),
        {"toolkit_accept_unprivileged": False, "gpushare_device_injection": "auto"},
        "toolkit_accept_unprivileged is false",
    ),
    "environment-cdi": (node(), {"toolkit_accept_unprivileged": False, "gpushare_device_injection": "cdi"}, ""),
    "environment-upstream": (
        node(),
        {
            "toolkit_accept_unprivileged": False,
            "gpushare_device_injection": "cdi",
            "gpushare_device_plugin_image": "example.org/p:1",
        },
        "the upstream device plugin (gpushare_device_plugin_image) assigns GPUs by environment only",
    ),
}

# The runtimes' versions, variables of the host, and whether specifications have to be of an older version.
OLD_CDI = [
    ({"containerd": "1.6.20~ds1"}, {}, True),
    ({"containerd": "v1.7.15"}, {}, True),
    ({"containerd": "1.7.16"}, {}, False),
    ({"containerd": "2.3.0", "docker": "29.0.1"}, {}, False),
    ({"containerd": "2.1.0", "docker": "26.0.2+dfsg1"}, {}, True),
    ({"docker": "26.1.5+dfsg1"}, {}, False),
    ({"crio": "1.29.4"}, {}, True),
    ({"crio": "1.30.0"}, {}, False),
    ({}, {}, False),
    ({"containerd": ""}, {}, False),
    ({"containerd": "1.6.20"}, {"toolkit_version": "1.18.2-1"}, False),
    ({"containerd": "2.1.0"}, {"toolkit_old_cdi": "always"}, True),
    ({"containerd": "1.6.20"}, {"toolkit_old_cdi": "never"}, False),
]

BACK = {
    "nothing": ([], {}),
    "names alone": (["bash=5", "nvidia-container-toolkit", "vim"], {"nvidia-container-toolkit": ""}),
    "versions": (
        ["bash=5.2-1=x", "nvidia-container-toolkit=1.13.5-1", "nvidia-docker2=2.13.0-1", "nvidia-driver=5"],
        {"nvidia-container-toolkit": "1.13.5-1", "nvidia-docker2": "2.13.0-1"},
    ),
}


def include_role(tmp_path: Path, hosts: dict[str, dict[str, object]]) -> str:
    """Run the role for hosts that can't be reached, on which every execution fails; return the output."""
    play = {"connection": "ssh", "tasks": [{"ansible.builtin.include_role": {"name": "kubegpu.share.toolkit"}}]}
    unreachable = {"ANSIBLE_SSH_EXECUTABLE": "/bin/false", "ANSIBLE_LOCAL_TEMP": str(tmp_path / "ansible")}
    return run_playbook(tmp_path, hosts, play, **unreachable)[1]


def trusted(value):
    """Mark the templates of a value as trusted, as Ansible does for a role's files."""
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, list):
        return [trusted(one) for one in value]
    return {name: trusted(one) for name, one in value.items()} if isinstance(value, dict) else value


def decide(name: str, observed: dict[str, object], **variables: object) -> object:
    """Evaluate a variable of the role for a host."""
    files = ["defaults/main.yml", f"vars/{observed['distribution']['family']}.yml", "vars/main.yml"]
    values: dict[str, object] = {}
    for file in [ROLE / file for file in files if (ROLE / file).is_file()]:
        values |= trusted(yaml.safe_load(file.read_text()))
    values |= {"inventory_hostname": "gpu1", "gpu_node": observed, "ansible_check_mode": False, **variables}
    return Templar(loader=DataLoader(), variables=values).template(trust_as_template("{{ " + name + " }}"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_repository_by_system(name):
    observed, manager, url = SYSTEMS[name]
    assert (decide("__toolkit_manager", observed), decide("__toolkit_repo_default", observed)) == (manager, url)
    assert decide("__toolkit_wanted", observed) == [f"{package}={VERSION}" for package in NAMES]
    assert not any(decide("__toolkit_refusals", observed))


@pytest.mark.parametrize("name", REFUSALS)
def test_unmet_requirements(name):
    observed, variables, message = REFUSALS[name]
    found = [one for one in decide("__toolkit_refusals", observed, **variables) if one]
    assert len(found) == bool(message), found
    assert not message or message in found[0]


@pytest.mark.parametrize(("versions", "variables", "old"), OLD_CDI)
def test_older_runtimes_get_older_specifications(versions, variables, old):
    assert decide("__toolkit_needs_old_cdi", node(**runtimes(**versions)), **variables) is old


def test_an_external_toolkits_own_version_counts():
    observed = node(**runtimes(containerd="1.6.20"), toolkit={"version": "1.19.1", "binaries": []})
    assert decide("__toolkit_needs_old_cdi", observed, toolkit_state="external") is True


@pytest.mark.parametrize("name", BACK)
def test_earlier_versions_are_restored(name):
    kept, back = BACK[name]
    assert decide("__toolkit_before", node(), toolkit_keep_packages=kept) == back
    removed = {"packages": {"nvidia-docker2": "2.13.0-1"}}
    found = decide("__toolkit_back", node(), toolkit_keep_packages=kept, __toolkit_removed=removed)
    assert found == {"nvidia-docker2": "2.13.0-1", **back}


@pytest.mark.parametrize(
    ("url", "variables", "blocked"),
    [
        (DEB + "amd64", {}, False),
        (DEB + "amd64", {"ansible_check_mode": True}, True),
        (DEB + "amd64/", {"ansible_check_mode": True}, True),
        (DEB + "amd64", {"ansible_check_mode": True, "toolkit_migrate": False}, False),
        (DEB + "amd64", {"ansible_check_mode": True, "toolkit_repo_url": "http://mirror.example.org/"}, False),
        ("https://nvidia.github.io/nvidia-docker/x", {"ansible_check_mode": True}, False),
    ],
)
def test_sources_that_block_check_mode(url, variables, blocked):
    file = "/etc/apt/sources.list.d/a.list"
    other = {"file": "/etc/apt/sources.list", "url": "http://deb.example.org"}
    stale = node(sources_stale=[{"file": file, "text": ""}], apt={"sources": [{"file": file, "url": url}, other]})
    assert decide("__toolkit_blocked", stale, **variables) is blocked
    assert decide("__toolkit_blocked", node(apt=None), **variables) is False


# --------------------------------------------------------------------------- executions


def converged(old_cdi: bool) -> dict[str, object]:
    """Return the facts of a converged node."""
    url = DEB + "amd64/"
    machine = AptMachine({url: {name: [VERSION] for name in NAMES}})
    machine.fetched.add(url)
    repository = {"name": "nvidia-container-toolkit", "url": url, "architectures": ["amd64"]}
    repository["key_url"] = "https://nvidia.github.io/libnvidia-container/gpgkey"
    repository["key_sha256"] = hashlib.sha256(KEY.encode()).hexdigest()
    params = {
        "name": "toolkit",
        "repositories": [repository],
        "packages": [f"{name}={VERSION}" for name in NAMES],
        "never_upgrade": ["nvidia-container-", "libnvidia-container"],
    }
    packages = reconciler(package_set(**params), machine, "debian")
    run(packages, check=False)
    binaries = ["nvidia-ctk", "nvidia-container-runtime"]
    return {
        **node(**runtimes(containerd="1.6.20" if old_cdi else "2.1.0")),
        **packages.observe(),
        "toolkit": {"version": VERSION.split("-")[0], "binaries": binaries, "operator": False, "config": None},
        "cdi": {"specs": [], "refresh_env": with_flag("# as packaged\n") if old_cdi else "# as packaged\n"},
    }


def test_nothing_is_executed_without_drift(tmp_path):
    clean = {**node(), **converged(False), "packages": {}, "cdi": {"specs": [], "refresh_env": None}}
    clean["apt"] = {**clean["apt"], "files": {}, "keys": {}}
    clean["toolkit"] = {"version": None, "binaries": [], "operator": False, "config": None}
    own_key = {"toolkit_repo_key_sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    hosts = {
        "new": {"gpu_node": converged(False), **own_key},
        "old": {"gpu_node": converged(True), **own_key},
        "external": {"gpu_node": converged(False), "toolkit_state": "external"},
        "absent": {"gpu_node": clean, "toolkit_state": "absent"},
    }
    # Proves that the others would detect an execution.
    drifted = {"gpu_node": {**converged(False), "packages": {}}}
    output = include_role(tmp_path, {**hosts, "drifted": drifted})
    recap = {line.split()[0]: line for line in output.splitlines() if "ok=" in line and "changed=" in line}
    assert "unreachable=1" in recap.pop("drifted") and set(recap) == set(hosts), output[-3000:]
    for line in recap.values():
        assert "changed=0" in line and "unreachable=0" in line and "failed=0" in line, output[-3000:]
    assert MARKER in hosts["old"]["gpu_node"]["cdi"]["refresh_env"]
