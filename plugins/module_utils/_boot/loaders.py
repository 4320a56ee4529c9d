# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe how a machine boots: its loader, the files that decide the kernel's arguments, the entry that boots next."""

from __future__ import annotations

import json
import typing as t

from .._core.errors import ShareError
from .._host.cached_reader import names, text, whole
from .._host.facts import os_release
from .._host.system import System, target
from . import entries, layout
from .types import BootFacts, Entry, Record

RECORD = "/var/lib/kubegpu-share/kernel-arguments.json"
PENDING = "/var/lib/kubegpu-share/kernel-arguments-pending.json"
# What this collection changes arguments with.
LOADERS: t.Mapping[str, str] = {
    "grub-drop-in": "GRUB with drop-ins and update-grub (Debian, Ubuntu)",
    "grub-default": "GRUB by /etc/default/grub and grub-mkconfig (SUSE, and GRUB without loader entries)",
    "grub-bls": "GRUB with entries of the Boot Loader Specification (Fedora, Red Hat's family)",
    "systemd-boot": "systemd-boot with loader entries",
    "kernelstub": "systemd-boot by kernelstub (Pop!_OS)",
    "proxmox": "systemd-boot by proxmox-boot-tool",
    "rpm-ostree": "rpm-ostree",
}
# Why it doesn't, and where the user sets them instead.
REFUSALS: t.Mapping[str, str] = {
    "none": "no boot loader is found on it",
    "several": "it has files of several boot loaders, and the firmware doesn't say which one it booted by",
    "image": "its system is an image with a boot loader of its own",
    "machine-config": "OpenShift's Machine Config Operator manages it, with kubegpu.share.machine_config",
    "hand-written": "its grub.cfg isn't made by grub-mkconfig, which would replace it",
    "no-next": "the entry that GRUB boots next isn't one of Linux, or can't be told",
    "no-tool": "the program that makes GRUB's menu isn't installed",
    "unified": "it boots unified kernel images, which contain their arguments and are signed",
    "sdbootutil": "sdbootutil makes its entries from /etc/kernel/cmdline, and may have sealed disk keys to them "
    "(sdbootutil update-all-entries)",
    "transactional": "its root is read-only (GRUB_CMDLINE_LINUX of /etc/default/grub, transactional-update grub.cfg)",
    "proxmox-grub": "proxmox-boot-tool keeps its GRUB on partitions that aren't mounted (/etc/default/grub.d, "
    "proxmox-boot-tool refresh)",
    "ostree": "it is an ostree system without rpm-ostree",
    "extlinux": "it boots by extlinux.conf or U-Boot",
    "unreadable": "its boot configuration can't be read",
}
# Systems whose loader a package of the image brings.
IMAGES = frozenset(("talos", "bottlerocket", "cos", "flatcar", "nixos", "ubuntu-core"))
EFIVARS = "/sys/firmware/efi/efivars"
LOADER_GUID = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
GRUB_CONFIGS = ("/boot/grub2/grub.cfg", "/boot/grub/grub.cfg", "/etc/grub2-efi.cfg", "/etc/grub2.cfg")
BLS = "/boot/loader/entries"
ESPS = ("/efi", "/boot/efi", "/boot")
PROXMOX = "/etc/kernel/proxmox-boot-uuids"
EXTLINUX = ("/boot/extlinux/extlinux.conf", "/boot/firmware/cmdline.txt", "/boot/boot.scr", "/boot/armbianEnv.txt")
TOOLS = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
UPDATE_GRUB = "update-grub"
MKCONFIGS = ("grub2-mkconfig", "grub-mkconfig")
# Entries beyond these belong to no machine.
MOST_ENTRIES = 64
MOST_CHARACTERS = 64 << 10


def tool(system: System, name: str) -> str:
    """Return a program's path; empty where it isn't installed."""
    return next((f"{folder}/{name}" for folder in TOOLS if system.exists(f"{folder}/{name}")), "")


def efi_variable(system: System, name: str) -> str:
    """Return a variable of the boot loader interface, which is UTF-16 after four bytes; empty without it."""
    content = whole(system, f"{EFIVARS}/{name}-{LOADER_GUID}") or ""
    return content[4:].replace("\0", "").strip()


def observe(system: System, distribution: t.Mapping[str, t.Any]) -> BootFacts:
    """Return the section ``boot``.

    :param distribution: the section of ``gpu_node``.
    """
    boot: BootFacts = {
        "loader": "",
        "refused": "",
        "found": [],
        "firmware": "efi" if system.exists("/sys/firmware/efi") else "bios" if _is_pc(distribution) else "",
        "now": text(system, "/proc/cmdline"),
        "next": None,
        "files": {},
        "config": "",
        "environment": "",
        "kernelopts": None,
        "record": None,
        "record_error": "",
        "pending": system.exists(PENDING),
    }
    try:
        boot["record"] = record(system)
    except ShareError as error:
        boot["record_error"] = str(error)
    try:
        _Detector(system, distribution, boot).detect()
    except ShareError as error:
        boot["loader"], boot["refused"], boot["found"] = "", "unreadable", [str(error)]
    return boot


