# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulated cards on the PCI buses of the lab's guest, and the modules of the collection on its kernel.

The cards, the driver ``nvidia`` and its vGPUs are SIMULATED (``lab/guest/modules``); PCI, IOMMU groups, drivers and
their binding, vfio-pci, mediated devices and virtual functions are the kernel's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import typing as t
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils import basic

PCI = Path("/sys/bus/pci")
DEVICES = PCI / "devices"
MEDIATED = Path("/sys/bus/mdev/devices")
NVIDIA, INTEL = 0x10DE, 0x8086
A10, H100, T4 = 0x2236, 0x2330, 0x1EB8
VGA, THREE_D, AUDIO, USB, ETHERNET, SWITCH = 0x030000, 0x030200, 0x040300, 0x0C0330, 0x020000, 0x068000
# Buses with an IOMMU group of their own, and the two of one group with their ports (lab/guest/machine.py).
ALONE, TOGETHER = (1, 2, 3, 4), (5, 6)
# What udev loads for a card and its audio function.
BY_ALIAS = ("nouveau", "nvidia", "snd_hda_intel")
# VFIO's requests, of linux/vfio.h.
GROUP_GET_STATUS, GROUP_SET_CONTAINER, GROUP_GET_DEVICE_FD = 0x3B67, 0x3B68, 0x3B6A
CONTAINER_SET_IOMMU, TYPE1 = 0x3B66, 1


@dataclass(frozen=True)
class Function:
    """A PCI function: ``acs`` isolates it from the others of its card, ``vfs`` can be enabled (at most 4)."""

    bus: int
    function: int = 0
    device: int = A10
    kind: int = THREE_D
    vendor: int = NVIDIA
    acs: bool = False
    vfs: int = 0

    @property
    def address(self) -> str:
        return f"0000:{self.bus:02x}:00.{self.function}"

    def __str__(self) -> str:
        kind = f"{self.vendor:x}:{self.device:x}:{self.kind:06x}:{self.acs:d}:{self.vfs:x}"
        return f"{self.bus:x}.{self.function:x}:{kind}"


def card(bus: int, device: int = A10, kind: int = THREE_D, **more: t.Any) -> Function:
    """Return a card without an audio function, as a server has it."""
    return Function(bus, 0, device, kind, **more)


def with_audio(bus: int, device: int = A10, kind: int = VGA, **more: t.Any) -> list[Function]:
    """Return a card and its audio function."""
    return [Function(bus, 0, device, kind, **more), Function(bus, 1, 0x1AEF, AUDIO, **more)]


class Failed(Exception):
    """A module failed; ``result`` is what it printed."""

    def __init__(self, result: dict[str, t.Any]) -> None:
        super().__init__(result.get("msg", result))
        self.result = result


class Machine:
    """The guest. What a test plugs in and loads is removed by ``clear``."""

    def __init__(self) -> None:
        self._loaded: list[str] = []

    def load(self, module: str, **options: str) -> None:
        run("modprobe", module, *(f"{name}={value}" for name, value in options.items()))
        if module not in self._loaded:
            self._loaded.append(module)

    def unload(self, module: str) -> None:
        run("modprobe", "-r", module)
        self._loaded.remove(module)

    def plug(self, *functions: Function) -> None:
        """Put functions into the machine."""
        self.load("fakecards", functions=",".join(str(each) for each in functions))

    def driver(self, vgpu: t.Literal["none", "mdev", "vendor"] = "none") -> None:
        """Load the simulated driver, which takes every card that has no other."""
        self.load("nvidia", vgpu=vgpu)

    def vfio(self) -> None:
        self.load("vfio-pci")

    @contextlib.contextmanager
    def udev(self) -> t.Iterator[t.Callable[[], object]]:
        """Run a udevd, which loads drivers by alias as at boot; yield a function that waits until it is idle."""
        daemon = subprocess.Popen(["/usr/lib/systemd/systemd-udevd"], stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: Path("/run/udev/control").exists())
            yield lambda: run("udevadm", "settle", "--timeout=60")
        finally:
            daemon.terminate()
            daemon.wait(60)
            self._loaded += [name for name in BY_ALIAS if is_loaded(name) and name not in self._loaded]

    def clear(self) -> None:
        """Remove the cards first, so that no driver is asked for them again."""
        for module in sorted(self._loaded, key=lambda name: name != "fakecards"):
            run("modprobe", "-r", module)
        self._loaded.clear()


