# SPDX-License-Identifier: GPL-3.0-or-later
"""vGPUs by a layout, on a simulated sysfs.

It answers as a real kernel did with simulated cards on 2026-11-28: types, create, remove, current_vgpu_type, a list
that shrinks. sriov-manage and nvidia-smi are stand-ins: NVIDIA's vGPU manager isn't public.
"""

from __future__ import annotations

import errno
import json
import posixpath
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from action_plugins import act
from ansible_collections.kubegpu.share.plugins.action import vgpu as vgpu_action
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host import kernel_write
from ansible_collections.kubegpu.share.plugins.module_utils._host.kernel_write import Written
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu import facts, restore, sysfs, vgpu
from node_fakes import FakeSystem, killed_at_every_step

PCI = sysfs.PCI
FIRST, SECOND = "0000:41:00.0", "0000:81:00.0"
GB = {"1": "A10-4Q", "2": "A10-8Q", "3": "A10-24C", "9": "A10-1-6C"}
SIZE = {"A10-4Q": 4, "A10-8Q": 8, "A10-24C": 24, "A10-1-6C": 6}
# Types of GPU instances, with the instance's profile.
PROFILES = {"A10-1-6C": "1g.6gb"}
OFF = None


class Node(FakeSystem):
    """A machine with cards of 24 GB.

    :param framework: ``card``: the card is the parent of mediated devices; ``mdev``: its virtual functions are;
        ``vendor``: they are vGPUs themselves.
    """

    def __init__(self, framework: str, cards=(FIRST,)):
        super().__init__({"/etc/machine-id": "0123456789abcdef0123456789abcdef\n"})
        self.folders.add("/run/systemd/system")
        self.framework = framework
        self.mixed: set[str] = set()
        # Profiles of GPU instances by card and number; OFF without MIG.
        self.instances: dict[str, dict[str, str] | None] = dict.fromkeys(cards, OFF)
        self.sriov = True
        # The kernel's answers to writes: an error, or -1 where a write doesn't end.
        self.answer = 0
        for number, address in enumerate(cards):
            folder = f"{PCI}/{address}"
            ids = {"vendor": "0x10de", "device": "0x2236", "class": "0x030200", "sriov_totalvfs": "0"}
            self.files.update({f"{folder}/{name}": f"{value}\n" for name, value in ids.items()})
            self.links[f"{folder}/driver"] = "../../../bus/pci/drivers/nvidia"
            information = f"Model: \t\t NVIDIA A10\nDevice Minor: \t {number}\n"
            self.files[f"/proc/driver/nvidia/gpus/{address}/information"] = information
            if framework == "card":
                self._parent(address)
            else:
                self.files[f"{folder}/sriov_totalvfs"] = "8\n"
        self.commands.update(
            {
                restore.SRIOV_MANAGE: self._manage,
                "nvidia-smi vgpu -shm 1 -i": self._mix,
                "nvidia-smi -i": self._mode,
                "nvidia-smi mig -i": self._divide,
                "systemctl enable": lambda _argv: self._enable(True),
                "systemctl disable": lambda _argv: self._enable(False),
                "systemctl daemon-reload": Done(0, "", ""),
            }
        )

    def functions(self, card):
        return [card] if self.framework == "card" else [f"{card[:-1]}{number}" for number in range(4, 8)]

    def used(self, card):
        """The sizes in GB of a card's vGPUs."""
        types = []
        for function in self.functions(card):
            current = self.files.get(f"{PCI}/{function}/nvidia/current_vgpu_type", "0").strip()
            types += [current] if current != "0" else []
        made = [
            path for path in self.links if path.endswith("/mdev_type") and path.split("/")[5] in self.functions(card)
        ]
        types += [self.links[path].rpartition("/nvidia-")[2] for path in made]
        return [SIZE[GB[number]] for number in types]

    def creatable(self, card):
        used, instances = self.used(card), self.instances[card]
        if instances is not OFF:
            return {"9": GB["9"]} if len(used) < len(instances) else {}
        return {
            number: name
            for number, name in GB.items()
            if name not in PROFILES
            and SIZE[name] <= 24 - sum(used)
            and (card in self.mixed or not set(used) - {SIZE[name]})
        }

    def refresh(self, card):
        for function in self.functions(card):
            if self.framework == "vendor":
                rows = "".join(f"{number} : NVIDIA {name}\n" for number, name in self.creatable(card).items())
                self.files[f"{PCI}/{function}/nvidia/creatable_vgpu_types"] = f"ID    : vGPU Name\n{rows}"
                continue
            made = f"{PCI}/{function}/"
            busy = self.framework == "mdev" and any(
                path.startswith(made) and path.endswith("/mdev_type") for path in self.links
            )
            for number, name in GB.items():
                room = (24 - sum(self.used(card))) // SIZE[name] if number in self.creatable(card) and not busy else 0
                folder = f"{PCI}/{function}/mdev_supported_types/nvidia-{number}"
                self.files[f"{folder}/available_instances"] = f"{min(room, 1) if self.framework == 'mdev' else room}\n"

    def _parent(self, function):
        for number, name in GB.items():
            self.files[f"{PCI}/{function}/mdev_supported_types/nvidia-{number}/name"] = f"NVIDIA {name}\n"
        self.refresh(next(card for card in (FIRST, SECOND) if card[:-1] == function[:-1]))

    def _manage(self, argv):
        self.step()
        option, card = argv[1:]
        self.instances[card] = OFF
        self.mixed.discard(card)
        if not self.sriov:
            return Done(1, "", "Cannot obtain unbindLock for 0000:41:00.0")
        for number, function in enumerate(self.functions(card)):
            if option == "-d":
                self.links.pop(f"{PCI}/{card}/virtfn{number}", None)
                self.files = {path: text for path, text in self.files.items() if f"/{function}/" not in path}
                self.links = {path: link for path, link in self.links.items() if f"/{function}/" not in path}
                continue
            self.links[f"{PCI}/{card}/virtfn{number}"] = f"../{function}"
            self.links[f"{PCI}/{function}/physfn"] = f"../{card}"
            self.files[f"{PCI}/{function}/vendor"], self.files[f"{PCI}/{function}/class"] = "0x10de\n", "0x030200\n"
            if self.framework == "mdev":
                self._parent(function)
            else:
                self.files[f"{PCI}/{function}/nvidia/current_vgpu_type"] = "0\n"
                self.links[f"{PCI}/{function}/iommu_group"] = f"../kernel/iommu_groups/{50 + number}"
        if option == "-e":
            self.refresh(card)
        self.step()
        return Done(0, "", "")

    def _mix(self, argv):
        card = argv[-1]
        if self.used(card):
            return Done(19, "", "In use by another client")
        self.mixed.add(card)
        self.refresh(card)
        return Done(0, "", "")

    def _mode(self, argv):
        card = argv[2]
        if argv[3] == "--query-gpu=mig.mode.current":
            return Done(0, "Disabled\n" if self.instances[card] is OFF else "Enabled\n", "")
        self.step()
        if self.used(card):
            return Done(19, "", "In use by another client")
        self.instances[card] = {} if argv[4] == "1" else OFF
        self.refresh(card)
        self.step()
        return Done(0, "", "")

    def _divide(self, argv):
        card, there = argv[3], self.instances[argv[3]]
        if "-lgi" in argv:
            rows = "".join(f"|   0  MIG {name}  14  {number}  {number}:1 |\n" for number, name in (there or {}).items())
            return Done(0, rows, "") if rows else Done(6, "No GPU instances found: Not Found\n", "")
        if there is OFF:
            return Done(6, "No MIG-enabled devices found.\n", "")
        self.step()
        if "-cgi" in argv:
            first = max(map(int, there), default=6) + 1
            there.update(
                {str(first + number): name for number, name in enumerate(argv[argv.index("-cgi") + 1].split(","))}
            )
        elif "-dgi" in argv:
            del there[argv[argv.index("-gi") + 1]]
        self.refresh(card)
        self.step()
        return Done(0, "", "")

    def put(self, path, text, seconds):
        self.step()
        self.ran.append(f"put {path}")
        if self.answer:
            return Written(self.answer, 4711 if self.answer < 0 else 0)
        value, parts = text.strip(), path.split("/")
        card = next((card for card in (FIRST, SECOND) if card[:-1] in path), FIRST)
        if path.endswith("/current_vgpu_type"):
            if value != "0" and value not in self.creatable(card):
                return Written(errno.EPERM)
            self.files[path] = f"{value}\n"
        elif path.endswith("/create"):
            function, kind = parts[5], parts[7]
            if self.files[f"{path.rpartition('/')[0]}/available_instances"].strip() == "0":
                return Written(errno.EIO)
            self.links[f"{PCI}/{function}/{value}/mdev_type"] = f"../mdev_supported_types/{kind}"
            self.links[f"{PCI}/{function}/{value}/iommu_group"] = f"../../kernel/iommu_groups/{60 + len(self.links)}"
        else:
            self.links = {path: link for path, link in self.links.items() if f"/{parts[-2]}/" not in path}
        self.refresh(card)
        self.step()
        return Written(0)

    def _enable(self, enable):
        self.step()
        if enable:
            self.links[facts.WANTED_BY] = facts.UNIT
        else:
            self.links.pop(facts.WANTED_BY, None)
        return Done(0, "", "")

    def boot(self):
        """Forget what no boot keeps."""
        self.files.pop(restore.NAMES, None)
        self.links = {path: link for path, link in self.links.items() if not re.search(f"/{sysfs.UUID.pattern}/", path)}
        for card in self.instances:
            self.instances[card] = OFF
        for card in [each for each in (FIRST, SECOND) if self.exists(f"{PCI}/{each}")]:
            if self.framework != "card":
                self._manage(["", "-d", card])
            else:
                self.refresh(card)

    def hold(self, path, pid=4242):
        self.files[f"/proc/{pid}/comm"] = "qemu-kvm\n"
        self.links[f"/proc/{pid}/fd/7"] = path


