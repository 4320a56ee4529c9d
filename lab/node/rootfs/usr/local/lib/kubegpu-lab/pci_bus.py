# SPDX-License-Identifier: GPL-3.0-or-later
"""SIMULATION. PCI functions of a lab node that change drivers as the kernel's do, with IOMMU groups. No I/O.

What the kernel refuses, this refuses with the same error: its own sources are drivers/base/bus.c (bind, unbind,
drivers_probe) and drivers/pci/pci-driver.c (driver_override, which driver may have a function).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

NVIDIA, VFIO, SOUND = "nvidia", "vfio-pci", "snd_hda_intel"
# What each driver takes by itself: vendor and class of a function. VFIO's takes nothing but by driver_override.
MATCHES: Mapping[str, tuple[str, str] | None] = {NVIDIA: ("0x10de", "0x03"), SOUND: ("0x10de", "0x0403"), VFIO: None}
# In this kernel they are built in; nvidia comes with its package.
BUILT_IN = (SOUND, VFIO)
# The audio function that the simulation adds to each card.
AUDIO = {
    "vendor": "0x10de",
    "device": "0x10f8",
    "class": "0x040300",
    "subsystem_vendor": "0x10de",
    "subsystem_device": "0x12a2",
    "revision": "0xa1",
    "numa_node": "-1",
    "modalias": "pci:v000010DEd000010F8sv000010DEsd000012A2bc04sc03i00",
}
PAGE = 4096
NONE = "(null)"
STEP = 0.05


@dataclass
class Function:
    """A function; ``fields`` are its plain files, ``driver`` and ``override`` are empty without one."""

    address: str
    fields: Mapping[str, str]
    group: int
    driver: str = ""
    override: str = ""
    # As the kernel's device lock: whoever writes while a driver lets a function go waits for that.
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(frozen=True)
class Text:
    """A file; ``write`` is None where nobody may write it."""

    content: str
    write: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Link:
    target: str


# A folder is a dict of its entries by name.
Entry = Text | Link | dict[str, "Entry"]


def with_audio(cards: Mapping[str, Mapping[str, str]], drivers: Mapping[str, str]) -> list[Function]:
    """Return each card with an audio function, in an IOMMU group of their own.

    :param cards: the plain files of each card, by address.
    :param drivers: of the cards that have one.
    """
    functions = []
    for group, (address, fields) in enumerate(sorted(cards.items()), 1):
        functions.append(Function(address, fields, group, drivers.get(address, "")))
        functions.append(Function(f"{address.rpartition('.')[0]}.1", AUDIO, group, SOUND))
    return functions


class Bus:
    """The functions and their drivers.

    :param held: returns whether a virtual machine has a function, so that its driver can't let it go.
    :param moved: called when a function has changed its driver by a write, with the former one.
    """

    def __init__(
        self,
        functions: list[Function],
        held: Callable[[Function], bool] = lambda _function: False,
        moved: Callable[[Function, str], None] = lambda _function, _old: None,
    ) -> None:
        self._functions = {one.address: one for one in functions}
        self._held, self._moved = held, moved
        self._drivers = {*BUILT_IN, *(one.driver for one in functions if one.driver)}

    def functions(self) -> list[Function]:
        return list(self._functions.values())

    # ------------------------------------------------------------------ what is written

    def _of(self, text: str) -> Function:
        function = self._functions.get(text.strip())
        if function is None:
            raise OSError(errno.ENODEV, f"no function {text.strip()!r}")
        return function

    def _matches(self, driver: str, function: Function) -> bool:
        if function.override:
            return function.override == driver
        wanted = MATCHES[driver]
        if wanted is None:
            return False
        return function.fields["vendor"] == wanted[0] and function.fields["class"].startswith(wanted[1])

    @contextlib.contextmanager
    def _moving(self, function: Function) -> Iterator[None]:
        with function.lock:
            old = function.driver
            yield
            if function.driver != old:
                self._moved(function, old)

    def bind(self, driver: str, text: str) -> None:
        """Give a function to a driver.

        :raises OSError: ENODEV: it has one, or this driver doesn't take it.
        """
        function = self._of(text)
        with self._moving(function):
            if function.driver or not self._matches(driver, function):
                raise OSError(errno.ENODEV, f"{driver} doesn't take {function.address}")
            function.driver = driver

    def unbind(self, driver: str, text: str) -> None:
        """Take a function from a driver, which waits for whoever has it.

        :raises OSError: ENODEV: the driver hasn't got it.
        """
        function = self._of(text)
        with self._moving(function):
            if function.driver != driver:
                raise OSError(errno.ENODEV, f"{driver} hasn't got {function.address}")
            while self._held(function):
                time.sleep(STEP)
            function.driver = ""

    def probe(self, text: str) -> None:
        """Look for a driver for a function; that none takes it is no error."""
        function = self._of(text)
        with self._moving(function):
            if not function.driver:
                function.driver = next((name for name in sorted(self._drivers) if self._matches(name, function)), "")

    def override(self, address: str, text: str) -> None:
        """Let one driver alone have a function; an empty line lets any."""
        if len(text) >= PAGE - 1:
            raise OSError(errno.EINVAL, "longer than a page")
        with self._functions[address].lock:
            self._functions[address].override = text.partition("\n")[0]

    def load(self, driver: str) -> None:
        """Load a driver, which takes what it matches and nobody has. Loading it once more changes nothing."""
        name = driver.strip()
        if name not in MATCHES:
            raise OSError(errno.ENOENT, f"no driver {name!r}")
        if name not in self._drivers:
            self._drivers.add(name)
            for function in self.functions():
                with function.lock:
                    if not function.driver and self._matches(name, function):
                        function.driver = name

    def unload(self, driver: str) -> None:
        """Unload a driver, which lets go of all that it has.

        :raises OSError: EBUSY: it is built in.
        """
        name = driver.strip()
        if name in BUILT_IN:
            raise OSError(errno.EBUSY, f"{name} is built in")
        self._drivers.discard(name)
        for function in self.functions():
            with function.lock:
                if function.driver == name:
                    function.driver = ""

    # ------------------------------------------------------------------ what is read

    def tree(self) -> dict[str, Entry]:
        """Return the folders: ``pci`` and ``iommu_groups`` as sysfs has them, and the files load and unload."""
        drivers: dict[str, Entry] = {name: self._driver(name) for name in sorted(self._drivers)}
        groups: dict[int, dict[str, Entry]] = {}
        for one in self.functions():
            groups.setdefault(one.group, {})[one.address] = Link(f"../../../../bus/pci/devices/{one.address}")
        return {
            "pci": {
                "devices": {one.address: self._function(one) for one in self.functions()},
                "drivers": drivers,
                "drivers_probe": Text("", self.probe),
            },
            "iommu_groups": {
                str(number): {"devices": members, "type": Text("DMA\n")} for number, members in groups.items()
            },
            "load": Text("", self.load),
            "unload": Text("", self.unload),
        }

    def _function(self, function: Function) -> dict[str, Entry]:
        address = function.address
        folder: dict[str, Entry] = {name: Text(value + "\n") for name, value in function.fields.items()}
        folder["driver_override"] = Text((function.override or NONE) + "\n", lambda text: self.override(address, text))
        folder["iommu_group"] = Link(f"../../../../kernel/iommu_groups/{function.group}")
        if function.driver:
            folder["driver"] = Link(f"../../drivers/{function.driver}")
        return folder

    def _driver(self, name: str) -> dict[str, Entry]:
        folder: dict[str, Entry] = {
            "bind": Text("", lambda text: self.bind(name, text)),
            "unbind": Text("", lambda text: self.unbind(name, text)),
        }
        if name not in BUILT_IN:
            folder["module"] = Link(f"../../../../module/{name}")
        folder |= {one.address: Link(f"../../devices/{one.address}") for one in self.functions() if one.driver == name}
        return folder
