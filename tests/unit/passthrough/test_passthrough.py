# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards for virtual machines: whole groups or a refusal, one card of two, what holds a card, boot, undo, kills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import typing as t

import pytest
from action_plugins import act
from ansible_collections.kubegpu.share.plugins.action import pci_binding
from ansible_collections.kubegpu.share.plugins.module_utils._boot import loaders
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.facts import distribution
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._node.types import GpuNode
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import facts as passthrough_facts
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import files, messages
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.apply import PassthroughReconciler
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.functions import ALIAS, best_driver
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.kernel import Written
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.model import (
    ARGUMENTS,
    RECORD,
    Function,
    options_of,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import observations
from node_fakes import killed_at_every_step
from pci_machine import (
    ALIASES,
    AUDIO,
    CARD,
    DRIVERS,
    IMAGE,
    PCI,
    TWIN,
    TWIN_AUDIO,
    UUIDS,
    Machine,
    NoPods,
)
from real_kubelet import list_response

ON_VFIO = "vfio-pci vfio-pci"
POD = "3f0e2a54-8f5b-4f5c-9d62-0d8a3f4b7a10"
POD_GROUP = f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-1.scope"


def refused(machine: Machine, *cards: str, **more: object) -> list[dict[str, object]]:
    """The codes with which a run ends, which changed nothing."""
    before = machine.own(), machine.bound()
    with pytest.raises(BadInput) as error:
        machine.present(*cards, **more)
    assert (machine.own(), machine.bound()) == before
    assert str(error.value) == messages.sentences(error.value.details["refusals"])
    return error.value.details["refusals"]


def codes(rows: list[dict[str, object]]) -> set[tuple[object, object]]:
    return {(row["code"], row.get("address")) for row in rows}


def test_a_card_goes_with_its_own_functions_and_its_twin_stays():
    machine = Machine()
    result = machine.present(CARD)
    assert result["changed"] and not result["reboot_required"]
    assert machine.bound() == {
        CARD: ON_VFIO,
        AUDIO: ON_VFIO,
        TWIN: "nvidia (null)",
        TWIN_AUDIO: "snd_hda_intel (null)",
    }
    [card] = result["cards"]
    assert (card["uuid"], card["iommu_group"], card["viable"]) == (UUIDS[CARD].lower(), "14", True)
    assert card["functions"] == [CARD, AUDIO]
    machine.ran.clear()
    assert not machine.present(CARD)["changed"]
    assert not [line for line in machine.ran if line.startswith(("modprobe", "update", "udevadm", "mkdir"))]


@pytest.mark.parametrize("tool", ["initramfs-tools", "dracut"])
def test_it_survives_a_reboot_and_is_undone_to_the_byte(tool):
    machine = Machine(tool)
    machine.files["/etc/modprobe.d/kubegpu-vfio.conf"] = "# somebody's own\n"
    before, bound = machine.own(), machine.bound()
    machine.present(CARD)
    assert {files.HOOK, files.DRACUT} & set(machine.own()) == {{"dracut": files.DRACUT}.get(tool, files.HOOK)}
    assert machine.modes.get(files.HOOK, 0o755) == 0o755
    machine.boot()
    assert machine.bound() == {**bound, CARD: ON_VFIO, AUDIO: ON_VFIO}
    assert not machine.present(CARD)["changed"]
    assert machine.absent()["changed"]
    assert (machine.own(), machine.bound()) == (before, bound)
    assert not machine.absent()["changed"]
    machine.boot()
    assert machine.bound() == bound


def test_the_rule_names_one_address_and_model_and_ends_with_a_probe():
    machine = Machine()
    machine.present(CARD)
    rules = [line for line in machine.files[files.RULE].splitlines() if not line.startswith("#")]
    assert [re.findall(r'KERNEL=="([^"]+)"', line) for line in rules] == [[CARD], [AUDIO]]
    for line in rules:
        assert 'ATTR{vendor}=="0x10de"' in line and 'ATTR{driver_override}="vfio-pci"' in line
        assert line.endswith("RUN+=\"/bin/sh -c 'echo %k > /sys/bus/pci/drivers_probe'\"")
    written = "".join(machine.files[path] for path in (files.RULE, files.MODPROBE, files.HOOK))
    assert "ids=" not in written and "vfio_virqfd" not in written


def test_uuids_are_known_while_the_driver_has_the_card_and_then_by_the_record():
    machine = Machine()
    machine.present(UUIDS[CARD])
    assert machine.driver(CARD) == "vfio-pci"
    assert not machine.present(UUIDS[CARD])["changed"]
    stranger = "GPU-99999999-9999-9999-9999-999999999999"
    assert codes(refused(machine, stranger)) == {("unknown_uuid", None)}


def test_all_leaves_out_what_gpu_exclude_names():
    machine = Machine()
    machine.present("all", exclude=[TWIN])
    assert (machine.driver(CARD), machine.driver(TWIN)) == ("vfio-pci", "nvidia")
    assert codes(refused(Machine(), TWIN, exclude=["NVIDIA A10"])) == {("excluded", TWIN)}


def test_a_card_that_is_no_longer_listed_is_given_back():
    machine = Machine()
    machine.present(CARD, TWIN)
    machine.present(TWIN)
    assert machine.bound()[CARD] == "nvidia (null)" and machine.bound()[AUDIO] == "snd_hda_intel (null)"
    assert (machine.driver(TWIN), CARD in machine.files[files.RULE]) == ("vfio-pci", False)
    assert [row["address"] for row in json.loads(machine.files[RECORD])["functions"]] == [TWIN, TWIN_AUDIO]


@pytest.mark.parametrize("live", [True, False])
def test_cards_stay_until_the_next_boot_where_that_is_wanted_or_a_service_has_them(live):
    machine = Machine()
    if live:
        machine.open(70, "nv-hostengine", "/dev/nvidiactl", "/dev/nvidia0")
        machine.open(71, "nvidia-persiste", "/dev/nvidia0", "/dev/nvidia1")
        machine.persistence.add(CARD)
    result = machine.present(CARD, live=live)
    assert result["reboot_required"] and machine.driver(CARD) == "nvidia" and machine.driver(AUDIO) == "snd_hda_intel"
    expected = {"held_by_dcgm", "held_by_persistenced", "persistence_mode"} if live else set()
    assert {row["code"] for row in result["busy"]} == expected
    again = machine.present(CARD, live=live)
    assert (again["changed"], again["reboot_required"]) == (False, True)
    machine.boot()
    for pid in (70, 71):
        machine.close(pid)
    assert machine.driver(CARD) == "vfio-pci"
    assert not machine.present(CARD, live=live)["reboot_required"]
    machine.absent(live=live)
    machine.boot()
    assert machine.driver(CARD) == "nvidia" and not machine.absent(live=live)["reboot_required"]
    assert RECORD not in machine.files


def held_by_process(machine):
    machine.open(80, "python3", "/dev/nvidiactl", "/dev/nvidia0")
    return ("held_by_process", CARD)


def held_by_a_mapping(machine):
    machine.open(80, "python3", "/dev/nvidiactl")
    machine.files["/proc/80/maps"] = "7f00-7f01 rw-s 00000000 00:05 700 /dev/nvidia0\n"
    return ("held_by_process", CARD)


def held_by_sound(machine):
    machine.folders.add(f"{PCI}/{AUDIO}/sound/card3")
    machine.open(80, "pipewire", "/dev/snd/controlC3")
    return ("held_by_process", AUDIO)


def held_by_pods_process(machine):
    machine.open(80, "python3", "/dev/nvidia0", group=POD_GROUP)
    return ("held_by_pod", CARD)


def allocated_to_a_pod(machine):
    pods = {"default/train": {"main": {"nvidia.com/gpu": [UUIDS[CARD]]}}}
    machine.kubelet = NoPods(response=list_response(pods))
    return ("held_by_pod", CARD)


def shared_with_a_pod(machine):
    machine.kubelet = NoPods({"pod_uid": POD, "container_id": "1" * 64, "minors": [0], "privileged": False})
    return ("held_by_pod", CARD)


def kubelet_is_silent(machine):
    machine.kubelet = NoPods(response=b"\xff")
    return ("pods_unknown", CARD)


def is_the_display(machine):
    machine.files[f"{PCI}/{CARD}/boot_vga"] = "1\n"
    return ("display", CARD)


USB = "0000:01:00.2"


def usb(machine, *devices):
    """Give the card a USB function with two buses; devices are behind a hub, each with its ids and driver."""
    machine.load("xhci_hcd")
    machine.plug(USB, "0x10de", "0x1ad6", "0x0c0330", "14")
    for bus, hub in (("usb1", "1-2"), ("usb2", "2-2")):
        folder = f"{PCI}/{USB}/{bus}"
        # A root hub's own interface, and a hub's.
        for interface in (f"{folder}/{bus[3:]}-0:1.0", f"{folder}/{hub}/{hub}:1.0"):
            machine.links[f"{interface}/driver"] = "../../../../../../bus/usb/drivers/hub"
    for number, (ids, driver) in enumerate(devices, 1):
        name = f"1-2.{number}"
        device = f"{PCI}/{USB}/usb1/1-2/{name}"
        machine.files.update({f"{device}/idVendor": f"{ids[:4]}\n", f"{device}/idProduct": f"{ids[5:]}\n"})
        machine.folders.add(f"{device}/{name}:1.0")
        if driver:
            machine.links[f"{device}/{name}:1.0/driver"] = f"../../../../../../../../bus/usb/drivers/{driver}"


def has_a_keyboard(machine):
    usb(machine, ("046d:c31c", "usbhid"))
    return ("usb_devices", USB)


def has_virtual_functions(machine):
    machine.links[f"{PCI}/{CARD}/virtfn0"] = "../0000:01:00.4"
    return ("virtual_functions", CARD)


def has_mediated_devices(machine):
    machine.links[f"/sys/bus/mdev/devices/{POD}"] = f"../../../devices/pci0000:00/{CARD}/{POD}"
    return ("mdevs", CARD)


def has_no_iommu(machine):
    del machine.links[f"{PCI}/{CARD}/iommu_group"]
    return ("no_iommu", CARD)


def shares_its_group(machine):
    machine.load("e1000e")
    machine.plug("0000:03:00.0", "0x8086", "0x10d3", "0x020000", "14")
    return ("foreign_endpoint", CARD)


def shares_its_group_with_a_card(machine):
    machine.plug("0000:04:00.0", "0x10de", "0x2236", "0x030200", "14")
    return ("foreign_endpoint", CARD)


def is_the_operators(machine):
    machine.files["/run/nvidia/validations/vfio-pci-ready"] = ""
    return ("owned", None)


def is_in_a_container(machine):
    machine.files = {path: text for path, text in machine.files.items() if not path.startswith("/boot/vmlinuz")}
    return ("container", None)


def has_switches(machine):
    machine.plug("0000:05:00.0", "0x10de", "0x22a3", "0x068000", "20")
    return ("nvswitch_mode", CARD)


REFUSALS = [
    held_by_process,
    held_by_a_mapping,
    held_by_sound,
    held_by_pods_process,
    allocated_to_a_pod,
    shared_with_a_pod,
    kubelet_is_silent,
    is_the_display,
    has_a_keyboard,
    has_virtual_functions,
    has_mediated_devices,
    has_no_iommu,
    shares_its_group,
    shares_its_group_with_a_card,
    is_the_operators,
    is_in_a_container,
    has_switches,
]


@pytest.mark.parametrize("damage", REFUSALS, ids=lambda one: one.__name__)
def test_a_card_is_refused_before_anything_changes(damage):
    machine = Machine()
    expected = damage(machine)
    assert codes(refused(machine, CARD)) == {expected}


@pytest.mark.parametrize(
    ("damage", "pod"), [(held_by_pods_process, POD), (allocated_to_a_pod, "default/train"), (shared_with_a_pod, POD)]
)
def test_check_mode_predicts_what_follows_when_a_pod_is_stopped(damage, pod):
    free, machine = Machine(), Machine()
    damage(machine)
    before = machine.own(), machine.bound()
    predicted = machine.present(CARD, check=True, stopping=[pod])
    assert predicted["changed"] and predicted == free.present(CARD, check=True)
    # Another pod, and a process of somebody, are refused as ever.
    for others in ([], ["default/other"]):
        assert codes(refused(machine, CARD, check=True, stopping=others)) == {("held_by_pod", CARD)}
    with pytest.raises(BadInput, match="stopping is for check mode"):
        machine.present(CARD, stopping=[pod])
    machine.open(90, "python3", "/dev/nvidiactl", "/dev/nvidia0")
    assert codes(refused(machine, CARD, check=True, stopping=[pod])) == {("held_by_process", CARD)}
    assert (machine.own(), machine.bound()) == before


@pytest.mark.parametrize("live", [True, False])
def test_usb_devices_in_use_are_named_and_a_hub_or_an_unused_one_doesnt_count(live):
    """At the next boot they would be gone, too."""
    machine = Machine()
    usb(machine, ("046d:c31c", "usbhid"), ("0781:5583", "usb-storage"), ("1b1c:1a0e", ""))
    [row] = refused(machine, CARD, live=live)
    assert row["card"] == CARD and row["devices"] == ["1-2.1 046d:c31c usbhid", "1-2.2 0781:5583 usb-storage"]
    assert "1-2.2 0781:5583 usb-storage" in messages.sentence(row)
    assert machine.present(TWIN, live=live)["changed"]
    idle = Machine()
    usb(idle, ("1b1c:1a0e", ""))
    idle.present(CARD)
    assert idle.driver(USB) == "vfio-pci"


def test_a_privileged_pod_that_has_no_card_open_holds_none():
    """As KubeVirt's virt-handler and a network's agent, which have each device file of the machine."""
    machine = Machine()
    machine.kubelet = NoPods({"pod_uid": POD, "container_id": "1" * 64, "minors": [0, 1], "privileged": True})
    assert machine.present(CARD)["changed"]


def test_what_holds_the_twin_doesnt_matter():
    machine = Machine()
    machine.open(80, "python3", "/dev/nvidiactl", "/dev/nvidia1")
    pods = {"default/train": {"main": {"nvidia.com/gpu": [UUIDS[TWIN]]}}}
    machine.kubelet = NoPods(
        {"pod_uid": POD, "container_id": "1" * 64, "minors": [1], "privileged": False}, response=list_response(pods)
    )
    assert machine.present(CARD)["changed"]


def test_two_cards_of_one_group_go_together_and_bridges_dont_count():
    machine = Machine()
    machine.plug("0000:04:00.0", "0x10de", "0x2236", "0x030200", "14")
    machine.plug("0000:00:01.0", "0x8086", "0x3420", "0x060400", "14")
    machine.present(CARD, "0000:04:00.0")
    assert {machine.driver(one) for one in (CARD, AUDIO, "0000:04:00.0")} == {"vfio-pci"}
    assert "0000:00:01.0" not in machine.files[files.RULE]


def test_a_display_that_may_go_changes_its_driver_at_the_next_boot_while_a_console_is_on_it():
    machine = Machine()
    is_the_display(machine)
    machine.files.update({"/sys/class/vtconsole/vtcon1/name": "(M) frame buffer device\n"})
    machine.files.update({"/sys/class/vtconsole/vtcon1/bind": "1\n"})
    machine.links["/sys/class/graphics/fb0"] = f"../../devices/pci0000:00/{CARD}/graphics/fb0"
    result = machine.present(CARD, allow_display=True)
    assert result["reboot_required"] and codes(result["busy"]) == {("console", CARD)}


def test_nvswitches_go_with_all_cards_or_stay_under_a_shared_fabric_manager():
    machine = Machine()
    has_switches(machine)
    assert codes(refused(machine, CARD, nvswitch="with-cards")) == {("nvswitch_partial", TWIN)}
    machine.present("all", nvswitch="with-cards")
    assert {machine.driver(one) for one in (CARD, TWIN, "0000:05:00.0")} == {"vfio-pci"}
    shared = Machine()
    has_switches(shared)
    shared.files["/usr/share/nvidia/nvswitch/fabricmanager.cfg"] = "# mode\nFABRIC_MODE=1\n"
    shared.present(CARD)
    assert (shared.driver(CARD), shared.driver("0000:05:00.0")) == ("vfio-pci", "")


def test_virtual_functions_are_no_cards():
    machine = Machine()
    machine.plug("0000:01:00.4", "0x10de", "0x2236", "0x030200", "30")
    machine.links[f"{PCI}/0000:01:00.4/physfn"] = "../0000:01:00.0"
    assert codes(refused(machine, "0000:01:00.4")) == {("virtual_function", "0000:01:00.4")}
    assert codes(refused(machine, AUDIO)) == {("unknown_card", AUDIO)}
    machine.present("all")
    assert "0000:01:00.4" not in machine.files[files.RULE]


def test_a_card_that_moved_is_refused_and_left_alone_by_the_undo():
    machine = Machine()
    machine.present(CARD)
    machine.files[f"{PCI}/{CARD}/device"] = "0x2330\n"
    assert codes(refused(machine, CARD)) == {("moved", CARD)}
    machine.boot()
    assert machine.driver(CARD) == "nvidia"
    machine.absent()
    assert RECORD not in machine.files and machine.bound()[CARD] == "nvidia (null)"


def test_a_twin_in_the_recorded_slot_is_refused():
    machine = Machine()
    machine.present(UUIDS[CARD])
    # The cards were swapped: nvidia has the recorded one in the other slot.
    UUID_OF_TWIN = f"/proc/driver/nvidia/gpus/{TWIN}/information"
    machine.files[UUID_OF_TWIN] = machine.files[UUID_OF_TWIN].replace(UUIDS[TWIN], UUIDS[CARD])
    machine.commands["timeout -k 2 20 /usr/bin/nvidia-smi"] = Done(9, "", "")
    assert ("elsewhere", TWIN) in codes(refused(machine, CARD))


def test_a_card_with_a_virtual_machine_isnt_taken_back():
    machine = Machine()
    machine.present(CARD)
    machine.open(90, "qemu-system-x86", "/dev/vfio/vfio", "/dev/vfio/14", "anon_inode:[vfio-device]")
    before = machine.own()
    with pytest.raises(BadInput) as error:
        machine.absent()
    assert codes(error.value.details["refusals"]) == {("held_by_vm", CARD), ("held_by_vm", AUDIO)}
    assert machine.own() == before
    assert machine.absent(live=False)["reboot_required"]
    assert machine.driver(CARD) == "vfio-pci" and files.RULE not in machine.files


def test_an_unbind_that_waits_is_left_behind_and_reported():
    machine = Machine()
    machine.held.add(CARD)
    with pytest.raises(ShareError) as error:
        machine.present(CARD, seconds=3)
    found = {name: error.value.details[name] for name in ("code", "address", "driver", "seconds", "pid")}
    assert found == {"code": "unbind_timeout", "address": CARD, "driver": "nvidia", "seconds": 3, "pid": 4711}
    assert machine.driver(AUDIO) == "snd_hda_intel"
    # What used it ends, and with it the process that waits.
    machine.held.clear()
    machine.unbind(CARD)
    machine.absent()
    assert machine.bound()[CARD] == "nvidia (null)"


def test_a_group_that_vfio_cant_have_as_a_whole_is_given_back():
    machine = Machine()
    put = machine.put

    def no_probe_of_audio(path, text, seconds):
        return Written(0) if path.endswith("probe") and AUDIO in text else put(path, text, seconds)

    machine.put = no_probe_of_audio
    with pytest.raises(NotInEffect) as error:
        machine.present(CARD)
    assert (error.value.details["code"], error.value.details["address"]) == ("not_bound", AUDIO)
    assert machine.bound()[CARD] == "nvidia (null)"


def test_undo_without_the_recorded_driver_leaves_the_card_to_any_that_takes_it():
    machine = Machine()
    machine.present(CARD)
    del machine.links[f"{DRIVERS}/nvidia/module"]
    machine.files["no nvidia"] = ""
    assert machine.absent()["changed"]
    assert (machine.bound()[CARD], RECORD in machine.files) == (" (null)", False)


def test_external_changes_nothing_and_proves_the_binding():
    machine = Machine()
    with pytest.raises(NotInEffect) as error:
        machine.bind(state="external", cards=["all"])
    assert codes(error.value.details["problems"]) == {("not_bound", one) for one in (CARD, AUDIO, TWIN, TWIN_AUDIO)}
    is_the_operators(machine)
    machine.load("vfio-pci")
    for address in (CARD, AUDIO):
        machine.unbind(address)
        machine.files[f"{PCI}/{address}/driver_override"] = "vfio-pci\n"
        machine.probe(address)
    assert not machine.bind(state="external", cards=[CARD])["changed"]
    machine.unbind(AUDIO)
    machine.files[f"{PCI}/{AUDIO}/driver_override"] = "(null)\n"
    machine.probe(AUDIO)
    with pytest.raises(NotInEffect) as error:
        machine.bind(state="external", cards=[CARD])
    assert codes(error.value.details["problems"]) == {("not_bound", AUDIO), ("not_viable", CARD)}


def test_a_group_whose_answer_is_unknown_proves_nothing_and_a_held_one_is_a_machines():
    machine = Machine()
    machine.present(CARD)
    machine.says = "unknown"
    with pytest.raises(NotInEffect) as error:
        machine.bind(state="external", cards=[CARD])
    assert codes(error.value.details["problems"]) == {("viable_unknown", CARD)}
    machine.says = None
    machine.open(90, "qemu-system-x86", "/dev/vfio/14")
    [card] = machine.bind(state="external", cards=[CARD])["cards"]
    assert card["viable"] is None


def test_a_run_that_is_killed_anywhere_is_completed_or_undone():
    bound = Machine().bound()
    clean = Machine().own()
    for machine in killed_at_every_step(Machine, lambda node: node.present(CARD), least=20):
        machine.present(CARD)
        assert machine.bound()[CARD] == ON_VFIO and machine.bound()[AUDIO] == ON_VFIO
        machine.boot()
        assert machine.bound()[CARD] == ON_VFIO
        machine.absent()
        assert (machine.own(), machine.bound()) == (clean, bound)
    for machine in killed_at_every_step(Machine, lambda node: node.present(CARD), least=20):
        machine.absent()
        assert (machine.own(), machine.bound()) == (clean, bound)
        machine.boot()
        assert machine.bound() == bound


def test_an_undo_that_is_killed_anywhere_is_completed():
    clean, bound = Machine().own(), Machine().bound()

    def begin() -> Machine:
        machine = Machine()
        machine.present(CARD)
        return machine

    for machine in killed_at_every_step(begin, lambda node: node.absent(), least=20):
        machine.absent()
        assert (machine.own(), machine.bound()) == (clean, bound)
        machine.boot()
        assert machine.bound() == bound


def test_an_image_is_built_without_the_files_that_somebody_has_removed_by_hand(tmp_path):
    text = files.texts({CARD: "vfio-pci"}, {CARD: Function(CARD, "0x10de", "0x2236", "0x030000")}, "initramfs-tools")
    functions, image = tmp_path / "hook-functions", tmp_path / "image"
    functions.write_text("manual_add_modules() { echo $*; }\n")
    hook = (text[files.HOOK] or "").replace("/usr/share/initramfs-tools/hook-functions", str(functions))
    for path in (files.RULE, files.MODPROBE):
        hook = hook.replace(f" {path}", f" {tmp_path}{path}")

    def build() -> subprocess.CompletedProcess[str]:
        environment = {"DESTDIR": str(image), "PATH": os.environ["PATH"]}
        return subprocess.run(["sh", "-c", hook], env=environment, capture_output=True, text=True, check=False)

    # A failing hook would fail the installation of each kernel to come.
    assert (build().returncode, image.exists()) == (0, False)
    for path in (files.RULE, files.MODPROBE):
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text(text[path] or "")
    done = build()
    assert (done.returncode, done.stdout, done.stderr) == (0, "vfio vfio_iommu_type1 vfio_pci\n", "")
    assert all((image / path[1:]).read_text() == text[path] for path in (files.RULE, files.MODPROBE))


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record["functions"][0].update(address=["0000:01:00.0"]),
        lambda record: record["functions"][0].update(address="0000:01:00.0/../0000:02:00.0"),
        lambda record: record["functions"][0].update(driver=None),
        lambda record: record["files"][0].update(mode="0644"),
        lambda record: record["files"][0].update(text=5),
        lambda record: record.update(functions=7),
        lambda record: record["functions"].append("0000:01:00.0"),
    ],
)
def test_a_record_that_somebody_has_edited_is_refused(damage):
    machine = Machine()
    machine.present(CARD)
    record = json.loads(machine.files[RECORD])
    damage(record)
    machine.files[RECORD] = json.dumps(record)
    before = (machine.own(), machine.bound())
    for work in (machine.absent, lambda: machine.present(CARD)):
        with pytest.raises(ShareError, match="it is no record of this collection"):
            work()
    assert (machine.own(), machine.bound()) == before


