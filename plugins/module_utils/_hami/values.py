# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the values of HAMi's chart, and how containers on its nodes get the cards. Pure.

With a driver's files by environment variable the runtime has to be NVIDIA's: as the default, or by a RuntimeClass,
which HAMi's webhook sets on the pods. With CDI any runtime does that supports it.
"""

from __future__ import annotations

import json
import re
import typing as t

from .._contracts import backends, hami
from .._contracts.model import Node, node_of, well_formed
from .._core.types import JsonObject
from .._driver.nvidia_smi import root_of
from .._node.baseline import default_runtime
from .._runtime.properties import injects_cdi
from .chart import MISSING, Finding, ReleasePlan, deployed, finding, get, merged, put, unknown
from .legacy import image_values, translate

HANDLER = "nvidia"
# NVIDIA's tools that write CDI specifications, in the order of preference.
HOOKS = ("nvidia-cdi-hook", "nvidia-ctk")
_TABLE = re.compile(r"""runtimes\.['"]?nvidia['"]?\]""")

Way = t.Literal["default", "class", "cdi"]


class NodeRuntime(t.NamedTuple):
    """A node's container runtime.

    :param default: the default runtime is NVIDIA's.
    :param handler: it has NVIDIA's runtime, for a RuntimeClass.
    :param cdi: it injects devices by CDI.
    :param hook: path of NVIDIA's program for CDI; empty without one.
    """

    name: str
    default: bool
    handler: bool
    cdi: bool
    hook: str


def node_runtime(name: str, gpu_node: JsonObject) -> NodeRuntime | None:
    """Read a node's runtime from its facts; None where the runtime that kubelet uses is unknown."""
    used = str((gpu_node.get("kubelet") or {}).get("runtime") or "")
    state = (gpu_node.get("runtimes") or {}).get(used)
    if not state:
        return None
    named = default_runtime(state)
    runtimes = state.get("runtimes") or {}
    text = str(state.get("dump") or "")
    binaries = (gpu_node.get("toolkit") or {}).get("binaries") or []
    hooks = [path for wanted in HOOKS for path in binaries if str(path).rpartition("/")[2] == wanted]
    return NodeRuntime(
        name,
        default=named == HANDLER,
        # Docker has no RuntimeClass.
        handler=used != "docker" and (HANDLER in runtimes or bool(_TABLE.search(text))),
        # CRI-O has CDI enabled; k3s and RKE2 run a containerd whose configuration isn't in the facts.
        cdi=used == "crio" or (used == "containerd" and injects_cdi(state)),
        hook=str(hooks[0]) if hooks else "",
    )


class Choice(t.NamedTuple):
    """The way for all nodes.

    :param runtime_class: of the device plugin and the pods; empty for none.
    :param hook: NVIDIA's program for CDI on the nodes.
    """

    way: Way
    runtime_class: str = ""
    hook: str = ""


def choose(
    nodes: t.Sequence[str],
    facts: t.Mapping[str, JsonObject],
    classes: t.Mapping[str, str],
    wanted: str,
    runtime_class: str,
    former: Way | None = None,
) -> Choice | Finding:
    """Return the way by which containers get the cards.

    :param nodes: HAMi's nodes.
    :param facts: ``gpu_node`` of those that were observed, by the node's name.
    :param classes: handler of each RuntimeClass in the cluster, by name.
    :param wanted: ``auto``, or the way that the user names.
    :param runtime_class: the RuntimeClass that the user names; empty for none.
    :param former: that of the release; kept while not all nodes are observed, as with ``--limit``.
    """
    named = runtime_class or next((name for name, handler in sorted(classes.items()) if handler == HANDLER), HANDLER)
    observed = [node_runtime(name, facts[name]) for name in nodes if name in facts]
    known = [runtime for runtime in observed if runtime]
    hook = next((runtime.hook for runtime in known if runtime.hook), "")
    if wanted == "class" or (wanted == "auto" and runtime_class):
        return Choice("class", named)
    if wanted == "default":
        return Choice("default")
    if wanted == "cdi":
        return Choice("cdi", "", hook)
    if len(known) < len(nodes):
        if former == "default" and all(runtime.default for runtime in known):
            return Choice("default")
        if former == "class" and all(runtime.handler for runtime in known):
            return Choice("class", named)
    if known and len(known) == len(nodes):
        if all(runtime.default for runtime in known):
            return Choice("default")
        if all(runtime.handler for runtime in known):
            return Choice("class", named)
        hooks = {runtime.hook for runtime in known}
        if all(runtime.cdi for runtime in known) and len(hooks) == 1 and hook:
            return Choice("cdi", "", hook)
        parts = [f"{runtime.name} ({_text(runtime)})" for runtime in known]
        message = f"the nodes have no way in common in which containers get the cards: {', '.join(parts)}"
        do = "run role runtime on them, or split them into groups and set hami_injection"
        return finding("runtimes_differ", "hami_injection", f"{message}; {do}")
    if named in classes:
        return Choice("class", named)
    unknown = sorted(set(nodes) - {runtime.name for runtime in known})
    message = f"how containers get the cards is unknown for {', '.join(unknown) or 'every node'}: it wasn't observed"
    do = f"and the cluster has no RuntimeClass with handler {HANDLER}; set hami_injection"
    return finding("runtime_unknown", "hami_injection", f"{message}, {do}")


