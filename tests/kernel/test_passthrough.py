# SPDX-License-Identifier: GPL-3.0-or-later
"""Module pci_binding on a real kernel: binding, the kernel's word on a group, held cards, udev's rule, and the undo."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check import virtual
from ansible_collections.kubegpu.share.plugins.module_utils._check.evidence import Reader, virtual_of
from ansible_collections.kubegpu.share.plugins.module_utils._check.result import CheckResult
from ansible_collections.kubegpu.share.plugins.module_utils._driver.library import card_information
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.kernel import RealKernel
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import observations
from fakes import (
    ALONE,
    DEVICES,
    ETHERNET,
    INTEL,
    THREE_D,
    TOGETHER,
    Failed,
    Function,
    bind,
    card,
    driver_of,
    group_of,
    held,
    killed,
    module,
    run,
    viable,
    with_audio,
    write,
)

CARD, AUDIO = "0000:01:00.0", "0000:01:00.1"
TWIN, TWIN_AUDIO = "0000:02:00.0", "0000:02:00.1"
RULE = Path("/etc/udev/rules.d/10-kubegpu-vfio.rules")
RECORD = Path("/var/lib/kubegpu-share/passthrough.json")
SMI = Path("/usr/bin/nvidia-smi")
# The address of a card that the simulated driver doesn't give up.
KEPT = Path("/sys/module/nvidia/parameters/kept")
# What the role reads of nvidia-smi: whether a card is in persistence mode. Here none says that it is. Asking is a use
# of a card, after which the driver knows its UUID.
SMI_TEXT = """\
#!/bin/sh
index=0
for card in /sys/bus/pci/drivers/nvidia/0000:*; do
  address=${card##*/}
  file=/proc/driver/nvidia/gpus/$address/information
  mknod /dev/smi$$ c 195 "$(sed -n 's/^Device Minor:[[:space:]]*//p' $file)"
  : < /dev/smi$$
  rm /dev/smi$$
  uuid=$(sed -n 's/^GPU UUID:[[:space:]]*//p' $file)
  echo "$index, $uuid, NVIDIA A10, 23028, 0000$address, 580.178.04, Disabled, [N/A], [N/A]"
  index=$((index + 1))
done
"""


def cards() -> list[Function]:
    """Two cards of one model with audio functions: 3D controllers, since a VGA one would be the guest's display."""
    return [*with_audio(ALONE[0], kind=THREE_D), *with_audio(ALONE[1], kind=THREE_D)]


@pytest.fixture
def host(machine):
    """The guest with two cards of one model on their drivers, and with a kernel that is installed."""
    kernel = Path(f"/boot/vmlinuz-{os.uname().release}")
    kernel.touch()
    SMI.write_text(SMI_TEXT)
    SMI.chmod(0o755)
    # It counts the functions that it could start nothing on, as these, and after 32 of them takes no more.
    run("modprobe", "-r", "snd_hda_intel")
    run("modprobe", "snd_hda_intel")
    machine.plug(*cards())
    machine.driver()
    yield machine
    KEPT.write_text("\n")
    for address in (CARD, AUDIO, TWIN, TWIN_AUDIO):
        if (DEVICES / address).exists():
            write(DEVICES / address / "driver_override", "\n")
    for path in (kernel, SMI, RULE, Path("/etc/modprobe.d/kubegpu-vfio.conf")):
        path.unlink(missing_ok=True)
    shutil.rmtree(RECORD.parent, ignore_errors=True)


@contextlib.contextmanager
def opened(minor: int) -> Iterator[None]:
    """Have the file of a card open, which the driver's own tools make, not the kernel."""
    path = f"/dev/nvidia{minor}"
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
    try:
        with open(path, "rb"):
            yield
    finally:
        os.unlink(path)


def override_of(address: str) -> str:
    return (DEVICES / address / "driver_override").read_text().strip()


def drivers() -> list[str | None]:
    return [driver_of(address) for address in (CARD, AUDIO, TWIN, TWIN_AUDIO)]


BEFORE = ["nvidia", "snd_hda_intel", "nvidia", "snd_hda_intel"]
AFTER = ["vfio-pci", "vfio-pci", "nvidia", "snd_hda_intel"]


def refusals(**given) -> list[dict[str, object]]:
    with pytest.raises(Failed) as error:
        module("pci_binding", **given)
    return error.value.result["refusals"]


def test_one_of_two_identical_cards_goes_with_its_audio_and_comes_back(host):
    assert drivers() == BEFORE
    result = module("pci_binding", cards=[CARD])
    assert result["changed"] and not result["reboot_required"]
    assert drivers() == AFTER
    assert result["cards"][0]["viable"] and viable(group_of(CARD))
    assert not module("pci_binding", cards=[CARD])["changed"]
    assert module("pci_binding", state="absent")["changed"]
    assert drivers() == BEFORE
    assert {override_of(address) for address in (CARD, AUDIO, TWIN, TWIN_AUDIO)} == {"(null)"}
    assert not RULE.exists() and not RECORD.exists()
    assert not module("pci_binding", state="absent")["changed"]


def unbound(address: str) -> Callable[..., bool]:
    return lambda _kernel, path, *_more: path.endswith(f"/{address}/driver/unbind")


@pytest.mark.long
def test_a_run_that_was_killed_between_two_drivers_is_completed_and_can_be_undone(host):
    killed(RealKernel, "put", unbound(CARD), "pci_binding", cards=[CARD])
    assert drivers() == [None, *BEFORE[1:]]
    assert module("pci_binding", cards=[CARD])["changed"] and drivers() == AFTER
    # The way back, too.
    killed(RealKernel, "put", unbound(AUDIO), "pci_binding", state="absent")
    assert driver_of(AUDIO) is None
    assert module("pci_binding", state="absent")["changed"] and drivers() == BEFORE
    killed(RealKernel, "put", unbound(AUDIO), "pci_binding", cards=[CARD])
    assert drivers() == ["vfio-pci", None, *BEFORE[2:]]
    assert module("pci_binding", state="absent")["changed"] and drivers() == BEFORE
    assert not RULE.exists() and not RECORD.exists()


def verified() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the kernel's answer by function, as verify gets it, and what its check V1 reports of it."""
    evidence = module("virtual_machines_info")["virtual_machines"]
    assert observations.problem("virtual_machines_info", {"virtual_machines": evidence}) == ""
    node = types.SimpleNamespace(virtual=virtual_of(evidence, Reader()))
    result = CheckResult("V1")
    virtual.functions_are_bound(node, None, result)
    assert result.checked == len(evidence["functions"])
    states = {row["address"]: row["state"] for row in evidence["functions"]}
    return states, [(finding.level, finding.cause) for finding in result.findings]


def test_verify_asks_the_kernel_about_groups_and_disturbs_no_virtual_machine(host):
    assert module("virtual_machines_info")["virtual_machines"] is None
    module("pci_binding", cards=[CARD])
    assert verified() == ({CARD: "viable", AUDIO: "viable"}, [])
    with held(CARD):
        assert verified() == ({CARD: "held", AUDIO: "held"}, [])
    assert verified()[0][CARD] == "viable"
    # The faults: another driver has a function of the group, or the card itself.
    bind(AUDIO, "snd_hda_intel")
    assert verified() == ({CARD: "not_viable", AUDIO: ""}, [("FAIL", "not_viable"), ("FAIL", "not_bound")])
    bind(AUDIO, None)
    assert verified() == ({CARD: "viable", AUDIO: ""}, [("FAIL", "not_bound")])
    bind(AUDIO, "vfio-pci")
    bind(CARD, "nvidia")
    assert verified()[0] == {CARD: "", AUDIO: "not_viable"}
    bind(CARD, "vfio-pci")
    module("pci_binding", state="absent")
    assert drivers() == BEFORE


def test_a_check_run_changes_nothing(host):
    assert module("pci_binding", cards=[CARD], check=True)["changed"]
    assert drivers() == BEFORE and not RULE.exists() and not RECORD.exists()


def test_external_finds_a_group_that_isnt_viable(host):
    host.vfio()
    bind(CARD, "vfio-pci")
    with pytest.raises(Failed) as error:
        module("pci_binding", state="external", cards=[CARD])
    assert {(row["code"], row["address"]) for row in error.value.result["problems"]} == {
        ("not_bound", AUDIO),
        ("not_viable", CARD),
    }
    bind(AUDIO, "vfio-pci")
    assert not module("pci_binding", state="external", cards=[CARD])["changed"]


def test_a_group_with_another_makers_function_is_refused(machine):
    kernel = Path(f"/boot/vmlinuz-{os.uname().release}")
    kernel.touch()
    machine.plug(card(TOGETHER[0]), Function(TOGETHER[1], 0, 0x10D3, ETHERNET, INTEL))
    first, other = (f"0000:{bus:02x}:00.0" for bus in TOGETHER)
    [refusal] = refusals(cards=[first])
    assert (refusal["code"], refusal["address"], refusal["foreign"]) == ("foreign_endpoint", first, other)
    kernel.unlink()


@pytest.mark.long
def test_the_only_vga_card_is_the_display(host):
    host.clear()
    host.plug(*with_audio(ALONE[0]))
    host.driver()
    assert (DEVICES / CARD / "boot_vga").read_text() == "1\n"
    assert refusals(cards=[CARD]) == [{"code": "display", "address": CARD}]
    assert module("pci_binding", cards=[CARD], allow_display=True)["changed"]
    module("pci_binding", state="absent")
    assert drivers()[:2] == BEFORE[:2]


def information(address: str) -> dict[str, str]:
    """Return the driver's lines about a card."""
    rows = Path(f"/proc/driver/nvidia/gpus/{address}/information").read_text().splitlines()
    return {name: value.strip() for name, _colon, value in (row.partition(":") for row in rows)}


def test_a_card_that_a_process_has_open_is_refused_and_its_twin_isnt(host):
    numbers = {address: int(information(address)["Device Minor"]) for address in (CARD, TWIN)}
    for address, other in ((CARD, TWIN), (TWIN, CARD)):
        with opened(numbers[address]):
            [refusal] = refusals(cards=[address])
            assert (refusal["code"], refusal["address"], refusal["pid"]) == ("held_by_process", address, os.getpid())
            assert module("pci_binding", cards=[other], check=True)["changed"]
    assert drivers() == BEFORE


@pytest.mark.long
def test_a_card_is_named_by_the_uuid_that_its_driver_shows(host):
    """Before its first use the driver shows question marks; nvidia-smi's question is a use."""
    assert "?" in information(TWIN)["GPU UUID"]
    run(str(SMI))
    uuid = information(TWIN)["GPU UUID"]
    assert "?" not in uuid and uuid != information(CARD)["GPU UUID"]
    result = module("pci_binding", cards=[uuid])
    assert [(row["address"], row["uuid"]) for row in result["cards"]] == [(TWIN, uuid.lower())]
    assert drivers() == [*BEFORE[:2], "vfio-pci", "vfio-pci"]
    assert not Path(f"/proc/driver/nvidia/gpus/{TWIN}").exists()
    # The record has it, while the driver has the card no more.
    assert not module("pci_binding", cards=[uuid])["changed"]
    module("pci_binding", state="absent")
    assert drivers() == BEFORE
    [refusal] = refusals(cards=["GPU-11111111-2222-3333-4444-555555555555"])
    assert refusal["code"] == "unknown_uuid"


def test_the_driver_tells_which_file_is_whose_cards(host):
    for address in (CARD, TWIN):
        assert card_information(RealSystem(), address).minor == int(information(address)["Device Minor"])


@pytest.mark.long
def test_a_card_that_its_driver_doesnt_give_up_is_left_after_the_time_limit(host):
    KEPT.write_text(CARD)
    began = time.monotonic()
    with pytest.raises(Failed) as error:
        module("pci_binding", cards=[CARD], seconds=2)
    assert time.monotonic() - began < 60
    found = error.value.result
    assert (found["code"], found["address"], found["driver"]) == ("unbind_timeout", CARD, "nvidia")
    assert Path(f"/proc/{found['pid']}").exists()
    assert driver_of(AUDIO) == "snd_hda_intel"
    KEPT.write_text("\n")
    for _second in range(30):
        if driver_of(CARD) is None:
            break
        time.sleep(1)
    assert module("pci_binding", cards=[CARD])["changed"]
    assert drivers() == AFTER
    module("pci_binding", state="absent")
    assert drivers() == BEFORE


def test_a_card_with_a_virtual_machine_stays_with_it(host):
    module("pci_binding", cards=[CARD])
    with held(CARD):
        rows = refusals(state="absent")
        assert {row["code"] for row in rows} == {"held_by_vm"} and drivers() == AFTER
        assert not module("pci_binding", cards=[CARD])["changed"]
    module("pci_binding", state="absent")
    assert drivers() == BEFORE


def test_virtual_functions_are_refused_and_are_no_cards(host):
    host.clear()
    host.plug(card(ALONE[0], acs=True, vfs=4))
    host.driver(vgpu="vendor")
    write(DEVICES / CARD / "sriov_numvfs", "2")
    assert refusals(cards=["all"])[0] == {"code": "virtual_functions", "address": CARD, "count": 2}
    assert refusals(cards=["0000:01:00.4"])[0]["code"] == "virtual_function"
    write(DEVICES / CARD / "sriov_numvfs", "0")


def settle() -> None:
    run("udevadm", "settle", "--timeout=60")


@pytest.fixture
def udevd(host):
    daemon = subprocess.Popen(["/usr/lib/systemd/systemd-udevd"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _moment in range(100):
        if Path("/run/udev/control").exists():
            break
        time.sleep(0.1)
    yield host
    daemon.terminate()
    daemon.wait()


def test_the_rule_binds_a_card_whose_driver_was_loaded_before(udevd):
    """As at boot, when udev sees the cards before their drivers are loaded.

    The kernel binds nothing when a module is loaded that is there already; the rule's last command makes it look.
    """
    module("pci_binding", cards=[CARD], live=False)
    assert drivers() == BEFORE
    rule = RULE.read_text()

    def plugged_in_again(text: str) -> list[str | None]:
        udevd.clear()
        run("modprobe", "-r", "snd_hda_intel")
        RULE.write_text(text)
        run("udevadm", "control", "--reload")
        udevd.vfio()
        udevd.plug(*cards())
        settle()
        udevd.driver()
        return drivers()

    without = "".join(line.partition(", RUN+=")[0] + "\n" for line in rule.splitlines())
    assert plugged_in_again(without)[:3] == [None, None, "nvidia"]
    assert plugged_in_again(rule)[:3] == ["vfio-pci", "vfio-pci", "nvidia"]
    assert not module("pci_binding", cards=[CARD], live=False)["reboot_required"]
