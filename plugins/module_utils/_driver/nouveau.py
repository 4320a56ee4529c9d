# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe nouveau and nova: what is loaded, their blacklist, and the initramfs of every kernel."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._host import open_devices
from .._host.mounts import read_only
from .._host.system import System
from .types import InitramfsImage, Nouveau, NouveauModule, Nova

PATH = "/etc/modprobe.d/blacklist-nouveau.conf"
# nouveau's successor in the kernel, in the order of unloading: https://docs.kernel.org/gpu/nova/
# The one that draws was called nova before it was called nova_drm.
NOVA = ("nova", "nova_drm", "nova_core")
# The two lines of NVIDIA's installation guide: the first prevents loading it, the second prevents it from using a GPU.
# The others are there before the kernel is: an update that brings nova would take the cards at its first boot.
DIRECTIVES = ("blacklist nouveau", "options nouveau modeset=0", *(f"blacklist {name}" for name in NOVA))

# dracut puts /etc/modprobe.d only into images for one host. Cloud machines have images for every host, nouveau inside.
DRACUT_PATH = "/etc/dracut.conf.d/kubegpu-nouveau.conf"


# The kernel's own drivers, which keep a card from NVIDIA's, by module; with the name of each at a sentence's beginning.
IN_KERNEL = {"nouveau": "Nouveau", NOVA[-1]: "Nova (nova_core)"}


def module_of(driver: str | None) -> str | None:
    """Return the module of a driver on PCI: nova's has been NovaCore there, and may get its module's name."""
    return NOVA[-1] if driver and driver.lower().replace("-", "").replace("_", "") == "novacore" else driver


def directives(text: str) -> list[str]:
    """Return a modprobe.d file's directives with single blanks, without comments."""
    lines = (" ".join(line.split("#", 1)[0].split()) for line in text.splitlines())
    return [line for line in lines if line]


def blacklisted(text: str) -> bool:
    """Return whether a modprobe.d file prevents loading nouveau."""
    return DIRECTIVES[0] in directives(text)


# The program that lists an image's content.
LISTERS = {"initramfs-tools": "lsinitramfs", "dracut": "lsinitrd"}
FAMILIES = ("debian", "redhat", "suse")

# No boot loader may take a kept or an incomplete image. grub-mkconfig, kernel-install's BLS entries and zipl search
# vmlinuz-* and then the image named exactly after that release; rEFInd and scripts take every name that begins with
# "init". None of them, nor the kernel packages' own globs, matches a hidden name.
KEPT = "/boot/.kubegpu-old-initramfs-"
BUILT = "/boot/.kubegpu-new-initramfs-"

# A rebuild may make an image smaller (one for every host becomes one for this host), but not by more than this factor.
SMALLEST = 4


@dataclasses.dataclass(frozen=True)
class Content:
    """What an image contains; ``nouveau``: nouveau or nova, ``blacklist``: the file that was searched.

    :param lacking: of the modules that were searched, those that it doesn't contain.
    """

    init: bool
    nouveau: bool
    blacklist: bool
    lacking: tuple[str, ...] = ()


def tool_of(family: str, exists: t.Callable[[str], bool]) -> str | None:
    """Return the tool that the kernel packages' own scripts call; None where there is none.

    Debian's dracut may be installed beside the remains of initramfs-tools.
    """
    if family not in FAMILIES:
        return None
    dracut = any(exists(f"{folder}/dracut") for folder in ("/usr/bin", "/usr/sbin", "/sbin"))
    if family == "debian" and exists("/usr/sbin/update-initramfs") and exists("/usr/sbin/mkinitramfs"):
        return "dracut" if dracut and exists("/etc/kernel/postinst.d/dracut") else "initramfs-tools"
    return "dracut" if dracut else None


def image_of(family: str, release: str) -> str:
    """Return the path of one kernel's image; those of crash dumps and rescue kernels have other names and stay."""
    if family == "redhat":
        return f"/boot/initramfs-{release}.img"
    return f"/boot/{'initrd' if family == 'suse' else 'initrd.img'}-{release}"


