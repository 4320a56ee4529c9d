# SPDX-License-Identifier: GPL-3.0-or-later
"""driver_runfile: executed once, with its checksum, and not beside packages; real files and a scripted installer."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import action_plugins
import pytest
from ansible_collections.kubegpu.share.plugins.action import driver_runfile
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._driver import runfile
from ansible_collections.kubegpu.share.plugins.module_utils._driver.runfile_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from limited import without_limit

VERSION = "580.95.05"

INSTALLER = """\
#!/bin/sh
# Leaves the files of NVIDIA's installer, and records its arguments.
echo "$0 $*" >> {root}/calls
if [ -e {root}/broken ]; then
    echo 'ERROR: Unable to find the kernel source tree.' > {root}/var/log/nvidia-installer.log
    exit 1
fi
mkdir -p {root}/usr/bin {root}/usr/lib64
rm -f {root}/usr/lib64/libnvidia-ml.so.*
: > {root}/usr/lib64/libnvidia-ml.so.{version}
ln -s libnvidia-ml.so.{version} {root}/usr/lib64/libnvidia-ml.so.1
cat > {root}/usr/bin/nvidia-uninstall <<'END'
#!/bin/sh
echo "uninstall $*" >> {root}/calls
rm -f {root}/usr/bin/nvidia-uninstall {root}/usr/lib64/libnvidia-ml.so.*
END
chmod +x {root}/usr/bin/nvidia-uninstall
"""


class Machine:
    """A tree with a package database, and real commands except for the node's own."""

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
        command = without_limit(argv)
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
        if command[0] in ("mkdir", "rmdir"):
            command[-1] = str(self.root) + command[-1]
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
    given = {"state": "present", "file": "x.run", "sha256": sha256, "version": version, "flavour": "open"}
    return {**given, "remote_path": path, **more}


def run(machine, check=False, **more):
    """Run the module with an installer that is on the node already."""
    path, sha256 = machine.file(more.get("version", VERSION))
    return work({**params(path, sha256), **more}, check, machine.system)


def test_installer_runs_once_with_one_command_line(machine):
    done, folder = run(machine), machine.root / "tmp"
    assert done["changed"] and done["diff"][0]["after"] == "version: 580.95.05\nmodule: open\n"
    options = f"--silent --dkms --no-x-check --no-nouveau-check --tmpdir={folder} --kernel-module-type=open"
    assert machine.calls == [f"{folder}/{VERSION}.run {options}"]
    again = run(machine)
    assert again == {"changed": False, "diff": []} and len(machine.calls) == 1


def test_other_version_is_installed_over_it_and_absent_runs_the_uninstaller(machine):
    run(machine)
    done = run(machine, version="590.48.01")
    assert done["diff"][0]["before"] == "version: 580.95.05\n" and len(machine.calls) == 2
    gone = run(machine, state="absent", remote_path=None)
    assert gone["changed"] and machine.calls[-1] == "uninstall --silent"
    assert run(machine, state="absent", remote_path=None)["changed"] is False


def test_a_driver_that_somebody_else_installed_stays(machine):
    path, _sha256 = machine.file()
    subprocess.run(["sh", path], check=True)
    assert not run(machine)["changed"] and not run(machine, state="absent", remote_path=None)["changed"]
    assert (machine.root / "usr/bin/nvidia-uninstall").exists()


@pytest.mark.parametrize("state", ["present", "absent"])
def test_what_a_killed_installer_left_is_completed_or_removed(machine, state):
    """It was killed before the kernel module was built; its library and its uninstaller are there."""

    def killed(argv, data=None, environ_update=None):
        done = install(argv, data, environ_update)
        if "--silent" in argv:
            raise KeyboardInterrupt
        return done

    install, machine.system._run_command = machine.run_command, killed
    with pytest.raises(KeyboardInterrupt):
        run(machine)
    machine.system._run_command = install
    again = run(machine, state=state, remote_path=None if state == "absent" else f"{machine.root}/tmp/{VERSION}.run")
    assert again["changed"] and again["diff"][0]["before"] == "version: 580.95.05\ninstalled in part\n"
    assert machine.calls[-1].startswith("uninstall" if state == "absent" else str(machine.root))
    assert not run(machine, state=state)["changed"]
    assert (machine.root / "var/lib/kubegpu-share").exists() == (state == "present")


def test_nothing_runs_in_check_mode_without_the_file_with_another_checksum_or_beside_packages(machine):
    machine.packages = ["bash", "nvidia-container-toolkit", "libnvidia-container1"]
    assert run(machine, check=True)["changed"] and run(machine, remote_path=None)["changed"]
    with pytest.raises(BadInput, match=r"sha256: the file has [0-9a-f]{64}, and sha256 is bbbb"):
        run(machine, sha256="b" * 64)
    machine.packages += ["nvidia-driver-cuda", "libnvidia-ml1"]
    with pytest.raises(BadInput, match=r"packages are installed \(libnvidia-ml1, nvidia-driver-cuda\)"):
        run(machine)
    assert machine.calls == []


def test_a_failure_reports_the_installers_error(machine):
    (machine.root / "broken").touch()
    with pytest.raises(ShareError, match=r"NVIDIA's installer failed: Unable to find the kernel source tree."):
        run(machine)


