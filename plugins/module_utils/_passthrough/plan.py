# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan which functions VFIO's drivers get, the files that do it at boot, and the way back. Pure."""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.digest import digest
from .._core.errors import BadInput
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host.file_transaction import Replacement
from . import files, messages
from .model import GENERIC, PENDING, RECORD, Before, Function, Hold, Image, Options, State, module_of

# What a reboot ends without harm to anybody; everything else that holds a card is somebody's work.
IDLE = ("held_by_dcgm", "held_by_persistenced", "persistence_mode", "persistence_unknown", "console")


@dataclasses.dataclass(frozen=True)
class PutRecord:
    """Write the record of what isn't recorded yet; what is recorded stays."""

    functions: tuple[Before, ...]


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """One kernel's image has to be rebuilt; ``modules`` have to be in it."""

    path: str
    release: str
    inside: bool
    modules: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Bind:
    """Give the functions of one IOMMU group to these drivers, by address, in order."""

    group: str
    targets: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class GiveBack:
    """Give a function back; ``exact``: to this driver, else to any that takes it."""

    before: Before
    exact: bool


@dataclasses.dataclass(frozen=True)
class ForgetRecord:
    """Remove these functions from the record, and all of it with the last one."""

    addresses: tuple[str, ...]


class EndTransaction:
    """Remove what an interrupted run left of its change of files."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the options say about this machine.

    :param targets: driver by address.
    :param cards: the cards and NVSwitches among them.
    :param refusals: codes with fields; nothing may be changed with one.
    :param busy: what keeps a function from changing its driver until the next boot.
    """

    targets: t.Mapping[str, str]
    cards: tuple[str, ...]
    refusals: tuple[JsonObject, ...] = ()
    busy: tuple[Hold, ...] = ()


def row(code: str, **fields: t.Any) -> JsonObject:
    return {"code": code, **fields}


def wanted(options: Options, state: State) -> Wanted:
    """Return which driver each function gets, and what refuses that."""
    if options.state == "absent":
        return _unwanted(options, state)
    refusals: list[JsonObject] = []
    if state.container:
        return Wanted({}, (), (row("container"),))
    if state.owner and options.state == "present":
        refusals.append(row("owned", path=state.owner))
    cards, unknown = _chosen(options, state)
    refusals += unknown
    if not cards and not refusals:
        refusals.append(row("no_cards"))
    if state.boot and cards and options.state == "present":
        modules = sorted({module_of(options.driver or card.best) for card in cards})
        refusals.append(row(state.boot, cards=[card.address for card in cards], modules=modules))
    refusals += _switches(options, state, cards)
    if options.with_switches and cards:
        cards += [function for _address, function in sorted(state.functions.items()) if function.switch]
    targets: dict[str, str] = {}
    chosen = {card.address for card in cards}
    for card in cards:
        refusals += _alone(options, state, card)
        for member in state.members(card.group) if card.group else [card]:
            if member.address in chosen or (member.slot == card.slot and member.vendor == card.vendor):
                special = options.driver or member.best
                targets[member.address] = special if member.card or member.switch else GENERIC
                if member.usb and not member.vfio:
                    devices = list(member.usb)
                    refusals.append(row("usb_devices", address=member.address, card=card.address, devices=devices))
            elif member.slot not in {other.slot for other in cards} or member.vendor != card.vendor:
                refusals.append(_foreign(card, member))
    busy: list[Hold] = []
    if options.state == "present":
        moving = {address for address, driver in targets.items() if state.functions[address].driver != driver}
        for hold in state.holds:
            if hold.code == "held_by_pod" and hold.fields["pod"] in options.stopping:
                continue
            if hold.address in moving and hold.code in IDLE:
                busy.append(hold)
            elif hold.address in moving and options.live:
                refusals.append(hold.row())
        refusals += _elsewhere(state)
        kept, left = _leaving(options, state, targets)
        refusals += kept
        busy += left
    return Wanted(targets, tuple(card.address for card in cards), _unique(refusals), tuple(busy))


def _unique(rows: t.Iterable[JsonObject]) -> tuple[JsonObject, ...]:
    unique: list[JsonObject] = []
    for entry in rows:
        if entry not in unique:
            unique.append(entry)
    return tuple(unique)


def _unwanted(options: Options, state: State) -> Wanted:
    if not state.record.functions and not any(state.files[path] is not None for path in files.PATHS):
        return Wanted({}, ())
    refusals, busy = _leaving(options, state, {})
    if state.container:
        refusals.append(row("container"))
    return Wanted({}, (), _unique(refusals), tuple(busy))


def _leaving(options: Options, state: State, targets: t.Mapping[str, str]) -> tuple[list[JsonObject], list[Hold]]:
    """Return what refuses or delays that recorded functions get their drivers back: a virtual machine has them."""
    # An override alone is cleared under a driver that is in use.
    going = {
        before.address
        for before in _to_give_back(state, targets)
        if state.functions[before.address].driver != before.driver
    }
    held = [hold for hold in state.holds if hold.address in going]
    return ([hold.row() for hold in held], []) if options.live else ([], held)


