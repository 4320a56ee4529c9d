# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node's vGPUs by a layout: only what differs is changed, nothing that a process holds, and a unit restores it."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import posixpath
import re
import typing as t

from .._contracts import card_layouts
from .._contracts.card_layouts import Cards, Problem, parse_cards, whole
from .._core import plan as core_plan
from .._core.digest import digest
from .._core.errors import BadInput, ShareError
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._driver.library import card_information
from .._host import kernel_write, open_devices
from . import facts as vgpu_facts
from . import restore, sysfs
from .facts import NAME, PACKAGE, PROGRAMS, ROOT, UNIT, VgpuFacts
from .machine import Machine
from .restore import FORMAT, PROFILE, Failed, Instances, MigBefore, Place, Row
from .sysfs import NAMES, RECORD, Card, VGpu

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "layouts": {"type": "dict", "default": {}},
    "layout": {"type": "str", "default": ""},
    "exclude": {"type": "list", "elements": "str", "default": []},
    "observed": {"type": "dict"},
}
KEYS = frozenset(("devices", "device-filter", "vgpu-devices", "mig-devices"))
# Of a size, or of a part of a GPU instance; without the maker.
TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9]+[A-Z]+")
# As A100-1-5C and A100-1-5CME: slices and memory of the GPU instance, and what is appended to its profile's name.
OF_INSTANCE = re.compile(r"[A-Z0-9]+-([1-9])-([0-9]+)[ABCQ](ME|NOME|MEALL|GFX)?")
APPENDED = {None: "", "ME": "+me", "NOME": "-me", "MEALL": "+me.all", "GFX": "+gfx"}
Counts = t.Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Entry:
    """
    :param wanted: how many vGPUs of each type a card has.
    :param instances: how many GPU instances of each profile they need; empty where MIG isn't theirs.
    """

    cards: Cards
    wanted: Counts
    instances: Instances


def parse_layouts(document: t.Any, where: str) -> dict[str, tuple[Entry, ...]]:
    """Return the layouts of a document of vgpu-device-manager by name.

    :param where: the variable that has it.
    :raises Problem: vgpu-device-manager wouldn't accept it.
    """
    return card_layouts.parse_layouts(document, "vgpu-configs", _entry, where)


def _entry(given: t.Any, where: str) -> Entry:
    if not isinstance(given, dict) or not {"devices", "vgpu-devices"} <= set(given) <= KEYS:
        raise Problem(
            "geometry_entry", where, "it needs devices and vgpu-devices, and may have device-filter and mig-devices"
        )
    cards = parse_cards(given, where)
    types, place = given["vgpu-devices"], f"{where}.vgpu-devices"
    if not isinstance(types, dict):
        raise Problem("geometry_entry", place, "it has the number of vGPUs by type, as A10-4Q: 6")
    for name, count in types.items():
        if not TYPE.fullmatch(str(name)) or not whole(count) or count > restore.MOST:
            raise Problem("geometry_profile", f"{place}.{name}", "it is a type and a number, as A10-4Q: 6")
    wanted = {str(name): count for name, count in types.items() if count}
    derived: collections.Counter[str] = collections.Counter()
    for name, count in wanted.items():
        match = OF_INSTANCE.fullmatch(name)
        if match:
            derived[f"{match.group(1)}g.{match.group(2)}gb{APPENDED[match.group(3)]}"] += count
    if derived and any(not OF_INSTANCE.fullmatch(name) for name in wanted):
        raise Problem("geometry_profile", place, "a card has types of GPU instances, or others, and not both")
    return Entry(cards, wanted, _instances(given.get("mig-devices"), f"{where}.mig-devices", derived))


