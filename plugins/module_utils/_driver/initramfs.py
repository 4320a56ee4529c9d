# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tool that builds a machine's initramfs images, their names, and the validation of a new one."""

from __future__ import annotations

import dataclasses
import re
import typing as t

# The program that lists an image's content.
LISTERS = {"initramfs-tools": "lsinitramfs", "dracut": "lsinitrd"}
FAMILIES = ("debian", "redhat", "suse")

# No boot loader may take a kept or an incomplete image. grub-mkconfig, kernel-install's BLS entries and zipl search
# vmlinuz-* and then the image named exactly after that release; rEFInd and scripts take every name that begins with
# "init". None of them, nor the kernel packages' own globs, matches a hidden name.
KEPT = "/boot/.kubegpu-old-initramfs-"
BUILT = "/boot/.kubegpu-new-initramfs-"

# A rebuild may make an image smaller (one for every host becomes one for this host), but not by more than this factor.
SMALLEST = 4


@dataclasses.dataclass(frozen=True)
class Content:
    """What an image contains; ``nouveau``: nouveau or nova."""

    init: bool
    nouveau: bool
    blacklist: bool


def tool_of(family: str, exists: t.Callable[[str], bool]) -> str | None:
    """Return the tool that the kernel packages' own scripts call; None where there is none.

    Debian's dracut may be installed beside the remains of initramfs-tools.
    """
    if family not in FAMILIES:
        return None
    dracut = any(exists(f"{folder}/dracut") for folder in ("/usr/bin", "/usr/sbin", "/sbin"))
    if family == "debian" and exists("/usr/sbin/update-initramfs") and exists("/usr/sbin/mkinitramfs"):
        return "dracut" if dracut and exists("/etc/kernel/postinst.d/dracut") else "initramfs-tools"
    return "dracut" if dracut else None


def image_of(family: str, release: str) -> str:
    """Return the path of one kernel's image; those of crash dumps and rescue kernels have other names and stay."""
    if family == "redhat":
        return f"/boot/initramfs-{release}.img"
    return f"/boot/{'initrd' if family == 'suse' else 'initrd.img'}-{release}"


def content(text: str, file: str) -> Content:
    """Parse the output of lsinitramfs (names only) or lsinitrd (as ls -l).

    :param file: the modprobe.d file to search.
    """

    def has(name: str) -> bool:
        return re.search(rf"(?:^|\s)(?:\.?/)?{name}(?: -> .*)?$", text, re.MULTILINE) is not None

    return Content(
        init=has("init"),
        nouveau=re.search(r"/(?:nouveau|nova[-_]core)\.ko(?:\.\w+)?$", text, re.MULTILINE) is not None,
        blacklist=has(re.escape(file.lstrip("/"))),
    )


def image_error(old_bytes: int, new_bytes: int, inside: Content | None, blacklist: bool) -> str:
    """Return why a new image can't replace the old one; empty where it can.

    :param inside: None where the lister can't read the image.
    :param blacklist: whether it must contain the file.
    """
    if inside is None:
        return "can't be read"
    if new_bytes * SMALLEST < old_bytes:
        return f"has {new_bytes} bytes where the old one has {old_bytes}"
    if not inside.init:
        return "contains no init"
    if blacklist and not inside.blacklist:
        return "doesn't contain the blacklist"
    return ""


def boot_read_only(mounts: str) -> bool:
    """Return whether the file system of /boot is mounted read-only, by /proc/self/mounts."""
    longest, answer = -1, False
    for line in mounts.splitlines():
        fields = line.split(" ")
        point = fields[1].rstrip("/") if len(fields) > 3 else None
        # Of two mounts at one place the later one counts.
        if point is not None and len(point) >= longest and point in ("", "/boot"):
            longest, answer = len(point), "ro" in fields[3].split(",")
    return answer
