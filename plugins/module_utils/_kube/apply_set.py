# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Create, change or remove a set of objects and wait for them; the module ``cluster_objects``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import typing as t
from types import MappingProxyType

from .._contracts.gpushare import pod_node
from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from . import objects
from .api import Kube
from .compare import managed_part
from .objects import foreign_objects
from .options import auth_arguments
from .refs import FIELD_MANAGER, Ref, ref_of
from .rollout import (
    WORKLOADS,
    containers_with_logs,
    node_reasons,
    not_ready_reason,
    of_daemon_set,
    ready,
    reasons,
    selector,
)

# From this number of objects of one kind and namespace on, one list costs less than a request for each.
MIN_LIST = 4
# Limits of the logs in an error message.
MAX_LOGS = 2
LOG_LINES = 3
# The fields that the diff of a deletion shows.
DIFF_FIELDS = ("apiVersion", "kind", "data", "rules", "spec")

LiveObjects = dict[Ref, t.Optional[JsonObject]]

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "definitions": {"type": "raw", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "wait": {"type": "bool", "default": False},
    "wait_timeout": {"type": "int", "default": 300},
    "node_resources": {"type": "dict", "default": {}},
    "min_nodes": {"type": "int", "default": 1},
    "replace_unready": {"type": "bool", "default": False},
    "status_file": {"type": "path"},
    "field_manager": {"type": "str", "default": FIELD_MANAGER},
}


@dataclasses.dataclass(frozen=True)
class Step:
    """What is sent for one object.

    :param desired: the definition to apply; None deletes the object.
    :param action: ``created``, ``changed``, ``unchanged``, ``deleted``, ``absent`` or ``kept``.
    """

    ref: Ref
    desired: JsonObject | None
    action: str


