# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a card's vGPUs in sysfs, and create those that it lacks.

This file is also the program that does so at each boot: it imports nothing of the collection, and removes nothing.

Which framework a card has is decided by what sysfs shows, never by the kernel's version: a function below
/sys/class/mdev_bus has mediated devices, and one with nvidia/current_vgpu_type is itself a vGPU once a type's id is
written there (vGPU 17 and later). Ids differ between drivers, so types are known by their names.
https://docs.nvidia.com/vgpu/latest/grid-vgpu-user-guide/, https://docs.kernel.org/driver-api/vfio-mediated-device.html
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import posixpath
import re
import subprocess
import sys
import time
import typing as t
import uuid

PCI = "/sys/bus/pci/devices"
PARENTS = "/sys/class/mdev_bus"
INSTANCES = "/sys/bus/mdev/devices"
RECORD = "/var/lib/kubegpu-share/vgpu.json"
# Names of types by their ids, as far as this boot has shown them: a virtual function's list has only those that it
# can still become. A driver that is loaded again forgets the vGPUs, and so does a boot these names.
NAMES = "/run/kubegpu-share-vgpu.json"
FORMAT = 1
SRIOV_MANAGE = "/usr/lib/nvidia/sriov-manage"
MDEV, VENDOR = "mdev", "vendor"
DRIVER = "nvidia"
NO_TYPE = "0"
# As in _host/iommu.py, which isn't there at boot.
DISPLAY = ("0x0300", "0x0302")
# No card has more vGPUs.
MOST = 1024
# Seconds: for the driver at boot, for the virtual functions of a card, and for a command.
DRIVER_SECONDS, FUNCTIONS_SECONDS, COMMAND_SECONDS = 120.0, 30.0, 120.0
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_TYPE = re.compile(r"\s*([0-9]+)\s*:\s*(\S.*?)\s*$")
_FRAMEBUFFER = re.compile(r"-([0-9]+)[A-Z]+$")


class Done(t.Protocol):
    """The result of a command."""

    @property
    def rc(self) -> int: ...

    @property
    def out(self) -> str: ...

    @property
    def err(self) -> str: ...


class Machine(t.Protocol):
    """What of ``System`` is used here."""

    def read(self, path: str) -> str | None: ...

    def names(self, path: str) -> list[str]: ...

    def exists(self, path: str) -> bool: ...

    def link(self, path: str) -> str | None: ...

    def write(self, path: str, text: str) -> None: ...

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done: ...


class Failed(Exception):
    """A card can't have what it is to have.

    :param code: what happened.
    :param fields: of what; ``address`` is the card's.
    """

    def __init__(self, code: str, message: str, **fields: t.Any) -> None:
        super().__init__(message)
        self.code, self.fields = code, fields


@dataclasses.dataclass(frozen=True)
class VGpu:
    """
    :param function: the PCI address that has it.
    :param key: its UUID, or the address where the function is the vGPU.
    :param id: of its type.
    :param name: of its type, without the maker: ``A10-4Q``; where it isn't known, ``type`` and the id.
    """

    function: str
    key: str
    id: str
    name: str

    @property
    def named(self) -> bool:
        """Whether the name of its type is known."""
        return self.name != _unknown(self.id)


@dataclasses.dataclass(frozen=True)
class Function:
    """A PCI function that can have vGPUs.

    :param types: the names of the types that it can still have, by id.
    """

    address: str
    framework: str
    types: t.Mapping[str, str]
    vgpus: tuple[VGpu, ...]


@dataclasses.dataclass(frozen=True)
class Card:
    """
    :param device: its PCI ids, device then vendor, as ``0x223610DE``.
    :param driver: None where it has none.
    :param most_functions: virtual functions that it can have; 0 without SR-IOV.
    :param virtual: the addresses of those that it has.
    :param functions: those of them, or the card itself, that can have vGPUs.
    """

    address: str
    device: str
    driver: str | None
    most_functions: int
    virtual: tuple[str, ...]
    functions: tuple[Function, ...]

    @property
    def vgpus(self) -> tuple[VGpu, ...]:
        return tuple(vgpu for function in self.functions for vgpu in function.vgpus)

    @property
    def framework(self) -> str:
        """``mdev``, ``vendor``, or empty where no function can have vGPUs, maybe because it has none yet."""
        return self.functions[0].framework if self.functions else ""

    def names(self) -> set[str]:
        """The types that can be created now, or are there."""
        return {name for function in self.functions for name in function.types.values()} | set(self.counts())

    def counts(self) -> dict[str, int]:
        """How many vGPUs of each type there are."""
        return dict(collections.Counter(vgpu.name for vgpu in self.vgpus))


