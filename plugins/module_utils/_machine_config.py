# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What nodes with Red Hat Enterprise Linux CoreOS get instead of SSH: the concern of the module ``machine_config``.

The Machine Config Operator owns such a node's /etc. What is changed there by hand makes the node's pool Degraded. So
files and kernel arguments go into a MachineConfig, for a pool of their own, so that only nodes with GPUs are drained
and rebooted, one after the other. A pool that becomes Degraded keeps its nodes cordoned, so the MachineConfig is then
put back to what it was.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._objects import FIELD_MANAGER, Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import condition
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

API = "machineconfiguration.openshift.io/v1"
DEFINITION = Ref(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "machineconfigpools.machineconfiguration.openshift.io"
)
ROLE = "machineconfiguration.openshift.io/role"
NODE_ROLE = "node-role.kubernetes.io/"
# Understood by every release of OpenShift 4 from 4.6 on.
IGNITION = "3.1.0"
PART_OF = {"app.kubernetes.io/part-of": "gpushare"}
# On the pool, until its nodes were seen with it: the MachineConfig before, and the nodes that came into the pool.
BEFORE = "kubegpu.share/replaced-config"
# On our MachineConfig: the nodes that we have put into the pool, which may be somebody else's.
LABELLED = "kubegpu.share/labelled-nodes"
# Pools that OpenShift itself has; a MachineConfig for them reboots what has no GPU.
BUILT_IN = ("master", "worker", "arbiter")

NOUVEAU_FILE = "/etc/modprobe.d/blacklist-nouveau.conf"
NOUVEAU = "blacklist nouveau\noptions nouveau modeset=0\n"
NOUVEAU_ARGUMENTS = ("modprobe.blacklist=nouveau", "rd.driver.blacklist=nouveau")
RUNTIME_FILE = "/etc/crio/crio.conf.d/99-nvidia.conf"