def _text(runtime: NodeRuntime) -> str:
    parts = [
        ("nvidia by default", runtime.default),
        ("runtime nvidia", runtime.handler),
        ("CDI", runtime.cdi and runtime.hook),
    ]
    return ", ".join(text for text, there in parts if there) or "none of nvidia by default, runtime nvidia and CDI"


# HAMi's webhook decodes and encodes every new pod with the types of this minor version: fields of later ones are lost.
NEWEST_MINOR = 36
# The first label may be set by a kubelet on its own node, the second only by administrators.
SELECTOR = {"gpu": "on", backends.RESTRICTED: backends.HAMI}
WEBHOOK = "scheduler.admissionWebhook"
OVERRIDES = {
    "nameOverride": "hami_release",
    "fullnameOverride": "hami_release",
    "namespaceOverride": "hami_namespace",
}
# Below these paths the chart takes any key; the last two it has, but not among its values.
OPEN = (
    "devicePlugin.nvidiaNodeSelector",
    "global.managedNodeSelector",
    "scheduler.admissionWebhook.namespaceSelector.matchLabels",
    "scheduler.admissionWebhook.objectSelector",
    "scheduler.nodeSelector",
    "scheduler.nodeLabelSelector",
)
_MINOR = re.compile(r"v?1\.(\d+)")
_RELEASE = re.compile(r"v?(\d+\.\d+\.\d+)")


class Options(t.TypedDict):
    """The role's variables, without ``hami_``; memory in MiB, cores in percent."""

    namespace: str
    release: str
    chart_version: str
    values: JsonObject
    nodes: list[str]
    split_count: int
    memory_scaling: float
    core_scaling: float
    default_memory: int
    default_cores: int
    limit_cores: bool
    node_policy: str
    gpu_policy: str
    mig_strategy: str
    node_configuration: list[JsonObject]
    injection: str
    runtime_class: str
    driver_root: str
    library_folder: str
    image: str
    kube_scheduler_image: str
    image_pull_secrets: list[str]
    tolerations: list[JsonObject]
    scheduler_tolerations: list[JsonObject]
    scheduler_replicas: int
    failure_policy: str
    exempt_namespaces: list[str]
    overwrite_default_scheduler: str
    service_type: str


class Cluster(t.TypedDict):
    """What is known of the cluster.

    :ivar version: of the API server, such as ``v1.36.3``.
    :ivar nodes: the Node objects.
    :ivar facts: ``gpu_node`` by the node's name, of those that were observed.
    :ivar runtime_classes: the RuntimeClass objects.
    :ivar chart_values: the chart's own values.
    :ivar others: nodes that have NVIDIA's device plugin, or are to have it.
    :ivar release: as ``helm.release`` decodes it; empty without one.
    :ivar assume_runtime: nodes whose container runtime has no way yet get NVIDIA's as the default, by role runtime.
    """

    version: str
    nodes: list[JsonObject]
    facts: dict[str, JsonObject]
    runtime_classes: list[JsonObject]
    chart_values: JsonObject
    others: list[str]
    release: JsonObject
    assume_runtime: bool