class Row(t.TypedDict):
    """A recorded card.

    :ivar device: its PCI ids, by which a card that moved is noticed.
    :ivar wanted: how many vGPUs of each type it is to have.
    :ivar before: how many it had; ``functions`` says whether it had virtual functions.
    """

    address: str
    device: str
    wanted: dict[str, int]
    before: dict[str, int]
    functions: bool


def recorded(text: str) -> list[Row]:
    """Parse the record.

    :raises ValueError: another version or program has written it.
    """
    try:
        record = json.loads(text)
        if record["format"] == FORMAT:
            return [_row(**row) for row in record["cards"]]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("it has another form") from error
    raise ValueError("it has another format")


def _row(address: str, device: str, wanted: t.Any, before: t.Any, functions: bool) -> Row:
    for counts in (wanted, before):
        if not all(type(count) is int and 0 <= count <= MOST for count in dict(counts).values()):
            raise ValueError("no numbers of vGPUs")
    if not (_ADDRESS.fullmatch(address) and isinstance(device, str) and isinstance(functions, bool)):
        raise ValueError("no card")
    return {"address": address, "device": device, "wanted": wanted, "before": before, "functions": functions}


def short(name: str) -> str:
    """Return a type's name as NVIDIA's tools take it: ``NVIDIA A10-4Q`` and ``GRID T4-1Q`` by the last word."""
    words = name.split()
    return words[-1] if words else ""


def cards(machine: Machine) -> list[str]:
    """Return the addresses of NVIDIA's cards, in the order of their indices; virtual functions are no cards."""
    return [
        address
        for address in machine.names(PCI)
        if _ADDRESS.fullmatch(address)
        and _text(machine, f"{PCI}/{address}/vendor") == "0x10de"
        and _text(machine, f"{PCI}/{address}/class").startswith(DISPLAY)
        and not machine.exists(f"{PCI}/{address}/physfn")
    ]


def card(machine: Machine, address: str) -> Card:
    """Return what sysfs shows of a card."""
    folder = f"{PCI}/{address}"
    driver = machine.link(f"{folder}/driver")
    # The names' numbers are in the order of the addresses.
    links = sorted((name for name in machine.names(folder) if re.fullmatch("virtfn[0-9]+", name)), key=_number)
    virtual = [posixpath.basename(machine.link(f"{folder}/{name}") or "") for name in links]
    vendor, device = (_text(machine, f"{folder}/{name}").removeprefix("0x") for name in ("vendor", "device"))
    known = _known(machine)
    found = [_function(machine, each, known) for each in (address, *virtual) if _ADDRESS.fullmatch(each)]
    functions = [function for function in found if function is not None]
    # A virtual function that is a vGPU may not list its own type; one that isn't yet may.
    names = {_unknown(number): name for function in functions for number, name in function.types.items()}
    return Card(
        address,
        f"0x{device}{vendor}".upper().replace("0X", "0x"),
        posixpath.basename(driver) if driver else None,
        _count(machine, f"{folder}/sriov_totalvfs"),
        tuple(virtual),
        tuple(_named_vgpus(function, names) for function in functions),
    )


def _named_vgpus(function: Function, names: t.Mapping[str, str]) -> Function:
    vgpus = tuple(dataclasses.replace(vgpu, name=names.get(vgpu.name, vgpu.name)) for vgpu in function.vgpus)
    return dataclasses.replace(function, vgpus=vgpus)


def _function(machine: Machine, address: str, known: t.Mapping[str, str]) -> Function | None:
    folder = f"{PARENTS}/{address}/mdev_supported_types"
    if machine.exists(folder):
        types = {}
        names = {}
        for each in machine.names(folder):
            names[each] = short(_text(machine, f"{folder}/{each}/name"))
            if _count(machine, f"{folder}/{each}/available_instances"):
                types[each] = names[each]
        return Function(address, MDEV, types, tuple(_instances(machine, address, names)))
    current = machine.read(f"{PCI}/{address}/nvidia/current_vgpu_type")
    if current is None:
        return None
    listed = machine.read(f"{PCI}/{address}/nvidia/creatable_vgpu_types") or ""
    rows = (_TYPE.match(row) for row in listed.splitlines())
    types = {row.group(1): short(row.group(2)) for row in rows if row}
    current = current.strip()
    if current in ("", NO_TYPE):
        return Function(address, VENDOR, types, ())
    name = types.get(current) or known.get(current) or _unknown(current)
    return Function(address, VENDOR, {}, (VGpu(address, address, current, name),))


def _instances(machine: Machine, parent: str, names: t.Mapping[str, str]) -> t.Iterator[VGpu]:
    for key in machine.names(INSTANCES):
        # .../0000:01:00.4/<UUID>
        place = (machine.link(f"{INSTANCES}/{key}") or "").split("/")
        if place[-2:-1] == [parent]:
            kind = posixpath.basename(machine.link(f"{INSTANCES}/{key}/mdev_type") or "")
            yield VGpu(parent, key, kind, names.get(kind) or _unknown(kind))


