# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files that give cards to VFIO at boot: the udev rule, and how it gets into the initramfs. Pure.

Of two cards of one model only the one at the rule's address is taken: there is no line with ids of a model.
"""

from __future__ import annotations

import typing as t

from .model import GENERIC, Function, module_of

RULE = "/etc/udev/rules.d/10-kubegpu-vfio.rules"
MODPROBE = "/etc/modprobe.d/kubegpu-vfio.conf"
HOOK = "/etc/initramfs-tools/hooks/kubegpu-vfio"
DRACUT = "/etc/dracut.conf.d/kubegpu-vfio.conf"
PATHS = (RULE, MODPROBE, HOOK, DRACUT)
EXECUTABLE = (HOOK,)

MARK = "# Written by role kubegpu.share.passthrough, which replaces and removes it.\n"
# Drivers that may load before the rule is read, from a list of modules in an image: with VFIO's first, it is there.
EARLY = ("nouveau", "nova_core", "nvidiafb", "nvidia", "snd_hda_intel", "xhci_pci", "i2c_nvidia_gpu")
# What the VFIO driver needs beside itself. Modules that they depend on, as vfio_virqfd up to Linux 6.1, are added to an
# image by its tool, which knows the kernel.
WITH = ("vfio", "vfio_iommu_type1")


def modules(targets: t.Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules of these drivers.

    :param targets: the driver of each function, by address.
    """
    return tuple(sorted({module_of(driver) for driver in targets.values()} | {module_of(GENERIC)}))


def texts(targets: t.Mapping[str, str], functions: t.Mapping[str, Function], tool: str | None) -> dict[str, str | None]:
    """Return the text of each file; None for one that must not be there.

    :param targets: the driver of each function, by address; empty for none.
    :param tool: of the machine's images.
    """
    wanted: dict[str, str | None] = dict.fromkeys(PATHS)
    if not targets:
        return wanted
    names = modules(targets)
    wanted[RULE] = MARK + "".join(_rule(functions[address], driver) for address, driver in sorted(targets.items()))
    wanted[MODPROBE] = MARK + "".join(f"softdep {early} pre: {' '.join(names)}\n" for early in EARLY)
    if tool == "initramfs-tools":
        wanted[HOOK] = _hook(names)
    elif tool == "dracut":
        wanted[DRACUT] = (
            f'{MARK}add_drivers+=" {" ".join((*WITH, *names))} "\ninstall_items+=" {RULE} {MODPROBE} /bin/sh "\n'
        )
    return wanted


def _rule(function: Function, driver: str) -> str:
    """Return the rule of one function: another device at its address stays as it is.

    The last command asks the kernel to look for a driver again: where VFIO's was loaded already, its loading binds
    nothing, and the function would stay without a driver.
    """
    match = f'ACTION=="add", SUBSYSTEM=="pci", KERNEL=="{function.address}"'
    ids = f'ATTR{{vendor}}=="{function.vendor}", ATTR{{device}}=="{function.device}"'
    probe = "RUN+=\"/bin/sh -c 'echo %k > /sys/bus/pci/drivers_probe'\""
    return f'{match}, {ids}, ATTR{{driver_override}}="{driver}", RUN{{builtin}}+="kmod load {driver}", {probe}\n'


def _hook(names: t.Sequence[str]) -> str:
    return f"""\
#!/bin/sh
{MARK}case "$1" in
  prereqs) echo udev; exit 0 ;;
esac
# Where somebody has removed them by hand, the images of all kernels are still built, without them.
[ -e {RULE} ] && [ -e {MODPROBE} ] || exit 0
. /usr/share/initramfs-tools/hook-functions
manual_add_modules {" ".join((*WITH, *names))}
mkdir -p "$DESTDIR/etc/udev/rules.d" "$DESTDIR/etc/modprobe.d"
cp -p {RULE} "$DESTDIR{RULE}"
cp -p {MODPROBE} "$DESTDIR{MODPROBE}"
"""
