# SPDX-License-Identifier: GPL-3.0-or-later
"""Create the node containers, copy each node's own files into them, start them, and wait for SSH."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab import engine as engines
from lab import hardware
from lab.engine import LABEL, NAME, Engine
from lab.paths import CHECKOUT, LAB
from lab.shell import each, run, step, wait_for
from lab.state import private_file

SSH = LAB / "ssh"
KEY = SSH / "id_ed25519"
KNOWN_HOSTS = SSH / "known_hosts"


@dataclass(frozen=True)
class Node:
    """The specification of a node."""

    name: str
    address: str
    cards: int
    files: tuple[tuple[str, int, str], ...]
    # Folders of /var/lib that get a file system of their own, in addition to those of every node.
    volumes: tuple[str, ...] = ()
    # The command that succeeds once the node is up.
    services: tuple[str, ...] = ("containerd",)

    @property
    def container(self) -> str:
        return f"{NAME}-{self.name}"

    @property
    def folder(self) -> Path:
        return LAB / "nodes" / self.name


def keypair(path: Path, comment: str) -> str:
    """Return the public half of the lab's SSH key, creating the key on first use."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.with_suffix(".pub").exists():
        path.unlink(missing_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])
    return path.with_suffix(".pub").read_text()


def _tar(files: tuple[tuple[str, int, str], ...]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, mode, text in files:
            raw = text.encode()
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = mode, len(raw)
            tar.addfile(entry, io.BytesIO(raw))
    return buffer


def copy_in(engine: Engine, container: str, files: tuple[tuple[str, int, str], ...]) -> None:
    """Copy files into a container, running or not; no secret appears on a command line."""
    with tempfile.TemporaryFile() as file:
        file.write(_tar(files).getvalue())
        file.seek(0)
        engine.docker("cp", "-", f"{container}:/", source=file)


def create(engine: Engine, image: str, node: Node, table: dict[str, str], cards: tuple[int, str]) -> None:
    """Create one container and copy its files, without starting it."""
    mib, driver_version = cards
    hardware.write_node(node.folder, node.name, node.cards, mib, driver_version)
    host_key = SSH / "hosts" / node.name
    host_public = keypair(host_key, node.name)
    mounts = [f"--volume={node.folder / 'pci'}:/sys/bus/pci/devices"]
    mounts += [f"--volume=/var/lib/{each}" for each in node.volumes]
    if node.cards:
        mounts.append(f"--volume={node.folder / 'hardware'}:/var/lib/kubegpu-lab/hardware")
    others = [f"--add-host={name}:{address}" for name, address in table.items() if name != "gateway"]
    engine.docker(
        "create",
        f"--name={node.container}",
        f"--hostname={node.name}",
        f"--label={LABEL}",
        f"--label=kubegpu-lab.checkout={CHECKOUT}",
        f"--network={NAME}",
        f"--ip={node.address}",
        *others,
        *mounts,
        *engines.node_flags(engines.bounding_set(), engines.cgroup_v2()),
        "--env=container=docker",
        "--stop-signal=SIGRTMIN+3",
        image,
        "/usr/local/lib/kubegpu-lab/init",
    )
    own = (
        ("root/.ssh/authorized_keys", 0o600, keypair(KEY, "kubegpu-lab")),
        ("etc/ssh/ssh_host_ed25519_key", 0o600, host_key.read_text()),
        ("etc/ssh/ssh_host_ed25519_key.pub", 0o644, host_public),
    )
    copy_in(engine, node.container, (*own, *node.files))


def known_hosts(addresses: Mapping[str, str]) -> str:
    """Write the nodes' host keys, by address and by name."""
    lines = []
    for name, address in addresses.items():
        kind, key = (SSH / "hosts" / f"{name}.pub").read_text().split()[:2]
        lines.append(f"{address},{name} {kind} {key}\n")
    return "".join(lines)


def bring_up(
    engine: Engine,
    images: Mapping[str, str],
    nodes: Sequence[Node],
    table: dict[str, str],
    cards: tuple[int, str],
    others: Mapping[str, str] | None = None,
) -> None:
    """Start all nodes in parallel, and wait until SSH answers on each.

    :param images: the image of each node.
    :param others: addresses of what is up already and stays known.
    """
    addresses = {node.name: node.address for node in nodes}
    with step(f"starting {', '.join(addresses)}"):
        keypair(KEY, "kubegpu-lab")
        each(lambda node: create(engine, images[node.name], node, table, cards), nodes)
        private_file(KNOWN_HOSTS, known_hosts({**(others or {}), **addresses}))
        engine.docker("start", *(node.container for node in nodes))
        wait_until_reachable(addresses, {node.name: node.services for node in nodes})


def ssh(address: str, *command: str) -> list[str]:
    """Return the SSH command line by which Ansible reaches a node."""
    options = ("BatchMode=yes", f"UserKnownHostsFile={KNOWN_HOSTS}", "StrictHostKeyChecking=yes", "ConnectTimeout=5")
    return ["ssh", "-F", "none", "-i", str(KEY), *(f"-o{each}" for each in options), f"root@{address}", *command]


def wait_until_reachable(addresses: Mapping[str, str], services: Mapping[str, Sequence[str]] | None = None) -> None:
    """Wait until every node accepts an SSH login and its container runtime runs."""

    def one(name: str) -> None:
        wanted = (services or {}).get(name, ("containerd",))
        command = ssh(addresses[name], f"systemctl is-active --quiet {' '.join(wanted)} kubegpu-lab-node")
        what = f"SSH and {' and '.join(wanted)} on {name}"
        wait_for(what, lambda: run(command, check=False).returncode == 0, 90, 0.5)

    each(one, list(addresses))