def layout(*entries):
    return {"version": "v1", "vgpu-configs": {"mine": list(entries)}}


def entry(devices="all", **types):
    return {"devices": devices, "vgpu-devices": {name.replace("_", "-"): count for name, count in types.items()}}


def run(node, *entries, check=False, exclude=()):
    params = {
        "exclude": list(exclude),
        "state": "present" if entries else "absent",
        "layout": "mine",
        "layouts": layout(*entries) if entries else {},
    }
    return vgpu.work(node, params, "/usr/bin/python3", check)


def restored(node):
    """What the program at boot couldn't do."""
    return restore.restore(node, restore.recorded(node.files[restore.RECORD]))


def counts(node, card=FIRST):
    return restore.card(node, card).counts()


FRAMEWORKS = pytest.mark.parametrize("framework", ["card", "mdev", "vendor"])


@FRAMEWORKS
def test_a_layout_is_made_once_changed_by_its_difference_and_taken_away(framework):
    node = Node(framework)
    files = dict(node.files)
    assert run(node, entry(A10_4Q=2), check=True)["changed"] and node.files == files
    assert run(node, entry(A10_4Q=2))["changed"]
    assert counts(node) == {"A10-4Q": 2}
    first = {each["key"] for each in run(node, entry(A10_4Q=2))["cards"][0]["vgpus"]}
    assert not run(node, entry(A10_4Q=2))["changed"]
    run(node, entry(A10_4Q=3))
    more = {each["key"] for each in run(node, entry(A10_4Q=3))["cards"][0]["vgpus"]}
    assert len(more) == 3 and first < more
    run(node, entry(A10_8Q=3))
    assert counts(node) == {"A10-8Q": 3}
    assert run(node)["changed"]
    assert node.files == files and facts.WANTED_BY not in node.links and counts(node) == {}
    assert not run(node)["changed"]


