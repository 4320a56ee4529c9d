# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan NVIDIA's device plugin on a cluster: its configurations, its chart's values, and its nodes' labels. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing as t

from .._contracts import backends, operator_labels
from .._contracts import nvidia_plugin as contract
from .._contracts.card_layouts import Problem
from .._contracts.gpushare import NODE_LABEL, NODE_LABEL_VALUES
from .._core.types import JsonObject
from .._driver.nvidia_smi import root_of
from .._images.names import repository_and_tag
from .._runtime.properties import injects_cdi
from .configurations import CDI_CRI, ENVVAR, Configuration, configurations, parse_layouts

PREFIX = "nvidia_device_plugin_"
RUNTIME = "nvidia"
# The labels of nodes that another back end's plugin serves: two never run on one node, whoever else sets gpu.present.
OTHERS: t.Mapping[str, list[str]] = {NODE_LABEL: sorted(NODE_LABEL_VALUES), "gpu": ["on"]}
# Another back end may have taken the operator's plugin off a node by these.
OPERATOR_LABELS: t.Mapping[str, str] = {
    operator_labels.DEVICE_PLUGIN: "true",
    operator_labels.VALIDATOR: "true",
}
_DEFAULT_RUNTIME = re.compile(r"""(?m)^[ \t]*default_runtime_name[ \t]*=[ \t]*["']([^"'\n]*)["'][ \t\r]*$""")
_HANDLER = re.compile(r"""(?m)^[ \t]*\[.*\.runtimes\.["']?nvidia["']?\][ \t\r]*$""")


class Images(t.TypedDict, total=False):
    """Options of images that an inventory may leave out.

    ``nfd_image`` is node feature discovery's, ``pull_secrets`` are names of Secrets.
    """

    nfd_image: str
    pull_secrets: t.Sequence[str]


class Options(Images):
    """The role's variables, without their prefix.

    ``operator`` is whether the GPU Operator runs the plugin, ``facts`` has ``gpu_node`` of observed nodes. With
    ``assume_runtime`` nodes whose container runtime has no way yet get NVIDIA's as the default, by role runtime.
    """

    nodes: t.Sequence[str]
    configurations: JsonObject
    default: str
    node_configurations: t.Mapping[str, str]
    mig_layouts: JsonObject
    operator: bool
    injection: str
    runtime_class: str
    tolerations: t.Sequence[JsonObject]
    image: str
    gfd: bool
    values: JsonObject
    facts: t.Mapping[str, t.Any]
    assume_runtime: bool


class NodePlan(t.TypedDict):
    """One node: its labels, and the resources that it announces then."""

    name: str
    labels: dict[str, str]
    mig_layout: str
    resources: dict[str, int]


class Group(t.TypedDict):
    """Nodes that announce the same resources, as definitions of their labels."""

    resources: dict[str, int]
    nodes: list[str]
    definitions: list[JsonObject]


class Result(t.TypedDict):
    """The plan; of the rest nothing holds where there are problems.

    ``values`` are the chart's. ``config_maps`` are what the GPU Operator's plugin and MIG manager read, by their use;
    their names follow from their content, because the operator doesn't notice another content.
    """

    problems: list[JsonObject]
    values: JsonObject
    nodes: list[NodePlan]
    groups: list[Group]
    operator_groups: list[Group]
    config_maps: JsonObject
    mig_strategy: str
    default: str
    runtime_class: str


@dataclasses.dataclass(frozen=True)
class Injection:
    """How a node's containers get their cards.

    :param strategy: the plugin's ``deviceListStrategy``.
    :param by_class: the node's default runtime isn't NVIDIA's, so that the plugin itself needs a runtime class.
    """

    strategy: str
    by_class: bool


