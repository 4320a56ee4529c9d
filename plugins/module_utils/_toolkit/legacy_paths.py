# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths of NVIDIA's earlier container tools, and of the record of what was removed of them."""

from __future__ import annotations

STORE = "/var/lib/kubegpu-share/legacy"
RECORD = f"{STORE}/record.json"

# Drop-ins of releases of nvidia-ctk; the role runtime handles their effect.
DROP_INS = (
    "/etc/containerd/config.d/99-nvidia.toml",
    "/etc/containerd/conf.d/99-nvidia.toml",
    "/etc/crio/conf.d/99-nvidia.toml",
    "/etc/crio/crio.conf.d/99-nvidia.toml",
)
