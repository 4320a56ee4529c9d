# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query a node's kubelet: its container runtime and cgroup driver."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .._host.system import System
from .._host.systemd import Unit, command_line, unit
from .._rancher import settings as rancher_settings
from .._rancher.settings import K3S, RKE2
from . import k3s
from .containerd import release
from .types import Kubelet

UNIT = "kubelet.service"
CONFIG = "/var/lib/kubelet/config.yaml"
FLAGS = "/var/lib/kubelet/kubeadm-flags.env"
# Since 1.24 the kubelet supports CRI only; before, it used Docker directly by default.
CRI_ONLY_SINCE = (1, 24)
DEFAULT_ENDPOINT = "unix:///run/containerd/containerd.sock"


def observe(system: System) -> Kubelet | None:
    """Collect section ``kubelet`` of ``gpu_node``; None without a kubelet."""
    daemon = unit(system, UNIT)
    if not (daemon.loaded or daemon.binary or system.exists(CONFIG)):
        return _rancher(system)
    arguments = _arguments(system, daemon)
    config = _config(system, arguments)
    version = _version(system, daemon.binary)
    endpoint = _last(arguments, "--container-runtime-endpoint") or _key(config, "containerRuntimeEndpoint")
    remote = _last(arguments, "--container-runtime") == "remote" or bool(endpoint)
    runtime = runtime_of(endpoint)
    if not endpoint and not remote and not (daemon.pid or system.exists(CONFIG)):
        # Installed and never joined to a cluster: its runtime isn't configured yet.
        runtime = ""
    elif not endpoint and not remote:
        old = version and release(version) < CRI_ONLY_SINCE
        runtime, endpoint = ("docker", "") if old else ("containerd", DEFAULT_ENDPOINT)
    return {
        "version": version,
        "endpoint": endpoint,
        "runtime": runtime,
        "cgroup_driver": _last(arguments, "--cgroup-driver") or _key(config, "cgroupDriver") or "cgroupfs",
    }


@dataclasses.dataclass(frozen=True)
class Settings:
    """A kubelet's arguments, and the texts of its configuration, the ones that win first."""

    arguments: t.Sequence[str]
    config: str

    @property
    def runtime_request_timeout(self) -> str:
        """How long a request to the container runtime may take, as it is written; empty for kubelet's default."""
        return _last(self.arguments, "--runtime-request-timeout") or _key(self.config, "runtimeRequestTimeout")

    def gate(self, name: str) -> bool | None:
        """Return whether a feature gate is set on or off; None where kubelet's release decides."""
        given = _last(self.arguments, "--feature-gates")
        match = re.search(rf"(?:^|,){name}=(true|false)\b", given) or re.search(
            rf"(?m)(?:^[ \t]+|[{{,][ \t]*)\"?{name}\"?[ \t]*:[ \t]*(true|false)\b", self.config
        )
        return match.group(1) == "true" if match else None


def settings(system: System) -> Settings | None:
    """Return the settings of kubelet's own program; None without one, as with k3s and RKE2."""
    daemon = unit(system, UNIT)
    if not (daemon.loaded or daemon.binary or system.exists(CONFIG)):
        return None
    arguments = _arguments(system, daemon)
    return Settings(arguments, _config(system, arguments))


def _config(system: System, arguments: t.Sequence[str]) -> str:
    """Return the texts of the configuration; a key of the top level replaces those behind it."""
    config = system.read(_last(arguments, "--config") or CONFIG) or ""
    folder = _last(arguments, "--config-dir")
    for name in system.names(folder) if folder else []:
        # Later files win.
        if name.endswith(".conf"):
            config = (system.read(posixpath.join(folder, name)) or "") + "\n" + config
    return config


def runtime_of(endpoint: str) -> str:
    """Return the runtime that a socket belongs to; empty for an unknown one."""
    socket = re.sub(r"^unix://", "", endpoint)
    for word, runtime in (
        ("cri-dockerd", "docker"),
        ("dockershim", "docker"),
        ("/k3s/containerd/", "k3s"),
        ("crio", "crio"),
        ("containerd", "containerd"),
    ):
        if word in socket:
            return runtime
    return ""


def _arguments(system: System, daemon: Unit) -> list[str]:
    """Return the running kubelet's arguments, else those of its unit and environment files."""
    running = command_line(system, daemon.pid) if daemon.pid else ()
    if running:
        return list(running[1:])
    text = " ".join(daemon.arguments)
    for path in dict.fromkeys([*daemon.files, FLAGS]):
        # Only variables: the unit's own ExecStart is included already.
        for line in (system.read(path) or "").splitlines():
            value = re.match(r'^\s*(?:Environment=)?"?\w+=(.*)$', line)
            if value and "--" in value.group(1):
                text += " " + value.group(1).replace('"', " ").replace("'", " ")
    return text.split()


def _last(arguments: t.Sequence[str], flag: str) -> str:
    value = ""
    for number, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
        elif argument == flag and number + 1 < len(arguments):
            value = arguments[number + 1]
    return value.strip("\"'")


def _key(config: str, name: str) -> str:
    """Read a top-level scalar of a YAML (or one-line JSON) file; nodes have no YAML library."""
    match = re.search(rf"(?m)^{name}:[ \t]*(.*?)[ \t]*(?:#.*)?$", config) or re.search(
        rf'"{name}"\s*:\s*"([^"]*)"', config
    )
    return match.group(1).strip("\"'") if match else ""


def _version(system: System, binary: str) -> str:
    done = system.run([binary or "kubelet", "--version"], timeout=10)
    match = re.search(r"v([0-9]+\.[0-9]+\.[0-9]+\S*)", done.out) if done.rc == 0 else None
    return match.group(1) if match else ""


def _rancher(system: System) -> Kubelet | None:
    """Return the section for the kubelet that k3s and RKE2 embed, which uses their own containerd by default."""
    for kind in (K3S, RKE2):
        if not any(map(system.exists, kind.marks)):
            continue
        daemon = k3s.daemon_of(system, kind)
        if not daemon.binary:
            continue
        configured = k3s.settings_of(system, kind, daemon)
        docker = k3s.uses_docker(kind, configured)
        endpoint = "" if docker else rancher_settings.value(configured, "container-runtime-endpoint")
        runtime = "docker" if docker else kind.name
        if endpoint:
            runtime = runtime_of(endpoint)
        return {
            "version": "",
            "endpoint": endpoint or ("" if docker else f"unix://{k3s.SOCKET}"),
            "runtime": kind.name if runtime == K3S.name else runtime,
            "cgroup_driver": "",
        }
    return None
