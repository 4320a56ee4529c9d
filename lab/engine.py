# SPDX-License-Identifier: GPL-3.0-or-later
"""Use the machine's Docker engine if it answers, else start one for the lab, which `down` stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lab.paths import RUN, cache_root
from lab.shell import LabError, output, run, say, wait_for

LABEL = "kubegpu-lab=1"
NAME = "kubegpu-lab"
_SOCKET = f"unix://{RUN}/docker.sock"
_PIDFILE = RUN / "docker.pid"
_BEFORE = RUN / "before.json"
# What an engine creates outside of its own folders.
_TRACES = ("/etc/docker/key.json", "/opt/containerd", "/run/containerd", "/run/docker")
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_CAP_SYS_RESOURCE = 24
_CGROUPS = Path("/sys/fs/cgroup")
# How much processor time the lab's containers get beside one busy process of the machine (1): with an equal part its
# API servers miss their deadlines. By the file of cgroup v1 and of v2, with the value that is 1 there.
_WEIGHT = 16
_WEIGHT_FILES = {False: ("cpu.shares", 1024), True: ("cpu.weight", 100)}


@dataclass(frozen=True)
class Engine:
    """How to reach the engine; an empty host means the default of the docker command."""

    host: str = ""

    @property
    def own(self) -> bool:
        return self.host == _SOCKET

    def environment(self) -> dict[str, str]:
        # The classic builder: BuildKit is a plugin that Debian's package lacks.
        environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
        if self.host:
            environment["DOCKER_HOST"] = self.host
            environment.pop("DOCKER_CONTEXT", None)
        return environment

    def docker(
        self,
        *arguments: str,
        check: bool = True,
        source: IO[bytes] | None = None,
        tied: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        return run(["docker", *arguments], check=check, env=self.environment(), source=source, tied=tied)

    def out(self, *arguments: str) -> str:
        return self.docker(*arguments).stdout.strip()

    def answers(self) -> bool:
        done = run(["docker", "info", "--format", "{{.ServerVersion}}"], check=False, env=self.environment())
        return done.returncode == 0 and bool(done.stdout.strip())

    def containers(self) -> dict[str, bool]:
        """Map the names of the lab's containers to whether each runs."""
        lines = self.out("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}\t{{.State}}").splitlines()
        return {name: state == "running" for name, _tab, state in (line.partition("\t") for line in lines)}

    def has_image(self, tag: str) -> bool:
        return self.docker("image", "inspect", tag, check=False).returncode == 0

    def make_network(self, subnet: str, gateway: str) -> None:
        """Create the lab's network, with a bridge of its name on the machine."""
        self.docker(
            "network",
            "create",
            "--driver=bridge",
            f"--subnet={subnet}",
            f"--gateway={gateway}",
            f"--opt=com.docker.network.bridge.name={NAME}",
            f"--label={LABEL}",
            NAME,
        )