class ClusterObjects:
    """Observes, plans and applies a set of objects; a ``Reconciler``.

    :param manager: the field manager for server-side apply.
    :param replace_unready: delete pods of the DaemonSets that run without being ready.
    :param min_nodes: on how many nodes each DaemonSet has to run, at least.
    """

    def __init__(
        self,
        kube: Kube,
        definitions: list[JsonObject],
        state: str,
        manager: str = FIELD_MANAGER,
        replace_unready: bool = False,
        min_nodes: int = 1,
    ) -> None:
        self._kube = kube
        self._min_nodes = min_nodes
        self._manager = manager
        self._replace_unready = replace_unready
        # By uid, the pods that were not ready at the first observation; their replacements get time to become ready.
        self._unready: dict[str, JsonObject] | None = None
        self._absent = state == "absent"
        self._desired: dict[Ref, JsonObject | None] = {}
        for definition in reversed(definitions) if self._absent else definitions:
            ref = ref_of(definition)
            if self._absent:
                # Nodes are never deleted; only this manager's fields are removed.
                self._desired[ref] = objects.name_only(ref) if ref.kind == "Node" else None
            else:
                self._desired[ref] = objects.with_digest(definition)
        self._live: LiveObjects = {}
        self._actions: dict[Ref, str] = {}
        # Objects of others in namespaces that are to be deleted; such a namespace is kept.
        self._foreign: dict[Ref, list[str]] = {}

    def observe(self) -> LiveObjects:
        self._live = self._read(self._desired)
        if self._replace_unready and not self._absent:
            self._observe_unready_pods()
        for ref in self._desired:
            if self._absent and ref.kind == "Namespace" and self._live.get(ref):
                self._foreign[ref] = foreign_objects(self._kube, ref.name, self._desired.keys())
        return self._live

    def _read(self, refs: t.Iterable[Ref]) -> LiveObjects:
        """Read objects, many of a kind by one list."""
        groups: dict[tuple[str, str, str], list[Ref]] = collections.defaultdict(list)
        for ref in refs:
            groups[(ref.api_version, ref.kind, ref.namespace)].append(ref)
        live: LiveObjects = {}
        for (api_version, kind, namespace), members in groups.items():
            if len(members) < MIN_LIST:
                live.update({ref: self._kube.get(ref) for ref in members})
            else:
                listed = {item["metadata"]["name"]: item for item in self._kube.list_all(api_version, kind, namespace)}
                live.update({ref: listed.get(ref.name) for ref in members})
        return live

    def _observe_unready_pods(self) -> None:
        pods: list[JsonObject] = []
        for live in self._live.values():
            if live is not None and live["kind"] == "DaemonSet" and self._not_ready(live, {}) and selector(live):
                pods += self._kube.list_all("v1", "Pod", live["metadata"]["namespace"], label_selector=selector(live))
        unready = {
            str(pod["metadata"]["uid"]): pod
            for pod in pods
            if containers_with_logs(pod) and not ready(pod) and not _is_terminating(pod)
        }
        known = unready if self._unready is None else self._unready
        self._unready = {uid: pod for uid, pod in unready.items() if uid in known}

    def plan(self, state: LiveObjects) -> Plan:
        changes = []
        for ref, desired in self._desired.items():
            step, before, after = self._step(ref, desired, state.get(ref))
            self._actions.setdefault(ref, step.action)
            if step.action not in ("unchanged", "absent", "kept"):
                old, new = objects.diff_texts(before, after)
                changes.append(Change(str(ref), old, new, step))
        # A workload that changes replaces its pods itself.
        if not any(change.step.ref.kind == "DaemonSet" for change in changes):
            for pod in (self._unready or {}).values():
                ref = Ref("v1", "Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])
                self._actions.setdefault(ref, "deleted")
                text = "".join(f"{line}\n" for line in reasons(None, [pod], []))
                changes.append(Change(str(ref), text, "", Step(ref, None, "deleted")))
        return Plan(tuple(changes))

    def _step(
        self, ref: Ref, desired: JsonObject | None, live: JsonObject | None
    ) -> tuple[Step, JsonObject | None, JsonObject | None]:
        """Return the step for one object, with its managed part before and after."""
        if live is not None and _is_terminating(live):
            if desired is not None and ref.kind != "Node":
                raise ShareError(f"{ref} is being deleted; run again when it is gone")
            # The deletion was requested already.
            return Step(ref, desired, "absent" if desired is None else "unchanged"), None, None
        if live is None:
            if ref.kind == "Node" and not self._absent:
                raise BadInput(f"definitions: {ref} isn't in the cluster, and nodes aren't created")
            if desired is None or ref.kind == "Node":
                return Step(ref, desired, "absent"), None, None
            return Step(ref, desired, "created"), None, desired
        if desired is None and self._foreign.get(ref):
            return Step(ref, None, "kept"), None, None
        if desired is None:
            shown: JsonObject = {key: live[key] for key in DIFF_FIELDS if key in live}
            return Step(ref, None, "deleted"), {**shown, "metadata": objects.name_only(ref)["metadata"]}, None
        before = managed_part(live, desired, self._manager)
        if before == desired:
            return Step(ref, desired, "unchanged"), None, None
        return Step(ref, desired, "changed"), before, desired

    def apply(self, state: LiveObjects, plan: Plan) -> None:
        for change in plan.changes:
            step = t.cast(Step, change.step)
            if step.desired is None:
                self._kube.delete(step.ref)
                continue
            desired, live = step.desired, state.get(step.ref)
            if step.ref.kind == "Node" and live is not None:
                # Apply creates missing objects; with the uid it can't recreate a node that was just deleted.
                desired = {**desired, "metadata": {**desired["metadata"], "uid": live["metadata"]["uid"]}}
            self._kube.apply(desired, self._manager)

    # ----------------------------------------------------------------- waiting

    def wait(self, waiting: Waiting, node_resources: t.Mapping[str, int] = MappingProxyType({})) -> None:
        """Wait until every workload is rolled out and every node announces its resources, or all objects are deleted.

        :raises NotInEffect: the time is over; with the reasons.
        """
        end = waiting.now() + waiting.timeout
        pending = self._pending(dict(self._live), node_resources)
        while pending:
            if waiting.now() >= end:
                texts = "; ".join([*pending.values(), *self._reasons(list(pending))])
                raise NotInEffect(f"not in effect within {waiting.timeout:g} s: {texts}")
            waiting.status("; ".join(pending.values()))
            waiting.sleep(waiting.pause)
            try:
                pending = self._poll(pending, node_resources)
            except ShareError as error:
                # The API server may be unavailable for a moment.
                pending = {ref: f"{ref}: {error}" for ref in pending}

    def unready(self, node_resources: t.Mapping[str, int] = MappingProxyType({})) -> list[str]:
        """Return why planned objects that don't change aren't in the desired state yet."""
        unchanged = {ref: live for ref, live in self._live.items() if self._actions.get(ref) == "unchanged"}
        return list(self._pending(unchanged, node_resources).values())

    def _poll(self, pending: t.Collection[Ref], node_resources: t.Mapping[str, int]) -> dict[Ref, str]:
        """Read pending objects again.

        :returns: why objects aren't in the desired state.
        """
        # A new label of a node brings the DaemonSets new pods.
        too = "DaemonSet" if not self._absent and any(ref.kind == "Node" for ref in pending) else ""
        polled = {ref: self._kube.get(ref) for ref in self._desired if ref in pending or ref.kind == too}
        still_pending = self._pending(polled, node_resources)
        if _daemon_sets(pending) and not _daemon_sets(still_pending) and not self._absent:
            # Before, the nodes announced what the former pods had registered, and then 0 until the new ones registered.
            nodes = self._read(ref for ref in self._desired if ref.kind == "Node" and ref not in polled)
            still_pending.update(self._pending(nodes, node_resources))
        return still_pending

    def _pending(self, state: LiveObjects, node_resources: t.Mapping[str, int]) -> dict[Ref, str]:
        """Return why objects aren't in the desired state."""
        if self._absent:
            deleted = [ref for ref in state if ref.kind != "Node" and not self._foreign.get(ref)]
            return {ref: f"{ref} still exists" for ref in deleted if state[ref]}
        texts = {
            ref: self._not_ready(live, node_resources) if live else f"{ref} was deleted" for ref, live in state.items()
        }
        return {ref: text for ref, text in texts.items() if text}

    def _not_ready(self, live: JsonObject, node_resources: t.Mapping[str, int]) -> str | None:
        return not_ready_reason(live, node_resources, self._min_nodes)

    def _reasons(self, pending: t.Sequence[Ref]) -> list[str]:
        """Return reasons from pods, their events and logs, as far as they are readable."""
        nodes = {ref.name for ref in pending if ref.kind == "Node"}
        texts: list[str] = []
        for ref, live in self._live.items():
            if live is None or ref.kind not in WORKLOADS or not (ref in pending or nodes) or not selector(live):
                continue
            try:
                pods = self._kube.list_all("v1", "Pod", ref.namespace, label_selector=selector(live))
                events = self._kube.list_all("v1", "Event", ref.namespace, field_selector="type=Warning")
            except ShareError as error:
                texts.append(str(error))
                continue
            if ref not in pending:
                pods = [pod for pod in pods if pod_node(pod) in nodes]
            texts += reasons(live if not pods else None, pods, events)
            texts += self._logs(pods)
            empty = nodes - set(map(pod_node, pods))
            texts += [f"no pod of {ref} is on {name}" for name in sorted(empty)]
        for name in sorted(nodes):
            try:
                texts += self._of_node(name, pods_too=not any(ref.kind in WORKLOADS for ref in self._live))
            except ShareError as error:
                texts.append(str(error))
        return list(dict.fromkeys(texts))

    def _of_node(self, name: str, pods_too: bool) -> list[str]:
        """Return why a node may not announce its resources.

        :param pods_too: what announces them isn't among the objects, such as a chart's: any DaemonSet's pod may do it.
        :raises ShareError: something can't be read.
        """
        node = self._kube.get(Ref("v1", "Node", "", name))
        texts = node_reasons(node) if node else []
        pods = self._kube.list_all("v1", "Pod", field_selector=f"spec.nodeName={name}") if pods_too else []
        waiting = [pod for pod in pods if of_daemon_set(pod) and not ready(pod)]
        for namespace in sorted({pod["metadata"]["namespace"] for pod in waiting}):
            events = self._kube.list_all("v1", "Event", namespace, field_selector="type=Warning")
            texts += reasons(None, [pod for pod in waiting if pod["metadata"]["namespace"] == namespace], events)
        return texts + self._logs(waiting)

    def _logs(self, pods: t.Sequence[JsonObject]) -> list[str]:
        """Return the last log lines of containers that aren't ready; events of probes have no reason."""
        logs = []
        containers = [(pod, container) for pod in pods for container in containers_with_logs(pod)]
        for pod, container in containers[:MAX_LOGS]:
            name = pod["metadata"]["name"]
            try:
                log = self._kube.log(pod["metadata"]["namespace"], name, container, LOG_LINES)
            except ShareError:
                continue
            lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
            if lines:
                logs.append(f"log of pod {name}: {' | '.join(lines)}")
        return logs

    def summary(self) -> list[dict[str, str]]:
        """Return the action for each object."""
        return [
            {
                **{"kind": ref.kind, "namespace": ref.namespace, "name": ref.name, "action": action},
                **({"because": ", ".join(self._foreign[ref])} if action == "kept" else {}),
            }
            for ref, action in self._actions.items()
        ]


def _daemon_sets(refs: t.Iterable[Ref]) -> bool:
    return any(ref.kind == "DaemonSet" for ref in refs)


def _is_terminating(live: JsonObject) -> bool:
    return bool(live["metadata"].get("deletionTimestamp"))


def status_writer(path: str | None) -> t.Callable[[str], None]:
    """Return a function that replaces a file's text; it does nothing without a path or where the file isn't there."""

    def write(text: str) -> None:
        with contextlib.suppress(OSError), open(path or "", "r+", encoding="utf-8") as file:
            file.truncate()
            file.write(text)

    return write


def ensure(kube: Kube, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Create, change or remove the objects, and wait for them if asked to.

    :param params: the module's options.
    :param check: predict the changes without applying them.
    :param waiting: the clock, for tests.
    :raises ShareError: its details have the changes made until then.
    """
    definitions = objects.parse(params["definitions"])
    if params["node_resources"] and not any(definition["kind"] == "Node" for definition in definitions):
        raise BadInput("node_resources: no Node is among the definitions, so the wait would be for nothing")
    reconciler = ClusterObjects(
        kube, definitions, params["state"], params["field_manager"], params["replace_unready"], params["min_nodes"]
    )
    result: JsonObject = {"changed": False}
    try:
        result = run(reconciler, check)
        if params["wait"] and check:
            result["unready"] = reconciler.unready(params["node_resources"])
        elif params["wait"]:
            status = status_writer(params.get("status_file"))
            waiting = waiting or Waiting(timeout=params["wait_timeout"], status=status)
            reconciler.wait(waiting, params["node_resources"])
    except ShareError as error:
        error.details.update(result, objects=reconciler.summary(), requests=dict(kube.requests))
        raise
    result.update(objects=reconciler.summary(), requests=dict(kube.requests))
    return result
