# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""NVIDIA's GPU Operator beside gpushare: the concern of the module ``gpu_operator``.

Two device plugins on one node give the same cards away twice, so the operator's goes where gpushare's is: everywhere by
its ClusterPolicy, or from single nodes by their labels where others keep theirs. And from its release 25.10 on, the
operator lets the container runtime give cards out by CDI alone. gpushare's pods name their card by an environment
variable, to which nobody listens then, and would get none.

What was there before is written on the ClusterPolicy, until it is taken back.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import quantity
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

API = "nvidia.com/v1"
KIND = "ClusterPolicy"
DEFINITION = Ref("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "clusterpolicies.nvidia.com")
BEFORE = "kubegpu.share/before"

PRESENT = "nvidia.com/gpu.present"
PLUGIN = "nvidia.com/gpu.deploy.device-plugin"
VALIDATOR = "nvidia.com/gpu.deploy.operator-validator"
# What NVIDIA's own device plugin announces.
ANNOUNCED = re.compile(r"nvidia\.com/(gpu|gpu\.shared|mig-.+)")
# Runtime classes that are there only as long as CDI is.
CDI_CLASSES = ("nvidia-cdi", "nvidia-legacy")

DEVICE_PLUGIN = ("devicePlugin", "enabled")
CDI = ("cdi", "enabled")

# So many looks one after the other have to find it ready.
QUIET_LOOKS = 3

ARGUMENTS: Json = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "timeout": {"type": "int", "default": 900},
}


@dataclasses.dataclass
class Waiting:
    """How long to wait; time is injected for the tests."""

    timeout: float = 900.0
    pause: float = 5.0
    sleep: t.Callable[[float], None] = time.sleep
    now: t.Callable[[], float] = time.monotonic


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
        return {part: found.get(part) or {} for part in ("fields", "labels", "paused")}


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
    """Fields of the ClusterPolicy, and labels of nodes; None as a value takes one away."""

    fields: t.Mapping[tuple[str, str], t.Any]
    labels: t.Mapping[str, t.Mapping[str, str | None]]
    why: tuple[str, ...] = ()


def wish_of(state: str, shared: t.Sequence[str], seen: Seen) -> Wish:
    """What has to be so.

    :raises BadInput: pods would be left without their cards.
    """
    if state == "absent":
        return Wish({_steps(name): value for name, value in seen.before["fields"].items()}, seen.before["labels"])
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
    if not others:
        fields[DEVICE_PLUGIN] = False
        why.append("its device plugin would give away the cards that gpushare's gives away")
    elif _get(spec, DEVICE_PLUGIN) is not False:
        labels = {name: {PLUGIN: "false", VALIDATOR: "false"} for name in ours}
        why.append(f"its device plugin stays on {', '.join(sorted(others))} and goes from the nodes of gpushare")
    if seen.cdi_by_default and (spec.get("toolkit") or {}).get("enabled") is not False:
        fields[CDI] = False
        why.append("with CDI alone nobody listens to the variable by which a pod of gpushare names its card")
    _strand_nobody(fields, ours, others, seen)
    return Wish(fields, labels, tuple(why))


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
    wrong = {path: value for path, value in wish.fields.items() if _differs(_get(spec, path), value, state, seen)}
    if wrong:
        before = {".".join(path): _get(spec, path) for path in wrong}
        after = {".".join(path): value for path, value in wrong.items()}
        changes.append(Change(str(seen.ref), _shown(before), _shown(after), ("fields", "")))
    for name, label in seen.before["paused"].items():
        live = _labels(seen, name)
        if live is not None and live.get(VALIDATOR) != label:
            # A run that was cut short has left it without.
            now, then = _shown({VALIDATOR: live.get(VALIDATOR)}), _shown({VALIDATOR: label})
            changes.append(Change(f"Node {name}", now, then, ("resume", name)))
    if state == "absent" and BEFORE in (seen.policy["metadata"].get("annotations") or {}) and not changes:
        changes.append(Change(str(seen.ref), f"annotation {BEFORE}\n", "", ("note", "")))
    return Plan(tuple(changes))


def _differs(live: t.Any, wanted: t.Any, state: str, seen: Seen) -> bool:
    if wanted is None:
        return state == "absent" and live is False
    return bool(live != wanted)


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