def bounding_set() -> int:
    """Return the capabilities that a process of this machine can have."""
    found = re.search(r"^CapBnd:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


def may_raise_limits(bounding: int) -> bool:
    """Test for CAP_SYS_RESOURCE, without which no engine can start a privileged container."""
    return bool(bounding >> _CAP_SYS_RESOURCE & 1)


def cgroup_v2() -> bool:
    return (_CGROUPS / "cgroup.controllers").exists()


def give_weight(cgroups: Path = _CGROUPS) -> Path:
    """Make the lab's cgroup before the engine uses it, with more processor time than other processes have.

    :param cgroups: where the machine's hierarchies are mounted.
    :returns: the file that has the weight.
    :raises OSError: the machine's cgroups can't be changed.
    """
    unified = (cgroups / "cgroup.controllers").exists()
    if unified:
        # As the engine does when it creates its first container: its cgroup has no such file before.
        (cgroups / "cgroup.subtree_control").write_text("+cpu")
    place = (cgroups if unified else cgroups / "cpu") / NAME
    place.mkdir(exist_ok=True)
    name, ordinary = _WEIGHT_FILES[unified]
    (place / name).write_text(str(_WEIGHT * ordinary))
    return place / name


def node_flags(bounding: int, unified: bool) -> list[str]:
    """Return the flags that let a container run systemd, a kubelet and a container runtime."""
    if may_raise_limits(bounding):
        rights = ["--privileged"]
    else:
        rights = [
            "--cap-add=ALL",
            "--cap-drop=SYS_RESOURCE",
            "--security-opt=seccomp=unconfined",
            "--security-opt=apparmor=unconfined",
            "--security-opt=systempaths=unconfined",
            "--device-cgroup-rule=a *:* rwm",
        ]
    # On v1 systemd mounts the hierarchies itself, where it is allowed to.
    cgroups = ["--cgroupns=private", *([] if unified else ["--tmpfs=/sys/fs/cgroup:rw,exec,dev"])]
    volumes = [f"--volume=/var/lib/{each}" for each in ("containerd", "kubelet", "etcd")]
    return [*rights, *cgroups, "--tmpfs=/run", "--tmpfs=/tmp:exec", *volumes]


def find() -> Engine | None:
    """Find an engine that answers, the lab's own first."""
    own = Engine(_SOCKET)
    if shutil.which("docker") is None:
        return None
    if _own_pid() and own.answers():
        return own
    machine = Engine()
    return machine if machine.answers() else None


def folder() -> Path:
    """Return the folder of the lab's own engine: its data and its log."""
    try:
        return Path(json.loads(_BEFORE.read_text())["folder"])
    except (FileNotFoundError, ValueError, KeyError):
        return cache_root() / "engine"


def leftovers() -> bool:
    """Test whether an engine of the lab, dead or alive, left something."""
    return _BEFORE.exists() or folder().exists()


def ensure() -> Engine:
    """Find an engine, or start one."""
    return find() or start()


def start() -> Engine:
    """Start the lab's own engine, with its own socket, data folder and cgroup."""
    say("no Docker engine answers on this machine; starting one for the lab")
    _stop_process()
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    RUN.mkdir(mode=0o700, exist_ok=True)
    if not _BEFORE.exists():
        policy = re.search(r"^-P FORWARD (\S+)", run(["iptables", "-S", "FORWARD"], check=False).stdout, re.MULTILINE)
        before = {
            "folder": str(place),
            "ip_forward": _FORWARD.read_text().strip(),
            "forward_policy": policy[1] if policy else "ACCEPT",
            "absent": [path for path in _TRACES if not Path(path).exists()],
        }
        fresh = _BEFORE.with_suffix(".new")
        fresh.write_text(json.dumps(before))
        fresh.replace(_BEFORE)
    try:
        give_weight()
    except OSError as error:
        say(f"the lab gets no more processor time than other processes: {error.filename}: {error.strerror}")
    # Empty, so that the machine's daemon.json has no effect.
    (RUN / "daemon.json").write_text("{}\n")
    command = [
        "dockerd",
        f"--host={_SOCKET}",
        f"--config-file={RUN}/daemon.json",
        f"--data-root={place}/data",
        f"--exec-root={RUN}/exec",
        f"--pidfile={_PIDFILE}",
        f"--cgroup-parent={NAME}",
        "--bridge=none",
    ]
    log = place / "dockerd.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, cwd="/"
        )
    engine = Engine(_SOCKET)

    def ready() -> bool:
        if process.poll() is not None:
            raise LabError(f"the Docker engine exited at once: {_last_line(log)} (log: {log})")
        return engine.answers()

    wait_for("the lab's own Docker engine", ready, 60, 0.3)
    return engine


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(empty)"