@FRAMEWORKS
def test_a_boot_restores_the_same_vgpus_and_touches_nothing_that_is_there(framework):
    node = Node(framework, (FIRST, SECOND))
    run(node, entry([0], A10_4Q=2), entry([1], A10_24C=1))
    before = [restore.card(node, card).vgpus for card in (FIRST, SECOND)]
    node.boot()
    assert counts(node) == {}
    assert restored(node) == []
    assert [restore.card(node, card).vgpus for card in (FIRST, SECOND)] == before
    ran = len(node.ran)
    assert restored(node) == [] and len(node.ran) == ran


@FRAMEWORKS
def test_a_card_that_is_left_alone_is_counted_and_not_divided(framework):
    node = Node(framework, (FIRST, SECOND))
    assert run(node, entry(A10_4Q=2), exclude=[FIRST])["changed"]
    assert (counts(node), counts(node, SECOND)) == ({}, {"A10-4Q": 2})
    assert not run(node, entry(A10_4Q=2), exclude=[FIRST])["changed"]
    # The second card is number 1, as without the exclusion.
    assert not run(node, entry([1], A10_4Q=2), exclude=[FIRST])["changed"]
    # One that is excluded later keeps what it has, and uninstall still knows it.
    assert not run(node, entry([1], A10_8Q=1), exclude=[SECOND])["changed"]
    assert run(node)["changed"] and counts(node, SECOND) == {}


def test_the_largest_comes_first_in_whatever_order_types_are_named():
    assert restore.lacking({"A10-4Q": 1}, {"A10-4Q": 2, "A10-12Q": 1}) == ["A10-12Q", "A10-4Q"]
    assert restore.lacking({}, {"1g.24gb": 2, "1g.24gb+me": 1, "4g.96gb": 1}) == [
        *("4g.96gb", "1g.24gb", "1g.24gb", "1g.24gb+me")
    ]


@FRAMEWORKS
def test_a_changed_layout_changes_only_the_difference_and_a_boot_gives_each_function_its_type(framework):
    node = Node(framework)
    run(node, entry(A10_4Q=3, A10_8Q=1))
    made = restore.card(node, FIRST).vgpus
    wanted = entry(A10_4Q=1, A10_8Q=2)
    run(node, wanted)
    changed = restore.card(node, FIRST).vgpus
    assert len(set(made) & set(changed)) == 2 and counts(node) == {"A10-4Q": 1, "A10-8Q": 2}
    if framework != "card":
        # A boot that goes by types alone would put them elsewhere.
        assert [vgpu.name for vgpu in changed] == ["A10-8Q", "A10-4Q", "A10-8Q"]
    assert not run(node, wanted)["changed"]
    node.boot()
    assert restored(node) == [] and restore.card(node, FIRST).vgpus == changed
    assert not run(node, wanted)["changed"]
    # The run puts them there, too, where a boot couldn't.
    node.boot()
    assert run(node, wanted)["changed"] and restore.card(node, FIRST).vgpus == changed


@FRAMEWORKS
def test_the_undo_gives_back_the_vgpus_that_were_there_on_their_functions(framework):
    node = Node(framework)
    if framework != "card":
        node._manage(["", "-e", FIRST])
    function = node.functions(FIRST)[-1]
    file, value = "mdev_supported_types/nvidia-1/create", "11111111-2222-3333-4444-555555555555"
    if framework == "vendor":
        file, value = "nvidia/current_vgpu_type", "1"
    node.put(f"{PCI}/{function}/{file}", f"{value}\n", 1)
    before = restore.card(node, FIRST).vgpus
    assert [vgpu.function for vgpu in before] == [function]
    run(node, entry(A10_8Q=3))
    assert counts(node) == {"A10-8Q": 3}
    run(node)
    assert restore.card(node, FIRST).vgpus == before and restore.RECORD not in node.files


@FRAMEWORKS
def test_a_place_that_cant_be_had_any_more_is_another_ones(framework):
    node = Node(framework)
    run(node, entry(A10_4Q=2))
    record = json.loads(node.files[restore.RECORD])
    gone, kept = record["cards"][0]["places"]
    gone["function"], gone["key"] = ["0000:41:01.7"] * 2
    node.files[restore.RECORD] = json.dumps(record)
    node.boot()
    assert restored(node) == [] and counts(node) == {"A10-4Q": 2}
    assert (kept["function"], kept["key"]) in {(vgpu.function, vgpu.key) for vgpu in restore.card(node, FIRST).vgpus}
    # The record then says where they are.
    assert run(node, entry(A10_4Q=2))["changed"] and not run(node, entry(A10_4Q=2))["changed"]


def test_several_sizes_on_a_card_need_the_mode_that_the_driver_forgets():
    node = Node("vendor")
    run(node, entry(A10_4Q=1, A10_8Q=1))
    assert counts(node) == {"A10-4Q": 1, "A10-8Q": 1}
    order = [line.split()[0].rpartition("/")[2] for line in node.ran if "systemctl" not in line]
    assert order == ["sriov-manage", "nvidia-smi", "put", "put"]
    node.boot()
    assert restored(node) == []
    assert counts(node) == {"A10-4Q": 1, "A10-8Q": 1}


