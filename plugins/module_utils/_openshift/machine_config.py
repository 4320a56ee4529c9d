# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Configure OpenShift's GPU nodes by a MachineConfig.

The Machine Config Operator owns such a node's /etc, and a manual change there makes the node's pool Degraded. So files
and kernel arguments go into a MachineConfig for a pool of their own, and only GPU nodes are drained and rebooted, one
after the other. A pool that becomes Degraded keeps its nodes cordoned, so the MachineConfig is then rolled back.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import typing as t

from .._core.errors import BadInput, NotInEffect
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.options import auth_arguments
from .._kube.refs import FIELD_MANAGER, Ref
from .cluster import condition
from .objects import PART_OF, annotations_of

API = "machineconfiguration.openshift.io/v1"
DEFINITION = Ref(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "machineconfigpools.machineconfiguration.openshift.io"
)
ROLE = "machineconfiguration.openshift.io/role"
NODE_ROLE = "node-role.kubernetes.io/"
# Supported by every release of OpenShift 4 from 4.6 on.
IGNITION = "3.1.0"
# On the pool until its nodes are updated: a Record.
BEFORE = "kubegpu.share/replaced-config"
# On our MachineConfig: the nodes that we have added to the pool, which may be another owner's.
LABELLED = "kubegpu.share/labelled-nodes"
# OpenShift's own pools; a MachineConfig for them reboots nodes without GPUs.
BUILT_IN = ("master", "worker", "arbiter")

NOUVEAU_FILE = "/etc/modprobe.d/blacklist-nouveau.conf"
NOUVEAU = "blacklist nouveau\noptions nouveau modeset=0\n"
NOUVEAU_ARGUMENTS = ("modprobe.blacklist=nouveau", "rd.driver.blacklist=nouveau")
RUNTIME_FILE = "/etc/crio/crio.conf.d/99-nvidia.conf"

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "pool": {"type": "str", "default": "gpu"},
    "name": {"type": "str", "default": "99-gpushare"},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "nouveau": {"type": "bool", "default": True},
    "runtime_path": {"type": "str", "default": ""},
    "kernel_arguments": {"type": "list", "elements": "str", "default": []},
    "timeout": {"type": "int", "default": 3600},
}
PAUSE = 10.0


@dataclasses.dataclass(frozen=True)
class Options:
    """The module's options."""

    state: str
    pool: str
    name: str
    nodes: t.Sequence[str]
    nouveau: bool
    runtime_path: str
    kernel_arguments: t.Sequence[str]

    @classmethod
    def of(cls, params: JsonObject) -> Options:
        """Return the options of a module's parameters."""
        return cls(**{field.name: params[field.name] for field in dataclasses.fields(cls)})


class Record(t.TypedDict):
    """The record of a change that isn't proven yet: our former MachineConfig, and the nodes added to the pool."""

    spec: JsonObject | None
    nodes: list[str]


# --------------------------------------------------------------------------- the objects


def crio_drop_in(path: str) -> str:
    """Return the drop-in with CRI-O's default runtime; ContainerRuntimeConfig supports only crun and runc."""
    return (
        "[crio.runtime]\n"
        'default_runtime = "nvidia"\n'
        "[crio.runtime.runtimes.nvidia]\n"
        f"runtime_path = {json.dumps(path)}\n"
        'runtime_type = "oci"\n'
    )


def file_of(path: str, text: str) -> JsonObject:
    """Return a file in Ignition's form."""
    encoded = base64.b64encode(text.encode()).decode()
    # Octal 0644: JSON has no octal numbers.
    contents = {"source": f"data:text/plain;charset=utf-8;base64,{encoded}"}
    return {"path": path, "mode": 420, "overwrite": True, "contents": contents}


def machine_config(options: Options) -> JsonObject:
    """Return the requested MachineConfig.

    :raises BadInput: an option is invalid.
    """
    files, arguments = [], list(options.kernel_arguments)
    if options.nouveau:
        files.append(file_of(NOUVEAU_FILE, NOUVEAU))
        arguments = [*NOUVEAU_ARGUMENTS, *arguments]
    path = options.runtime_path
    if path:
        if not re.fullmatch(r"/[\w./+-]+", path):
            raise BadInput(f"runtime_path: {path!r} isn't an absolute path of a program")
        files.append(file_of(RUNTIME_FILE, crio_drop_in(path)))
    if not files and not arguments:
        raise BadInput("nouveau, runtime_path, kernel_arguments: none of them is set")
    for argument in arguments:
        if not argument or re.search(r"\s", argument):
            raise BadInput(f"kernel_arguments: {argument!r} isn't one argument")
    labels = {ROLE: options.pool, **PART_OF}
    spec: JsonObject = {"config": {"ignition": {"version": IGNITION}}}
    if files:
        spec["config"]["storage"] = {"files": files}
    if arguments:
        spec["kernelArguments"] = arguments
    metadata = {"name": options.name, "labels": labels}
    return {"apiVersion": API, "kind": "MachineConfig", "metadata": metadata, "spec": spec}


