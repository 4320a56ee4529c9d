# SPDX-License-Identifier: GPL-3.0-or-later
"""The role itself, by real ansible-playbook in check mode over hosts that are only observations: what it decides."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _rpm

ROOT = Path(__file__).resolve().parents[3]
VERSION = "580.95.05"
CUDA = "http://repo.example.org/cuda/"
KEY = CUDA + "key.asc"

SEEN = {
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
        "others": [],
    },
    "packages": {
        name: {"version": f"{VERSION}-1", "held": True, "origin": ""}
        for name in ("nvidia-driver-cuda", "nvidia-persistenced", "nvidia-kernel-open-dkms")
    },
    "apt": {
        "files": {
            "/etc/apt/sources.list.d/kubegpu-cuda.sources": "\n".join(
                [
                    "# Written by kubegpu.share; what is changed here by hand is written again.",
                    f"# Key: {KEY}",
                    "Types: deb",
                    f"URIs: {CUDA}",
                    "Suites: /",
                    "Architectures: amd64",
                    "Signed-By: /etc/apt/keyrings/kubegpu-cuda.asc",
                    "",
                ]
            ),
            "/etc/apt/preferences.d/kubegpu-driver.pref": (
                "# Written by kubegpu.share; what is changed here by hand is written again.\n"
                f"Package: *nvidia* *cuda* libnv*\nPin: version {VERSION}-*\nPin-Priority: 1001\n"
            ),
            "/etc/apt/apt.conf.d/90kubegpu-driver": (
                "// Written by kubegpu.share; what is changed here by hand is written again.\n"
                "Unattended-Upgrade::Package-Blacklist {\n"
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
WISHES = {"driver_repo_url": CUDA, "driver_repo_key_url": KEY}


def host(wishes=None, **sections):
    seen = copy.deepcopy(SEEN)
    for name, value in sections.items():
        # A section is added to; packages, and what is empty, stand for themselves.
        merged = isinstance(seen.get(name), dict) and isinstance(value, dict) and value and name != "packages"
        seen[name] = {**seen[name], **value} if merged else value
    return {**WISHES, **(wishes or {}), "gpu_node": seen}


OWN_KERNEL = {"installed": ["6.1.0-9-amd64"], "modules": {"6.1.0-9-amd64": {"headers": True}}}
OLD = {"module_version": "570.133.20", "version": "570.133.20"}
BARE = {
    "packages": {},
    "services": {},
    "apt": {"files": {}, "keys": {}},
    "driver": {"module_version": None, "module_open": None, "version": None, "library_version": "", "cards": []},
}
RUNFILE = {
    "driver_source": "runfile",
    "driver_runfile": "/nowhere/x.run",
    "driver_runfile_sha256": "a" * 64,
}


def enterprise_linux():
    """Rocky 9 with the driver as the role puts it there."""
    cuda = _rpm.Repository("cuda", CUDA, ("packages",), KEY, "", "")
    dnf = _rpm.MANAGERS["dnf"]
    names = ("nvidia-driver-cuda", "nvidia-persistenced", "kmod-nvidia-open-dkms")
    packages = {name: {"version": f"3:{VERSION}-1.el9", "held": True, "origin": "NVIDIA"} for name in names}
    rpm = {
        "manager": "dnf",
        "files": {cuda.path(dnf): cuda.text(dnf)},
        "keys": {cuda.key_path: "0" * 64},
        "imported": [],
        "repositories": [{"id": "epel", "url": "", "enabled": True}, {"id": "crb", "url": "", "enabled": True}],
        "locks": [{"name": name, "version": f"3:{VERSION}-1.el9", "ours": True, "exclude": False} for name in packages],
        "lock_path": dnf.lock_path,
        "lock_plugin": "enabled",
        "streams": {"nvidia-driver": "580-open"},
        "interrupted": False,
        "duplicates": [],
    }
    linux = {"id": "rocky", "family": "redhat", "version": "9.6"}
    return {"distribution": linux, "packages": packages, "rpm": rpm, "apt": None}


HOSTS = {
    "converged": host(),
    "converged-kernel": host(kernel=OWN_KERNEL),
    "external": host({"driver_state": "external", "driver_version": "1"}, **{"packages": {}}),
    "external-broken": host({"driver_state": "external"}, driver={"cards": []}),
    "wrong-cards": host(gpus=[*SEEN["gpus"], {"address": "0000:02:00.0", "device": "0x1eb8", "driver": None}]),
    "pascal": host({"driver_version": "590.48.01"}, gpus=[{"address": "0", "driver": None, "generation": "pascal"}]),
    "conflict": host(driver={"others": ["gpu-operator"]}),
    "ignored": host({"preflight_ignore": ["driver-gpu-operator"]}, driver={"others": ["gpu-operator"]}),
    "loaded-never": host(kernel=OWN_KERNEL, driver=OLD),
    "loaded-drain": host({"gpu_maintenance": "drain"}, kernel=OWN_KERNEL, driver=OLD),
    "inside": host({"gpu_maintenance": "drain", "driver_in_maintenance": True}, kernel=OWN_KERNEL, driver=OLD),
    "gentoo": host(distribution={"id": "gentoo", "family": "gentoo", "version": "2.17"}),
    "unknown-card": host(gpus=[{"address": "0000:01:00.0", "device": "0x9999", "driver": "nvidia"}]),
    "rocky": host(**enterprise_linux()),
    "fresh": host(**BARE),
    "runfile": host(RUNFILE, packages={}, driver={"others": ["runfile"]}),
    "runfile-fresh": host(RUNFILE, **BARE),
    "gone": host({"driver_state": "absent"}, **BARE),
    # This machine has no such service to ask after.
    "going": host({"driver_state": "absent"}, services={}),
    "other-family": host(distribution={"id": "rocky", "family": "redhat", "version": "9.6"}, packages={}),
}


# On these nothing may be executed: no module would find its Python.
UNTOUCHED = ("converged", "converged-kernel", "ignored", "external", "unknown-card", "runfile", "gone", "rocky")
for one in (*UNTOUCHED, "wrong-cards", "pascal", "conflict", "loaded-never", "loaded-drain", "gentoo", "other-family"):
    HOSTS[one]["ansible_python_interpreter"] = "/nowhere/python"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("role")
    inventory = {
        "all": {"hosts": HOSTS, "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}}
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    play = [{"hosts": "all", "gather_facts": False, "roles": ["kubegpu.share.driver"]}]
    play.append(
        {
            "hosts": "all",
            "gather_facts": False,
            "tasks": [{"name": "Groups", "ansible.builtin.debug": {"msg": "{{ group_names }}"}}],
        }
    )
    (folder / "play.yml").write_text(yaml.safe_dump(play))
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        "ANSIBLE_CONFIG": str(folder / "none.cfg"),
        "ANSIBLE_HOME": str(folder / "home"),
        "ANSIBLE_FORKS": "2",
    }
    (folder / "none.cfg").touch()
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "--check", "-i", "hosts.yml", "play.yml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


def tasks(result, name, play=0):
    """What each task that wasn't skipped returned on a host, by the task's name."""
    found = {}
    for task in result["plays"][play]["tasks"]:
        one = task["hosts"].get(name)
        if one is not None and not one.get("skipped"):
            found[task["task"]["name"].rpartition(" : ")[2]] = one
    return found


def failure(result, name):
    return next((one["msg"] for one in tasks(result, name).values() if one.get("failed")), None)


INSTALL = "Install the driver at its version and hold it"


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_node_as_wished_is_left_alone_without_an_execution(result, name):
    assert failure(result, name) is None
    assert result["stats"][name]["changed"] == 0
    if name in ("converged", "ignored"):
        assert tasks(result, name)[INSTALL]["diff"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("external-broken", "has 1 NVIDIA cards on PCI and nvidia-smi lists 0."),
        ("wrong-cards", "has 2 NVIDIA cards on PCI and nvidia-smi lists 1."),
        ("pascal", "cards of Pascal (host pascal) are served up to branch 580: set driver_version to one of 580."),
        ("conflict", "Host conflict has its driver from the GPU operator (/run/nvidia/driver): set driver_state to"),
        ("loaded-never", "Host loaded-never has driver 570.133.20 loaded"),
        ("gentoo", "Host gentoo runs gentoo 2.17, which role driver has no packages for"),
        ("other-family", "Host other-family lacks"),
    ],
)
def test_what_is_refused_is_told_in_a_sentence_and_nothing_was_begun(result, name, words):
    assert words in failure(result, name)
    if name not in ("external-broken", "wrong-cards"):
        assert INSTALL not in tasks(result, name)


def test_a_node_that_pods_may_use_is_handed_to_maintenance_and_not_touched(result):
    assert failure(result, "loaded-drain") is None and INSTALL not in tasks(result, "loaded-drain")
    assert tasks(result, "loaded-drain", play=1)["Groups"]["msg"] == ["kubegpu_maintenance"]
    assert tasks(result, "converged", play=1)["Groups"]["msg"] == ["ungrouped"]


def test_in_maintenance_it_is_installed_and_the_old_module_is_no_failure(result):
    assert INSTALL in tasks(result, "inside") and failure(result, "inside") is None


def test_what_is_worth_knowing_is_said(result):
    assert "isn't known here" in tasks(result, "unknown-card")["Say what is worth knowing"]["msg"]


def test_a_bare_node_is_told_all_that_would_be_made_and_fails_nowhere(result):
    assert failure(result, "fresh") is None and result["stats"]["fresh"]["changed"] == 1
    made = [one["after_header"] for one in tasks(result, "fresh")[INSTALL]["diff"]]
    assert made == [
        "/etc/apt/keyrings/kubegpu-cuda.asc",
        "/etc/apt/sources.list.d/kubegpu-cuda.sources",
        "/etc/apt/preferences.d/kubegpu-driver.pref",
        "/etc/apt/apt.conf.d/90kubegpu-driver",
        "package nvidia-driver-cuda",
        "package nvidia-persistenced",
        "package nvidia-kernel-open-dkms",
    ]


def test_a_file_that_is_not_there_is_told_before_the_node_is_touched(result):
    assert failure(result, "runfile-fresh") == "file: /nowhere/x.run can't be read: No such file or directory"


def test_absent_takes_out_the_set_and_the_headers(result):
    # In check mode the module looks at this machine, which has no such driver: what it would do is the plan's business.
    assert failure(result, "going") is None
    removals = tasks(result, "going")["Remove what apt installed"]["results"]
    assert [one["item"]["name"] for one in removals] == ["driver", "driver-headers"]
    assert {"nvidia-driver-cuda", "nvidia-kernel-dkms", "nvidia-kernel-open-dkms"} <= set(
        removals[0]["item"]["packages"]
    )
