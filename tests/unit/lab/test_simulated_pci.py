# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's simulated PCI: refusals as the kernel's, files that are written, and module pci_binding on all of it.

What the real kernel does is held by tests/kernel/test_passthrough.py, with the same addresses and the same drivers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "lab/node/rootfs/usr/local/lib/kubegpu-lab"))

import pci_files
from pci_bus import Bus, Function, with_audio

from lab import hardware

ROOT = Path(__file__).resolve().parents[3]
CARD, AUDIO = "0000:01:00.0", "0000:01:00.1"
TWIN = "0000:02:00.0"
CARDS = {CARD: hardware.PCI, TWIN: hardware.PCI}
FUSE = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="only root mounts a file system, by /dev/fuse"
)


def bus(**callbacks) -> Bus:
    return Bus(with_audio(CARDS, {CARD: "nvidia", TWIN: "nvidia"}), **callbacks)


def drivers(made: Bus) -> list[str]:
    return [one.driver for one in made.functions()]


def refused(call, *arguments) -> int:
    with pytest.raises(OSError) as error:
        call(*arguments)
    return error.value.errno


def test_a_function_goes_to_vfio_and_back_as_the_kernel_lets_it():
    made = bus()
    assert drivers(made) == ["nvidia", "snd_hda_intel"] * 2
    made.override(CARD, "vfio-pci\n")
    made.probe(f"{CARD}\n")
    assert drivers(made)[0] == "nvidia", "a probe takes nothing from a driver"
    made.unbind("nvidia", f"{CARD}\n")
    made.probe(f"{CARD}\n")
    assert drivers(made)[0] == "vfio-pci"
    made.override(CARD, "\n")
    assert drivers(made)[0] == "vfio-pci", "a cleared override takes nothing from a driver"
    made.unbind("vfio-pci", CARD)
    made.probe(CARD)
    assert drivers(made) == ["nvidia", "snd_hda_intel"] * 2


def test_what_the_kernel_refuses():
    made = bus()
    assert refused(made.probe, "0000:09:00.0\n") == errno.ENODEV
    assert refused(made.unbind, "vfio-pci", CARD) == errno.ENODEV
    assert refused(made.bind, "vfio-pci", CARD) == errno.ENODEV, "it has a driver"
    made.unbind("nvidia", CARD)
    assert refused(made.bind, "vfio-pci", CARD) == errno.ENODEV, "without an override it takes nothing"
    assert refused(made.bind, "snd_hda_intel", CARD) == errno.ENODEV
    made.override(CARD, "vfio-pci\n")
    assert refused(made.bind, "nvidia", CARD) == errno.ENODEV, "the override is for another"
    made.bind("vfio-pci", CARD)
    assert refused(made.override, CARD, "x" * 4096) == errno.EINVAL
    assert refused(made.load, "nouveau\n") == errno.ENOENT
    assert refused(made.unload, "vfio-pci") == errno.EBUSY
    assert drivers(made) == ["vfio-pci", "snd_hda_intel", "nvidia", "snd_hda_intel"]


def test_a_driver_takes_what_is_free_when_it_is_loaded():
    made = Bus(with_audio(CARDS, {}))
    assert drivers(made) == ["", "snd_hda_intel"] * 2
    made.override(CARD, "vfio-pci\n")
    made.load("nvidia\n")
    assert drivers(made) == ["", "snd_hda_intel", "nvidia", "snd_hda_intel"]
    made.probe(CARD)
    made.unload("nvidia\n")
    assert drivers(made) == ["vfio-pci", "snd_hda_intel", "", "snd_hda_intel"]
    assert "nvidia" not in made.tree()["pci"]["drivers"]


def test_who_has_the_device_delays_its_unbind_and_every_later_write():
    held = {CARD}
    moves: list[tuple[str, str, str]] = []
    made = bus(
        held=lambda one: one.driver == "vfio-pci" and one.address in held,
        moved=lambda one, old: moves.append((one.address, old, one.driver)),
    )
    made.override(CARD, "vfio-pci\n")
    made.unbind("nvidia", CARD)
    made.probe(CARD)
    waiting = [
        threading.Thread(target=made.unbind, args=("vfio-pci", CARD)),
        threading.Thread(target=made.override, args=(CARD, "\n")),
    ]
    for one in waiting:
        one.start()
        time.sleep(0.2)
    assert all(one.is_alive() for one in waiting) and drivers(made)[0] == "vfio-pci"
    held.clear()
    for one in waiting:
        one.join(10)
    assert not any(one.is_alive() for one in waiting)
    assert moves == [(CARD, "nvidia", ""), (CARD, "", "vfio-pci"), (CARD, "vfio-pci", "")]


