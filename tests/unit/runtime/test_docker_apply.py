# SPDX-License-Identifier: GPL-3.0-or-later
"""A node's Docker gets its file, proves itself, or gets the old one back; over a made-up node and dockerd."""

from __future__ import annotations

import functools
import json
import typing as t
from collections.abc import Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _docker, _observe_docker
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._docker_apply import Docker
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import replacements
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Apply
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from ansible_collections.kubegpu.share.plugins.plugin_utils._docker_plan import make_plan
from fake_node import Clock, FakeNode, killed

PATH = "/etc/docker/daemon.json"
BINARY = "/usr/bin/nvidia-container-runtime"
PRESENT = Wanted(True, True, BINARY, True, False)
ABSENT = Wanted(False, True, BINARY, True, False)
OLD = '{\n  "labels": ["a=b"],\n  "proxies": {"http-proxy": "http://me:hunter2@p:1"}\n}\n'


class Dockerd:
    """As a real one behaves: a reload keeps what the file doesn't name, a restart begins anew."""

    def __init__(self, node: FakeNode, version: str) -> None:
        self.node, self.version = node, version
        self.pid = 77
        self.default, self.runtimes = "runc", {"runc": "runc"}
        self.containers, self.live_restore = 2, False
        self.deaf = False
        # Texts that it doesn't start with.
        self.hates: t.Callable[[str], bool] = lambda text: False

    def _file(self) -> dict[str, t.Any]:
        return t.cast("dict[str, t.Any]", json.loads(self.node.read(PATH) or "{}"))

    def hangup(self) -> None:
        if self.deaf or self.hates(self.node.read(PATH) or ""):
            return
        tree = self._file()
        assert "runtimes" not in tree or tree["runtimes"] is not None, "a null kills dockerd 20.10 in a reload"
        if "runtimes" in tree:
            self.runtimes = {"runc": "runc", **{name: one["path"] for name, one in tree["runtimes"].items()}}
        self.default = tree.get("default-runtime") or self.default

    def restart(self) -> int:
        tree = self._file()
        if self.hates(self.node.read(PATH) or ""):
            self.pid = 0
            return 1
        self.pid = 78
        self.runtimes = {"runc": "runc", **{name: one["path"] for name, one in (tree.get("runtimes") or {}).items()}}
        self.default = tree.get("default-runtime") or "runc"
        return 0

    def info(self) -> str:
        if not self.pid:
            return '{"ServerVersion": ""}'
        return json.dumps(
            {
                "ServerVersion": self.version,
                "DefaultRuntime": self.default,
                "Runtimes": {name: {"path": path} for name, path in self.runtimes.items()},
                "CgroupDriver": "systemd",
                "LiveRestoreEnabled": self.live_restore,
                "ContainersRunning": self.containers,
            }
        )


def node(text: str | None = OLD, version: str = "24.0.9") -> tuple[FakeNode, Dockerd]:
    made = FakeNode({BINARY: ""})
    if text is not None:
        made.files[PATH] = text
        made.modes[PATH] = 0o640
        made.owners[PATH] = "0:5"
    daemon = Dockerd(made, version)

    def systemctl(argv: Sequence[str]) -> Done:
        if argv[1] == "show":
            state = "active" if daemon.pid else "failed"
            start = "{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// ; }"
            return Done(0, f"LoadState=loaded\nActiveState={state}\nMainPID={daemon.pid}\nExecStart={start}\n", "")
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


def run(made: FakeNode, wanted: Wanted) -> dict[str, t.Any]:
    seen = _observe_docker.observe(made)
    assert seen is not None and "hunter2" not in json.dumps(seen)
    planned = make_plan(wanted, seen)
    if planned.plan.empty:
        return {"changed": False}
    clock = Clock()
    docker = Docker(made, wanted, planned.restart, clock.sleep, clock.now)
    return Apply(made, docker, 10, clock.sleep, clock.now).run(replacements(planned.files))


def restarts(made: FakeNode) -> int:
    return made.log.count("systemctl restart docker.service")