def plan(options: Options, cluster: Cluster) -> ReleasePlan:
    """Plan the release.

    :returns: with ``problems``, nothing must be deployed.
    """
    moved = translate(options["values"])
    notes, problems = list(moved.notes), list(moved.problems)
    own: JsonObject = t.cast(JsonObject, {**options, **moved.variables})
    classes = {
        str(runtime_class["metadata"]["name"]): str(runtime_class.get("handler", ""))
        for runtime_class in cluster["runtime_classes"]
    }
    former = _former(cluster["release"].get("values"))
    way = choose(options["nodes"], cluster["facts"], classes, options["injection"], options["runtime_class"], former)
    if isinstance(way, dict):
        problems += [] if cluster["assume_runtime"] else [way]
        way = Choice("default")
    root = _driver_root(options, cluster) if way.way == "cdi" else options["driver_root"]
    if isinstance(root, dict):
        problems.append(root)
        root = "/"
    own["driver_root"] = root
    overwrites, reason = _overwrites(options, well_formed("node", map(node_of, cluster["nodes"])), cluster["others"])
    notes += [reason] if reason else []
    values = merged(_own_values(t.cast(Options, own), cluster["version"], way, overwrites), moved.values)
    problems += unknown(values, cluster["chart_values"], OPEN)
    problems += [
        finding("name_override", path, f"{path} can't be set: {variable} names the objects")
        for path, variable in OVERRIDES.items()
        if get(values, path) not in (MISSING, "", None)
    ]
    notes += _version_notes(cluster["version"])
    problems += _scheduler_problems(values, cluster["version"])
    notes += _value_notes(values)
    set_class = get(values, "devicePlugin.runtimeClassName")
    needed = set_class if set_class is not MISSING else ""
    defaults = {"defaultMemory": int(own["default_memory"] or 0), "defaultCores": int(own["default_cores"] or 0)}
    return {
        "release_values": values,
        "defaults": defaults,
        "deployed": deployed(cluster["release"], values, defaults, options["chart_version"]),
        "runtime_class": str(needed or ""),
        "overwrites": get(values, "scheduler.forceOverwriteDefaultScheduler") is True,
        "certificate": get(values, f"{WEBHOOK}.enabled") is not False
        and not get(values, "scheduler.patch.enabled")
        and not get(values, "scheduler.certManager.enabled"),
        "chart_version": options["chart_version"],
        "notes": notes,
        "problems": problems,
    }


def _former(values: JsonObject | None) -> Way | None:
    """Return the way of a release by its values; None without one."""
    if values is None:
        return None
    if get(values, "devicePlugin.deviceListStrategy") not in (MISSING, "envvar"):
        return "cdi"
    return "class" if get(values, "devicePlugin.runtimeClassName") not in (MISSING, "") else "default"


def _driver_root(options: Options, cluster: Cluster) -> str | Finding:
    """Return the one root of the nodes' drivers, or why there is none; the release's of nodes that weren't observed."""
    if options["driver_root"]:
        return options["driver_root"]
    roots = {root_of(cluster["facts"][name]) for name in options["nodes"] if name in cluster["facts"]}
    former = get(cluster["release"].get("values") or {}, "devicePlugin.nvidiaDriverRoot")
    if former not in (MISSING, "", None) and not cluster["facts"].keys() >= set(options["nodes"]):
        roots.add(str(former))
    if len(roots) > 1:
        text = "the chart has one nvidiaDriverRoot, and the nodes' drivers are below {}; give some another gpu_backend"
        return finding("driver_roots", "hami_nodes", text.format(" and ".join(sorted(roots))))
    return roots.pop() if roots else "/"


def _own_values(options: Options, version: str, way: Choice, overwrites: bool) -> JsonObject:
    """Return the chart's values by the role's variables."""
    values: JsonObject = {}
    folder = options["library_folder"].rstrip("/")
    plugin: JsonObject = {
        "deviceSplitCount": options["split_count"],
        "deviceMemoryScaling": _number(options["memory_scaling"]),
        "deviceCoreScaling": _number(options["core_scaling"]),
        # The chart wants text.
        "disablecorelimit": "false" if options["limit_cores"] else "true",
        "migStrategy": options["mig_strategy"],
        "nodeConfiguration": {"config": json.dumps({"nodeconfig": options["node_configuration"]}, indent=2)},
        "runtimeClassName": way.runtime_class,
        # The chart would make it as a hook, which deletes one of others first and leaves its own behind.
        "createRuntimeClass": False,
        "deviceListStrategy": "cdi-annotations" if way.way == "cdi" else "envvar",
        "tolerations": options["tolerations"],
        "service": {"type": options["service_type"]},
        # The folder's name stands at three places of the chart, which have to agree.
        "libPath": f"{folder}/vgpu",
        "monitor": {"ctrPath": f"{folder}/vgpu/containers"},
        "nvidiaNodeSelector": dict(SELECTOR),
    }
    if way.way == "cdi":
        plugin["nvidiaHookPath"] = way.hook or "/usr/bin/nvidia-ctk"
    if options["driver_root"]:
        plugin["nvidiaDriverRoot"] = options["driver_root"]
    scheduler: JsonObject = {
        "defaultSchedulerPolicy": {
            "nodeSchedulerPolicy": options["node_policy"],
            "gpuSchedulerPolicy": options["gpu_policy"],
        },
        "forceOverwriteDefaultScheduler": overwrites,
        "replicas": options["scheduler_replicas"],
        "tolerations": options["scheduler_tolerations"],
        "service": {"type": options["service_type"]},
        "admissionWebhook": {
            "failurePolicy": options["failure_policy"],
            # Never its own namespace: with Fail, a scheduler that is gone couldn't come back.
            "whitelistNamespaces": sorted({*options["exempt_namespaces"], options["namespace"]}),
        },
        # The role makes the certificate: the chart's hooks take an image of a third party for it.
        "patch": {"enabled": False},
        "certManager": {"enabled": False},
    }
    values = {
        "global": {"gpuHookPath": folder, "imagePullSecrets": options["image_pull_secrets"]},
        "devicePlugin": plugin,
        "scheduler": scheduler,
    }
    if options["image"]:
        for path in ("devicePlugin.image", "devicePlugin.monitor.image", "scheduler.extender.image"):
            put(values, path, image_values(options["image"]))
    image = image_values(options["kube_scheduler_image"])
    release = _RELEASE.match(version)
    if release:
        # One kube-scheduler of the cluster's own version, without a distribution's suffix.
        image.setdefault("tag", f"v{release.group(1)}")
    put(values, "scheduler.kubeScheduler.image", image)
    return values


