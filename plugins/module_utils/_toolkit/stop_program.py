# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A program in place of NVIDIA's runtime, for containers that it started and that outlive the toolkit's removal.

containerd's shim executes the program that started a container for each later command too: without it kubelet can
neither stop the container nor execute anything in it, and its pod stays in ``Terminating`` for ever. NVIDIA's runtime
passes these commands to runc or crun, and so does this program, until the last of these containers is deleted.
https://github.com/containerd/containerd/blob/v2.1.0/cmd/containerd-shim-runc-v2/runc/container.go (``WriteRuntime``)
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host.system import System
from .._packages.steps import PutFile, RemoveFile

# Where containerd keeps the bundles of running containers, in a folder per namespace: on its own, of k3s and RKE2, and
# where dockerd starts it.
TASKS = tuple(
    f"{state}/io.containerd.runtime.v2.task"
    for state in ("/run/containerd", "/run/k3s/containerd", "/run/docker/containerd/daemon")
)
PROGRAM = "/usr/bin/nvidia-container-runtime"
# It has variants: nvidia-container-runtime.cdi and .legacy.
_OF_NVIDIA = re.compile(r"/nvidia-container-runtime(\.\w+)?$")
MARKER = "# Written by kubegpu.share"
# $0 is the path that the shim executes.
TEXT = f"""#!/bin/sh
{MARKER} when it removed NVIDIA's container toolkit, whose runtime had started containers that still run.
# containerd executes this program to stop them. It removes itself with the last of them.
for runtime in runc crun; do
    command -v "$runtime" >/dev/null && break
done
case " $* " in
*" delete "*)
    "$runtime" "$@"
    status=$?
    # containerd removes the container's bundle after this command has ended.
    (
        for seconds in 1 4 25; do
            sleep "$seconds"
            for bundle in {" ".join(f"{folder}/*/*" for folder in TASKS)}; do
                [ "$(cat "$bundle/runtime" 2>/dev/null)" = "$0" ] && continue 2
            done
            rm -f -- "$0"
            exit
        done
    ) </dev/null >/dev/null 2>&1 &
    exit "$status"
    ;;
esac
exec "$runtime" "$@"
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """A path of NVIDIA's runtime.

    :param text: what is there: None without a file, empty for a program that isn't ours.
    :param containers: number of running containers that it started.
    """

    path: str
    text: str | None
    containers: int


def observe(system: System) -> list[JsonObject]:
    """Return the programs that running containers name, and ours, as data."""
    started = {PROGRAM: 0}
    for folder in TASKS:
        for namespace in system.names(folder):
            for container in system.names(f"{folder}/{namespace}"):
                program = system.read(f"{folder}/{namespace}/{container}/runtime") or ""
                if _OF_NVIDIA.search(program):
                    started[program] = started.get(program, 0) + 1
    return [dataclasses.asdict(Program(path, _text(system, path), count)) for path, count in started.items()]


def _text(system: System, path: str) -> str | None:
    if not system.exists(path):
        return None
    text = system.read(path) or ""
    return text if text.partition("\n")[2].startswith(MARKER) else ""


def plan(seen: t.Iterable[t.Mapping[str, t.Any]]) -> Plan:
    """Plan to write the program where containers need it, and to remove it where none does any more.

    :param seen: what ``observe`` returned after the toolkit's packages were removed: a program that is still there and
        isn't ours stays.
    """
    changes = []
    for program in (Program(**program_facts) for program_facts in seen):
        if program.text == "":
            continue
        if program.containers and program.text != TEXT:
            changes.append(Change(program.path, program.text or "", TEXT, PutFile(program.path, TEXT)))
        elif not program.containers and program.text:
            changes.append(Change(program.path, program.text, "", RemoveFile(program.path)))
    return Plan(tuple(changes))


def apply(system: System, changes: Plan) -> None:
    for change in changes.changes:
        if isinstance(change.step, PutFile):
            system.write(change.step.path, change.step.text, mode=0o755)
        else:
            system.remove(change.step.path)