def injection_of(facts: t.Any) -> Injection | None:
    """Return how a node's containers get cards; None where its runtime has no way.

    :param facts: ``gpu_node``; empty for a node that wasn't observed, which counts as one with NVIDIA's runtime.
    """
    facts = facts or {}
    runtimes = facts.get("runtimes") or {}
    # k3s may run with Docker, or with a containerd that isn't its own.
    used = (facts.get("kubelet") or {}).get("runtime")
    name = used or next((kind for kind in ("k3s", "rke2") if runtimes.get(kind)), None)
    state = runtimes.get(str(name))
    if not state:
        return Injection(ENVVAR, by_class=False)
    if name == "containerd":
        dump = state.get("dump") or ""
        if not dump:
            return Injection(ENVVAR, by_class=False)
        match = _DEFAULT_RUNTIME.search(dump)
        default, handler, cdi = match[1] if match else "", bool(_HANDLER.search(dump)), injects_cdi(state)
    else:
        # CRI-O always knows CDI; dockershim and cri-dockerd don't, and k3s' containerd isn't asked.
        default, handler, cdi = state["default_runtime"], RUNTIME in state["runtimes"], name == "crio"
    if default == RUNTIME:
        return Injection(ENVVAR, by_class=False)
    return Injection(CDI_CRI, by_class=True) if handler and cdi else None


def plan(options: Options) -> Result:
    """Return the plan, or what makes it impossible."""
    try:
        return _plan(options)
    except Problem as problem:
        return _result(problems=[problem.result()])


def _result(**known: t.Any) -> Result:
    empty = Result(
        problems=[],
        values={},
        nodes=[],
        groups=[],
        operator_groups=[],
        config_maps={},
        mig_strategy="none",
        default="",
        runtime_class="",
    )
    return t.cast(Result, {**empty, **known})


def _plan(options: Options) -> Result:
    layouts = parse_layouts(options["mig_layouts"], f"{PREFIX}mig_layouts")
    known = configurations(options["configurations"], layouts, f"{PREFIX}configurations")
    if options["default"] not in known:
        where = f"{PREFIX}default"
        raise Problem("configuration_unknown", where, f"it isn't one of {', '.join(known)}")
    injections, problems = _injections(options)
    nodes = []
    for name in options["nodes"]:
        chosen = options["node_configurations"].get(name, options["default"])
        if chosen not in known:
            where = f"{PREFIX}node_configurations.{name}"
            problems.append(Problem("configuration_unknown", where, f"it isn't one of {', '.join(known)}"))
        elif name in injections:
            nodes.append(_node(name, known[chosen], injections[name], options))
    strategies = {
        known[used].mig_strategy for used in {_configuration(name, options) for name in options["nodes"]} & set(known)
    }
    if options["operator"] and {"single", "mixed"} <= strategies:
        text = "nodes of the GPU Operator have one MIG strategy, spec.mig.strategy; use mixed for all of them"
        problems.append(Problem("operator_mig_strategies", f"{PREFIX}node_configurations", text))
    by_cdi = {name for name, injection in injections.items() if injection.strategy == CDI_CRI}
    roots = {root_of(options["facts"].get(name)) for name in by_cdi}
    if len(roots) > 1:
        where = " and ".join(sorted(roots))
        text = f"the driver of nodes with CDI is below {where}, and the chart has one nvidiaDriverRoot"
        problems.append(Problem("driver_roots", f"{PREFIX}nodes", text))
    if problems:
        return _result(problems=[problem.result() for problem in problems])
    by_class = any(injection.by_class for injection in injections.values())
    runtime_class = options["runtime_class"] or (RUNTIME if by_class else "")
    documents = _documents(known)
    return _result(
        values=_values(documents, runtime_class, "".join(roots), options),
        nodes=nodes,
        groups=_groups(nodes, operator=False),
        operator_groups=_groups(nodes, operator=True),
        config_maps=_config_maps(documents, options["mig_layouts"]),
        mig_strategy=next((name for name in ("mixed", "single") if name in strategies), "none"),
        default=options["default"],
        runtime_class=runtime_class,
    )