def _instances(given: t.Any, where: str, derived: Instances) -> Instances:
    """Return how many GPU instances: one for each vGPU, unless several share one, which is given then.

    :raises Problem: what is given isn't in the form of NVIDIA's mig-parted, or no type needs it.
    """
    if given is None:
        return dict(derived)
    if not derived:
        raise Problem("geometry_entry", where, "only types of GPU instances need it, as A100-1-5C")
    if not isinstance(given, dict) or not given:
        raise Problem("geometry_entry", where, "it has the number of GPU instances by profile, as 1g.5gb: 7")
    for name, count in given.items():
        if not PROFILE.fullmatch(str(name)) or not whole(count) or not 0 < count <= restore.MOST:
            raise Problem("geometry_profile", f"{where}.{name}", "it is a profile and a number, as 1g.5gb: 7")
    return {str(name): count for name, count in given.items()}


def recorded_rows(text: str | None) -> list[Row]:
    """Return the record's cards; none without a record.

    :raises ShareError: another version or program has written it.
    """
    if text is None:
        return []
    try:
        return restore.recorded(text)
    except ValueError as error:
        raise ShareError(
            f"{RECORD} isn't a record of format {FORMAT}: move it away, and undo its vGPUs by hand"
        ) from error


@dataclasses.dataclass(frozen=True)
class Facts:
    """
    :param files: texts of the unit, the programs, the record and the names, by path; None where there is none.
    :param enabled: the unit starts at boot.
    :param systemd: it is the machine's init.
    :param read_only: folders for these files that are mounted read-only.
    :param users: processes that have a vGPU or a card open.
    :param devices: device files by vGPUs' keys and cards' addresses.
    :param mig: GPU instances by cards' addresses, of cards for which they matter, as far as they are known.
    """

    cards: tuple[Card, ...]
    files: t.Mapping[str, str | None]
    enabled: bool
    systemd: bool
    read_only: tuple[str, ...]
    users: tuple[JsonObject, ...] = ()
    devices: t.Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    mig: t.Mapping[str, restore.Mig] = dataclasses.field(default_factory=dict)

    @property
    def recorded(self) -> list[Row]:
        """The record's cards; none without a record.

        :raises ShareError: another version or program has written it.
        """
        return recorded_rows(self.files[RECORD])

    def holders(self, key: str) -> list[JsonObject]:
        """Return the processes that have a vGPU or a card open.

        :param key: the vGPU's key, or the card's address.
        """
        wanted = set(self.devices.get(key, ()))
        return [user for user in self.users if wanted.intersection(user["devices"])]


@dataclasses.dataclass(frozen=True)
class Mig:
    """What a card's GPU instances become; ``instances``: None turns MIG off."""

    instances: Instances | None


@dataclasses.dataclass(frozen=True)
class Fill:
    """Bring a card's vGPUs to these, and its GPU instances where ``mig`` is given.

    ``places``: where they were, which is where they are put again. ``disable``: then disable its virtual functions
    where it had none. ``recorded``: where they are then is what the next boot restores.
    """

    address: str
    wanted: Counts
    places: tuple[Place, ...] = ()
    disable: bool = False
    mig: Mig | None = None
    recorded: bool = True


@dataclasses.dataclass(frozen=True)
class PutFile:
    """``text``: None removes the file."""

    path: str
    text: str | None


@dataclasses.dataclass(frozen=True)
class Forget:
    """Take cards out of the record, which goes with the last one."""

    addresses: frozenset[str]


ENABLE, DISABLE = ("systemctl", "enable", NAME), ("systemctl", "disable", NAME)
RELOAD = ("systemctl", "daemon-reload")


