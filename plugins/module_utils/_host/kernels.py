# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of a machine's kernels the driver's module is needed for. Pure."""

from __future__ import annotations

import typing as t

from .._core.natural import natural


def booted(kernel: t.Mapping[str, t.Any]) -> list[str]:
    """Return the running and the newest installed kernel; none in a container, which has no kernel of its own.

    :param kernel: section ``kernel`` of ``gpu_node``.
    """
    installed = [str(release) for release in kernel.get("installed") or []]
    if not installed:
        return []
    return list(dict.fromkeys([str(kernel.get("release")), max(installed, key=natural)]))