def _asks(pod: Json) -> bool:
    spec = pod.get("spec") or {}
    for one in (*(spec.get("initContainers") or []), *(spec.get("containers") or [])):
        limits = (one.get("resources") or {}).get("limits") or {}
        if any(ANNOUNCED.fullmatch(name) for name in limits):
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
        """:raises ShareError: it isn't in effect; then the fields are as they were."""
        steps = [one.step for one in plan.changes]
        fields = ("fields", "") in steps
        paused = self._to_pause(wish, seen) if fields and CDI in wish.fields else {}
        before = self._remember(state, wish, seen, paused)
        for name in paused:
            self._label(name, {VALIDATOR: "false"})
        why = ""
        try:
            if fields:
                self._patch(seen.ref, wish.fields)
            for kind, name in steps:
                if kind == "labels":
                    self._label(name, wish.labels[name])
            # It stays away until the toolkit has changed.
            why = self._wait(seen.ref) if paused else ""
        finally:
            # Also where the API server refused: no node is to stay without its validator.
            for name, label in before["paused"].items():
                self._label(name, {VALIDATOR: label})
            if before["paused"]:
                self._note(seen.ref, json.dumps({**before, "paused": {}}, sort_keys=True))
        why = why or self._wait(seen.ref)
        if why and state == "present":
            self._patch(seen.ref, {_steps(name): value for name, value in before["fields"].items()})
            for name, labels in before["labels"].items():
                self._label(name, labels)
            self._note(seen.ref, None)
            raise NotInEffect(f"the GPU Operator isn't content with the change: {why}; it was taken back")
        if why:
            raise NotInEffect(f"the GPU Operator isn't content with its settings of before: {why}")
        if state == "absent":
            self._note(seen.ref, None)

    def _remember(self, state: str, wish: Wish, seen: Seen, paused: t.Mapping[str, str | None]) -> Json:
        """Before anything changes; what an earlier run wrote down is older and stays."""
        before = copy.deepcopy(seen.before)
        spec = (seen.policy or {}).get("spec") or {}
        for path in wish.fields if state == "present" else ():
            before["fields"].setdefault(".".join(path), _get(spec, path))
        for name, labels in wish.labels.items() if state == "present" else ():
            there = _labels(seen, name) or {}
            known = before["labels"].setdefault(name, {})
            for key in labels:
                known.setdefault(key, there.get(key))
        before["paused"] = {**paused, **before["paused"]}
        if before != seen.before:
            self._note(seen.ref, json.dumps(before, sort_keys=True))
        return before

    def _note(self, ref: Ref, text: str | None) -> None:
        self._kube.patch(ref, {"metadata": {"annotations": {BEFORE: text}}})

    def _patch(self, ref: Ref, fields: t.Mapping[tuple[str, str], t.Any]) -> None:
        spec: Json = {}
        for (first, second), value in fields.items():
            spec.setdefault(first, {})[second] = value
        if spec:
            self._kube.patch(ref, {"spec": spec})

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
        waiting = self._waiting
        end = waiting.now() + waiting.timeout
        quiet = 0
        while True:
            # What it says in the first moments is of before.
            waiting.sleep(waiting.pause)
            try:
                status = ((self._kube.get(ref) or {}).get("status")) or {}
                quiet = quiet + 1 if status.get("state") == "ready" else 0
                if quiet >= QUIET_LOOKS:
                    return ""
                told = [one.get("message") for one in status.get("conditions") or [] if one.get("type") == "Error"]
                said = f"its state is {status.get('state') or 'unknown'}" + "".join(f": {one}" for one in told if one)
            except ShareError as error:
                quiet, said = 0, str(error)
            if waiting.now() >= end:
                return f"after {waiting.timeout:g} s {said}"


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
        GpuOperator(kube, waiting or Waiting(timeout=params["timeout"])).apply(state, wish, seen, plan)
    except ShareError as error:
        error.details.update(result)
        raise
    left = make_plan(wish, observe(kube), state)
    if not left.empty:
        raise NotInEffect(f"changed, but still not as asked for: {left.headers()}", **result)
    return result
