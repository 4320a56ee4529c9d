# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's .run file: run once, with its checksum, and not beside packages; real files and a made-up installer."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.task import Task
from ansible.template import Templar
from ansible_collections.kubegpu.share.plugins.action import driver_runfile
from ansible_collections.kubegpu.share.plugins.module_utils import _runfile as runfile
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._runfile_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem

VERSION = "580.95.05"

INSTALLER = """\
#!/bin/sh
# Does what NVIDIA's installer leaves behind, and notes how it was called.
echo "$0 $*" >> {root}/calls
if [ -e {root}/broken ]; then
    echo 'ERROR: Unable to find the kernel source tree.' > {root}/var/log/nvidia-installer.log
    exit 1
fi
mkdir -p {root}/usr/bin {root}/usr/lib64
rm -f {root}/usr/lib64/libnvidia-ml.so.*
: > {root}/usr/lib64/libnvidia-ml.so.{version}
cat > {root}/usr/bin/nvidia-uninstall <<'END'
#!/bin/sh
echo "uninstall $*" >> {root}/calls
rm -f {root}/usr/bin/nvidia-uninstall {root}/usr/lib64/libnvidia-ml.so.*
END
chmod +x {root}/usr/bin/nvidia-uninstall
"""


class Machine:
    """A tree with a package database, and commands that really run, the node's own ones replaced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("var/log", "var/lib/dpkg", "tmp"):
            (root / folder).mkdir(parents=True)
        (root / "var/lib/dpkg/status").touch()
        self.packages: list[str] = []
        self.modules_busy = False
        self.ran: list[str] = []
        self.system = RealSystem(str(root), self.run_command)

    def run_command(self, argv, data=None, environ_update=None):
        command = list(argv)[3:]
        self.ran.append(" ".join(command))
        if command[0] == "dpkg-query":
            return 0, "".join(f"ii \t{name}\n" for name in self.packages), ""
        if command[0] == "systemctl":
            return 0, "", ""
        if command[0] == "modprobe":
            if self.modules_busy:
                return 1, "", "modprobe: FATAL: Module nvidia is in use."
            for name in command[2:]:
                (self.root / "sys/module" / name).rmdir()
            return 0, "", ""
        if command[0].startswith("/usr/bin/"):
            command[0] = str(self.root) + command[0]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def file(self, version: str = VERSION) -> tuple[str, str]:
        path = self.root / "tmp" / f"{version}.run"
        path.write_text(INSTALLER.format(root=self.root, version=version))
        return str(path), hashlib.sha256(path.read_bytes()).hexdigest()

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def load(self, *modules: str) -> None:
        for name in modules:
            (self.root / "sys/module" / name).mkdir(parents=True)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def params(path, sha256, version=VERSION, **more):
    return {
        "state": "present",
        "file": "x.run",
        "sha256": sha256,
        "version": version,
        "flavour": "open",
        "remote_path": path,
        **more,
    }


def test_it_installs_once_and_names_everything_in_one_command_line(machine):
    path, sha256 = machine.file()
    done = work(params(path, sha256), False, machine.system)
    assert done["changed"] and done["diff"][0]["after"] == "version: 580.95.05\nmodule: open\n"
    folder = Path(path).parent
    assert machine.calls == [
        f"{path} --silent --dkms --no-x-check --no-nouveau-check --tmpdir={folder} --kernel-module-type=open"
    ]
    again = work(params(path, sha256), False, machine.system)
    assert again == {"changed": False, "diff": []} and len(machine.calls) == 1


def test_another_version_takes_its_place_and_absent_uses_what_it_brought(machine):
    work(params(*machine.file()), False, machine.system)
    done = work(params(*machine.file("590.48.01"), version="590.48.01"), False, machine.system)
    assert done["diff"][0]["before"] == "version: 580.95.05\n" and len(machine.calls) == 2
    gone = work({"state": "absent", "remote_path": None}, False, machine.system)
    assert gone["changed"] and machine.calls[-1] == "uninstall --silent"
    assert work({"state": "absent", "remote_path": None}, False, machine.system)["changed"] is False


def test_check_mode_and_a_run_without_the_file_only_tell(machine):
    path, sha256 = machine.file()
    assert work(params(path, sha256), True, machine.system)["changed"]
    assert work(params(None, sha256), False, machine.system)["changed"]
    assert machine.calls == []


def test_a_file_with_another_checksum_is_never_run(machine):
    path, _sha256 = machine.file()
    with pytest.raises(BadInput, match=r"sha256: the file has [0-9a-f]{64}, and sha256 says bbbb"):
        work(params(path, "b" * 64), False, machine.system)
    assert machine.calls == []


def test_packages_of_the_driver_are_not_overwritten(machine):
    path, sha256 = machine.file()
    machine.packages = ["bash", "nvidia-container-toolkit", "libnvidia-container1"]
    assert work(params(path, sha256), True, machine.system)["changed"]
    machine.packages += ["nvidia-driver-cuda", "libnvidia-ml1"]
    with pytest.raises(BadInput, match=r"packages are installed \(libnvidia-ml1, nvidia-driver-cuda\)"):
        work(params(path, sha256), False, machine.system)
    assert machine.calls == []


def test_a_failure_is_told_in_the_installers_words(machine):
    path, sha256 = machine.file()
    (machine.root / "broken").touch()
    with pytest.raises(ShareError, match=r"NVIDIA's installer failed: Unable to find the kernel source tree."):
        work(params(path, sha256), False, machine.system)


def test_a_loaded_module_is_unloaded_and_one_in_use_refused(machine):
    path, sha256 = machine.file()
    machine.load("nvidia", "nvidia_uvm")
    machine.modules_busy = True
    with pytest.raises(ShareError, match=r"in use and can't be unloaded: modprobe: FATAL: Module nvidia is in use"):
        work(params(path, sha256), False, machine.system)
    assert machine.calls == []
    machine.modules_busy = False
    assert work(params(path, sha256), False, machine.system)["changed"]
    assert "modprobe -r nvidia_uvm nvidia" in machine.ran


@pytest.mark.parametrize(
    ("version", "flavour", "expected"),
    [
        ("580.95.05", "proprietary", "--kernel-module-type=proprietary"),
        ("560.35.03", "open", "--kernel-module-type=open"),
        ("550.163.01", "open", "-m=kernel-open"),
        ("535.261.03", "proprietary", "-m=kernel"),
        ("470.256.02", "proprietary", "--tmpdir=/t"),
    ],
)
def test_the_flavours_word_follows_the_installers_age(version, flavour, expected):
    argv = runfile.install_command(runfile.Wanted(True, version, flavour), "/t/x.run")
    assert argv[-1] == expected and argv[:3] == ["sh", "/t/x.run", "--silent"]


def test_bad_input_is_named():
    with pytest.raises(BadInput, match=r"flavour: branch 470 has no open module"):
        runfile.install_command(runfile.Wanted(True, "470.256.02", "open"), "/t/x.run")
    with pytest.raises(BadInput, match=r"^version: '580'"):
        runfile.wanted(params("/x", "a" * 64, version="580"))
    with pytest.raises(BadInput, match=r"^sha256: "):
        runfile.wanted(params("/x", "abc"))


# --------------------------------------------------------------------------- the action plugin


def act(monkeypatch, args, executed=None, check=False):
    """Run the action plugin; what it would do to the node is noted."""
    loader = DataLoader()
    task = Task.load({"name": "x", "ansible.builtin.ping": {}}, loader=loader)
    task.args = dict(args)
    task.check_mode = check
    connection = Mock()
    connection._shell.tmpdir = "/tmp"
    connection._shell.join_path = lambda *parts: "/".join(parts)
    action = driver_runfile.ActionModule(
        task=task,
        connection=connection,
        play_context=Mock(),
        loader=loader,
        templar=Templar(loader=loader),
        shared_loader_obj=Mock(),
    )
    noted = []

    def execute(name="driver_runfile", module_args=None, task_vars=None):
        noted.append((name, module_args))
        return dict(executed or {"changed": True})

    monkeypatch.setattr(action, "_execute_module", execute)
    monkeypatch.setattr(action, "_make_tmp_path", lambda: "/node/tmp")
    monkeypatch.setattr(action, "_transfer_file", lambda local, remote: noted.append(("transfer", remote)))
    monkeypatch.setattr(action, "_fixup_perms2", lambda paths: None)
    monkeypatch.setattr(action, "_remove_tmp_path", lambda *_arguments: None)
    return action.run(task_vars={}), noted


def observed(version="", packages=(), others=("runfile",)):
    return {"driver": {"library_version": version, "others": list(others)}, "packages": {name: {} for name in packages}}


def wishes(path, sha256, **more):
    return {"file": str(path), "sha256": sha256, "version": VERSION, **more}


@pytest.fixture
def local(tmp_path):
    path = tmp_path / "driver.run"
    path.write_text("installer")
    return path, hashlib.sha256(b"installer").hexdigest()


def test_without_drift_nothing_is_executed_and_nothing_read(monkeypatch):
    result, noted = act(monkeypatch, wishes("/nowhere.run", "a" * 64, observed=observed(VERSION)))
    assert noted == [] and result["changed"] is False
    result, noted = act(monkeypatch, {"state": "absent", "observed": observed(others=())})
    assert noted == [] and result["changed"] is False


def test_with_drift_the_file_travels_once(monkeypatch, local):
    _result, noted = act(monkeypatch, wishes(*local, observed=observed("570.133.20")))
    assert [name for name, _args in noted] == ["driver_runfile", "transfer", "driver_runfile"]
    assert noted[1][1] == "/node/tmp/driver.run" and noted[2][1]["remote_path"] == "/node/tmp/driver.run"
    assert "observed" not in noted[0][1]


def test_in_check_mode_and_where_the_node_knows_better_it_stays_here(monkeypatch, local):
    result, noted = act(monkeypatch, wishes(*local, observed=observed(others=())), check=True)
    assert result["changed"] and len(noted) == 1
    result, noted = act(monkeypatch, wishes(*local), executed={"changed": False})
    assert not result["changed"] and len(noted) == 1


def test_an_address_is_fetched_by_the_node_with_its_checksum(monkeypatch):
    _result, noted = act(monkeypatch, wishes("https://example.org/x.run", "A" * 64))
    assert noted[1] == (
        "ansible.builtin.get_url",
        {"url": "https://example.org/x.run", "dest": "/node/tmp/driver.run", "checksum": "sha256:" + "a" * 64},
    )
    assert noted[2][1]["remote_path"] == "/node/tmp/driver.run"


def test_what_is_wrong_here_is_told_before_the_node_is_touched(monkeypatch, local):
    path, _sha256 = local
    for args, words in (
        (wishes(path, "b" * 64), "has SHA-256"),
        (wishes("/nowhere.run", "b" * 64), "can't be read"),
        (wishes(*local, observed=observed(packages=["nvidia-kernel-dkms"])), "the driver's packages are installed"),
    ):
        result, noted = act(monkeypatch, args)
        assert noted == [] and result["failed"] and words in result["msg"]