def make_plan(
    entries: t.Sequence[Entry], facts: Facts, texts: t.Mapping[str, str], exclude: t.Collection[str] = ()
) -> Plan:
    """Return what has to be done; an entry of the layout decides on all vGPUs of its cards.

    :param entries: the layout's; none removes what was made, and restores what was there before.
    :param texts: the unit's and the programs', by path.
    :param exclude: addresses of cards that a layout counts, and that stay as they are.
    :raises BadInput: a card can't have what it is to have, a process holds what has to go, or no boot would restore it.
    """
    recorded = {row["address"]: row for row in facts.recorded}
    rows: list[Row] = []
    changes: list[Change | None] = []
    for index, card in enumerate(facts.cards):
        if entries and card.address in exclude:
            # What was made on it before it was excluded is removed with everything else.
            rows += [recorded.pop(card.address)] if card.address in recorded else []
            continue
        entry = next((entry for entry in entries if entry.cards.match(index, card.device)), None)
        if entry is None:
            continue
        old = recorded.pop(card.address, None)
        if old and old["device"] != card.device:
            raise _error("vgpu_moved", card, f"is {card.device}, and was {old['device']} when its vGPUs were made")
        row = _row(card, entry, old, facts)
        rows.append(row)
        mig = Mig(entry.instances) if entry.instances else _mig_before(row)
        changes.append(_fill(card, Fill(card.address, entry.wanted, tuple(row["places"]), mig=mig), facts))
    if entries and not rows:
        shown = ", ".join(f"{index} is {card.address} ({card.device})" for index, card in enumerate(facts.cards))
        what = f"for none of this node's cards; {shown}" if shown else "for cards, and this node has none of NVIDIA's"
        raise BadInput(f"vgpu_layout: its entries are {what}", code="vgpu_no_card")
    if rows:
        _refuse_boot(facts)
    cards = {card.address: card for card in facts.cards}
    # Cards that the layout has left get back what they had.
    back = [
        _fill(cards[row["address"]], _given_back(row), facts)
        for row in recorded.values()
        if row["address"] in cards and cards[row["address"]].device == row["device"]
    ]
    filled = [change for change in (*back, *changes) if change]
    wanted = {path: text if rows else None for path, text in texts.items()}
    if not rows:
        wanted[NAMES] = None
    files = [
        Change(path, facts.files[path] or "", text or "", PutFile(path, text))
        for path, text in wanted.items()
        if text != facts.files[path]
    ]
    unit = [] if facts.enabled == bool(rows) else [_unit(bool(rows))]
    # The record comes first and goes last, so that a run that was killed knows what was there before. A card that has
    # left the layout stays in it until it has back what it had.
    now, during, after = facts.files[RECORD], _recorded([*rows, *recorded.values()]), _recorded(rows)
    begun = [Change(RECORD, now or "", during or "", PutFile(RECORD, during))] if during != now else []
    ended = [Change(RECORD, during or "", after or "", Forget(frozenset(recorded)))] if recorded else []
    # The unit needs its files as long as it is enabled.
    made = (*files, *unit) if rows else (*unit, *files)
    return Plan((*begun, *filled, *made, *ended))


def _refuse_boot(facts: Facts) -> None:
    """Refuse to make what no boot would restore.

    :raises BadInput: with what is to be done.
    """
    if not facts.systemd:
        raise BadInput(
            "vgpu: this machine's init isn't systemd, whose unit restores vGPUs at boot: run the role on the host, or "
            "set vgpu_state to external and create vGPUs at each boot by the system's own means",
            code="vgpu_no_systemd",
        )
    if facts.read_only:
        raise BadInput(
            f"vgpu: {', '.join(facts.read_only)} is on a read-only file system, so that what restores vGPUs at boot "
            "can't be written: mount a writable volume there, or put vGPUs into the system's image and set "
            "vgpu_state to external",
            code="vgpu_read_only",
            folders=list(facts.read_only),
        )


def _recorded(rows: t.Sequence[Row]) -> str | None:
    return json.dumps({"format": FORMAT, "cards": rows}, indent=1, sort_keys=True) + "\n" if rows else None


def _row(card: Card, entry: Entry, old: Row | None, facts: Facts) -> Row:
    mig = facts.mig.get(card.address) if entry.instances else None
    seen: MigBefore | None = {"on": mig.on, "instances": mig.counts()} if mig else None
    return {
        "address": card.address,
        "device": card.device,
        "wanted": dict(entry.wanted),
        "places": _places(card, entry.wanted, old["places"] if old else []),
        "instances": dict(entry.instances),
        "before": old["before"] if old else restore.places_of(card.vgpus),
        "mig_before": (old["mig_before"] if old else None) or seen,
        "functions": old["functions"] if old else bool(card.virtual),
    }


