# SPDX-License-Identifier: GPL-3.0-or-later
"""The module with the real update-grub, grub-mkconfig, grub-editenv, kernel-install and bootctl of Debian.

Long: the tree is made from packages on first use. ``test_boot_machines`` has the same cases with simulated tools.
"""

from __future__ import annotations

import re

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._boot import plan
from ansible_collections.kubegpu.share.plugins.module_utils._boot.apply import BootReconciler, work
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect, ShareError
from boot_machines import SUSE_DEFAULT, bls_entry
from real_initramfs import kernels
from real_loaders import MACHINE_ID, Chroot

pytestmark = pytest.mark.long

BOTH = ["intel_iommu=on", "iommu=pt"]
PRESENT = {"state": "present", "arguments": BOTH, "iommu": False}
ABSENT = {"state": "absent", "arguments": [], "iommu": False}
# What cloud images have there.
CLOUD = {
    "/etc/default/grub.d/10_cloud.cfg": 'GRUB_CMDLINE_LINUX_DEFAULT="console=tty0 console=ttyS0,115200"\n',
    "/etc/default/grub.d/15_timeout.cfg": "GRUB_TIMEOUT=0\n",
    "/etc/default/grub.d/kdump.cfg": 'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT crashkernel=1G"\n',
}
MENU = "/boot/grub/grub.cfg"
UUID = "2f5a3c1e-7d0b-4b57-9a55-0d8f4bb9f0aa"
RECOVERY = f"gnulinux-advanced-{UUID}>gnulinux-{{release}}-recovery-{UUID}"


@pytest.fixture
def machine(tmp_path):
    chroot = Chroot(tmp_path / "tree")
    (chroot.root / "proc").mkdir(exist_ok=True)
    chroot.put("/proc/cmdline", "BOOT_IMAGE=/boot/vmlinuz root=/dev/vda1 ro quiet\n")
    return chroot


def observed(machine):
    return BootReconciler(machine, plan.Options(False)).observe()


def linux_lines(machine):
    return [line.split() for line in machine.read(MENU).splitlines() if line.strip().startswith("linux\t")]


def kept_and_undone(machine, before):
    """The second run changes nothing, and the undo brings back every byte."""
    after = machine.content()
    assert not work(PRESENT, False, machine)["changed"]
    assert machine.content() == after
    assert work(ABSENT, False, machine)["changed"]
    assert machine.content() == before
    assert not work(ABSENT, False, machine)["changed"]


@pytest.mark.parametrize("cloud", [False, True])
def test_update_grub_writes_what_was_added_into_each_entry(machine, cloud):
    for path, text in CLOUD.items() if cloud else ():
        machine.put(path, text)
    machine.must("update-grub")
    before, entries = machine.content(), len(linux_lines(machine))
    assert observed(machine)["loader"] == "grub-drop-in"
    assert work(PRESENT, False, machine)["arguments"] == BOTH
    lines = linux_lines(machine)
    # The default, and of each kernel at least two, of which one is for recovery.
    assert len(lines) == entries >= 1 + 2 * len(kernels())
    assert all(set(BOTH) <= set(line) for line in lines)
    machine.must("grub-script-check", MENU)
    kept_and_undone(machine, before)


@pytest.mark.parametrize(
    ("command", "single", "once"),
    [
        (("grub-set-default", "1>0"), False, False),
        (("grub-set-default", RECOVERY), True, False),
        (("grub-reboot", RECOVERY), True, True),
        (("grub-set-default", "nothing"), False, False),
    ],
)
def test_the_entry_that_grubs_own_programs_choose_is_the_next_one(machine, command, single, once):
    machine.put("/etc/default/grub", machine.read("/etc/default/grub").replace("GRUB_DEFAULT=0", "GRUB_DEFAULT=saved"))
    machine.must("update-grub")
    machine.must("grub-editenv", "/boot/grub/grubenv", "create")
    machine.must(*(word.format(release=kernels()[0]) for word in command))
    work(PRESENT, False, machine)
    found = observed(machine)["next"]
    assert ("single" in found["arguments"].split(), found["once"]) == (single, once)
    assert set(BOTH) <= set(found["arguments"].split())


@pytest.mark.parametrize("release", ["ID=opensuse-leap\nID_LIKE=suse\n", "ID=arch\n"])
def test_grub_mkconfig_alone_writes_what_default_grub_has(machine, release):
    (machine.root / "etc/os-release").unlink()
    machine.put("/etc/os-release", release)
    machine.put("/etc/default/grub", SUSE_DEFAULT.replace("saved", "0"))
    machine.must("grub-mkconfig", "-o", MENU)
    before = machine.content()
    assert observed(machine)["loader"] == "grub-default"
    work(PRESENT, False, machine)
    assert all(set(BOTH) <= set(line) for line in linux_lines(machine))
    kept_and_undone(machine, before)