def is_loaded(module: str) -> bool:
    return Path("/sys/module", module.replace("-", "_")).exists()


def wait_for(condition: t.Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't come true"
        time.sleep(0.1)


def run(*words: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def write(path: Path, text: str) -> None:
    """Write into a file of sysfs; the kernel's answer is an OSError."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def driver_of(address: str) -> str | None:
    """Return the name of the driver that a device is bound to."""
    link = DEVICES / address / "driver"
    return link.resolve().name if link.exists() else None


def group_of(name: str, folder: Path = DEVICES) -> int:
    return int((folder / name / "iommu_group").resolve().name)


def bind(address: str, driver: str | None) -> None:
    """Bind a device to a driver by its driver_override; None leaves it without one."""
    if driver_of(address):
        write(DEVICES / address / "driver" / "unbind", address)
    write(DEVICES / address / "driver_override", f"{driver or ''}\n")
    if driver:
        write(PCI / "drivers_probe", address)


def viable(group: int) -> bool:
    """Return the kernel's own word: whether a virtual machine can be given the devices of this group."""
    with os.fdopen(os.open(f"/dev/vfio/{group}", os.O_RDWR)) as file:
        status = bytearray((8).to_bytes(4, "little") + bytes(4))
        fcntl.ioctl(file, GROUP_GET_STATUS, status)
        return bool(status[4] & 1)


@contextlib.contextmanager
def held(address: str) -> t.Iterator[None]:
    """Hold a device on vfio-pci open, as a virtual machine does that has it.

    :param address: of a PCI function; with the UUID of a mediated device on it, that device.
    """
    with contextlib.ExitStack() as stack:
        container = stack.enter_context(open("/dev/vfio/vfio", "r+b", buffering=0))
        group = stack.enter_context(open(f"/dev/vfio/{group_of(address)}", "r+b", buffering=0))
        fcntl.ioctl(group, GROUP_SET_CONTAINER, container.fileno().to_bytes(4, "little"))
        fcntl.ioctl(container, CONTAINER_SET_IOMMU, TYPE1)
        device = fcntl.ioctl(group, GROUP_GET_DEVICE_FD, bytearray(address.rpartition("/")[2].encode() + b"\0"))
        stack.callback(os.close, device)
        yield


def module(name: str, check: bool = False, **arguments: t.Any) -> dict[str, t.Any]:
    """Run a module of the collection in this process, on this kernel, and return its result.

    :raises Failed: it failed.
    """
    loaded = importlib.import_module(f"ansible_collections.kubegpu.share.plugins.modules.{name}")
    given = {**arguments, "_ansible_check_mode": check, "_ansible_diff": True}
    output = io.StringIO()
    before = basic._ANSIBLE_ARGS, basic._ANSIBLE_PROFILE
    basic._ANSIBLE_ARGS = json.dumps({"ANSIBLE_MODULE_ARGS": given}).encode()
    basic._ANSIBLE_PROFILE = "legacy"
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            loaded.main()
    finally:
        basic._ANSIBLE_ARGS, basic._ANSIBLE_PROFILE = before
    result: dict[str, t.Any] = json.loads(output.getvalue())
    if result.get("failed"):
        raise Failed(result)
    return result


def killed(
    owner: t.Any, method: str, when: t.Callable[..., bool], name: str, first: bool = False, **given: t.Any
) -> None:
    """Run a module in a process of its own that is killed by SIGKILL at a call of a method.

    :param owner: the class that has the method.
    :param when: from the call's arguments, whether it is the one.
    :param name: of the module; ``given`` are its options.
    :param first: before the call does something; otherwise right after it.
    """
    whole = getattr(owner, method)

    def called(*arguments: t.Any, **named: t.Any) -> t.Any:
        last = when(*arguments, **named)
        if last and first:
            os.kill(os.getpid(), signal.SIGKILL)
        result = whole(*arguments, **named)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    process = os.fork()
    if not process:
        try:
            setattr(owner, method, called)
            module(name, **given)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(0)
    _process, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (name, method, status)
