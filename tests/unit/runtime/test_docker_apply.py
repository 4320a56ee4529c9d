# SPDX-License-Identifier: GPL-3.0-or-later
"""The update of a simulated Docker: file, validation, reload or restart, rollback; and its observation."""

from __future__ import annotations

import json
import typing as t
from collections.abc import Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import docker as runtime_docker
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.common import RuntimePlan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.docker_apply import DockerEngine
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.docker_plan import make_plan
from fake_clock import FakeClock
from fake_node import FakeNode
from runtime_kit import ABSENT, BINARY, PRESENT, REPLACING, kill_steps, show_unit, update
from runtime_kit import DAEMON_JSON as PATH

OLD = '{\n  "labels": ["a=b"],\n  "proxies": {"http-proxy": "http://me:hunter2@p:1"}\n}\n'


class Dockerd:
    """A simulated dockerd: a reload keeps settings that the file doesn't name, a restart resets them."""

    def __init__(self, node: FakeNode, version: str) -> None:
        self.node, self.version = node, version
        self.pid = 77
        self.default, self.runtimes = "runc", {"runc": "runc"}
        self.containers, self.live_restore = 2, False
        self.ignores_reloads = False
        # Whether it refuses to start with a text.
        self.rejects: t.Callable[[str], bool] = lambda text: False

    def _file(self) -> dict[str, t.Any]:
        return t.cast("dict[str, t.Any]", json.loads(self.node.read(PATH) or "{}"))

    def _take(self, tree: dict[str, t.Any]) -> None:
        if tree.get("runtimes") is not None:
            self.runtimes = {"runc": "runc", **{name: runtime["path"] for name, runtime in tree["runtimes"].items()}}
        self.default = tree.get("default-runtime") or self.default

    def hangup(self) -> None:
        if self.ignores_reloads or self.rejects(self.node.read(PATH) or ""):
            return
        tree = self._file()
        assert tree.get("runtimes", {}) is not None, "a null kills dockerd 20.10 in a reload"
        self._take(tree)

    def restart(self) -> int:
        if self.rejects(self.node.read(PATH) or ""):
            self.pid = 0
            return 1
        self.pid, self.default, self.runtimes = 78, "runc", {"runc": "runc"}
        self._take(self._file())
        return 0

    def info(self) -> str:
        if not self.pid:
            return '{"ServerVersion": ""}'
        found = {"ServerVersion": self.version, "DefaultRuntime": self.default, "CgroupDriver": "systemd"}
        found |= {"LiveRestoreEnabled": self.live_restore, "ContainersRunning": self.containers}
        return json.dumps({**found, "Runtimes": {name: {"path": path} for name, path in self.runtimes.items()}})


def node(text: str | None = OLD, version: str = "24.0.9") -> tuple[FakeNode, Dockerd]:
    made = FakeNode({BINARY: ""})
    if text is not None:
        made.files[PATH] = text
        made.modes[PATH] = 0o640
        made.owners[PATH] = "0:5"
    daemon = Dockerd(made, version)

    def systemctl(argv: Sequence[str]) -> Done:
        if argv[1] == "show":
            return show_unit(daemon.pid, "/usr/bin/dockerd -H fd://")
        return Done(daemon.restart() if argv[1] == "restart" else 0, "", "")

    def kill(argv: Sequence[str]) -> Done:
        daemon.hangup()
        return Done(0, "", "")

    made.answers = {
        "systemctl": systemctl,
        "kill": kill,
        "docker": lambda argv: Done(0, daemon.info(), ""),
        "dockerd": lambda argv: Done(0, f"Docker version {version}, build x" if "--version" in argv else "", ""),
        "journalctl": lambda argv: Done(0, "unable to configure the Docker daemon: no\n", ""),
    }
    return made, daemon


def run(made: FakeNode, wanted: Options) -> dict[str, t.Any]:
    planned = make_plan(wanted, observe(made))
    return {"changed": False} if planned.plan.empty else apply(made, wanted, planned)


def observe(made: FakeNode) -> dict[str, t.Any]:
    observed = runtime_docker.observe(made)
    assert observed is not None and "hunter2" not in json.dumps(observed)
    return observed


def apply(made: FakeNode, wanted: Options, planned: RuntimePlan) -> dict[str, t.Any]:
    clock = FakeClock()
    docker = DockerEngine(made, wanted, planned.restart, clock.sleep, clock.now)
    return update(made, docker, planned.files, clock)


def restarts(made: FakeNode) -> int:
    return made.log.count("systemctl restart docker.service")