@pytest.mark.parametrize("path", [RECORD, files.RULE])
def test_of_two_runs_at_once_the_later_one_ends_before_it_changes_anything(path):
    machine = Machine()
    params = {name: option.get("default") for name, option in ARGUMENTS.items()}
    late = PassthroughReconciler(options_of({**params, "cards": [TWIN]}), machine, machine, machine.kubelet)
    state = late.observe()
    plan = late.plan(state)
    other = Machine()
    other.present(CARD)
    machine.files[path] = other.files[path]
    before = (machine.own(), machine.bound())
    with pytest.raises(ShareError, match=f"{path} was changed by another process during this run; run again"):
        late.apply(state, plan)
    assert (machine.own(), machine.bound()) == before


def test_a_failed_image_leaves_the_card_with_its_driver():
    machine = Machine()
    machine.tool_ends = Done(1, "", "no space\n")
    with pytest.raises(ShareError, match=f"the old {IMAGE} is in its place"):
        machine.present(CARD)
    assert machine.driver(CARD) == "nvidia"
    machine.tool_ends = Done(0, "", "")
    clean = Machine()
    machine.absent()
    assert (machine.own(), machine.bound()) == (clean.own(), clean.bound())


def test_the_variant_with_the_fewest_wildcards():
    known = ALIAS.findall(ALIASES)
    assert best_driver("pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00", known) == "nvgrace_gpu_vfio_pci"
    assert best_driver("pci:v000010DEd00002236sv000010DEsd00001482bc03sc02i00", known) == "vfio-pci"
    assert best_driver("pci:v000010DEd00002236sv000010DEsd00001482bc03sc02i00", []) == "vfio-pci"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cards": ["0"]}, "passthrough_cards: '0'"),
        ({"cards": []}, "passthrough_cards is empty"),
        ({"cards": ["all", CARD]}, "all stands alone"),
        ({"cards": [CARD], "driver": "nvidia"}, "passthrough_driver: 'nvidia'"),
        ({"cards": [CARD], "exclude": ["0"]}, "gpu_exclude: '0'"),
        ({"cards": [CARD], "seconds": 0}, "passthrough_unbind_seconds: 0"),
    ],
)
def test_bad_options_are_named(given, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        Machine().bind(**given)


def boots_unified(machine):
    machine.files.update({"/efi/loader/loader.conf": "timeout 3\n", "/efi/EFI/Linux/debian-6.1.efi": ""})
    machine.files["/efi/loader/entries/debian.conf"] = "title Debian\nlinux /vmlinuz\n"


def boots_by_sdbootutil(machine):
    machine.files["/usr/bin/sdbootutil"] = ""


def is_transactional(machine):
    machine.files.update({"/usr/sbin/transactional-update": "", "/proc/self/mounts": "/dev/a / btrfs ro 0 0\n"})


def is_ostree(machine):
    machine.files.update({"/run/ostree-booted": "", "/usr/bin/rpm-ostree": ""})
    machine.commands["rpm-ostree kargs"] = Done(0, "root=/dev/a ro\n", "")


def is_of_openshift(machine):
    machine.files["/etc/machine-config-daemon/currentconfig"] = "{}"


def is_an_image(machine):
    machine.files["/etc/os-release"] = "ID=flatcar\n"


@pytest.mark.parametrize(
    ("damage", "code", "step"),
    [
        (boots_unified, "boot_unified", "ukify"),
        (boots_by_sdbootutil, "boot_sdbootutil", "sdbootutil mkinitrd"),
        (is_transactional, "boot_transactional", "transactional-update initrd"),
        (is_ostree, "boot_ostree", "rpm-ostree initramfs-etc --track=PATH"),
        (is_of_openshift, "boot_machine-config", "MachineConfig"),
        (is_an_image, "boot_image", "have the image bind"),
    ],
)
def test_a_system_whose_initramfs_isnt_this_roles_is_refused_with_the_steps_also_in_check_mode(
    damage, code, step, monkeypatch
):
    machine = Machine()
    damage(machine)
    for check in (True, False):
        [refusal] = refused(machine, CARD, check=check)
        assert (refusal["code"], refusal["cards"], refusal["modules"]) == (code, [CARD], ["vfio_pci"])
        assert step in messages.sentence(refusal) and "passthrough_state to external" in messages.sentence(refusal)
    # The controller says so without connecting to the node.
    about = distribution(machine)
    facts = {
        "distribution": {**about, "family": "debian"},
        "kernel": {"installed": ["6.1"]},
        "boot": loaders.observe(machine, dict(about)),
        "passthrough": passthrough_facts.facts(machine),
    }
    result, executed = act(pci_binding, {"cards": [CARD], "observed": facts}, monkeypatch)
    assert result["failed"] and result["refusals"][0]["code"] == code and not executed
    assert not machine.absent()["changed"]


def test_the_controller_plans_from_facts_as_the_node_does(monkeypatch):
    machine = Machine()
    machine.present(CARD)
    facts = {
        "boot": {"loader": "grub-drop-in", "refused": ""},
        "distribution": {"family": "debian"},
        "kernel": {"installed": ["6.1"]},
        "passthrough": json.loads(json.dumps(passthrough_facts.facts(machine))),
    }
    result, executed = act(pci_binding, {"cards": [CARD], "observed": facts}, monkeypatch)
    assert (result["changed"], result["reboot_required"], executed) == (False, False, [])
    assert [card["functions"] for card in result["cards"]] == [[CARD, AUDIO]]
    assert act(pci_binding, {"cards": [CARD, TWIN], "observed": facts}, monkeypatch)[1] == [{"cards": [CARD, TWIN]}]
    assert act(pci_binding, {"state": "absent", "observed": facts}, monkeypatch)[1] == [{"state": "absent"}]
    proven = {"state": "external", "cards": [CARD]}
    assert act(pci_binding, {**proven, "observed": facts}, monkeypatch)[1] == [proven]
    machine.files[RECORD] = "{"
    assert passthrough_facts.facts(machine) is None
    unread = {**facts, "passthrough": None}
    assert act(pci_binding, {"cards": [CARD], "observed": unread}, monkeypatch)[1] == [{"cards": [CARD]}]
    with pytest.raises(ShareError, match=re.escape(RECORD)):
        machine.present(CARD)


def test_the_facts_have_the_promised_types():
    machine = Machine()
    machine.present(CARD)
    node = t.get_type_hints(GpuNode, include_extras=True)["passthrough"]
    promised = observations._check(node)
    promised(json.loads(json.dumps(passthrough_facts.facts(machine))), "passthrough", observations._Budget())


def test_options_are_written_as_the_kernel_writes_them():
    chosen = options_of(
        {"state": "present", "cards": ["3B:00.0"], "driver": "nvgrace-gpu-vfio-pci", "exclude": []}
        | {"allow_display": False, "nvswitch": "none", "live": True, "seconds": 30, "stopping": []}
    )
    assert (chosen.cards, chosen.driver) == (("0000:3b:00.0",), "nvgrace_gpu_vfio_pci")
