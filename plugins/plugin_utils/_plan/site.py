# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The plans of all hosts as one: what restarts, what is drained, how long it takes, and which plays have work."""

from __future__ import annotations

import dataclasses
import math
import textwrap
import typing as t

from ...module_utils._core.types import JsonObject
from .stages import LOCALHOST, MAINTENANCE, STAGES, Stage

CLUSTER = "the cluster"
# Seconds of a step by role and module, and by module.
SECONDS: t.Mapping[str, float] = {
    "driver pinned_packages": 150,
    "pinned_packages": 30,
    "driver_runfile": 300,
    "nouveau": 40,
    "image_import": 10,
    "container_runtime": 10,
    "kube_scheduler": 20,
    "cluster_objects": 15,
    "k8s_drain": 60,
    "kernel_driver": 20,
    "reboot": 180,
}
# A step of another module.
OTHER_SECONDS = 3.0
# What verify.yml's checks of the cluster add.
VERIFY_SECONDS = 5.0
NAMES_SHOWN = 4
WIDTH = 100


@dataclasses.dataclass(frozen=True)
class SitePlan:
    """The plan of a run of site.yml.

    :param hosts: by host, what the action ``role_plan`` returned.
    :param verify: the checks run also where nothing changes.
    :param schedulers: the hosts whose kube-scheduler is configured, in this order.
    """

    hosts: t.Mapping[str, JsonObject]
    schedulers: t.Sequence[str] = ()
    verify: bool = False

    @property
    def steps(self) -> list[tuple[str, JsonObject]]:
        return [(host, step) for host, plan in self.hosts.items() for step in plan["steps"]]

    @property
    def empty(self) -> bool:
        return not self.steps

    @property
    def refusals(self) -> list[tuple[str, JsonObject]]:
        return [(host, plan["refusal"]) for host, plan in self.hosts.items() if plan["refusal"]]

    @property
    def restarts(self) -> dict[str, list[str]]:
        """The hosts on which each service is restarted."""
        found: dict[str, list[str]] = {}
        for host, step in self.steps:
            for name in step["restarts"]:
                found[name] = [*(one for one in found.get(name, []) if one != host), host]
        return found

    @property
    def drained(self) -> list[str]:
        return [host for host, plan in self.hosts.items() if MAINTENANCE in plan["groups"]]

    @property
    def seconds(self) -> float:
        """About how long the run takes: machines at once, or one after another where the play does that."""
        total = 0.0
        for stage in STAGES:
            by_host = [sum(map(seconds_of, self._of(host, [stage]))) for host in self.hosts]
            total += sum(by_host) if stage.serial else max(by_host, default=0.0)
        return total + VERIFY_SECONDS if total else 0.0

    def _of(self, host: str, stages: t.Sequence[Stage]) -> list[JsonObject]:
        names = {stage.name for stage in stages}
        return [step for step in self.hosts[host]["steps"] if step["stage"] in names]

    def patterns(self) -> dict[str, str | list[str]]:
        """Return, for each play, the hosts that it has to run on; a pattern that matches none where there are none.

        Whatever follows a change is entered, too: only the role knows then whether it has something to do. In the
        cluster that is every play after the first change anywhere.
        """
        found: dict[str, str | list[str]] = {}
        for number, stage in enumerate(STAGES):
            until = STAGES[: number + 1]
            if not stage.groups:
                hosts = [LOCALHOST] if any(self._of(host, until) for host in self.hosts) else []
            elif stage.serial and MAINTENANCE not in stage.groups:
                hosts = [host for host in self.schedulers if host in self.hosts and self._of(host, until)]
            else:
                hosts = [host for host in self.hosts if host != LOCALHOST and self._of(host, until)]
            found[stage.name] = hosts or f"{stage.groups[0] if stage.groups else LOCALHOST}:!all"
        found["verify"] = [LOCALHOST] if self.verify or not self.empty else f"{LOCALHOST}:!all"
        return found

    def result(self) -> JsonObject:
        """Return the plan as data."""
        return {
            "changes": not self.empty,
            "seconds": math.ceil(self.seconds),
            "restarts": self.restarts,
            "drained": self.drained,
            "hosts": {
                host: {name: plan[name] for name in ("steps", "refusal", "notes")} for host, plan in self.hosts.items()
            },
            "patterns": self.patterns(),
        }

    def text(self) -> str:
        """Return the plan for people."""
        lines: list[str] = []
        for host, plan in self.hosts.items():
            lines += _host_lines(host, plan)
        if self.empty and not self.refusals:
            machines = len([host for host in self.hosts if host != LOCALHOST])
            lines.append(f"Nothing to change: {counted(machines, 'machine')} and {CLUSTER} are as configured.")
        for name, hosts in self.restarts.items():
            lines.append(f"Restarts {name} on {', '.join(map(_title, hosts))}.")
        if self.drained:
            lines.append(f"Drains, one after another: {', '.join(self.drained)}.")
        if self.steps and not self.refusals:
            changed = len({host for host, _step in self.steps})
            lines.append(f"{counted(len(self.steps), 'step')} on {counted(changed, 'host')}; {about(self.seconds)}.")
        return "\n".join(lines) + "\n"


def seconds_of(step: t.Mapping[str, t.Any]) -> float:
    """Return about how many seconds a step takes."""
    module = str(step["module"]).rpartition(".")[2]
    return SECONDS.get(f"{step['role']} {module}", SECONDS.get(module, OTHER_SECONDS))


def about(seconds: float) -> str:
    """Return a duration as words."""
    return f"about {math.ceil(seconds)} s" if seconds < 60 else f"about {math.ceil(seconds / 60)} min"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _title(host: str) -> str:
    return CLUSTER if host == LOCALHOST else host


def _host_lines(host: str, plan: JsonObject) -> list[str]:
    lines = [f"{_title(host)}:"] if plan["steps"] or plan["refusal"] or plan["notes"] else []
    for note in dict.fromkeys(plan["notes"]):
        lines += _wrapped(f"note: {note}", "  ")
    for step in plan["steps"]:
        may = "" if step["certain"] or step["waits"] else " (decided when it runs)"
        lines += _wrapped(f"{step['role']}: {step['task']}{may}", "  ")
        names = [*step["changes"], *(f"waits for {one}" for one in step["waits"])]
        more = f"; and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        if names:
            lines += _wrapped("; ".join(names[:NAMES_SHOWN]) + more, "      ")
    if plan["refusal"]:
        refused = plan["refusal"]
        lines += _wrapped(f"REFUSED by {refused['role']}: {refused['reason']}", "  ")
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
