# SPDX-License-Identifier: GPL-3.0-or-later
"""A small Debian on a disk, which boots by its own initramfs and keeps what is written: for what has to survive a boot.

It has initramfs-tools and dracut, one kernel with few modules, and the simulated cards, which appear in the initramfs,
before udev starts there, as real ones would be there from the beginning. There is no boot loader: QEMU loads the kernel
and the image in the disk's /boot. The root's first process is systemd, whose last unit is ``boot`` beside this file.
NVIDIA's programs are stand-ins for the simulated driver, from ``tools``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import ansible

from lab.aptsources import read_machine
from lab.guest import initramfs, machine
from lab.guest.kernel import Kernel
from lab.paths import CHECKOUT, cache_root, made_once
from lab.rootfs import BASE_PACKAGES, rootfs
from lab.shell import LabError, run, step

BOOT = Path(__file__).resolve().parent / "boot"
TOOLS = BOOT.parent / "tools"
NVIDIA = {"nvidia-smi": "usr/bin", "sriov-manage": "usr/lib/nvidia"}
# Beside the base system: both tools with what they need; no scripts of packages are run.
PACKAGES = (
    *("initramfs-tools", "initramfs-tools-core", "klibc-utils", "libklibc", "busybox", "linux-base", "logsave"),
    *("dracut-core", "kpartx", "dmsetup", "libdevmapper1.02.1", "libaio1", "liburcu8"),
    *("cpio", "kmod", "libkmod2", "udev", "libudev1", "zstd"),
    *("systemd", "libsystemd-shared", "libsystemd0", "libcryptsetup12", "libfdisk1", "libjson-c5", "libargon2-1"),
    *("libp11-kit0", "libapparmor1", "mount"),
)
# What only takes time: no console has a login, and no file has to be made anew.
MASKED = (
    *("getty.target", "timers.target", "remote-fs.target", "e2scrub_reap.service", "systemd-logind.service"),
    *("systemd-update-utmp.service", "systemd-update-utmp-runlevel.service", "systemd-random-seed.service"),
    *("systemd-hwdb-update.service", "systemd-sysusers.service", "systemd-firstboot.service", "ldconfig.service"),
    *("systemd-machine-id-commit.service", "systemd-journal-catalog-update.service", "systemd-update-done.service"),
    *("systemd-pstore.service", "systemd-binfmt.service", "systemd-ask-password-wall.path", "dev-hugepages.mount"),
    *("dev-mqueue.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "systemd-user-sessions.service"),
)
UNITS = {
    # What the initramfs's udev has loaded, which has other files than the root's.
    "guest-early.service": """\
[Unit]
DefaultDependencies=no
Before=systemd-udevd.service systemd-udev-trigger.service
[Service]
Type=oneshot
ExecStart=/bin/cp /proc/modules /run/modules-of-initramfs
""",
    "guest.target": """\
[Unit]
Requires=guest.service
AllowIsolate=yes
""",
    "guest.service": """\