def test_a_reload_does_it_and_stops_nothing() -> None:
    made, daemon = node()
    done = run(made, PRESENT)
    assert done == {"effective": {"default_runtime": "nvidia", "runtimes": daemon.runtimes}, "restarted": False}
    assert restarts(made) == 0 and "kill -HUP 77" in made.log and daemon.pid == 77
    assert "hunter2" in made.files[PATH] and made.modes[PATH] == 0o640 and made.owners[PATH] == "0:5"
    assert made.modes[_docker.WAS_PATH] == 0o600 and json.loads(made.files[_docker.WAS_PATH])["text"] == OLD
    assert _docker.PENDING_PATH not in made.files
    assert run(made, PRESENT) == {"changed": False}
    assert run(made, ABSENT)["restarted"] is False
    assert made.files == {PATH: OLD, BINARY: ""} and (daemon.default, daemon.runtimes) == ("runc", {"runc": "runc"})
    assert made.modes[PATH] == 0o640 and run(made, ABSENT) == {"changed": False}
    assert restarts(made) == 0 and not any("daemon-reload" in one for one in made.log)


@pytest.mark.parametrize(
    "text", [None, '{"runtimes": null}\n', '{"default-runtime": "kata", "runtimes": {"kata": {"path": "/k"}}}']
)
def test_taken_out_again_to_the_byte(text: str | None) -> None:
    made, daemon = node(text)
    daemon.restart()
    before = daemon.default, daemon.runtimes
    run(made, PRESENT)
    assert daemon.default == "nvidia"
    run(made, ABSENT)
    assert made.files.get(PATH) == text and (daemon.default, daemon.runtimes) == before
    assert _docker.WAS_PATH not in made.files and restarts(made) == 0


def test_cdi_restarts_docker_where_that_stops_nothing() -> None:
    made, daemon = node(version="27.3.1")
    run(made, PRESENT)
    assert restarts(made) == 0 and '"cdi": true' in made.files[PATH]
    made, daemon = node(version="27.3.1")
    daemon.live_restore = True
    assert run(made, PRESENT)["restarted"] is True and restarts(made) == 1


def test_a_reload_without_effect_isnt_made_good_by_stopping_containers() -> None:
    made, daemon = node()
    daemon.deaf = True
    with pytest.raises(NotInEffect, match="a restart would stop 2 running container"):
        run(made, PRESENT)
    assert made.files == {PATH: OLD, BINARY: ""} and restarts(made) == 0
    daemon.containers = 0
    assert run(made, PRESENT)["restarted"] is True and daemon.default == "nvidia"


def test_a_docker_that_refuses_to_start_gets_its_old_file_back() -> None:
    made, daemon = node(version="27.3.1")
    daemon.containers = 0
    daemon.hates = lambda text: "nvidia" in text
    with pytest.raises(NotInEffect, match=r"runs with the old one again \(systemctl restart ended with 1\): unable to"):
        run(made, PRESENT)
    assert made.files == {PATH: OLD, BINARY: ""} and made.modes[PATH] == 0o640
    assert daemon.pid and daemon.default == "runc" and restarts(made) == 2


def test_both_failing_is_said() -> None:
    made, daemon = node(version="27.3.1")
    daemon.containers = 0
    daemon.hates = lambda text: True
    with pytest.raises(NotInEffect, match="with the old one, which is back in place, it doesn't come up either"):
        run(made, PRESENT)
    assert made.files[PATH] == OLD and _docker.PENDING_PATH in made.files, "the next run goes on from here"


def test_what_docker_wouldnt_take_is_put_back_without_a_restart() -> None:
    made, daemon = node()
    made.answers["dockerd"] = lambda argv: (
        Done(1, "", "unable to configure: no\n")
        if "--validate" in argv and "nvidia" in made.files[PATH]
        else Done(0, "Docker version 24.0.9, build x", "")
    )
    with pytest.raises(NotInEffect, match="would not do: unable to configure: no"):
        run(made, PRESENT)
    assert made.files == {PATH: OLD, BINARY: ""} and restarts(made) == 0 and daemon.default == "runc"


def test_without_the_binary_nothing_is_written() -> None:
    made, _daemon = node()
    del made.files[BINARY]
    with pytest.raises(BadInput, match="runtime_nvidia_binary"):
        run(made, PRESENT)
    assert not [one for one in made.log if one.startswith("write")]


@pytest.mark.parametrize("full", [1, 2, 3])
def test_a_full_disk_leaves_all_as_it_was(full: int) -> None:
    made, daemon = node()
    write, count = made.write, 0

    def full_disk(path: str, text: str, mode: int = 0o644) -> None:
        nonlocal count
        count += 1
        if count == full:
            raise ShareError(f"{path} can't be written: No space left on device")
        write(path, text, mode)

    made.write = full_disk  # type: ignore[method-assign]
    with pytest.raises(ShareError, match="No space left on device"):
        run(made, PRESENT)
    assert made.files == {PATH: OLD, BINARY: ""} and daemon.default == "runc"
    assert "rmdir /var/lib/kubegpu-share" in made.log or full == 1