def pool_of(name: str) -> JsonObject:
    """Return a pool of the nodes with a role; it includes the MachineConfigs of workers."""
    selector = {"matchExpressions": [{"key": ROLE, "operator": "In", "values": ["worker", name]}]}
    spec = {"machineConfigSelector": selector, "nodeSelector": {"matchLabels": {f"{NODE_ROLE}{name}": ""}}}
    return {
        "apiVersion": API,
        "kind": "MachineConfigPool",
        "metadata": {"name": name, "labels": PART_OF},
        "spec": spec,
    }


def finished(pool: JsonObject, nodes: int | None = None) -> str:
    """Return why a pool isn't updated; empty where all its nodes have its configuration."""
    name, status = pool["metadata"]["name"], pool.get("status") or {}
    if int(status.get("observedGeneration") or 0) < int(pool["metadata"].get("generation") or 0):
        return f"pool {name}: the Machine Config Operator hasn't observed the change yet"
    count, ready = int(status.get("machineCount") or 0), int(status.get("readyMachineCount") or 0)
    if nodes is not None and count != nodes:
        return f"pool {name} counts {count} of {nodes} nodes"
    if condition(pool, "Updated")[0] != "True" or condition(pool, "Updating")[0] == "True" or ready != count:
        return f"pool {name}: {ready} of {count} nodes are updated"
    wanted = ((pool.get("spec") or {}).get("configuration") or {}).get("name")
    if wanted != (status.get("configuration") or {}).get("name"):
        return f"pool {name} is changing to {wanted}"
    return ""


def holds(rendered: JsonObject | None, spec: JsonObject) -> bool:
    """Return whether the rendered configuration of a pool contains a MachineConfig."""
    there = (rendered or {}).get("spec") or {}
    files = {file["path"]: file for file in _files(there)}
    # The operator merges files and arguments of all MachineConfigs unchanged.
    for file in _files(spec):
        if (files.get(file["path"]) or {}).get("contents", {}).get("source") != file["contents"]["source"]:
            return False
    return set(spec.get("kernelArguments") or []) <= set(there.get("kernelArguments") or [])


def _files(spec: JsonObject) -> list[JsonObject]:
    files: list[JsonObject] = ((spec.get("config") or {}).get("storage") or {}).get("files") or []
    return files


def degraded(pool: JsonObject) -> str:
    """Return why a pool is degraded; empty where it is not."""
    for kind in ("NodeDegraded", "RenderDegraded", "Degraded"):
        status, message = condition(pool, kind)
        if status == "True":
            return f"pool {pool['metadata']['name']} is {kind}: {message or 'without a reason'}"
    return ""


# --------------------------------------------------------------------------- observing and planning


@dataclasses.dataclass(frozen=True)
class State:
    """The objects of the cluster that a MachineConfig of GPU nodes depends on."""

    config: JsonObject | None
    pool: JsonObject | None
    nodes: t.Mapping[str, JsonObject]
    pools: t.Sequence[JsonObject]


def observe(kube: Kube, options: Options) -> State:
    """Collect the state that a plan is made from.

    :raises BadInput: this cluster has no MachineConfigs.
    """
    if kube.get(DEFINITION) is None:
        raise BadInput("machine_config: this cluster knows no MachineConfigPool, so it isn't OpenShift")
    pools = kube.list_all(API, "MachineConfigPool")
    named = [pool for pool in pools if pool["metadata"]["name"] == options.pool]
    return State(
        kube.get(Ref(API, "MachineConfig", "", options.name)),
        named[0] if named else None,
        {node["metadata"]["name"]: node for node in kube.list_all("v1", "Node")},
        pools,
    )


