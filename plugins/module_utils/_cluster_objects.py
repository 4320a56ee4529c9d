# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A set of objects as they should be on a cluster: the concern of the module ``cluster_objects``."""

from __future__ import annotations

import collections
import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _objects as objects
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._namespace_use import strangers
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._rollout import (
    WORKLOADS,
    ready,
    reasons,
    selector,
    unfinished,
    unready,
)
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan, run
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

# From so many objects of one kind and namespace on, one list is cheaper than asking for each.
LIST_FROM = 4
# How much of the pods' logs a failure tells.
MOST_LOGS = 2
LOG_LINES = 3

Seen = t.Dict[Ref, t.Optional[Json]]


@dataclasses.dataclass(frozen=True)
class Step:
    """What is sent for one object; None as wish removes it."""

    ref: Ref
    wish: Json | None
    action: str


class ClusterObjects:
    """Observes, plans and applies a set of objects; a ``Concern`` of the runner."""

    def __init__(
        self,
        kube: Kube,
        definitions: list[Json],
        state: str,
        manager: str = objects.FIELD_MANAGER,
        replace_unready: bool = False,
    ) -> None:
        self._kube = kube
        self._manager = manager
        self._replace_unready = replace_unready
        # Pods by uid that this run found not ready; those that take their place get their time.
        self._stuck: dict[str, Json] | None = None
        self._absent = state == "absent"
        ordered = list(reversed(definitions)) if self._absent else definitions
        self.wishes: dict[Ref, Json | None] = {}
        for one in ordered:
            ref = objects.ref_of(one)
            if self._absent:
                # A node is never deleted: what is ours on it is taken back.
                self.wishes[ref] = objects.bare(ref) if ref.kind == "Node" else None
            else:
                self.wishes[ref] = objects.stamped(one)
        self.seen: Seen = {}
        self.actions: dict[Ref, str] = {}
        # What others have in namespaces that should go: they stay for it.
        self.used: dict[Ref, list[str]] = {}

    def observe(self) -> Seen:
        groups: dict[tuple[str, str, str], list[Ref]] = collections.defaultdict(list)
        for ref in self.wishes:
            groups[(ref.api_version, ref.kind, ref.namespace)].append(ref)
        self.seen = {}
        for (api_version, kind, namespace), refs in groups.items():
            if len(refs) < LIST_FROM:
                self.seen.update({ref: self._kube.get(ref) for ref in refs})
            else:
                found = {ref.name: ref for ref in refs}
                self.seen.update(dict.fromkeys(refs))
                for live in self._kube.list_all(api_version, kind, namespace):
                    name = live["metadata"]["name"]
                    if name in found:
                        self.seen[found[name]] = live
        self._look_for_stuck()
        self._look_for_strangers()
        return self.seen

    def _look_for_strangers(self) -> None:
        for ref in self.wishes:
            if self._absent and ref.kind == "Namespace" and self.seen.get(ref):
                self.used[ref] = strangers(self._kube, ref.name, self.wishes.keys())

    def _look_for_stuck(self) -> None:
        if not self._replace_unready or self._absent:
            return
        pods: list[Json] = []
        for live in self.seen.values():
            if live is not None and live["kind"] == "DaemonSet" and unfinished(live) and selector(live):
                pods += self._kube.list_all("v1", "Pod", live["metadata"]["namespace"], label_selector=selector(live))
        found = [pod for pod in pods if unready(pod) and not ready(pod) and not _leaving(pod)]
        stuck = {str(pod["metadata"]["uid"]): pod for pod in found}
        known = stuck if self._stuck is None else self._stuck
        self._stuck = {uid: pod for uid, pod in stuck.items() if uid in known}

    def plan(self, seen: Seen) -> Plan:
        changes = []
        for ref, wish in self.wishes.items():
            step, before, after = self._step(ref, wish, seen.get(ref))
            self.actions.setdefault(ref, step.action)
            if step.action not in ("unchanged", "absent", "kept"):
                old, new = objects.shown(before, after)
                changes.append(Change(str(ref), old, new, step))
        # A workload that changes replaces its pods itself.
        if not any(change.step.ref.kind == "DaemonSet" for change in changes):
            for pod in (self._stuck or {}).values():
                ref = Ref("v1", "Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])
                self.actions.setdefault(ref, "deleted")
                text = "".join(f"{line}\n" for line in reasons(None, [pod], []))
                changes.append(Change(str(ref), text, "", Step(ref, None, "deleted")))
        return Plan(tuple(changes))

    def _step(self, ref: Ref, wish: Json | None, live: Json | None) -> tuple[Step, Json | None, Json | None]:
        if live is not None and _leaving(live):
            if wish is not None and ref.kind != "Node":
                raise ShareError(f"{ref} is being deleted; run again when it is gone")
            # Asked for already; waiting is all that is left to do.
            return Step(ref, wish, "absent" if wish is None else "unchanged"), None, None
        if live is None:
            if ref.kind == "Node" and not self._absent:
                raise BadInput(f"definitions: {ref} isn't in the cluster, and nodes aren't created")
            if wish is None or ref.kind == "Node":
                return Step(ref, wish, "absent"), None, None
            return Step(ref, wish, "created"), None, wish
        if wish is None and self.used.get(ref):
            return Step(ref, None, "kept"), None, None
        if wish is None:
            kept = ("apiVersion", "kind", "data", "rules", "spec")
            whole = {key: value for key, value in live.items() if key in kept}
            return Step(ref, None, "deleted"), {**whole, "metadata": objects.bare(ref)["metadata"]}, None
        before = objects.ours(live, wish, self._manager)
        if before == wish:
            return Step(ref, wish, "unchanged"), None, None
        return Step(ref, wish, "changed"), before, wish

    def apply(self, seen: Seen, plan: Plan) -> None:
        for change in plan.changes:
            step = t.cast(Step, change.step)
            if step.wish is None:
                self._kube.delete(step.ref)
                continue
            wish, live = step.wish, seen.get(step.ref)
            if step.ref.kind == "Node" and live is not None:
                # Apply creates what isn't there; with the uid it can't bring back a node that has just left.
                wish = {**wish, "metadata": {**wish["metadata"], "uid": live["metadata"]["uid"]}}
            self._kube.apply(wish, self._manager)

    # ----------------------------------------------------------------- waiting

    def wait(self, waiting: Waiting, node_resources: t.Sequence[str] = ()) -> None:
        """Until every workload is rolled out and every node announces what it should, or all that goes is gone.

        :raises NotInEffect: it wasn't so in time; with the reason in words.
        """
        end = waiting.now() + waiting.timeout
        left = self._left(dict(self.seen), node_resources)
        while left:
            if waiting.now() >= end:
                words = "; ".join([*left.values(), *self._why(list(left))])
                raise NotInEffect(f"not in effect within {waiting.timeout:g} s: {words}")
            waiting.sleep(waiting.pause)
            try:
                left = self._left({ref: self._kube.get(ref) for ref in self._together(left)}, node_resources)
            except ShareError as error:
                # The API server may be away for a moment: that is no reason to give up before the time is over.
                left = {ref: f"{ref}: {error}" for ref in left}

    def _together(self, left: t.Iterable[Ref]) -> list[Ref]:
        """What to look at next; a DaemonSet may get pods to wait for only now that nodes have their label."""
        nodes = any(ref.kind == "Node" for ref in left)
        return [ref for ref in self.wishes if ref in left or (nodes and ref.kind == "DaemonSet" and not self._absent)]

    def _left(self, seen: Seen, node_resources: t.Sequence[str]) -> dict[Ref, str]:
        if self._absent:
            going = {ref: live for ref, live in seen.items() if ref.kind != "Node" and not self.used.get(ref)}
            return {ref: f"{ref} is still there" for ref, live in going.items() if live}
        told = {ref: unfinished(live, node_resources) if live else f"{ref} is gone" for ref, live in seen.items()}
        return {ref: text for ref, text in told.items() if text}

    def _why(self, left: t.Sequence[Ref]) -> list[str]:
        """Reasons from pods and events; what can't be asked is left out: the failure is told anyway."""
        nodes = {ref.name for ref in left if ref.kind == "Node"}
        said: list[str] = []
        for ref, live in self.seen.items():
            if live is None or ref.kind not in WORKLOADS or not (ref in left or nodes) or not selector(live):
                continue
            try:
                pods = self._kube.list_all("v1", "Pod", ref.namespace, label_selector=selector(live))
                events = self._kube.list_all("v1", "Event", ref.namespace, field_selector="type=Warning")
            except ShareError as error:
                said.append(str(error))
                continue
            if ref not in left:
                pods = [pod for pod in pods if (pod.get("spec") or {}).get("nodeName") in nodes]
            said += reasons(live if not pods else None, pods, events)
            said += self._logs(pods)
            empty = nodes - {str((pod.get("spec") or {}).get("nodeName")) for pod in pods}
            said += [f"no pod of {ref} is on {name}" for name in sorted(empty)]
        return list(dict.fromkeys(said))

    def _logs(self, pods: t.Sequence[Json]) -> list[str]:
        """What those that run without being ready say themselves: a probe's event tells a number and no reason."""
        said = []
        silent = [(pod, container) for pod in pods for container in unready(pod)]
        for pod, container in silent[:MOST_LOGS]:
            name = pod["metadata"]["name"]
            try:
                written = self._kube.log(pod["metadata"]["namespace"], name, container, LOG_LINES)
            except ShareError:
                continue
            lines = [" ".join(line.split()) for line in written.splitlines() if line.strip()]
            if lines:
                said.append(f"log of pod {name}: {' | '.join(lines)}")
        return said

    def summary(self) -> list[dict[str, str]]:
        return [
            {
                **{"kind": ref.kind, "namespace": ref.namespace, "name": ref.name, "action": action},
                **({"because": ", ".join(self.used[ref])} if action == "kept" else {}),
            }
            for ref, action in self.actions.items()
        ]


def _leaving(live: Json) -> bool:
    return bool(live["metadata"].get("deletionTimestamp"))


ARGUMENTS: Json = {
    **auth_arguments(),
    "definitions": {"type": "raw", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "wait": {"type": "bool", "default": False},
    "wait_timeout": {"type": "int", "default": 300},
    "node_resources": {"type": "list", "elements": "str", "default": []},
    "replace_unready": {"type": "bool", "default": False},
    "field_manager": {"type": "str", "default": objects.FIELD_MANAGER},
}


def converge(kube: Kube, params: Json, check: bool, waiting: Waiting | None = None) -> Json:
    """The module's whole work.

    :raises ShareError: with what was changed until then in its details.
    """
    concern = ClusterObjects(
        kube,
        objects.read(params["definitions"]),
        params["state"],
        params["field_manager"],
        params["replace_unready"],
    )
    result: Json = {"changed": False}
    try:
        result = run(concern, check)
        if params["wait"] and not check:
            concern.wait(waiting or Waiting(timeout=params["wait_timeout"]), params["node_resources"])
    except ShareError as error:
        error.details.update(result, objects=concern.summary(), requests=dict(kube.requests))
        raise
    result.update(objects=concern.summary(), requests=dict(kube.requests))
    return result