def _configuration(node: str, options: Options) -> str:
    return options["node_configurations"].get(node, options["default"])


def _injections(options: Options) -> tuple[dict[str, Injection], list[Problem]]:
    injections: dict[str, Injection] = {}
    problems = []
    for name in options["nodes"]:
        seen = injection_of(options["facts"].get(name)) if options["injection"] == "auto" else None
        if options["injection"] == "envvar" or options["operator"]:
            # The operator decides it for all nodes, by the plugin's environment.
            seen = Injection(ENVVAR, by_class=bool(options["runtime_class"]))
        elif options["injection"] == "cdi":
            seen = Injection(CDI_CRI, by_class=True)
        if seen is None and options["assume_runtime"]:
            seen = Injection(ENVVAR, by_class=False)
        if seen is None:
            text = (
                f"the container runtime of node {name} neither has nvidia as its default runtime nor the runtime "
                "nvidia and CDI; run role runtime, or set it to envvar and name a runtime class in each pod"
            )
            problems.append(Problem("no_injection", f"{PREFIX}injection", text))
        else:
            injections[name] = seen
    return injections, problems


def variant(configuration: Configuration, strategy: str) -> str:
    """Return the name of a configuration for nodes whose containers get their cards in one way."""
    return (
        configuration.name
        if configuration.device_list_strategy or strategy == ENVVAR
        else f"{configuration.name}-{strategy}"
    )


def _documents(known: t.Mapping[str, Configuration]) -> dict[str, JsonObject]:
    """Return every configuration in every variant, so that another node alone doesn't restart all plugins."""
    return {
        variant(configuration, strategy): configuration.document(strategy)
        for configuration in known.values()
        for strategy in (ENVVAR, CDI_CRI)
    }


def _node(name: str, configuration: Configuration, injection: Injection, options: Options) -> NodePlan:
    labels = {
        backends.LABEL: backends.NVIDIA,
        contract.LABEL_PRESENT: "true",
        contract.LABEL_CONFIG: variant(configuration, injection.strategy),
    }
    if not options["gfd"]:
        labels.update({**configuration.labels(), **_card_labels(options["facts"].get(name), configuration)})
    return {
        "name": name,
        "labels": labels,
        "mig_layout": configuration.layout.name if configuration.layout else "",
        "resources": configuration.announced(len(_cards(options["facts"].get(name)))),
    }


def _cards(facts: t.Any) -> list[JsonObject]:
    """Return the cards that were observed on a node; empty where none were."""
    return ((facts or {}).get("driver") or {}).get("cards") or []


def _card_labels(facts: t.Any, configuration: Configuration) -> dict[str, str]:
    """Return NVIDIA's labels of the cards, where they were observed and are of one kind."""
    cards = _cards(facts)
    kinds = {(card.get("name"), card.get("memory_mib")) for card in cards}
    if len(kinds) != 1:
        return {}
    [(product, memory)] = kinds
    labels = {contract.LABEL_COUNT: str(len(cards))}
    if product:
        shared = "-SHARED" if configuration.replicas > 1 and not configuration.rename else ""
        text = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(product)).strip("-_.")[: 63 - len(shared)]
        labels[contract.LABEL_PRODUCT] = text + shared
    return {**labels, contract.LABEL_MEMORY: str(memory)} if memory else labels