def content(text: str, file: str, modules: t.Sequence[str] = ()) -> Content:
    """Parse the output of lsinitramfs (names only) or lsinitrd (as ls -l).

    :param file: the file to search.
    :param modules: the kernel modules to search.
    """

    def has(name: str) -> bool:
        return re.search(rf"(?:^|\s)(?:\.?/)?{name}(?: -> .*)?$", text, re.MULTILINE) is not None

    return Content(
        init=has("init"),
        nouveau=re.search(r"/(?:nouveau|nova[-_]core)\.ko(?:\.\w+)?$", text, re.MULTILINE) is not None,
        blacklist=has(re.escape(file.lstrip("/"))),
        lacking=tuple(name for name in modules if not re.search(_module_file(name), text, re.MULTILINE)),
    )


def _module_file(name: str) -> str:
    """Return a regular expression of a module's file; blanks of its name are one or the other."""
    return "/" + re.sub("[-_]", "[-_]", name) + r"\.ko(?:\.\w+)?$"


def image_error(old_bytes: int, new_bytes: int, inside: Content | None, file: str) -> str:
    """Return why a new image can't replace the old one; empty where it can.

    :param inside: None where the lister can't read the image.
    :param file: the file that it must contain, with the modules that were searched; empty for none.
    """
    if inside is None:
        return "can't be read"
    if new_bytes * SMALLEST < old_bytes:
        return f"has {new_bytes} bytes where the old one has {old_bytes}"
    if not inside.init:
        return "contains no init"
    if file and not inside.blacklist:
        return f"doesn't contain {file}"
    if file and inside.lacking:
        return f"doesn't contain module {inside.lacking[0]}"
    return ""


# modprobe reads all of them; a file in an earlier directory hides files of the same name in later ones.
FOLDERS = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")
MODULES = "/sys/module"
MODULE = f"{MODULES}/nouveau"
PCI_DRIVERS = "/sys/bus/pci/drivers"
CONSOLES = "/sys/class/vtconsole"
FRAMEBUFFERS = "/sys/class/graphics"
# Open in displays and programs that draw; a console has none.
DEVICES = ("/dev/dri/", "/dev/fb")


def observe(system: System, family: str, installed: t.Sequence[str]) -> Nouveau:
    """Return the section ``nouveau``.

    It lists each image of an installed kernel, which takes 0.2 s with initramfs-tools and 2 s with dracut.

    :param installed: releases of the kernels that this node boots; none in a container.
    """
    files = {}
    for folder in FOLDERS:
        for name in system.names(folder):
            text = system.read(f"{folder}/{name}") if name.endswith(".conf") else None
            if text is not None and (f"{folder}/{name}" == PATH or blacklisted(text)):
                files[f"{folder}/{name}"] = text
    tool = tool_of(family, system.exists)
    images = _images(system, family, tool, installed)
    boot = [f"/boot/{name}" for name in system.names("/boot")] if installed else []
    return {
        **_module(system),
        "nova": _nova(system),
        "blacklisted": any(blacklisted(text) for text in files.values()),
        "files": files,
        "tool": tool,
        "dracut": system.read(DRACUT_PATH),
        "images": images,
        "leftovers": [path for path in boot if path.startswith((KEPT, BUILT))],
        "boot_free": system.free_bytes("/boot") if images else None,
        "boot_read_only": read_only(system.read("/proc/self/mounts") or "", "/boot") if images else False,
    }


