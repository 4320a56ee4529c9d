# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What kube-scheduler asks of a configuration whose fields and types are right: it ends otherwise. Pure."""

from __future__ import annotations

import re
import typing as t

from .._core.types import JsonObject
from .decode import Decoded
from .schema import DEFAULTING_TYPE_SINCE

# Since this minor version the leader is elected by leases only.
LEASES_SINCE = 29
STRATEGIES = ("LeastAllocated", "MostAllocated", "RequestedToCapacityRatio")
# Removed in-tree plugins, with the minor version that removed each.
GONE = dict.fromkeys(("AzureDiskLimits", "CinderLimits", "EBSLimits", "GCEPDLimits"), 34)
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NAME = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)"
_PREFIX = r"(?:[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*)"
_QUALIFIED = re.compile(rf"(?:{_PREFIX}/)?{_NAME}")


def validate(config: Decoded, minor: int, version: str) -> None:
    """Refuse a KubeSchedulerConfiguration that kube-scheduler 1.``minor`` would refuse.

    :raises BadInput: with the line and the path of the field.
    """
    tree = config.tree
    _positive(config, "parallelism", tree.get("parallelism"))
    _within(config, "percentageOfNodesToScore", tree.get("percentageOfNodesToScore"))
    _backoff(config)
    _leader_election(config, tree.get("leaderElection") or {}, minor)
    burst = (tree.get("clientConnection") or {}).get("burst")
    if burst is not None and burst < 0:
        raise config.fault("clientConnection.burst", "is negative")
    _profiles(config, [profile or {} for profile in tree.get("profiles") or []], minor, version)
    validate_extenders(config)


def validate_extenders(config: Decoded) -> None:
    """Refuse extenders that every kube-scheduler would refuse, in a configuration or a Policy."""
    binder = ""
    managed: dict[str, str] = {}
    for number, item in enumerate(config.tree.get("extenders") or []):
        extender: JsonObject = item or {}
        here = f"extenders[{number}]"
        if extender.get("prioritizeVerb") and (extender.get("weight") or 0) <= 0:
            raise config.fault(f"{here}.weight", "isn't greater than 0, as prioritizeVerb asks for")
        if extender.get("bindVerb"):
            if binder:
                raise config.fault(
                    f"{here}.bindVerb", f"is set, and {binder} has one too: only one extender may bind pods"
                )
            binder = here
        for index, resource in enumerate(extender.get("managedResources") or []):
            place = f"{here}.managedResources[{index}].name"
            name = str((resource or {}).get("name") or "")
            if not extended_resource(name):
                raise config.fault(place, f"isn't the name of an extended resource such as example.com/thing: {name!r}")
            if name in managed:
                raise config.fault(place, f"is {name}, which {managed[name]} manages too")
            managed[name] = here


def extended_resource(name: str) -> bool:
    """Return whether a name is that of an extended resource, outside Kubernetes' own domains."""
    prefix, slash, short = name.rpartition("/")
    return (
        bool(_QUALIFIED.fullmatch(name))
        and len(prefix) <= 253
        and len(f"requests.{name}".rpartition("/")[0]) <= 253
        and bool(slash and short)
        and "kubernetes.io/" not in name
        and not name.startswith("requests.")
    )


def _positive(config: Decoded, place: str, value: int | None) -> None:
    if value is not None and value <= 0:
        raise config.fault(place, "isn't greater than 0")


def _within(config: Decoded, place: str, value: int | None, highest: int = 100) -> None:
    if value is not None and not 0 <= value <= highest:
        raise config.fault(place, f"isn't between 0 and {highest}")