def test_a_run_killed_anywhere_is_finished_by_the_next() -> None:
    at = 1
    while True:
        made, daemon = node()
        ended = not killed(made, at, functools.partial(run, made, PRESENT))
        run(made, PRESENT)
        assert daemon.default == "nvidia" and run(made, PRESENT) == {"changed": False}, at
        assert _docker.PENDING_PATH not in made.files
        run(made, ABSENT)
        assert made.files == {PATH: OLD, BINARY: ""}, at
        assert (daemon.default, daemon.runtimes) == ("runc", {"runc": "runc"}) and restarts(made) == 0
        if ended:
            break
        at += 1
    assert at > 15


@pytest.mark.parametrize("text", [OLD, None])
def test_taking_out_killed_anywhere_is_finished_by_the_next(text: str | None) -> None:
    at = 1
    while True:
        made, daemon = node(text)
        files = dict(made.files)
        run(made, PRESENT)
        ended = not killed(made, at, functools.partial(run, made, ABSENT))
        run(made, ABSENT)
        assert made.files == files, at
        assert (daemon.default, daemon.runtimes) == ("runc", {"runc": "runc"}), at
        if ended:
            break
        at += 1
    assert at > 15


def test_a_changed_mind_after_a_kill() -> None:
    """Killed while being taken out, and then wanted again: the user's layout is still known."""
    for at in range(1, 40):
        made, daemon = node()
        run(made, PRESENT)
        with_ours = made.files[PATH]
        if not killed(made, at, functools.partial(run, made, ABSENT)):
            break
        run(made, PRESENT)
        assert made.files[PATH] == with_ours and daemon.default == "nvidia", at
        run(made, ABSENT)
        assert made.files == {PATH: OLD, BINARY: ""}, at


@pytest.mark.parametrize("theirs", ['{"data-root": "/mnt/docker"}', '{\n  "data-root": "/mnt/docker"\n}\n'])
def test_a_file_that_the_user_has_replaced_is_the_users(theirs: str) -> None:
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


def test_containers_that_started_since_the_plan_arent_stopped() -> None:
    made, daemon = node(version="27.3.1")
    daemon.containers = 0
    seen = _observe_docker.observe(made)
    planned = make_plan(PRESENT, seen)
    assert planned.restart
    daemon.containers = 1
    clock = Clock()
    docker = Docker(made, PRESENT, planned.restart, clock.sleep, clock.now)
    done = Apply(made, docker, 10, clock.sleep, clock.now).run(replacements(planned.files))
    assert done["restarted"] is False and restarts(made) == 0 and daemon.default == "nvidia"


def test_a_docker_that_doesnt_answer_isnt_restarted() -> None:
    made, _daemon = node()
    planned = make_plan(PRESENT, _observe_docker.observe(made))
    made.answers["docker"] = lambda argv: Done(124, "", "")
    clock = Clock()
    docker = Docker(made, PRESENT, planned.restart, clock.sleep, clock.now)
    with pytest.raises(NotInEffect, match="doesn't answer, and a restart would stop whatever containers"):
        Apply(made, docker, 10, clock.sleep, clock.now).run(replacements(planned.files))
    assert made.files[PATH] == OLD and restarts(made) == 0


def test_a_default_runtime_that_is_a_flag_never_gets_into_the_file() -> None:
    made, daemon = node()
    daemon.default = "runc-too"
    daemon.hates = lambda text: "default-runtime" in text
    show = made.answers["systemctl"]

    def systemctl(argv: Sequence[str]) -> Done:
        done = show(argv)
        return Done(done.rc, done.out.replace("-H fd://", "-H fd:// --default-runtime runc-too"), "")

    made.answers["systemctl"] = systemctl
    available = Wanted(True, False, BINARY, False, False)
    run(made, available)
    assert daemon.runtimes["nvidia"] == BINARY and run(made, available) == {"changed": False}
    run(made, ABSENT)
    assert made.files == {PATH: OLD, BINARY: ""} and daemon.runtimes == {"runc": "runc"} and restarts(made) == 0