@FRAMEWORKS
def test_what_a_machine_holds_stays_and_is_named(framework):
    node = Node(framework)
    run(node, entry(A10_4Q=2))
    [first, *_rest] = restore.card(node, FIRST).vgpus
    node.hold(f"/dev/vfio/{node.links[f'{first.folder}/iommu_group'].rpartition('/')[2]}")
    held = (dict(node.files), dict(node.links))
    for entries in ((entry(A10_8Q=1),), ()):
        with pytest.raises(BadInput, match=r"qemu-kvm \(process 4242\)") as error:
            run(node, *entries)
        assert error.value.details["code"] == "vgpu_held" and error.value.details["held"][0]["vgpu"] == first.key
    assert (node.files, node.links) == held
    # What doesn't touch it goes on.
    run(node, entry(A10_4Q=3))
    assert counts(node) == {"A10-4Q": 3}


def test_virtual_functions_of_a_card_in_use_arent_enabled():
    node = Node("vendor")
    node.hold("/dev/nvidia0")
    with pytest.raises(BadInput) as error:
        run(node, entry(A10_4Q=1))
    assert error.value.details["code"] == "vgpu_held" and not counts(node) and restore.SRIOV_MANAGE not in str(node.ran)


def test_virtual_functions_that_a_machine_has_arent_disabled():
    node = Node("vendor")
    run(node, entry(A10_4Q=1))
    # Somebody has given the last one to a machine by himself.
    node.hold("/dev/vfio/53")
    before = (dict(node.files), dict(node.links))
    with pytest.raises(BadInput, match=r"qemu-kvm \(process 4242\)") as error:
        run(node)
    assert [row["vgpu"] for row in error.value.details["held"]] == ["0000:41:00.7"]
    assert (node.files, node.links) == before
    # A layout with none of the card's vGPUs leaves the functions.
    run(node, entry(A10_4Q=0))
    assert counts(node) == {} and len(restore.card(node, FIRST).virtual) == 4


def test_nothing_is_left_of_the_folders():
    node = Node("vendor")
    run(node, entry(A10_4Q=1))
    run(node)
    package = f"{facts.ROOT}/{facts.PACKAGE}"
    for path in (posixpath.dirname(restore.RECORD), f"{package}/_vgpu", f"{package}/_host", package, facts.ROOT):
        assert f"rmdir {path}" in node.ran
    assert f"rmdir {posixpath.dirname(facts.ROOT)}" not in node.ran


@FRAMEWORKS
def test_vgpus_of_others_count_and_come_back(framework):
    node = Node(framework)
    restore.create(node, FIRST, {"A10-8Q": 2}, {})
    run(node, entry(A10_8Q=2))
    assert counts(node) == {"A10-8Q": 2}
    run(node, entry(A10_24C=1))
    assert counts(node) == {"A10-24C": 1}
    run(node)
    assert counts(node) == {"A10-8Q": 2} and restore.RECORD not in node.files


def test_vgpus_of_others_come_back_where_the_full_card_doesnt_tell_their_types_name():
    node = Node("vendor")
    restore.create(node, FIRST, {"A10-24C": 1}, {})
    # Nobody of this collection has seen the list before it was full.
    del node.files[restore.NAMES]
    assert counts(node) == {"type 3": 1}
    run(node, entry(A10_8Q=2))
    [before] = json.loads(node.files[restore.RECORD])["cards"][0]["before"]
    assert counts(node) == {"A10-8Q": 2} and before["type"] == "type 3"
    run(node)
    assert node.used(FIRST) == [24] and restore.RECORD not in node.files
    assert not run(node)["changed"]


def test_a_vgpu_of_others_has_the_name_that_a_free_function_of_the_card_lists():
    node = Node("vendor")
    restore.create(node, FIRST, {"A10-8Q": 1}, {})
    del node.files[restore.NAMES]
    node.files[f"{PCI}/0000:41:00.4/nvidia/creatable_vgpu_types"] = "ID    : vGPU Name\n"
    node.hold("/dev/vfio/50")
    run(node, entry(A10_8Q=1))
    assert counts(node) == {"A10-8Q": 1}


@pytest.mark.parametrize(
    ("listed", "types"),
    [
        ("ID    : vGPU Name\n7     : NVIDIA A10-4Q\n9 : NVIDIA: A10-8Q \n", {"7": "A10-4Q", "9": "A10-8Q"}),
        ("7\n: NVIDIA A10-4Q\n 8:NVIDIA A10-4Q\n", {"8": "A10-4Q"}),
        ("7 :\n: x\n-1 : y\n² : z\n٣ : z\n1 2 : z\n", {}),
        # Blanks without an end: a pattern that tries each of them again would take hours.
        (
            "\n" * 400_000 + " " * 400_000 + "7" + " " * 400_000 + "\n7 :" + " " * 400_000 + "NVIDIA A10-4Q",
            {"7": "A10-4Q"},
        ),
    ],
    ids=["as it is", "broken lines", "no types", "blanks"],
)
def test_what_a_function_lists_is_read_line_by_line(listed, types):
    node = Node("vendor")
    restore.create(node, FIRST, {"A10-8Q": 1}, {})
    node.files[f"{PCI}/0000:41:00.5/nvidia/creatable_vgpu_types"] = listed
    began = time.monotonic()
    [function] = [each for each in restore.card(node, FIRST).functions if each.address == "0000:41:00.5"]
    assert function.creatable == types and time.monotonic() - began < 20


