# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's settings, from the environment or from flags. No I/O."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from lab.shell import LabError


@dataclass(frozen=True)
class Settings:
    """The lab's settings; each can be given as LAB_<NAME> or --<name>."""

    gpu_nodes: int = 2
    cards: int = 2
    # 16 GiB for pods, and what the simulated driver keeps.
    card_mib: int = 16640
    driver_version: str = "580.95.05"
    control_planes: int = 3
    subnet: str = "172.30.77.0/24"
    kubernetes_version: str = "1.37.2"

    def as_dict(self) -> dict[str, int | str]:
        return asdict(self)

    def node_names(self) -> list[str]:
        """Return the nodes in the order of creation, control planes first."""
        return [*self.control_plane_names(), *self.gpu_node_names()]

    def control_plane_names(self) -> list[str]:
        return [f"cp{number}" for number in range(1, self.control_planes + 1)]

    def gpu_node_names(self) -> list[str]:
        return [f"gpu{number}" for number in range(1, self.gpu_nodes + 1)]


HELP = {
    "gpu_nodes": "number of GPU nodes, 1 to 9",
    "cards": "cards in each GPU node, 1 to 16",
    "card_mib": "memory of a card in MiB, 256 to 1048576",
    "driver_version": "version of the simulated driver, as 580.95.05",
    "control_planes": "number of control planes, 1 or 3",
    "kubernetes_version": "version of Kubernetes, 1.37.2, or 1.36.3 to be upgraded from",
    "subnet": "the lab's own IPv4 network, a /24 (another free one is taken if the default is in use)",
}
# What switches a project's downloads off, so that its programs are built.
NO_DOWNLOADS = "none"
DOWNLOADS = {
    "kubernetes": "https://dl.k8s.io/release",
    "containerd": "https://github.com/containerd/containerd/releases/download",
    "etcd": "https://github.com/etcd-io/etcd/releases/download",
}
_RANGES = {"gpu_nodes": (1, 9), "cards": (1, 16), "card_mib": (256, 1048576)}


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"LAB_{name.upper()}"


def download_url(project: str, environment: Mapping[str, str]) -> str:
    """Return the place of a project's released programs (LAB_<PROJECT>_URL, or the project's own), or NO_DOWNLOADS."""
    name = variable(f"{project}_url")
    raw = environment.get(name, "").strip().rstrip("/") or DOWNLOADS[project]
    if raw != NO_DOWNLOADS and not re.fullmatch(r"https?://[^\s/]\S*", raw):
        raise LabError(f"{name} is {raw!r}, but must be a web address such as {DOWNLOADS[project]}, or {NO_DOWNLOADS}.")
    return raw


def parse(environment: Mapping[str, str], flags: Mapping[str, str | None] | None = None) -> tuple[Settings, set[str]]:
    """Return the settings (flags win over the environment) and the names of those that were given."""
    given: dict[str, int | str] = {}
    for field in fields(Settings):
        raw = (flags or {}).get(field.name)
        if raw is None:
            raw = environment.get(variable(field.name)) or None
        if raw is not None:
            given[field.name] = _checked(field.name, raw.strip())
    return Settings(**given), set(given)  # type: ignore[arg-type]


def _checked(name: str, raw: str) -> int | str:
    if name == "driver_version":
        if not re.fullmatch(r"\d{3}\.\d{1,3}(\.\d{2})?", raw):
            raise LabError(f"{variable(name)} is {raw!r}, which isn't a driver version such as 580.95.05.")
        return raw
    if name == "kubernetes_version":
        if not re.fullmatch(r"1\.\d+\.\d+", raw):
            raise LabError(f"{variable(name)} is {raw!r}, which isn't a version such as 1.37.2.")
        return raw
    if name == "subnet":
        return _subnet(raw)
    if not re.fullmatch(r"\d{1,9}", raw):
        raise LabError(f"{variable(name)} is {raw!r}, but must be a whole number.")
    number = int(raw)
    if name == "control_planes":
        if number not in (1, 3):
            raise LabError(f"{variable(name)} is {number}, but must be 1 or 3: etcd needs an odd number of members.")
        return number
    low, high = _RANGES[name]
    if not low <= number <= high:
        raise LabError(f"{variable(name)} is {number}, but must be from {low} to {high}.")
    return number


def _subnet(raw: str) -> str:
    try:
        network = ipaddress.IPv4Network(raw)
    except ValueError:
        raise LabError(
            f"{variable('subnet')} is {raw!r}, which isn't an IPv4 network such as 172.30.77.0/24."
        ) from None
    if network.prefixlen != 24 or not network.is_private:
        raise LabError(f"{variable('subnet')} is {raw!r}, but must be a private /24.")
    return str(network)


def differences(running: Mapping[str, int | str], wanted: Settings, given: set[str]) -> list[str]:
    """List the given values that differ from the running lab's."""
    now = wanted.as_dict()
    return [
        f"{variable(name)} is {now[name]} but the running lab has {running.get(name)}"
        for name in now
        if name in given and running.get(name) != now[name]
    ]