def _places(card: Card, wanted: Counts, recorded: t.Sequence[Place]) -> list[Place]:
    """Return where a boot puts a card's vGPUs: where those are that stay, and where those were that it lacks."""
    gone = surplus(card, restore.named(card, wanted), recorded)
    found = restore.places_of(vgpu for vgpu in card.vgpus if vgpu not in gone)
    taken = {(place["function"], place["key"]) for place in found}
    left = collections.Counter(restore.missing(card, wanted))
    for place in recorded:
        if left[place["type"]] > 0 and (place["function"], place["key"]) not in taken:
            left[place["type"]] -= 1
            found.append(place)
    return sorted(found, key=lambda place: (place["function"], place["key"]))


def _given_back(row: Row) -> Fill:
    """Return what gives a card back what it had."""
    before = tuple(row["before"])
    wanted = restore.counts_of(before)
    return Fill(row["address"], wanted, before, not row["functions"], _mig_before(row), recorded=False)


def _mig_before(row: Row) -> Mig | None:
    before = row["mig_before"]
    if before is None:
        return None
    return Mig(before["instances"] if before["on"] else None)


def _unit(enable: bool) -> Change:
    texts = ("disabled\n", "enabled\n")
    before, after = texts if enable else texts[::-1]
    return Change(NAME, before, after, ENABLE if enable else DISABLE)


def surplus(card: Card, wanted: Counts, places: t.Iterable[Place] = ()) -> list[VGpu]:
    """Return the vGPUs that a card has beyond what it is to have; those at these places stay first."""
    left, found = dict(wanted), []
    first = {(place["function"], place["key"], place["type"]) for place in places}
    for vgpu in sorted(card.vgpus, key=lambda vgpu: (vgpu.function, vgpu.key, vgpu.name) not in first):
        if left.get(vgpu.name, 0) > 0:
            left[vgpu.name] -= 1
        else:
            found.append(vgpu)
    return found


def _fill(card: Card, fill: Fill, facts: Facts) -> Change | None:
    disable, wanted, mig = fill.disable and bool(card.virtual), restore.named(card, fill.wanted), fill.mig
    gone = surplus(card, wanted, fill.places)
    lacking = restore.missing(card, wanted)
    divided = mig is not None and _differs(mig, facts.mig.get(card.address))
    if not (gone or lacking or disable or divided):
        return None
    if lacking and card.driver != restore.DRIVER:
        raise _error("vgpu_no_driver", card, f"has {card.driver or 'no driver'}, and vGPUs need NVIDIA's vGPU manager")
    if lacking and not card.functions and not card.most_functions:
        text = "has no vGPU types: its driver isn't NVIDIA's vGPU manager, or the card has no vGPU"
        raise _error("vgpu_unsupported", card, text)
    # What goes makes room for other types than those that can be had now, and GPU instances bring their own.
    unknown = sorted(set(lacking) - card.names()) if card.functions and not gone and mig is None else []
    if unknown:
        known = ", ".join(sorted(card.names())) or "none"
        raise _error("vgpu_type_unknown", card, f"has no type {', '.join(unknown)}; it has {known}", types=unknown)
    keys = [vgpu.key for vgpu in gone]
    if disable or divided or (lacking and not card.functions):
        keys.append(card.address)
    if disable:
        # One may be a virtual machine's without being a vGPU of ours; the kernel would wait for it.
        keys += [each for each in card.virtual if each not in keys]
    held = [(key, user) for key in keys for user in facts.holders(key)]
    if held:
        text = f"is held by {_users(user for _key, user in held)}: stop the virtual machine or program first"
        raise _error("vgpu_held", card, text, held=[{"vgpu": key, **user} for key, user in held])
    now = facts.mig.get(card.address)
    before = _shown(card.counts(), now.counts() if now and now.on else {})
    after = _shown(wanted, (mig.instances if mig else None) or {})
    step = dataclasses.replace(fill, wanted=wanted, disable=disable)
    return Change(f"vGPUs of card {card.address}", before, after, step)


