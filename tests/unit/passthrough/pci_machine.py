# SPDX-License-Identifier: GPL-3.0-or-later
"""A machine with PCI functions, IOMMU groups and drivers, as a stand-in for the kernel.

It does what Linux 6.1 was seen to do on 28 and 29 November 2026, in QEMU with simulated cards (``tests/kernel`` asks a
real kernel the same):

* an empty ``driver_override`` reads ``(null)``; a line break clears it
* ``drivers_probe`` succeeds whether or not a driver takes the function
* a driver without an override takes what its table matches; VFIO's takes nothing without one
* the writer to ``unbind`` of a function that is held waits, and can't be ended
* a group is viable unless a driver other than VFIO's has a function of it; one without a driver doesn't matter
* ``/dev/vfio/<group>`` is there while VFIO has a function of the group
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.source import Missing
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import files
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.kernel import GroupState, Written
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.model import ARGUMENTS, options_of
from node_fakes import FakeSystem

PCI, DRIVERS, GROUPS = "/sys/bus/pci/devices", "/sys/bus/pci/drivers", "/sys/kernel/iommu_groups"
RELEASE = "6.1.0-50-amd64"
IMAGE = f"/boot/initrd.img-{RELEASE}"
CARD, AUDIO, TWIN, TWIN_AUDIO = "0000:01:00.0", "0000:01:00.1", "0000:02:00.0", "0000:02:00.1"
UUIDS = {CARD: "GPU-11111111-1111-1111-1111-111111111111", TWIN: "GPU-22222222-2222-2222-2222-222222222222"}
# The beginning of the class that a driver takes.
TABLES = {"nvidia": ("0x10de", "0x03"), "snd_hda_intel": ("0x10de", "0x0403"), "e1000e": ("0x8086", "0x0200")}
TABLES["xhci_hcd"] = ("0x10de", "0x0c03")
MODULES = {"nvidia": "nvidia", "snd_hda_intel": "snd_hda_intel", "vfio-pci": "vfio_pci", "e1000e": "e1000e"}
MODULES["nvgrace_gpu_vfio_pci"] = "nvgrace_gpu_vfio_pci"
ALIASES = """\
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias pci:v000010DEd*sv*sd*bc03sc00i00* nvidia
"""


class NoPods:
    """The kubelet of a machine without one, or with containers that have nodes of cards."""

    def __init__(self, *rows: Any, response: bytes | None = None) -> None:
        self.rows, self.response = list(rows), response

    def processes(self, names: Any) -> list[Any]:
        return []

    def file(self, path: str) -> bytes:
        raise Missing(f"{path} doesn't exist")

    def sockets(self, path: str) -> list[str]:
        return []

    def names(self, path: str, optional: bool = False) -> list[str]:
        raise Missing(f"{path} doesn't exist")

    def pod_resources(self, path: str) -> bytes:
        if self.response is None:
            raise Missing(f"{path} doesn't exist")
        return self.response

    def device_nodes(self) -> Any:
        return self.rows


class Machine(FakeSystem):
    """Two cards of one model, each in a group with its audio function, on nvidia and snd_hda_intel."""

    def __init__(self, tool: str = "initramfs-tools") -> None:
        super().__init__(
            {
                "/etc/os-release": "ID=debian\nVERSION_ID=12\n",
                "/proc/sys/kernel/osrelease": f"{RELEASE}\n",
                f"/boot/vmlinuz-{RELEASE}": "",
                f"/lib/modules/{RELEASE}/modules.alias": ALIASES,
                "/usr/bin/nvidia-smi": "",
                **dict.fromkeys(
                    ("/usr/sbin/update-initramfs", "/usr/sbin/mkinitramfs")
                    if tool == "initramfs-tools"
                    else ("/usr/bin/dracut",),
                    "",
                ),
            }
        )
        self.held: set[str] = set()
        # The kernel's answer about each group; none: by the drivers.
        self.says: GroupState | None = None
        self.persistence: set[str] = set()
        self.unbindable: set[str] = set()
        self.kubelet = NoPods()
        self.clock, self.times, self.contents = 100.0, {}, {}
        self.tool, self.tool_ends = tool, Done(0, "", "")
        for name in ("nvidia", "snd_hda_intel"):
            self.load(name)
        for number, (card, audio) in enumerate(((CARD, AUDIO), (TWIN, TWIN_AUDIO))):
            self.plug(card, "0x10de", "0x2236", "0x030000", str(number + 14))
            self.plug(audio, "0x10de", "0x1aef", "0x040300", str(number + 14))
            self.files[f"/proc/driver/nvidia/gpus/{card}/information"] = (
                f"Model: \t\t NVIDIA A10\nGPU UUID: \t {UUIDS[card]}\nDevice Minor: \t {number}\n"
            )
        self._image()
        self.commands.update(
            {
                "modprobe": self._modprobe,
                "timeout -k 2 20 /usr/bin/nvidia-smi": self._smi,
                "stat -c %.9Y": self._stat,
                "stat -c %i": lambda argv: Done(0, f"{self.files[argv[3]]} 30000000\n", ""),
                "lsinitr": lambda argv: Done(
                    0, "".join(f"{name}\n" for name in self.contents[self.files[argv[1]]]), ""
                ),
                "update-initramfs": self._update,
                "dracut": self._update,
                "ln -T": self._link,
                "mv -f -T": self._move,
                **dict.fromkeys(("sync", "udevadm", "mkdir", "rmdir", "chmod"), Done(0, "", "")),
            }
        )

    def plug(self, address: str, vendor: str, device: str, kind: str, group: str) -> None:
        folder = f"{PCI}/{address}"
        ids = f"v0000{vendor[2:].upper()}d0000{device[2:].upper()}sv000010DEsd00001482"
        self.files.update(
            {
                f"{folder}/vendor": f"{vendor}\n",
                f"{folder}/device": f"{device}\n",
                f"{folder}/class": f"{kind}\n",
                f"{folder}/driver_override": "(null)\n",
                f"{folder}/modalias": f"pci:{ids}bc{kind[2:4]}sc{kind[4:6]}i00\n",
            }
        )
        if group:
            self.links[f"{folder}/iommu_group"] = f"../../../kernel/iommu_groups/{group}"
            self.links[f"{GROUPS}/{group}/devices/{address}"] = f"../../../../devices/pci0000:00/{address}"
        self.probe(address)

    def load(self, driver: str) -> None:
        self.links[f"{DRIVERS}/{driver}/module"] = f"../../../../module/{MODULES.get(driver, driver)}"

    def driver(self, address: str) -> str:
        return self.links.get(f"{PCI}/{address}/driver", "").rpartition("/")[2]

    def override(self, address: str) -> str:
        return self.files[f"{PCI}/{address}/driver_override"].strip()

    def group(self, address: str) -> str:
        return self.links[f"{PCI}/{address}/iommu_group"].rpartition("/")[2]

    def probe(self, address: str) -> None:
        """Look for a driver, as the kernel does for a new function."""
        if self.driver(address):
            return
        override = self.override(address)
        loaded = [name for name in [*TABLES, "vfio-pci", "nvgrace_gpu_vfio_pci"] if self.exists(f"{DRIVERS}/{name}")]
        vendor, kind = (self.files[f"{PCI}/{address}/{name}"].strip() for name in ("vendor", "class"))
        for name in loaded:
            table = TABLES.get(name)
            fits = table is not None and vendor == table[0] and kind.startswith(table[1])
            if name in self.unbindable or (name == "nvidia" and kind.startswith("0x0403")):
                continue
            if name == override or (override == "(null)" and fits):
                self.links[f"{PCI}/{address}/driver"] = f"../../../../bus/pci/drivers/{name}"
                break
        self._nodes()

    def unbind(self, address: str) -> None:
        del self.links[f"{PCI}/{address}/driver"]
        self._nodes()

    def _nodes(self) -> None:
        for path in [path for path in self.files if path.startswith("/dev/vfio/")]:
            del self.files[path]
        for path, link in self.links.items():
            if path.startswith(f"{PCI}/") and path.endswith("/driver") and "vfio" in link:
                self.files[f"/dev/vfio/{self.group(path.split('/')[-2])}"] = ""

    def put(self, path: str, text: str, seconds: float) -> Written:
        self.step()
        if path == "/sys/bus/pci/drivers_probe":
            self.probe(text.strip())
        elif path.endswith("/driver_override"):
            self.files[path] = text if text.strip() else "(null)\n"
        else:
            address = text.strip()
            assert path == f"{PCI}/{address}/driver/unbind", path
            if address in self.held:
                return Written(-1, 4711)
            if not self.driver(address):
                return Written(2)
            self.unbind(address)
        self.step()
        return Written(0)

    def group_state(self, group: str) -> GroupState:
        if f"/dev/vfio/{group}" not in self.files:
            return "absent"
        if f"/dev/vfio/{group}" in self.links.values():
            return "held"
        members = self.names(f"{GROUPS}/{group}/devices")
        viable = all("vfio" in self.driver(address) or not self.driver(address) for address in members)
        return self.says or ("viable" if viable else "not_viable")

    def open(self, pid: int, command: str, *paths: str, group: str = "") -> None:
        """Have a process with these files open."""
        self.files[f"/proc/{pid}/comm"], self.files[f"/proc/{pid}/cgroup"] = f"{command}\n", f"0::{group}\n"
        for number, path in enumerate(paths):
            self.links[f"/proc/{pid}/fd/{number}"] = path

    def close(self, pid: int) -> None:
        for known in (self.files, self.links):
            for path in [path for path in known if path.startswith(f"/proc/{pid}/")]:
                del known[path]

    def boot(self) -> None:
        """Restart: functions lose driver and override, and the image's rule is the first to see them."""
        for address in self.names(PCI):
            self.links.pop(f"{PCI}/{address}/driver", None)
            self.files[f"{PCI}/{address}/driver_override"] = "(null)\n"
        for name in ("nvidia", "snd_hda_intel", "vfio-pci"):
            self.load(name)
        inside = self.contents[self.files[IMAGE]]
        rule = inside.get(files.RULE[1:], "")
        for line in rule.splitlines():
            words = dict(part.split("==", 1) for part in line.split(", ") if "==" in part)
            address = words.get("KERNEL", "").strip('"')
            if address and self.files[f"{PCI}/{address}/device"].strip() == words["ATTR{device}"].strip('"'):
                self.files[f"{PCI}/{address}/driver_override"] = "vfio-pci\n"
        for address in self.names(PCI):
            self.probe(address)

    def present(self, *cards: str, **more: Any) -> dict[str, Any]:
        return self.bind(state="present", cards=list(cards), **more)

    def absent(self, **more: Any) -> dict[str, Any]:
        return self.bind(state="absent", **more)

    def bind(self, check: bool = False, **given: Any) -> dict[str, Any]:
        params = {name: given.get(name, option.get("default")) for name, option in ARGUMENTS.items()}
        return work(options_of(params), check, self, self, self.kubelet)

    def own(self) -> dict[str, str]:
        """The files of /etc and the record."""
        return {path: text for path, text in self.files.items() if path.startswith(("/etc/", "/var/"))}

    def bound(self) -> dict[str, str]:
        return {address: f"{self.driver(address)} {self.override(address)}" for address in self.names(PCI)}

    # ----------------------------------------------------------------------- commands

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.clock += 1
        self.times[path] = self.clock
        super().write(path, text, mode)

    def _modprobe(self, argv: Sequence[str]) -> Done:
        name = argv[-1]
        known = {module: driver for driver, module in MODULES.items()} | {
            "nvgrace_gpu_vfio_pci": "nvgrace_gpu_vfio_pci"
        }
        if name not in known or f"no {name}" in self.files:
            return Done(1, "", f"modprobe: FATAL: Module {name} not found in directory /lib/modules/{RELEASE}\n")
        if "-n" not in argv:
            self.step()
            self.load(known[name])
        return Done(0, "", "")

    def _smi(self, argv: Sequence[str]) -> Done:
        rows = []
        for index, address in enumerate(self.names(PCI)):
            if self.driver(address) == "nvidia":
                uuid = UUIDS.get(address, f"GPU-{index:08}-0000-0000-0000-000000000000")
                mode = "Enabled" if address in self.persistence else "Disabled"
                rows.append(f"{index}, {uuid}, NVIDIA A10, 23028, 0000{address}, 550.54, {mode}, [N/A], [N/A]\n")
        return Done(0, "".join(rows), "")

    def _image(self) -> None:
        self.clock += 1
        inode = str(len(self.contents) + 1)
        names = {"init": ""}
        hook, drop_in = self.files.get(files.HOOK, ""), self.files.get(files.DRACUT, "")
        if "manual_add_modules" in hook or "add_drivers" in drop_in:
            names |= {path[1:]: self.files.get(path, "") for path in (files.RULE, files.MODPROBE)}
            names |= {f"usr/lib/modules/{RELEASE}/kernel/drivers/vfio/pci/vfio-pci.ko": ""}
        self.contents[inode], self.files[IMAGE], self.times[IMAGE] = names, inode, self.clock

    def _update(self, argv: Sequence[str]) -> Done:
        self.step()
        if self.tool_ends.rc == 0:
            before = self.files[IMAGE], self.times[IMAGE]
            self._image()
            if argv[0] == "dracut":
                self.files[argv[2]], self.times[argv[2]] = self.files[IMAGE], self.times[IMAGE]
                self.files[IMAGE], self.times[IMAGE] = before
        self.step()
        return self.tool_ends

    def _stat(self, argv: Sequence[str]) -> Done:
        known = [path for path in argv[3:] if path in self.files]
        rows = [f"{self.times.get(path, 1.0):.9f} 30000000 {path}\n" for path in known]
        return Done(0 if len(known) == len(argv[3:]) else 1, "".join(rows), "")

    def _link(self, argv: Sequence[str]) -> Done:
        self.files[argv[3]] = self.files[argv[2]]
        self.step()
        return Done(0, "", "")

    def _move(self, argv: Sequence[str]) -> Done:
        self.files[argv[4]] = self.files.pop(argv[3])
        self.times[argv[4]] = self.times.get(argv[3], self.clock)
        self.step()
        return Done(0, "", "")
