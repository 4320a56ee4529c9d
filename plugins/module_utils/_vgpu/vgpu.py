# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node's vGPUs by a layout: only what differs is changed, nothing that a process holds, and a unit restores it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import posixpath
import re
import typing as t

from .._contracts import card_layouts
from .._contracts.card_layouts import Cards, Problem, parse_cards, whole
from .._core import plan as core_plan
from .._core.errors import BadInput, ShareError
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._driver.library import card_information
from .._host import open_devices
from .._host.system import System
from . import restore
from .restore import FORMAT, NAMES, RECORD, Card, Failed, Row, VGpu

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "layouts": {"type": "dict", "default": {}},
    "layout": {"type": "str", "default": ""},
}
PROGRAM = "/usr/local/lib/kubegpu-share/vgpu_restore.py"
NAME = "kubegpu-share-vgpu.service"
UNIT = f"/etc/systemd/system/{NAME}"
WANTED_BY = f"/etc/systemd/system/multi-user.target.wants/{NAME}"
KEYS = frozenset(("devices", "device-filter", "vgpu-devices"))
# Of a size, or of a part of a MIG device; without the maker.
TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9]+[A-Z]+")
Counts = t.Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Entry:
    """
    :param wanted: how many vGPUs of each type a card has.
    """

    cards: Cards
    wanted: Counts


def parse_layouts(document: t.Any, where: str) -> dict[str, tuple[Entry, ...]]:
    """Return the layouts of a document of vgpu-device-manager by name.

    :param where: the variable that has it.
    :raises Problem: vgpu-device-manager wouldn't accept it.
    """
    return card_layouts.parse_layouts(document, "vgpu-configs", _entry, where)


def _entry(given: t.Any, where: str) -> Entry:
    if not isinstance(given, dict) or not {"devices", "vgpu-devices"} <= set(given) <= KEYS:
        raise Problem("geometry_entry", where, "it needs devices and vgpu-devices, and may have device-filter")
    cards = parse_cards(given, where)
    types, where = given["vgpu-devices"], f"{where}.vgpu-devices"
    if not isinstance(types, dict):
        raise Problem("geometry_entry", where, "it has the number of vGPUs by type, as A10-4Q: 6")
    for name, count in types.items():
        if not TYPE.fullmatch(str(name)) or not whole(count) or count > restore.MOST:
            raise Problem("geometry_profile", f"{where}.{name}", "it is a type and a number, as A10-4Q: 6")
    return Entry(cards, {str(name): count for name, count in types.items() if count})


@dataclasses.dataclass(frozen=True)
class Facts:
    """
    :param files: texts of the unit, the program, the record and the names, by path; None where there is none.
    :param enabled: the unit starts at boot.
    :param users: processes that have a vGPU or a card open.
    """

    cards: tuple[Card, ...]
    files: t.Mapping[str, str | None]
    enabled: bool
    users: tuple[JsonObject, ...]
    devices: t.Mapping[str, tuple[str, ...]]

    @property
    def recorded(self) -> list[Row]:
        """The record's cards; none without a record.

        :raises ShareError: another version or program has written it.
        """
        text = self.files[RECORD]
        if text is None:
            return []
        try:
            return restore.recorded(text)
        except ValueError as error:
            raise ShareError(
                f"{RECORD} isn't a record of format {FORMAT}: move it away, and undo its vGPUs by hand"
            ) from error

    def holders(self, key: str) -> list[JsonObject]:
        """Return the processes that have a vGPU or a card open.

        :param key: the vGPU's key, or the card's address.
        """
        wanted = set(self.devices.get(key, ()))
        return [user for user in self.users if wanted.intersection(user["devices"])]


@dataclasses.dataclass(frozen=True)
class Fill:
    """Bring a card's vGPUs to these; then disable its virtual functions where it had none."""

    address: str
    wanted: Counts
    disable: bool = False


@dataclasses.dataclass(frozen=True)
class PutFile:
    """``text``: None removes the file."""

    path: str
    text: str | None


ENABLE, DISABLE = ("systemctl", "enable", NAME), ("systemctl", "disable", NAME)
RELOAD = ("systemctl", "daemon-reload")