def _chosen(options: Options, state: State) -> tuple[list[Function], list[JsonObject]]:
    """Return the cards that the options name, and what is wrong with a name."""
    refusals: list[JsonObject] = []
    cards: list[Function] = []
    excluded = {
        address: options.exclude.of(address, state.uuids.get(address, ""), state.names.get(address, ""))
        for address, function in state.functions.items()
        if function.card
    }
    if not options.cards:
        return [state.functions[address] for address, entry in sorted(excluded.items()) if not entry], []
    by_uuid = {before.uuid: before.address for before in state.record.functions if before.uuid}
    by_uuid.update({uuid: address for address, uuid in state.uuids.items()})
    for entry in options.cards:
        address = by_uuid.get(entry, "") if entry.startswith("gpu-") else entry
        function = state.functions.get(address)
        recorded = state.record.of(address)
        if not address:
            refusals.append(row("unknown_uuid", uuid=entry))
        elif recorded is not None and (function is None or not _same(recorded, function)):
            refusals.append(_moved(recorded, function))
        elif function is not None and function.physical:
            refusals.append(row("virtual_function", address=address, physical=function.physical))
        elif function is None or not function.card:
            refusals.append(row("unknown_card", address=address))
        elif excluded[address]:
            refusals.append(row("excluded", address=address, entry=excluded[address]))
        elif function not in cards:
            cards.append(function)
    return cards, refusals


def _same(before: Before, function: Function) -> bool:
    return (before.vendor, before.device) == (function.vendor, function.device)


def _moved(before: Before, function: Function | None) -> JsonObject:
    there = f"{function.vendor}:{function.device}" if function is not None else "nothing"
    return row("moved", address=before.address, recorded=f"{before.vendor}:{before.device}", found=there)


def _elsewhere(state: State) -> t.Iterator[JsonObject]:
    """Yield recorded cards that NVIDIA's driver has at another address: the rule would take what is there instead."""
    by_uuid = {uuid: address for address, uuid in state.uuids.items()}
    for before in state.record.functions:
        address = by_uuid.get(before.uuid, before.address)
        if address != before.address:
            yield row("elsewhere", address=address, uuid=before.uuid, recorded=before.address)


def _alone(options: Options, state: State, function: Function) -> t.Iterator[JsonObject]:
    """Yield what refuses one card or NVSwitch."""
    recorded = state.record.of(function.address)
    if recorded is not None and not _same(recorded, function):
        yield _moved(recorded, function)
    if not function.group:
        yield row("no_iommu", address=function.address)
    if (function.boot_display or function.console) and not function.vfio and not options.allow_display:
        yield row("display", address=function.address)
    if function.virtual:
        yield row("virtual_functions", address=function.address, count=function.virtual)
    if function.mdevs:
        yield row("mdevs", address=function.address, uuids=list(function.mdevs))


def _foreign(card: Function, member: Function) -> JsonObject:
    return row(
        "foreign_endpoint",
        address=card.address,
        group=card.group,
        foreign=member.address,
        ids=f"{member.vendor}:{member.device}",
        driver=member.driver,
    )


def _switches(options: Options, state: State, cards: t.Sequence[Function]) -> t.Iterator[JsonObject]:
    """Yield what refuses cards that NVSwitches connect."""
    if not cards or not any(function.switch for function in state.functions.values()):
        return
    chosen = {function.address for function in cards}
    if options.with_switches:
        for address, function in sorted(state.functions.items()):
            if function.card and address not in chosen:
                yield row("nvswitch_partial", address=address)
    elif state.fabric_mode != "1":
        yield row("nvswitch_mode", address=cards[0].address, mode=state.fabric_mode)


def _to_give_back(state: State, targets: t.Mapping[str, str]) -> list[Before]:
    """Return the recorded functions that aren't wanted and don't have their old driver and override yet.

    What isn't the recorded device any more wasn't bound by us: the rule names vendor and device.
    """
    going = []
    for before in state.record.functions:
        function = state.functions.get(before.address)
        if before.address in targets or function is None or not _same(before, function):
            continue
        driver = before.driver if before.driver in state.loadable else function.driver
        if (
            function.override != before.override
            or function.driver != driver
            or (function.vfio and function.driver != before.driver)
        ):
            going.append(before)
    return going


def make_plan(options: Options, state: State) -> Plan:
    """Return what has to be done.

    :raises BadInput: cards are refused, or the images can't be rebuilt; nothing was changed.
    """
    want = wanted(options, state)
    if want.refusals:
        raise BadInput(messages.sentences(want.refusals), refusals=list(want.refusals))
    if options.state == "external":
        return Plan()
    return Plan(tuple(_changes(options, state, want)))


