# SPDX-License-Identifier: GPL-3.0-or-later
"""vGPUs by a layout, on a simulated sysfs.

It answers as a real kernel did with simulated cards on 2026-11-28: types, create, remove, current_vgpu_type, a list
that shrinks. sriov-manage and nvidia-smi are stand-ins: NVIDIA's vGPU manager isn't public.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu import restore, vgpu
from node_fakes import FakeSystem, killed_at_every_step

PCI, PARENTS, INSTANCES = restore.PCI, restore.PARENTS, restore.INSTANCES
FIRST, SECOND = "0000:41:00.0", "0000:81:00.0"
GB = {"1": "A10-4Q", "2": "A10-8Q", "3": "A10-24C"}
SIZE = {"A10-4Q": 4, "A10-8Q": 8, "A10-24C": 24}


class Node(FakeSystem):
    """A machine with cards of 24 GB.

    :param framework: ``card``: the card is the parent of mediated devices; ``mdev``: its virtual functions are;
        ``vendor``: they are vGPUs themselves.
    """

    def __init__(self, framework: str, cards=(FIRST,)):
        super().__init__({"/etc/machine-id": "0123456789abcdef0123456789abcdef\n", "/proc/1/comm": "systemd\n"})
        self.framework = framework
        self.mixed: set[str] = set()
        self.sriov = True
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
                "tee": self._tee,
                restore.SRIOV_MANAGE: self._manage,
                "nvidia-smi vgpu -shm 1 -i": self._mix,
                "systemctl enable": lambda _argv: self._enable(True),
                "systemctl disable": lambda _argv: self._enable(False),
                "systemctl daemon-reload": Done(0, "", ""),
            }
        )

    def run(self, argv, timeout=60, stdin=None):
        self.stdin = stdin
        return super().run(argv, timeout, stdin)

    def functions(self, card):
        return [card] if self.framework == "card" else [f"{card[:-1]}{number}" for number in range(4, 8)]

    def used(self, card):
        """The sizes in GB of a card's vGPUs."""
        types = []
        for function in self.functions(card):
            current = self.files.get(f"{PCI}/{function}/nvidia/current_vgpu_type", "0").strip()
            types += [current] if current != "0" else []
        places = (link.split("/") for path, link in self.links.items() if path.count("/") == 5 and INSTANCES in path)
        keys = [place[-1] for place in places if place[-2] in self.functions(card)]
        types += [self.links[f"{INSTANCES}/{key}/mdev_type"].rpartition("/nvidia-")[2] for key in keys]
        return [SIZE[GB[number]] for number in types]

    def creatable(self, card):
        used = self.used(card)
        return {
            number: name
            for number, name in GB.items()
            if SIZE[name] <= 24 - sum(used) and (card in self.mixed or not set(used) - {SIZE[name]})
        }

    def refresh(self, card):
        for function in self.functions(card):
            if self.framework == "vendor":
                rows = "".join(f"{number} : NVIDIA {name}\n" for number, name in self.creatable(card).items())
                self.files[f"{PCI}/{function}/nvidia/creatable_vgpu_types"] = f"ID    : vGPU Name\n{rows}"
                continue
            busy = self.framework == "mdev" and any(f"/{function}/" in link for link in self.links.values())
            for number, name in GB.items():
                room = (24 - sum(self.used(card))) // SIZE[name] if number in self.creatable(card) and not busy else 0
                folder = f"{PARENTS}/{function}/mdev_supported_types/nvidia-{number}"
                self.files[f"{folder}/available_instances"] = f"{min(room, 1) if self.framework == 'mdev' else room}\n"

    def _parent(self, function):
        for number, name in GB.items():
            self.files[f"{PARENTS}/{function}/mdev_supported_types/nvidia-{number}/name"] = f"NVIDIA {name}\n"
        self.refresh(next(card for card in (FIRST, SECOND) if card[:-1] == function[:-1]))

    def _manage(self, argv):
        self.step()
        option, card = argv[1:]
        if not self.sriov:
            return Done(1, "", "Cannot obtain unbindLock for 0000:41:00.0")
        for number, function in enumerate(self.functions(card)):
            if option == "-d":
                self.links.pop(f"{PCI}/{card}/virtfn{number}", None)
                self.files = {path: text for path, text in self.files.items() if f"/{function}/" not in path}
                self.mixed.discard(card)
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

    def _tee(self, argv):
        self.step()
        path, value = argv[1], (self.stdin or "").strip()
        parts = path.split("/")
        card = next((card for card in (FIRST, SECOND) if card[:-1] in path), FIRST)
        if path.endswith("/current_vgpu_type"):
            if value != "0" and value not in self.creatable(card):
                return Done(1, "", f"tee: {path}: Operation not permitted")
            self.files[path] = f"{value}\n"
        elif path.endswith("/create"):
            function, kind = parts[4], parts[6]
            if self.files[f"{path.rpartition('/')[0]}/available_instances"].strip() == "0":
                return Done(1, "", f"tee: {path}: Input/output error")
            self.links[f"{INSTANCES}/{value}"] = f"../../../devices/pci0000:40/{function}/{value}"
            self.links[f"{INSTANCES}/{value}/mdev_type"] = f"../mdev_supported_types/{kind}"
            self.links[f"{INSTANCES}/{value}/iommu_group"] = f"../../kernel/iommu_groups/{60 + len(self.links)}"
        else:
            key = parts[-2]
            card = next(card for card in (FIRST, SECOND) if card[:-1] in self.links[f"{INSTANCES}/{key}"])
            self.links = {path: link for path, link in self.links.items() if f"/{key}" not in path}
        self.refresh(card)
        self.step()
        return Done(0, "", "")

    def _enable(self, enable):
        self.step()
        if enable:
            self.links[vgpu.WANTED_BY] = vgpu.UNIT
        else:
            self.links.pop(vgpu.WANTED_BY, None)
        return Done(0, "", "")

    def boot(self):
        """Forget what no boot keeps."""
        self.files.pop(restore.NAMES, None)
        self.links = {path: link for path, link in self.links.items() if not path.startswith(INSTANCES)}
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