def test_a_card_that_leaves_the_layout_gets_back_what_it_had():
    node = Node("vendor", (FIRST, SECOND))
    run(node, entry(A10_4Q=1))
    run(node, entry([1], A10_4Q=2))
    assert counts(node) == {} and not restore.card(node, FIRST).virtual and counts(node, SECOND) == {"A10-4Q": 2}
    assert [row["address"] for row in json.loads(node.files[restore.RECORD])["cards"]] == [SECOND]


@FRAMEWORKS
def test_a_run_that_was_killed_is_completed_and_can_be_undone(framework):
    def begin():
        node = Node(framework)
        restore.create(node, FIRST, {"A10-24C": 1}, {})
        return node

    def work(node):
        run(node, entry(A10_4Q=2))

    for node in killed_at_every_step(begin, work):
        run(node, entry(A10_4Q=2))
        assert counts(node) == {"A10-4Q": 2}
        assert not run(node, entry(A10_4Q=2))["changed"]
        run(node)
        assert node.used(FIRST) == [24] and restore.RECORD not in node.files


@pytest.mark.parametrize(
    ("damage", "entries", "code"),
    [
        (lambda node: node.links.update({f"{PCI}/{FIRST}/driver": "../vfio-pci"}), entry(A10_4Q=1), "vgpu_no_driver"),
        (lambda node: node.links.pop(f"{PCI}/{FIRST}/driver"), entry(A10_4Q=1), "vgpu_no_driver"),
        (
            lambda node: node.files.update({f"{PCI}/{FIRST}/sriov_totalvfs": "0\n"}),
            entry(A10_4Q=1),
            "vgpu_unsupported",
        ),
        (lambda node: node._manage(["", "-e", FIRST]), entry(A16_4Q=1), "vgpu_type_unknown"),
        (lambda node: None, entry([3], A10_4Q=1), "vgpu_no_card"),
        (lambda node: None, {**entry(A10_4Q=1), "device-filter": "0x20B010DE"}, "vgpu_no_card"),
        (lambda node: None, entry(A10_4Q=-1), "geometry_profile"),
        (lambda node: None, entry(A10_4Q=10**9), "geometry_profile"),
        (lambda node: None, {"devices": "all", "vgpu-devices": {"A10": 1}}, "geometry_profile"),
        (lambda node: None, {"devices": "all"}, "geometry_entry"),
        (lambda node: None, {"devices": [0, 0], "vgpu-devices": {}}, "geometry_entry"),
    ],
)
def test_what_cant_be_is_refused_before_anything_changes(damage, entries, code):
    node = Node("vendor")
    damage(node)
    before = (dict(node.files), dict(node.links))
    with pytest.raises(BadInput) as error:
        run(node, entries)
    assert error.value.details["code"] == code
    assert (node.files, node.links) == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (entry([0, 0], A10_4Q=1), r"vgpu_layouts.vgpu-configs.mine[0].devices: it is all"),
        ({**entry(A10_4Q=1), "device-filter": 7}, "vgpu_layouts.vgpu-configs.mine[0].device-filter: it has PCI ids"),
        ({"devices": [0], "vgpu-devices": {"A10": 1}}, "vgpu_layouts.vgpu-configs.mine[0].vgpu-devices.A10: it is"),
        (entry([3], A10_4Q=1), f"vgpu_layout: its entries are for none of this node's cards; 0 is {FIRST} (0x22"),
    ],
)
def test_a_refused_layout_is_named_by_its_keys(given, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        run(Node("vendor"), given)


def test_an_unknown_layout_is_named_with_those_that_there_are():
    params = {"state": "present", "layout": "yours", "layouts": layout(entry(A10_4Q=1))}
    with pytest.raises(BadInput, match=r"vgpu_layout: vgpu_layouts has no layout 'yours': .* \(mine\)"):
        vgpu.work(Node("vendor"), params, "/usr/bin/python3", False)


def test_a_card_that_moved_is_refused_by_the_role_and_at_boot():
    node = Node("vendor")
    run(node, entry(A10_4Q=1))
    node.boot()
    node.files[f"{PCI}/{FIRST}/device"] = "0x20b5\n"
    [error] = restored(node)
    assert error.code == "vgpu_moved"
    with pytest.raises(BadInput) as refused:
        run(node, entry(A10_4Q=1))
    assert refused.value.details["code"] == "vgpu_moved" and counts(node) == {}


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda node: setattr(node, "sriov", False), "vgpu_command"),
        (lambda node: setattr(node, "answer", errno.EPERM), "vgpu_refused"),
        (lambda node: setattr(node, "answer", -1), "vgpu_timeout"),
        (lambda node: setattr(node, "put", lambda path, text, seconds: Written(0)), "vgpu_without_effect"),
    ],
)
def test_what_the_driver_refuses_is_said_with_the_drivers_words(damage, code):
    node = Node("vendor")
    damage(node)
    with pytest.raises(ShareError) as error:
        run(node, entry(A10_4Q=1))
    assert error.value.details["code"] == code and error.value.details["address"] == FIRST


def test_a_card_takes_no_more_than_it_has_room_for():
    node = Node("card")
    with pytest.raises(ShareError, match="can't have another A10-8Q") as error:
        run(node, entry(A10_8Q=4))
    assert error.value.details["code"] == "vgpu_unavailable" and counts(node) == {"A10-8Q": 3}