[Unit]
Wants=guest-early.service multi-user.target systemd-udev-settle.service
After=multi-user.target systemd-udev-settle.service
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/usr/sbin/guest-boot
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
""",
}
MACHINE_ID = "0123456789abcdef0123456789abcdef"
UNWANTED = ("usr/share/locale", "usr/share/doc", "var/cache/apt", "var/lib/apt/lists")
# The last is what ext4 asks for by its alias.
ROOT_MODULES = ("virtio_pci", "virtio_blk", "ext4", "crc32c_generic")
MODULES = (
    *(*ROOT_MODULES, "9pnet_virtio", "9p", "fakecards", "nvidia", "nouveau"),
    *("vfio_pci", "vfio_iommu_type1", "snd_hda_intel"),
)
IMAGES = {"initramfs-tools": "/boot/initrd.img-{release}", "dracut": "/boot/initramfs-{release}.img"}
# By it the collection knows dracut's names of images.
ROCKY = 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\nPRETTY_NAME="Debian with dracut, as Rocky"\n'
DRACUT = """\
dracutmodules=" base udev-rules kernel-modules rootfs-block fs-lib "
compress="cat"
hostonly="no"
drivers=" {drivers} "
force_drivers+=" fakecards "
filesystems+=" ext4 "
install_items+=" /etc/modprobe.d/fakecards.conf "
"""
# Nothing of /usr is written in place, so that second names do for it.
COPY = 'set -e; mkdir "$1"; cd "$0"; for each in *; do [ "$each" = usr ] && cp -al usr "$1" || cp -a "$each" "$1"; done'
HOOK = '#!/bin/sh\n[ "$1" = prereqs ] && exit 0\n. /usr/share/initramfs-tools/hook-functions\n'
DISK_MIB = 1500
# Increase when the steps below change the result.
RECIPE = 2


class System:
    """A disk with this system, below a folder.

    :param tool: whose initramfs it boots by.
    :param functions: of the simulated cards, as ``fakecards.c`` describes them.
    :param in_image: modules that the images contain beside those for the root.
    :param vgpu: how the simulated driver has vGPUs: none, mdev, or vendor.
    """

    def __init__(
        self,
        folder: Path,
        kernel: Kernel,
        tool: str,
        functions: Sequence[str],
        in_image: Sequence[str] = (),
        vgpu: str = "none",
    ) -> None:
        self._kernel = kernel
        self._folder = folder
        self._disk = folder / "disk"
        self._initrd = IMAGES[tool].format(release=kernel.release)
        root = folder / "root"
        run(["sh", "-c", COPY, str(_tree(kernel)), str(root)], tied=True)
        options = f"options fakecards functions={','.join(functions)}\noptions nvidia vgpu={vgpu}\n"
        _put(root / "etc/modprobe.d/fakecards.conf", options)
        if tool == "dracut":
            (root / "etc/os-release").unlink()
            _put(root / "etc/os-release", ROCKY)
            drivers = " ".join((*ROOT_MODULES, "fakecards", *in_image))
            _put(root / "etc/dracut.conf.d/10-guest.conf", DRACUT.format(drivers=drivers))
            command = ("dracut", "--force", self._initrd, kernel.release)
        else:
            # Those in this file are loaded, the others by udev.
            _put(root / "etc/initramfs-tools/modules", "\n".join((*ROOT_MODULES, "fakecards")) + "\n")
            hook = root / "etc/initramfs-tools/hooks/guest"
            _put(hook, HOOK + "".join(f"manual_add_modules {name}\n" for name in in_image))
            hook.chmod(0o755)
            _put(root / "etc/initramfs-tools/conf.d/guest", "MODULES=list\nCOMPRESS=zstd\nCOMPRESSLEVEL=1\n")
            command = ("update-initramfs", "-c", "-k", kernel.release)
        _chroot(root, *command)
        run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(self._disk), f"{DISK_MIB}M"], tied=True)
        shutil.rmtree(root)

    def boot(self, script: str, seconds: float = 900, show: Callable[[str], object] = print) -> Path:
        """Boot, run a shell script when systemd has started everything else, and shut down.

        It has this machine's files below /machine, ``$PYTHONPATH`` for the collection and ansible-core, and in
        /run/modules-of-initramfs the lines of /proc/modules from before the root's udev began.

        :param seconds: the most processor time.
        :returns: the folder that the script has had as /run/guest.
        :raises LabError: it ended without a result, or the script failed.
        """
        results = self._folder / "results"
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir()
        packages = Path(ansible.__file__).resolve().parents[1]
        path = ":".join(f"/machine{each}" for each in (CHECKOUT / "tests/kernel", CHECKOUT / ".collections", packages))
        (results / "command").write_text(f"export PYTHONPATH={path}\nset -e\n{script}\n")
        initrd = self._folder / "initrd"
        initrd.unlink(missing_ok=True)
        run(["debugfs", "-R", f"dump {self._initrd} {initrd}", str(self._disk)])
        devices = [
            *("-drive", f"file={self._disk},if=none,id=disk,format=raw,cache=unsafe"),
            *("-device", "virtio-blk-pci,drive=disk"),
            *machine.folder("machine", Path("/"), "readonly=on"),
            *machine.folder("result", results),
        ]
        arguments: tuple[str, ...] = ("root=/dev/vda", "rw", "rootfstype=ext4", "fsck.mode=skip")
        arguments += ("init=/lib/systemd/systemd", "systemd.unit=guest.target", "systemd.show_status=false")
        words = machine.command_line(self._kernel.image, initrd, arguments, devices, counted=True)
        ended = machine.boot(words, results, seconds, show)
        if ended.code:
            raise LabError(f"the script ended with {ended.code}:\n    " + "\n    ".join(ended.console))
        return results


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _chroot(root: Path, *words: str) -> None:
    inside = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    run(["unshare", "--mount", "sh", "-c", inside, str(root), *words], env=environment)


def unpack(deb: Path, root: Path, only: str = ".") -> None:
    """Unpack a package, or a folder of it; ``dpkg-deb -x`` would put a folder where the system has a link to one."""
    script = 'dpkg-deb --fsys-tarfile "$1" | tar -C "$2" -x --keep-directory-symlink "$3"'
    run(["sh", "-c", script, "sh", str(deb), str(root), only])


def _tree(kernel: Kernel) -> Path:
    """Return the system's files in the cache, without an initramfs."""
    source = read_machine()
    parts: tuple[object, ...] = (RECIPE, PACKAGES, MODULES, source.uri, source.suite, kernel.layer.parent.name)
    parts += (BOOT.read_bytes(), MASKED, UNITS, [(TOOLS / name).read_bytes() for name in NVIDIA])
    target = cache_root() / "guest" / f"system-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
    with made_once(target) as fresh:
        if fresh:
            with step("making the system that boots from a disk"):
                _make(fresh, kernel, rootfs("base", BASE_PACKAGES, source))
    os.utime(target)
    return target / "tree"


