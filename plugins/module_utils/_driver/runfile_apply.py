# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run NVIDIA's installer from a file on the node."""

from __future__ import annotations

import json
import posixpath

from .._core.errors import BadInput, ShareError
from .._core.plan import Plan, run
from .._core.types import JsonObject
from .._host.system import System
from . import runfile
from .library import library_version

UNINSTALL = "/usr/bin/nvidia-uninstall"
LOG = "/var/log/nvidia-installer.log"
# In the order in which they can be unloaded.
MODULES = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
INSTALL_SECONDS = 3600


def work(params: JsonObject, check: bool, system: System) -> JsonObject:
    """Reconcile; without a file on the node only report whether one is needed."""
    options = runfile.options(params)
    path = params["remote_path"] or ""
    return run(RunfileReconciler(system, options, path), check or (options.present and not path))


class RunfileReconciler:
    """The driver that a .run file installs."""

    def __init__(self, system: System, options: runfile.Options, path: str) -> None:
        self._system = system
        self._options = options
        self._path = path

    def observe(self) -> runfile.State:
        version = ""
        if self._system.exists(UNINSTALL):
            version = library_version(self._system) or "unknown"
        packages = tuple(runfile.driver_packages(self._packages()))
        return runfile.State(version, packages, runfile.record(self._system))

    def plan(self, state: runfile.State) -> Plan:
        return runfile.plan(self._options, state)

    def apply(self, state: runfile.State, plan: Plan) -> None:
        if self._options.present:
            self._check_file()
            argv = runfile.install_command(self._options, self._path)
            self._record(finished=False)
            self._execute(argv)
            self._record(finished=True)
            return
        if state.version:
            self._execute([UNINSTALL, "--silent"])
        self._system.remove(runfile.RECORD)
        # Fails while other records are in it.
        self._system.run(["rmdir", posixpath.dirname(runfile.RECORD)])

    def _record(self, finished: bool) -> None:
        folder = posixpath.dirname(runfile.RECORD)
        done = self._system.run(["mkdir", "-p", "-m", "0700", folder])
        if done.rc != 0:
            raise ShareError(f"{folder} can't be created: {done.err.strip()}")
        text = json.dumps(runfile.Record(self._options.version, finished)._asdict())
        self._system.write(runfile.RECORD, text, 0o600)

    def _execute(self, argv: list[str]) -> None:
        """Run the installer or the uninstaller, without a loaded module.

        :raises ShareError: it failed.
        """
        self._unload()
        done = self._system.run(argv, timeout=INSTALL_SECONDS)
        if done.rc != 0:
            raise ShareError(
                f"NVIDIA's installer failed: {self._reason() or done.err.strip() or done.rc}",
                rc=done.rc,
                stdout=done.out[-8000:],
                stderr=done.err[-8000:],
            )

    def _packages(self) -> list[str]:
        """Return the names of all packages in dpkg's or rpm's database."""
        if self._system.exists("/var/lib/dpkg/status"):
            done = self._system.run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\\t${Package}\\n"], timeout=30)
            rows = [line.split("\t") for line in done.out.splitlines() if "\t" in line]
            return [row[1] for row in rows if row[0][1:2] in ("i", "W", "t", "U", "F", "H")]
        return self._system.run(["rpm", "-qa", "--qf", "%{NAME}\\n"], timeout=30).out.split()

    def _check_file(self) -> None:
        """Validate the file where it is executed."""
        done = self._system.run(["sha256sum", self._path], timeout=120)
        sums = done.out.split()[:1]
        if done.rc != 0 or sums != [self._options.sha256]:
            raise BadInput(f"sha256: the file has {sums[0] if sums else 'none'}, and sha256 is {self._options.sha256}")

    def _unload(self) -> None:
        """Unload the modules: the installer refuses while they are loaded."""
        if not self._system.exists("/sys/module/nvidia"):
            return
        self._system.run(["systemctl", "stop", "nvidia-persistenced.service", "nvidia-fabricmanager.service"])
        loaded = [name for name in MODULES if self._system.exists(f"/sys/module/{name}")]
        done = self._system.run(["modprobe", "-r", *loaded])
        if done.rc != 0:
            raise ShareError(f"the loaded driver is in use and can't be unloaded: {done.err.strip()}")

    def _reason(self) -> str:
        """Return the installer's first error."""
        errors = [line for line in (self._system.read(LOG) or "").splitlines() if line.startswith("ERROR:")]
        return errors[0][len("ERROR:") :].strip() if errors else ""
