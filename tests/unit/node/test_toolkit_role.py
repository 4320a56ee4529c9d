# SPDX-License-Identifier: GPL-3.0-or-later
"""Role toolkit by its decisions, for every supported system, and without a node: asking one would fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils import _apt
from ansible_collections.kubegpu.share.plugins.module_utils._apt_apply import AptConcern
from ansible_collections.kubegpu.share.plugins.module_utils._runner import run
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_files import MARKER, with_flag
from node_fakes import AptMachine

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles" / "toolkit"
VERSION = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())["toolkit_version"]
NAMES = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())["toolkit_packages"]
DEB = "https://nvidia.github.io/libnvidia-container/stable/deb/"
RPM = "https://nvidia.github.io/libnvidia-container/stable/rpm/"


def node(id="debian", version="12", family="debian", arch="amd64", **sections):
    """An observation as far as the role reads it."""
    return {
        "distribution": {"id": id, "version": version, "family": family, "arch": arch, "major": 0},
        "toolkit": {"version": None, "binaries": [], "operator": False, "config": None, "packages": {}},
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
    "centos7": (node("centos", "7", "redhat"), "rpm", RPM + "x86_64/"),
    "rocky8": (node("rocky", "8.10", "redhat"), "rpm", RPM + "x86_64/"),
    "alma9-arm": (node("almalinux", "9.6", "redhat", "arm64"), "rpm", RPM + "aarch64/"),
    "rhel10": (node("rhel", "10.0", "redhat"), "rpm", RPM + "x86_64/"),
    "al2023": (node("amzn", "2023", "redhat"), "rpm", RPM + "x86_64/"),
    "leap15": (node("opensuse-leap", "15.6", "suse"), "rpm", RPM + "x86_64/"),
    "sles15": (node("sles", "15.6", "suse"), "rpm", RPM + "x86_64/"),
}

# Observation, variables of the host, and what the refusal says; empty where there is none.
REFUSALS = {
    "arch": (node("arch", "", "arch"), {}, "installs packages only of the families debian, redhat, suse"),
    "no-version": (node(), {"toolkit_version": "latest"}, "toolkit_version is latest"),
    "no-folder": (node(), {"toolkit_source": "packages"}, "toolkit_source_dir has to name the folder"),
    "folder": (node(), {"toolkit_source": "packages", "toolkit_source_dir": "/x"}, ""),
    "operator": (node(toolkit={"operator": True, "binaries": []}), {}, "The GPU operator has its own toolkit"),
    **{
        f"legacy-{id}-{version}": (node(id, version, family), {"toolkit_route": "legacy"}, words)
        for id, version, family, words in (
            ("centos", "7", "redhat", ""),
            ("rhel", "7.9", "redhat", ""),
            ("amzn", "2", "redhat", ""),
            ("debian", "10", "debian", ""),
            ("ubuntu", "18.04", "debian", ""),
            ("amzn", "2023", "redhat", "leave toolkit_route at toolkit"),
            ("rocky", "8.10", "redhat", "leave toolkit_route at toolkit"),
            ("debian", "11", "debian", "leave toolkit_route at toolkit"),
            ("ubuntu", "20.04", "debian", "leave toolkit_route at toolkit"),
            ("sles", "15.6", "suse", "leave toolkit_route at toolkit"),
        )
    },
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
        "the device plugin of upstream (gpushare_device_plugin_image) names cards in the environment only",
    ),
    "legacy-docker2": (
        node("centos", "7", "redhat", runtimes={"docker": {"version": "20.10.1", "text": "{}"}, "containerd": None}),
        {"toolkit_route": "legacy", "toolkit_legacy_packages": ["nvidia-docker2=2.14.0-1"]},
        "puts its own daemon.json over that of host",
    ),
}

OLD_CDI = {
    "containerd-1.6": (node(**runtimes(containerd="1.6.20~ds1")), {}, True),
    "containerd-1.7.15": (node(**runtimes(containerd="v1.7.15")), {}, True),
    "containerd-1.7.16": (node(**runtimes(containerd="1.7.16")), {}, False),
    "containerd-2": (node(**runtimes(containerd="2.3.0", docker="29.0.1")), {}, False),
    "docker-26.0": (node(**runtimes(containerd="2.1.0", docker="26.0.2+dfsg1")), {}, True),
    "docker-26.1": (node(**runtimes(docker="26.1.5+dfsg1")), {}, False),
    "crio-1.29": (node(**runtimes(crio="1.29.4")), {}, True),
    "crio-1.30": (node(**runtimes(crio="1.30.0")), {}, False),
    "none": (node(runtimes={"containerd": None, "docker": None}), {}, False),
    "no-version": (node(**runtimes(containerd="")), {}, False),
    "toolkit-1.18": (node(**runtimes(containerd="1.6.20")), {"toolkit_version": "1.18.2-1"}, False),
    "installed-1.19": (
        node(**runtimes(containerd="1.6.20"), toolkit={"version": "1.19.1", "binaries": []}),
        {"toolkit_state": "external"},
        True,
    ),
    "always": (node(**runtimes(containerd="2.1.0")), {"toolkit_old_cdi": "always"}, True),
    "never": (node(**runtimes(containerd="1.6.20")), {"toolkit_old_cdi": "never"}, False),
}

BACK = {
    "nothing": ([], {}),
    "names alone": (["bash=5", "nvidia-container-toolkit", "vim"], {"nvidia-container-toolkit": ""}),
    "versions": (
        ["bash=5.2-1=x", "nvidia-container-toolkit=1.13.5-1", "nvidia-docker2=2.13.0-1", "nvidia-driver=5"],
        {"nvidia-container-toolkit": "1.13.5-1", "nvidia-docker2": "2.13.0-1"},
    ),
}


def play(tmp_path: Path, hosts: dict[str, dict[str, object]], tasks: list[object], *words: str) -> str:
    """Run tasks for hosts that can't be reached; what ansible-playbook printed."""
    (tmp_path / "ansible.cfg").write_text("")
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
    (tmp_path / "play.yml").write_text(
        json.dumps([{"hosts": "all", "gather_facts": False, "connection": "ssh", "tasks": tasks}])
    )
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        # Whoever asks a node fails at once.
        "ANSIBLE_SSH_EXECUTABLE": "/bin/false",
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "ansible"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["ansible-playbook", "-i", str(tmp_path / "hosts.json"), str(tmp_path / "play.yml"), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    return done.stdout + done.stderr


def trusted(value):
    """A variable as Ansible has it that was read from a role's file."""
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, list):
        return [trusted(one) for one in value]
    return {name: trusted(one) for name, one in value.items()} if isinstance(value, dict) else value