ARGUMENTS: Json = {
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


# --------------------------------------------------------------------------- what it says


def crio_drop_in(path: str) -> str:
    """CRI-O's own default runtime, which ContainerRuntimeConfig can't set: it knows crun and runc."""
    return (
        "[crio.runtime]\n"
        'default_runtime = "nvidia"\n'
        "[crio.runtime.runtimes.nvidia]\n"
        f"runtime_path = {json.dumps(path)}\n"
        'runtime_type = "oci"\n'
    )


def file_of(path: str, text: str) -> Json:
    """A file as Ignition has it."""
    encoded = base64.b64encode(text.encode()).decode()
    # Octal 0644: JSON knows no octal numbers.
    contents = {"source": f"data:text/plain;charset=utf-8;base64,{encoded}"}
    return {"path": path, "mode": 420, "overwrite": True, "contents": contents}


def machine_config(params: Json) -> Json:
    """The MachineConfig that is asked for.

    :raises BadInput: an option can't be served.
    """
    files, arguments = [], [str(one) for one in params["kernel_arguments"]]
    if params["nouveau"]:
        files.append(file_of(NOUVEAU_FILE, NOUVEAU))
        arguments = [*NOUVEAU_ARGUMENTS, *arguments]
    path = str(params["runtime_path"])
    if path:
        if not re.fullmatch(r"/[\w./+-]+", path):
            raise BadInput(f"runtime_path: {path!r} isn't an absolute path of a program")
        files.append(file_of(RUNTIME_FILE, crio_drop_in(path)))
    if not files and not arguments:
        raise BadInput("nouveau, runtime_path, kernel_arguments: none of them asks for anything")
    for one in arguments:
        if not one or re.search(r"\s", one):
            raise BadInput(f"kernel_arguments: {one!r} isn't one argument")
    labels = {ROLE: str(params["pool"]), **PART_OF}
    spec: Json = {"config": {"ignition": {"version": IGNITION}}}
    if files:
        spec["config"]["storage"] = {"files": files}
    if arguments:
        spec["kernelArguments"] = arguments
    metadata = {"name": str(params["name"]), "labels": labels}
    return {"apiVersion": API, "kind": "MachineConfig", "metadata": metadata, "spec": spec}


def pool_of(name: str) -> Json:
    """A pool of the nodes with a role; what workers get, they get too."""
    selector = {"matchExpressions": [{"key": ROLE, "operator": "In", "values": ["worker", name]}]}
    spec = {"machineConfigSelector": selector, "nodeSelector": {"matchLabels": {f"{NODE_ROLE}{name}": ""}}}
    return {
        "apiVersion": API,
        "kind": "MachineConfigPool",
        "metadata": {"name": name, "labels": PART_OF},
        "spec": spec,
    }


def finished(pool: Json, nodes: int | None = None) -> str:
    """What a pool still has to do; empty where all its nodes have what it wants."""
    name, status = pool["metadata"]["name"], pool.get("status") or {}
    if int(status.get("observedGeneration") or 0) < int(pool["metadata"].get("generation") or 0):
        return f"pool {name}: the Machine Config Operator hasn't seen the change yet"
    count, ready = int(status.get("machineCount") or 0), int(status.get("readyMachineCount") or 0)
    if nodes is not None and count != nodes:
        return f"pool {name} counts {count} of {nodes} nodes"
    if condition(pool, "Updated")[0] != "True" or condition(pool, "Updating")[0] == "True" or ready != count:
        return f"pool {name}: {ready} of {count} nodes are updated"
    wanted = ((pool.get("spec") or {}).get("configuration") or {}).get("name")
    if wanted != (status.get("configuration") or {}).get("name"):
        return f"pool {name} is about to go to {wanted}"
    return ""


def holds(rendered: Json | None, spec: Json) -> bool:
    """Whether the configuration that a pool's nodes get says what one MachineConfig of it says."""
    there = (rendered or {}).get("spec") or {}
    files = {one["path"]: one for one in _files(there)}
    # The operator merges files and arguments of all MachineConfigs, and writes nothing of them anew.
    for one in _files(spec):
        if (files.get(one["path"]) or {}).get("contents", {}).get("source") != one["contents"]["source"]:
            return False
    return set(spec.get("kernelArguments") or []) <= set(there.get("kernelArguments") or [])


def _files(spec: Json) -> list[Json]:
    found: list[Json] = ((spec.get("config") or {}).get("storage") or {}).get("files") or []
    return found


def degraded(pool: Json) -> str:
    """Why a pool can't go on; empty where it can."""
    for kind in ("NodeDegraded", "RenderDegraded", "Degraded"):
        status, message = condition(pool, kind)
        if status == "True":
            return f"pool {pool['metadata']['name']} is {kind}: {message or 'without a reason'}"
    return ""


# --------------------------------------------------------------------------- looking and planning


@dataclasses.dataclass(frozen=True)
class Seen:
    """The cluster's part of it."""

    config: Json | None
    pool: Json | None
    nodes: t.Mapping[str, Json]
    pools: t.Sequence[Json]


def observe(kube: Kube, params: Json) -> Seen:
    """:raises BadInput: this cluster has no MachineConfigs."""
    if kube.get(DEFINITION) is None:
        raise BadInput("machine_config: this cluster knows no MachineConfigPool, so it isn't OpenShift")
    pools = kube.list_all(API, "MachineConfigPool")
    named = [one for one in pools if one["metadata"]["name"] == params["pool"]]
    return Seen(
        kube.get(Ref(API, "MachineConfig", "", str(params["name"]))),
        named[0] if named else None,
        {one["metadata"]["name"]: one for one in kube.list_all("v1", "Node")},
        pools,
    )


def check(params: Json, seen: Seen) -> None:
    """Refuse what would reboot others' nodes, or leave them where nobody manages them.

    :raises BadInput: one sentence; nothing was changed.
    """
    pool = str(params["pool"])
    if pool in BUILT_IN or not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", pool):
        raise BadInput(f"pool: {pool!r} can't be the name of a pool of nodes with GPUs alone")
    if seen.pool is not None:
        selector = ((seen.pool.get("spec") or {}).get("machineConfigSelector")) or {}
        if not _selects(selector, pool):
            raise BadInput(f"pool: MachineConfigPool {pool} is there and doesn't take MachineConfigs of role {pool}")
        if not _selects(selector, "worker"):
            raise BadInput(f"pool: MachineConfigPool {pool} is there and leaves its nodes without what workers have")
        _not_paused(seen.pool)
    if not params["nodes"]:
        raise BadInput("nodes: it names none, so that there is nothing to configure")
    label = {f"{NODE_ROLE}{pool}": ""}
    for name in params["nodes"]:
        node = seen.nodes.get(name)
        if node is None:
            raise BadInput(f"nodes: the cluster has no node {name}")
        labels = node["metadata"].get("labels") or {}
        if f"{NODE_ROLE}master" in labels or f"{NODE_ROLE}control-plane" in labels:
            raise BadInput(f"nodes: {name} is a node of the control plane, which can be in no other pool than master")
        if seen.pool is not None and not _matches(seen.pool, {**labels, **label}):
            raise BadInput(
                f"pool: MachineConfigPool {pool} is there and doesn't take node {name} by the label of its role"
            )
        for other in seen.pools:
            if other["metadata"]["name"] not in (*BUILT_IN, pool) and _matches(other, labels):
                raise BadInput(f"nodes: {name} is in pool {other['metadata']['name']} already, and can be in only one")
    for one in seen.pools:
        # What a run that was cut short left degraded is there to be taken back.
        mine = BEFORE in (one["metadata"].get("annotations") or {})
        if one["metadata"]["name"] in ("worker", pool) and degraded(one) and not mine:
            raise BadInput(f"pool: {degraded(one)}; a node can't come or go until that is mended")


def _not_paused(pool: Json) -> None:
    if (pool.get("spec") or {}).get("paused"):
        name = pool["metadata"]["name"]
        raise BadInput(f"pool: MachineConfigPool {name} is paused, so that nothing would come to its nodes")


def _selects(selector: Json, role: str) -> bool:
    if (selector.get("matchLabels") or {}).get(ROLE) == role:
        return True
    return any(
        one.get("key") == ROLE and one.get("operator") == "In" and role in (one.get("values") or [])
        for one in selector.get("matchExpressions") or []
    )


def _matches(pool: Json, labels: Json) -> bool:
    """Whether a pool takes nodes with these labels."""
    selector = ((pool.get("spec") or {}).get("nodeSelector")) or {}
    wanted, terms = selector.get("matchLabels") or {}, selector.get("matchExpressions") or []
    if not (wanted or terms):
        return False
    return all(labels.get(key) == value for key, value in wanted.items()) and all(_holds(one, labels) for one in terms)


def _holds(term: Json, labels: Json) -> bool:
    key, operator = str(term.get("key")), str(term.get("operator"))
    if operator in ("Exists", "DoesNotExist"):
        return (key in labels) == (operator == "Exists")
    among = key in labels and labels[key] in (term.get("values") or [])
    return among == (operator == "In")


def make_plan(params: Json, seen: Seen) -> Plan:
    """What has to be done; pure."""
    if params["state"] == "absent":
        return _absent(params, seen)
    for one in (seen.config, seen.pool):
        if one is not None and _leaving(one):
            raise BadInput(f"{one['kind']} {one['metadata']['name']} is being deleted; run again when it is gone")
    check(params, seen)
    wish, changes = machine_config(params), []
    if seen.pool is None:
        changes.append(Change(f"MachineConfigPool {params['pool']}", "", _shown(pool_of(params["pool"])), ("pool", "")))
    if seen.config is None or seen.config.get("spec") != wish["spec"]:
        before = _shown({"spec": seen.config["spec"]}) if seen.config else ""
        if seen.config and not _ours(seen.config):
            raise BadInput(f"name: MachineConfig {params['name']} is there and isn't ours; choose another name")
        changes.append(
            Change(f"MachineConfig {params['name']}", before, _shown({"spec": wish["spec"]}), ("config", ""))
        )
    label = f"{NODE_ROLE}{params['pool']}"
    for name in params["nodes"]:
        if label not in (seen.nodes[name]["metadata"].get("labels") or {}):
            changes.append(Change(f"Node {name}", "", f'{label}: ""\n', ("label", name)))
    if not changes and _unproven(seen) is not None:
        changes.append(Change(f"MachineConfigPool {params['pool']}", "", "every node updated\n", ("prove", "")))
    return Plan(tuple(changes))


def _absent(params: Json, seen: Seen) -> Plan:
    """Nodes go back to the workers first: a pool that goes before them leaves them to nobody."""
    label, changes = f"{NODE_ROLE}{params['pool']}", []
    ours = seen.pool is not None and _ours(seen.pool)
    # Another's pool keeps the nodes that it had.
    mine = _labelled(seen)
    for name, node in sorted(seen.nodes.items()):
        if (ours or name in mine) and label in (node["metadata"].get("labels") or {}):
            changes.append(Change(f"Node {name}", f'{label}: ""\n', "", ("label", name)))
    if seen.config is not None and _ours(seen.config) and not _leaving(seen.config):
        changes.append(
            Change(f"MachineConfig {params['name']}", _shown({"spec": seen.config["spec"]}), "", ("config", ""))
        )
    if seen.pool is not None and ours and not _leaving(seen.pool):
        changes.append(Change(f"MachineConfigPool {params['pool']}", _shown(pool_of(params["pool"])), "", ("pool", "")))
    if seen.pool is not None and not ours:
        if not changes and _unproven(seen) is not None:
            changes.append(Change(f"MachineConfigPool {params['pool']}", "", "every node updated\n", ("prove", "")))
        if changes:
            _not_paused(seen.pool)
    return Plan(tuple(changes))


def _notes(live: Json | None) -> Json:
    return ((live or {}).get("metadata") or {}).get("annotations") or {}


def _unproven(seen: Seen) -> Json | None:
    """What a run that was cut short wrote down on the pool."""
    notes = _notes(seen.pool)
    return t.cast(Json, json.loads(notes[BEFORE])) if BEFORE in notes else None


def _labelled(seen: Seen) -> set[str]:
    """The nodes that we have put into the pool."""
    noted = _notes(seen.config).get(LABELLED) if seen.config is not None and _ours(seen.config) else None
    return {*json.loads(noted or "[]"), *((_unproven(seen) or {}).get("nodes") or [])}


def _ours(live: Json) -> bool:
    return (live["metadata"].get("labels") or {}).get("app.kubernetes.io/part-of") == "gpushare"


def _leaving(live: Json) -> bool:
    return bool(live["metadata"].get("deletionTimestamp"))


def _shown(value: Json) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


# --------------------------------------------------------------------------- doing


class MachineConfigs:
    """Carries a plan out, and takes it back where the pool becomes Degraded."""

    def __init__(self, kube: Kube, params: Json, waiting: Waiting) -> None:
        self._kube = kube
        self._params = params
        self._waiting = waiting
        self._pool = Ref(API, "MachineConfigPool", "", str(params["pool"]))
        self._config = Ref(API, "MachineConfig", "", str(params["name"]))

    def apply(self, seen: Seen, plan: Plan) -> None:
        """:raises ShareError: it isn't in effect."""
        if self._params["state"] == "absent":
            self._remove(seen, plan)
            return
        steps = [one.step for one in plan.changes]
        coming = [name for kind, name in steps if kind == "label"]
        if ("pool", "") in steps:
            self._kube.apply(pool_of(self._pool.name), FIELD_MANAGER)
        # What a run that was cut short wrote down is older.
        before = _unproven(seen) or {"spec": (seen.config or {}).get("spec"), "nodes": []}
        before["nodes"] = sorted({*before["nodes"], *coming})
        self._note(self._pool, BEFORE, json.dumps(before))
        if ("config", "") in steps:
            self._kube.apply(machine_config(self._params), FIELD_MANAGER)
        mine = sorted({*_labelled(seen), *before["nodes"]})
        if json.dumps(mine) != _notes(seen.config).get(LABELLED):
            self._note(self._config, LABELLED, json.dumps(mine))
        for name in coming:
            self._label(name, "")
        self._prove(before, mine)

    def _prove(self, before: Json, mine: t.Sequence[str]) -> None:
        why = self._until(self._pool, self._count(), machine_config(self._params)["spec"])
        if not why:
            self._note(self._pool, BEFORE, None)
            return
        if before["spec"] is None:
            self._kube.delete(self._config)
        else:
            self._kube.apply({**machine_config(self._params), "spec": before["spec"]}, FIELD_MANAGER)
        for name in before["nodes"]:
            self._label(name, None)
        if before["spec"] is not None:
            self._note(self._config, LABELLED, json.dumps([name for name in mine if name not in before["nodes"]]))
        # The operator goes back by itself when what it is asked for is what the nodes have.
        left = self._until(self._pool, None, before["spec"] or {})
        self._note(self._pool, BEFORE, None)
        outcome = f"it was taken back, and the pool isn't content yet: {left}" if left else "it was taken back"
        raise NotInEffect(f"the nodes don't come up with it: {why}; {outcome}")

    def _remove(self, seen: Seen, plan: Plan) -> None:
        steps = [one.step for one in plan.changes]
        theirs = seen.pool is not None and not _ours(seen.pool)
        going = [name for kind, name in steps if kind == "label"]
        if theirs:
            # Also when the MachineConfig is gone, the next run knows what isn't proven, and whose nodes were ours.
            self._note(self._pool, BEFORE, json.dumps({"spec": None, "nodes": sorted({*_labelled(seen), *going})}))
        for name in going:
            self._label(name, None)
        workers = Ref(API, "MachineConfigPool", "", "worker")
        if seen.pool is not None and not theirs:
            # Only a pool without nodes may go.
            why = self._until(self._pool, 0, patient=True) or self._until(workers, None)
            if why:
                raise NotInEffect(f"the nodes don't go back to the workers: {why}")
        if ("config", "") in steps:
            self._kube.delete(self._config)
        if ("pool", "") in steps:
            self._kube.delete(self._pool)
        if theirs:
            # The nodes that stay in it may be degraded by the very MachineConfig that went.
            why = self._until(self._pool, self._count(), {}, patient=True) or self._until(workers, None)
            if why:
                raise NotInEffect(f"the nodes don't come up without it: {why}")
            self._note(self._pool, BEFORE, None)

    def _note(self, ref: Ref, key: str, text: str | None) -> None:
        self._kube.patch(ref, {"metadata": {"annotations": {key: text}}})

    def _label(self, name: str, value: str | None) -> None:
        labels = {f"{NODE_ROLE}{self._pool.name}": value}
        self._kube.patch(Ref("v1", "Node", "", name), {"metadata": {"labels": labels}})

    def _count(self) -> int:
        """How many nodes the pool has to have."""
        pool = self._kube.get(self._pool) or {}
        return sum(
            1 for one in self._kube.list_all("v1", "Node") if _matches(pool, one["metadata"].get("labels") or {})
        )

    def _until(self, ref: Ref, nodes: int | None, spec: Json | None = None, patient: bool = False) -> str:
        """Until a pool has done all; why it doesn't, or nothing.

        :param nodes: how many nodes it has to count; None for as many as it has.
        :param spec: what our MachineConfig says, empty where there is none; None where that doesn't matter.
        :param patient: what makes it degraded is being taken away.
        """

        # A change is seen in the pool's status a moment after it was made.
        def look() -> tuple[str, bool]:
            pool = self._kube.get(ref)
            if pool is None:
                return f"{ref} is gone", True
            # Waiting for what was there before begins while it is degraded.
            if degraded(pool) and nodes is not None and not patient:
                return degraded(pool), True
            return finished(pool, nodes) or degraded(pool) or self._unlike(pool, spec), False

        return self._waiting.until_quiet(look)

    def _unlike(self, pool: Json, spec: Json | None) -> str:
        """What the pool gives to its nodes and shouldn't; what it says of itself may be older than our change."""
        if spec is None:
            return ""
        given = (pool.get("spec") or {}).get("configuration") or {}
        if not spec:
            listed = [one.get("name") for one in given.get("source") or []]
            return f"{given.get('name')} is still made of {self._config.name}" if self._config.name in listed else ""
        rendered = self._kube.get(Ref(API, "MachineConfig", "", given["name"])) if given.get("name") else None
        return "" if holds(rendered, spec) else f"{given.get('name')} isn't made of {self._config.name} as it is now"


def work(kube: Kube, params: Json, check_mode: bool, waiting: Waiting | None = None) -> Json:
    """The module's whole work.

    :raises ShareError: with ``changed`` in its details.
    """
    seen = observe(kube, params)
    plan = make_plan(params, seen)
    result: Json = {"changed": not plan.empty, "diff": plan.diff()}
    if plan.empty or check_mode:
        return result
    try:
        MachineConfigs(kube, params, waiting or Waiting(params["timeout"], PAUSE)).apply(seen, plan)
    except ShareError as error:
        error.details.update(result)
        raise
    left = make_plan(params, observe(kube, params))
    if not left.empty:
        raise NotInEffect(f"changed, but still not as asked for: {left.headers()}", **result)
    return result