def test_a_reload_stops_no_container() -> None:
    made, daemon = node()
    done = run(made, PRESENT)
    assert done == {"effective": {"default_runtime": "nvidia", "runtimes": daemon.runtimes}, "restarted": False}
    assert restarts(made) == 0 and "kill -HUP 77" in made.log and daemon.pid == 77
    assert "hunter2" in made.files[PATH] and made.modes[PATH] == 0o640 and made.owners[PATH] == "0:5"
    assert made.modes[runtime_docker.BACKUP_PATH] == 0o600 and runtime_docker.PENDING_PATH not in made.files
    assert json.loads(made.files[runtime_docker.BACKUP_PATH])["text"] == OLD
    assert run(made, PRESENT) == {"changed": False}
    assert run(made, ABSENT)["restarted"] is False
    assert made.files == {PATH: OLD, BINARY: ""} and (daemon.default, daemon.runtimes) == ("runc", {"runc": "runc"})
    assert made.modes[PATH] == 0o640 and run(made, ABSENT) == {"changed": False}
    assert restarts(made) == 0 and not any("daemon-reload" in one for one in made.log)


@pytest.mark.parametrize(
    "text", [None, '{"runtimes": null}\n', '{"default-runtime": "kata", "runtimes": {"kata": {"path": "/k"}}}']
)
def test_removal_restores_the_bytes(text: str | None) -> None:
    made, daemon = node(text)
    daemon.restart()
    before = daemon.default, daemon.runtimes
    run(made, REPLACING)
    assert daemon.default == "nvidia"
    run(made, ABSENT)
    assert made.files.get(PATH) == text and (daemon.default, daemon.runtimes) == before
    assert runtime_docker.BACKUP_PATH not in made.files and restarts(made) == 0


def test_a_reload_without_effect_doesnt_stop_containers() -> None:
    made, daemon = node()
    daemon.ignores_reloads = True
    with pytest.raises(NotInEffect, match="a restart would stop 2 running container"):
        run(made, PRESENT)
    assert made.files == {PATH: OLD, BINARY: ""} and restarts(made) == 0
    daemon.containers = 0
    assert run(made, PRESENT)["restarted"] is True and daemon.default == "nvidia"


def test_a_daemon_that_fails_to_start_is_rolled_back() -> None:
    made, daemon = node(version="27.3.1")
    daemon.containers = 0
    daemon.rejects = lambda text: "nvidia" in text
    with pytest.raises(NotInEffect, match=r"rolled back, it runs with the old one: unable to"):
        run(made, PRESENT)
    assert made.files == {PATH: OLD, BINARY: ""} and made.modes[PATH] == 0o640
    assert daemon.pid and daemon.default == "runc" and restarts(made) == 2


def test_a_rejected_configuration_is_rolled_back_without_a_restart() -> None:
    made, daemon = node()
    dockerd, refused = made.answers["dockerd"], Done(1, "", "unable to configure: no\n")
    made.answers["dockerd"] = lambda argv: refused if "nvidia" in made.files[PATH] else dockerd(argv)
    with pytest.raises(NotInEffect, match="rejects the new configuration; it was rolled back: unable to configure: no"):
        run(made, PRESENT)
    assert made.files == {PATH: OLD, BINARY: ""} and restarts(made) == 0 and daemon.default == "runc"


@pytest.mark.long
@pytest.mark.parametrize("text", [OLD, None])
@pytest.mark.parametrize("wanted", [PRESENT, ABSENT], ids=["present", "absent"])
def test_the_run_after_a_killed_one_finishes(text: str | None, wanted: Options) -> None:
    def start() -> tuple[FakeNode, Dockerd]:
        made, daemon = node(text)
        if not wanted.present:
            run(made, PRESENT)
        return made, daemon

    for made, daemon in kill_steps(start, lambda made: run(made, wanted), 15):
        run(made, wanted)
        if wanted.present:
            assert daemon.default == "nvidia"
        assert run(made, wanted) == {"changed": False} and runtime_docker.PENDING_PATH not in made.files
        run(made, ABSENT)
        assert made.files == node(text)[0].files
        assert (daemon.default, daemon.runtimes) == ("runc", {"runc": "runc"}) and restarts(made) == 0


@pytest.mark.long
def test_a_removal_that_was_killed_and_revoked_keeps_the_users_layout() -> None:
    def start() -> tuple[FakeNode, Dockerd]:
        made, daemon = node()
        run(made, PRESENT)
        return made, daemon

    with_ours = start()[0].files[PATH]
    for made, daemon in kill_steps(start, lambda made: run(made, ABSENT)):
        run(made, PRESENT)
        assert made.files[PATH] == with_ours and daemon.default == "nvidia"
        run(made, ABSENT)
        assert made.files == {PATH: OLD, BINARY: ""}


@pytest.mark.parametrize("theirs", ['{"data-root": "/mnt/docker"}', '{\n  "data-root": "/mnt/docker"\n}\n'])
def test_a_file_that_the_user_replaced_is_kept(theirs: str) -> None:
    made, daemon = node()
    run(made, PRESENT)
    made.files[PATH] = theirs
    daemon.restart()
    run(made, PRESENT)
    tree = json.loads(made.files[PATH])
    assert tree["data-root"] == "/mnt/docker" and tree["default-runtime"] == "nvidia" and "labels" not in tree
    assert run(made, PRESENT) == {"changed": False} and json.loads(made.files[PATH]) == tree
    run(made, ABSENT)
    assert made.files == {PATH: theirs, BINARY: ""}