def _one_of(config: Decoded, place: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise config.fault(place, f"is {value!r}, which isn't one of {', '.join(words)}")


def _backoff(config: Decoded) -> None:
    first, longest = config.tree.get("podInitialBackoffSeconds"), config.tree.get("podMaxBackoffSeconds")
    _positive(config, "podInitialBackoffSeconds", first)
    if (10 if longest is None else longest) < (1 if first is None else first):
        place = "podInitialBackoffSeconds" if longest is None else "podMaxBackoffSeconds"
        raise config.fault(place, "makes the longest back-off shorter than the first")


def _leader_election(config: Decoded, election: JsonObject, minor: int) -> None:
    if election.get("leaderElect") is False:
        return
    defaults = {"leaseDuration": 15.0, "renewDeadline": 10.0, "retryPeriod": 2.0}
    # Zero means the default.
    times = {name: _seconds(str(election.get(name) or "")) or default for name, default in defaults.items()}
    for name, value in times.items():
        if value < 0:
            raise config.fault(f"leaderElection.{name}", "is negative")
    if times["leaseDuration"] <= times["renewDeadline"]:
        raise config.fault("leaderElection.leaseDuration", "isn't greater than renewDeadline")
    lock = election.get("resourceLock")
    if lock and lock != "leases" and minor >= LEASES_SINCE:
        raise config.fault("leaderElection.resourceLock", f"is {lock!r}, and kube-scheduler 1.{minor} has only leases")


def _profiles(config: Decoded, profiles: list[JsonObject], minor: int, version: str) -> None:
    names: dict[str, int] = {}
    for number, profile in enumerate(profiles):
        here = f"profiles[{number}]"
        name = profile.get("schedulerName")
        if name is None and len(profiles) == 1:
            name = "default-scheduler"
        if not name:
            raise config.fault(f"{here}.schedulerName", "is missing: each of several profiles needs one")
        if name in names:
            raise config.fault(f"{here}.schedulerName", f"is {name}, the same as that of profiles[{names[name]}] is")
        names[name] = number
        _within(config, f"{here}.percentageOfNodesToScore", profile.get("percentageOfNodesToScore"))
        _plugins(config, here, profile, minor)
    sorts = [_queue_sort(profile, version) for profile in profiles]
    for number, names_of in enumerate(sorts):
        if len(names_of) > 1:
            raise config.fault(f"profiles[{number}].plugins.queueSort.enabled", "has more than one plugin")
        if names_of != sorts[0]:
            raise config.fault(f"profiles[{number}].plugins.queueSort", "isn't that of profiles[0]")


def _queue_sort(profile: JsonObject, version: str) -> list[str]:
    asked = ((profile.get("plugins") or {}).get("queueSort") or {}).get("enabled") or []
    names = [str((plugin or {}).get("name")) for plugin in asked]
    # Up to v1beta2 the list contains the default plugin.
    return names or (["PrioritySort"] if version in ("v1alpha2", "v1beta1", "v1beta2") else [])


def _plugins(config: Decoded, here: str, profile: JsonObject, minor: int) -> None:
    for point, chosen in (profile.get("plugins") or {}).items():
        for number, plugin in enumerate((chosen or {}).get("enabled") or []):
            name = (plugin or {}).get("name")
            # kube-scheduler's own check ignores multiPoint and fails later, without the plugin.
            if name in GONE and minor >= GONE[name]:
                raise config.fault(f"{here}.plugins.{point}.enabled[{number}].name", f"is {name}, which was removed")
    seen: set[str] = set()
    for number, arguments in enumerate(profile.get("pluginConfig") or []):
        place = f"{here}.pluginConfig[{number}]"
        name = str((arguments or {}).get("name") or "")
        if name in seen:
            raise config.fault(f"{place}.name", f"is {name}, which already has arguments")
        seen.add(name)
        if name in GONE and minor >= GONE[name]:
            raise config.fault(f"{place}.name", f"is {name}, which was removed")
        check = _ARGS.get(name)
        if check:
            check(config, f"{place}.args", (arguments or {}).get("args") or {}, minor)


def _default_preemption(config: Decoded, place: str, args: JsonObject, _minor: int) -> None:
    share, number = args.get("minCandidateNodesPercentage"), args.get("minCandidateNodesAbsolute")
    _within(config, f"{place}.minCandidateNodesPercentage", share)
    if number is not None and number < 0:
        raise config.fault(f"{place}.minCandidateNodesAbsolute", "is negative")
    if share == 0 and number == 0:
        raise config.fault(f"{place}.minCandidateNodesAbsolute", "is 0, as minCandidateNodesPercentage is")


def _inter_pod_affinity(config: Decoded, place: str, args: JsonObject, _minor: int) -> None:
    _within(config, f"{place}.hardPodAffinityWeight", args.get("hardPodAffinityWeight"))


def _volume_binding(config: Decoded, place: str, args: JsonObject, _minor: int) -> None:
    if (args.get("bindTimeoutSeconds") or 0) < 0:
        raise config.fault(f"{place}.bindTimeoutSeconds", "is negative")


def _balanced_allocation(config: Decoded, place: str, args: JsonObject, _minor: int) -> None:
    seen: set[str] = set()
    for number, resource in enumerate(args.get("resources") or []):
        here = f"{place}.resources[{number}]"
        if (resource or {}).get("weight") not in (None, 0, 1):
            raise config.fault(f"{here}.weight", "isn't 1")
        name = str((resource or {}).get("name"))
        if name in seen:
            raise config.fault(f"{here}.name", f"is {name}, which is there twice")
        seen.add(name)


def _fit(config: Decoded, place: str, args: JsonObject, _minor: int) -> None:
    strategy = args.get("scoringStrategy")
    if strategy is None:
        return
    here = f"{place}.scoringStrategy"
    _one_of(config, f"{here}.type", strategy.get("type") or "", STRATEGIES)
    for number, resource in enumerate(strategy.get("resources") or []):
        if not 0 <= ((resource or {}).get("weight") or 0) <= 100:
            raise config.fault(f"{here}.resources[{number}].weight", "isn't between 1 and 100")
    ratio = strategy.get("requestedToCapacityRatio")
    if strategy.get("type") != "RequestedToCapacityRatio":
        if ratio is not None:
            raise config.fault(f"{here}.requestedToCapacityRatio", "is only for the type RequestedToCapacityRatio")
        return
    if ratio is None:
        raise config.fault(f"{here}.requestedToCapacityRatio", "is missing")
    _shape(config, f"{here}.requestedToCapacityRatio.shape", ratio.get("shape") or [])


def _shape(config: Decoded, place: str, points: list[JsonObject]) -> None:
    """Refuse a scoring function's shape that kube-scheduler would refuse."""
    if not points:
        raise config.fault(place, "has no point")
    last = -1
    for number, point in enumerate(points):
        use = (point or {}).get("utilization") or 0
        _within(config, f"{place}[{number}].utilization", use)
        _within(config, f"{place}[{number}].score", (point or {}).get("score") or 0, 10)
        if use <= last:
            raise config.fault(f"{place}[{number}].utilization", "isn't greater than that of the previous point")
        last = use


def _topology_spread(config: Decoded, place: str, args: JsonObject, minor: int) -> None:
    kind = args.get("defaultingType") or ("System" if minor >= DEFAULTING_TYPE_SINCE else "List")
    _one_of(config, f"{place}.defaultingType", kind, ("System", "List"))
    constraints = args.get("defaultConstraints") or []
    if kind == "System" and constraints:
        raise config.fault(f"{place}.defaultingType", "isn't List, and there are defaultConstraints")
    seen: set[tuple[t.Any, t.Any]] = set()
    for number, item in enumerate(constraints):
        here = f"{place}.defaultConstraints[{number}]"
        constraint: JsonObject = item or {}
        if (constraint.get("maxSkew") or 0) <= 0:
            raise config.fault(f"{here}.maxSkew", "isn't greater than 0")
        if not constraint.get("topologyKey"):
            raise config.fault(f"{here}.topologyKey", "is missing")
        action = constraint.get("whenUnsatisfiable") or ""
        _one_of(config, f"{here}.whenUnsatisfiable", action, ("DoNotSchedule", "ScheduleAnyway"))
        if constraint.get("labelSelector") is not None:
            raise config.fault(f"{here}.labelSelector", "is set, but each pod has its own")
        if (constraint["topologyKey"], action) in seen:
            raise config.fault(here, "is there twice")
        seen.add((constraint["topologyKey"], action))


_ARGS: dict[str, t.Callable[[Decoded, str, JsonObject, int], None]] = {
    "DefaultPreemption": _default_preemption,
    "InterPodAffinity": _inter_pod_affinity,
    "NodeResourcesFit": _fit,
    "NodeResourcesBalancedAllocation": _balanced_allocation,
    "PodTopologySpread": _topology_spread,
    "VolumeBinding": _volume_binding,
}


def _seconds(duration: str) -> float:
    """Return the seconds of a duration in Go's notation."""
    parts = re.findall(r"([0-9.]+)(ns|us|µs|μs|ms|s|m|h)", duration)
    return (-1 if duration.startswith("-") else 1) * sum(float(number) * _UNITS[unit] for number, unit in parts)
