# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""NVIDIA's GPU Operator beside gpushare: the concern of the module ``gpu_operator``.

Two device plugins on one node give the same cards away twice, so the operator's goes where gpushare's is: everywhere by
its ClusterPolicy, or from single nodes by their labels where others keep theirs. And from its release 25.10 on, the
operator lets the container runtime give cards out by CDI alone. gpushare's pods name their card by an environment
variable, to which nobody listens then, and would get none.

What was there before gpushare is written on the ClusterPolicy until it is taken back, and beside it what was there
before a change that the operator hasn't been seen ready with: a change that fails goes back to that, and no further.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import (
    NODE_LABEL,
    NODE_LABEL_VALUE,
    RESOURCE_MEMORY,
    quantity,
)
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

API = "nvidia.com/v1"
KIND = "ClusterPolicy"
DEFINITION = Ref("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "clusterpolicies.nvidia.com")
BEFORE = "kubegpu.share/before"
# Its parts: before gpushare; validators that are away; before a change that isn't proven yet.
PARTS = ("fields", "labels", "paused", "unproven")

PRESENT = "nvidia.com/gpu.present"
PLUGIN = "nvidia.com/gpu.deploy.device-plugin"
VALIDATOR = "nvidia.com/gpu.deploy.operator-validator"
# What NVIDIA's own device plugin announces.
ANNOUNCED = re.compile(r"nvidia\.com/(gpu|gpu\.shared|mig-.+)")
# Runtime classes that are there only as long as CDI is.
CDI_CLASSES = ("nvidia-cdi", "nvidia-legacy")

DEVICE_PLUGIN = ("devicePlugin", "enabled")
CDI = ("cdi", "enabled")

PAUSE = 5.0

ARGUMENTS: Json = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "timeout": {"type": "int", "default": 900},
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """The operator's part of the cluster.

    :param policy: the ClusterPolicy that counts; None where the operator isn't there.
    :param cdi_by_default: this release gives cards out by CDI alone, unless told otherwise.
    """

    policy: Json | None
    cdi_by_default: bool
    nodes: t.Sequence[Json]
    pods: t.Sequence[Json]

    @property
    def ref(self) -> Ref:
        return Ref(API, KIND, "", str((self.policy or {})["metadata"]["name"]))

    @property
    def before(self) -> Json:
        notes = ((self.policy or {}).get("metadata") or {}).get("annotations") or {}
        found = json.loads(notes[BEFORE]) if BEFORE in notes else {}
        return {part: found.get(part) or {} for part in PARTS}


def observe(kube: Kube) -> Seen:
    """:raises BadInput: it can't be told which ClusterPolicy counts."""
    definition = kube.get(DEFINITION)
    if definition is None:
        return Seen(None, False, (), ())
    policies = kube.list_all(API, KIND)
    counted = [one for one in policies if (one.get("status") or {}).get("state") != "ignored"]
    if len(counted) > 1:
        names = ", ".join(sorted(one["metadata"]["name"] for one in counted))
        raise BadInput(
            f"there are several ClusterPolicies ({names}), and the GPU Operator follows only one; delete the others"
        )
    if not counted:
        return Seen(None, False, (), ())
    alive = "status.phase!=Succeeded,status.phase!=Failed"
    pods = kube.list_all("v1", "Pod", field_selector=alive)
    return Seen(counted[0], _cdi_by_default(definition), kube.list_all("v1", "Node"), pods)


def _cdi_by_default(definition: Json) -> bool:
    for version in (definition.get("spec") or {}).get("versions") or []:
        schema = ((version.get("schema") or {}).get("openAPIV3Schema") or {}).get("properties") or {}
        cdi = ((schema.get("spec") or {}).get("properties") or {}).get("cdi") or {}
        if ((cdi.get("properties") or {}).get("enabled") or {}).get("default") is True:
            return True
    return False


# --------------------------------------------------------------------------- planning


@dataclasses.dataclass(frozen=True)
class Wish:
    """Fields of the ClusterPolicy, and labels of nodes; None as a value takes one away.

    :param given: what of it only brings back what was there before gpushare: ``(part of the note, name)``.
    """

    fields: t.Mapping[tuple[str, str], t.Any]
    labels: t.Mapping[str, t.Mapping[str, str | None]]
    why: tuple[str, ...] = ()
    given: frozenset[tuple[str, str]] = frozenset()


def wish_of(state: str, shared: t.Sequence[str], seen: Seen) -> Wish:
    """What has to be so.

    :raises BadInput: pods would be left without their cards.
    """
    noted = seen.before
    given = {(part, name) for part in ("fields", "labels") for name in noted[part]}
    if state == "absent":
        return Wish(_fields(noted), noted["labels"], (), frozenset(given))
    spec = (seen.policy or {}).get("spec") or {}
    gpu = {one["metadata"]["name"]: one for one in seen.nodes if _has_gpu(one)}
    ours, others = [name for name in gpu if name in shared], [name for name in gpu if name not in shared]
    if not ours:
        raise BadInput(
            "gpushare_nodes: none of them is a node with a GPU that the GPU Operator knows of; it has "
            f"{', '.join(sorted(gpu)) or 'none'}"
        )
    fields: dict[tuple[str, str], t.Any] = {}
    labels: dict[str, dict[str, str | None]] = {}
    why = []
    # A node that isn't gpushare's any more gets back what went from it; so do all of them where another one comes.
    given = {(part, name) for part, name in given if part == "labels" and name not in shared}
    plugin = _get(spec, DEVICE_PLUGIN)
    if others and ".".join(DEVICE_PLUGIN) in noted["fields"]:
        plugin = fields[DEVICE_PLUGIN] = noted["fields"][".".join(DEVICE_PLUGIN)]
        given.add(("fields", ".".join(DEVICE_PLUGIN)))
    if not others:
        fields[DEVICE_PLUGIN] = False
        why.append("its device plugin would give away the cards that gpushare's gives away")
    elif plugin is not False:
        labels = {name: {PLUGIN: "false", VALIDATOR: "false"} for name in ours}
        why.append(f"its device plugin stays on {', '.join(sorted(others))} and goes from the nodes of gpushare")
    if seen.cdi_by_default and (spec.get("toolkit") or {}).get("enabled") is not False:
        fields[CDI] = False
        why.append("with CDI alone nobody listens to the variable by which a pod of gpushare names its card")
    labels.update({name: noted["labels"][name] for part, name in given if part == "labels"})
    wish = Wish(fields, labels, tuple(why), frozenset(given))
    _strand_nobody(fields, ours, others, seen)
    _share_nothing(wish, others, seen)
    return wish


def _strand_nobody(fields: t.Mapping[tuple[str, str], t.Any], ours: list[str], others: list[str], seen: Seen) -> None:
    spec = (seen.policy or {}).get("spec") or {}
    held = [pod for pod in seen.pods if _asks(pod) and _node(pod) in ours]
    if not others and _get(spec, DEVICE_PLUGIN) is not False:
        # No node would announce what they wait for.
        held += [pod for pod in seen.pods if _asks(pod) and not _node(pod)]
    if held:
        raise BadInput(
            f"gpushare_nodes: {_named(held)} {'asks' if len(held) == 1 else 'ask'} for NVIDIA's own resources, which "
            "these nodes would announce no more; delete them first, or leave their nodes out"
        )
    if CDI in fields and _get(spec, CDI) is not False:
        bound = [pod for pod in seen.pods if (pod.get("spec") or {}).get("runtimeClassName") in CDI_CLASSES]
        if bound:
            raise BadInput(
                f"gpu_operator: {_named(bound)} run by a runtime class of CDI's ({' or '.join(CDI_CLASSES)}), "
                "give them the class nvidia first"
            )
        if _get(spec, ("cdi", "nriPluginEnabled")) is True:
            raise BadInput(
                "gpu_operator: spec.cdi.nriPluginEnabled of the ClusterPolicy needs CDI, by which pods of gpushare get "
                "no card; set it to false first"
            )


def _share_nothing(wish: Wish, others: list[str], seen: Seen) -> None:
    """No node gets NVIDIA's device plugin back while gpushare's is there."""
    spec = (seen.policy or {}).get("spec") or {}
    now = _get(spec, DEVICE_PLUGIN)
    if wish.fields.get(DEVICE_PLUGIN, now) is False:
        return
    for name in sorted({*others, *wish.labels}):
        live = _labels(seen, name) or {}
        away = now is False or live.get(PLUGIN) == "false"
        if not away or wish.labels.get(name, live).get(PLUGIN) == "false":
            continue
        if live.get(NODE_LABEL) == NODE_LABEL_VALUE:
            raise BadInput(
                f"gpushare_nodes: {name} isn't in it and has the label {NODE_LABEL}={NODE_LABEL_VALUE}, so that both "
                "device plugins would give away its cards; take the label from it first, or name the node"
            )
        held = [pod for pod in seen.pods if _node(pod) == name and _asks(pod, re.compile(re.escape(RESOURCE_MEMORY)))]
        if held:
            raise BadInput(
                f"gpushare_nodes: {name} isn't in it, and NVIDIA's device plugin would give away the cards that "
                f"{_named(held)} still {'has' if len(held) == 1 else 'have'}; delete them first, or name the node"
            )


def make_plan(wish: Wish, seen: Seen, state: str) -> Plan:
    """What of it isn't so yet."""
    if seen.policy is None:
        return Plan()
    spec = seen.policy.get("spec") or {}
    changes = []
    for name, wanted in wish.labels.items():
        live = _labels(seen, name)
        if live is not None and not all(live.get(key) == value for key, value in wanted.items()):
            before, after = {key: live.get(key) for key in wanted}, dict(wanted)
            changes.append(Change(f"Node {name}", _shown(before), _shown(after), ("labels", name)))
    # A field that is to be unset is so when it has the API server's default, which only a look afterwards tells.
    wrong = _wrong(wish, spec)
    if wrong:
        before = {".".join(path): _get(spec, path) for path in wrong}
        after = {".".join(path): value for path, value in wrong.items()}
        changes.append(Change(str(seen.ref), _shown(before), _shown(after), ("fields", "")))
    for name, label in seen.before["paused"].items():
        live = _labels(seen, name)
        if live is not None and live.get(VALIDATOR) != label and VALIDATOR not in wish.labels.get(name, {}):
            # A run that was cut short has left it without.
            now, then = _shown({VALIDATOR: live.get(VALIDATOR)}), _shown({VALIDATOR: label})
            changes.append(Change(f"Node {name}", now, then, ("resume", name)))
    note, kept = (seen.policy["metadata"].get("annotations") or {}).get(BEFORE), _kept(wish, seen.before)
    text = _text(kept)
    if note is not None and not changes and (kept != seen.before or text is None):
        # A run that was cut short wasn't there when the operator became ready.
        left = f"annotation {BEFORE}: {text}\n" if text else ""
        changes.append(Change(str(seen.ref), f"annotation {BEFORE}: {note}\n", left, ("note", "")))
    return Plan(tuple(changes))


def _wrong(wish: Wish, spec: Json) -> dict[tuple[str, str], t.Any]:
    def differs(live: t.Any, wanted: t.Any) -> bool:
        return live is False if wanted is None else bool(live != wanted)

    return {path: value for path, value in wish.fields.items() if differs(_get(spec, path), value)}


def _kept(wish: Wish, noted: Json) -> Json:
    """What stays in the note when the operator is ready with all of it."""
    kept: Json = {part: {} for part in PARTS}
    for part in ("fields", "labels"):
        kept[part] = {name: value for name, value in noted[part].items() if (part, name) not in wish.given}
    return kept


def _text(noted: Json) -> str | None:
    """The note itself; None where nothing is in it."""
    parts = {part: value for part, value in noted.items() if value}
    return json.dumps(parts, sort_keys=True) if parts else None


def _fields(noted: Json) -> dict[tuple[str, str], t.Any]:
    return {_steps(name): value for name, value in (noted.get("fields") or {}).items()}


def _steps(name: str) -> tuple[str, str]:
    first, _dot, second = name.partition(".")
    return first, second


def _get(spec: Json, path: tuple[str, str]) -> t.Any:
    return (spec.get(path[0]) or {}).get(path[1])


def _labels(seen: Seen, name: str) -> Json | None:
    for node in seen.nodes:
        if node["metadata"]["name"] == name:
            return node["metadata"].get("labels") or {}
    return None


def _has_gpu(node: Json) -> bool:
    capacity = (node.get("status") or {}).get("capacity") or {}
    announced = any(ANNOUNCED.fullmatch(name) and quantity(value) > 0 for name, value in capacity.items())
    return announced or (node["metadata"].get("labels") or {}).get(PRESENT) == "true"


def _asks(pod: Json, resource: re.Pattern[str] = ANNOUNCED) -> bool:
    spec = pod.get("spec") or {}
    for one in (*(spec.get("initContainers") or []), *(spec.get("containers") or [])):
        limits = (one.get("resources") or {}).get("limits") or {}
        if any(resource.fullmatch(name) for name in limits):
            return True
    return False


def _node(pod: Json) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _named(pods: t.Sequence[Json]) -> str:
    names = sorted(f"{one['metadata']['namespace']}/{one['metadata']['name']}" for one in pods)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'pod' if len(names) == 1 else 'pods'} {', '.join(names[:3])}{more}"