def _changes(options: Options, state: State, want: Wanted) -> t.Iterator[Change]:
    new = tuple(_before(state, address) for address in sorted(want.targets) if state.record.of(address) is None)
    if new:
        yield Change(RECORD, "", "".join(f"{before.address} {before.driver}\n" for before in new), PutRecord(new))
    texts = _texts(state, want)
    replaced = [path for path, text in texts.items() if text != state.files[path]]
    for path in replaced:
        before, after = state.files[path], texts[path]
        yield Change(path, before or "", after or "", Replacement(path, digest(before), after))
    if state.pending and not replaced:
        yield Change(PENDING, "left by an interrupted run\n", "", EndTransaction())
    stale = [image for image in state.images if replaced or _stale(image, bool(want.targets))]
    if stale:
        _refuse_boot(state)
    words = ("without the rule of VFIO's cards\n", "with the rule of VFIO's cards\n")
    for image in stale:
        was, becomes = words if want.targets else words[::-1]
        rebuild = Rebuild(image.path, image.release, bool(want.targets), files.modules(want.targets))
        yield Change(image.path, was, becomes, rebuild)
    waiting = {hold.address for hold in want.busy}
    for recorded in _to_give_back(state, want.targets) if options.live else []:
        if recorded.address not in waiting:
            exact = recorded.driver in state.loadable
            now, after = state.functions[recorded.address].driver, recorded.driver if exact else "any driver"
            yield Change(f"PCI device {recorded.address}", _driver(now), _driver(after), GiveBack(recorded, exact))
    for group, targets in _groups(state, want) if options.live else []:
        bind = Bind(group, tuple(targets))
        for number, (address, driver) in enumerate(targets):
            now = state.functions[address].driver
            yield Change(f"PCI device {address}", _driver(now), _driver(driver), bind if number == 0 else None)
    gone = _finished(options, state, want)
    if gone or (not want.targets and state.record.files):
        shown = "".join(f"{address}\n" for address in gone)
        left = len(state.record.functions) > len(gone)
        if gone or not left:
            yield Change(RECORD, shown or "files\n", "", ForgetRecord(gone))


def _driver(name: str) -> str:
    return f"{name}\n" if name else ""


def _before(state: State, address: str) -> Before:
    function = state.functions[address]
    return Before(
        address,
        function.vendor,
        function.device,
        function.driver,
        function.module,
        function.override,
        state.uuids.get(address, ""),
    )


def _texts(state: State, want: Wanted) -> dict[str, str | None]:
    """Return the files' wanted texts: without cards those from before."""
    texts = files.texts(want.targets, state.functions, state.tool)
    recorded = {file.path: file.text for file in state.record.files}
    for path in files.PATHS:
        if texts[path] is None and path in recorded:
            texts[path] = recorded[path]
        elif texts[path] is None and files.MARK not in (state.files[path] or ""):
            # Not ours.
            texts[path] = state.files[path]
    return texts


def _stale(image: Image, present: bool) -> bool:
    """Return whether an image lacks the rule, contains an older one, or one that is no longer there."""
    if image.kept:
        return True
    if not present:
        return bool(image.inside)
    return not image.newer or image.inside is False or bool(image.lacking)


def _refuse_boot(state: State) -> None:
    """Refuse to begin where an image might be written in part: that kernel wouldn't boot.

    :raises BadInput: there is no tool, too little space for two of the largest image, or /boot is read-only.
    """
    if state.boot_read_only:
        raise BadInput("/boot is mounted read-only, so that no initramfs can be rebuilt: mount it writable")
    if state.tool is None:
        raise BadInput("no initramfs can be rebuilt on this node: install initramfs-tools or dracut")
    need, free = 2 * max(image.size for image in state.images), state.boot_free or 0
    if free < need:
        raise BadInput(
            f"/boot has {free >> 20} MiB free and an initramfs rebuild needs {need >> 20} MiB: remove unused kernels"
        )


def _groups(state: State, want: Wanted) -> t.Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each group with functions that don't have their driver, the card first, unless one of it is busy."""
    waiting = {state.functions[hold.address].group for hold in want.busy}
    for group in sorted({state.functions[address].group for address in want.targets}):
        members = [function for function in state.members(group) if function.address in want.targets]
        late = [
            function
            for function in members
            if function.driver != want.targets[function.address] or function.override != want.targets[function.address]
        ]
        if late and group not in waiting:
            late.sort(key=lambda function: (not function.card, function.address))
            yield group, [(function.address, want.targets[function.address]) for function in late]


def _finished(options: Options, state: State, want: Wanted) -> tuple[str, ...]:
    """Return the recorded functions that are given back when all of the plan is done."""
    left = {before.address for before in _to_give_back(state, want.targets)}
    waiting = left if not options.live else {hold.address for hold in want.busy} & left
    return tuple(
        before.address
        for before in state.record.functions
        if before.address not in want.targets and before.address not in waiting
    )


def reboot_required(options: Options, state: State) -> bool:
    """Return whether a function gets its driver, or its old one back, only at the next boot.

    What nothing delays isn't meant: a run that changes something does it now.
    """
    if options.state == "external":
        return False
    want = wanted(options, state)
    left = {before.address for before in _to_give_back(state, want.targets)}
    if options.live:
        waiting = {state.functions[hold.address].group for hold in want.busy}
        left &= {hold.address for hold in want.busy}
    else:
        waiting = {function.group for function in state.functions.values()}
    targets = [(state.functions[address], driver) for address, driver in want.targets.items()]
    return bool(left) or any(function.driver != driver and function.group in waiting for function, driver in targets)