def check(options: Options, observed: State) -> None:
    """Refuse a change that would reboot other nodes, or leave nodes without a pool.

    :raises BadInput: nothing was changed.
    """
    pool = options.pool
    if pool in BUILT_IN or not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", pool):
        raise BadInput(f"pool: {pool!r} can't be the name of a pool for GPU nodes")
    if observed.pool is not None:
        selector = ((observed.pool.get("spec") or {}).get("machineConfigSelector")) or {}
        if not _selects(selector, pool):
            raise BadInput(f"pool: MachineConfigPool {pool} exists and doesn't select MachineConfigs of role {pool}")
        if not _selects(selector, "worker"):
            raise BadInput(f"pool: MachineConfigPool {pool} exists and doesn't select the MachineConfigs of workers")
        _not_paused(observed.pool)
    if not options.nodes:
        raise BadInput("nodes: the list is empty, so there is nothing to configure")
    label = {f"{NODE_ROLE}{pool}": ""}
    for name in options.nodes:
        node = observed.nodes.get(name)
        if node is None:
            raise BadInput(f"nodes: the cluster has no node {name}")
        labels = node["metadata"].get("labels") or {}
        if f"{NODE_ROLE}master" in labels or f"{NODE_ROLE}control-plane" in labels:
            raise BadInput(f"nodes: {name} is a node of the control plane, which can only be in pool master")
        if observed.pool is not None and not _matches(observed.pool, {**labels, **label}):
            raise BadInput(
                f"pool: MachineConfigPool {pool} exists and doesn't select node {name} by the label of its role"
            )
        for other in observed.pools:
            if other["metadata"]["name"] not in (*BUILT_IN, pool) and _matches(other, labels):
                raise BadInput(
                    f"nodes: {name} is in pool {other['metadata']['name']} already, and a node can be in only one"
                )
    for existing in observed.pools:
        # A pool that an interrupted run left degraded is rolled back.
        mine = BEFORE in (existing["metadata"].get("annotations") or {})
        if existing["metadata"]["name"] in ("worker", pool) and degraded(existing) and not mine:
            raise BadInput(f"pool: {degraded(existing)}; repair the pool before nodes are added or removed")


def _not_paused(pool: JsonObject) -> None:
    if (pool.get("spec") or {}).get("paused"):
        name = pool["metadata"]["name"]
        raise BadInput(f"pool: MachineConfigPool {name} is paused, so its nodes would not be updated")


def _selects(selector: JsonObject, role: str) -> bool:
    if (selector.get("matchLabels") or {}).get(ROLE) == role:
        return True
    return any(
        expression.get("key") == ROLE
        and expression.get("operator") == "In"
        and role in (expression.get("values") or [])
        for expression in selector.get("matchExpressions") or []
    )


def _matches(pool: JsonObject, labels: JsonObject) -> bool:
    """Return whether a pool selects nodes with these labels."""
    selector = ((pool.get("spec") or {}).get("nodeSelector")) or {}
    wanted, terms = selector.get("matchLabels") or {}, selector.get("matchExpressions") or []
    if not (wanted or terms):
        return False
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_holds(term, labels) for term in terms)


def _holds(term: JsonObject, labels: JsonObject) -> bool:
    key, operator = str(term.get("key")), str(term.get("operator"))
    if operator in ("Exists", "DoesNotExist"):
        return (key in labels) == (operator == "Exists")
    among = key in labels and labels[key] in (term.get("values") or [])
    return among == (operator == "In")


def make_plan(options: Options, observed: State) -> Plan:
    """Plan the change.

    :raises BadInput: it would harm other nodes or change another owner's objects.
    """
    if options.state == "absent":
        return _absent(options, observed)
    for item in (observed.config, observed.pool):
        if item is not None and _leaving(item):
            raise BadInput(f"{item['kind']} {item['metadata']['name']} is being deleted; run again when it is gone")
    check(options, observed)
    wanted, changes = machine_config(options), []
    if observed.pool is None:
        changes.append(Change(f"MachineConfigPool {options.pool}", "", _shown(pool_of(options.pool)), ("pool", "")))
    if observed.config is None or observed.config.get("spec") != wanted["spec"]:
        before = _shown({"spec": observed.config["spec"]}) if observed.config else ""
        if observed.config and not _ours(observed.config):
            raise BadInput(f"name: MachineConfig {options.name} exists and isn't ours; set another name")
        changes.append(
            Change(f"MachineConfig {options.name}", before, _shown({"spec": wanted["spec"]}), ("config", ""))
        )
    label = f"{NODE_ROLE}{options.pool}"
    for name in options.nodes:
        if label not in (observed.nodes[name]["metadata"].get("labels") or {}):
            changes.append(Change(f"Node {name}", "", f'{label}: ""\n', ("label", name)))
    if not changes and _unproven(observed) is not None:
        changes.append(Change(f"MachineConfigPool {options.pool}", "", "every node updated\n", ("verify", "")))
    return Plan(tuple(changes))


