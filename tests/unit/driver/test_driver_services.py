# SPDX-License-Identifier: GPL-3.0-or-later
"""The persistence daemon of role driver after runs that were killed between two steps; a stand-in records systemctl."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._driver import facts
from ansible_runs import ansible
from node_fakes import FakeSystem

ROOT = Path(__file__).resolve().parents[3]
OVERRIDE = "[Service]\nExecStart=\n"
DAEMON = "/usr/bin/nvidia-persistenced"
SYSTEMCTL = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/log"
case "$*" in
"show "*) printf 'Id=nvidia-persistenced.service\\nLoadState=loaded\\nActiveState=active\\nUnitFileState=static\\n' ;;
is-enabled*) echo static ;;
is-active*) echo active ;;
esac
"""


NOTHING = {
    "repositories": [],
    "packages": [],
    "streams": [],
    "hold_also": [],
    "build": [],
    "services": [],
    "modules": [],
}
FACTS = {
    "services": {"nvidia-persistenced": {"active": True, "enabled": False}},
    "kernel": {"installed": []},
    "distribution": {"family": "debian", "arch": "amd64"},
    "packages": {},
    "apt": {"files": {}, "keys": {}, "sources": [], "interrupted": False, "unfinished": []},
    "rpm": None,
}


class Machine:
    """A host of the play, whose units are in a folder.

    :param tasks: the file of the role's tasks that the play runs on it.
    :param enables: as ``persistence.enables`` observes it.
    :param others: a drop-in of somebody else is beside the role's.
    :param fabric: what differs from a machine without NVSwitches.
    :param masked: the driver is of a .run file, and the administrator has masked the unit.
    """

    def __init__(
        self,
        folder: Path,
        tasks: str,
        enables: bool | None,
        others: bool = False,
        masked: bool = False,
        fabric: dict[str, object] | None = None,
        **choice: object,
    ) -> None:
        self.folder = folder
        self.units = folder / "units"
        self.drop_in = self.units / "nvidia-persistenced.service.d" / "kubegpu.conf"
        self.link = self.units / "multi-user.target.wants" / "nvidia-persistenced.service"
        for one in (self.link.parent, self.drop_in.parent, folder / "bin"):
            one.mkdir(parents=True)
        for program in ("systemctl", "modprobe"):
            (folder / "bin" / program).write_text(SYSTEMCTL.replace('"$@"', f'{program} "$@"', program != "systemctl"))
            (folder / "bin" / program).chmod(0o755)
        self.drop_in.write_text(OVERRIDE)
        self.listed = tasks == "absent"
        self.link.symlink_to("/lib/systemd/system/nvidia-persistenced.service")
        self.other = self.drop_in.with_name("override.conf")
        if others:
            self.other.touch()
        files = [str(self.link), str(self.drop_in if others else self.drop_in.parent)] if tasks == "absent" else []
        daemon = {"enables": enables, "masked": masked, "files": files}
        driver = {
            "persistence": False,
            "module_version": None,
            "persistence_daemon": daemon,
            "runfile": None,
            "others": [],
            "fabric": {"unloaded": [], "at_boot": False, **(fabric or {})},
        }
        self.modules = folder / "kubegpu-fabric.conf"
        if self.listed:
            self.modules.write_text("mlx5_ib\n")
        self.unit = self.units / "nvidia-persistenced.service"
        services = FACTS["services"]
        if masked:
            choice |= {"manager": "runfile", "persistence_override": ""}
            services = {"kubelet": {"active": True, "enabled": True}}
            self.unit.symlink_to("/dev/null")
        self.variables = {
            "tasks": tasks,
            "choice": {"manager": "apt", "persistence_override": OVERRIDE, **NOTHING, **choice},
            "units": str(self.units),
            "modules": str(self.modules),
            "gpu_node": {**FACTS, "driver": driver, "services": services},
            "path": f"{folder / 'bin'}:{os.environ['PATH']}",
        }

    def ran(self) -> list[str]:
        log = self.folder / "bin" / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.startswith(("daemon-reload", "restart", "modprobe"))]