def _own_pid() -> int | None:
    """Return the process id of the lab's engine, if it still belongs to that engine."""
    try:
        pid = int(_PIDFILE.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if f"--pidfile={_PIDFILE}".encode() in words else None


def _stop_process() -> None:
    pid = _own_pid()
    if pid:
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + 30
        while _own_pid() == pid and time.monotonic() < end:
            time.sleep(0.1)
        if _own_pid() == pid:
            os.kill(pid, signal.SIGKILL)
    _PIDFILE.unlink(missing_ok=True)


def clean(engine: Engine) -> None:
    """Remove the lab's containers with their volumes, its network and its images."""
    names = list(engine.containers())
    if names and engine.own:
        # Their files go with its data folder; removing them one by one takes half a minute more.
        engine.docker("kill", *names, check=False)
    elif names:
        engine.docker("rm", "--force", "--volumes", *names)
    for network in engine.out("network", "ls", "--quiet", "--filter", f"label={LABEL}").split():
        engine.docker("network", "rm", network)
    if engine.own:
        # They are removed with its data folder.
        return
    # A failed build leaves images with parents; remove the topmost first.
    while images := engine.out("images", "--all", "--quiet", "--filter", f"label={LABEL}").split():
        engine.docker("rmi", "--force", *dict.fromkeys(images), check=False)
        if set(images) == set(engine.out("images", "--all", "--quiet", "--filter", f"label={LABEL}").split()):
            raise LabError(
                f"the images {' '.join(dict.fromkeys(images))} can't be removed, since a container uses them."
            )


def stop() -> None:
    """Stop the lab's own engine and undo its changes to the machine."""
    place = folder()
    _stop_process()
    _end_shims()
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        target = line.split()[1]
        if target.startswith((f"{place}/", f"{RUN}/")):
            run(["umount", "--lazy", target], check=False)
    shutil.rmtree(place, ignore_errors=True)
    _restore_machine()
    _remove_cgroups()
    shutil.rmtree(RUN, ignore_errors=True)
    if place.exists():
        raise LabError(f"{place} could not be removed completely.")


def _end_shims() -> None:
    """End the containerd and the shims of a killed engine; their command lines name the lab's folder."""
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if words.startswith(("containerd\0", "/usr/bin/containerd", "containerd-shim")) and f"{RUN}/exec" in words:
            try:
                os.kill(int(each.parent.name), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _restore_machine() -> None:
    try:
        before = json.loads(_BEFORE.read_text())
    except (FileNotFoundError, ValueError):
        return
    run(["ip", "link", "delete", NAME], check=False)
    if Engine().answers():
        # Another engine was started meanwhile and owns the rest.
        return
    for path in map(Path, before.get("absent", [])):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for table in ("filter", "nat"):
        for command in chain_removal(run(["iptables", "-t", table, "-S"], check=False).stdout):
            run(["iptables", "-t", table, *command], check=False)
    run(["iptables", "-P", "FORWARD", before["forward_policy"]], check=False)
    _FORWARD.write_text(before["ip_forward"] + "\n")


def chain_removal(rules: str) -> list[list[str]]:
    """Return the commands that remove an engine's chains from the output of `iptables -S`: rules first, then chains."""
    lines = [line.replace('"', "").split() for line in rules.splitlines()]
    ours = [words[1] for words in lines if words[:1] == ["-N"] and words[1].startswith("DOCKER")]
    commands = []
    for words in lines:
        if words[:1] == ["-A"] and words[1] not in ours and (set(words) & set(ours) or NAME in words):
            commands.append(["-D", *words[1:]])
    commands += [["-F", chain] for chain in ours]
    commands += [["-X", chain] for chain in ours]
    return commands


def _remove_cgroups() -> None:
    roots = [_CGROUPS / NAME, *_CGROUPS.glob(f"*/{NAME}")]
    for root in roots:
        # Killed processes leave their cgroups a moment later.
        end = time.monotonic() + 5
        while root.exists() and time.monotonic() < end:
            for path, _folders, _files in os.walk(root, topdown=False):
                try:
                    os.rmdir(path)
                except OSError:
                    time.sleep(0.05)


def used_networks() -> str:
    """Return the machine's routes as JSON."""
    return output(["ip", "-4", "-json", "route"]) or "[]"
