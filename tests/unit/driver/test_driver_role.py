# SPDX-License-Identifier: GPL-3.0-or-later
"""Role driver in ansible-playbook, in check mode on hosts that consist of facts only: its decisions."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._packages.paths import MANAGERS
from ansible_collections.kubegpu.share.plugins.module_utils._packages.planner import planner
from ansible_runs import ansible
from package_sets import package_set

ROOT = Path(__file__).resolve().parents[3]
VERSION = "580.95.05"
CUDA = "http://repo.example.org/cuda/"
PINNED = "nvidia-* lib*nvidia* libnv* libcuda* cuda-* xserver-xorg-video-nvidia* firmware-nvidia-*"
# A key of the tests: in check mode it is downloaded, too.
KEY = Path(__file__).with_name("key.asc").as_uri()
HEADING = "Written by kubegpu.share; changes made here by hand are overwritten."

FACTS = {
    "distribution": {"id": "debian", "version": "12", "codename": "bookworm", "family": "debian", "arch": "amd64"},
    "kernel": {"release": "6.1.0-9-amd64", "installed": [], "headers": False},
    "secure_boot": None,
    "services": {"nvidia-persistenced": {"active": True, "enabled": True}},
    "gpus": [{"address": "0000:01:00.0", "device": "0x1eb8", "driver": "nvidia", "generation": "turing"}],
    "driver": {
        "module_version": VERSION,
        "module_open": True,
        "version": VERSION,
        "library_version": VERSION,
        "error": None,
        "cards": [{"index": 0}],
        "persistence": True,
        "persistence_daemon": {"enables": True, "masked": False, "files": []},
        "runfile": None,
        "others": [],
        "fabric": {"version": "", "needed": False, "nvlink5": False, "at_boot": False},
    },
    "packages": {
        name: {"version": f"{VERSION}-1", "held": True, "origin": ""}
        for name in ("nvidia-driver-cuda", "nvidia-persistenced", "nvidia-kernel-open-dkms")
    },
    "apt": {
        "files": {
            "/etc/apt/sources.list.d/kubegpu-cuda.sources": (
                f"# {HEADING}\n# Key: {KEY}\nTypes: deb\nURIs: {CUDA}\nSuites: /\nArchitectures: amd64\n"
                "Signed-By: /etc/apt/keyrings/kubegpu-cuda.asc\n"
            ),
            "/etc/apt/preferences.d/kubegpu-driver.pref": (
                f"# {HEADING}\nPackage: {PINNED}\nPin: version {VERSION}-*\nPin-Priority: 1001\n"
            ),
            "/etc/apt/apt.conf.d/90kubegpu-driver": (
                f"// {HEADING}\nUnattended-Upgrade::Package-Blacklist {{\n"
                '    "nvidia-";\n    "libnvidia-";\n    "libcuda";\n    "cuda-";\n};\n'
            ),
        },
        "keys": {"/etc/apt/keyrings/kubegpu-cuda.asc": "0" * 64},
        "sources": [],
        "interrupted": False,
        "unfinished": [],
    },
    "rpm": None,
}
VARIABLES = {"driver_repo_url": CUDA, "driver_repo_key_url": KEY, "driver_repo_key_sha256": ""}


def host(variables=None, **sections):
    facts = copy.deepcopy(FACTS)
    for name, value in sections.items():
        # Packages and empty sections replace; other sections are merged.
        merged = isinstance(facts.get(name), dict) and isinstance(value, dict) and value and name != "packages"
        facts[name] = {**facts[name], **value} if merged else value
    return {**VARIABLES, **(variables or {}), "gpu_node": facts}


OWN_KERNEL = {"installed": ["6.1.0-9-amd64"], "modules": {"6.1.0-9-amd64": {"headers": True}}}
OLD = {"module_version": "570.133.20", "version": "570.133.20"}
BARE = {
    "packages": {},
    "services": {},
    "apt": {"files": {}, "keys": {}},
    "driver": {
        **{"module_version": None, "module_open": None, "version": None, "library_version": "", "cards": []},
        "persistence_daemon": {"enables": None, "masked": False, "files": []},
    },
}
RUNFILE = {"driver_source": "runfile", "driver_runfile": "/nowhere/x.run", "driver_runfile_sha256": "a" * 64}


def enterprise_linux():
    """Rocky 9 with the driver as the role installs it."""
    spec = package_set(name="driver", repositories=[{"name": "cuda", "url": CUDA, "key_url": KEY}])
    dnf = MANAGERS["dnf"]
    names = ("nvidia-driver-cuda", "nvidia-persistenced", "kmod-nvidia-open-dkms")
    packages = {name: {"version": f"3:{VERSION}-1.el9", "held": True, "origin": "NVIDIA"} for name in names}
    rpm = {
        "manager": "dnf",
        "files": {},
        "keys": {"/etc/pki/rpm-gpg/KUBEGPU-cuda.asc": "0" * 64},
        "imported": [],
        "repositories": [{"id": "epel", "url": "", "enabled": True}, {"id": "crb", "url": "", "enabled": True}],
        "locks": [{"name": name, "version": f"3:{VERSION}-1.el9", "ours": True, "exclude": False} for name in packages],
        "lock_path": dnf.lock_path,
        "lock_plugin": "enabled",
        "streams": {"nvidia-driver": "580-open"},
        "duplicates": [],
    }
    (text,) = (
        change.after
        for change in planner(spec, {"apt": None, "rpm": rpm, "packages": packages}).plan().changes
        if change.header.endswith(".repo")
    )
    rpm["files"]["/etc/yum.repos.d/kubegpu-cuda.repo"] = text
    linux = {"id": "rocky", "family": "redhat", "version": "9.6"}
    return {"distribution": linux, "packages": packages, "rpm": rpm, "apt": None}


HOSTS = {
    "converged": host(),
    "converged-kernel": host(kernel=OWN_KERNEL),
    "external": host({"driver_state": "external", "driver_version": "1"}, **{"packages": {}}),
    "external-broken": host({"driver_state": "external"}, driver={"cards": []}),
    "wrong-cards": host(gpus=[*FACTS["gpus"], {"address": "0000:02:00.0", "device": "0x1eb8", "driver": None}]),
    "pascal": host({"driver_version": "590.48.01"}, gpus=[{"address": "0", "driver": None, "generation": "pascal"}]),
    "conflict": host(driver={"others": ["runfile"]}),
    "ignored": host({"preflight_ignore": ["driver-runfile"]}, driver={"others": ["runfile"]}),
    "provided": host({"driver_version": "1.2.3"}, packages={}, driver={"others": ["gpu-operator"]}),
    "loaded-never": host(kernel=OWN_KERNEL, driver=OLD),
    "loaded-drain": host({"gpu_maintenance": "drain"}, kernel=OWN_KERNEL, driver=OLD),
    "in-maintenance": host({"gpu_maintenance": "drain", "driver_in_maintenance": True}, kernel=OWN_KERNEL, driver=OLD),
    "gentoo": host(distribution={"id": "gentoo", "family": "gentoo", "version": "2.17"}),
    "unknown-card": host(gpus=[{"address": "0000:01:00.0", "device": "0x9999", "driver": "nvidia"}]),
    "rocky": host(**enterprise_linux()),
    "fresh": host(**BARE),
    "runfile": host(RUNFILE, packages={}, driver={"others": ["runfile"]}),
    "runfile-fresh": host(RUNFILE, **BARE),
    "removed": host({"driver_state": "absent"}, **BARE),
    # The machine that runs the test has no such service.
    "removal": host({"driver_state": "absent"}, services={}),
    "other-family": host(distribution={"id": "rocky", "family": "redhat", "version": "9.6"}, packages={}),
}


# No module may be executed here: the path of Python is invalid.
UNTOUCHED = ("converged", "converged-kernel", "ignored", "external", "unknown-card", "runfile", "removed", "rocky")
UNTOUCHED += ("provided",)
for one in (*UNTOUCHED, "wrong-cards", "pascal", "conflict", "loaded-never", "loaded-drain", "gentoo", "other-family"):
    HOSTS[one]["ansible_python_interpreter"] = "/nowhere/python"


# One play over all hosts takes minutes; without long tests it has only these hosts.
FEW = ("converged", "conflict", "provided", "loaded-drain", "fresh", "removal")


def hosts(names):
    """Parameters of tests by host: those that aren't among the few are long."""
    return [
        pytest.param(*([one] if isinstance(one, str) else one), marks=() if name in FEW else pytest.mark.long)
        for one in names
        for name in [one if isinstance(one, str) else one[0]]
    ]


