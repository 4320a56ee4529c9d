# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Run NVIDIA's installer, which lies on the node already."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _runfile as runfile
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan, run
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

UNINSTALL = "/usr/bin/nvidia-uninstall"
LOG = "/var/log/nvidia-installer.log"
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)
# In the order in which they can go.
MODULES = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
INSTALL_SECONDS = 3600


def work(params: dict[str, t.Any], check: bool, system: System) -> dict[str, t.Any]:
    """The module; without a file on the node it only says whether one is needed."""
    what = runfile.wanted(params)
    path = params["remote_path"] or ""
    return run(RunfileConcern(system, what, path), check or (what.present and not path))


class RunfileConcern:
    """The one driver that a .run file brings."""

    def __init__(self, system: System, what: runfile.Wanted, path: str) -> None:
        self._system = system
        self._what = what
        self._path = path

    def observe(self) -> runfile.Seen:
        version = ""
        if self._system.exists(UNINSTALL):
            version = self._library() or "unknown"
        return runfile.Seen(version, tuple(runfile.driver_packages(self._packages())))

    def plan(self, there: runfile.Seen) -> Plan:
        return runfile.make_plan(self._what, there)

    def apply(self, there: runfile.Seen, plan: Plan) -> None:
        if self._what.present:
            self._check_file()
            argv = runfile.install_command(self._what, self._path)
        else:
            argv = [UNINSTALL, "--silent"]
        self._unload()
        done = self._system.run(argv, timeout=INSTALL_SECONDS)
        if done.rc != 0:
            raise ShareError(
                f"NVIDIA's installer failed: {self._words() or done.err.strip() or done.rc}",
                rc=done.rc,
                stdout=done.out[-8000:],
                stderr=done.err[-8000:],
            )

    def _library(self) -> str:
        for folder in LIBRARIES:
            for name in self._system.names(folder):
                found = re.fullmatch(r"libnvidia-ml\.so\.([0-9]{3,}[0-9.]*)", name)
                if found:
                    return found.group(1)
        return ""

    def _packages(self) -> list[str]:
        """Names of all packages, by whichever of the two databases is here."""
        if self._system.exists("/var/lib/dpkg/status"):
            done = self._system.run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\\t${Package}\\n"], timeout=30)
            rows = [line.split("\t") for line in done.out.splitlines() if "\t" in line]
            return [row[1] for row in rows if row[0][1:2] in ("i", "W", "t", "U", "F", "H")]
        return self._system.run(["rpm", "-qa", "--qf", "%{NAME}\\n"], timeout=30).out.split()

    def _check_file(self) -> None:
        """What came over the network is looked at where it is run."""
        done = self._system.run(["sha256sum", self._path], timeout=120)
        found = done.out.split()[:1]
        if done.rc != 0 or found != [self._what.sha256]:
            raise BadInput(f"sha256: the file has {found[0] if found else 'none'}, and sha256 says {self._what.sha256}")

    def _unload(self) -> None:
        """The installer refuses while the module is loaded."""
        if not self._system.exists("/sys/module/nvidia"):
            return
        self._system.run(["systemctl", "stop", "nvidia-persistenced.service", "nvidia-fabricmanager.service"])
        loaded = [name for name in MODULES if self._system.exists(f"/sys/module/{name}")]
        done = self._system.run(["modprobe", "-r", *loaded])
        if done.rc != 0:
            raise ShareError(f"the loaded driver is in use and can't be unloaded: {done.err.strip()}")

    def _words(self) -> str:
        """The installer's own reason."""
        errors = [line for line in (self._system.read(LOG) or "").splitlines() if line.startswith("ERROR:")]
        return errors[0][len("ERROR:") :].strip() if errors else ""