def test_a_linked_file_stays_a_link() -> None:
    made, _daemon = node()
    made.links[PATH] = "../share/link.json"
    made.links["/etc/share/link.json"] = "real.json"
    made.files["/etc/share/real.json"] = OLD
    made.modes["/etc/share/real.json"] = 0o600
    run(made, PRESENT)
    assert made.modes["/etc/share/real.json"] == 0o600
    assert "write /etc/share/real.json" in made.log and f"write {PATH}" not in made.log


# --------------------------------------------------------------------------- the look


def test_what_is_seen() -> None:
    made, _daemon = node()
    seen = _observe_docker.observe(made)
    assert seen is not None
    assert (seen["version"], seen["config_path"], seen["service_active"], seen["answers"]) == (
        "24.0.9",
        PATH,
        True,
        True,
    )
    assert (seen["default_runtime"], seen["cgroup_driver"], seen["containers"]) == ("runc", "systemd", 2)
    assert (seen["was"], seen["ours"], seen["pending"], seen["flags"]) == (None, False, False, {})


def test_flags_of_the_unit_with_the_file_that_has_them() -> None:
    made, daemon = node()
    drop_in = "/etc/systemd/system/docker.service.d/gpu.conf"
    made.files[drop_in] = "[Service]\nExecStart=\nExecStart=/usr/bin/dockerd --default-runtime runc\n"
    argv = "/usr/bin/dockerd --config-file=/srv/d.json --default-runtime runc --add-runtime=a=/a -H unix:///run/d.sock"
    made.answers["systemctl"] = lambda argv_: Done(
        0,
        f"LoadState=loaded\nActiveState=active\nMainPID={daemon.pid}\nFragmentPath=/lib/systemd/system/docker.service\n"
        f"DropInPaths={drop_in}\nExecStart={{ path=/usr/bin/dockerd ; argv[]={argv} ; }}\n",
        "",
    )
    seen = _observe_docker.observe(made)
    assert seen is not None and seen["config_path"] == "/srv/d.json"
    assert seen["flags"]["default-runtime"] == {"values": ["runc"], "file": drop_in}
    assert seen["flags"]["add-runtime"]["values"] == ["a=/a"]
    assert any(one.startswith("docker --host unix:///run/d.sock info") for one in made.log)


def test_flags_from_variables_are_those_of_the_process() -> None:
    made, daemon = node()
    made.files["/etc/sysconfig/docker"] = "OPTIONS='--default-runtime=crun'\n"
    made.files[f"/proc/{daemon.pid}/cmdline"] = "/usr/bin/dockerd\0--default-runtime=crun\0"
    made.answers["systemctl"] = lambda argv: Done(
        0,
        f"LoadState=loaded\nActiveState=active\nMainPID={daemon.pid}\n"
        "EnvironmentFiles=/etc/sysconfig/docker (ignore_errors=yes)\n"
        "ExecStart={ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd $OPTIONS ; }\n",
        "",
    )
    seen = _observe_docker.observe(made)
    assert seen is not None
    assert seen["flags"]["default-runtime"] == {"values": ["crun"], "file": "/etc/sysconfig/docker"}


@pytest.mark.parametrize(
    ("text", "asked"),
    [('{"hosts": ["tcp://0.0.0.0:1", "unix:///srv/d.sock"]}', "unix:///srv/d.sock"), ("{", _docker.DEFAULT_SOCKET)],
)
def test_a_socket_that_the_file_names(text: str, asked: str) -> None:
    made, _daemon = node(text)
    made.answers["systemctl"] = lambda argv: Done(
        0,
        "LoadState=loaded\nActiveState=active\nMainPID=77\n"
        "ExecStart={ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd ; }\n",
        "",
    )
    _observe_docker.observe(made)
    assert any(one.startswith(f"docker --host {asked} info") for one in made.log)


def test_a_docker_that_is_off_isnt_asked() -> None:
    made, daemon = node()
    daemon.pid = 0
    seen = _observe_docker.observe(made)
    assert seen is not None and not seen["answers"] and not any(one.startswith("docker ") for one in made.log)


def test_no_docker_and_a_rootless_one() -> None:
    made = FakeNode({}, {name: lambda argv: Done(127, "", "") for name in ("systemctl", "dockerd")})
    assert _observe_docker.observe(made) is None
    made.files["/run/user/1000/docker.sock"] = ""
    seen = _observe_docker.observe(made)
    assert seen is not None and seen["rootless"] == "/run/user/1000/docker.sock"