RESTARTED = ["daemon-reload", "restart nvidia-persistenced"]
HOSTS = {
    "killed-before-restart": ("services", False),
    "not-running": ("services", None),
    "killed-uninstall": ("absent", None),
    "daemon-stays": ("absent", True, True),
    "masked": ("services", None, False, True),
    "nvlink5": ("services", True),
    "nvlink5-loaded": ("services", True),
}


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("services")
    modules = ["mlx5_ib", "ib_umad"]
    ours = {
        "killed-uninstall": {"services": ["nvidia-persistenced"]},
        "nvlink5": {"modules": modules, "fabric": {"unloaded": ["ib_umad"]}},
        "nvlink5-loaded": {"modules": modules, "fabric": {"at_boot": True}},
        "daemon-stays": {"fabric": {"at_boot": True}},
    }
    made = {name: Machine(folder / name, *given, **ours.get(name, {})) for name, given in HOSTS.items()}
    names = {
        "__driver_choice": "{{ choice }}",
        "__driver_unit_folder": "{{ units }}",
        "__driver_modules_file": "{{ modules }}",
    }
    role = {"name": "kubegpu.share.driver"}
    play = {"hosts": "all", "gather_facts": False, "environment": {"PATH": "{{ path }}"}}
    # ansible-core 2.19 takes the first host's file for all hosts where a variable names it.
    play["tasks"] = [
        {
            "name": "Role",
            "ansible.builtin.include_role": {**role, "tasks_from": file},
            "vars": names,
            "when": f"tasks == '{file}'",
        }
        for file in ("services", "absent")
    ]
    (folder / "play.yml").write_text(json.dumps([play]))
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {"all": {"hosts": {name: machine.variables for name, machine in made.items()}, "vars": here}}
    (folder / "hosts.yml").write_text(json.dumps(hosts))
    done = ansible(folder, "ansible-playbook", "-i", "hosts.yml", "play.yml")
    assert done.rc == 0, done.text
    return made


@pytest.mark.parametrize("name", ["killed-before-restart", "not-running"])
def test_a_daemon_without_the_drop_in_is_restarted_by_the_next_run(machines, name):
    assert machines[name].ran() == RESTARTED


def test_a_masked_unit_stays_masked(machines):
    assert machines["masked"].unit.readlink() == Path("/dev/null") and machines["masked"].ran() == []


def test_uninstall_completes_one_that_was_killed_after_the_packages(machines):
    machine = machines["killed-uninstall"]
    assert not machine.drop_in.parent.exists() and not machine.link.is_symlink()
    assert machine.ran() == []


def test_uninstall_restarts_a_daemon_that_stays_and_keeps_drop_ins_of_others(machines):
    machine = machines["daemon-stays"]
    assert machine.ran() == RESTARTED and machine.other.exists()
    assert not machine.drop_in.exists() and not machine.link.is_symlink()
    # Its list of modules at boot goes, too.
    assert machine.listed and not machine.modules.exists()


def test_modules_that_manage_nvswitches_of_nvlink_5_are_loaded_now_and_at_boot(machines):
    assert machines["nvlink5"].modules.read_text() == "mlx5_ib\nib_umad\n"
    assert machines["nvlink5"].ran() == ["modprobe -a ib_umad"]
    # Nothing is left to do, neither for a daemon whose mode somebody has turned off by hand.
    assert not machines["nvlink5-loaded"].modules.exists() and not machines["nvlink5-loaded"].ran()
    assert not machines["not-running"].modules.exists()


PID = {facts.PID_FILE: "42\n"}


@pytest.mark.parametrize(
    ("files", "enables"),
    [
        ({}, None),
        ({**PID, "/proc/42/cmdline": f"{DAEMON}\0--no-persistence-mode\0--verbose\0"}, False),
        ({**PID, "/proc/42/cmdline": f"{DAEMON}\0--verbose\0"}, True),
        ({**PID, "/proc/42/cmdline": "/usr/bin/other\0"}, None),
        (PID, None),
    ],
)
def test_whether_the_daemon_enables_persistence_mode(files, enables):
    assert facts.enables(FakeSystem(files)) is enables


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ({facts.DROP_IN: OVERRIDE}, [facts.FOLDER]),
        ({facts.DROP_IN: OVERRIDE, f"{facts.FOLDER}/mine.conf": ""}, [facts.DROP_IN]),
        (
            {facts.UNIT: f"{facts.MARK}: x\n", facts.WANTED: ""},
            [facts.WANTED, facts.UNIT],
        ),
        ({facts.UNIT: "[Unit]\n", facts.WANTED: ""}, []),
    ],
)
def test_only_files_of_the_role_are_its_own(files, own):
    assert facts.own_files(FakeSystem(files)) == own


def test_a_link_to_dev_null_masks_the_unit():
    system = FakeSystem()
    assert not facts.masked(system)
    system.links[facts.UNIT] = "/dev/null"
    assert facts.masked(system)


def test_the_role_writes_the_paths_that_are_observed():
    unit = (ROOT / "roles/driver/files/nvidia-persistenced.service").read_text()
    assert unit.startswith(facts.MARK)
    assert (
        "__driver_override: nvidia-persistenced.service.d/kubegpu.conf"
        in (ROOT / "roles/driver/vars/main.yml").read_text()
    )
