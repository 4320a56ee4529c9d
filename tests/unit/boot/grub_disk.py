# SPDX-License-Identifier: GPL-3.0-or-later
"""A disk with the real GRUB and a tree's /boot for QEMU; its first program prints the kernel's command line."""

from __future__ import annotations

import re
import shutil
import stat
import struct
import subprocess
from pathlib import Path

SECTOR = 512
# Of the partition, in sectors and MiB; GRUB's own image is before it.
START, SIZE_MIB = 2048, 256
INIT = """\
#!/bin/busybox sh
/bin/busybox mkdir /proc /sys
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
echo "COMMAND LINE: $(/bin/busybox cat /proc/cmdline)"
echo "IOMMU GROUPS: $(/bin/busybox ls /sys/kernel/iommu_groups | /bin/busybox wc -l)"
/bin/busybox sync
/bin/busybox poweroff -f
"""
# In software a kernel takes about 20 seconds of processor time; this is the most of it.
SECONDS = 240
# Of time, however busy this machine is.
PATIENCE = 12 * SECONDS


def archive(files: dict[str, tuple[int, bytes]]) -> bytes:
    """Return an initramfs (cpio's "newc") of these files with their modes."""
    out = b""
    for number, (name, (mode, content)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        for part in (head, content):
            out += part + b"\0" * (-len(part) % 4)
    return out


def initramfs(root: Path) -> bytes:
    """Return one that prints the command line and ends the machine."""
    busybox = (root / "bin/busybox").read_bytes()
    folder, program = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755
    files = {"bin": (folder, b""), "dev": (folder, b""), "bin/busybox": (program, busybox)}
    return archive({**files, "init": (program, INIT.encode())})


class Disk:
    """A disk of a tree.

    :param uuid: of its file system, by which GRUB's menu searches it.
    """

    def __init__(self, root: Path, folder: Path, uuid: str) -> None:
        self._root = root
        self._image = folder / "disk.img"
        self._partition = folder / "partition.img"
        self._uuid = uuid
        modules = root / "usr/lib/grub/i386-pc"
        if not (root / "boot/grub/i386-pc").exists():
            shutil.copytree(modules, root / "boot/grub/i386-pc")
        core = folder / "core.img"
        words = ["grub-mkimage", "-O", "i386-pc", "-p", "(hd0,msdos1)/boot/grub", "-o", "/core.img"]
        subprocess.run(["chroot", str(root), *words, "biosdisk", "part_msdos", "ext2"], check=True)
        shutil.move(root / "core.img", core)
        self._first = self._sectors(modules / "boot.img", core)
        self.fill()

    def _sectors(self, boot: Path, core: Path) -> bytes:
        """Return what is before the partition: GRUB's first sector with the table of partitions, and its own image."""
        entry = struct.pack("<B3sB3sII", 0x80, b"\0\0\0", 0x83, b"\0\0\0", START, SIZE_MIB * 2048)
        first = boot.read_bytes()[:440].ljust(446, b"\0") + entry.ljust(64, b"\0") + b"\x55\xaa"
        return (first + core.read_bytes()).ljust(START * SECTOR, b"\0")

    def fill(self) -> None:
        """Write the tree's /boot as it is now."""
        staged = self._partition.parent / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(self._root / "boot", staged / "boot")
        self._partition.unlink(missing_ok=True)
        subprocess.run(
            [
                *("mke2fs", "-q", "-t", "ext4", "-O", "^metadata_csum,^64bit", "-U", self._uuid, "-d", str(staged)),
                *(str(self._partition), f"{SIZE_MIB}M"),
            ],
            check=True,
        )
        self._image.write_bytes(self._first)
        with self._image.open("ab") as image, self._partition.open("rb") as partition:
            shutil.copyfileobj(partition, image)

    def boot(self) -> tuple[list[str], int]:
        """Boot the disk on a board with Intel's IOMMU.

        :returns: the words of the command line that the kernel got, and the number of its IOMMU groups.
        """
        done = subprocess.run(
            [
                *(
                    "prlimit",
                    f"--cpu={SECONDS}",
                    "qemu-system-x86_64",
                    "-accel",
                    "tcg",
                    "-m",
                    "512",
                    "-nodefaults",
                    "-display",
                    "none",
                    "-no-reboot",
                ),
                *("-machine", "q35,kernel_irqchip=split", "-device", "intel-iommu,intremap=on"),
                *("-serial", "stdio", "-drive", f"file={self._image},format=raw,if=ide"),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
        said = dict(re.findall(r"^(COMMAND LINE|IOMMU GROUPS): (.*)$", done.stdout.replace("\r", ""), re.MULTILINE))
        assert len(said) == 2, f"the kernel didn't get to its first program: {done.stdout[-2000:]} {done.stderr[-500:]}"
        return said["COMMAND LINE"].split(), int(said["IOMMU GROUPS"])