def _unknown(number: str) -> str:
    return f"type {number}"


def _known(machine: Machine) -> dict[str, str]:
    try:
        return {str(number): str(name) for number, name in json.loads(machine.read(NAMES) or "{}").items()}
    except (ValueError, AttributeError):
        # A file of another program, or half a file: then a name isn't known.
        return {}


def _text(machine: Machine, path: str) -> str:
    return (machine.read(path) or "").strip()


def _count(machine: Machine, path: str) -> int:
    content = _text(machine, path)
    return int(content) if content.isdecimal() else 0


def _number(name: str) -> int:
    return int(name[len("virtfn") :])


# --------------------------------------------------------------------------- changes


def missing(have: Card, wanted: t.Mapping[str, int]) -> list[str]:
    """Return the names of the types of which a card lacks vGPUs, each as often as it lacks it."""
    counts = have.counts()
    return [name for name, count in wanted.items() for _each in range(count - counts.get(name, 0))]


def named(have: Card, wanted: t.Mapping[str, int]) -> dict[str, int]:
    """Return how many vGPUs of each type, by the types' names: a type that had none when it was recorded may have one.

    A card that is full lists nothing that it can still become, and so no names of what others have made on it.
    """
    names = {_unknown(number): name for function in have.functions for number, name in function.types.items()}
    names.update({_unknown(vgpu.id): vgpu.name for vgpu in have.vgpus})
    found: collections.Counter[str] = collections.Counter()
    for name, count in wanted.items():
        found[names.get(name, name)] += count
    return dict(found)


def sizes(wanted: t.Mapping[str, int]) -> set[str]:
    """Return the sizes of these types' frame buffers, in GB as in their names."""
    found = (_FRAMEBUFFER.search(name) for name, count in wanted.items() if count)
    return {match.group(1) for match in found if match}


def create(machine: Machine, address: str, wanted: t.Mapping[str, int]) -> None:
    """Create what a card lacks: its virtual functions first, then the mode for several sizes, then vGPUs one by one.

    :param wanted: how many vGPUs of each type.
    :raises Failed: the card doesn't take it.
    """
    have = card(machine, address)
    if not missing(have, named(have, wanted)):
        return
    if not have.functions:
        have = _with_functions(machine, have)
    wanted = named(have, wanted)
    _remember(machine, have)
    if len(sizes(wanted)) > 1 and not have.vgpus:
        _must(machine, address, ("nvidia-smi", "vgpu", "-shm", "1", "-i", address))
        have = card(machine, address)
        _remember(machine, have)
    while True:
        lacking = missing(have, wanted)
        if not lacking:
            return
        _create(machine, have, lacking[0])
        before, have = have, card(machine, address)
        if len(missing(have, wanted)) >= len(lacking):
            raise Failed(
                "vgpu_without_effect",
                f"card {address} took {lacking[0]}, and doesn't show it",
                address=address,
                type=lacking[0],
                vgpus=before.counts(),
            )


def _with_functions(machine: Machine, have: Card) -> Card:
    """Enable a card's virtual functions, and return it as soon as they can have vGPUs.

    :raises Failed: they can't, or not in time.
    """
    if not have.most_functions:
        raise Failed(
            "vgpu_unsupported",
            f"card {have.address} has no vGPU types: its driver isn't NVIDIA's vGPU manager, or the card has no vGPU",
            address=have.address,
        )
    if not have.virtual:
        _must(machine, have.address, (SRIOV_MANAGE, "-e", have.address))
    until = time.monotonic() + FUNCTIONS_SECONDS
    while True:
        found = card(machine, have.address)
        if found.functions:
            return found
        if time.monotonic() > until:
            raise Failed(
                "vgpu_no_functions",
                f"card {have.address} has no virtual function with vGPU types {FUNCTIONS_SECONDS:.0f} s after "
                f"{SRIOV_MANAGE}: see the kernel's log and nvidia-vgpu-mgr's",
                address=have.address,
                virtual=list(found.virtual),
            )
        time.sleep(0.5)


def _create(machine: Machine, have: Card, name: str) -> None:
    for function in have.functions:
        # A virtual function has one vGPU, a card that is its own parent has several.
        if function.vgpus and function.address != have.address:
            continue
        number = next((number for number, each in function.types.items() if each == name), None)
        if number is None:
            continue
        if function.framework == VENDOR:
            _put(machine, have.address, f"{PCI}/{function.address}/nvidia/current_vgpu_type", number)
        else:
            folder = f"{PARENTS}/{function.address}/mdev_supported_types/{number}"
            _put(machine, have.address, f"{folder}/create", _uuid(machine, function.address, name))
        return
    raise Failed(
        "vgpu_unavailable",
        f"card {have.address} can't have another {name}: it has {have.counts() or 'none'}, and could have "
        f"{', '.join(sorted(have.names())) or 'none'}",
        address=have.address,
        type=name,
        vgpus=have.counts(),
        types=sorted(have.names()),
    )


