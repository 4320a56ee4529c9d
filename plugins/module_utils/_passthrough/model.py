# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is observed of a machine's cards for virtual machines, and the record of their state before. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._contracts import card_exclusion
from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from .._host import records
from .._host.iommu import BRIDGES, DISPLAY, NVIDIA, NVSWITCH

# The name of the module is vfio_pci; those of its variants are the names of their drivers.
GENERIC = "vfio-pci"
DRIVER = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent", "external"], "default": "present"},
    "cards": {"type": "list", "elements": "str", "default": []},
    "driver": {"type": "str", "default": "auto"},
    "allow_display": {"type": "bool", "default": False},
    "nvswitch": {"type": "str", "choices": ["none", "with-cards"], "default": "none"},
    "live": {"type": "bool", "default": True},
    "exclude": {"type": "list", "elements": "str", "default": []},
    "seconds": {"type": "int", "default": 30},
    "stopping": {"type": "list", "elements": "str", "default": []},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the module ``pci_binding``.

    :param cards: PCI addresses and UUIDs in the kernel's and the driver's way of writing; empty for all.
    :param driver: of the kernel; empty for the most special one that knows the card.
    :param seconds: what an unbind may take.
    :param stopping: pods, by UID or ``namespace/name``, that are stopped before; for a prediction only.
    """

    state: str
    cards: tuple[str, ...]
    driver: str
    allow_display: bool
    with_switches: bool
    live: bool
    exclude: card_exclusion.Exclusion
    seconds: int
    stopping: frozenset[str]


def options_of(params: JsonObject) -> Options:
    """Return the module's validated options.

    :raises BadInput: one is unusable, with its sentence.
    """
    cards = []
    for entry in params["cards"]:
        text = str(entry).strip().lower()
        address = card_exclusion.address_of(text)
        if not (address or card_exclusion.UUID.fullmatch(text) or text == "all"):
            raise BadInput(
                f"passthrough_cards: {entry!r} is neither a PCI address (0000:3b:00.0) nor a UUID (GPU-…) nor all"
            )
        cards.append(address or text)
    if "all" in cards and len(cards) > 1:
        raise BadInput("passthrough_cards: all stands alone, without further cards")
    if params["state"] != "absent" and not cards:
        raise BadInput("passthrough_cards is empty: name the cards by PCI address or UUID, or set it to [all]")
    driver = "" if params["driver"] == "auto" else str(params["driver"])
    if driver and ("vfio" not in driver or not DRIVER.fullmatch(driver)):
        raise BadInput(f"passthrough_driver: {driver!r} is neither auto nor the name of a VFIO driver, as vfio-pci")
    if params["seconds"] < 1:
        raise BadInput(f"passthrough_unbind_seconds: {params['seconds']} isn't a time limit: set it to 1 s or more")
    return Options(
        state=params["state"],
        cards=() if cards == ["all"] else tuple(dict.fromkeys(cards)),
        driver=driver_of(driver.replace("-", "_")) if driver else "",
        allow_display=bool(params["allow_display"]),
        with_switches=params["nvswitch"] == "with-cards",
        live=bool(params["live"]),
        exclude=card_exclusion.parse(params["exclude"]),
        seconds=int(params["seconds"]),
        stopping=frozenset(map(str, params["stopping"])),
    )


def driver_of(module: str) -> str:
    """Return the name of a VFIO module's driver, as sysfs has it."""
    return GENERIC if module == "vfio_pci" else module


def module_of(driver: str) -> str:
    """Return the name of a VFIO driver's module."""
    return driver.replace("-", "_")


@dataclasses.dataclass(frozen=True)
class Function:
    """One function on PCI: a card's own, its audio or USB function, an NVSwitch, or what shares an IOMMU group.

    :param vendor: as sysfs has it, as are ``device`` and ``kind`` (its class).
    :param driver: empty without one; ``module`` is that driver's, empty for one that is built in.
    :param override: the driver that alone may have it; empty without one.
    :param group: number of its IOMMU group; empty without one.
    :param physical: address of the card whose virtual function it is.
    :param virtual: number of its virtual functions.
    :param mdevs: UUIDs of the mediated devices on it.
    :param best: the most special VFIO driver that knows it.
    :param nodes: VFIO's device files of it that exist: of its group, and of itself.
    :param usb: the USB devices behind it that this machine uses, with their ids and drivers.
    """

    address: str
    vendor: str
    device: str
    kind: str
    driver: str = ""
    module: str = ""
    override: str = ""
    group: str = ""
    boot_display: bool = False
    console: bool = False
    physical: str = ""
    virtual: int = 0
    mdevs: tuple[str, ...] = ()
    best: str = GENERIC
    nodes: tuple[str, ...] = ()
    usb: tuple[str, ...] = ()

    @property
    def card(self) -> bool:
        """Whether it is an NVIDIA card, and no virtual function of one."""
        return self.vendor == NVIDIA and self.kind.startswith(DISPLAY) and not self.physical

    @property
    def switch(self) -> bool:
        """Whether it is an NVSwitch."""
        return self.vendor == NVIDIA and self.kind.startswith(NVSWITCH)

    @property
    def bridge(self) -> bool:
        """Whether it doesn't count in its group."""
        return self.kind.startswith(BRIDGES)

    @property
    def slot(self) -> str:
        """The address without the function's number."""
        return self.address.rpartition(".")[0]

    @property
    def vfio(self) -> bool:
        """Whether a VFIO driver has it."""
        return "vfio" in self.driver