def make_plan(entries: t.Sequence[Entry], facts: Facts, texts: t.Mapping[str, str]) -> Plan:
    """Return what has to be done; an entry of the layout decides on all vGPUs of its cards.

    :param entries: the layout's; none removes what was made, and restores what was there before.
    :param texts: the unit's and the program's, by path.
    :raises BadInput: a card can't have what it is to have, or a process holds what has to go.
    """
    recorded = {row["address"]: row for row in facts.recorded}
    rows: list[Row] = []
    for index, card in enumerate(facts.cards):
        entry = next((entry for entry in entries if entry.cards.match(index, card.device)), None)
        if entry is None:
            continue
        old = recorded.pop(card.address, None)
        if old and old["device"] != card.device:
            raise _error("vgpu_moved", card, f"is {card.device}, and was {old['device']} when its vGPUs were made")
        before = {"before": old["before"], "functions": old["functions"]} if old else _before(card)
        rows.append(
            t.cast(Row, {"address": card.address, "device": card.device, "wanted": dict(entry.wanted), **before})
        )
    if entries and not rows:
        shown = ", ".join(f"{index} is {card.address} ({card.device})" for index, card in enumerate(facts.cards))
        what = f"for none of this node's cards; {shown}" if shown else "for cards, and this node has none of NVIDIA's"
        raise BadInput(f"vgpu_layout: its entries are {what}", code="vgpu_no_card")
    cards = {card.address: card for card in facts.cards}
    changes = [_fill(cards[row["address"]], row["wanted"], False, facts) for row in rows]
    # Cards that the layout has left get back what they had.
    back = [
        _fill(cards[row["address"]], row["before"], not row["functions"], facts)
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
    ended = [Change(RECORD, during or "", after or "", PutFile(RECORD, after))] if after != during else []
    # The unit needs its files as long as it is enabled.
    made = (*files, *unit) if rows else (*unit, *files)
    return Plan((*begun, *filled, *made, *ended))


def _recorded(rows: t.Sequence[Row]) -> str | None:
    return json.dumps({"format": FORMAT, "cards": rows}, indent=1, sort_keys=True) + "\n" if rows else None


def _before(card: Card) -> JsonObject:
    return {"before": card.counts(), "functions": bool(card.virtual)}


def _unit(enable: bool) -> Change:
    texts = ("disabled\n", "enabled\n")
    before, after = texts if enable else texts[::-1]
    return Change(NAME, before, after, ENABLE if enable else DISABLE)


def surplus(card: Card, wanted: Counts) -> list[VGpu]:
    """Return the vGPUs that a card has beyond what it is to have."""
    left, found = dict(wanted), []
    for vgpu in card.vgpus:
        if left.get(vgpu.name, 0) > 0:
            left[vgpu.name] -= 1
        else:
            found.append(vgpu)
    return found


def _fill(card: Card, wanted: Counts, disable: bool, facts: Facts) -> Change | None:
    disable, wanted = disable and bool(card.virtual), restore.named(card, wanted)
    gone = surplus(card, wanted)
    lacking = restore.missing(card, wanted)
    if not (gone or lacking or disable):
        return None
    if lacking and card.driver != restore.DRIVER:
        raise _error("vgpu_no_driver", card, f"has {card.driver or 'no driver'}, and vGPUs need NVIDIA's vGPU manager")
    if lacking and not card.functions and not card.most_functions:
        text = "has no vGPU types: its driver isn't NVIDIA's vGPU manager, or the card has no vGPU"
        raise _error("vgpu_unsupported", card, text)
    # What goes makes room for other types than those that can be had now.
    unknown = sorted(set(lacking) - card.names()) if card.functions and not gone else []
    if unknown:
        known = ", ".join(sorted(card.names())) or "none"
        raise _error("vgpu_type_unknown", card, f"has no type {', '.join(unknown)}; it has {known}", types=unknown)
    keys = [vgpu.key for vgpu in gone]
    if disable or (lacking and not card.functions):
        keys.append(card.address)
    if disable:
        # One may be a virtual machine's without being a vGPU of ours; the kernel would wait for it.
        keys += [each for each in card.virtual if each not in keys]
    held = [(key, user) for key in keys for user in facts.holders(key)]
    if held:
        users = sorted({f"{user['command']} (process {user['pid']})" for _key, user in held})
        text = f"is held by {', '.join(users)}: stop the virtual machine or program first"
        raise _error("vgpu_held", card, text, held=[{"vgpu": key, **user} for key, user in held])
    name = f"vGPUs of card {card.address}"
    return Change(name, _shown(card.counts()), _shown(wanted), Fill(card.address, wanted, disable))


def _shown(counts: Counts) -> str:
    return "".join(f"{name}: {count}\n" for name, count in sorted(counts.items()) if count)


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
ExecStart={python} {PROGRAM}

[Install]
WantedBy=multi-user.target
"""


def program_text() -> str:
    """Return the source of the program that restores vGPUs at boot: the file restore.py, as this code runs it."""
    spec = importlib.import_module(restore.__name__).__spec__
    text = spec.loader.get_source(restore.__name__) if spec and spec.loader else None  # type: ignore[attr-defined]
    if not text:
        raise ShareError("the program that restores vGPUs at boot can't be read")
    # Ansible's own loader returns bytes.
    return text.decode() if isinstance(text, bytes) else str(text)


class Reconciler:
    """vGPUs on the machine that the module runs on."""

    def __init__(self, entries: t.Sequence[Entry], system: System, python: str) -> None:
        self._entries = entries
        self._system = system
        self._texts = {PROGRAM: program_text(), UNIT: unit_text(python)}

    def observe(self) -> Facts:
        system = self._system
        cards = tuple(restore.card(system, address) for address in restore.cards(system))
        devices = {card.address: self._files_of_card(card.address) for card in cards}
        devices |= {vgpu.key: self._files_of(vgpu.key, vgpu.function) for card in cards for vgpu in card.vgpus}
        devices |= {each: self._files_of(each, each) for card in cards for each in card.virtual}
        paths = {path for each in devices.values() for path in each}
        users = open_devices.users(system, lambda path: path in paths) if paths else []
        files = {path: system.read(path) for path in (RECORD, PROGRAM, UNIT, NAMES)}
        return Facts(cards, files, system.exists(WANTED_BY), tuple(users), devices)

    def _files_of_card(self, address: str) -> tuple[str, ...]:
        minor = card_information(self._system, address).minor
        return (f"/dev/nvidia{minor}",) if minor is not None else ()

    def _files_of(self, key: str, function: str) -> tuple[str, ...]:
        """Return VFIO's files of a vGPU, or of a virtual function that a machine may have as it is."""
        folder = f"{restore.PCI}/{function}" if key == function else f"{restore.INSTANCES}/{key}"
        group = (self._system.link(f"{folder}/iommu_group") or "").rpartition("/")[2]
        single = [f"/dev/vfio/devices/{name}" for name in self._system.names(f"{folder}/vfio-dev")]
        return (*([f"/dev/vfio/{group}"] if group else []), *single)

    def plan(self, facts: Facts) -> Plan:
        return make_plan(self._entries, facts, self._texts)

    def apply(self, facts: Facts, plan: Plan) -> None:
        for change in plan.changes:
            step = change.step
            try:
                if isinstance(step, PutFile):
                    self._put(step)
                elif isinstance(step, Fill):
                    self._fill(step)
                else:
                    self._must(step)
            except Failed as error:
                raise ShareError(f"vgpu: {error}", code=error.code, **error.fields) from error

    def _fill(self, step: Fill) -> None:
        card = restore.card(self._system, step.address)
        for vgpu in surplus(card, restore.named(card, step.wanted)):
            restore.remove(self._system, card, vgpu)
        restore.create(self._system, step.address, step.wanted)
        if step.disable:
            restore.disable(self._system, step.address)

    def _put(self, file: PutFile) -> None:
        if file.text is None:
            self._system.remove(file.path)
            if file.path in (RECORD, PROGRAM):
                # Fails while other parts of this collection have files there.
                self._system.run(["rmdir", posixpath.dirname(file.path)])
        else:
            self._system.write(file.path, file.text)
        if file.path == UNIT:
            self._must(RELOAD)

    def _must(self, argv: t.Sequence[str]) -> None:
        done = self._system.run(argv)
        if done.rc:
            raise ShareError(f"{' '.join(argv)} failed: {(done.err or done.out).strip()}")


def work(system: System, params: JsonObject, python: str, check: bool) -> JsonObject:
    """Reconcile, and return ``changed``, ``diff`` and the vGPUs by card.

    :param python: the interpreter that the unit starts.
    :param check: predict the changes without applying them.
    :raises BadInput: the layout is unknown, or NVIDIA's tool wouldn't accept it.
    """
    entries: t.Sequence[Entry] = ()
    try:
        layouts = parse_layouts(params["layouts"], "vgpu_layouts")
        if params["state"] == "present":
            if params["layout"] not in layouts:
                known = ", ".join(layouts) or "none"
                text = f"vgpu_layouts has no layout {params['layout']!r}: name one of those that it has ({known})"
                raise Problem("layout_unknown", "vgpu_layout", text)
            entries = layouts[params["layout"]]
    except Problem as problem:
        raise BadInput(str(problem), code=problem.code, where=problem.where) from problem
    reconciler = Reconciler(entries, system, python)
    result = core_plan.run(reconciler, check)
    return {**result, "cards": [_card(card) for card in reconciler.observe().cards]}


def _card(card: Card) -> JsonObject:
    return {
        "address": card.address,
        "framework": card.framework,
        "virtual_functions": len(card.virtual),
        "vgpus": [dataclasses.asdict(vgpu) for vgpu in card.vgpus],
        "types": sorted(card.names()),
    }