def _differs(wanted: Mig, now: restore.Mig | None) -> bool:
    """Return whether GPU instances aren't as they are to be; what isn't known doesn't count."""
    if now is None:
        return False
    return dict(wanted.instances or {}) != now.counts() or (wanted.instances is not None) != now.on


def _users(users: t.Iterable[JsonObject]) -> str:
    return ", ".join(sorted({f"{user['command']} (process {user['pid']})" for user in users}))


def _shown(counts: Counts, instances: Instances) -> str:
    rows = [f"GPU instance {profile}: {count}\n" for profile, count in sorted(instances.items()) if count]
    return "".join([*rows, *(f"{name}: {count}\n" for name, count in sorted(counts.items()) if count)])


def _error(code: str, card: Card, text: str, **fields: t.Any) -> BadInput:
    return BadInput(f"vgpu: card {card.address} {text}", code=code, address=card.address, **fields)


def unit_text(python: str) -> str:
    """Return the unit.

    :param python: the path of the interpreter that runs modules on this machine.
    """
    return f"""\
[Unit]
Description=Restore this machine's vGPUs after a boot (kubegpu.share)
Documentation=https://docs.nvidia.com/vgpu/
# MIG comes before the virtual functions, and virtual machines after the vGPUs.
After=nvidia-vgpud.service nvidia-vgpu-mgr.service nvidia-mig-manager.service
Before=kubelet.service k3s.service k3s-agent.service rke2-server.service rke2-agent.service
Before=libvirtd.service virtqemud.service
ConditionPathExists={RECORD}

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=10min
WorkingDirectory={ROOT}
ExecStart={python} -B -m {PACKAGE}._vgpu.restore

[Install]
WantedBy=multi-user.target
"""


def texts(python: str) -> dict[str, str]:
    """Return the unit's text and those of the program that it starts, by path.

    :param python: the interpreter that the unit starts.
    """
    sources = (restore.__name__, sysfs.__name__, kernel_write.__name__)
    return {**{path: _source(name) for path, name in zip(PROGRAMS, sources)}, UNIT: unit_text(python)}


def _source(name: str) -> str:
    """Return the source of a module, as this code runs it."""
    spec = importlib.import_module(name).__spec__
    text = spec.loader.get_source(name) if spec and spec.loader else None  # type: ignore[attr-defined]
    if not text:
        raise ShareError(f"{name}, a part of what restores vGPUs at boot, can't be read")
    # Ansible's own loader returns bytes.
    return text.decode() if isinstance(text, bytes) else str(text)


def card_of(gpu: t.Mapping[str, t.Any], names: t.Mapping[str, str]) -> Card:
    """Return a card by the node's facts, in which the types of its functions are summed up.

    :param gpu: an element of ``gpu_node.gpus``, or of ``gpu_node.vgpu.excluded``.
    :param names: of types by their ids, as far as they are known.
    """
    host = gpu["vgpu_host"]
    vgpus = tuple(VGpu(each["address"], each["uuid"] or each["address"], each["type"], "") for each in host["vgpus"])
    offered = tuple(sysfs.Type(each["id"], each["name"], each["available"]) for each in host["types"])
    able = host["framework"] != "none"
    functions = [sysfs.Function(gpu["address"], host["framework"], offered, vgpus)] if able else []
    return Card(
        gpu["address"],
        sysfs.pci_ids(gpu["vendor"], gpu["device"]),
        gpu["driver"],
        gpu["virtual_functions"]["total"],
        tuple(each["address"] for each in gpu["virtual_functions"]["enabled"]),
        sysfs.named(functions, names),
    )


def observed(gpus: t.Sequence[t.Mapping[str, t.Any]], section: VgpuFacts, wanted: t.Mapping[str, str]) -> Facts:
    """Return what the node's facts say, without who has a card, and without GPU instances.

    :param section: ``gpu_node.vgpu``.
    :param wanted: the unit's and the programs' texts, by path.
    """
    names = sysfs.known(section["names"])
    files: dict[str, str | None] = {RECORD: section["record"], UNIT: section["unit"], NAMES: section["names"]}
    for path in PROGRAMS:
        there = section["programs"].get(path)
        same = there == digest(wanted[path])
        files[path] = None if there is None else wanted[path] if same else "another version\n"
    # A layout's numbers count cards of gpu_exclude, too.
    cards = [card_of(gpu, names) for gpu in [*gpus, *section["excluded"]]]
    return Facts(
        tuple(sorted(cards, key=lambda card: card.address)),
        files,
        section["enabled"],
        section["systemd"],
        tuple(section["read_only"]),
    )


