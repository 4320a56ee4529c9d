# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""See NVIDIA's kernel modules and who uses them, and swap the loaded ones for the installed ones."""

from __future__ import annotations

import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _kernel_driver as driver
from ansible_collections.kubegpu.share.plugins.module_utils import _open_devices as open_devices
from ansible_collections.kubegpu.share.plugins.module_utils import _runner
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._node_info_host import kernel
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

# Which services to start again, written down before the first one stops.
RECORD = "/var/lib/kubegpu-share/kernel-driver.json"
MODULE = f"/sys/module/{driver.MODULE}"
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
# A process with such a file in its memory speaks the old driver's language.
MAPPED = r"/lib(?:nvidia-ml|cuda)\.so"
GRACE_SECONDS = 10


def unfinished(system: System) -> bool:
    """Whether a run was killed while services were stopped."""
    return system.exists(RECORD)


def observe(system: System, want: driver.Wish) -> Json:
    """All that the plan is made from."""
    loaded = _loaded(system)
    return {
        "container": not kernel(system)["installed"],
        "loaded": loaded,
        "installed": _installed(system),
        "library": _library(system),
        "modules": _with_dependents(system, driver.MODULE) if system.exists(MODULE) else [],
        "services": _services(system, want),
        "users": open_devices.users(system, lambda path: path.startswith("/dev/nvidia"), MAPPED) if loaded else [],
        "unfinished": _record(system),
    }


def _loaded(system: System) -> Json | None:
    text = system.read("/proc/driver/nvidia/version") or ""
    found = re.search(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]+)", text)
    version = (system.read(f"{MODULE}/version") or "").strip() or (found.group(1) if found else "")
    source = (system.read(f"{MODULE}/srcversion") or "").strip()
    return {"version": version, "srcversion": source} if version else None


def _installed(system: System) -> Json | None:
    """The module that the running kernel would load now."""
    done = system.run(["modinfo", driver.MODULE], timeout=10)
    fields = dict(re.findall(r"^(version|srcversion):\s*(\S+)$", done.out, re.MULTILINE)) if done.rc == 0 else {}
    if "version" not in fields:
        return None
    return {"version": fields["version"], "srcversion": fields.get("srcversion", "")}


def _library(system: System) -> str:
    for folder in LIBRARIES:
        target = system.link(f"{folder}/libnvidia-ml.so.1") or ""
        found = re.search(r"\.so\.([0-9]+\.[0-9.]+)$", target)
        if found:
            return found.group(1)
    return ""


def _with_dependents(system: System, name: str) -> list[str]:
    """A module after all that stand on it."""
    order: list[str] = []

    def visit(module: str) -> None:
        for holder in system.names(f"/sys/module/{module}/holders"):
            visit(holder)
        if module not in order:
            order.append(module)

    visit(name)
    return order


def _services(system: System, want: driver.Wish) -> dict[str, bool]:
    """Which of the services there are, and whether they run."""
    if not system.exists("/run/systemd/system"):
        return {}
    names = dict.fromkeys([*driver.KUBELETS, *driver.SERVICES, *want.services])
    units = [f"{name}.service" for name in names]
    done = system.run(["systemctl", "show", "-p", "Id,LoadState,ActiveState", *units], timeout=30)
    found = {}
    for block in done.out.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("LoadState") == "loaded":
            found[fields["Id"].rpartition(".")[0]] = fields.get("ActiveState") in ("active", "activating")
    return found


def _record(system: System) -> Json | None:
    text = system.read(RECORD)
    if text is None:
        return None
    try:
        found: Json = json.loads(text)
    except ValueError:
        # Only a record that was never complete looks so, and then nothing had been stopped.
        return {"services": [], "modules": []}
    return found