def _module(system: System) -> NouveauModule:
    """Return the module and all that prevents unloading it."""
    loaded = system.exists(MODULE)
    count = system.read(f"{MODULE}/refcnt")
    seen: NouveauModule = {
        "loaded": loaded,
        "refcnt": int(count) if count is not None else None,
        "holders": [],
        "users": [],
        "consoles": [],
        "framebuffers": [],
    }
    if loaded and seen["refcnt"] != 0:
        names = [name for name in system.names(FRAMEBUFFERS) if name.startswith("fb") and name[2:].isdigit()]
        users = open_devices.users(system, lambda path: path.startswith(DEVICES))
        seen["holders"] = system.names(f"{MODULE}/holders")
        seen["users"] = sorted({user["command"] for user in users})
        seen["consoles"] = [name for name in system.names(CONSOLES) if _shows_framebuffer(system, name)]
        seen["framebuffers"] = [(system.read(f"{FRAMEBUFFERS}/{name}/name") or "").strip() for name in names]
    return seen


def _nova(system: System) -> Nova:
    """Return nova's modules; what uses them beside each other isn't in their lists of holders."""
    loaded = [name for name in NOVA if system.exists(f"{MODULES}/{name}/refcnt")]
    counts = {name: int(system.read(f"{MODULES}/{name}/refcnt") or 0) for name in loaded}
    by_own = {name: len({*system.names(f"{MODULES}/{name}/holders")}.intersection(loaded)) for name in loaded}
    on_pci = any(module_of(name) == NOVA[-1] for name in system.names(PCI_DRIVERS))
    return {
        "modules": loaded,
        "in_use": any(counts[name] > by_own[name] for name in loaded),
        "built_in": on_pci and not loaded,
    }


def _shows_framebuffer(system: System, name: str) -> bool:
    kind, bound = (system.read(f"{CONSOLES}/{name}/{file}") or "" for file in ("name", "bind"))
    return "frame buffer" in kind and bound.strip() == "1"


def image_content(system: System, tool: str, path: str, file: str, modules: t.Sequence[str] = ()) -> Content | None:
    """Return an image's content; None where the tool's lister can't read it.

    :param system: the machine with the image.
    :param tool: of the images.
    :param path: of the image.
    :param file: the file to search.
    :param modules: the kernel modules to search.
    """
    done = system.run([LISTERS[tool], path], timeout=120)
    return content(done.out, file, modules) if done.rc == 0 else None


@dataclasses.dataclass(frozen=True)
class Listed:
    """One kernel's image; ``newer``: it is as new as the files that it is made from."""

    path: str
    release: str
    size: int
    newer: bool
    kept: bool


def listed(system: System, family: str, installed: t.Sequence[str], files: t.Sequence[str]) -> list[Listed]:
    """Return each installed kernel's image.

    :param files: what it is made from; those that don't exist don't count.
    """
    if family not in FAMILIES:
        return []
    # A rescue kernel has its modules only in its image, which can't be rebuilt.
    paths = {image_of(family, release): release for release in installed if system.exists(f"/lib/modules/{release}")}
    paths = {path: release for path, release in paths.items() if system.exists(path)}
    if not paths:
        return []
    # The command reports missing files and continues.
    done = system.run(["stat", "-c", "%.9Y %s %n", *files, *paths])
    rows = [line.split(" ", 2) for line in done.out.splitlines()]
    written = {path: float(when) for when, _size, path in rows}
    sizes = {path: int(size) for _when, size, path in rows}
    since = max((written.get(file, 0.0) for file in files), default=0.0)
    return [
        Listed(path, release, sizes[path], written[path] >= since, system.exists(KEPT + release))
        for path, release in paths.items()
        if path in sizes
    ]


def _images(system: System, family: str, tool: str | None, installed: t.Sequence[str]) -> list[InitramfsImage]:
    """Return each installed kernel's image, and whether it contains the current file."""
    images: list[InitramfsImage] = []
    for image in listed(system, family, installed, [PATH]):
        inside = image_content(system, tool, image.path, PATH) if tool is not None else None
        images.append(
            {
                "path": image.path,
                "release": image.release,
                "bytes": image.size,
                "newer": image.newer,
                "nouveau": inside.nouveau if inside is not None else None,
                "blacklist": inside.blacklist if inside is not None else None,
                "kept": image.kept,
            }
        )
    return images
