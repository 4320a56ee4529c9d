# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a machine's table of mounts says. Pure."""

from __future__ import annotations


def read_only(mounts: str, path: str) -> bool:
    """Return whether the file system that has a path is mounted read-only.

    :param mounts: the text of /proc/self/mounts.
    :param path: absolute, without symbolic links.
    """
    longest, answer = -1, False
    for line in mounts.splitlines():
        fields = line.split(" ")
        point = fields[1].rstrip("/") if len(fields) > 3 else None
        # The later mount at a place counts.
        if point is not None and len(point) >= longest and f"{path}/".startswith(f"{point}/"):
            longest, answer = len(point), "ro" in fields[3].split(",")
    return answer