def _is_pc(distribution: t.Mapping[str, t.Any]) -> bool:
    return distribution.get("arch") == "amd64"


def record(system: System) -> Record | None:
    """Read the record; None where nothing was added.

    :raises ShareError: it is there, and isn't one.
    """
    content = system.read(RECORD)
    if content is None:
        return None
    try:
        fields = json.loads(content)
        files = {str(path): _recorded(row) for path, row in fields["files"].items()}
        kernelopts = _recorded(fields["kernelopts"]) if fields["kernelopts"] else None
        added = fields["added"]
        known = all(layout.is_place(path) for path in files)
        if known and isinstance(added, list) and all(argument.split() == [argument] for argument in added):
            return {"added": added, "files": files, "kernelopts": kernelopts}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ShareError(
        f"{RECORD} isn't a record of this collection; move it away, and remove the arguments that it had added by hand"
    )


def _recorded(row: t.Any) -> t.Any:
    before = row["before"]
    if not (before is None or isinstance(before, str)):
        raise ValueError
    return {"before": before, "after": str(row["after"])}


class _Detector:
    """Finds the loader and fills the section."""

    def __init__(self, system: System, distribution: t.Mapping[str, t.Any], boot: BootFacts) -> None:
        self._system = system
        self._distribution = distribution
        self._boot = boot
        self._machine_id = text(system, "/etc/machine-id")

    def detect(self) -> None:
        if self._refused_system():
            return
        if self._system.exists("/run/ostree-booted"):
            self._ostree()
            return
        self._find()
        for path in self._boot["record"]["files"] if self._boot["record"] and self._boot["loader"] else ():
            # It may have been another loader's.
            if path not in self._boot["files"]:
                self._take(path)

    def _find(self) -> None:
        grub, boot_entries = self._grub_config(), self._esp_entries()
        info = efi_variable(self._system, "LoaderInfo")
        found = [grub] if grub else []
        found += sorted({path.rpartition("/")[0] for path in boot_entries})
        if info.startswith("systemd-boot") or (boot_entries and not grub):
            self._systemd_boot(boot_entries)
        elif grub and (info.startswith("GRUB") or not boot_entries):
            self._grub(grub)
        elif grub:
            self._refuse("several", found)
        else:
            odd = [path for path in EXTLINUX if self._system.exists(path)]
            self._refuse("extlinux" if odd else "none", odd or ([info] if info else []))

    def _refuse(self, code: str, found: t.Sequence[str]) -> None:
        self._boot["loader"], self._boot["refused"], self._boot["found"] = "", code, list(found)

    def _refused_system(self) -> bool:
        name = str(self._distribution.get("id", ""))
        if name == "rhcos" or self._system.exists("/etc/machine-config-daemon/currentconfig"):
            self._refuse("machine-config", [name])
        elif name in IMAGES:
            self._refuse("image", [name])
        elif tool(self._system, "transactional-update") and self._read_only():
            self._refuse("transactional", ["transactional-update"])
        elif tool(self._system, "sdbootutil") and self._loader_type() not in ("grub2", "grub2-efi"):
            self._refuse("sdbootutil", [self._loader_type() or "sdbootutil"])
        return bool(self._boot["refused"])

    def _read_only(self) -> bool:
        """Return whether the root is mounted read-only; the later mount at a place counts."""
        mounts = [line.split(" ") for line in text(self._system, "/proc/self/mounts").splitlines()]
        options = [fields[3].split(",") for fields in mounts if len(fields) > 3 and fields[1] == "/"]
        return bool(options) and "ro" in options[-1]

    def _loader_type(self) -> str:
        return os_release(text(self._system, "/etc/sysconfig/bootloader")).get("LOADER_TYPE", "")

    # ----------------------------------------------------------------- rpm-ostree

    def _ostree(self) -> None:
        if not tool(self._system, "rpm-ostree"):
            self._refuse("ostree", [])
            return
        done = self._system.run(["rpm-ostree", "kargs"], timeout=60)
        arguments = (done.out.strip().splitlines() or [""])[-1]
        if done.rc != 0 or not arguments:
            self._refuse("unreadable", [f"rpm-ostree kargs: {(done.err or done.out).strip()[-300:]}"])
            return
        self._found("rpm-ostree", {**_NEXT, "id": "next deployment", "path": "rpm-ostree", "arguments": arguments})

    def _found(self, loader: str, entry: Entry | None) -> None:
        self._boot["loader"], self._boot["next"] = loader, entry

    # ----------------------------------------------------------------- systemd-boot

    def _esp_entries(self) -> dict[str, str]:
        """Return the loader entries beside a systemd-boot's configuration or program."""
        files: dict[str, str] = {}
        for esp in ESPS:
            if any(self._system.exists(f"{esp}/{name}") for name in ("loader/loader.conf", "EFI/systemd")):
                files.update(self._read_entries(f"{esp}/loader/entries"))
        # The other partition of kernels, which systemd-boot reads too.
        return {**files, **self._read_entries(BLS)} if files else {}

    def _read_entries(self, folder: str) -> dict[str, str]:
        found = [name for name in self._system.names(folder) if name.endswith(".conf")]
        if len(found) > MOST_ENTRIES:
            raise ShareError(f"{folder} has more than {MOST_ENTRIES} entries")
        texts = {f"{folder}/{name}": self._system.read(f"{folder}/{name}") for name in found}
        return {path: _bounded(path, content) for path, content in texts.items() if content is not None}

    def _systemd_boot(self, files: dict[str, str]) -> None:
        if self._system.exists(PROXMOX):
            self._proxmox()
            return
        unified = [f"{esp}/EFI/Linux" for esp in ESPS if self._has_unified(f"{esp}/EFI/Linux")]
        ours = layout.own_entries(files, self._machine_id)
        if unified or not ours:
            self._refuse("unified" if unified else "none", unified or [*files])
            return
        self._boot["files"] = {path: files[path] for path in ours}
        loader = "systemd-boot"
        if self._take(layout.KERNELSTUB):
            loader = "kernelstub"
        self._take(layout.CMDLINE)
        self._found(
            loader,
            entries.next_of_systemd_boot(
                files,
                efi_variable(self._system, "LoaderEntryOneShot"),
                efi_variable(self._system, "LoaderEntryDefault"),
                self._configured_default(),
            ),
        )

    def _has_unified(self, folder: str) -> bool:
        return any(name.lower().endswith(".efi") for name in names(self._system, folder))

    def _configured_default(self) -> str:
        for esp in ESPS:
            content = text(self._system, f"{esp}/loader/loader.conf")
            for line in content.splitlines():
                key, _blank, value = line.strip().partition(" ")
                if key == "default":
                    return value.strip()
        return ""

    def _take(self, path: str) -> bool:
        content = self._system.read(path)
        if content is not None:
            self._boot["files"][path] = _bounded(path, content)
        return content is not None

    def _proxmox(self) -> None:
        if not self._take(layout.CMDLINE):
            self._refuse("unreadable", [f"{layout.CMDLINE} doesn't exist"])
            return
        words = " ".join(layout.command_lines(self._boot["files"][layout.CMDLINE])).split()
        entry: Entry = {**_NEXT, "id": "all", "path": layout.CMDLINE, "arguments": " ".join(words), "proven": False}
        self._found("proxmox", entry)

    # ----------------------------------------------------------------- GRUB

    def _grub_config(self) -> str:
        """Return the path of GRUB's menu; a file of the EFI partition that only leads to it isn't one."""
        for path in GRUB_CONFIGS:
            content = whole(self._system, target(self._system, path)) or ""
            if "menuentry " in content or entries.uses_entries(content):
                self._boot["config"] = path
                self._menu = content
                return path
        return ""

    def _grub(self, config: str) -> None:
        if self._system.exists(PROXMOX):
            self._refuse("proxmox-grub", [PROXMOX])
            return
        folder = target(self._system, config).rpartition("/")[0]
        block = next((path for path in (f"{folder}/grubenv", "/boot/grub2/grubenv") if self._system.exists(path)), "")
        variables = entries.variables(whole(self._system, target(self._system, block)) or "") if block else {}
        self._boot["environment"] = block
        if entries.uses_entries(self._menu):
            self._bls(variables)
            return
        if not entries.generated(self._menu):
            self._refuse("hand-written", [config])
            return
        entry = entries.next_of_menu(config, self._menu, variables)
        if entry is None:
            self._refuse("no-next", [config])
            return
        drop_ins = self._distribution.get("family") == "debian" and self._system.exists(layout.DROP_INS)
        if drop_ins and tool(self._system, UPDATE_GRUB):
            loader = "grub-drop-in"
        elif self._system.exists(layout.DEFAULT) and mkconfig(self._system):
            loader = "grub-default"
        else:
            self._refuse("no-tool", [UPDATE_GRUB if drop_ins else " or ".join(MKCONFIGS)])
            return
        self._take(layout.DEFAULT)
        for name in names(self._system, layout.DROP_INS) if drop_ins else ():
            if name.endswith(".cfg"):
                self._take(f"{layout.DROP_INS}/{name}")
        self._found(loader, entry)

    def _bls(self, variables: dict[str, str]) -> None:
        files = self._read_entries(BLS)
        ours = layout.own_entries(files, "")
        if not ours:
            self._refuse("none", [BLS])
            return
        self._boot["files"] = {path: files[path] for path in ours}
        for path in (layout.CMDLINE, layout.DEFAULT):
            self._take(path)
        self._boot["kernelopts"] = variables.get("kernelopts")
        self._found("grub-bls", entries.next_of_bls(self._menu, variables, files))


def _bounded(path: str, content: str) -> str:
    """Return a file's text.

    :raises ShareError: it is longer than any that a person or a package writes.
    """
    if len(content) > MOST_CHARACTERS:
        raise ShareError(f"{path} has more than {MOST_CHARACTERS >> 10} Ki characters")
    return content


_NEXT: Entry = {"id": "", "path": "", "arguments": "", "once": False, "proven": True}


def mkconfig(system: System) -> str:
    """Return the path of the program that makes GRUB's menu; empty without one."""
    return next((path for path in (tool(system, name) for name in MKCONFIGS) if path), "")
