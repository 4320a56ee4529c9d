# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files that prevent nouveau from being loaded."""

from __future__ import annotations

PATH = "/etc/modprobe.d/blacklist-nouveau.conf"
# The two lines of NVIDIA's installation guide: the first prevents loading it, the second prevents it from using a GPU.
DIRECTIVES = ("blacklist nouveau", "options nouveau modeset=0")

# dracut puts /etc/modprobe.d only into images for one host. Cloud machines have images for every host, nouveau inside.
DRACUT_PATH = "/etc/dracut.conf.d/kubegpu-nouveau.conf"


def directives(text: str) -> list[str]:
    """Return a modprobe.d file's directives with single blanks, without comments."""
    lines = (" ".join(line.split("#", 1)[0].split()) for line in text.splitlines())
    return [line for line in lines if line]


def blacklisted(text: str) -> bool:
    """Return whether a modprobe.d file prevents loading nouveau."""
    return DIRECTIVES[0] in directives(text)
