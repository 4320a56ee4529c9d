# SPDX-License-Identifier: GPL-3.0-or-later
"""A Debian tree with two real kernels, the real initramfs-tools and the real dracut, in a chroot."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from limited import without_limit

from lab.aptsources import read_machine
from lab.guest.system import PACKAGES, unpack
from lab.paths import cache_root, made_once
from lab.rootfs import BASE_PACKAGES, rootfs
from lab.shell import LabError, run

# The modules of a small image, so that both tools are quick.
MODULES = (
    *("kernel/fs/ext4", "kernel/fs/jbd2", "kernel/fs/mbcache.ko", "kernel/drivers/virtio", "kernel/drivers/block"),
    *("kernel/drivers/vfio", "kernel/virt/lib"),
)
UNWANTED = ("usr/share/locale", "usr/share/doc", "usr/lib/python3", "usr/share/python3", "usr/lib/python3.11")
RECIPE = 4

ROCKY = 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n'

# A chroot with its own /proc, which is unmounted when the command ends.
INSIDE = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'


def kernels() -> list[str]:
    """The newest two kernels for virtual machines that the archive has."""
    done = run(["apt-cache", "search", "--names-only", r"^linux-image-[0-9.]+[0-9][-+].*-cloud-(amd64|arm64)$"])
    found = re.findall(r"^linux-image-(\d+\.\d+\.\d+\S+)", done.stdout, re.MULTILINE)
    return sorted(found, key=lambda release: [int(part) for part in re.findall(r"\d+", release)])[-2:]


def from_packages(name: str, recipe: Sequence[object], make: Callable[[Path, Path], None]) -> Path:
    """A folder of the cache, made on first use from the distribution's packages; skips where these can't be had.

    :param name: of the folder that has it.
    :param recipe: what it is made of; another one makes another folder.
    :param make: gets the new folder and a base system.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can chroot")
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get, which brings the real tools")
    try:
        source = read_machine()
        key = hashlib.sha256(repr((*recipe, source.uri, source.suite)).encode()).hexdigest()[:16]
        target = cache_root() / name / f"{source.suite}-{key}"
        with made_once(target) as fresh:
            if fresh:
                make(fresh, rootfs("base", BASE_PACKAGES, source))
    except LabError as error:
        pytest.skip(f"the real tools are unavailable: {error}")
    return target


@cache
def tree() -> Path:
    """The tree in the cache."""
    recipe = (RECIPE, PACKAGES, MODULES)
    root = from_packages("initramfs", recipe, lambda fresh, base: _make(fresh, base, kernels())) / "tree"
    try:
        _chroot(root, "lsinitramfs", "-h")
    except LabError as error:
        pytest.skip(f"the real tools are unavailable: {error}")
    return root


def _chroot(root: Path, *argv: str) -> None:
    run(["unshare", "--mount", "sh", "-c", INSIDE, str(root), *argv])


def _make(folder: Path, system: Path, releases: Sequence[str]) -> None:
    root, debs = folder / "tree", folder / "debs"
    root.mkdir()
    debs.mkdir()
    run(["tar", "-C", str(root), "-xf", str(system)])
    wanted = [*PACKAGES, *(f"linux-image-{release}" for release in releases)]
    run(["apt-get", "download", "-o", "APT::Sandbox::User=root", *wanted], cwd=str(debs))
    for deb in sorted(debs.iterdir()):
        unpack(deb, root)
    for name in UNWANTED:
        shutil.rmtree(root / name, ignore_errors=True)
    for release in releases:
        _prune(root, release)
    for name, number in (("null", 3), ("zero", 5), ("urandom", 9)):
        os.mknod(root / "dev" / name, 0o020666, os.makedev(1, number))
    (root / "dev" / "fd").symlink_to("/proc/self/fd")
    (root / "etc" / "fstab").write_text("")
    (root / "etc/dracut.conf.d/10-quick.conf").write_text('dracutmodules=" base kernel-modules "\ncompress="cat"\n')
    (root / "etc/initramfs-tools/conf.d/quick").write_text("MODULES=list\nCOMPRESS=zstd\n")
    for path in ("etc/initramfs-tools/modules", "etc/dracut.conf.d/20-nouveau.conf"):
        (root / path).write_text("nouveau\n" if path.endswith("modules") else 'add_drivers+=" nouveau "\n')
    shutil.rmtree(debs)
    # The images before nouveau is blacklisted, under Debian's and Red Hat's names.
    for release in releases:
        _chroot(root, "update-initramfs", "-c", "-k", release)
        _chroot(root, "dracut", "--force", f"/boot/initramfs-{release}.img", release)


def _prune(root: Path, release: str) -> None:
    """Keep some modules, and rename one of them nouveau, which kernels for virtual machines lack."""
    folder = root / "usr/lib/modules" / release
    for path in sorted(folder.rglob("*.ko*")):
        if not str(path.relative_to(folder)).startswith(MODULES):
            path.unlink()
    source = next(folder.rglob("virtio_input.ko*"))
    nouveau = folder / "kernel/drivers/gpu/drm/nouveau" / source.name.replace("virtio_input", "nouveau")
    nouveau.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, nouveau)
    run(["chroot", str(root), "depmod", release])


class Machine(RealSystem):
    """A copy of the tree, as the node that the module runs on: one with initramfs-tools, or one of Red Hat's family.

    :param kernels: how many it has; each costs the tools a second or two.
    """

    def __init__(self, root: Path, tool: str, kernels: int) -> None:
        super().__init__(str(root), self._inside)
        # Nothing of /usr is written in place, so that second names do for it where the cache is on this file system.
        script = """set -e; mkdir "$1"; cd "$0"; for each in *; do
            [ "$each" = usr ] && cp -al usr "$1" 2>/dev/null || cp -a "$each" "$1"; done"""
        subprocess.run(["sh", "-c", script, str(tree()), str(root)], check=True)
        self.root = root
        self.tool = tool
        self.ran: list[str] = []
        for path in root.glob("boot/initrd.img-*" if tool == "dracut" else "boot/initramfs-*"):
            path.unlink()
        if tool == "dracut":
            (root / "etc/os-release").unlink()
            self.put("/etc/os-release", ROCKY)
        for folder in sorted((root / "usr/lib/modules").iterdir())[kernels:]:
            shutil.rmtree(folder)
            for path in root.glob(f"boot/*{folder.name}*"):
                path.unlink()

    def _inside(self, argv, data=None, environ_update=None):  # type: ignore[no-untyped-def]
        words = without_limit(argv)
        self.ran.append(" ".join(words))
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", INSIDE, str(self.root), *words],
            input=data,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environ_update},
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def boot(self) -> dict[str, bytes]:
        """Every file of /boot, by a digest."""
        folder = self.root / "boot"
        return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in sorted(folder.iterdir())}
