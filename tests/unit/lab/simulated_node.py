# SPDX-License-Identifier: GPL-3.0-or-later
"""Run by test_simulated_pci.py as root of a node that is made for it: cards go to VFIO and come back by pci_binding.

The program that the lab's nodes run, the lab's simulated kernel module, and the collection's module as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernel"))

from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
from fakes import Failed, module, write

from lab import hardware

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, f"{os.environ['PROGRAMS']}/simulated_pci.py"]
DEVICES, VFIO = Path("/sys/bus/pci/devices"), Path("/dev/vfio")
CARDS = Path("/var/lib/kubegpu-lab/hardware/cards")
SCRIPT = Path("/usr/lib/nvidia-sim/nvidia-sim")
RULE = Path("/etc/udev/rules.d/10-kubegpu-vfio.rules")
CARD, AUDIO, TWIN, TWIN_AUDIO = (f"0000:{bus}:00.{number}" for bus in ("01", "02") for number in (0, 1))
ALL = (CARD, AUDIO, TWIN, TWIN_AUDIO)
BEFORE = ["nvidia", "snd_hda_intel"] * 2


# Whether a card is in persistence mode is all that the module asks of it.
SMI = """\
#!/bin/sh
index=0
for card in /sys/bus/pci/devices/0000:*; do
    [ "$(basename "$(readlink "$card/driver")")" = nvidia ] || continue
    address=${card##*/}
    echo "$index, GPU-$address, Simulated, 16640, 0000$address, 580.95.05, Disabled, [N/A], [N/A]"
    index=$((index + 1))
done
"""


def drivers(addresses: tuple[str, ...] = ALL) -> list[str]:
    links = [DEVICES / address / "driver" for address in addresses]
    return [os.readlink(link).rpartition("/")[2] if link.is_symlink() else "" for link in links]


def nvidia() -> list[str]:
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def listed() -> list[str]:
    return sorted(path.name for path in Path("/proc/driver/nvidia/gpus").iterdir())


def wait(true, words: str) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, words
        time.sleep(0.05)


def main() -> None:
    _AnsibleCollectionFinder(paths=[str(ROOT / ".collections")])._install()
    from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.kernel import RealKernel

    hardware.write_node(Path("/var/lib/kubegpu-lab"), "gpu1", 2, 16640, "580.95.05")
    subprocess.run(["mount", "--bind", "/var/lib/kubegpu-lab/pci", str(DEVICES)], check=True)
    SCRIPT.parent.mkdir(parents=True, exist_ok=True)
    SCRIPT.write_text((ROOT / "lab/driver/nvidia-sim").read_text().replace("@VERSION@", "580.95.05"))
    SCRIPT.chmod(0o755)
    Path("/usr/bin/nvidia-smi").write_text(SMI)
    Path("/usr/bin/nvidia-smi").chmod(0o755)
    (Path("/boot") / f"vmlinuz-{os.uname().release}").touch()
    subprocess.run([SCRIPT, "start"], check=True)
    assert drivers((CARD, TWIN)) == ["nvidia"] * 2
    assert nvidia() == ["nvidia0", "nvidia1"]

    server = subprocess.Popen(PROGRAM)
    wait((VFIO / "vfio").exists, "the server has not started")
    wait(lambda: (DEVICES / AUDIO).exists(), "the server shows no audio function")
    assert drivers() == BEFORE

    result = module("pci_binding", cards=[TWIN])
    assert result["changed"] and not result["reboot_required"], result
    assert drivers() == [*BEFORE[:2], "vfio-pci", "vfio-pci"]
    assert nvidia() == ["nvidia0"] and listed() == [CARD] and (VFIO / "2").is_char_device()
    assert not module("pci_binding", cards=[TWIN])["changed"]

    # What the kernel would say of the groups.
    assert [RealKernel().group_state(group) for group in ("2", "1")] == ["viable", "absent"]
    write(DEVICES / TWIN_AUDIO / "driver_override", "\n")
    write(DEVICES / TWIN_AUDIO / "driver" / "unbind", TWIN_AUDIO)
    write(Path("/sys/bus/pci/drivers_probe"), TWIN_AUDIO)
    assert drivers((TWIN_AUDIO,)) == ["snd_hda_intel"] and RealKernel().group_state("2") == "not_viable"
    assert module("pci_binding", cards=[TWIN])["changed"] and RealKernel().group_state("2") == "viable"

    # A virtual machine has it.
    with (VFIO / "2").open("rb"):
        try:
            module("pci_binding", state="absent")
        except Failed as failed:
            codes = {row["code"] for row in failed.result["refusals"]}
        assert codes == {"held_by_vm"}, codes
        # Who doesn't ask before waits, and gives the card back when it is free.
        unbind = subprocess.Popen(["sh", "-c", f"echo {TWIN} > {DEVICES}/{TWIN}/driver/unbind"])
        time.sleep(0.5)
        assert unbind.poll() is None
    assert unbind.wait(10) == 0
    assert module("pci_binding", cards=[TWIN])["changed"]

    assert module("pci_binding", cards=["all"])["changed"]
    assert drivers() == ["vfio-pci"] * 4 and nvidia() == [] and listed() == []
    # As at an upgrade of the driver: its module takes nothing that is a virtual machine's.
    for word in ("stop", "start"):
        subprocess.run([SCRIPT, word], check=True)
    assert drivers() == ["vfio-pci"] * 4 and nvidia() == []
    assert module("pci_binding", state="absent")["changed"]
    assert drivers() == BEFORE and nvidia() == ["nvidia0", "nvidia1"] and listed() == [CARD, TWIN]
    assert not RULE.exists() and sorted(path.name for path in VFIO.iterdir()) == ["vfio"]

    server.terminate()
    server.wait(10)
    subprocess.run([*PROGRAM, "end"], check=True)
    assert sorted(path.name for path in DEVICES.iterdir()) == [CARD, TWIN] and not VFIO.exists()
    assert drivers((CARD, TWIN)) == ["nvidia"] * 2
    print("proven")


if __name__ == "__main__":
    main()
