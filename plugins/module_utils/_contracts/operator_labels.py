# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The labels of nodes by which NVIDIA's GPU Operator selects them for its parts, but for OPERANDS in backends."""

from __future__ import annotations

# In front of each part's name.
PREFIX = "nvidia.com/gpu.deploy."
DRIVER = f"{PREFIX}driver"
TOOLKIT = f"{PREFIX}container-toolkit"
DEVICE_PLUGIN = f"{PREFIX}device-plugin"
VALIDATOR = f"{PREFIX}operator-validator"
# Whether it runs containers (also without the label) or virtual machines.
WORKLOAD, CONTAINER = "nvidia.com/gpu.workload.config", "container"
WHOLE, DIVIDED = "vm-passthrough", "vm-vgpu"