def run(node, *entries, check=False):
    params = {
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
    assert node.files == files and vgpu.WANTED_BY not in node.links and counts(node) == {}
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


def test_several_sizes_on_a_card_need_the_mode_that_the_driver_forgets():
    node = Node("vendor")
    run(node, entry(A10_4Q=1, A10_8Q=1))
    assert counts(node) == {"A10-4Q": 1, "A10-8Q": 1}
    order = [line.split()[0].rpartition("/")[2] for line in node.ran if "systemctl" not in line]
    assert order == ["sriov-manage", "nvidia-smi", "tee", "tee"]
    node.boot()
    assert restored(node) == []
    assert counts(node) == {"A10-4Q": 1, "A10-8Q": 1}


@FRAMEWORKS
def test_what_a_machine_holds_stays_and_is_named(framework):
    node = Node(framework)
    run(node, entry(A10_4Q=2))
    [first, *_rest] = restore.card(node, FIRST).vgpus
    place = f"{PCI}/{first.function}" if framework == "vendor" else f"{INSTANCES}/{first.key}"
    node.hold(f"/dev/vfio/{node.links[f'{place}/iommu_group'].rpartition('/')[2]}")
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
    for path in (restore.RECORD, vgpu.PROGRAM):
        assert f"rmdir {path.rpartition('/')[0]}" in node.ran


@FRAMEWORKS
def test_vgpus_of_others_count_and_come_back(framework):
    node = Node(framework)
    restore.create(node, FIRST, {"A10-8Q": 2})
    run(node, entry(A10_8Q=2))
    assert counts(node) == {"A10-8Q": 2}
    run(node, entry(A10_24C=1))
    assert counts(node) == {"A10-24C": 1}
    run(node)
    assert counts(node) == {"A10-8Q": 2} and restore.RECORD not in node.files


def test_vgpus_of_others_come_back_where_the_full_card_doesnt_tell_their_types_name():
    node = Node("vendor")
    restore.create(node, FIRST, {"A10-24C": 1})
    # Nobody of this collection has seen the list before it was full.
    del node.files[restore.NAMES]
    assert counts(node) == {"type 3": 1}
    run(node, entry(A10_8Q=2))
    assert counts(node) == {"A10-8Q": 2} and json.loads(node.files[restore.RECORD])["cards"][0]["before"] == {
        "type 3": 1
    }
    run(node)
    assert node.used(FIRST) == [24] and restore.RECORD not in node.files
    assert not run(node)["changed"]


def test_a_vgpu_of_others_has_the_name_that_a_free_function_of_the_card_lists():
    node = Node("vendor")
    restore.create(node, FIRST, {"A10-8Q": 1})
    del node.files[restore.NAMES]
    node.files[f"{PCI}/0000:41:00.4/nvidia/creatable_vgpu_types"] = "ID    : vGPU Name\n"
    node.hold("/dev/vfio/50")
    run(node, entry(A10_8Q=1))
    assert counts(node) == {"A10-8Q": 1}


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
        restore.create(node, FIRST, {"A10-24C": 1})
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
        (lambda node: node.commands.update({"tee": Done(1, "", "tee: Operation not permitted")}), "vgpu_refused"),
        (lambda node: node.commands.update({"tee": Done(0, "", "")}), "vgpu_without_effect"),
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


RECORDED = {"address": FIRST, "device": "0x223610DE", "wanted": {}, "before": {}, "functions": False}


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
                {"functions": "no"},
                {"more": 1},
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
    assert restore.cards(node) == [card["address"] for card in gpus.pci(node)[0]] == [FIRST, SECOND]


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
    program = tmp_path / "vgpu_restore.py"
    program.write_text(vgpu.program_text())
    assert program.read_text() == Path(restore.__file__).read_text()
    assert f"ExecStart=/usr/bin/python3 {vgpu.PROGRAM}" in vgpu.unit_text("/usr/bin/python3")
    done = subprocess.run([sys.executable, "-I", str(program)], capture_output=True, text=True, check=False)
    # No machine of the tests has a record.
    assert (done.returncode, done.stderr) == (1, f"{restore.RECORD} has no vGPUs of format 1: run the playbook again\n")
