# SPDX-License-Identifier: GPL-3.0-or-later
"""Start the guest in QEMU, run one command in it, and end it.

QEMU emulates the processor in software: KVM isn't to be had everywhere, and a kernel boots in about 15 seconds of
processor time without it. The board is a PCI Express one with an Intel IOMMU. Behind its root ports there is nothing;
the tests put the simulated cards there.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lab.guest import bytecode, initramfs
from lab.guest.kernel import Kernel
from lab.paths import CHECKOUT, cache_root
from lab.shell import LabError

START = Path(__file__).resolve().parent / "start"
MEMORY_MIB = 1024
# Buses 1 to 4 are each behind a root port of their own, which isolates by ACS; the ports of buses 5 and 6 are functions
# of one device without ACS, as those of many processors are: whatever is behind them is in one IOMMU group with them.
ALONE = 4
TOGETHER = 2
# Under load the kernel now and then takes the timer for broken, and panics, without the third.
KERNEL_ARGUMENTS = ("console=ttyS0", "panic=-1", "no_timer_check", "quiet", "mitigations=off", "nokaslr")
# A guest that has less than this part of a processor stands still, even as one of many on a busy machine.
LEAST = 1 / 50
# Lines of the console that are shown where the guest ended without a result.
LAST_LINES = 30


@dataclass(frozen=True)
class Result:
    """``code`` is the command's exit status."""

    code: int
    console: list[str]


def ports() -> list[str]:
    """Return QEMU's arguments for the PCI Express ports, in the order in which firmware numbers their buses."""
    words: list[str] = []
    for number in range(1, ALONE + TOGETHER + 1):
        place = f"addr={number + 1:x}"
        if number > ALONE:
            place = f"addr={ALONE + 2:x}.{number - ALONE - 1},multifunction=on,disable-acs=on"
        words += ["-device", f"pcie-root-port,id=port{number},hotplug=off,chassis={number},slot={number},{place}"]
    return words


def folder(name: str, path: Path, *options: str) -> list[str]:
    """Return QEMU's arguments for a folder of this machine, which the guest mounts by its name."""
    # Files of several file systems get numbers that don't collide; otherwise /proc and /sys get mixed up.
    device = ("local", f"id={name}", f"path={path}", "security_model=none", "multidevs=remap", *options)
    return ["-fsdev", ",".join(device), "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]


def command_line(
    image: Path, initrd: Path, arguments: Sequence[str], devices: Sequence[str], counted: bool = False
) -> list[str]:
    """Return QEMU's command line.

    :param arguments: of the kernel, beside those that every guest has.
    :param devices: QEMU's arguments for disks and folders.
    :param counted: its time passes with its instructions, on one processor. Otherwise it spends all its time on timer
        interrupts where this machine gives it little.
    """
    processor: tuple[str, ...] = ("tcg,thread=multi", "-smp", "2")
    if counted:
        processor = ("tcg,thread=single", "-smp", "1", "-icount", "shift=1")
    return [
        *("qemu-system-x86_64", "-accel", *processor, "-cpu", "max", "-m", str(MEMORY_MIB)),
        *("-machine", "q35,kernel_irqchip=split", "-device", "intel-iommu,intremap=on,caching-mode=on"),
        *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *("-kernel", str(image), "-initrd", str(initrd), "-append", " ".join((*KERNEL_ARGUMENTS, *arguments))),
        *ports(),
        *devices,
    ]


def run_inside(
    kernel: Kernel,
    command: Sequence[str],
    results: Path,
    seconds: float,
    show: Callable[[str], object] = print,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Boot the guest on this machine's root, run a command in the checkout, and wait for its end.

    :param results: a folder, which the guest has at /run/guest.
    :param seconds: the most processor time that boot and command may take; then the guest is ended.
    :param show: called with each line of the console.
    :raises LabError: QEMU is missing, or the guest ended without a result: it panicked, or took too long.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (environment or {}).items())
    (results / "command").write_text(f"cd {shlex.quote(str(CHECKOUT))} || exit 1\n{exports}{shlex.join(command)}\n")
    # In the cache, so that it can have links to files there.
    with tempfile.TemporaryDirectory(prefix="run-", dir=cache_root() / "guest") as name:
        initrd, compiled = Path(name) / "initramfs", Path(name) / "bytecode"
        compiled.mkdir()
        bytecode.lay(compiled)
        initramfs.write(kernel, initrd)
        devices = [
            *folder("machine", Path("/"), "readonly=on"),
            *folder("layer", kernel.layer, "readonly=on"),
            *folder("bytecode", compiled, "readonly=on"),
            *folder("result", results),
        ]
        words = command_line(kernel.image, initrd, [f"guest.start={START}"], devices)
        return boot(words, results, seconds, show)


def boot(words: Sequence[str], results: Path, seconds: float, show: Callable[[str], object] = print) -> Result:
    """Run QEMU until the guest ends, and return the exit status that it wrote into the folder.

    :param seconds: of QEMU's processor time, by which a guest moves on however busy this machine is; a guest that
        stands still is ended, too.
    :raises LabError: as ``run_inside``.
    """
    (results / "code").unlink(missing_ok=True)
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        # It ends with this process.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "prlimit", f"--cpu={max(round(seconds), 1)}:", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except FileNotFoundError:
        raise LabError("setpriv of util-linux is missing on this machine.") from None
    reader = threading.Thread(target=_read, args=(process.stdout, last, show), daemon=True)
    reader.start()
    try:
        process.wait(seconds / LEAST)
    except subprocess.TimeoutExpired:
        raise LabError(f"the guest stands still, and printed last: {_told(last)}") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(timeout=5)
    if process.returncode == -signal.SIGXCPU:
        raise LabError(f"the guest didn't end within {seconds:.0f} s of processor time; it printed last: {_told(last)}")
    try:
        return Result(int((results / "code").read_text()), list(last))
    except (FileNotFoundError, ValueError):
        raise LabError(f"the guest ended without a result; it printed last: {_told(last)}") from None


def _read(console: IO[bytes] | None, last: deque[str], show: Callable[[str], object]) -> None:
    for line in console or ():
        text = line.decode(errors="replace").rstrip("\r\n")
        last.append(text)
        show(text)


def _told(last: deque[str]) -> str:
    return "\n    ".join(["", *last]) if last else "nothing"
