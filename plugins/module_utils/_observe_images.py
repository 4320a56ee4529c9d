# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look which images a node's container runtime has."""

from __future__ import annotations

import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._images import archives
from ansible_collections.kubegpu.share.plugins.module_utils._observe_containerd import service
from ansible_collections.kubegpu.share.plugins.module_utils._system import System


def images_command(system: System) -> list[str]:
    """``ctr images`` over Kubernetes' images; ctr lies beside the daemon, whose folder root's PATH may lack."""
    ctr = posixpath.join(posixpath.dirname(service(system).binary), "ctr")
    return [ctr, "--connect-timeout", "5s", "-n", "k8s.io", "images"]


def observe(system: System, references: t.Sequence[str]) -> dict[str, str]:
    """Those of the references that containerd has for Kubernetes, each with its archive's SHA-256 (or nothing)."""
    done = system.run([*images_command(system), "ls"], timeout=20)
    return archives(done.out, references) if done.rc == 0 else {}
