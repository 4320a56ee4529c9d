# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Create the vGPUs that a card lacks: its virtual functions, GPU instances or the mode for several sizes, then types.

This file, ``sysfs.py`` beside it and ``kernel_write.py`` are also the program that does so at each boot: they import
nothing else, and it removes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import time
import typing as t
import uuid

from .._host import kernel_write
from .._host.kernel_write import Written
from . import sysfs
from .sysfs import NAMES, PCI, RECORD, Card, VGpu, card

FORMAT = 1
SRIOV_MANAGE = "/usr/lib/nvidia/sriov-manage"
SMI = "nvidia-smi"
DRIVER = "nvidia"
# No card has more vGPUs.
MOST = 1024
# Seconds: for the driver at boot, for the virtual functions of a card, for a command, and for a write.
DRIVER_SECONDS, FUNCTIONS_SECONDS, COMMAND_SECONDS, WRITE_SECONDS = 120.0, 30.0, 120.0, 60.0
_FRAMEBUFFER = re.compile(r"-([0-9]+)[A-Z]+$")
_INSTANCE_SIZE = re.compile(r"\.([0-9]+)gb")
# Of NVIDIA's names of GPU instances, as 1g.10gb+me and 2g.20gb-me.
PROFILE = re.compile(r"[1-9]g\.[1-9][0-9]*gb([+-][a-z.]+)?")
# |   0  MIG 1g.5gb          19        7          4:1     |
_INSTANCE = re.compile(r"^\|\s*[0-9]+\s+MIG\s+(\S+)\s+[0-9]+\s+([0-9]+)\s", re.MULTILINE)
# How many GPU instances of each profile.
Instances = t.Mapping[str, int]


class Done(t.Protocol):
    """The result of a command."""

    @property
    def rc(self) -> int: ...

    @property
    def out(self) -> str: ...

    @property
    def err(self) -> str: ...


class Machine(sysfs.Reader, t.Protocol):
    """What of ``System`` is used here, and writes that may wait."""

    def write(self, path: str, text: str) -> None: ...

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done: ...

    def put(self, path: str, text: str, seconds: float) -> Written: ...


class Failed(Exception):
    """A card can't have what it is to have.

    :param code: what happened.
    :param fields: of what; ``address`` is the card's.
    """

    def __init__(self, code: str, message: str, **fields: t.Any) -> None:
        super().__init__(message)
        self.code, self.fields = code, fields


class MigBefore(t.TypedDict):
    """A card's MIG mode, and its GPU instances by profile, before they were changed."""

    on: bool
    instances: dict[str, int]


class Place(t.TypedDict):
    """Where a vGPU is: a PCI function, its key there as in ``VGpu``, and its type's name."""

    function: str
    key: str
    type: str


class Row(t.TypedDict):
    """A recorded card.

    :ivar device: its PCI ids, by which a card that moved is noticed.
    :ivar wanted: how many vGPUs of each type it is to have.
    :ivar places: where they are, as far as they have been made: a boot puts them there again.
    :ivar instances: how many GPU instances of each profile it is to have for them; empty where they need none.
    :ivar before: the vGPUs that it had; ``functions`` says whether it had virtual functions.
    :ivar mig_before: None where its GPU instances were never changed.
    """

    address: str
    device: str
    wanted: dict[str, int]
    places: list[Place]
    instances: dict[str, int]
    before: list[Place]
    mig_before: MigBefore | None
    functions: bool


def recorded(text: str) -> list[Row]:
    """Parse the record.

    :raises ValueError: another version or program has written it.
    """
    try:
        record = json.loads(text)
        if record["format"] == FORMAT:
            return [_row(row) for row in record["cards"]]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("it has another form") from error
    raise ValueError("it has another format")


def _row(row: dict[str, t.Any]) -> Row:
    before = row["mig_before"]
    if set(row) != set(Row.__annotations__) or (before is not None and set(before) != {"on", "instances"}):
        raise ValueError("it has other keys")
    _counts(row["wanted"])
    for place in (*row["places"], *row["before"]):
        if set(place) != set(Place.__annotations__) or not isinstance(place["type"], str):
            raise ValueError("no place of a vGPU")
        # Both become a part of a path.
        if not sysfs.ADDRESS.fullmatch(place["function"]):
            raise ValueError("no place of a vGPU")
        if place["key"] != place["function"] and not sysfs.UUID.fullmatch(place["key"]):
            raise ValueError("no place of a vGPU")
    for instances in (row["instances"], before["instances"] if before is not None else {}):
        if not all(PROFILE.fullmatch(profile) for profile in _counts(instances)):
            raise ValueError("no profiles of GPU instances")
    if not (sysfs.ADDRESS.fullmatch(row["address"]) and isinstance(row["device"], str)):
        raise ValueError("no card")
    if not all(isinstance(flag, bool) for flag in (row["functions"], before["on"] if before is not None else True)):
        raise ValueError("no card")
    return t.cast(Row, row)