def test_a_loaded_module_is_unloaded_and_one_in_use_refused(machine):
    machine.load("nvidia", "nvidia_uvm")
    machine.modules_busy = True
    with pytest.raises(ShareError, match=r"in use and can't be unloaded: modprobe: FATAL: Module nvidia is in use"):
        run(machine)
    assert machine.calls == []
    machine.modules_busy = False
    assert run(machine)["changed"]
    assert "modprobe -r nvidia_uvm nvidia" in machine.ran


@pytest.mark.parametrize(
    ("version", "flavour", "expected"),
    [
        ("560.35.03", "open", "--kernel-module-type=open"),
        ("550.163.01", "open", "-m=kernel-open"),
        ("535.261.03", "proprietary", "-m=kernel"),
        ("470.256.02", "proprietary", "--tmpdir=/t"),
    ],
)
def test_the_flavours_option_depends_on_the_branch(version, flavour, expected):
    argv = runfile.install_command(runfile.Options(True, version, flavour), "/t/x.run")
    assert argv[-1] == expected and argv[:3] == ["sh", "/t/x.run", "--silent"]


def test_invalid_input_is_refused():
    with pytest.raises(BadInput, match=r"flavour: branch 470 has no open module"):
        runfile.install_command(runfile.Options(True, "470.256.02", "open"), "/t/x.run")
    with pytest.raises(BadInput, match=r"^version: '580'"):
        runfile.options(params("/x", "a" * 64, version="580"))
    with pytest.raises(BadInput, match=r"^sha256: "):
        runfile.options(params("/x", "abc"))


# --------------------------------------------------------------------------- the action plugin


def act(monkeypatch, args, executed=None, check=False):
    """Run the action plugin and record what it does on the node."""
    action = action_plugins.load(driver_runfile, args, check, tmpdir=None)
    calls = []

    def execute(name="driver_runfile", module_args=None, task_vars=None):
        calls.append((name, module_args))
        return dict(executed or {"changed": True})

    monkeypatch.setattr(action, "_execute_module", execute)
    monkeypatch.setattr(action, "_make_tmp_path", lambda: "/node/tmp")
    monkeypatch.setattr(action, "_transfer_file", lambda local, remote: calls.append(("transfer", remote)))
    monkeypatch.setattr(action, "_fixup_perms2", lambda paths: None)
    monkeypatch.setattr(action, "_remove_tmp_path", lambda *_paths: None)
    return action.run(task_vars={}), calls


def observed(version="", packages=(), others=("runfile",)):
    return {"driver": {"library_version": version, "others": list(others)}, "packages": {name: {} for name in packages}}


def arguments(path, sha256, **more):
    return {"file": str(path), "sha256": sha256, "version": VERSION, **more}


@pytest.fixture
def local(tmp_path):
    path = tmp_path / "driver.run"
    path.write_text("installer")
    return path, hashlib.sha256(b"installer").hexdigest()


def test_without_drift_nothing_is_executed_or_read(monkeypatch):
    result, calls = act(monkeypatch, arguments("/nowhere.run", "a" * 64, observed=observed(VERSION)))
    assert calls == [] and result["changed"] is False
    result, calls = act(monkeypatch, {"state": "absent", "observed": observed(others=())})
    assert calls == [] and result["changed"] is False


def test_with_drift_the_file_is_copied_once(monkeypatch, local):
    _result, calls = act(monkeypatch, arguments(*local, observed=observed("570.133.20")))
    assert [name for name, _args in calls] == ["driver_runfile", "transfer", "driver_runfile"]
    assert calls[1][1] == "/node/tmp/driver.run" and calls[2][1]["remote_path"] == "/node/tmp/driver.run"
    assert "observed" not in calls[0][1]


@pytest.mark.parametrize("given", ["driver.run", "~/driver.run"])
def test_a_file_of_the_users_folder_is_found(given, monkeypatch, local):
    path, sha256 = local
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("HOME", str(path.parent))
    _result, calls = act(monkeypatch, arguments(given, sha256))
    assert calls[0][1]["file"] == str(path)


def test_the_file_is_not_copied_in_check_mode_or_without_drift_on_the_node(monkeypatch, local):
    result, calls = act(monkeypatch, arguments(*local, observed=observed(others=())), check=True)
    assert result["changed"] and len(calls) == 1
    result, calls = act(monkeypatch, arguments(*local), executed={"changed": False})
    assert not result["changed"] and len(calls) == 1


def test_the_node_downloads_a_url_with_its_checksum(monkeypatch):
    _result, calls = act(monkeypatch, arguments("https://example.org/x.run", "A" * 64))
    assert calls[1] == (
        "ansible.builtin.get_url",
        {"url": "https://example.org/x.run", "dest": "/node/tmp/driver.run", "checksum": "sha256:" + "a" * 64},
    )
    assert calls[2][1]["remote_path"] == "/node/tmp/driver.run"


def test_an_invalid_file_fails_before_the_node_is_changed(monkeypatch, local):
    path, _sha256 = local
    for args, message in (
        (arguments(path, "b" * 64), "has SHA-256"),
        (arguments("/nowhere.run", "b" * 64), "can't be read"),
        (arguments(*local, observed=observed(packages=["nvidia-kernel-dkms"])), "the driver's packages are installed"),
    ):
        result, calls = act(monkeypatch, args)
        assert calls == [] and result["failed"] and message in result["msg"]