PLACE = {"function": FIRST, "key": FIRST, "type": "A10-4Q"}
RECORDED = {
    "address": FIRST,
    "device": "0x223610DE",
    "wanted": {},
    "places": [],
    "instances": {},
    "before": [],
    "mig_before": None,
    "functions": False,
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"format": 2, "cards": []}',
        '{"format": 1}',
        '{"format": 1, "cards": 5}',
        *(
            json.dumps({"format": 1, "cards": [{**RECORDED, **damage}]})
            for damage in (
                {"address": "0000:41:00.0/../../../etc"},
                {"address": 7},
                {"wanted": {"A10-4Q": "2"}},
                {"wanted": {"A10-4Q": 10**9}},
                {"before": None},
                {"before": {"A10-4Q": 2}},
                {"places": [{**PLACE, "function": f"../../{FIRST}"}]},
                {"before": [{**PLACE, "key": "../create"}]},
                {"places": [{**PLACE, "type": 4}]},
                {"places": [{"function": FIRST, "key": FIRST}]},
                {"functions": "no"},
                {"more": 1},
                {"instances": {"1g.6gb,all": 1}},
                {"mig_before": {"on": True}},
                {"mig_before": {"on": 1, "instances": {}}},
            )
        ),
    ],
)
def test_a_record_that_somebody_has_edited_is_refused_by_the_role_and_at_boot(text, monkeypatch, capsys):
    node = Node("vendor")
    node.files[restore.RECORD] = text
    for entries in ((entry(A10_4Q=1),), ()):
        with pytest.raises(ShareError, match="isn't a record of format 1"):
            run(node, *entries)
    monkeypatch.setattr(restore, "Local", lambda: node)
    assert restore.main() == 1 and "has no vGPUs of format 1" in capsys.readouterr().err


