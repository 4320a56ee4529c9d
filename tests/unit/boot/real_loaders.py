# SPDX-License-Identifier: GPL-3.0-or-later
"""A Debian tree with two real kernels, the real GRUB programs, kernel-install and bootctl, in a chroot.

Only grub-probe is a stand-in: a chroot is on no disk. It answers what grub-probe 2.06 answers on a machine with one
partition of ext4 (29 Nov 2026).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from limited import without_limit
from real_initramfs import from_packages, kernels

from lab.guest.system import unpack
from lab.shell import run

# Added to the small system; no package scripts are run.
PACKAGES = ("grub-common", "grub2-common", "gettext-base", "libdevmapper1.02.1", "systemd", "systemd-boot")
LIBRARIES = ("libsystemd-shared", "libefiboot1", "libefivar1", "libfreetype6", "libfuse2", "libcryptsetup12")
# Of a machine that boots by them.
BIOS = ("grub-pc-bin", "busybox-static")
RECIPE = 2
PROBE = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
        --target=*) target=${1#--target=} ;;
        -t) target=$2; shift ;;
    esac
    shift
done
case $target in
    device) echo /dev/vda1 ;;
    fs_uuid) echo 2f5a3c1e-7d0b-4b57-9a55-0d8f4bb9f0aa ;;
    partuuid) echo 5d2c8b1f-01 ;;
    fs) echo ext2 ;;
    partmap) echo msdos ;;
    hints_string) echo "--hint-bios=hd0,msdos1 --hint-efi=hd0,msdos1 --hint-baremetal=ahci0,msdos1" ;;
    drive) echo "(hd0,msdos1)" ;;
    compatibility_hint) echo hd0,msdos1 ;;
    abstraction | cryptodisk_uuid | fs_label) ;;
    *) exit 1 ;;
esac
"""
MACHINE_ID = "0123456789abcdef0123456789abcdef"
# A chroot with its own /proc, which is unmounted when the command ends.
INSIDE = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'


@cache
def tree() -> Path:
    """The tree in the cache."""
    return from_packages("loaders", (RECIPE, PACKAGES, LIBRARIES, BIOS, PROBE), _make) / "tree"


def _make(folder: Path, system: Path) -> None:
    root, debs = folder / "tree", folder / "debs"
    root.mkdir()
    debs.mkdir()
    run(["tar", "-C", str(root), "-xf", str(system)])
    images = [f"linux-image-{release}" for release in kernels()]
    run(["apt-get", "download", "-o", "APT::Sandbox::User=root", *PACKAGES, *LIBRARIES, *BIOS, *images], cwd=str(debs))
    for deb in sorted(debs.iterdir()):
        only = "./boot" if deb.name.startswith("linux-image-") else "."
        unpack(deb, root, only)
    shutil.rmtree(debs)
    for name in ("usr/share/locale", "usr/share/doc", "usr/lib/python3", "usr/share/python3"):
        shutil.rmtree(root / name, ignore_errors=True)
    for release in kernels():
        (root / "boot" / f"initrd.img-{release}").write_text("initrd\n")
    probe = root / "usr/sbin/grub-probe"
    probe.unlink()
    probe.write_text(PROBE)
    probe.chmod(0o755)
    for name in ("dev/null", "dev/zero"):
        (root / name).unlink(missing_ok=True)
        os.mknod(root / name, 0o020666, os.makedev(1, 3 if name == "dev/null" else 5))
    (root / "dev/fd").symlink_to("/proc/self/fd")
    (root / "etc/machine-id").write_text(f"{MACHINE_ID}\n")
    (root / "etc/default/grub").write_bytes((root / "usr/share/grub/default/grub").read_bytes())
    for name in ("boot/grub", "efi", "etc/kernel/install.d"):
        (root / name).mkdir(parents=True, exist_ok=True)
    # No module of these kernels is there.
    (root / "etc/kernel/install.d/50-depmod.install").symlink_to("/dev/null")


class Chroot(RealSystem):
    """A copy of the tree as a machine; its EFI partition is the folder /efi."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), self._inside)
        script = """set -e; mkdir "$1"; cd "$0"; for each in *; do
            [ "$each" = usr ] && cp -al usr "$1" 2>/dev/null || cp -a "$each" "$1"; done"""
        subprocess.run(["sh", "-c", script, str(tree()), str(root)], check=True)
        self.root = root

    def _inside(self, argv, data=None, environ_update=None):  # type: ignore[no-untyped-def]
        return self.execute(without_limit(argv), environ_update, data)

    def execute(self, words, environment=None, data=None):  # type: ignore[no-untyped-def]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", INSIDE, str(self.root), *words],
            input=data,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **(environment or {})},
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def must(self, *words: str, **environment: str) -> str:
        """Run a program of the tree, and return its output."""
        rc, out, err = self.execute(words, environment)
        assert rc == 0, f"{words}: {err}"
        return str(out)

    def put(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def content(self) -> dict[str, bytes]:
        """Every file of /etc, /boot and /efi, by a digest."""
        folders = [self.root / name for name in ("etc", "boot", "efi", "var/lib/kubegpu-share")]
        paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return {str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).digest() for path in sorted(paths)}

    def list_of_bootctl(self) -> str:
        """What the real bootctl says of the entries, on a file system of their own."""
        script = """set -e; mount -t proc proc "$0/proc"; mkdir "$0/run/esp"; cp -a "$0/efi/." "$0/run/esp"
            mount -t tmpfs esp "$0/efi"; cp -a "$0/run/esp/." "$0/efi"
            rm -r "$0/run/esp"; exec chroot "$0" bootctl --esp-path=/efi list"""
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, str(self.root)],
            capture_output=True,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_RELAX_ESP_CHECKS": "1", "LC_ALL": "C"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