def _shown(values: Json) -> str:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in sorted(values.items()))


# --------------------------------------------------------------------------- doing


class GpuOperator:
    """Carries a plan out, in the order that NVIDIA gives for it, and takes it back where the operator fails at it."""

    def __init__(self, kube: Kube, waiting: Waiting) -> None:
        self._kube = kube
        self._waiting = waiting

    def apply(self, state: str, wish: Wish, seen: Seen, plan: Plan) -> None:
        """:raises ShareError: it isn't in effect; then all is as it was before this run."""
        steps = [one.step for one in plan.changes]
        fields = _wrong(wish, (seen.policy or {}).get("spec") or {})
        labels = {name: wish.labels[name] for kind, name in steps if kind == "labels"}
        paused = self._to_pause(wish, seen) if CDI in fields else {}
        noted = self._remember(state, wish, seen, labels, paused)
        why = said = ""
        try:
            why = self._change(seen.ref, fields, labels, list(paused), noted)
            said = f"the GPU Operator isn't content with the change: {why}"
        except ShareError as error:
            if state == "absent":
                raise
            why = said = str(error)
        if why and state == "present":
            self._take_back(seen.ref, noted, said)
            raise NotInEffect(f"{said}; it was taken back")
        if why:
            raise NotInEffect(f"the GPU Operator isn't content with its settings of before: {why}")
        self._note(seen.ref, _kept(wish, noted))

    def _change(
        self,
        ref: Ref,
        fields: t.Mapping[tuple[str, str], t.Any],
        labels: t.Mapping[str, t.Mapping[str, str | None]],
        paused: t.Sequence[str],
        noted: Json,
    ) -> str:
        """Do it, and wait; what the operator has against it."""
        try:
            for name in paused:
                self._label(name, {VALIDATOR: "false"})
            self._set(ref, fields, labels)
            # It stays away until the toolkit has changed.
            why = self._wait(ref) if noted["paused"] else ""
        finally:
            # Also where the API server refused: no node is to stay without its validator.
            self._resume(ref, noted)
        return why or self._wait(ref)

    def _set(
        self,
        ref: Ref,
        fields: t.Mapping[tuple[str, str], t.Any],
        labels: t.Mapping[str, t.Mapping[str, str | None]],
    ) -> None:
        """NVIDIA's device plugin goes from a node before it comes back elsewhere: two are never on one node."""
        last = sorted(labels, key=lambda name: labels[name].get(PLUGIN) != "false")
        away = sum(1 for one in labels.values() if one.get(PLUGIN) == "false")
        for name in last[:away]:
            self._label(name, labels[name])
        spec: Json = {}
        for (first, second), value in fields.items():
            spec.setdefault(first, {})[second] = value
        if spec:
            self._kube.patch(ref, {"spec": spec})
        for name in last[away:]:
            self._label(name, labels[name])

    def _resume(self, ref: Ref, noted: Json) -> None:
        if noted["paused"]:
            for name, label in noted["paused"].items():
                self._label(name, {VALIDATOR: label})
            noted["paused"] = {}
            self._note(ref, noted)

    def _take_back(self, ref: Ref, noted: Json, said: str) -> None:
        old = noted["unproven"]
        try:
            self._resume(ref, noted)
            self._set(ref, _fields(old), old.get("labels") or {})
            kept = copy.deepcopy({**noted, "unproven": {}})
            for part in ("fields", "labels"):
                for name, value in (old.get(part) or {}).items():
                    # It is as it was before gpushare, so that there is nothing to bring back.
                    if kept[part].get(name, value) == value:
                        kept[part].pop(name, None)
            self._note(ref, kept)
        except ShareError as error:
            raise NotInEffect(f"{said}; taking it back failed too ({error}), run it again") from error

    def _remember(
        self,
        state: str,
        wish: Wish,
        seen: Seen,
        labels: t.Mapping[str, t.Mapping[str, str | None]],
        paused: t.Mapping[str, str | None],
    ) -> Json:
        """Before anything changes; what an earlier run wrote down is older and stays."""
        noted = copy.deepcopy(seen.before)
        spec = (seen.policy or {}).get("spec") or {}
        if state == "present":
            old = noted["unproven"] = {part: noted["unproven"].get(part) or {} for part in ("fields", "labels")}
            for path in _wrong(wish, spec):
                for known in (old["fields"], noted["fields"]):
                    known.setdefault(".".join(path), _get(spec, path))
            for name, wanted in labels.items():
                # A validator that a run left away isn't what was there before.
                away = {VALIDATOR: noted["paused"][name]} if name in noted["paused"] else {}
                there = {**(_labels(seen, name) or {}), **away}
                for known in (old["labels"], noted["labels"]):
                    known.setdefault(name, {key: there.get(key) for key in wanted})
            old["labels"] = {name: one for name, one in old["labels"].items() if _labels(seen, name) is not None}
            noted["unproven"] = {part: value for part, value in old.items() if value}
        noted["paused"] = {
            name: label
            for name, label in {**paused, **noted["paused"]}.items()
            if _labels(seen, name) is not None and VALIDATOR not in wish.labels.get(name, {})
        }
        if noted != seen.before:
            self._note(seen.ref, noted)
        return noted

    def _note(self, ref: Ref, noted: Json) -> None:
        self._kube.patch(ref, {"metadata": {"annotations": {BEFORE: _text(noted)}}})

    def _label(self, name: str, labels: t.Mapping[str, str | None]) -> None:
        self._kube.patch(Ref("v1", "Node", "", name), {"metadata": {"labels": dict(labels)}})

    @staticmethod
    def _to_pause(wish: Wish, seen: Seen) -> dict[str, str | None]:
        """On CRI-O the validator's own pods can't start while the way in which they get cards changes."""
        paused: dict[str, str | None] = {}
        for node in seen.nodes:
            name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
            runtime = str(((node.get("status") or {}).get("nodeInfo") or {}).get("containerRuntimeVersion") or "")
            off = labels.get(VALIDATOR) == "false" or VALIDATOR in wish.labels.get(name, {})
            if _has_gpu(node) and runtime.startswith("cri-o") and not off:
                # A missing one the operator sets by itself.
                paused[name] = labels.get(VALIDATOR)
        return paused

    def _wait(self, ref: Ref) -> str:
        """Until the operator says ready; what it says else when the time is over."""

        def look() -> tuple[str, bool]:
            status = ((self._kube.get(ref) or {}).get("status")) or {}
            if status.get("state") == "ready":
                return "", False
            told = [one.get("message") for one in status.get("conditions") or [] if one.get("type") == "Error"]
            state = status.get("state") or "unknown"
            return f"its state is {state}" + "".join(f": {one}" for one in told if one), False

        # What it says in the first moments is of before.
        self._waiting.sleep(self._waiting.pause)
        return self._waiting.until_quiet(look)


def work(kube: Kube, params: Json, check: bool, waiting: Waiting | None = None) -> Json:
    """The module's whole work.

    :raises ShareError: with ``changed`` in its details.
    """
    state = str(params["state"])
    seen = observe(kube)
    if seen.policy is None:
        return {"changed": False, "diff": [], "policy": "", "why": []}
    wish = wish_of(state, params["nodes"], seen)
    plan = make_plan(wish, seen, state)
    result: Json = {"changed": not plan.empty, "diff": plan.diff(), "policy": seen.ref.name, "why": list(wish.why)}
    if plan.empty or check:
        return result
    try:
        GpuOperator(kube, waiting or Waiting(params["timeout"], PAUSE)).apply(state, wish, seen, plan)
    except ShareError as error:
        error.details.update(result)
        raise
    left = make_plan(wish, observe(kube), state)
    if not left.empty:
        raise NotInEffect(f"changed, but still not as asked for: {left.headers()}", **result)
    return result