def decide(name: str, observed: dict[str, object], **variables: object) -> object:
    """What a variable of the role comes to on a host."""
    files = ["defaults/main.yml", f"vars/{observed['distribution']['family']}.yml", "vars/main.yml"]
    values: dict[str, object] = {}
    for file in [ROLE / file for file in files if (ROLE / file).is_file()]:
        values |= trusted(yaml.safe_load(file.read_text()))
    values |= {"inventory_hostname": "gpu1", "gpu_node": observed, "ansible_check_mode": False, **variables}
    return Templar(loader=DataLoader(), variables=values).template(trust_as_template("{{ " + name + " }}"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_its_repository(name):
    observed, manager, url = SYSTEMS[name]
    assert (decide("__toolkit_manager", observed), decide("__toolkit_repo_default", observed)) == (manager, url)
    assert decide("__toolkit_wanted", observed) == [f"{package}={VERSION}" for package in NAMES]
    assert not any(decide("__toolkit_refusals", observed))


@pytest.mark.parametrize("name", REFUSALS)
def test_nonsense_is_refused_in_one_sentence(name):
    observed, variables, words = REFUSALS[name]
    said = [sentence for sentence in decide("__toolkit_refusals", observed, **variables) if sentence]
    assert len(said) == bool(words), said
    assert not words or words in said[0]


def test_the_legacy_route_adds_the_wrapper():
    found = decide("__toolkit_wanted", node("centos", "7", "redhat"), toolkit_route="legacy")
    assert found[-1] == "nvidia-container-runtime=3.14.0-1"


@pytest.mark.parametrize("name", OLD_CDI)
def test_old_runtimes_get_old_specifications(name):
    observed, variables, old = OLD_CDI[name]
    assert decide("__toolkit_needs_old_cdi", observed, **variables) is old


@pytest.mark.parametrize("name", BACK)
def test_what_was_there_before_with_a_version_is_brought_back(name):
    kept, back = BACK[name]
    assert decide("__toolkit_before", node(), toolkit_keep_packages=kept) == back
    returned = {"packages": {"nvidia-docker2": "2.13.0-1"}}
    found = decide("__toolkit_back", node(), toolkit_keep_packages=kept, __toolkit_returned=returned)
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
def test_what_check_mode_can_t_plan(url, variables, blocked):
    file = "/etc/apt/sources.list.d/a.list"
    other = {"file": "/etc/apt/sources.list", "url": "http://deb.example.org"}
    stale = node(sources_stale=[{"file": file, "text": ""}], apt={"sources": [{"file": file, "url": url}, other]})
    assert decide("__toolkit_blocked", stale, **variables) is blocked
    assert decide("__toolkit_blocked", node(apt=None), **variables) is False


# --------------------------------------------------------------------------- nothing to do, nothing executed


def converged(old_cdi: bool) -> dict[str, object]:
    """A node on which all is as the role wants it."""
    url = DEB + "amd64/"
    machine = AptMachine({url: {name: [VERSION] for name in NAMES}})
    machine.fetched.add(url)
    repository = {
        "name": "nvidia-container-toolkit",
        "url": url,
        "suites": ["/"],
        "components": [],
        "architectures": ["amd64"],
        "key_url": "https://nvidia.github.io/libnvidia-container/gpgkey",
    }
    params = {name: option.get("default") for name, option in _apt.ARGUMENTS.items()}
    params |= {
        "name": "toolkit",
        "repositories": [repository],
        "packages": [f"{name}={VERSION}" for name in NAMES],
        "never_upgrade": ["nvidia-container-", "libnvidia-container"],
    }
    key = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nabc=\n-----END PGP PUBLIC KEY BLOCK-----\n"
    concern = AptConcern(_apt.package_set(params), machine, "amd64", fetch=lambda url: key)
    run(concern, check=False)
    binaries = ["nvidia-ctk", "nvidia-container-runtime"]
    return {
        **node(**runtimes(containerd="1.6.20" if old_cdi else "2.1.0")),
        **concern.observe(),
        "toolkit": {"version": VERSION.split("-")[0], "binaries": binaries, "operator": False, "config": None},
        "cdi": {"specs": [], "refresh_env": with_flag("# as packaged\n") if old_cdi else "# as packaged\n"},
    }


def test_with_nothing_to_do_nothing_is_executed(tmp_path):
    clean = {**node(), **converged(False), "packages": {}, "cdi": {"specs": [], "refresh_env": None}}
    clean["apt"] = {**clean["apt"], "files": {}, "keys": {}}
    clean["toolkit"] = {"version": None, "binaries": [], "operator": False, "config": None}
    hosts = {
        "new": {"gpu_node": converged(False)},
        "old": {"gpu_node": converged(True)},
        "external": {"gpu_node": converged(False), "toolkit_state": "external"},
        "absent": {"gpu_node": clean, "toolkit_state": "absent"},
    }
    role = [{"ansible.builtin.include_role": {"name": "kubegpu.share.toolkit"}}]
    said = play(tmp_path, hosts, role)
    recap = {line.split()[0]: line for line in said.splitlines() if "ok=" in line and "changed=" in line}
    assert set(recap) == set(hosts), said[-3000:]
    for name, line in recap.items():
        assert "changed=0" in line and "unreachable=0" in line and "failed=0" in line, said[-3000:]
        assert name
    assert MARKER in hosts["old"]["gpu_node"]["cdi"]["refresh_env"]


def test_drift_asks_the_node(tmp_path):
    """The proof that the test before would see an execution."""
    drifted = converged(False)
    drifted["packages"] = {}
    said = play(
        tmp_path,
        {"drifted": {"gpu_node": drifted}},
        [{"ansible.builtin.include_role": {"name": "kubegpu.share.toolkit"}}],
    )
    assert "unreachable=1" in said