def _groups(nodes: t.Sequence[NodePlan], operator: bool) -> list[Group]:
    """Return the nodes by what they announce.

    :param operator: with the labels that the GPU Operator needs; it sets NVIDIA's others itself.
    """
    groups: dict[tuple[tuple[str, int], ...], Group] = {}
    for node in nodes:
        labels = node["labels"]
        if operator:
            own = {name: labels[name] for name in (backends.LABEL, contract.LABEL_CONFIG)}
            labels = {**own, **OPERATOR_LABELS}
            if node["mig_layout"]:
                labels[contract.LABEL_MIG_CONFIG] = node["mig_layout"]
        empty = Group(resources=node["resources"], nodes=[], definitions=[])
        group = groups.setdefault(tuple(node["resources"].items()), empty)
        group["nodes"].append(node["name"])
        metadata = {"name": node["name"], "labels": labels}
        group["definitions"].append({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    return list(groups.values())


def _values(documents: t.Mapping[str, JsonObject], runtime_class: str, root: str, options: Options) -> JsonObject:
    """Return the chart's values, the user's over ours.

    :param documents: the configurations by name.
    :param runtime_class: of the plugin's own pods; empty for the default runtime.
    :param root: of the driver where containers get their cards by CDI, whose file the plugin makes from it; else empty.
    :param options: the role's variables.
    """
    wanted: list[JsonObject] = [{"key": contract.LABEL_PRESENT, "operator": "In", "values": ["true"]}]
    # The one before may be set by a kubelet on its own node, this one only by administrators.
    wanted.append({"key": backends.RESTRICTED, "operator": "In", "values": [backends.NVIDIA]})
    wanted += [{"key": key, "operator": "NotIn", "values": values} for key, values in OTHERS.items()]
    required = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
    # JSON is YAML.
    ours: JsonObject = {
        "config": {
            "map": {name: _text(document) for name, document in documents.items()},
            "default": options["default"],
        },
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        "gfd": {"enabled": options["gfd"]},
        "tolerations": options["tolerations"],
    }
    if options["gfd"]:
        # The chart's own are for one value of one taint; without a worker a node never gets the labels.
        ours["nfd"] = {"worker": {"tolerations": options["tolerations"]}}
    if runtime_class:
        ours["runtimeClassName"] = runtime_class
    if root:
        ours["nvidiaDriverRoot"] = root
    if options["image"]:
        repository, tag = _image(options["image"])
        ours["image"] = {"repository": repository, "tag": tag}
    secrets = [{"name": name} for name in options.get("pull_secrets") or ()]
    if secrets:
        ours["imagePullSecrets"] = secrets
    if options["gfd"]:
        if secrets:
            ours["nfd"]["imagePullSecrets"] = secrets
        if options.get("nfd_image"):
            repository, tag = _image(options["nfd_image"], "nfd_image")
            ours["nfd"]["image"] = {"repository": repository, "tag": tag}
    return dict(overridden(ours, options["values"]))


def _image(reference: str, variable: str = "image") -> tuple[str, str]:
    repository, tag = repository_and_tag(reference)
    if not tag:
        raise Problem(
            "image_tag", f"{PREFIX}{variable}", "the chart takes a repository and a tag, as example.org/plugin:v1"
        )
    return repository, tag


def overridden(ours: t.Any, theirs: t.Any) -> t.Any:
    """Return both, and where they differ the second one's; mappings are merged, as helm does it.

    Not a merge patch: a null stays, because helm takes it for the removal of the chart's own value.
    """
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return theirs
    return {**ours, **{key: overridden(ours.get(key), value) for key, value in theirs.items()}}


def _config_maps(documents: t.Mapping[str, JsonObject], mig_layouts: JsonObject) -> JsonObject:
    plugin = {name: _text(document) for name, document in documents.items()}
    maps = {"device_plugin": {"name": _named("kubegpu-device-plugin", plugin), "data": plugin}}
    if mig_layouts:
        mig = {"config.yaml": _text(mig_layouts)}
        maps["mig_manager"] = {"name": _named("kubegpu-mig-parted", mig), "data": mig}
    return maps


def _named(prefix: str, data: t.Mapping[str, str]) -> str:
    return f"{prefix}-{hashlib.sha256(_text(dict(data)).encode()).hexdigest()[:10]}"


def _text(document: JsonObject) -> str:
    return json.dumps(document, indent=2, sort_keys=True)