def _counts(given: t.Any) -> dict[str, int]:
    """Return how many of each.

    :raises ValueError: they are no numbers.
    """
    counts: dict[str, int] = dict(given)
    if not all(type(count) is int and 0 <= count <= MOST for count in counts.values()):
        raise ValueError("no numbers of vGPUs")
    return counts


# --------------------------------------------------------------------------- changes


def missing(have: Card, wanted: t.Mapping[str, int]) -> list[str]:
    """Return the names of the types of which a card lacks vGPUs, each as often as it lacks it."""
    return lacking(have.counts(), wanted)


def lacking(have: t.Mapping[str, int], wanted: t.Mapping[str, int]) -> list[str]:
    """Return what is wanted more often than it is there, each as often as it lacks.

    The largest first, which the driver puts at multiples of their size: smaller ones could leave no such place.
    """
    return [name for name in sorted(wanted, key=_largest_first) for _each in range(wanted[name] - have.get(name, 0))]


def _largest_first(name: str) -> tuple[int, str]:
    """Return a key by which types of vGPUs, or profiles of GPU instances, are sorted."""
    match = _FRAMEBUFFER.search(name) or _INSTANCE_SIZE.search(name)
    return -int(match.group(1)) if match else 0, name


def places_of(vgpus: t.Iterable[VGpu]) -> list[Place]:
    """Return where vGPUs are, as it is recorded."""
    found: list[Place] = [{"function": vgpu.function, "key": vgpu.key, "type": vgpu.name} for vgpu in vgpus]
    return sorted(found, key=lambda place: (place["function"], place["key"]))


def counts_of(places: t.Iterable[Place]) -> dict[str, int]:
    """Return how many vGPUs of each type."""
    return dict(collections.Counter(place["type"] for place in places))


def named(have: Card, wanted: t.Mapping[str, int]) -> dict[str, int]:
    """Return how many vGPUs of each type, by the types' names: a type that had none when it was recorded may have one.

    A card that is full lists nothing that it can still become, and so no names of what others have made on it.
    """
    names, found = _names(have), collections.Counter[str]()
    for name, count in wanted.items():
        found[names.get(name, name)] += count
    return dict(found)


def _names(have: Card) -> dict[str, str]:
    """Return the names of types by what stands for them where they aren't known."""
    creatable = [item for function in have.functions for item in function.creatable.items()]
    names = {sysfs.unknown(number): name for number, name in creatable}
    names.update({sysfs.unknown(vgpu.id): vgpu.name for vgpu in have.vgpus})
    return names


def sizes(wanted: t.Mapping[str, int]) -> set[str]:
    """Return the sizes of these types' frame buffers, in GB as in their names."""
    found = (_FRAMEBUFFER.search(name) for name, count in wanted.items() if count)
    return {match.group(1) for match in found if match}