def test_containers_started_since_the_plan_are_not_stopped() -> None:
    made, daemon = node(version="27.3.1")
    daemon.containers = 0
    planned = make_plan(PRESENT, observe(made))
    assert planned.restart
    daemon.containers = 1
    done = apply(made, PRESENT, planned)
    assert done["restarted"] is False and restarts(made) == 0 and daemon.default == "nvidia"


def test_a_docker_that_doesnt_answer_is_not_restarted() -> None:
    made, _daemon = node()
    planned = make_plan(PRESENT, observe(made))
    made.answers["docker"] = lambda argv: Done(124, "", "")
    with pytest.raises(NotInEffect, match="doesn't answer, and a restart would stop all its containers"):
        apply(made, PRESENT, planned)
    assert made.files[PATH] == OLD and restarts(made) == 0


def test_a_flag_for_the_default_runtime_is_never_repeated_in_the_file() -> None:
    made, daemon = node()
    daemon.default = "runc-too"
    daemon.rejects = lambda text: "default-runtime" in text
    show = made.answers["systemctl"]

    def systemctl(argv: Sequence[str]) -> Done:
        done = show(argv)
        return Done(done.rc, done.out.replace("-H fd://", "-H fd:// --default-runtime runc-too"), "")

    made.answers["systemctl"] = systemctl
    available = Options(True, False, BINARY, False, False)
    run(made, available)
    assert daemon.runtimes["nvidia"] == BINARY and run(made, available) == {"changed": False}
    run(made, ABSENT)
    assert made.files == {PATH: OLD, BINARY: ""} and daemon.runtimes == {"runc": "runc"} and restarts(made) == 0


# --------------------------------------------------------------------------- observation


def test_observe() -> None:
    made, _daemon = node()
    seen = observe(made)
    assert (seen["version"], seen["config_path"]) == ("24.0.9", PATH)
    assert seen["service_active"] and seen["answers"]
    assert (seen["default_runtime"], seen["cgroup_driver"], seen["containers"]) == ("runc", "systemd", 2)
    assert (seen["was"], seen["ours"], seen["pending"], seen["flags"]) == (None, False, False, {})


def test_flags_are_reported_with_their_file() -> None:
    made, daemon = node()
    drop_in = "/etc/systemd/system/docker.service.d/gpu.conf"
    made.files[drop_in] = "[Service]\nExecStart=\nExecStart=/usr/bin/dockerd --default-runtime runc\n"
    command = (
        "/usr/bin/dockerd --config-file=/srv/d.json --default-runtime runc --add-runtime=a=/a -H unix:///run/d.sock"
    )
    paths = {"FragmentPath": "/lib/systemd/system/docker.service", "DropInPaths": drop_in}
    made.answers["systemctl"] = lambda _argv: show_unit(daemon.pid, command, **paths)
    seen = observe(made)
    assert seen["config_path"] == "/srv/d.json"
    assert seen["flags"]["default-runtime"] == {"values": ["runc"], "file": drop_in}
    assert seen["flags"]["add-runtime"]["values"] == ["a=/a"]
    assert any(one.startswith("docker --host unix:///run/d.sock info") for one in made.log)


def test_flags_in_variables_are_read_from_the_process() -> None:
    made, daemon = node()
    made.files["/etc/sysconfig/docker"] = "OPTIONS='--default-runtime=crun'\n"
    made.files[f"/proc/{daemon.pid}/cmdline"] = "/usr/bin/dockerd\0--default-runtime=crun\0"
    files = "/etc/sysconfig/docker (ignore_errors=yes)"
    made.answers["systemctl"] = lambda _argv: show_unit(daemon.pid, "/usr/bin/dockerd $OPTIONS", EnvironmentFiles=files)
    assert observe(made)["flags"]["default-runtime"] == {"values": ["crun"], "file": "/etc/sysconfig/docker"}


@pytest.mark.parametrize(
    ("text", "socket"),
    [
        ('{"hosts": ["tcp://0.0.0.0:1", "unix:///srv/d.sock"]}', "unix:///srv/d.sock"),
        ("{", runtime_docker.DEFAULT_SOCKET),
    ],
)
def test_the_socket_of_daemon_json_is_queried(text: str, socket: str) -> None:
    made, _daemon = node(text)
    made.answers["systemctl"] = lambda _argv: show_unit(77, "/usr/bin/dockerd")
    observe(made)
    assert any(one.startswith(f"docker --host {socket} info") for one in made.log)


def test_a_stopped_docker_is_not_queried() -> None:
    made, daemon = node()
    daemon.pid = 0
    assert not observe(made)["answers"] and not any(one.startswith("docker ") for one in made.log)


def test_a_rootless_docker() -> None:
    made = FakeNode({}, {name: lambda argv: Done(127, "", "") for name in ("systemctl", "dockerd")})
    made.files["/run/user/1000/docker.sock"] = ""
    seen = runtime_docker.observe(made)
    assert seen is not None and seen["rootless"] == "/run/user/1000/docker.sock"
