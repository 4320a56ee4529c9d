# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A driver from NVIDIA's .run file: what is wanted, what is there, and the plan. Pure."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

ARGUMENTS: Json = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "file": {"type": "str"},
    "sha256": {"type": "str"},
    "version": {"type": "str"},
    "flavour": {"type": "str", "choices": ["open", "proprietary"], "default": "open"},
    "remote_path": {"type": "path"},
    "observed": {"type": "dict"},
}
RULES: Json = {"required_if": [("state", "present", ("file", "sha256", "version"))]}

# Packages whose files the installer would overwrite.
DRIVER_PACKAGES = (
    "libnvidia-compute*",
    "libnvidia-ml*",
    "libcuda1",
    "nvidia-driver*",
    "nvidia-kernel-*",
    "nvidia-open-kernel-*",
    "nvidia-smi",
    "nvidia-dkms-*",
    "nvidia-utils*",
    "nvidia-compute-*",
    "nvidia-open-driver-*",
    "linux-modules-nvidia-*",
    "*kmod-nvidia*",
    "xorg-x11-drv-nvidia*",
)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is asked for."""

    present: bool
    version: str = ""
    flavour: str = "open"
    sha256: str = ""

    @property
    def branch(self) -> int:
        return int(self.version.partition(".")[0])


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is there: the version that a .run file installed ("" where none did), and the driver's packages."""

    version: str
    packages: tuple[str, ...]


def wanted(params: Json) -> Wanted:
    """What the module's options ask for.

    :raises BadInput: an option's value can't be served; the sentence names the option.
    """
    if params["state"] == "absent":
        return Wanted(False)
    if not re.fullmatch(r"[0-9]{3,}([.][0-9]+){1,2}", params["version"]):
        raise BadInput(f"version: {params['version']!r} is no driver version such as 580.95.05")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", params["sha256"]):
        raise BadInput("sha256: it isn't 64 hexadecimal digits")
    return Wanted(True, params["version"], params["flavour"], params["sha256"].lower())


def seen(gpu_node: t.Mapping[str, t.Any]) -> Seen:
    """What an observation of the node says."""
    driver = gpu_node["driver"]
    version = str(driver.get("library_version") or driver.get("version") or "unknown")
    return Seen(
        version if "runfile" in (driver.get("others") or ()) else "",
        tuple(driver_packages(gpu_node.get("packages") or ())),
    )


def driver_packages(names: t.Iterable[str]) -> list[str]:
    """Which of these packages are the driver's."""
    return sorted(name for name in names if any(fnmatch.fnmatchcase(name, one) for one in DRIVER_PACKAGES))


def make_plan(what: Wanted, there: Seen) -> Plan:
    """Install unless this very version is there.

    :raises BadInput: packages brought the driver, whose files the installer would overwrite.
    """
    if what.present and there.packages:
        names = ", ".join(there.packages[:3]) + (", …" if len(there.packages) > 3 else "")
        raise BadInput(
            f"file: the driver's packages are installed ({names}), and a .run file would overwrite their files"
        )
    after = what.version if what.present else ""
    if there.version == after:
        return Plan()
    before = f"version: {there.version}\n" if there.version else ""
    after = f"version: {after}\nmodule: {what.flavour}\n" if after else ""
    return Plan((Change("NVIDIA driver from a .run file", before, after),))


def install_command(what: Wanted, path: str) -> list[str]:
    """The installer's command line; it has learned to choose the module's flavour step by step."""
    folder = path.rpartition("/")[0] or "/"
    argv = ["sh", path, "--silent", "--dkms", "--no-x-check", "--no-nouveau-check", f"--tmpdir={folder}"]
    if what.branch >= 560:
        argv.append(f"--kernel-module-type={what.flavour}")
    elif what.branch >= 515:
        argv.append("-m=kernel-open" if what.flavour == "open" else "-m=kernel")
    elif what.flavour == "open":
        raise BadInput(f"flavour: branch {what.branch} has no open module")
    return argv