@dataclasses.dataclass(frozen=True)
class Hold:
    """What holds a function.

    :param code: see ``messages.TEXTS``.
    :param address: of the function.
    :param fields: what the code's sentence needs.
    """

    code: str
    address: str
    fields: t.Mapping[str, t.Any]

    def row(self) -> JsonObject:
        """Return it as the module does."""
        return {"code": self.code, "address": self.address, **self.fields}


@dataclasses.dataclass(frozen=True)
class Before:
    """A function before it was bound.

    :param uuid: the driver's UUID of the card; empty where none was known.
    """

    address: str
    vendor: str
    device: str
    driver: str
    module: str
    override: str
    uuid: str = ""


@dataclasses.dataclass(frozen=True)
class FileBefore:
    """A file before it was replaced; ``text`` is None where there was none."""

    path: str
    text: str | None
    mode: int


RECORD = records.PASSTHROUGH
# The files before a change that isn't complete.
PENDING = "/var/lib/kubegpu-share/passthrough-files.json"
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Record:
    """The machine before the first change."""

    functions: tuple[Before, ...] = ()
    files: tuple[FileBefore, ...] = ()

    def text(self) -> str:
        """Return the file's contents."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1, sort_keys=True) + "\n"

    def of(self, address: str) -> Before | None:
        """Return what is recorded of a function."""
        return next((before for before in self.functions if before.address == address), None)


Recorded = t.TypeVar("Recorded", Before, FileBefore)


def _checked(part: Recorded, types: t.Mapping[str, tuple[type, ...]]) -> Recorded:
    """Return a part of a record whose fields have their types: texts, or what is given.

    :raises ValueError: one hasn't, or what is no address or driver would be a part of a path of sysfs.
    """
    for name, value in dataclasses.asdict(part).items():
        if not isinstance(value, types.get(name, (str,))) or (name != "path" and name != "text" and "/" in str(value)):
            raise ValueError(name)
    return part


def parse_record(text: str) -> Record:
    """Parse the file.

    :raises ShareError: it has another schema, or isn't a record.
    """
    try:
        fields = json.loads(text)
        if fields["schema"] == SCHEMA:
            functions = [_checked(Before(**row), {}) for row in fields["functions"]]
            kept = [_checked(FileBefore(**row), {"text": (str, type(None)), "mode": (int,)}) for row in fields["files"]]
            return Record(tuple(functions), tuple(kept))
        reason = f"it has schema {fields['schema']!r}, and this version of the collection supports {SCHEMA}"
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = "it is no record of this collection"
    raise ShareError(f"{RECORD} can't be read: {reason}; the cards' state before is in it, so that nothing is changed")


@dataclasses.dataclass(frozen=True)
class Image:
    """One kernel's initramfs.

    :param size: in bytes.
    :param inside: whether it contains the rule; None where it can't be read.
    :param lacking: modules that it needs and doesn't contain.
    """

    path: str
    release: str
    size: int
    newer: bool
    kept: bool
    inside: bool | None
    lacking: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class State:
    """The observed machine.

    :param container: it has its host's devices.
    :param functions: NVIDIA's and all of their groups, by address.
    :param uuids: of cards that the driver has, by address; ``names`` likewise.
    :param persistence: whether cards that the driver has are in persistence mode, by address; None where unknown.
    :param pending: a run was interrupted while it replaced files.
    :param files: the text of each file that may be written; None where there is none.
    :param tool: of the images; None without one.
    :param boot_free: bytes; None where there is no image.
    :param holds: empty where they weren't asked for.
    :param owner: the file that shows that the GPU Operator's vfio-manager binds this node's cards; empty without it.
    :param fabric_mode: FABRIC_MODE of the fabric manager's configuration; empty without one.
    :param loadable: the recorded drivers that are loaded, or whose module is there.
    :param boot: code of ``messages.TEXTS`` where no file of this role gets into what the machine boots; else empty.
    :param groups: the kernel's answer about each IOMMU group of which VFIO has a function; see ``kernel.GroupState``.
    """

    family: str
    container: bool
    functions: t.Mapping[str, Function]
    uuids: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    persistence: t.Mapping[str, bool | None] = dataclasses.field(default_factory=dict)
    record: Record = dataclasses.field(default_factory=Record)
    pending: bool = False
    files: t.Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    tool: str | None = None
    images: tuple[Image, ...] = ()
    boot_free: int | None = None
    boot_read_only: bool = False
    holds: tuple[Hold, ...] = ()
    owner: str = ""
    fabric_mode: str = ""
    loadable: frozenset[str] = frozenset()
    groups: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    boot: str = ""

    def members(self, group: str) -> list[Function]:
        """Return the functions of an IOMMU group that count, by address."""
        return [
            function
            for _address, function in sorted(self.functions.items())
            if function.group == group and not function.bridge
        ]