class Reconciler:
    """vGPUs on the machine that the module runs on."""

    def __init__(
        self, entries: t.Sequence[Entry], machine: Machine, python: str, exclude: t.Collection[str] = ()
    ) -> None:
        """:param exclude: addresses of cards that stay as they are."""
        self._entries = entries
        self._exclude = exclude
        self._machine = machine
        self._texts = texts(python)
        # Of the last observation.
        self.cards: tuple[Card, ...] = ()

    def observe(self) -> Facts:
        machine = self._machine
        cards = self.cards = tuple(sysfs.card(machine, address) for address in sysfs.cards(machine))
        devices = {card.address: self._files_of_card(card.address) for card in cards}
        devices |= {vgpu.key: self._files_of(vgpu.folder) for card in cards for vgpu in card.vgpus}
        devices |= {each: self._files_of(f"{sysfs.PCI}/{each}") for card in cards for each in card.virtual}
        files = {path: machine.read(path) for path in (RECORD, *PROGRAMS, UNIT, NAMES)}
        section = vgpu_facts.facts(machine)
        facts = Facts(
            cards,
            files,
            section["enabled"],
            section["systemd"],
            tuple(section["read_only"]),
            tuple(self._users(devices)),
            devices,
        )
        return dataclasses.replace(facts, mig=dict(self._mig(facts)))

    def _users(self, devices: t.Mapping[str, tuple[str, ...]]) -> list[JsonObject]:
        paths = {path for each in devices.values() for path in each}
        return open_devices.users(self._machine, lambda path: path in paths) if paths else []

    def _mig(self, facts: Facts) -> t.Iterator[tuple[str, restore.Mig]]:
        """Yield the GPU instances of cards whose entry or record has some; where the driver can't tell, none."""
        recorded = {row["address"] for row in facts.recorded if row["mig_before"] or row["instances"]}
        for index, card in enumerate(facts.cards):
            wanted = any(entry.instances and entry.cards.match(index, card.device) for entry in self._entries)
            if not wanted and card.address not in recorded:
                continue
            try:
                yield card.address, restore.mig(self._machine, card.address)
            except Failed:
                continue

    def _files_of_card(self, address: str) -> tuple[str, ...]:
        minor = card_information(self._machine, address).minor
        return (f"/dev/nvidia{minor}",) if minor is not None else ()

    def _files_of(self, folder: str) -> tuple[str, ...]:
        """Return VFIO's files of a vGPU, or of a virtual function that a machine may have as it is."""
        group = (self._machine.link(f"{folder}/iommu_group") or "").rpartition("/")[2]
        single = [f"/dev/vfio/devices/{name}" for name in self._machine.names(f"{folder}/vfio-dev")]
        return (*([f"/dev/vfio/{group}"] if group else []), *single)

    def plan(self, facts: Facts) -> Plan:
        return make_plan(self._entries, facts, self._texts, self._exclude)

    def apply(self, facts: Facts, plan: Plan) -> None:
        for change in plan.changes:
            step = change.step
            try:
                if isinstance(step, PutFile):
                    self._put(step)
                elif isinstance(step, Fill):
                    self._fill(step)
                elif isinstance(step, Forget):
                    self._forget(step)
                else:
                    self._must(step)
            except Failed as error:
                raise self._explained(error, facts) from error

    def _explained(self, error: Failed, facts: Facts) -> ShareError:
        """Return an error with who has opened what the kernel waits for, since the last observation."""
        paths = facts.devices.get(error.fields.get("vgpu", ""), ()) if error.code == "vgpu_timeout" else ()
        held = self._users({"": paths})
        text = f"vgpu: {error}" + (f"; it is held by {_users(held)}" if held else "")
        return ShareError(text, code=error.code, **error.fields, **({"held": held} if held else {}))

    def _fill(self, step: Fill) -> None:
        machine, address = self._machine, step.address
        card = sysfs.card(machine, address)
        for vgpu in surplus(card, restore.named(card, step.wanted), step.places):
            restore.remove(machine, card, vgpu)
        if step.disable:
            restore.disable(machine, address)
        if step.mig:
            restore.remove_instances(machine, address, step.mig.instances)
        instances = (step.mig.instances if step.mig else None) or {}
        restore.create(machine, address, step.wanted, instances, step.places)
        if step.recorded:
            self._note(address)

    def _note(self, address: str) -> None:
        """Record where a card's vGPUs are."""
        card = sysfs.card(self._machine, address)
        rows = self._rows()
        for row in rows:
            if row["address"] == address:
                row["places"] = _places(card, row["wanted"], row["places"])
        self._put(PutFile(RECORD, _recorded(rows)))

    def _forget(self, step: Forget) -> None:
        rows = [row for row in self._rows() if row["address"] not in step.addresses]
        self._put(PutFile(RECORD, _recorded(rows)))

    def _rows(self) -> list[Row]:
        """Return the record's cards as they are now."""
        return recorded_rows(self._machine.read(RECORD))

    def _put(self, file: PutFile) -> None:
        if file.text is None:
            self._machine.remove(file.path)
            if file.path == RECORD or file.path in PROGRAMS:
                self._remove_folders(posixpath.dirname(file.path))
        else:
            self._machine.write(file.path, file.text)
        if file.path == UNIT:
            self._must(RELOAD)

    def _remove_folders(self, folder: str) -> None:
        """Remove a folder, and those above it that are this collection's.

        It fails while other parts of the collection have files there.
        """
        self._machine.run(["rmdir", folder])
        if folder.startswith(f"{ROOT}/"):
            self._remove_folders(posixpath.dirname(folder))

    def _must(self, argv: t.Sequence[str]) -> None:
        done = self._machine.run(argv, restore.COMMAND_SECONDS)
        if done.rc:
            raise ShareError(f"{' '.join(argv)} failed: {(done.err or done.out).strip()}")


