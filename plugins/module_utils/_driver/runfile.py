# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the installation of the driver from NVIDIA's .run file."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
import typing as t

from .._core.errors import BadInput
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host.system import System

# That this collection installs, or has installed, the driver: another one isn't removed.
RECORD = "/var/lib/kubegpu-share/driver-runfile.json"
ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "file": {"type": "str"},
    "sha256": {"type": "str"},
    "version": {"type": "str"},
    "flavour": {"type": "str", "choices": ["open", "proprietary"], "default": "open"},
    "remote_path": {"type": "path"},
    "observed": {"type": "dict"},
}
VERSION = re.compile(r"[0-9]{3,}([.][0-9]+){1,2}")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
RULES: JsonObject = {"required_if": [("state", "present", ("file", "sha256", "version"))]}

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


class Record(t.NamedTuple):
    """What this collection installs; ``finished``: the installer has ended."""

    version: str
    finished: bool


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the module ``driver_runfile``."""

    present: bool
    version: str = ""
    flavour: str = "open"
    sha256: str = ""

    @property
    def branch(self) -> int:
        return int(self.version.partition(".")[0])


@dataclasses.dataclass(frozen=True)
class State:
    """The version that a .run file installed ("" where none did), the driver's packages, and the role's record."""

    version: str
    packages: tuple[str, ...]
    record: Record | None = None


def record(system: System) -> Record | None:
    """Read the record; None where this collection has installed none. One that can't be parsed is an unfinished one."""
    text = system.read(RECORD)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        return Record(str(fields["version"]), bool(fields["finished"]))
    except (ValueError, KeyError, TypeError):
        return Record("", False)


def options(params: JsonObject) -> Options:
    """Return the module's validated options.

    :raises BadInput: an option is invalid; the message names it.
    """
    if params["state"] == "absent":
        return Options(False)
    if not VERSION.fullmatch(params["version"]):
        raise BadInput(f"version: {params['version']!r} is no driver version such as 580.95.05")
    if not SHA256.fullmatch(params["sha256"]):
        raise BadInput("sha256: it isn't 64 hexadecimal digits")
    return Options(True, params["version"], params["flavour"], params["sha256"].lower())


def observed(gpu_node: t.Mapping[str, t.Any]) -> State:
    """Return the state by the node's facts."""
    driver = gpu_node["driver"]
    version = str(driver.get("library_version") or driver.get("version") or "unknown")
    return State(
        version if "runfile" in (driver.get("others") or ()) else "",
        tuple(driver_packages(gpu_node.get("packages") or ())),
        Record(**driver["runfile"]) if driver.get("runfile") else None,
    )


def driver_packages(names: t.Iterable[str]) -> list[str]:
    """Return those of the packages that belong to the driver."""
    return sorted(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in DRIVER_PACKAGES))


def plan(options: Options, state: State) -> Plan:
    """Return the plan: install, unless exactly this version is installed; remove what this collection has installed.

    :raises BadInput: packages of the driver are installed, whose files the installer would overwrite.
    """
    if options.present and state.packages:
        names = ", ".join(state.packages[:3]) + (", …" if len(state.packages) > 3 else "")
        raise BadInput(
            f"file: the driver's packages are installed ({names}), and a .run file would overwrite their files"
        )
    # The library is there before the kernel module is built: a killed installer left a part.
    unfinished = state.record is not None and not state.record.finished
    done = state.version == options.version and not unfinished if options.present else state.record is None
    if done:
        return Plan()
    have = f"version: {state.version}\n" if state.version else ""
    before = f"{have}installed in part\n" if unfinished else have
    after = f"version: {options.version}\nmodule: {options.flavour}\n" if options.present else ""
    return Plan((Change("NVIDIA driver from a .run file", before, after),))


def install_command(options: Options, path: str) -> list[str]:
    """Return the installer's command line, whose option for the module's flavour depends on the branch.

    :raises BadInput: the branch has no open module.
    """
    folder = path.rpartition("/")[0] or "/"
    argv = ["sh", path, "--silent", "--dkms", "--no-x-check", "--no-nouveau-check", f"--tmpdir={folder}"]
    if options.branch >= 560:
        argv.append(f"--kernel-module-type={options.flavour}")
    elif options.branch >= 515:
        argv.append("-m=kernel-open" if options.flavour == "open" else "-m=kernel")
    elif options.flavour == "open":
        raise BadInput(f"flavour: branch {options.branch} has no open module")
    return argv