class KernelDriverConcern:
    """NVIDIA's kernel modules on the machine that the module runs on."""

    def __init__(self, want: driver.Wish, system: System) -> None:
        self._want = want
        self._system = system
        self._refused = ""

    def observe(self) -> Json:
        return {**observe(self._system, self._want), "refused": self._refused}

    def plan(self, seen: Json) -> _runner.Plan:
        return driver.plan(self._want, seen)

    def apply(self, seen: Json, plan: _runner.Plan) -> None:
        swap = next(change.step for change in plan.changes if change.step is not None)
        self._keep(seen, swap)
        older = (seen["unfinished"] or {"services": []})["services"]
        # What a killed run stopped too: its record goes.
        start = swap.start or tuple(dict.fromkeys([*reversed(older), *reversed(swap.stop)]))
        self._stop(swap.stop, start)
        self._end(swap.end)
        if swap.remove:
            done = self._system.run(["modprobe", "-r", *swap.remove], timeout=120)
            # Something that no process shows: a console, another kernel module, a process that has just begun.
            self._refused = f"the kernel keeps them: {_last(done.err)}" if done.rc != 0 else ""
        if self._want.unloaded and not self._refused and (swap.remove or seen["container"]):
            return
        failed = self._load(swap.load) if swap.load else ""
        # Also where the module can't be loaded: a node without its kubelet would be worse off.
        for name in start:
            failed = self._start(name) or failed
        self._forget()
        if failed:
            raise ShareError(failed)

    def _stop(self, names: t.Sequence[str], start: t.Sequence[str]) -> None:
        """Stop services; where one doesn't, all of them run again."""
        try:
            for name in names:
                self._service("stop", name)
        except ShareError:
            failures = [self._start(name) for name in start]  # one that fails doesn't keep the others from starting
            # The record stays for what doesn't start: the next run tries again.
            if not any(failures):
                self._forget()
            raise

    def _forget(self) -> None:
        self._system.remove(RECORD)
        self._system.run(["rmdir", RECORD.rpartition("/")[0]])

    def _keep(self, seen: Json, swap: driver.Swap) -> None:
        older = seen["unfinished"] or {"services": [], "modules": []}
        record = {
            "services": list(dict.fromkeys([*older["services"], *swap.stop])),
            "modules": list(dict.fromkeys([*older["modules"], *seen["modules"]])),
        }
        done = self._system.run(["mkdir", "-p", "-m", "0700", RECORD.rpartition("/")[0]])
        if done.rc != 0:
            raise ShareError(f"{RECORD.rpartition('/')[0]} can't be made: {_last(done.err)}")
        self._system.write(RECORD, json.dumps(record), 0o600)

    def _service(self, verb: str, name: str) -> None:
        done = self._system.run(["systemctl", verb, f"{name}.service"], timeout=300)
        if done.rc != 0:
            raise ShareError(f"systemctl {verb} {name} failed: {_last(done.err)}")

    def _start(self, name: str) -> str:
        try:
            self._service("start", name)
        except ShareError as error:
            return str(error)
        return ""

    def _end(self, pids: t.Sequence[int]) -> None:
        """As kubelet ends a container: asked first, then made to."""
        left = [str(pid) for pid in pids]
        for signal, seconds in (("TERM", GRACE_SECONDS), ("KILL", GRACE_SECONDS)):
            if left:
                self._system.run(["kill", f"-{signal}", *left])
            for _second in range(seconds):
                left = [pid for pid in left if self._system.exists(f"/proc/{pid}")]
                if not left:
                    return
                self._system.run(["sleep", "1"])

    def _load(self, names: t.Sequence[str]) -> str:
        done = self._system.run(["modprobe", "-a", *names], timeout=120)
        return f"modprobe -a {' '.join(names)} failed: {_last(done.err)}" if done.rc != 0 else ""


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it didn't say why"])[-1]


def work(params: Json, check: bool, system: System) -> Json:
    """Run the concern and add what only a reboot can do."""
    want = driver.wish(params)
    concern = KernelDriverConcern(want, system)
    result = _runner.run(concern, check)
    seen = concern.observe()
    reason = driver.in_use(want, seen)
    return {
        **result,
        "reboot_required": bool(reason),
        "reason": reason,
        "users": driver.blockers(want, seen) if reason else [],
        "container": seen["container"],
    }