@pytest.mark.parametrize(
    ("path", "text", "error"),
    [
        ("/etc/grub.d/10_linux", "#!/bin/sh\necho broken >&2\nexit 1\n", ShareError),
        # The menu is then one that GRUB itself can't read; grub-mkconfig refuses to install it.
        ("/etc/grub.d/10_linux", "#!/bin/sh\necho \"menuentry 'x' {\"\n", ShareError),
        ("/etc/default/grub.d/zz.cfg", "GRUB_CMDLINE_LINUX=ro\n", NotInEffect),
    ],
)
def test_a_menu_that_fails_or_lacks_the_arguments_leaves_the_old_one(machine, path, text, error):
    machine.must("update-grub")
    old = machine.content()
    target = machine.root / path.lstrip("/")
    target.write_text(text)
    target.chmod(0o755)
    if error is NotInEffect:
        machine.must("update-grub")
        old = machine.content()
    with pytest.raises(error):
        work(PRESENT, False, machine)
    new = machine.content()
    # grub-mkconfig leaves what it couldn't install beside the menu.
    changed = {name for name in {*old, *new} if old.get(name) != new.get(name)} - {"boot/grub/grub.cfg.new"}
    assert changed <= {path.lstrip("/")}


def test_grub_editenv_sets_kernelopts_and_sets_it_back(machine):
    (machine.root / "etc/os-release").unlink()
    machine.put("/etc/os-release", 'ID="rocky"\nID_LIKE="rhel centos fedora"\n')
    menu = '# It is automatically generated by grub2-mkconfig\nset default="${saved_entry}"\ninsmod blscfg\nblscfg\n'
    machine.put("/boot/grub2/grub.cfg", menu)
    for version in ("4.18.0-553.el8", "4.18.0-600.el8"):
        path = f"/boot/loader/entries/{MACHINE_ID}-{version}.conf"
        machine.put(path, bls_entry(version, "$kernelopts $tuned_params"))
    block = "/boot/grub2/grubenv"
    machine.must("grub-editenv", block, "create")
    machine.must("grub-editenv", block, "set", "kernelopts=root=/dev/mapper/rl-root ro crashkernel=auto")
    machine.must("grub-editenv", block, "set", f"saved_entry={MACHINE_ID}-4.18.0-553.el8")
    before = machine.content()
    work(PRESENT, False, machine)
    found = observed(machine)["next"]
    assert found["arguments"] == "root=/dev/mapper/rl-root ro crashkernel=auto intel_iommu=on iommu=pt"
    assert found["id"].endswith("553.el8")
    said = machine.must("grub-editenv", block, "list").splitlines()
    assert f"kernelopts={found['arguments']}" in said
    kept_and_undone(machine, before)


def test_kernel_install_makes_the_same_entries_and_bootctl_the_same_choice(machine):
    machine.put("/etc/kernel/cmdline", "root=UUID=2f5a3c1e ro quiet\n")
    machine.put("/etc/kernel/install.conf", "layout=bls\n")
    for folder in ("efi/loader/entries", "efi/EFI/systemd"):
        (machine.root / folder).mkdir(parents=True)
    old, new = kernels()

    def install(release):
        image = f"/boot/vmlinuz-{release}"
        machine.must("kernel-install", "add", release, image, f"/boot/initrd.img-{release}", BOOT_ROOT="/efi")

    install(old)
    before = machine.content()
    work(PRESENT, False, machine)
    assert observed(machine)["loader"] == "systemd-boot"
    path = f"/efi/loader/entries/{MACHINE_ID}-{old}.conf"
    edited = machine.read(path)
    kept_and_undone(machine, before)

    # A kernel that comes later has the arguments by kernel-install, and is the next one by systemd-boot's own order.
    work(PRESENT, False, machine)
    install(new)
    for release in (old, new):
        assert set(BOTH) <= set(re.findall(r"\S+", machine.read(f"/efi/loader/entries/{MACHINE_ID}-{release}.conf")))
    found = observed(machine)["next"]
    chosen = next(block for block in machine.list_of_bootctl().split("\n\n") if "(default)" in block)
    assert found["path"] in chosen
    assert f"options: {found['arguments']}" in chosen
    assert found["id"] == f"{MACHINE_ID}-{new}"
    assert not work(PRESENT, False, machine)["changed"]
    # kernel-install writes the words of /etc/kernel/cmdline before its own.
    install(old)
    assert sorted(machine.read(path).split()) == sorted(edited.split())

    # Undone, both kernels' entries are what kernel-install makes without the arguments.
    work(ABSENT, False, machine)
    undone = machine.content()
    install(old)
    install(new)
    assert machine.content() == undone
    assert machine.read("/etc/kernel/cmdline") == "root=UUID=2f5a3c1e ro quiet\n"
