# SPDX-License-Identifier: GPL-3.0-or-later
"""The real GRUB boots a real kernel from a disk: it takes the entry that the module says, with the module's arguments.

Long: three boots in software take about a minute of processor time.
"""

from __future__ import annotations

import shutil

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._boot import plan
from ansible_collections.kubegpu.share.plugins.module_utils._boot.apply import BootReconciler, work
from grub_disk import Disk, initramfs
from real_initramfs import kernels
from real_loaders import Chroot

pytestmark = pytest.mark.long

UUID = "2f5a3c1e-7d0b-4b57-9a55-0d8f4bb9f0aa"
PRESENT = {"state": "present", "arguments": ["intel_iommu=on", "iommu=pt"], "iommu": False}
ABSENT = {"state": "absent", "arguments": [], "iommu": False}
DEFAULT = """\
GRUB_DEFAULT=saved
GRUB_TIMEOUT=0
GRUB_TERMINAL=console
GRUB_CMDLINE_LINUX_DEFAULT="console=ttyS0 quiet no_timer_check panic=-1"
GRUB_CMDLINE_LINUX=""
"""


def test_grub_boots_the_entry_and_the_arguments_that_were_proven(tmp_path):
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no qemu-system-x86_64, which boots the disk")
    machine = Chroot(tmp_path / "tree")
    (machine.root / "proc").mkdir(exist_ok=True)
    machine.put("/proc/cmdline", "root=/dev/vda1 ro console=ttyS0 quiet\n")
    machine.put("/etc/default/grub", DEFAULT)
    old, new = kernels()
    for release in (old, new):
        (machine.root / "boot" / f"initrd.img-{release}").write_bytes(initramfs(machine.root))
    machine.must("update-grub")
    machine.must("grub-editenv", "/boot/grub/grubenv", "create")
    machine.must("grub-set-default", "0")
    machine.must("grub-reboot", f"gnulinux-advanced-{UUID}>gnulinux-{old}-advanced-{UUID}")
    # GRUB itself writes into its environment.
    before = {path: digest for path, digest in machine.content().items() if not path.endswith("/grubenv")}
    assert work(PRESENT, False, machine)["reboot_required"]
    assert not before.items() <= machine.content().items()
    disk = Disk(machine.root, tmp_path, UUID)

    def proven():
        return BootReconciler(machine, plan.Options(False)).observe()["next"]

    # Once the old kernel, as grub-reboot has it; GRUB itself forgets that on the disk, and then boots the new one.
    for release, once in ((old, True), (new, False)):
        said = proven()
        booted, groups = disk.boot()
        assert groups > 0
        assert booted[0] == f"BOOT_IMAGE=/boot/vmlinuz-{release}"
        assert (booted[1:], said["once"]) == (said["arguments"].split(), once)
        assert {"intel_iommu=on", "iommu=pt"} <= set(booted)
        machine.must("grub-editenv", "/boot/grub/grubenv", "unset", "next_entry")
    machine.put("/proc/cmdline", " ".join(booted))
    assert not work(PRESENT, False, machine)["reboot_required"]

    assert work(ABSENT, False, machine)["reboot_required"]
    assert before.items() <= machine.content().items()
    disk.fill()
    booted, groups = disk.boot()
    assert booted[1:] == ["root=/dev/vda1", "ro", "console=ttyS0", "quiet", "no_timer_check", "panic=-1"]
    # Debian's kernel turns Intel's IOMMU on by itself.
    assert groups > 0
