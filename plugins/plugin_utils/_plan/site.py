# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plans of all hosts as one: what restarts, what is drained, how long it takes, and which plays have work."""

from __future__ import annotations

import collections
import dataclasses
import math
import textwrap
import typing as t

from ...module_utils._core.types import JsonObject
from ...module_utils._kube.refs import Ref
from .stages import GPU_NODES, LOCALHOST, MAINTENANCE, STAGES, Stage

CLUSTER = "the cluster"
# About how many seconds a step takes, by role and module, and by module: measured on the lab (two GPU nodes and three
# control planes on two cores) for images, schedulers and objects. What installs, drains and reboots real machines isn't
# measured there: those are assumed.
SECONDS: t.Mapping[str, float] = {
    "driver pinned_packages": 120,
    "pinned_packages": 20,
    "driver_runfile": 240,
    "nouveau": 10,
    "image_import": 17,
    "container_runtime": 5,
    "kube_scheduler": 22,
    "cluster_objects": 8,
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

    :param hosts: by machine, its plan from ``Planner.machine``.
    :param cluster: the plan of the plays of localhost.
    :param schedulers: the hosts whose kube-scheduler is configured, in this order.
    :param verify: the checks run also where nothing changes.
    :param unverified: the checks haven't passed since an earlier run's changes.
    :param alone: the nodes, by host, beside which nothing may change; empty where anything may.
    :param taken_from: whose set-up this run takes over; empty for nobody's.
    """

    hosts: t.Mapping[str, JsonObject]
    cluster: JsonObject
    schedulers: t.Sequence[str] = ()
    verify: bool = False
    unverified: bool = False
    alone: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    taken_from: str = ""

    @property
    def _parts(self) -> dict[str, JsonObject]:
        return {**self.hosts, CLUSTER: self.cluster}

    @property
    def steps(self) -> list[tuple[str, JsonObject]]:
        """All steps, each with its machine or ``CLUSTER``."""
        return [(name, step) for name, plan in self._parts.items() for step in plan["steps"]]

    @property
    def empty(self) -> bool:
        return not self.steps and not self.taken_from

    @property
    def refusals(self) -> list[tuple[str, JsonObject]]:
        return [(name, plan["refusal"]) for name, plan in self._parts.items() if plan["refusal"]]

    @property
    def beyond(self) -> list[tuple[str, JsonObject]]:
        """The steps that would change something else than the nodes of ``alone``, each with those changes only."""
        nodes = {str(Ref("v1", "Node", "", name)) for name in self.alone.values()}
        steps = [(name, step) for name, step in self.steps if self.alone and not _of_nodes(name, step, nodes)]
        return [
            (name, {**step, "changes": [change for change in step["changes"] if change not in nodes]})
            for name, step in steps
        ]

    @property
    def restarts(self) -> dict[str, list[str]]:
        """The hosts on which each service is restarted, a host once for each of its restarts."""
        units: dict[str, list[str]] = {}
        for host, step in self.steps:
            for name in step["restarts"]:
                units.setdefault(name, []).append(host)
        return units

    @property
    def drained(self) -> list[str]:
        return [host for host, plan in self.hosts.items() if MAINTENANCE in plan["groups"]]

    @property
    def seconds(self) -> float:
        """About how long the run takes: machines at once, or one after another where the play does that."""
        total = 0.0
        for stage in STAGES:
            by_host = [sum(map(seconds_of, _of(plan, [stage]))) for plan in self._parts.values()]
            total += sum(by_host) if stage.serial else max(by_host, default=0.0)
        return total + VERIFY_SECONDS if total else 0.0

    def patterns(self) -> dict[str, str | list[str]]:
        """Return, for each play, the hosts that it has to run on; a pattern that matches none where there are none.

        Whatever follows a change is entered, too: only the role knows then whether it has something to do. In the
        cluster that is every play after the first change anywhere.
        """
        hosts_by_play: dict[str, str | list[str]] = {}
        for number, stage in enumerate(STAGES):
            until = STAGES[: number + 1]
            if not stage.groups:
                hosts = [LOCALHOST] if any(_of(plan, until) for plan in self._parts.values()) else []
            elif stage.serial and MAINTENANCE not in stage.groups:
                hosts = [host for host in self.schedulers if host in self.hosts and _of(self.hosts[host], until)]
            else:
                # An earlier play may have changed machines that aren't in this one's groups.
                inside = {host: plan for host, plan in self.hosts.items() if set(plan["groups"]) & set(stage.groups)}
                hosts = [host for host, plan in inside.items() if _of(plan, until)]
            hosts_by_play[stage.name] = hosts or nobody(stage.groups[0] if stage.groups else LOCALHOST)
        hosts_by_play["unverified"] = nobody(LOCALHOST) if self.empty else [LOCALHOST]
        hosts_by_play["verify"] = [LOCALHOST] if self.verify or self.unverified or not self.empty else nobody(LOCALHOST)
        return hosts_by_play

    def result(self) -> JsonObject:
        """Return the plan as data."""
        return {
            "changes": not self.empty,
            "seconds": math.ceil(self.seconds),
            "restarts": self.restarts,
            "drained": self.drained,
            "taken_from": self.taken_from,
            "hosts": {host: _shown(plan) for host, plan in self.hosts.items()},
            "cluster": _shown(self.cluster),
            "patterns": self.patterns(),
        }

    def text(self) -> str:
        """Return the plan for people."""
        lines: list[str] = []
        for name, plan in self._parts.items():
            lines += _lines(name, plan)
        if self.taken_from:
            lines.append(f"Takes over what {self.taken_from} has set up.")
        if self.empty and not self.refusals:
            lines.append(f"Nothing to change: {counted(len(self.hosts), 'machine')} and {CLUSTER} are as configured.")
        if self.unverified:
            lines.append("The checks haven't passed since the last change: site.yml runs them.")
        for name, hosts in self.restarts.items():
            times = collections.Counter(hosts)
            shown = [host if count == 1 else f"{host} ({count} times)" for host, count in times.items()]
            lines.append(f"Restarts {name} on {', '.join(shown)}.")
        if self.drained:
            lines.append(f"Drains, one after another: {', '.join(self.drained)}.")
        for name, step in self.beyond:
            lines += _wrapped(f"REFUSED, since only {', '.join(self.alone)} may change: {told(name, step)}", "")
        if self.steps and not self.refusals:
            machines = counted(len([plan for plan in self.hosts.values() if plan["steps"]]), "machine")
            inside = len(self.cluster["steps"])
            where = f"{len(self.steps) - inside} on {machines}, {inside} in {CLUSTER}"
            lines.append(f"{counted(len(self.steps), 'step')} ({where}); {about(self.seconds)}.")
        return "\n".join(lines) + "\n"


def nobody(pattern: str) -> str:
    """Return a pattern that matches no host; `all` wouldn't exclude a localhost that isn't in the inventory."""
    return f"{pattern}:!{pattern}"


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


def told(name: str, step: JsonObject) -> str:
    """Return in a few words what a step would change where."""
    what = f"{', '.join(step['changes'])} (" if step["changes"] else "("
    return f"{what}role {step['role']}, {'in' if name == CLUSTER else 'on'} {name}: {step['task']})"


def _of_nodes(name: str, step: JsonObject, nodes: set[str]) -> bool:
    """Return whether a step changes a GPU node alone.

    :param name: the machine, or ``CLUSTER``.
    :param nodes: the names of the Node objects, as changes name them.
    """
    if name != CLUSTER:
        return step["stage"] in {stage.name for stage in STAGES if {GPU_NODES, MAINTENANCE} & {*stage.groups}}
    # A step that only waits changes nothing; what can't be planned might change anything.
    waits = step["waits"] and not step["certain"]
    return bool(waits or (step["changes"] and nodes.issuperset(step["changes"])))


def _of(plan: JsonObject, stages: t.Sequence[Stage]) -> list[JsonObject]:
    """Return the steps of a plan in these stages."""
    names = {stage.name for stage in stages}
    return [step for step in plan["steps"] if step["stage"] in names]


def _shown(plan: JsonObject) -> JsonObject:
    return {name: plan[name] for name in ("steps", "refusal", "notes")}


def _lines(name: str, plan: JsonObject) -> list[str]:
    lines = [f"{name}:"] if plan["steps"] or plan["refusal"] or plan["notes"] else []
    for note in dict.fromkeys(plan["notes"]):
        lines += _wrapped(f"note: {note}", "  ")
    for step in plan["steps"]:
        may = "" if step["certain"] or step["waits"] else " (decided when it runs)"
        lines += _wrapped(f"{step['role']}: {step['task']}{may}", "  ")
        names = [*step["changes"], *(f"waits for {wait}" for wait in step["waits"])]
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
