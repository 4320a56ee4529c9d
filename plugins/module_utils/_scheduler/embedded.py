# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler as k3s and RKE2 run it: their settings for it, and where the collection's files are.

k3s runs it within its own process, RKE2 as a static pod whose manifest it rewrites at each start. Both read its
arguments from their own settings: a file, a folder of drop-ins beside it, and the command line.
https://docs.k3s.io/installation/configuration
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .._host.system import System
from .._host.systemd import stale, unit
from .._rancher import settings
from .._rancher.settings import K3S, RKE2, Kind, Settings
from .._runtime import k3s
from .._runtime.k3s import data_folder, drop_in, settings_of

DROP_IN_NAME = "99-kubegpu-scheduler.yaml"
ARG = "kube-scheduler-arg"
MOUNT = "kube-scheduler-extra-mount"
ENV = "kube-scheduler-extra-env"
DISABLED = "disable-scheduler"
KEYS = (ARG, MOUNT, ENV, DISABLED)
# Passes the configuration's stamp to RKE2's pod, so that a changed one restarts it.
STAMP = "KUBEGPU_SCHEDULER_CONFIG_SHA256"


@dataclasses.dataclass(frozen=True)
class Places:
    """The collection's files on a server of one kind.

    :param health: URLs of its kube-scheduler's health, of which one answers; on a machine without IPv4 it listens on
        IPv6's loopback address, and before 1.22 without TLS.
    """

    kind: Kind
    health: tuple[str, ...] = (
        "https://127.0.0.1:10259/healthz",
        "https://[::1]:10259/healthz",
        "http://127.0.0.1:10251/healthz",
    )

    @property
    def unit(self) -> str:
        return self.kind.units[0]

    @property
    def folder(self) -> str:
        return f"/etc/rancher/{self.kind.name}/kubegpu-share"

    @property
    def drop_in(self) -> str:
        """Return the default path of our drop-in."""
        return posixpath.join(self.kind.folder, DROP_IN_NAME)

    @property
    def config(self) -> str:
        return f"{self.folder}/scheduler.yaml"

    @property
    def record(self) -> str:
        return f"/var/lib/kubegpu-share/{self.kind.name}-scheduler.json"

    @property
    def merged(self) -> str:
        """Return the path of the note about a user's configuration into which the extender was merged."""
        return f"/var/lib/kubegpu-share/{self.kind.name}-scheduler-merged.json"


PLACES = {kind.name: Places(kind) for kind in (K3S, RKE2)}


class Server(t.TypedDict):
    """A k3s or RKE2 server.

    ``settings`` are its own for kube-scheduler, ``named`` is the --config in effect, and ``stale`` is true where the
    running process is older than the configuration. ``unread`` is the text of our drop-in at the default place where
    the server reads none.
    """

    version: str
    unit: str
    active: bool
    pid: int
    data: str
    settings: Settings
    drop_in_path: str
    drop_in: str | None
    unread: str | None
    named: str
    stale: bool


def observe(system: System, name: str) -> Server | None:
    """Collect the state of a server of that kind; None where this machine has none."""
    places = PLACES.get(name)
    if places is None:
        return None
    daemon = unit(system, places.unit)
    if not daemon.binary:
        return None
    kind = places.kind
    version = k3s.version_of(system.run([daemon.binary, "--version"], timeout=20).out)
    configured = settings_of(system, kind, daemon)
    ours = drop_in(kind, configured, DROP_IN_NAME)
    configs = named(settings.values(configured, ARG))
    newer = [path for path in (ours, *configs) if system.exists(path)]
    return {
        "version": version,
        "unit": daemon.name,
        "active": daemon.active,
        "pid": daemon.pid,
        "data": data_folder(kind, configured),
        "settings": settings.only(configured, KEYS, names=(ENV,)),
        "drop_in_path": ours,
        "drop_in": system.read(ours),
        "unread": system.read(places.drop_in) if places.drop_in != ours else None,
        "named": configs[-1] if configs else "",
        "stale": daemon.active and stale(system, daemon.pid, newer),
    }


def named(arguments: t.Iterable[str]) -> list[str]:
    """Return the values of --config in arguments of kube-scheduler."""
    words = [word.lstrip("-").partition("=") for word in arguments]
    return [value for name, _equals, value in words if name == "config"]


def stamp(system: System, pid: int) -> str:
    """Return the configuration's stamp with which RKE2 started a process."""
    for variable in (system.read(f"/proc/{pid}/environ") or "").split("\0"):
        name, _equals, value = variable.partition("=")
        if name == STAMP:
            return value
    return ""


def stamp_of(drop_in: str) -> str:
    """Return the stamp that the drop-in passes to RKE2's next pod."""
    match = re.search(rf"{STAMP}=([0-9a-f]{{64}}(?:-[0-9]+)?)", drop_in)
    return match.group(1) if match else ""
