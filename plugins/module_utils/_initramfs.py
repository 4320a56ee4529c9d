# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Which tool makes a machine's initramfs images, how they are named, and whether a new one can be trusted. Pure."""

from __future__ import annotations

import dataclasses
import re
import typing as t

TOOLS = ("initramfs-tools", "dracut")
# Which program shows what is inside an image.
LISTERS = {"initramfs-tools": "lsinitramfs", "dracut": "lsinitrd"}
FAMILIES = ("debian", "redhat", "suse")

# A kept or a half-made image must be mistaken for a bootable one by nobody. grub-mkconfig, kernel-install's BLS entries
# and zipl look for vmlinuz-* and then for the image named exactly after that release; rEFInd and scripts take whatever
# begins with "init". A hidden name is met by none of them, nor by the kernel packages' own globs.
KEPT = "/boot/.kubegpu-old-initramfs-"
BUILT = "/boot/.kubegpu-new-initramfs-"

# A rebuild may well make an image smaller (one for every host becomes one for this host), but not to a scrap.
SMALLEST = 4


@dataclasses.dataclass(frozen=True)
class Content:
    """What an image's list of files tells."""

    init: bool
    nouveau: bool
    blacklist: bool


def tool_of(family: str, exists: t.Callable[[str], bool]) -> str | None:
    """The tool that the kernel packages' own scripts call, or None.

    Debian's dracut lives beside the rest of an initramfs-tools that was there before.
    """
    if family not in FAMILIES:
        return None
    dracut = any(exists(f"{folder}/dracut") for folder in ("/usr/bin", "/usr/sbin", "/sbin"))
    if family == "debian" and exists("/usr/sbin/update-initramfs") and exists("/usr/sbin/mkinitramfs"):
        return "dracut" if dracut and exists("/etc/kernel/postinst.d/dracut") else "initramfs-tools"
    return "dracut" if dracut else None


def image_of(family: str, release: str) -> str:
    """The image of one kernel: that of crash dumps and the rescue image have other names and are never touched."""
    if family == "redhat":
        return f"/boot/initramfs-{release}.img"
    return f"/boot/{'initrd' if family == 'suse' else 'initrd.img'}-{release}"


def content(text: str, file: str) -> Content:
    """Read what lsinitramfs (names alone) or lsinitrd (as ls -l) prints.

    :param file: the modprobe.d file that is looked for.
    """

    def has(name: str) -> bool:
        return re.search(rf"(?:^|\s)(?:\.?/)?{name}(?: -> .*)?$", text, re.MULTILINE) is not None

    return Content(
        init=has("init"),
        nouveau=re.search(r"/nouveau\.ko(?:\.\w+)?$", text, re.MULTILINE) is not None,
        blacklist=has(re.escape(file.lstrip("/"))),
    )


def distrust(old_bytes: int, new_bytes: int, inside: Content | None, blacklist: bool) -> str:
    """Why a new image can't take the old one's place, or nothing.

    :param inside: None where the lister can't read it.
    :param blacklist: whether our file must be inside.
    """
    if inside is None:
        return "can't be read"
    if new_bytes * SMALLEST < old_bytes:
        return f"has {new_bytes} bytes where the old one has {old_bytes}"
    if not inside.init:
        return "has no init inside"
    if blacklist and not inside.blacklist:
        return "doesn't hold the blacklist"
    return ""


def read_only(mounts: str, path: str = "/boot") -> bool:
    """Whether the file system that a path is on is mounted read-only, as /proc/self/mounts tells."""
    longest, answer = -1, False
    for line in mounts.splitlines():
        fields = line.split(" ")
        point = fields[1].rstrip("/") if len(fields) > 3 else None
        # Of two mounts on one place the later one counts.
        if point is not None and len(point) >= longest and (path == point or path.startswith(point + "/")):
            longest, answer = len(point), "ro" in fields[3].split(",")
    return answer
