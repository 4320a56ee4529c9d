# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of images, and the images of a node's container runtime."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._host.system import System
from .._host.systemd import unit
from .._rancher.settings import K3S, RKE2
from .._runtime import k3s, kubelet
from .._runtime.containerd import UNIT

# Label on an image in the node's store: SHA-256 of its archive.
ARCHIVE_LABEL = "kubegpu.share/archive"
# kubelet's garbage collection keeps images with this label.
PINNED_LABEL = "io.cri-containerd.pinned"


def full_reference(reference: str) -> str:
    """Return a reference as container runtimes store it, with registry and with tag or digest.

    ``gpushare:1.0`` becomes docker.io/library/gpushare:1.0.
    """
    first, slash, rest = reference.partition("/")
    if not slash:
        name = f"docker.io/library/{reference}"
    elif "." in first or ":" in first or first == "localhost":
        name = f"docker.io/library/{rest}" if first == "docker.io" and "/" not in rest else reference
    else:
        name = f"docker.io/{reference}"
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def repository_and_tag(reference: str) -> tuple[str, str]:
    """Split a reference into what charts write as ``repository:tag``; the tag is empty where there is none.

    With a digest the second part is ``tag@sha256:...``, or what follows ``@sha256:`` where the reference has no tag.
    """
    name, at, digest = reference.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = name, ""
    if not at:
        return repository, tag
    if tag:
        return repository, f"{tag}@{digest}"
    algorithm, _colon, value = digest.partition(":")
    return f"{repository}@{algorithm}", value


def archives(listing: str, references: t.Sequence[str]) -> dict[str, str]:
    """Parse ``ctr images ls``.

    :param references: the images to look for, as the user wrote them.
    :returns: the existing ones with the SHA-256 of their archive; empty if unknown.
    """
    labels: dict[str, str] = {}
    for line in listing.splitlines()[1:]:
        columns = line.split()
        if columns:
            match = re.search(rf"(?:^|[\s,]){re.escape(ARCHIVE_LABEL)}=([0-9a-f]{{64}})(?:$|[\s,])", line)
            labels[columns[0]] = match.group(1) if match else ""
    return {
        reference: labels[full_reference(reference)] for reference in references if full_reference(reference) in labels
    }


def images_command(system: System) -> list[str]:
    """Return the command ``ctr images`` for Kubernetes' images, of the containerd that the kubelet uses."""
    observed = kubelet.observe(system)
    kind = next(
        (distribution for distribution in (K3S, RKE2) if observed and observed["runtime"] == distribution.name), None
    )
    if kind is None:
        # In the daemon's folder.
        ctr: tuple[str, ...] = (posixpath.join(posixpath.dirname(unit(system, UNIT).binary), "ctr"),)
    else:
        daemon = k3s.daemon_of(system, kind)
        data = k3s.data_folder(kind, k3s.settings_of(system, kind, daemon))
        client = kind.client("ctr", daemon.binary, data)
        ctr = (*client, "--address", k3s.SOCKET)
    return [*ctr, "--connect-timeout", "5s", "-n", "k8s.io", "images"]


def observe(system: System, references: t.Sequence[str]) -> dict[str, str]:
    """Return the references that containerd has for Kubernetes with the SHA-256 of their archive; empty if unknown."""
    done = system.run([*images_command(system), "ls"], timeout=20)
    return archives(done.out, references) if done.rc == 0 else {}
