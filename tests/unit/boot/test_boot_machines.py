# SPDX-License-Identifier: GPL-3.0-or-later
"""The module on whole machines, one with each boot loader: what is added, proven, refused, restored and undone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from action_plugins import act
from ansible_collections.kubegpu.share.plugins.action import kernel_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._boot import layout, places, plan, words
from ansible_collections.kubegpu.share.plugins.module_utils._boot.apply import BootReconciler, work
from ansible_collections.kubegpu.share.plugins.module_utils._boot.loaders import PENDING, RECORD, REFUSALS, observe
from ansible_collections.kubegpu.share.plugins.module_utils._boot.types import BootFacts
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import observations
from boot_machines import (
    DEFAULT,
    ESP_ENTRY,
    MACHINES,
    NEW,
    OLD,
    OPTIONS,
    RESCUE,
    SUSE_DEFAULT,
    Machine,
    bls_entry,
    debian,
    esp_entry,
    pop_os,
    proxmox,
    rocky,
    rpm_ostree,
    suse,
    systemd_boot,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from node_fakes import killed_at_every_step

every_loader = pytest.mark.parametrize("make", MACHINES.values(), ids=MACHINES)
BOTH = ["intel_iommu=on", "iommu=pt"]


def params(*arguments: str, state: str = "present", iommu: bool = False) -> dict[str, Any]:
    return {"state": state, "arguments": list(arguments), "iommu": iommu}


ABSENT = params(state="absent")


def boot(machine: Machine) -> Any:
    return BootReconciler(machine, plan.Options(False)).observe()


def observed(machine: Machine) -> dict[str, Any]:
    """The sections of ``gpu_node`` that the action reads."""
    section = boot(machine)
    return {"iommu": section.pop("iommu"), "boot": section}


def next_words(machine: Machine) -> list[str]:
    found = plan.next_words(boot(machine))
    assert found is not None
    return found


@pytest.mark.parametrize("loader", MACHINES)
def test_arguments_are_added_proven_kept_and_undone_to_the_byte(loader: str) -> None:
    machine = MACHINES[loader]()
    assert boot(machine)["loader"] == loader
    before = next_words(machine)
    predicted = work(params(*BOTH), True, machine)
    assert (predicted["changed"], machine.difference()) == (True, {})

    done = work(params(*BOTH), False, machine)
    assert (done["changed"], done["loader"], done["arguments"]) == (True, loader, BOTH)
    assert done["reboot_required"]
    assert done["diff"] == predicted["diff"]
    after = next_words(machine)
    assert [word for word in after if word not in BOTH] == before
    assert set(BOTH) <= set(after)
    assert machine.modes[RECORD] == 0o600
    assert PENDING not in machine.files

    machine.ran.clear()
    again = work(params(*BOTH), False, machine)
    assert (again["changed"], again["reboot_required"]) == (False, True)
    assert not [line for line in machine.ran if "mkdir" in line or "update-grub" in line or "mkconfig" in line]
    machine.reboot()
    assert not work(params(*BOTH), False, machine)["reboot_required"]

    gone = work(ABSENT, False, machine)
    assert (gone["changed"], gone["reboot_required"]) == (True, True)
    assert machine.difference() == {}
    assert next_words(machine) == before
    assert not work(ABSENT, False, machine)["changed"]


@every_loader
def test_only_what_is_missing_is_added_and_what_is_no_longer_wanted_removed(make: Callable[[], Machine]) -> None:
    machine = make()
    work(params(*BOTH), False, machine)
    less = work(params("iommu=pt"), False, machine)
    assert (less["changed"], less["arguments"]) == (True, ["iommu=pt"])
    assert "intel_iommu=on" not in next_words(machine)
    assert "iommu=pt" in next_words(machine)
    assert work(params(), False, machine)["changed"]
    assert machine.difference() == {}


@every_loader
def test_a_run_that_was_killed_anywhere_is_completed_or_undone(make: Callable[[], Machine]) -> None:
    for machine in killed_at_every_step(make, lambda node: work(params(*BOTH), False, node), least=1):
        # The others' programs keep their state outside of the files.
        undone = copy.deepcopy(machine) if make not in (rpm_ostree, proxmox) else None
        work(params(*BOTH), False, machine)
        assert set(BOTH) <= set(next_words(machine))
        assert PENDING not in machine.files
        for path in machine.names("/var/tmp/espmounts/936E-9A3F"):
            assert set(BOTH) <= set(machine.files[f"/var/tmp/espmounts/936E-9A3F/{path}"].split())
        assert not work(params(*BOTH), False, machine)["changed"]
        work(ABSENT, False, machine)
        assert machine.difference() == {}
        if undone is not None:
            undone.commands.update(rebound(undone))
            work(ABSENT, False, undone)
            assert undone.difference() == {}


def rebound(machine: Machine) -> dict[str, Any]:
    """The commands of a copy, which change the copy."""
    return {name: machine._program for name, answer in machine.commands.items() if callable(answer)}


def begun(make: Callable[[], Machine]) -> Machine:
    machine = make()
    work(params(*BOTH), False, machine)
    return machine


@every_loader
def test_an_undo_that_was_killed_anywhere_is_completed(make: Callable[[], Machine]) -> None:
    for machine in killed_at_every_step(lambda: begun(make), lambda node: work(ABSENT, False, node), least=1):
        work(ABSENT, False, machine)
        assert machine.difference() == {}
        assert not work(ABSENT, False, machine)["changed"]


# --------------------------------------------------------------------------- a user's own arguments


CONFLICTS: dict[str, tuple[Callable[[], Machine], str, str]] = {
    "default": (lambda: debian('GRUB_CMDLINE_LINUX="intel_iommu=off"\n'), DEFAULT, "intel_iommu=off"),
    "drop-in": (
        lambda: debian(drop_ins={"10-nic.cfg": 'GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=off"\n'}),
        "/etc/default/grub.d/10-nic.cfg",
        "iommu=off",
    ),
    "suse": (lambda: suse(SUSE_DEFAULT.replace("quiet", "intel_iommu=off")), DEFAULT, "intel_iommu=off"),
    "entry": (lambda: rocky(more={NEW: bls_entry("5.14", f"{OPTIONS} iommu=off")}), NEW, "iommu=off"),
    "older-entry": (lambda: rocky(more={OLD: bls_entry("5.14", "ro intel_iommu=off")}), OLD, "intel_iommu=off"),
    "cmdline": (
        lambda: rocky(more={"/etc/kernel/cmdline": "ro intel_iommu=off\n"}),
        "/etc/kernel/cmdline",
        "intel_iommu=off",
    ),
    "kernelopts": (
        lambda: rocky("$kernelopts $tuned_params", "kernelopts=root=/dev/a ro intel_iommu=off\n"),
        "/boot/grub2/grubenv (kernelopts)",
        "intel_iommu=off",
    ),
    "esp": (lambda: systemd_boot({ESP_ENTRY: esp_entry("6.12.117", "intel_iommu=off")}), ESP_ENTRY, "intel_iommu=off"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_an_opposite_argument_is_refused_with_its_file(name: str) -> None:
    make, place, value = CONFLICTS[name]
    machine = make()
    with pytest.raises(BadInput) as caught:
        work(params("intel_iommu=on"), False, machine)
    assert (caught.value.details["code"], caught.value.details["value"]) == ("conflict", value)
    assert caught.value.details["path"] == place
    assert str(caught.value).startswith(f"{place} has {value}, and intel_iommu=on is wanted")
    assert machine.difference() == {}


def test_an_argument_that_the_user_has_is_neither_added_nor_removed() -> None:
    own = 'GRUB_CMDLINE_LINUX="intel_iommu=on,sm_on"\n'
    machine = debian(own)
    done = work(params(*BOTH), False, machine)
    assert done["arguments"] == ["iommu=pt"]
    assert machine.files[layout.DROP_IN].endswith('GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=pt"\n')
    work(ABSENT, False, machine)
    assert "intel_iommu=on,sm_on" in next_words(machine)
    machine = debian(own)
    assert not work(params("intel_iommu=on"), False, machine)["changed"]
    assert machine.difference() == {}


def test_what_the_user_has_set_and_not_applied_only_makes_the_menu() -> None:
    machine = suse()
    machine.files[DEFAULT] = machine.before[DEFAULT] = 'GRUB_CMDLINE_LINUX="intel_iommu=on"\n'
    done = work(params("intel_iommu=on"), False, machine)
    assert (done["changed"], done["arguments"]) == (True, [])
    assert set(machine.difference()) == {"/boot/grub2/grub.cfg"}
    assert "intel_iommu=on" in next_words(machine)
    assert not work(ABSENT, False, machine)["changed"]


def test_files_that_were_changed_since_lose_the_arguments_only() -> None:
    machine = rocky()
    work(params(*BOTH), False, machine)
    # A new kernel has the arguments from /etc/kernel/cmdline; an old one is removed; the user adds an argument.
    newest = NEW.replace("611", "700")
    machine.files[newest] = machine.files[NEW].replace("611", "700")
    del machine.files[OLD]
    machine.files[DEFAULT] = machine.files[DEFAULT].replace("crashkernel", "audit=1 crashkernel")
    machine.files["/etc/kernel/cmdline"] = "audit=1 " + machine.files["/etc/kernel/cmdline"]
    assert not work(params(*BOTH), False, machine)["changed"]
    work(ABSENT, False, machine)
    assert machine.files[newest] == machine.before[NEW].replace("611", "700")
    assert machine.files[NEW] == machine.before[NEW]
    assert machine.files[DEFAULT] == machine.before[DEFAULT].replace("crashkernel", "audit=1 crashkernel")
    assert machine.files["/etc/kernel/cmdline"] == "audit=1 " + machine.before["/etc/kernel/cmdline"]
    assert RECORD not in machine.files


def test_a_kernel_that_came_without_the_arguments_gets_them() -> None:
    machine = rocky(more={"/etc/kernel/cmdline": "ro\n"})
    work(params(*BOTH), False, machine)
    newest = NEW.replace("611", "700")
    machine.files[newest] = machine.before[NEW].replace("611", "700")
    assert work(params(*BOTH), False, machine)["changed"]
    assert set(BOTH) <= set(places.LoaderEntry().read(newest, machine.files[newest]))
    work(ABSENT, False, machine)
    assert machine.files[newest] == machine.before[NEW].replace("611", "700")


def test_kernelopts_of_grubs_environment_is_changed_where_entries_use_it() -> None:
    machine = rocky("$kernelopts $tuned_params", "kernelopts=root=/dev/mapper/rl-root ro quiet\n")
    work(params(*BOTH), False, machine)
    assert (
        "kernelopts=root=/dev/mapper/rl-root ro quiet intel_iommu=on iommu=pt\n" in machine.files["/boot/grub2/grubenv"]
    )
    assert machine.files[NEW] == machine.before[NEW]
    assert set(BOTH) <= set(next_words(machine))
    work(ABSENT, False, machine)
    environment = machine.files["/boot/grub2/grubenv"]
    assert "kernelopts=root=/dev/mapper/rl-root ro quiet\n" in environment
    machine.files["/boot/grub2/grubenv"] = machine.before["/boot/grub2/grubenv"]
    assert machine.difference() == {}


def test_kernelopts_is_set_back_where_another_entry_boots_next() -> None:
    machine = rocky("$kernelopts $tuned_params", "kernelopts=root=/dev/a ro\nnext_entry=2\n")
    with pytest.raises(NotInEffect, match=f"{RESCUE}: the entry that boots next has no iommu=pt"):
        work(params("iommu=pt"), False, machine)
    changed = machine.difference()
    assert set(changed) <= {"/boot/grub2/grubenv"}
    assert "kernelopts=root=/dev/a ro\n" in machine.files["/boot/grub2/grubenv"]


def test_entries_with_kernelopts_that_only_the_menu_has_are_edited() -> None:
    machine = rocky("$kernelopts $tuned_params")
    work(params(*BOTH), False, machine)
    assert "options $kernelopts $tuned_params intel_iommu=on iommu=pt\n" in machine.files[NEW]
    assert next_words(machine)[-2:] == BOTH
    assert machine.files[RESCUE] == machine.before[RESCUE]


def test_a_file_of_the_same_name_that_someone_else_wrote_is_left_alone() -> None:
    machine = debian(drop_ins={"90-kubegpu.cfg": "# mine\n"})
    with pytest.raises(BadInput, match=r"90-kubegpu\.cfg isn't this collection's file"):
        work(params("iommu=pt"), False, machine)
    assert machine.difference() == {}
    assert not work(ABSENT, False, machine)["changed"]


def test_without_the_record_the_own_file_says_what_was_added() -> None:
    machine = debian()
    work(params(*BOTH), False, machine)
    del machine.files[RECORD]
    assert not work(params(*BOTH), False, machine)["changed"]
    assert work(params("iommu=pt"), False, machine)["arguments"] == ["iommu=pt"]
    assert "intel_iommu=on" not in next_words(machine)
    del machine.files[RECORD]
    work(ABSENT, False, machine)
    assert machine.difference() == {}


def test_what_another_loader_has_left_goes_with_the_next_change() -> None:
    machine = debian()
    work(params(*BOTH), False, machine)
    tool = machine.files.pop("/usr/sbin/update-grub")
    done = work(params(*BOTH), False, machine)
    assert (done["loader"], done["changed"]) == ("grub-default", True)
    assert layout.DROP_IN not in machine.files
    assert [next_words(machine).count(one) for one in BOTH] == [1, 1]
    work(ABSENT, False, machine)
    machine.files["/usr/sbin/update-grub"] = tool
    assert machine.difference() == {}


def test_a_file_that_changes_during_the_run_is_not_overwritten() -> None:
    machine = suse()
    reconciler = BootReconciler(machine, plan.Options(True, ("iommu=pt",)))
    state = reconciler.observe()
    machine.files[DEFAULT] += "# edited just now\n"
    with pytest.raises(ShareError, match="/etc/default/grub was changed by another process during this run"):
        reconciler.apply(state, reconciler.plan(state))
    assert set(machine.difference()) == {DEFAULT}


# --------------------------------------------------------------------------- proofs and ways back


def test_a_later_drop_in_that_sets_the_variable_anew_is_named_and_all_is_restored() -> None:
    machine = debian(drop_ins={"zz-site.cfg": 'GRUB_CMDLINE_LINUX="console=ttyS0"\n'})
    with pytest.raises(NotInEffect) as caught:
        work(params("iommu=pt"), False, machine)
    assert caught.value.details["code"] == "not-in-entry"
    assert caught.value.details["rolled_back"]
    assert str(caught.value) == (
        "/boot/grub/grub.cfg: the entry that boots next has no iommu=pt, because /etc/default/grub.d/zz-site.cfg sets "
        "GRUB_CMDLINE_LINUX anew"
    )
    assert machine.difference() == {}


@pytest.mark.parametrize("make", [debian, suse, proxmox])
def test_a_tool_that_fails_leaves_the_old_state(make: Callable[[], Machine]) -> None:
    machine = make()
    machine.broken = "cannot find a device for / (is /dev mounted?)."
    with pytest.raises(ShareError, match="cannot find a device") as caught:
        work(params("iommu=pt"), False, machine)
    assert not caught.value.details["rolled_back"]
    assert "cannot find a device" in caught.value.details["rollback_errors"][0]
    assert machine.difference() == {}
    machine.broken = ""
    assert work(params("iommu=pt"), False, machine)["changed"]


def test_the_next_boot_of_another_entry_is_refused() -> None:
    machine = rocky()
    work(params("iommu=pt"), False, machine)
    block = machine.files["/boot/grub2/grubenv"]
    machine.files["/boot/grub2/grubenv"] = block.replace("boot_success", "next_entry=2\nboot_success")
    with pytest.raises(BadInput) as caught:
        work(params("iommu=pt"), False, machine)
    assert caught.value.details["code"] == "other-entry"
    assert str(caught.value).startswith(f"{RESCUE} boots next")


# --------------------------------------------------------------------------- unknown loaders


REFUSED: dict[str, Callable[[], Machine]] = {
    "none": lambda: Machine("ID=debian\n", {}),
    "several": lambda: debian_and_systemd_boot(),
    "image": lambda: Machine("ID=talos\n", {}),
    "machine-config": lambda: Machine("ID=rhcos\n", {"/run/ostree-booted": ""}),
    "hand-written": lambda: with_file(debian(), "/boot/grub/grub.cfg", "menuentry x {\n linux x\n}"),
    "no-next": lambda: windows_by_default(),
    "no-tool": lambda: without("/usr/sbin/update-grub", "/usr/sbin/grub-mkconfig"),
    "unified": lambda: systemd_boot({"/efi/EFI/Linux/debian-6.12.efi": ""}),
    "sdbootutil": lambda: Machine(
        "ID=opensuse-tumbleweed\n", {"/usr/bin/sdbootutil": "", "/efi/loader/loader.conf": ""}
    ),
    "transactional": lambda: micro("rootfs / rootfs rw 0 0\n/dev/vda3 / btrfs ro,relatime 0 0\n"),
    "proxmox-grub": lambda: with_file(debian(), "/etc/kernel/proxmox-boot-uuids"),
    "ostree": lambda: Machine("ID=fedora\n", {"/run/ostree-booted": ""}),
    "extlinux": lambda: Machine("ID=ubuntu\n", {"/boot/extlinux/extlinux.conf": "LABEL primary\n"}),
    "unreadable": lambda: rocky(more={NEW: "x" * (65 << 10)}),
}


def without(*paths: str) -> Machine:
    machine = debian()
    for path in paths:
        del machine.files[path], machine.before[path]
    return machine


def micro(mounts: str) -> Machine:
    machine = with_file(suse(), "/usr/sbin/transactional-update")
    return with_file(machine, "/proc/self/mounts", mounts)


def test_a_system_with_the_tool_for_snapshots_and_a_writable_root_is_an_ordinary_one() -> None:
    assert boot(micro("/dev/vda3 / btrfs rw,relatime 0 0\n"))["loader"] == "grub-default"


def windows_by_default() -> Machine:
    machine = debian()
    menu = machine.files["/boot/grub/grub.cfg"].replace('default="0"', 'default="windows"')
    menu += "menuentry 'Windows' --id windows {\n\tchainloader /EFI/Microsoft/Boot/bootmgfw.efi\n}\n"
    return with_file(machine, "/boot/grub/grub.cfg", menu)


def with_file(machine: Machine, path: str, text: str = "") -> Machine:
    machine.files[path] = machine.before[path] = text
    return machine


def debian_and_systemd_boot() -> Machine:
    machine = debian()
    machine.files |= {"/boot/efi/loader/loader.conf": "", "/boot/efi/loader/entries/a.conf": "linux /x\noptions ro\n"}
    machine.before = dict(machine.files)
    return machine


def test_every_reason_has_a_machine() -> None:
    assert set(REFUSED) == set(REFUSALS)


@pytest.mark.parametrize("code", REFUSED)
def test_another_loader_is_refused_with_the_arguments_to_set(code: str) -> None:
    machine = REFUSED[code]()
    with pytest.raises(BadInput) as caught:
        work(params(*BOTH), False, machine)
    assert caught.value.details == {"code": f"loader-{code}", "arguments": BOTH}
    assert f"because {REFUSALS[code]}" in str(caught.value)
    assert "set intel_iommu=on iommu=pt by its own means" in str(caught.value)
    assert machine.difference() == {}
    # Nothing was added, and what the running kernel has needs no loader.
    assert not work(ABSENT, False, machine)["changed"]
    machine.files["/proc/cmdline"] = "ro intel_iommu=on iommu=pt\n"
    done = work(params(*BOTH), False, machine)
    assert (done["changed"], done["reboot_required"], done["loader"]) == (False, False, "")


@pytest.mark.parametrize(
    ("info", "loader"), [("systemd-boot 252.39-1~deb12u2", "systemd-boot"), ("GRUB 2.12", "grub-drop-in")]
)
def test_the_firmware_says_which_of_two_loaders_it_booted_by(info: str, loader: str) -> None:
    machine = debian_and_systemd_boot()
    name = "/sys/firmware/efi/efivars/LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
    machine.files[name] = "\x06\0\0\0" + "".join(f"{one}\0" for one in info) + "\0\0"
    assert (boot(machine)["loader"], boot(machine)["firmware"]) == (loader, "efi")


# --------------------------------------------------------------------------- what the IOMMU needs


def iommu(
    groups: int = 0, table: str = "DMAR", on: bool = False, now: str = "ro", machine: Machine | None = None
) -> Machine:
    machine = machine or debian()
    del machine.files["/sys/firmware/acpi/tables/DMAR"]
    machine.files |= {f"/sys/firmware/acpi/tables/{table}": ""} if table else {"/sys/firmware/acpi/tables/FACP": ""}
    machine.files |= {f"/sys/kernel/iommu_groups/{number}/type": "" for number in range(groups)}
    if on:
        machine.files["/boot/config-6.1.0-50-amd64"] = "#\nCONFIG_INTEL_IOMMU_DEFAULT_ON_INTGPU_OFF=y\n"
    machine.files["/proc/cmdline"] = f"{now}\n"
    machine.before = dict(machine.files)
    return machine


@pytest.mark.parametrize(
    ("machine", "added", "reboot"),
    [
        (lambda: iommu(groups=12), [], False),
        (lambda: iommu(groups=12, table="IVRS"), [], False),
        (lambda: iommu(), ["intel_iommu=on"], True),
        # The user has removed it, and not yet rebooted: the kernel turns the IOMMU on by itself, or needs it.
        (lambda: iommu(on=True, now="ro intel_iommu=off"), [], True),
        (lambda: iommu(table="IVRS", now="ro amd_iommu=off"), [], True),
        (lambda: iommu(now="ro iommu=off"), ["intel_iommu=on"], True),
        (lambda: iommu(machine=debian('GRUB_CMDLINE_LINUX="intel_iommu=on"\n')), [], True),
    ],
)
def test_the_iommu_gets_only_what_it_needs(machine, added, reboot) -> None:
    done = work(params(iommu=True), False, machine())
    assert (done["arguments"], done["changed"], done["reboot_required"]) == (added, bool(added), reboot)


@pytest.mark.parametrize(
    ("machine", "code", "text"),
    [
        (lambda: iommu(table=""), "iommu-firmware", "the firmware announces no IOMMU"),
        (lambda: iommu(on=True), "iommu-failed", "table DMAR is there and the kernel turns the IOMMU on by itself"),
        (lambda: iommu(table="IVRS"), "iommu-failed", "table IVRS is there"),
        (
            lambda: iommu(machine=debian('GRUB_CMDLINE_LINUX="iommu=off"\n')),
            "iommu-off",
            "/boot/grub/grub.cfg has iommu=off, which turns the IOMMU off",
        ),
    ],
)
def test_no_argument_is_added_that_would_not_help(machine, code, text) -> None:
    node = machine()
    with pytest.raises(BadInput, match=text) as caught:
        work(params(iommu=True), False, node)
    assert caught.value.details["code"] == code
    assert node.difference() == {}


def test_an_iommu_that_is_on_by_what_was_added_keeps_it() -> None:
    machine = iommu()
    work(params(iommu=True), False, machine)
    machine.reboot()
    machine.files |= {"/sys/kernel/iommu_groups/0/type": ""}
    done = work(params(iommu=True), False, machine)
    assert (done["changed"], done["arguments"], done["reboot_required"]) == (False, ["intel_iommu=on"], False)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("amd_iommu=on", "amd_iommu=on means nothing to the kernel"),
        ("ds=nocloud;s=/x", "isn't one argument"),
        ("two words", "isn't one argument"),
        ("x=$y", "isn't one argument"),
        ('x="y"', "isn't one argument"),
        ("", "isn't one argument"),
        ("--", "isn't one argument"),
    ],
)
def test_arguments_that_cannot_be_written_everywhere_are_refused(argument: str, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        plan.options(params(argument))


def test_arguments_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadInput, match="iommu=pt and iommu=nopt contradict each other"):
        plan.options(params("iommu=pt", "iommu=nopt"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"added": ["a"], "files": {}}',
        '{"added": "a", "files": {}, "kernelopts": null}',
        '{"added": ["quiet --reboot"], "files": {}, "kernelopts": null}',
        # The undo would write it, or remove it.
        '{"added": ["a"], "files": {"/etc/passwd": {"before": null, "after": ""}}, "kernelopts": null}',
        '{"added": ["a"], "files": {"/loader/entries/../a.conf": {"before": null, "after": ""}}, "kernelopts": null}',
    ],
)
def test_a_record_that_is_none_is_not_guessed_at(text: str) -> None:
    machine = with_file(debian(), RECORD, text)
    for wanted in (params("iommu=pt"), ABSENT):
        with pytest.raises(BadInput, match="isn't a record of this collection"):
            work(wanted, False, machine)
    assert machine.difference() == {}


# --------------------------------------------------------------------------- any text


LINES = st.lists(
    st.sampled_from(
        (
            'GRUB_CMDLINE_LINUX="ro quiet"',
            "GRUB_CMDLINE_LINUX=''",
            'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX x=1"',
            'GRUB_CMDLINE_LINUX_DEFAULT="console=tty0 \\\n  splash"',
            "GRUB_CMDLINE_LINUX=`echo ro`",
            '# GRUB_CMDLINE_LINUX="it\'s"',
            "",
            "\tGRUB_TIMEOUT=1 ",
            "if true; then",
            "fi",
        )
    )
)
ENDS = st.sampled_from(["", "\n", "\r\n", "\n\n"])
OPTION_LINES = st.lists(
    st.sampled_from(
        ("options ro  quiet", "options\t$kernelopts $tuned_params", "options a -- b", "# x", "", "linux /v")
    )
)


@settings(max_examples=60)
@given(LINES, OPTION_LINES, ENDS, st.lists(st.sampled_from(["iommu=pt", "y=1", "nosmt"]), min_size=1, unique=True))
def test_any_text_has_what_was_added_and_is_the_same_bytes_when_undone(lines, options, end, arguments) -> None:
    texts = {
        DEFAULT: "\n".join(lines) + end,
        NEW: "\n".join(["linux /vmlinuz", *options]) + end,
        "/etc/kernel/cmdline": "ro quiet" + end,
    }
    state = {**boot(rocky()), "files": texts, "next": None}
    given_ = plan.Options(True, tuple(arguments))
    made = plan.difference(given_, state)
    changed = {**texts, **{path: after for path, (_text, after, _base) in made.files.items()}}
    for path, text in changed.items():
        assert set(arguments) <= set(words.of_kernel(places.kind_of(path).read(path, text)))
    record = json.loads(json.dumps(plan.new_record(made, state)))
    now = {**state, "files": changed, "record": record}
    assert plan.difference(given_, now).files == {}
    undone = plan.difference(plan.Options(False), now)
    assert {**changed, **{path: after for path, (_text, after, _base) in undone.files.items()}} == texts


def test_facts_are_there_where_the_boot_configuration_cannot_be_read() -> None:
    machine = with_file(debian(), DEFAULT, 'GRUB_CMDLINE_LINUX="ro')
    found = observe(machine, {"id": "debian", "family": "debian", "arch": "amd64"})
    assert (found["loader"], found["now"][:10]) == ("grub-drop-in", "BOOT_IMAGE")
    with pytest.raises(BadInput, match="a quote that line 1 opens isn't closed"):
        work(params("iommu=pt"), False, machine)


def test_kernelstub_and_its_entries_are_changed_together() -> None:
    machine = pop_os()
    work(params("iommu=pt"), False, machine)
    assert json.loads(machine.files[layout.KERNELSTUB])["user"]["kernel_options"][-1] == "iommu=pt"
    assert machine.files["/boot/efi/loader/entries/Pop_OS-oldkern.conf"].endswith("splash iommu=pt\n")
    # kernelstub itself writes its file anew, in its own form.
    machine.files[layout.KERNELSTUB] = json.dumps(json.loads(machine.files[layout.KERNELSTUB]), indent=2)
    work(ABSENT, False, machine)
    assert machine.difference() == {}


# --------------------------------------------------------------------------- the facts


@every_loader
def test_the_facts_have_the_types_that_the_controller_holds_them_to(make: Callable[[], Machine]) -> None:
    machine = make()
    work(params("iommu=pt"), False, machine)
    found = json.loads(json.dumps(observed(machine)["boot"]))
    observations._check(BootFacts)(found, "boot", observations._Budget())
    assert found["record"]["added"] == ["iommu=pt"]


def test_the_action_executes_the_module_only_for_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = iommu()
    asked = {"iommu": True, "observed": observed(machine)}
    assert act(kernel_arguments, asked, monkeypatch)[1] == [{"iommu": True}]
    work(params(iommu=True), False, machine)
    result, executed = act(kernel_arguments, {**asked, "observed": observed(machine)}, monkeypatch)
    assert (executed, result["changed"], result["reboot_required"]) == ([], False, True)
    asked = {"arguments": BOTH, "observed": observed(REFUSED["image"]())}
    refused, executed = act(kernel_arguments, asked, monkeypatch)
    assert (executed, refused["failed"], refused["arguments"]) == ([], True, BOTH)


def test_more_entries_than_any_machine_has_are_not_read_in_part() -> None:
    many = {NEW.replace("611", str(number)): bls_entry(f"5.14.0-{number}", "ro") for number in range(700, 770)}
    found = boot(rocky(more=many))
    assert (found["refused"], found["files"]) == ("unreadable", {})
