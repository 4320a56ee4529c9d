# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan NVIDIA's device plugins for cards that VFIO has: which nodes get one, and what each announces then. Pure.

Both plugins look for cards once, when they start (sandbox-device-plugin v0.0.5, pkg/device_plugin/device_plugin.go and
cdi.go; kubevirt-gpu-device-plugin v1.6.0, pkg/device_plugin/device_plugin.go): so a node gets its label only after its
cards are bound, and its pod is deleted where the cards aren't those that it started with.
"""

from __future__ import annotations

import collections
import hashlib
import json
import typing as t

from .._contracts import operator_labels
from .._contracts.backends import KATA
from .._contracts.card_layouts import Problem
from .._contracts.gpushare import node_resource
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._passthrough.facts import functions_of
from .._passthrough.model import GENERIC, Function, Record, parse_record

KUBEVIRT = "kubevirt"
PREFIX = "sandbox_device_plugin_"
# No kubelet may set it (see RESTRICTED of the back ends): its value is the kind of the plugin that runs on the node.
LABEL = "node-restriction.kubernetes.io/kubegpu-sandbox"
# On a node: a digest of the cards with which its plugin was started.
CARDS = "kubegpu.share/sandbox-cards"
VENDOR = "nvidia.com"
SWITCHES = "nvidia.com/nvswitch"


class Options(t.TypedDict):
    """The role's variables, without their prefix.

    ``resources`` are the names that are waited for; empty for what the alias says, or with KubeVirt ``selectors``:
    resources by vendor and device, and by the type of a vGPU. ``facts`` has ``gpu_node`` of
    observed nodes, ``live`` the cluster's nodes, ``pods`` the plugin's, and ``policies`` the GPU Operator's
    ClusterPolicies. With ``assume_bound`` cards that aren't bound yet are, once role passthrough has run.
    """

    kind: str
    nodes: t.Sequence[str]
    alias: str
    resources: t.Sequence[str]
    selectors: t.Mapping[str, str]
    facts: t.Mapping[str, t.Any]
    live: t.Sequence[JsonObject]
    pods: t.Sequence[JsonObject]
    policies: t.Sequence[JsonObject]
    assume_bound: bool


class Group(t.TypedDict):
    """Nodes that announce the same resources, as definitions of their labels."""

    resources: dict[str, int]
    nodes: list[str]
    definitions: list[JsonObject]


class Result(t.TypedDict):
    """The plan; of the rest nothing holds where there are problems.

    ``restart`` are pods of nodes whose cards aren't those that the plugin started with; ``operated``: the GPU Operator
    runs this kind of plugin, and this role only says which nodes are whose.
    """

    problems: list[JsonObject]
    groups: list[Group]
    restart: list[str]
    operated: bool


# Of a ClusterPolicy, by kind: what deploys the plugin (NVIDIA/gpu-operator v26.7.0, controllers/state_manager.go).
PARTS = {KATA: "kataSandboxDevicePlugin", KUBEVIRT: "sandboxDevicePlugin"}


def operated(policies: t.Iterable[JsonObject], kind: str) -> bool:
    """Return whether the GPU Operator runs this kind of plugin itself."""
    for policy in policies:
        spec = policy.get("spec") or {}
        mode = (spec.get("sandboxWorkloads") or {}).get("mode") or KUBEVIRT
        if mode == kind and all(operator_labels.runs(spec, part) for part in ("sandboxWorkloads", PARTS[kind])):
            return True
    return False


def bound_cards(functions: t.Iterable[Function]) -> list[Function]:
    """Return the cards that a VFIO driver has, by their addresses."""
    bound = (function for function in functions if function.card and function.vfio)
    return sorted(bound, key=lambda function: function.address)


class Vgpu(t.NamedTuple):
    """A vGPU that is a mediated device, by the name of its type."""

    uuid: str
    type: str


def _vgpus(facts: t.Mapping[str, t.Any]) -> list[Vgpu]:
    """Return a node's vGPUs of the kind that NVIDIA's plugin for KubeVirt knows."""
    rows = []
    for card in facts.get("gpus") or ():
        names = {row["id"]: str(row["name"]) for row in card["vgpu_host"]["types"]}
        rows += [Vgpu(vgpu["uuid"], names.get(vgpu["type"], "")) for vgpu in card["vgpu_host"]["vgpus"] if vgpu["uuid"]]
    return sorted(rows)


def digest_of(functions: t.Iterable[Function], vgpus: t.Iterable[Vgpu] = ()) -> str:
    """Return a digest of what a plugin finds: bound cards and NVSwitches with their drivers and groups, and vGPUs."""
    rows = [
        [function.address, function.device, function.driver, function.group]
        for function in functions
        if function.vfio and (function.card or function.switch)
    ]
    rows += [[vgpu.uuid, vgpu.type, "mdev", ""] for vgpu in vgpus]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


def plan(options: Options) -> Result:
    """Return which nodes get the plugin and what they announce then, or what makes it impossible."""
    problems: list[Problem] = []
    theirs = operated(options["policies"], options["kind"])
    groups: dict[tuple[tuple[str, int], ...], Group] = {}
    live = {str(node["metadata"]["name"]): node for node in options["live"]}
    wanted: dict[str, tuple[str, dict[str, int]]] = {}
    for name in options["nodes"]:
        try:
            digest, resources = _node(name, options)
        except Problem as problem:
            problems.append(problem)
            continue
        wanted[name] = digest, resources
        group = groups.setdefault(tuple(resources.items()), Group(resources=resources, nodes=[], definitions=[]))
        group["nodes"].append(name)
        group["definitions"].append(_definition(name, digest, options["kind"], theirs))
    return {
        "problems": [problem.result() for problem in problems],
        "groups": list(groups.values()),
        "restart": [] if theirs else _restart(options["pods"], live, wanted),
        "operated": theirs,
    }


def _definition(name: str, digest: str, kind: str, theirs: bool) -> JsonObject:
    """Return what a node gets: labels, and what its plugin started with.

    :param theirs: the plugin is the GPU Operator's, which has labels of its own.
    """
    metadata: JsonObject = {"name": name}
    if not theirs:
        metadata |= {"labels": {LABEL: kind}, "annotations": {CARDS: digest}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


def _node(name: str, options: Options) -> tuple[str, dict[str, int]]:
    """Return a digest of a node's cards, and what it announces by them: 0 for a number that isn't known.

    :raises Problem: its cards aren't bound, or the plugin wouldn't announce them as they are.
    """
    facts, where = options["facts"].get(name) or {}, f"{PREFIX}nodes"
    functions, missing = _functions(name, facts)
    cards = bound_cards(functions)
    vgpus = _vgpus(facts) if options["kind"] == KUBEVIRT else []
    if missing and not options["assume_bound"]:
        raise Problem(
            "not_bound",
            where,
            f"node {name}: {', '.join(missing)} is to be a virtual machine's, and no VFIO driver has it; run role "
            "passthrough for the node, or reboot the node where that says so",
        )
    if not cards and not vgpus:
        if options["assume_bound"]:
            return digest_of(functions), dict.fromkeys(_names(options), 0)
        text = f"node {name} has no card with a VFIO driver, so its plugin would announce nothing; run role passthrough"
        raise Problem("none_bound", where, text)
    if options["kind"] == KATA:
        _suits_kata(name, cards, options["alias"])
    return digest_of(functions, vgpus), _announced(functions, cards, vgpus, options)


def _functions(name: str, facts: t.Mapping[str, t.Any]) -> tuple[list[Function], list[str]]:
    """Return NVIDIA's functions of a node, and the addresses of recorded cards that no VFIO driver has.

    :raises Problem: the node wasn't observed, or its record can't be read.
    """
    where, seen = f"{PREFIX}nodes", facts.get("passthrough")
    if not facts:
        raise Problem("not_observed", where, f"node {name} wasn't observed; it has to be a host of the group gpu_nodes")
    if seen is None:
        raise Problem(
            "unreadable", where, f"node {name}: the record of role passthrough can't be read, see that role's error"
        )
    functions = functions_of(seen)
    try:
        record = parse_record(seen["record"]) if seen["record"] is not None else Record()
    except ShareError as error:
        raise Problem("unreadable", where, f"node {name}: {error}") from error
    recorded = {function.address for function in record.functions}
    unbound = (function for function in functions if function.card and not function.vfio)
    return functions, sorted(function.address for function in unbound if function.address in recorded)


def _suits_kata(name: str, cards: t.Sequence[Function], alias: str) -> None:
    """Refuse cards that NVIDIA's sandbox device plugin leaves out or announces wrongly.

    :raises Problem: there is such a card.
    """
    where = f"{PREFIX}nodes"
    others = [f"{card.address} ({card.driver})" for card in cards if card.driver != GENERIC]
    if others:
        raise Problem(
            "other_driver",
            where,
            f"node {name}: the sandbox device plugin knows cards with vfio-pci alone, not {', '.join(others)}; "
            "set passthrough_driver: vfio-pci for the node",
        )
    models = sorted({card.device for card in cards})
    if alias and len(models) > 1:
        raise Problem(
            "mixed_models",
            where,
            f"node {name} has cards of several models ({', '.join(models)}), each of which the plugin registers as "
            f"{VENDOR}/{alias}, and kubelet keeps the last; give virtual machines cards of one model, or set "
            f"{PREFIX}alias to an empty text",
        )
    groups = [card.group for card in cards]
    shared = sorted({group for group in groups if groups.count(group) > 1})
    if shared:
        raise Problem(
            "shared_group",
            where,
            f"node {name} has several cards in IOMMU group {', '.join(shared)}, which the plugin would write as CDI "
            "devices of one name, and its file would be refused; cards of one group can't go to pods of Kata",
        )


def _names(options: Options) -> list[str]:
    """Return the names of the resources that are waited for."""
    if options["resources"]:
        return list(options["resources"])
    return [f"{VENDOR}/{options['alias']}"] if options["kind"] == KATA and options["alias"] else []


def _announced(
    functions: t.Sequence[Function], cards: t.Sequence[Function], vgpus: t.Sequence[Vgpu], options: Options
) -> dict[str, int]:
    names = _names(options)
    if options["kind"] == KUBEVIRT and not names:
        own = {selector.upper(): resource for selector, resource in options["selectors"].items()}
        ids = [f"{card.vendor}:{card.device}".replace("0x", "") for card in cards] + [vgpu.type for vgpu in vgpus]
        counted = collections.Counter(own[selector.upper()] for selector in ids if selector.upper() in own)
        if counted:
            return dict(sorted(counted.items()))
    if not names:
        named = "in kubevirt_devices_pci, or " if options["kind"] == KUBEVIRT else ""
        raise Problem(
            "no_resource",
            f"{PREFIX}resources",
            "it is empty, so that nothing would show whether the cards are announced; name the resources of the models "
            f"{named}here",
        )
    if options["resources"] or options["kind"] == KUBEVIRT:
        return dict.fromkeys(names, 0)
    switches = sum(function.switch and function.driver == GENERIC for function in functions)
    return {names[0]: len(cards), **({SWITCHES: switches} if switches else {})}


def _restart(
    pods: t.Sequence[JsonObject], live: t.Mapping[str, JsonObject], wanted: t.Mapping[str, tuple[str, dict[str, int]]]
) -> list[str]:
    """Return the names of pods that don't know their node's cards: others than at their start, or fewer are left.

    A plugin that has seen a card's device file go doesn't see it come back.
    """
    names = []
    for pod in pods:
        node = str((pod.get("spec") or {}).get("nodeName") or "")
        if node not in wanted or node not in live or pod["metadata"].get("deletionTimestamp"):
            continue
        digest, resources = wanted[node]
        other = (live[node]["metadata"].get("annotations") or {}).get(CARDS) != digest
        fewer = any(0 < node_resource(live[node], name, "allocatable") < number for name, number in resources.items())
        if other or fewer:
            names.append(str(pod["metadata"]["name"]))
    return sorted(names)