def _uuid(machine: Machine, function: str, name: str) -> str:
    """Return the UUID of the next vGPU: the same on this machine each time, so that machines' definitions keep it."""
    host = _text(machine, "/etc/machine-id")
    taken = set(machine.names(INSTANCES))
    number = 0
    while True:
        found = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{host}/{function}/{name}/{number}"))
        if found not in taken:
            return found
        number += 1


def remove(machine: Machine, have: Card, vgpu: VGpu) -> None:
    """Remove one vGPU.

    :raises Failed: the kernel refuses.
    """
    if vgpu.key == vgpu.function:
        _put(machine, have.address, f"{PCI}/{vgpu.function}/nvidia/current_vgpu_type", NO_TYPE)
    else:
        _put(machine, have.address, f"{INSTANCES}/{vgpu.key}/remove", "1")


def disable(machine: Machine, address: str) -> None:
    """Disable a card's virtual functions.

    :raises Failed: NVIDIA's tool refuses.
    """
    _must(machine, address, (SRIOV_MANAGE, "-d", address))


def _remember(machine: Machine, have: Card) -> None:
    known = _known(machine)
    seen = {number: name for function in have.functions for number, name in function.types.items()}
    if have.framework == VENDOR and not seen.items() <= known.items():
        machine.write(NAMES, json.dumps({**known, **seen}, sort_keys=True) + "\n")


def _put(machine: Machine, address: str, path: str, value: str) -> None:
    done = machine.run(("tee", path), COMMAND_SECONDS, f"{value}\n")
    if done.rc:
        raise Failed(
            "vgpu_refused",
            f"the kernel refuses {value} in {path}: {_last(done)}",
            address=address,
            path=path,
            value=value,
        )


def _must(machine: Machine, address: str, argv: t.Sequence[str]) -> None:
    done = machine.run(argv, COMMAND_SECONDS)
    if done.rc:
        raise Failed(
            "vgpu_command", f"{' '.join(argv)} failed: {_last(done)}", address=address, argv=list(argv), rc=done.rc
        )


def _last(done: Done) -> str:
    lines = (done.err or done.out).strip().splitlines()
    return lines[-1] if lines else f"status {done.rc}"


# --------------------------------------------------------------------------- at boot


class Local:
    """This machine, without the collection."""

    def read(self, path: str) -> str | None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def link(self, path: str) -> str | None:
        try:
            return os.readlink(path)
        except OSError:
            return None

    def write(self, path: str, text: str) -> None:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.new", path)

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        try:
            done = subprocess.run(
                list(argv), input=stdin or "", capture_output=True, text=True, timeout=timeout, check=False
            )
        except FileNotFoundError:
            return _Ended(127, "", f"{argv[0]} isn't installed")
        except subprocess.TimeoutExpired:
            return _Ended(124, "", f"{argv[0]} didn't finish within {timeout:g} s")
        return _Ended(done.returncode, done.stdout, done.stderr)


class _Ended(t.NamedTuple):
    rc: int
    out: str
    err: str


def restore(machine: Machine, rows: t.Iterable[Row]) -> list[Failed]:
    """Create what each recorded card lacks; a card that fails doesn't keep the others from theirs."""
    failed = []
    # For all of them: where the driver wasn't loaded, the kubelet waits for this program.
    until = time.monotonic() + DRIVER_SECONDS
    for row in rows:
        address = row["address"]
        try:
            _await_driver(machine, row, until)
            create(machine, address, row["wanted"])
        except Failed as error:
            failed.append(error)
        except OSError as error:
            failed.append(Failed("vgpu_system", f"card {address}: {error}", address=address))
    return failed


def _await_driver(machine: Machine, row: Row, until: float) -> None:
    address = row["address"]
    while True:
        have = card(machine, address)
        if have.device != row["device"]:
            raise Failed(
                "vgpu_moved",
                f"at {address} there is {have.device}, and {row['device']} was there before: run the playbook again",
                address=address,
                device=have.device,
                recorded=row["device"],
            )
        if have.driver == DRIVER:
            return
        if time.monotonic() > until:
            raise Failed(
                "vgpu_no_driver",
                f"card {address} has {have.driver or 'no driver'} after {DRIVER_SECONDS:.0f} s, and needs {DRIVER}",
                address=address,
                driver=have.driver,
            )
        time.sleep(1)


def main() -> int:
    machine = Local()
    try:
        rows = recorded(machine.read(RECORD) or "")
    except ValueError:
        print(f"{RECORD} has no vGPUs of format {FORMAT}: run the playbook again", file=sys.stderr)
        return 1
    failed = restore(machine, rows)
    for error in failed:
        print(f"{error.code}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
