# SPDX-License-Identifier: GPL-3.0-or-later
"""The Docker engine: the machine's if one answers, else one of our own that `down` stops again."""

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
# What an engine makes outside of the folders that it is given.
_TRACES = ("/etc/docker/key.json", "/opt/containerd", "/run/containerd", "/run/docker")
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_CAP_SYS_RESOURCE = 24


@dataclass(frozen=True)
class Engine:
    """How to reach the engine; an empty host is whatever the docker command finds by itself."""

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
        """Our containers by name, and whether each runs."""
        lines = self.out("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}\t{{.State}}").splitlines()
        return {name: state == "running" for name, _tab, state in (line.partition("\t") for line in lines)}

    def has_image(self, tag: str) -> bool:
        return self.docker("image", "inspect", tag, check=False).returncode == 0

    def make_network(self, subnet: str, gateway: str) -> None:
        """The lab's own network, with a bridge of its name on the machine."""
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
    """The capabilities that any process of this machine can have."""
    found = re.search(r"^CapBnd:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


def may_raise_limits(bounding: int) -> bool:
    """Whether CAP_SYS_RESOURCE is there; without it no engine can start a privileged container."""
    return bool(bounding >> _CAP_SYS_RESOURCE & 1)


def cgroup_v2() -> bool:
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


def node_flags(bounding: int, unified: bool) -> list[str]:
    """What makes a container a node: systemd, a kubelet and a container runtime inside it."""
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
    # On v1, systemd mounts the hierarchies itself in a place where it may.
    cgroups = ["--cgroupns=private", *([] if unified else ["--tmpfs=/sys/fs/cgroup:rw,exec,dev"])]
    volumes = [f"--volume=/var/lib/{each}" for each in ("containerd", "kubelet", "etcd")]
    return [*rights, *cgroups, "--tmpfs=/run", "--tmpfs=/tmp:exec", *volumes]


def find() -> Engine | None:
    """The engine that answers, ours first."""
    own = Engine(_SOCKET)
    if shutil.which("docker") is None:
        return None
    if _own_pid() and own.answers():
        return own
    machine = Engine()
    return machine if machine.answers() else None


def folder() -> Path:
    """Where an engine of our own keeps its data and its log."""
    try:
        return Path(json.loads(_BEFORE.read_text())["folder"])
    except (FileNotFoundError, ValueError, KeyError):
        return cache_root() / "engine"


def leftovers() -> bool:
    """Whether an engine of ours, dead or alive, left something."""
    return _BEFORE.exists() or folder().exists()


def ensure() -> Engine:
    """An engine that answers: found or started."""
    return find() or start()


def start() -> Engine:
    """Start an engine of our own, on a socket, a data folder and a cgroup of its own."""
    say("no Docker engine answers on this machine; starting one of the lab's own")
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
    # Empty, so that a daemon.json of the machine's has no say.
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
            raise LabError(f"the Docker engine ended at once; its log is {log}: {_last_line(log)}")
        return engine.answers()

    wait_for("the lab's own Docker engine", ready, 60, 0.3)
    return engine


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(empty)"


def _own_pid() -> int | None:
    """The process id of our engine, if that process is still ours."""
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
    """Remove our containers with their volumes, our network and our images."""
    names = list(engine.containers())
    if names:
        engine.docker("rm", "--force", "--volumes", *names)
    for network in engine.out("network", "ls", "--quiet", "--filter", f"label={LABEL}").split():
        engine.docker("network", "rm", network)
    if engine.own:
        # They go with its data folder.
        return
    # A build that failed leaves images under images, which go from the top down.
    while images := engine.out("images", "--all", "--quiet", "--filter", f"label={LABEL}").split():
        engine.docker("rmi", "--force", *dict.fromkeys(images), check=False)
        if set(images) == set(engine.out("images", "--all", "--quiet", "--filter", f"label={LABEL}").split()):
            raise LabError(f"the images {' '.join(dict.fromkeys(images))} can't be removed; a container uses them.")


def stop() -> None:
    """Stop our own engine and take back all that it set on the machine."""
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
        raise LabError(f"{place} could not be removed wholly.")


def _end_shims() -> None:
    """An engine that was killed leaves its containerd and shims behind; they name our folder on their command lines."""
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
        # Another engine was started meanwhile: what is left is its own now.
        return
    for path in map(Path, before.get("absent", [])):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for table in ("filter", "nat"):
        for command in chain_removal(run(["iptables", "-t", table, "-S"], check=False).stdout):
            run(["iptables", "-t", table, *command], check=False)
    run(["iptables", "-P", "FORWARD", before["forward_policy"]], check=False)
    _FORWARD.write_text(before["ip_forward"] + "\n")


def chain_removal(rules: str) -> list[list[str]]:
    """The commands that take an engine's chains out of what `iptables -S` prints: rules first, then chains."""
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
    roots = [Path("/sys/fs/cgroup") / NAME, *Path("/sys/fs/cgroup").glob(f"*/{NAME}")]
    for root in roots:
        # Processes that were killed leave their groups a moment later.
        end = time.monotonic() + 5
        while root.exists() and time.monotonic() < end:
            for path, _folders, _files in os.walk(root, topdown=False):
                try:
                    os.rmdir(path)
                except OSError:
                    time.sleep(0.05)


def used_networks() -> str:
    """The machine's routes, as JSON."""
    return output(["ip", "-4", "-json", "route"]) or "[]"