def _number(value: float) -> float | int:
    """Return a whole number as such: helm would render 1.0."""
    return int(value) if float(value).is_integer() else float(value)


def _overwrites(options: Options, nodes: t.Iterable[Node], used: t.Collection[str]) -> tuple[bool, Finding | None]:
    """Return whether the webhook takes pods that name no scheduler, and a note if other nodes announce the resource.

    :param used: nodes that announce it, or will.
    """
    announcing = {
        node.name
        for node in nodes
        if node.labels.get("gpu") != SELECTOR["gpu"] and node.allocatable.get(hami.RESOURCE_COUNT)
    }
    others = sorted((announcing | set(used)) - set(options["nodes"]))
    wanted = options["overwrite_default_scheduler"]
    if not others:
        return wanted != "never", None
    where = f"{', '.join(others[:3])}{f' and {len(others) - 3} more' if len(others) > 3 else ''}"
    path = "hami_overwrite_default_scheduler"
    if wanted == "always":
        message = (
            f"{where} announce {hami.RESOURCE_COUNT} by another device plugin, and HAMi's webhook takes all pods that "
            "request it: pods for those nodes have to be in a namespace, or have a label, hami.io/webhook=ignore"
        )
        return True, finding("captures_others", path, message)
    message = (
        f"{where} announce {hami.RESOURCE_COUNT} by another device plugin, so HAMi's webhook leaves pods alone that "
        f"name no scheduler: pods for HAMi's nodes have to set schedulerName: {hami.SCHEDULER}"
    )
    return False, finding("leaves_default_scheduler", path, message)


def _version_notes(version: str) -> list[Finding]:
    match = _MINOR.match(version)
    if not match or int(match.group(1)) <= NEWEST_MINOR:
        return []
    message = (
        f"the cluster is Kubernetes {version}, and HAMi's webhook encodes every new pod of its namespaces with the "
        f"types of 1.{NEWEST_MINOR}: it removes newer fields from them. Name namespaces whose pods use such fields in "
        "hami_exempt_namespaces"
    )
    return [finding("newer_kubernetes", "", message)]


def _scheduler_problems(values: JsonObject, version: str) -> list[Finding]:
    """Return why the kube-scheduler beside HAMi's extender doesn't fit the cluster."""
    if get(values, "scheduler.kubeScheduler.enabled") is False:
        return []
    path = "scheduler.kubeScheduler.image.tag"
    tag, cluster = _MINOR.match(str(get(values, path))), _MINOR.match(version)
    if not tag or not cluster:
        return []
    behind = int(cluster.group(1)) - int(tag.group(1))
    if 0 <= behind <= 1:
        return []
    message = (
        f"{path} is {get(values, path)}, and the cluster is {version}: kube-scheduler must not be newer than the API "
        "server, and at most one minor version older"
    )
    return [finding("scheduler_version", path, message)]


def _value_notes(values: JsonObject) -> list[Finding]:
    """Return notes about values with consequences for the rest of this collection."""
    notes = []
    for path, name in (("resourceName", hami.RESOURCE_COUNT), ("resourceMem", hami.RESOURCE_MEMORY)):
        value = get(values, path)
        if value not in (MISSING, name):
            message = f"{path} is {value}: inspect, verify and acceptance read {name} only"
            notes.append(finding("resource_renamed", path, message))
    return notes