def _absent(options: Options, observed: State) -> Plan:
    """Return the nodes to the workers first: without their pool no pool would manage them."""
    label, changes = f"{NODE_ROLE}{options.pool}", []
    ours = observed.pool is not None and _ours(observed.pool)
    # Another owner's pool keeps its nodes.
    mine = _labelled(observed)
    for name, node in sorted(observed.nodes.items()):
        if (ours or name in mine) and label in (node["metadata"].get("labels") or {}):
            changes.append(Change(f"Node {name}", f'{label}: ""\n', "", ("label", name)))
    if observed.config is not None and _ours(observed.config) and not _leaving(observed.config):
        changes.append(
            Change(f"MachineConfig {options.name}", _shown({"spec": observed.config["spec"]}), "", ("config", ""))
        )
    if observed.pool is not None and ours and not _leaving(observed.pool):
        changes.append(Change(f"MachineConfigPool {options.pool}", _shown(pool_of(options.pool)), "", ("pool", "")))
    if observed.pool is not None and not ours:
        if not changes and _unproven(observed) is not None:
            changes.append(Change(f"MachineConfigPool {options.pool}", "", "every node updated\n", ("verify", "")))
        if changes:
            _not_paused(observed.pool)
    return Plan(tuple(changes))


def _unproven(observed: State) -> Record | None:
    """Return the record of an interrupted run on the pool."""
    notes = annotations_of(observed.pool)
    return t.cast(Record, json.loads(notes[BEFORE])) if BEFORE in notes else None


def _labelled(observed: State) -> set[str]:
    """Return the nodes that we have added to the pool."""
    ours = observed.config is not None and _ours(observed.config)
    noted = annotations_of(observed.config).get(LABELLED) if ours else None
    unproven = _unproven(observed)
    return {*json.loads(noted or "[]"), *(unproven["nodes"] if unproven else ())}


def _ours(live: JsonObject) -> bool:
    return (live["metadata"].get("labels") or {}).get("app.kubernetes.io/part-of") == "gpushare"


def _leaving(live: JsonObject) -> bool:
    return bool(live["metadata"].get("deletionTimestamp"))


def _shown(value: JsonObject) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


# --------------------------------------------------------------------------- applying