@pytest.fixture(scope="module")
def result(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("role")
    collected = [item for item in request.session.items if item.path == request.path]
    everything = any(item.get_closest_marker("long") for item in collected)
    chosen = HOSTS if everything else {name: HOSTS[name] for name in FEW}
    inventory = {
        "all": {"hosts": chosen, "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}}
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    groups = {"name": "Groups", "ansible.builtin.debug": {"msg": "{{ group_names }}"}}
    plays = [{"roles": ["kubegpu.share.driver"]}, {"tasks": [groups]}]
    (folder / "play.yml").write_text(
        yaml.safe_dump([{"hosts": "all", "gather_facts": False, **play} for play in plays])
    )
    words = ("--check", "-i", "hosts.yml", "play.yml")
    json_output = {"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_FORKS": "2"}
    text = ansible(folder, "ansible-playbook", *words, **json_output).text
    assert text.startswith("{"), text
    return json.JSONDecoder().raw_decode(text)[0]


def tasks(result, name, play=0):
    """The results of the tasks that ran on a host, by the task's name."""
    found = {}
    for task in result["plays"][play]["tasks"]:
        one = task["hosts"].get(name)
        if one is not None and not one.get("skipped"):
            found[task["task"]["name"].rpartition(" : ")[2]] = one
    return found


def failure(result, name):
    return next((task["msg"] for task in tasks(result, name).values() if task.get("failed")), None)


INSTALL = "Install the NVIDIA driver packages and hold their version"


@pytest.mark.parametrize("name", hosts(UNTOUCHED))
def test_a_node_in_its_desired_state_executes_nothing(result, name):
    assert failure(result, name) is None
    assert result["stats"][name]["changed"] == 0
    if name in ("converged", "ignored"):
        assert tasks(result, name)[INSTALL]["diff"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    hosts(
        [
            ("external-broken", "has 1 NVIDIA cards on PCI and nvidia-smi lists 0."),
            ("wrong-cards", "has 2 NVIDIA cards on PCI and nvidia-smi lists 1."),
            ("pascal", "cards of Pascal (host pascal) are supported up to branch 580: set driver_version to one of"),
            ("conflict", "has its driver from a .run file: run '/usr/bin/nvidia-uninstall --silent', or set"),
            ("loaded-never", "Host loaded-never has driver 570.133.20 loaded"),
            ("gentoo", "Host gentoo runs gentoo 2.17, which role driver has no packages for"),
            ("other-family", "Host other-family lacks"),
        ]
    ),
)
def test_a_refusal_is_reported_and_nothing_is_installed(result, name, message):
    assert message in failure(result, name)
    if name not in ("external-broken", "wrong-cards"):
        assert INSTALL not in tasks(result, name)


def test_a_driver_that_others_provide_is_named_and_left_alone(result):
    assert failure(result, "provided") is None and INSTALL not in tasks(result, "provided")
    said = tasks(result, "provided")["Warn about the chosen driver"]["msg"]
    assert f"({VERSION}, and not driver_version 1.2.3) from the driver container of NVIDIA's GPU Operator" in said


def test_node_in_use_is_added_to_the_maintenance_group(result):
    assert failure(result, "loaded-drain") is None and INSTALL not in tasks(result, "loaded-drain")
    assert tasks(result, "loaded-drain", play=1)["Groups"]["msg"] == ["kubegpu_maintenance"]
    assert tasks(result, "converged", play=1)["Groups"]["msg"] == ["ungrouped"]


@pytest.mark.long
def test_driver_is_installed_in_maintenance_and_unknown_cards_warn_and_a_missing_run_file_fails(result):
    assert INSTALL in tasks(result, "in-maintenance") and failure(result, "in-maintenance") is None
    assert "unknown architecture" in tasks(result, "unknown-card")["Warn about the chosen driver"]["msg"]
    assert failure(result, "runfile-fresh") == "file: /nowhere/x.run can't be read: No such file or directory"


def test_check_mode_on_a_bare_node_reports_all_changes(result):
    assert failure(result, "fresh") is None and result["stats"]["fresh"]["changed"] == 1
    made = [one["after_header"] for one in tasks(result, "fresh")[INSTALL]["diff"]]
    packages = [f"package {name}" for name in ("nvidia-driver-cuda", "nvidia-persistenced", "nvidia-kernel-open-dkms")]
    assert made == ["/etc/apt/keyrings/kubegpu-cuda.asc", *FACTS["apt"]["files"], *packages]


def test_absent_removes_the_set_and_the_headers(result):
    # The module observes this machine, which has no driver: the tests of the plan cover the changes.
    assert failure(result, "removal") is None
    name = "Remove the driver's packages, its kernel headers and its repository"
    removals = [one["item"] for one in tasks(result, "removal")[name]["results"]]
    assert [removal["name"] for removal in removals] == ["driver", "driver-headers"]
    assert {"nvidia-driver-cuda", "nvidia-kernel-dkms", "nvidia-kernel-open-dkms"} <= set(removals[0]["packages"])