def test_at_boot_all_cards_wait_for_the_driver_once_and_one_card_doesnt_keep_the_others_from_theirs(monkeypatch):
    node = Node("vendor", (FIRST, SECOND))
    run(node, entry(A10_4Q=1))
    node.boot()
    now = [0.0]
    monkeypatch.setattr(restore.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(restore.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    drivers = {card: node.links.pop(f"{PCI}/{card}/driver") for card in (FIRST, SECOND)}
    assert [error.code for error in restored(node)] == ["vgpu_no_driver", "vgpu_no_driver"]
    # The kubelet is started after this program.
    assert now[0] < 1.1 * restore.DRIVER_SECONDS
    node.links.update({f"{PCI}/{card}/driver": driver for card, driver in drivers.items()})
    full = iter([OSError(28, "No space left on device")])

    def write(path, text, mode=0o644):
        for error in full:
            raise error
        node.files[path] = text

    monkeypatch.setattr(node, "write", write)
    [error] = restored(node)
    assert error.code == "vgpu_system" and error.fields["address"] == FIRST
    assert counts(node, SECOND) == {"A10-4Q": 1}


def test_indices_of_a_layout_are_those_of_the_facts():
    node = Node("vendor", (FIRST, SECOND))
    node._manage(["", "-e", FIRST])
    other = f"{PCI}/0000:05:00.0"
    node.files.update({f"{other}/vendor": "0x10de\n", f"{other}/device": "0x2236\n", f"{other}/class": "0x038000\n"})
    assert sysfs.cards(node) == [card["address"] for card in gpus.pci(node)[0]] == [FIRST, SECOND]


def test_numbers_of_sysfs_that_are_none_are_no_vgpus():
    node = Node("card")
    for path in node.files:
        if path.endswith("/available_instances"):
            node.files[path] = "Input/output error\n"
    node.files[f"{PCI}/{FIRST}/sriov_totalvfs"] = "many\n"
    with pytest.raises(BadInput) as error:
        run(node, entry(A10_4Q=1))
    assert error.value.details["code"] == "vgpu_type_unknown"


def test_the_program_at_boot_is_this_code_and_needs_nothing_else(tmp_path: Path):
    sources = (restore, sysfs, kernel_write)
    for path, source in zip(facts.PROGRAMS, sources, strict=True):
        copied = tmp_path / Path(path).relative_to(facts.ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(vgpu.texts("/usr/bin/python3")[path])
        assert copied.read_text() == Path(source.__file__).read_text()
    unit = vgpu.unit_text("/usr/bin/python3")
    assert f"WorkingDirectory={facts.ROOT}\nExecStart=/usr/bin/python3 -B -m vgpu_boot._vgpu.restore\n" in unit
    words = [sys.executable, "-B", "-S", "-m", "vgpu_boot._vgpu.restore"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env={})
    # No machine of the tests has a record.
    assert (done.returncode, done.stderr) == (1, f"{restore.RECORD} has no vGPUs of format 1: run the playbook again\n")
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.parametrize("framework", ["mdev", "vendor"])
def test_gpu_instances_come_after_virtual_functions_and_before_their_types_also_at_boot(framework):
    node = Node(framework)
    assert run(node, entry(A10_1_6C=2), check=True)["changed"] and node.instances[FIRST] is OFF
    run(node, entry(A10_1_6C=2))
    assert counts(node) == {"A10-1-6C": 2} and [*node.instances[FIRST].values()] == ["1g.6gb", "1g.6gb"]
    changed = [line for line in node.ran if "systemctl" not in line and "--query" not in line and "-lgi" not in line]
    assert [line.split(" -i ")[0] for line in changed[:3]] == [
        f"{restore.SRIOV_MANAGE} -e {FIRST}",
        "nvidia-smi",
        "nvidia-smi mig",
    ]
    before = restore.card(node, FIRST).vgpus
    node.boot()
    assert counts(node) == {} and restored(node) == [] and restore.card(node, FIRST).vgpus == before
    ran = len(node.ran)
    assert restored(node) == [] and len(node.ran) == ran
    assert not run(node, entry(A10_1_6C=2))["changed"]
    # Only the difference.
    first = dict(node.instances[FIRST])
    run(node, entry(A10_1_6C=3))
    assert first.items() < node.instances[FIRST].items() and set(before) < set(restore.card(node, FIRST).vgpus)
    run(node)
    assert node.instances[FIRST] is OFF and counts(node) == {} and not restore.card(node, FIRST).virtual


def test_a_card_between_types_of_gpu_instances_and_others():
    node = Node("vendor")
    run(node, entry(A10_4Q=2))
    run(node, entry(A10_1_6C=1))
    assert counts(node) == {"A10-1-6C": 1}
    run(node, entry(A10_8Q=2))
    assert counts(node) == {"A10-8Q": 2} and node.instances[FIRST] is OFF
    run(node)
    assert counts(node) == {} and restore.RECORD not in node.files


def test_gpu_instances_that_were_there_come_back():
    node = Node("vendor")
    node._manage(["", "-e", FIRST])
    node.instances[FIRST] = {"1": "1g.6gb+me"}
    run(node, entry(A10_1_6C=1))
    assert [*node.instances[FIRST].values()] == ["1g.6gb"]
    run(node)
    assert [*node.instances[FIRST].values()] == ["1g.6gb+me"] and restore.RECORD not in node.files


def test_several_vgpus_share_a_gpu_instance_where_that_is_given():
    shared = {**entry(A10_1_6C=1), "mig-devices": {"1g.6gb": 3}}
    node = Node("vendor")
    run(node, shared)
    assert len(node.instances[FIRST]) == 3 and counts(node) == {"A10-1-6C": 1}
    assert not run(node, shared)["changed"]
    run(node, entry(A10_1_6C=1))
    assert len(node.instances[FIRST]) == 1 and counts(node) == {"A10-1-6C": 1}


@pytest.mark.parametrize(
    ("name", "profile"),
    [("A100-1-5C", "1g.5gb"), ("A100-1-5CME", "1g.5gb+me"), ("DC-1-24CGFX", "1g.24gb+gfx"), ("H100-7-80C", "7g.80gb")],
)
def test_the_profile_of_a_type_is_the_one_that_nvidias_manager_derives(name, profile):
    [parsed] = vgpu.parse_layouts(layout({"devices": "all", "vgpu-devices": {name: 2}}), "")["mine"]
    assert parsed.instances == {profile: 2}


def test_gpu_instances_of_a_card_in_use_arent_changed():
    node = Node("vendor")
    node._manage(["", "-e", FIRST])
    node.hold("/dev/nvidia0")
    before = (dict(node.files), dict(node.links))
    with pytest.raises(BadInput, match=r"qemu-kvm \(process 4242\)") as error:
        run(node, entry(A10_1_6C=1))
    assert error.value.details["code"] == "vgpu_held" and (node.files, node.links) == before


def test_a_run_with_gpu_instances_that_was_killed_is_completed_and_can_be_undone():
    def begin():
        node = Node("vendor")
        node._manage(["", "-e", FIRST])
        node.instances[FIRST] = {"1": "1g.6gb+me"}
        return node

    for node in killed_at_every_step(begin, lambda node: run(node, entry(A10_1_6C=2))):
        run(node, entry(A10_1_6C=2))
        assert counts(node) == {"A10-1-6C": 2} and not run(node, entry(A10_1_6C=2))["changed"]
        run(node)
        assert [*node.instances[FIRST].values()] == ["1g.6gb+me"] and restore.RECORD not in node.files


@pytest.mark.parametrize(
    ("mode", "code"), [("Disabled", "vgpu_mig_pending"), ("Enabled", "vgpu_no_instances"), ("", "vgpu_command")]
)
def test_instances_that_the_card_doesnt_make_are_said(mode, code):
    node = Node("vendor")
    node.commands["nvidia-smi -i"] = Done(0 if mode else 9, f"{mode}\n", "")
    node.commands["nvidia-smi mig -i"] = Done(0, "", "")
    with pytest.raises(ShareError) as error:
        run(node, entry(A10_1_6C=1))
    assert error.value.details["code"] == code and error.value.details["address"] == FIRST


@pytest.mark.parametrize("framework", ["card", "vendor"])
def test_a_write_that_waits_is_left_behind_and_reported_with_who_has_opened_the_vgpu(framework):
    node = Node(framework)
    run(node, entry(A10_4Q=1))
    [one] = restore.card(node, FIRST).vgpus
    put = node.put

    def opened(path, text, seconds):
        # A machine has opened it after it was looked at.
        node.hold(f"/dev/vfio/{node.links[f'{one.folder}/iommu_group'].rpartition('/')[2]}")
        node.answer = -1
        return put(path, text, seconds)

    node.put = opened
    with pytest.raises(ShareError, match=r"within 60 s: process 4711 .* held by qemu-kvm \(process 4242\)") as error:
        run(node)
    details = error.value.details
    assert (details["code"], details["address"], details["seconds"]) == ("vgpu_timeout", FIRST, 60.0)
    assert (details["vgpu"], [row["pid"] for row in details["held"]]) == (one.key, [4242])
    # The unit restores it still.
    assert restore.RECORD in node.files and facts.WANTED_BY in node.links


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("mounts", "systemd", "code"),
    [
        ("/dev/a / btrfs ro 0 0\n", True, "vgpu_read_only"),
        ("/dev/a / btrfs rw 0 0\n/dev/b /usr/local ext4 ro 0 0\n", True, "vgpu_read_only"),
        ("/dev/a / ext4 rw 0 0\n", False, "vgpu_no_systemd"),
    ],
)
def test_a_system_on_which_no_boot_would_restore_vgpus_is_refused_with_what_to_do(mounts, systemd, code, check):
    node = Node("vendor")
    node.files["/proc/self/mounts"] = mounts
    if not systemd:
        node.folders.clear()
    before = (dict(node.files), dict(node.links))
    with pytest.raises(BadInput, match="vgpu_state to external") as error:
        run(node, entry(A10_4Q=1), check=check)
    assert error.value.details["code"] == code and (node.files, node.links) == before
    assert not run(node, check=check)["changed"]


def test_a_transactional_system_has_writable_volumes_for_these_files():
    node = Node("vendor")
    # As on SLE Micro; on Red Hat's CoreOS the second one is a link into /var.
    rows = ["/dev/a / btrfs ro", "overlay /etc overlay rw", "/dev/a /var btrfs rw", "/dev/a /usr/local btrfs rw"]
    node.files["/proc/self/mounts"] = "".join(f"{row} 0 0\n" for row in rows)
    assert run(node, entry(A10_4Q=1))["changed"]
    node.files["/proc/self/mounts"] = "".join(f"{row} 0 0\n" for row in rows[:3])
    node.links["/usr/local"] = "../var/usrlocal"
    assert facts.facts(node)["read_only"] == []


def controller(node, *entries, exclude=()):
    """What the controller plans from the node's facts, which leave excluded cards out of ``gpus``."""
    params = {"state": "present" if entries else "absent", "layout": "mine", "layouts": layout(*entries or [entry()])}
    wanted = vgpu.texts("/usr/bin/python3")
    every = gpus.pci(node)[0]
    shown = [gpu for gpu in every if gpu["address"] not in exclude]
    section = facts.facts(node, [gpu for gpu in every if gpu["address"] in exclude])
    known = vgpu.observed(shown, json.loads(json.dumps(section)), wanted)
    return vgpu.make_plan(vgpu.entries_of(params), known, wanted, exclude), vgpu.report(known.cards)


@pytest.mark.parametrize(
    ("framework", "entries"),
    [
        ("card", (entry([0], A10_4Q=6), entry([1], A10_8Q=2))),
        ("mdev", (entry([0], A10_4Q=3), entry([1], A10_24C=1))),
        ("vendor", (entry([0], A10_4Q=4), entry([1], A10_1_6C=2))),
    ],
)
def test_the_controller_plans_from_facts_as_the_node_does(framework, entries):
    node = Node(framework, (FIRST, SECOND))
    assert controller(node)[0].empty and not controller(node, *entries)[0].empty
    result = run(node, *entries)
    plan, report = controller(node, *entries)
    assert plan.empty and not run(node, *entries)["changed"]
    # Types are summed up in the facts.
    assert [{**card, "types": 0} for card in report["cards"]] == [{**card, "types": 0} for card in result["cards"]]
    assert not controller(node, entry(A10_8Q=1))[0].empty and not controller(node)[0].empty
    node.files[facts.PROGRAMS[0]] = "# An earlier release's.\n"
    assert [change.header for change in controller(node, *entries)[0].changes] == [facts.PROGRAMS[0]]
    run(node)
    assert controller(node)[0].empty


@FRAMEWORKS
@pytest.mark.parametrize("left_alone", [FIRST, SECOND])
def test_the_controller_plans_exactly_also_where_a_card_is_left_alone(framework, left_alone):
    node = Node(framework, (FIRST, SECOND))

    def planned(*entries, exclude=(left_alone,)):
        """Return the controller's plan, which is the node's."""
        plan, report = controller(node, *entries, exclude=exclude)
        result = run(node, *entries, check=True, exclude=exclude)
        assert (not plan.empty, plan.diff()) == (result["changed"], result["diff"])
        assert [{**card, "types": 0} for card in report["cards"]] == [{**card, "types": 0} for card in result["cards"]]
        return not plan.empty

    every = entry(A10_4Q=2)
    assert planned(every) and run(node, every, exclude=[left_alone])["changed"] and not planned(every)
    assert planned(every, exclude=()) and run(node, every)["changed"]
    # One that has been divided before: only the undo gives it back what it had.
    assert not planned(every) and planned(entry(A10_8Q=1)) and planned()
    run(node, exclude=[left_alone])
    assert counts(node, left_alone) == {} and not planned()
    with pytest.raises(BadInput) as error:
        controller(node, entry([[FIRST, SECOND].index(left_alone)], A10_4Q=1), exclude=[left_alone])
    assert error.value.details["code"] == "vgpu_no_card"


def test_nothing_is_executed_on_a_node_that_has_its_vgpus(monkeypatch):
    node = Node("vendor", (FIRST, SECOND))
    options = {"layout": "mine", "layouts": layout(entry(A10_4Q=2))}

    def done(given, excluded=()):
        observed = {
            "python": {"version": "3.11.2", "executable": "/usr/bin/python3"},
            "gpus": [gpu for gpu in gpus.pci(node)[0] if gpu["address"] not in excluded],
            "driver": {"version": "580.178.04"},
            "vgpu": facts.facts(node, [gpu for gpu in gpus.pci(node)[0] if gpu["address"] in excluded]),
        }
        return act(vgpu_action, {**given, "observed": observed}, monkeypatch)

    assert done(options)[1] == [options] and done({"state": "absent"})[1] == []
    run(node, entry(A10_4Q=2))
    result, executed = done(options)
    assert (result["changed"], executed) == (False, []) and len(result["cards"][0]["vgpus"]) == 2
    assert done({"state": "absent"})[1] == [{"state": "absent"}]
    excluding = {**options, "exclude": [FIRST]}
    assert done(excluding, [FIRST])[1] == []
    node.boot()
    assert done(excluding, [FIRST])[1] == [excluding]
    assert done(options)[1] == [options]
    node.folders.clear()
    result, executed = done(options)
    assert result["failed"] and result["code"] == "vgpu_no_systemd" and not executed