class MachineConfigReconciler:
    """Configures the nodes of a pool, and rolls that back where the pool becomes Degraded."""

    def __init__(self, kube: Kube, options: Options, waiting: Waiting) -> None:
        self._kube = kube
        self._options = options
        self._waiting = waiting
        self._pool = Ref(API, "MachineConfigPool", "", options.pool)
        self._config = Ref(API, "MachineConfig", "", options.name)

    def observe(self) -> State:
        return observe(self._kube, self._options)

    def plan(self, state: State) -> Plan:
        return make_plan(self._options, state)

    def apply(self, observed: State, plan: Plan) -> None:
        """Make the changes of a plan.

        :raises ShareError: it isn't in effect.
        """
        if self._options.state == "absent":
            self._remove(observed, plan)
            return
        steps = [change.step for change in plan.changes]
        coming = [name for kind, name in steps if kind == "label"]
        if ("pool", "") in steps:
            self._kube.apply(pool_of(self._pool.name), FIELD_MANAGER)
        # The record of an interrupted run is older.
        before = _unproven(observed) or Record(spec=(observed.config or {}).get("spec"), nodes=[])
        before["nodes"] = sorted({*before["nodes"], *coming})
        self._note(self._pool, BEFORE, json.dumps(before))
        if ("config", "") in steps:
            self._kube.apply(machine_config(self._options), FIELD_MANAGER)
        mine = sorted({*_labelled(observed), *before["nodes"]})
        if json.dumps(mine) != annotations_of(observed.config).get(LABELLED):
            self._note(self._config, LABELLED, json.dumps(mine))
        for name in coming:
            self._label(name, "")
        self._verify(before, mine)

    def _verify(self, before: Record, mine: t.Sequence[str]) -> None:
        why = self._until(self._pool, self._count(), machine_config(self._options)["spec"])
        if not why:
            self._note(self._pool, BEFORE, None)
            return
        if before["spec"] is None:
            self._kube.delete(self._config)
        else:
            self._kube.apply({**machine_config(self._options), "spec": before["spec"]}, FIELD_MANAGER)
        for name in before["nodes"]:
            self._label(name, None)
        if before["spec"] is not None:
            self._note(self._config, LABELLED, json.dumps([name for name in mine if name not in before["nodes"]]))
        # The operator recovers by itself once the requested configuration is the one that the nodes have.
        left = self._until(self._pool, None, before["spec"] or {})
        self._note(self._pool, BEFORE, None)
        outcome = f"it was rolled back, and the pool isn't updated yet: {left}" if left else "it was rolled back"
        raise NotInEffect(f"the nodes aren't updated: {why}; {outcome}")

    def _remove(self, observed: State, plan: Plan) -> None:
        steps = [change.step for change in plan.changes]
        theirs = observed.pool is not None and not _ours(observed.pool)
        going = [name for kind, name in steps if kind == "label"]
        if theirs:
            # The record outlives the MachineConfig: it has our nodes, and shows that the removal isn't proven.
            record = Record(spec=None, nodes=sorted({*_labelled(observed), *going}))
            self._note(self._pool, BEFORE, json.dumps(record))
        for name in going:
            self._label(name, None)
        workers = Ref(API, "MachineConfigPool", "", "worker")
        if observed.pool is not None and not theirs:
            # Only a pool without nodes may be removed.
            why = self._until(self._pool, 0, patient=True) or self._until(workers, None)
            if why:
                raise NotInEffect(f"the nodes don't return to the workers' pool: {why}")
        if ("config", "") in steps:
            self._kube.delete(self._config)
        if ("pool", "") in steps:
            self._kube.delete(self._pool)
        if theirs:
            # The nodes that stay in it may be degraded by the removed MachineConfig.
            why = self._until(self._pool, self._count(), {}, patient=True) or self._until(workers, None)
            if why:
                raise NotInEffect(f"the nodes aren't updated after the removal: {why}")
            self._note(self._pool, BEFORE, None)

    def _note(self, ref: Ref, key: str, text: str | None) -> None:
        self._kube.patch(ref, {"metadata": {"annotations": {key: text}}})

    def _label(self, name: str, value: str | None) -> None:
        labels = {f"{NODE_ROLE}{self._pool.name}": value}
        self._kube.patch(Ref("v1", "Node", "", name), {"metadata": {"labels": labels}})

    def _count(self) -> int:
        """Return how many nodes the pool selects."""
        pool = self._kube.get(self._pool) or {}
        return sum(
            1 for node in self._kube.list_all("v1", "Node") if _matches(pool, node["metadata"].get("labels") or {})
        )

    def _until(self, ref: Ref, nodes: int | None, spec: JsonObject | None = None, patient: bool = False) -> str:
        """Wait until a pool is updated; why it isn't, or nothing.

        :param ref: of the pool.
        :param nodes: its expected number of nodes; None for any.
        :param spec: of our MachineConfig, empty where there is none; None where it doesn't matter.
        :param patient: go on while it is degraded, because the cause is being removed.
        """

        # The pool's status shows a change after a moment.
        def problem() -> tuple[str, bool]:
            pool = self._kube.get(ref)
            if pool is None:
                return f"{ref} is gone", True
            # A rollback begins while the pool is degraded.
            if degraded(pool) and nodes is not None and not patient:
                return degraded(pool), True
            return finished(pool, nodes) or degraded(pool) or self._unlike(pool, spec), False

        return self._waiting.until_stable(problem)

    def _unlike(self, pool: JsonObject, spec: JsonObject | None) -> str:
        """Compare the pool's rendered configuration with ours: its status may be older than our change."""
        if spec is None:
            return ""
        given = (pool.get("spec") or {}).get("configuration") or {}
        if not spec:
            listed = [source.get("name") for source in given.get("source") or []]
            return f"{given.get('name')} still contains {self._config.name}" if self._config.name in listed else ""
        rendered = self._kube.get(Ref(API, "MachineConfig", "", given["name"])) if given.get("name") else None
        return "" if holds(rendered, spec) else f"{given.get('name')} doesn't contain {self._config.name} as it is now"


def work(kube: Kube, params: JsonObject, check_mode: bool, waiting: Waiting | None = None) -> JsonObject:
    """Run the module.

    :param kube: the cluster.
    :param params: the module's parameters.
    :param check_mode: predict the changes without applying them.
    :param waiting: for the operator; by default as long as the option ``timeout`` says.
    :raises ShareError: with ``changed`` in its details.
    """
    waiting = waiting or Waiting(params["timeout"], PAUSE)
    return run(MachineConfigReconciler(kube, Options.of(params), waiting), check_mode)