def entries_of(params: JsonObject) -> tuple[Entry, ...]:
    """Return the entries of the layout that the options name; none for ``state: absent``.

    :raises BadInput: the layout is unknown, or NVIDIA's tool wouldn't accept it.
    """
    try:
        layouts = parse_layouts(params["layouts"], "vgpu_layouts")
        if params["state"] != "present":
            return ()
        if params["layout"] not in layouts:
            known = ", ".join(layouts) or "none"
            text = f"vgpu_layouts has no layout {params['layout']!r}: name one of those that it has ({known})"
            raise Problem("layout_unknown", "vgpu_layout", text)
        return layouts[params["layout"]]
    except Problem as problem:
        raise BadInput(str(problem), code=problem.code, where=problem.where) from problem


def work(machine: Machine, params: JsonObject, python: str, check: bool) -> JsonObject:
    """Reconcile, and return ``changed``, ``diff`` and the vGPUs by card.

    :param python: the interpreter that the unit starts.
    :param check: predict the changes without applying them.
    :raises BadInput: the layout is unknown, or NVIDIA's tool wouldn't accept it.
    """
    reconciler = Reconciler(entries_of(params), machine, python, params.get("exclude") or ())
    result = core_plan.run(reconciler, check)
    return {**result, **report(reconciler.cards)}


def report(cards: t.Iterable[Card]) -> JsonObject:
    """Return what the module returns beside ``changed`` and ``diff``."""
    return {
        "cards": [
            {
                "address": card.address,
                "framework": card.framework,
                "virtual_functions": len(card.virtual),
                "vgpus": [dataclasses.asdict(vgpu) for vgpu in card.vgpus],
                "types": sorted(card.names()),
            }
            for card in cards
        ]
    }