@contextlib.contextmanager
def mounted(made: Bus, target: Path) -> Iterator[Path]:
    target.mkdir()
    files = pci_files.Files(made.tree, target)
    server = threading.Thread(target=files.serve, daemon=True)
    server.start()
    try:
        yield target
    finally:
        pci_files.unmount(target)
        server.join(10)
    assert not server.is_alive() and not any(target.iterdir())


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # A request to this process's own file system: it must not wait with the interpreter's lock.
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@FUSE
def test_files_are_read_and_written_as_in_sysfs(tmp_path):
    made = bus()
    with mounted(made, tmp_path / "sys") as place:
        card = place / "pci/devices" / CARD
        assert sorted(run("ls", str(place / "pci/devices")).stdout.split()) == sorted(
            one.address for one in made.functions()
        )
        assert run("cat", f"{card}/vendor", f"{card}/driver_override").stdout == "0x10de\n(null)\n"
        assert run("readlink", f"{card}/driver", f"{card}/iommu_group").stdout.split() == [
            "../../drivers/nvidia",
            "../../../../kernel/iommu_groups/1",
        ]
        assert run("ls", str(place / "iommu_groups/1/devices")).stdout.split() == [CARD, AUDIO]
        script = f"echo vfio-pci > {card}/driver_override && echo {CARD} > {card}/driver/unbind"
        assert run("sh", "-c", f"{script} && echo {CARD} > {place}/pci/drivers_probe").returncode == 0
        assert run("ls", str(place / "pci/drivers/vfio-pci")).stdout.split() == [CARD, "bind", "unbind"]
        assert run("cat", f"{card}/driver_override").stdout == "vfio-pci\n"
        # The writer gets the error, as the kernel gives it.
        done = run("sh", "-c", f"/bin/echo {CARD} > {place}/pci/drivers/nvidia/bind")
        assert done.returncode != 0 and "No such device" in done.stderr
        for command in (["touch", f"{card}/mine"], ["rm", f"{card}/vendor"], ["mkdir", f"{place}/mine"]):
            assert run(*command).returncode != 0
        assert "Is a directory" in run("sh", "-c", f"echo x > {card}").stderr


@FUSE
def test_a_write_that_waits_delays_no_reader(tmp_path):
    held = threading.Event()
    held.set()
    made = bus(held=lambda one: held.is_set())
    with mounted(made, tmp_path / "sys") as place:
        card = place / "pci/devices" / CARD
        writer = subprocess.Popen(["sh", "-c", f"echo {CARD} > {card}/driver/unbind"])
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(1)
        assert run("cat", f"{card}/vendor").stdout == "0x10de\n"
        held.clear()
        assert writer.wait(10) == 0
    assert drivers(made)[0] == ""


INSIDE = """\
set -eu
mount --make-rprivate /
mount -t tmpfs none "$1"
mkdir "$1/up" "$1/work" "$1/node"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" "$1/node"
node=$1/node
# The checkout and Python's environment may be file systems of their own.
shift
for each in "$@"; do mount --bind "$each" "$node$each"; done
mount -t proc proc "$node/proc"
mount --rbind /sys "$node/sys"
mount -t tmpfs none "$node/dev"
mount -t tmpfs none "$node/run"
mount -t tmpfs none "$node/boot"
install -D -m 755 "$GROUPS_LIBRARY" "$node/usr/local/lib/kubegpu-lab/vfio_group.so"
echo /usr/local/lib/kubegpu-lab/vfio_group.so >"$node/etc/ld.so.preload"
for each in "null 1 3" "urandom 1 9" "fuse 10 229"; do mknod -m 666 "$node/dev/${each%% *}" c ${each#* }; done
exec chroot "$node" "$PYTHON" "$SCRIPT"
"""


@FUSE
@pytest.mark.skipif(shutil.which("unshare") is None or shutil.which("gcc") is None, reason="no unshare or no gcc")
def test_the_module_binds_cards_of_a_simulated_node_and_returns_them(tmp_path):
    """As root of a copy of this machine's files, which is gone afterwards; the steps are in simulated_node.py."""
    library = hardware.group_library(tmp_path.parent / f"{tmp_path.name}.so")
    environment = {
        **os.environ,
        "GROUPS_LIBRARY": str(library),
        "PYTHON": sys.executable,
        "SCRIPT": str(Path(__file__).with_name("simulated_node.py")),
        "PROGRAMS": str(Path(pci_files.__file__).parent),
    }
    shown = sorted({str(ROOT), str(Path(sys.prefix).resolve())})
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", INSIDE, "sh", str(tmp_path), *shown],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "proven"


def test_a_group_has_a_card_and_its_audio_function_and_no_other():
    functions = with_audio(CARDS, {})
    assert [(one.address, one.group) for one in functions] == [
        (CARD, 1),
        (AUDIO, 1),
        (TWIN, 2),
        ("0000:02:00.1", 2),
    ]
    assert all(isinstance(one, Function) for one in functions)
