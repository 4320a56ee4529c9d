# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the roles keep what virtual machines are to have of a machine's cards."""

from __future__ import annotations

PASSTHROUGH = "/var/lib/kubegpu-share/passthrough.json"
# The program that restores vGPUs at boot imports nothing, and has this path, too.
VGPU = "/var/lib/kubegpu-share/vgpu.json"