def _make(folder: Path, kernel: Kernel, base: Path) -> None:
    root, debs = folder / "tree", folder / "debs"
    root.mkdir()
    debs.mkdir()
    run(["tar", "-C", str(root), "--numeric-owner", "-xf", str(base)])
    run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *PACKAGES], cwd=str(debs))
    for deb in sorted(debs.iterdir()):
        unpack(deb, root)
    shutil.rmtree(debs)
    for name in UNWANTED:
        shutil.rmtree(root / name, ignore_errors=True)
    for name, number in (("null", 3), ("zero", 5), ("urandom", 9), ("console", 1)):
        device = os.makedev(5 if name == "console" else 1, number)
        os.mknod(root / "dev" / name, 0o020666, device)
    (root / "dev" / "fd").symlink_to("/proc/self/fd")
    (root / "etc" / "fstab").write_text("")
    modules = root / "usr/lib/modules" / kernel.release
    for file in initramfs.order((kernel.modules / "modules.dep").read_text(), MODULES):
        (modules / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kernel.modules / file, modules / file)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copyfile(kernel.modules / name, modules / name)
    run(["chroot", str(root), "depmod", kernel.release])
    shutil.copyfile(kernel.config, root / f"boot/config-{kernel.release}")
    shutil.copyfile(kernel.image, root / f"boot/vmlinuz-{kernel.release}")
    programs = {BOOT: "usr/sbin/guest-boot", **{TOOLS / name: f"{place}/{name}" for name, place in NVIDIA.items()}}
    for source, path in programs.items():
        (root / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, root / path)
        (root / path).chmod(0o755)
    for name, text in UNITS.items():
        _put(root / "etc/systemd/system" / name, text)
    for name in MASKED:
        (root / "etc/systemd/system" / name).symlink_to("/dev/null")
    (root / "etc/machine-id").write_text(f"{MACHINE_ID}\n")
    (root / "machine").mkdir()