def create(
    machine: Machine,
    address: str,
    wanted: t.Mapping[str, int],
    instances: Instances,
    places: t.Iterable[Place] = (),
) -> None:
    """Create what a card lacks: its virtual functions first, which makes it forget what comes next.

    Then GPU instances, or the mode for several sizes, and then the vGPUs one by one.

    :param wanted: how many vGPUs of each type.
    :param instances: how many GPU instances of each profile; empty leaves MIG as it is.
    :param places: where vGPUs that lack are put; those without a place get the first function that can have them.
    :raises Failed: the card doesn't take it.
    """
    have = card(machine, address)
    if not missing(have, named(have, wanted)) and not instances:
        return
    if missing(have, named(have, wanted)) and not have.functions:
        have = _with_functions(machine, have)
    if instances:
        add_instances(machine, address, instances)
        have = card(machine, address)
    wanted = named(have, wanted)
    _remember(machine, have)
    if len(sizes(wanted)) > 1 and not have.vgpus and not instances:
        _must(machine, address, (SMI, "vgpu", "-shm", "1", "-i", address))
        have = card(machine, address)
        _remember(machine, have)
    names = _names(have)
    known = [
        Place(function=place["function"], key=place["key"], type=names.get(place["type"], place["type"]))
        for place in places
    ]
    queue = sorted(known, key=lambda place: (_largest_first(place["type"]), place["function"], place["key"]))
    while True:
        left = missing(have, wanted)
        if not left:
            return
        made = _create(machine, have, left, queue)
        before, have = have, card(machine, address)
        if len(missing(have, wanted)) >= len(left):
            raise Failed(
                "vgpu_without_effect",
                f"card {address} took {made}, and doesn't show it",
                address=address,
                type=made,
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


def _create(machine: Machine, have: Card, left: list[str], places: list[Place]) -> str:
    """Create one of the vGPUs that a card lacks, and return its type's name.

    :param places: to try first; those that were tried are removed.
    :raises Failed: the card can't have it.
    """
    functions = {function.address: function for function in have.functions}
    while places:
        place = places.pop(0)
        function = functions.get(place["function"])
        if place["type"] in left and function and _made(machine, have, function, place["type"], place["key"]):
            return place["type"]
    name = left[0]
    if any(_made(machine, have, function, name, "") for function in have.functions):
        return name
    raise Failed(
        "vgpu_unavailable",
        f"card {have.address} can't have another {name}: it has {have.counts() or 'none'}, and could have "
        f"{', '.join(sorted(have.names())) or 'none'}",
        address=have.address,
        type=name,
        vgpus=have.counts(),
        types=sorted(have.names()),
    )


def _made(machine: Machine, have: Card, function: sysfs.Function, name: str, key: str) -> bool:
    """Create a vGPU on a function, and return whether the function can have it.

    :param key: its UUID, or anything else for a new one.
    """
    # A virtual function has one vGPU, a card that is its own parent has several.
    if function.vgpus and function.address != have.address:
        return False
    number = next((number for number, each in function.creatable.items() if each == name), None)
    if number is None or key in {vgpu.key for vgpu in function.vgpus}:
        return False
    folder = f"{PCI}/{function.address}"
    if function.framework == sysfs.VENDOR:
        _put(machine, have.address, f"{folder}/nvidia/current_vgpu_type", number)
    else:
        own = key if sysfs.UUID.fullmatch(key) else _uuid(machine, function.address, name)
        _put(machine, have.address, f"{folder}/mdev_supported_types/{number}/create", own)
    return True


def _uuid(machine: Machine, function: str, name: str) -> str:
    """Return the UUID of the next vGPU: the same on this machine each time, so that machines' definitions keep it."""
    host = (machine.read("/etc/machine-id") or "").strip()
    taken = set(machine.names(f"{PCI}/{function}"))
    number = 0
    while True:
        found = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{host}/{function}/{name}/{number}"))
        if found not in taken:
            return found
        number += 1


def remove(machine: Machine, have: Card, vgpu: VGpu) -> None:
    """Remove one vGPU.

    :raises Failed: the kernel refuses, or waits because somebody has opened it.
    """
    if vgpu.key == vgpu.function:
        _put(machine, have.address, f"{vgpu.folder}/nvidia/current_vgpu_type", sysfs.NO_TYPE, vgpu)
    else:
        _put(machine, have.address, f"{vgpu.folder}/remove", "1", vgpu)


def disable(machine: Machine, address: str) -> None:
    """Disable a card's virtual functions.

    :raises Failed: NVIDIA's tool refuses.
    """
    _must(machine, address, (SRIOV_MANAGE, "-d", address))


def _remember(machine: Machine, have: Card) -> None:
    known = sysfs.known(machine.read(NAMES))
    seen = {number: name for function in have.functions for number, name in function.creatable.items()}
    if have.framework == sysfs.VENDOR and not seen.items() <= known.items():
        machine.write(NAMES, json.dumps({**known, **seen}, sort_keys=True) + "\n")


# --------------------------------------------------------------------------- GPU instances


@dataclasses.dataclass(frozen=True)
class Mig:
    """A card's GPU instances.

    :param on: MIG mode is on.
    :param instances: (profile, number) of each.
    """

    on: bool
    instances: tuple[tuple[str, str], ...] = ()

    def counts(self) -> dict[str, int]:
        """How many instances of each profile there are."""
        return dict(collections.Counter(profile for profile, _number in self.instances))


def mig(machine: Machine, address: str) -> Mig:
    """Return a card's GPU instances, as nvidia-smi lists them.

    :raises Failed: it can't tell.
    """
    mode = (SMI, "-i", address, "--query-gpu=mig.mode.current", "--format=csv,noheader")
    if _must(machine, address, mode).out.strip() != "Enabled":
        return Mig(False)
    # Without an instance it ends with an error.
    listed = machine.run((SMI, "mig", "-i", address, "-lgi"), COMMAND_SECONDS)
    return Mig(True, tuple(_INSTANCE.findall(listed.out)))


def add_instances(machine: Machine, address: str, wanted: Instances) -> None:
    """Turn MIG on, and create the GPU instances that a card lacks, each with its compute instance.

    :raises Failed: the card doesn't take it.
    """
    now = mig(machine, address)
    if not now.on:
        _must(machine, address, (SMI, "-i", address, "-mig", "1"))
        now = mig(machine, address)
        if not now.on:
            # nvidia-smi ends without an error where an Ampere card would need a reset that somebody's use prevents.
            raise Failed(
                "vgpu_mig_pending",
                f"card {address} has MIG only after a reset: run nvidia-smi --gpu-reset -i {address} while nothing "
                "uses it, or reboot",
                address=address,
            )
    more = lacking(now.counts(), wanted)
    if more:
        _must(machine, address, (SMI, "mig", "-i", address, "-cgi", ",".join(more), "-C"))
        now = mig(machine, address)
    if lacking(now.counts(), wanted):
        raise Failed(
            "vgpu_no_instances",
            f"card {address} has the GPU instances {now.counts() or 'none'} after nvidia-smi was to make "
            f"{dict(wanted)}: see nvidia-smi mig -i {address} -lgip",
            address=address,
            instances=now.counts(),
            wanted=dict(wanted),
        )


def remove_instances(machine: Machine, address: str, wanted: Instances | None) -> None:
    """Remove the GPU instances beyond these; None turns MIG off.

    :raises Failed: one is in use.
    """
    now = mig(machine, address)
    left = collections.Counter(wanted or {})
    for profile, number in now.instances:
        if left[profile] > 0:
            left[profile] -= 1
            continue
        # It fails where the instance has none.
        machine.run((SMI, "mig", "-i", address, "-gi", number, "-dci"), COMMAND_SECONDS)
        _must(machine, address, (SMI, "mig", "-i", address, "-gi", number, "-dgi"))
    if wanted is None and now.on:
        _must(machine, address, (SMI, "-i", address, "-mig", "0"))


def _put(machine: Machine, address: str, path: str, value: str, vgpu: VGpu | None = None) -> None:
    done = machine.put(path, f"{value}\n", WRITE_SECONDS)
    if done.errno < 0:
        raise Failed(
            "vgpu_timeout",
            f"card {address} didn't take {value} in {path} within {WRITE_SECONDS:.0f} s: process {done.pid} waits in "
            f"the kernel, until whatever uses it ends",
            address=address,
            path=path,
            value=value,
            seconds=WRITE_SECONDS,
            pid=done.pid,
            vgpu=vgpu.key if vgpu else "",
        )
    if done.errno:
        raise Failed(
            "vgpu_refused",
            f"the kernel refuses {value} in {path}: {os.strerror(done.errno)}",
            address=address,
            path=path,
            value=value,
            errno=done.errno,
        )


def _must(machine: Machine, address: str, argv: t.Sequence[str]) -> Done:
    done = machine.run(argv, COMMAND_SECONDS)
    if done.rc:
        raise Failed(
            "vgpu_command", f"{' '.join(argv)} failed: {_last(done)}", address=address, argv=list(argv), rc=done.rc
        )
    return done


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

    def put(self, path: str, text: str, seconds: float) -> Written:
        return kernel_write.put(path, text, seconds)


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
            have = card(machine, address)
            if missing(have, named(have, row["wanted"])):
                create(machine, address, row["wanted"], row["instances"], row["places"])
        except Failed as error:
            failed.append(error)
        except OSError as error:
            text = f"card {address}: {error.strerror or error}"
            failed.append(Failed("vgpu_system", text, address=address, errno=error.errno or errno.EIO))
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
