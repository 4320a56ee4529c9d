# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe the images of a node's container runtime."""

from __future__ import annotations

import posixpath
import typing as t

from .._host.system import System
from .._host.systemd import unit
from .._rancher.settings import K3S, RKE2
from .._runtime import k3s, k3s_query, kubelet
from .._runtime.containerd_query import UNIT
from .names import archives


def images_command(system: System) -> list[str]:
    """Return the command ``ctr images`` for Kubernetes' images, of the containerd that the kubelet uses."""
    found = kubelet.observe(system)
    kind = next((one for one in (K3S, RKE2) if found and found["runtime"] == one.name), None)
    if kind is None:
        # In the daemon's folder.
        ctr: tuple[str, ...] = (posixpath.join(posixpath.dirname(unit(system, UNIT).binary), "ctr"),)
    else:
        daemon = k3s_query.daemon_of(system, kind)
        data = k3s_query.data_folder(kind, k3s_query.settings_of(system, kind, daemon))
        client = kind.client("ctr", daemon.binary, data)
        ctr = (*client, "--address", k3s.SOCKET)
    return [*ctr, "--connect-timeout", "5s", "-n", "k8s.io", "images"]


def observe(system: System, references: t.Sequence[str]) -> dict[str, str]:
    """Return the references that containerd has for Kubernetes with the SHA-256 of their archive; empty if unknown."""
    done = system.run([*images_command(system), "ls"], timeout=20)
    return archives(done.out, references) if done.rc == 0 else {}
