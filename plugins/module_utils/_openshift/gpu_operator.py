# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Configure NVIDIA's GPU Operator for nodes whose cards gpushare or HAMi allocates.

Two device plugins on one node allocate the same cards twice, so the operator's is disabled where gpushare's runs:
everywhere by its ClusterPolicy, or on single nodes by labels. From release 25.10 on the operator passes cards to
containers by CDI only. gpushare's pods select their card by an environment variable, which CDI ignores.

The settings before gpushare are recorded on the ClusterPolicy until they are restored, together with the settings
before a change with which the operator wasn't ready yet: a change that fails is rolled back to the latter.
https://github.com/NVIDIA/gpu-operator/blob/v25.10.0/api/nvidia/v1/clusterpolicy_types.go
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._contracts.backends import HAMI, LABEL, OPERANDS
from .._contracts.claim_templates import shape_of
from .._contracts.gpushare import (
    NODE_LABEL,
    NODE_LABEL_CLAIMS,
    NODE_LABEL_VALUE,
    RESOURCE_MEMORY,
    pod_key,
    pod_node,
    quantity,
)
from .._contracts.nvidia_plugin import LABEL_PRESENT as PRESENT
from .._contracts.operator_labels import CONTAINER, VALIDATOR, workload_of
from .._contracts.operator_labels import DEVICE_PLUGIN as PLUGIN
from .._contracts.operator_labels import PREFIX as DEPLOY
from .._contracts.operator_labels import TOOLKIT as OWN_TOOLKIT
from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.options import auth_arguments
from .._kube.refs import Ref
from .objects import PAUSE, annotations_of

API = "nvidia.com/v1"
KIND = "ClusterPolicy"
DEFINITION = Ref("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "clusterpolicies.nvidia.com")
# On the ClusterPolicy: a Note.
BEFORE = "kubegpu.share/before"

# The operator's driver and MIG managers give deploy labels such a value for a while, and at the end the one from
# before: what somebody else writes meanwhile is lost.
PAUSED_FOR = "paused-for-"
# Labels of a node, and what gives away its cards twice there beside the operator's device plugin.
OWN_LABELS: t.Mapping[tuple[str, str], str] = {
    (NODE_LABEL, NODE_LABEL_VALUE): "device plugins",
    (NODE_LABEL, NODE_LABEL_CLAIMS): "its DRA driver and the device plugin",
    (LABEL, HAMI): "HAMi's device plugin and the operator's",
}
# Resources that NVIDIA's device plugin announces.
ANNOUNCED = re.compile(r"nvidia\.com/(gpu|gpu\.shared|mig-.+)")
# Runtime classes that exist only with CDI.
CDI_CLASSES = ("nvidia-cdi", "nvidia-legacy")

DEVICE_PLUGIN = ("devicePlugin", "enabled")
CDI = ("cdi", "enabled")
# The validator's check of the device plugin waits for NVIDIA's resources, which gpushare's nodes don't have.
PLUGIN_CHECK = ("validator", "plugin", "env")
# What that container does instead, on all nodes: it writes the file of the check of CUDA, and starts no pod.
NO_PLUGIN_CHECK = {"COMPONENT": "cuda", "WITH_WORKLOAD": "false"}
TOOLKIT = "nvidia-container-toolkit-daemonset"
_OTHER = object()

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "timeout": {"type": "int", "default": 900},
}


# A field of the ClusterPolicy's spec, and labels of a node; the value None removes one.
Field = tuple[str, ...]
Labels = t.Mapping[str, "str | None"]


class Settings(t.TypedDict, total=False):
    """Fields of the ClusterPolicy, and labels by the node's name."""

    fields: dict[str, t.Any]
    labels: dict[str, Labels]


class Note(t.TypedDict):
    """Settings before gpushare; paused validators; settings before a change that isn't proven yet."""

    fields: dict[str, t.Any]
    labels: dict[str, Labels]
    paused: dict[str, str | None]
    unproven: Settings


@dataclasses.dataclass(frozen=True)
class State:
    """The objects of the cluster that the GPU Operator's settings depend on.

    :param policy: the ClusterPolicy in use; None without the operator.
    :param defaults: of the API server for fields of the ClusterPolicy, by their dotted names.
    """

    policy: JsonObject | None
    defaults: t.Mapping[str, t.Any]
    nodes: t.Sequence[JsonObject]
    pods: t.Sequence[JsonObject]

    @property
    def cdi_by_default(self) -> bool:
        """This release passes cards by CDI only, unless it is disabled."""
        return self.defaults.get(".".join(CDI)) is True

    @property
    def ref(self) -> Ref:
        """The ClusterPolicy's reference."""
        return Ref(API, KIND, "", str((self.policy or {})["metadata"]["name"]))

    @property
    def spec(self) -> JsonObject:
        """The ClusterPolicy's specification."""
        return (self.policy or {}).get("spec") or {}

    @property
    def before(self) -> Note:
        """The note on the ClusterPolicy."""
        empty: dict[str, JsonObject] = {part: {} for part in Note.__annotations__}
        return t.cast(Note, {**empty, **json.loads(annotations_of(self.policy).get(BEFORE) or "{}")})

    def former(self, name: str, labels: Labels) -> Labels:
        """Return a node's former labels as they are restored.

        The operator sets a missing or empty label to true, but only when something else makes it label nodes: it
        doesn't notice that one was removed, so the pods would stay away.
        """
        # The operator removes them from a node on which it runs nothing any more, and doesn't notice that one returns.
        labelled = self.operated(self.labels(name) or {})
        return {key: (value or "true") if labelled else None for key, value in labels.items()}

    def operated(self, labels: JsonObject) -> bool:
        """Return whether the operator runs its pods for containers on a node, by the node's labels."""
        with_containers = workload_of(labels, self.spec) == CONTAINER
        return with_containers and labels.get(PRESENT) == "true" and labels.get(OPERANDS) != "false"

    def has_gpu(self, node: JsonObject) -> bool:
        """Return whether NVIDIA's device plugin announces cards of a node, or the operator runs it there."""
        capacity = (node.get("status") or {}).get("capacity") or {}
        announced = any(ANNOUNCED.fullmatch(name) and quantity(value) > 0 for name, value in capacity.items())
        return announced or self.operated(node["metadata"].get("labels") or {})

    def labels(self, name: str) -> JsonObject | None:
        """Return a node's labels; None where it doesn't exist."""
        for node in self.nodes:
            if node["metadata"]["name"] == name:
                return node["metadata"].get("labels") or {}
        return None


def observe(kube: Kube) -> State:
    """Collect the state that a plan is made from.

    :raises BadInput: there are several ClusterPolicies, and none tells that the operator uses it.
    """
    definition = kube.get(DEFINITION)
    if definition is None:
        return State(None, {}, (), ())
    policies = kube.list_all(API, KIND)
    counted = [policy for policy in policies if (policy.get("status") or {}).get("state") != "ignored"]
    if len(counted) > 1:
        # The operator reports no state for one that it ignores.
        used = [policy for policy in counted if (policy.get("status") or {}).get("state")]
        if len(used) != 1:
            names = ", ".join(sorted(policy["metadata"]["name"] for policy in counted))
            raise BadInput(
                f"there are several ClusterPolicies ({names}), the GPU Operator uses only one, and their states don't "
                "tell which; delete the others"
            )
        counted = used
    if not counted:
        return State(None, {}, (), ())
    running = "status.phase!=Succeeded,status.phase!=Failed"
    pods = kube.list_all("v1", "Pod", field_selector=running)
    return State(counted[0], _defaults(definition), kube.list_all("v1", "Node"), pods)


def _defaults(definition: JsonObject) -> dict[str, t.Any]:
    """Return the API server's defaults of the fields beside those that are changed, by their dotted names."""
    defaults: dict[str, t.Any] = {}
    for version in (definition.get("spec") or {}).get("versions") or []:
        schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
        for parents in {path[:-1] for path in (CDI, PLUGIN_CHECK)}:
            part: JsonObject = schema
            for name in ("spec", *parents):
                part = (part.get("properties") or {}).get(name) or {}
            for name, field in (part.get("properties") or {}).items():
                if "default" in field:
                    defaults[".".join((*parents, name))] = field["default"]
    return defaults


# --------------------------------------------------------------------------- planning


@dataclasses.dataclass(frozen=True)
class Options:
    """The required fields of the ClusterPolicy and labels of nodes.

    :param given: those that restore the settings before gpushare, as ``(part of the note, name)``.
    """

    fields: t.Mapping[Field, t.Any]
    labels: t.Mapping[str, Labels]
    why: tuple[str, ...] = ()
    given: frozenset[tuple[str, str]] = frozenset()


def options_of(state: str, shared: t.Sequence[str], observed: State) -> Options:
    """Return the settings that are required.

    :raises BadInput: pods would lose their cards.
    """
    noted = observed.before
    given = {*(("fields", name) for name in noted["fields"]), *(("labels", name) for name in noted["labels"])}
    if state == "absent":
        back = {name: observed.former(name, labels) for name, labels in noted["labels"].items()}
        return Options(_fields(noted["fields"]), back, (), frozenset(given))
    spec = observed.spec
    gpu = {node["metadata"]["name"]: node for node in observed.nodes if observed.has_gpu(node)}
    ours, others = [name for name in gpu if name in shared], [name for name in gpu if name not in shared]
    if not ours and any((observed.labels(name) or {}).get(PRESENT) == "true" for name in shared):
        # The operator runs nothing on them, which their user decided, so nothing of it is in the way.
        return options_of("absent", (), observed)
    if not ours:
        raise BadInput(
            "gpushare_nodes: none of them is a GPU node of the GPU Operator, whose nodes are "
            f"{', '.join(sorted(gpu)) or 'none'}"
        )
    fields: dict[Field, t.Any] = {}
    labels: dict[str, Labels] = {}
    why = []
    # A node that gpushare no longer uses gets its labels back; so do all of them once another node is added.
    given = {(part, name) for part, name in given if part == "labels" and name not in shared}
    plugin = _get(spec, DEVICE_PLUGIN)
    if others and ".".join(DEVICE_PLUGIN) in noted["fields"]:
        plugin = fields[DEVICE_PLUGIN] = noted["fields"][".".join(DEVICE_PLUGIN)]
        given.add(("fields", ".".join(DEVICE_PLUGIN)))
    if not others:
        fields[DEVICE_PLUGIN] = False
        why.append("the operator's device plugin would allocate the cards that gpushare's allocates")
        waiting = [pod for pod in observed.pods if _asks(pod) and not pod_node(pod)]
        if waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            why.append(f"{_named(waiting)} {verb} for NVIDIA's own resources, which no node announces then")
    elif plugin is not False:
        for name in ours:
            # Releases before 1.1.0 disabled the validator, too; without its files no other pod of the operator starts.
            known = {key: value for key, value in noted["labels"].get(name, {}).items() if key == VALIDATOR}
            labels[name] = {PLUGIN: "false", **observed.former(name, known)}
        fields[PLUGIN_CHECK] = _without_check(_get(spec, PLUGIN_CHECK))
        why.append(
            f"the operator's device plugin stays on {', '.join(sorted(others))} and is disabled on gpushare's nodes"
        )
    checked = ".".join(PLUGIN_CHECK)
    if PLUGIN_CHECK not in fields and checked in noted["fields"]:
        fields[PLUGIN_CHECK] = noted["fields"][checked]
        given.add(("fields", checked))
    with_toolkit = any((observed.labels(name) or {}).get(OWN_TOOLKIT) != "false" for name in ours)
    if observed.cdi_by_default and with_toolkit and (spec.get("toolkit") or {}).get("enabled") is not False:
        fields[CDI] = False
        why.append("with CDI the variable by which a pod of gpushare selects its card is ignored")
    labels.update({name: observed.former(name, noted["labels"][name]) for part, name in given if part == "labels"})
    options = Options(fields, labels, tuple(why), frozenset(given))
    _refuse_lost_cards(fields, ours, observed)
    _refuse_second_plugin(options, others, observed)
    return options


def _without_check(env: t.Sequence[JsonObject] | None) -> list[JsonObject]:
    """Return the environment of the validator's check of the device plugin with which it checks nothing."""
    kept = [variable for variable in env or [] if variable.get("name") not in NO_PLUGIN_CHECK]
    return [*kept, *({"name": name, "value": value} for name, value in NO_PLUGIN_CHECK.items())]


def _refuse_lost_cards(fields: t.Mapping[Field, t.Any], ours: list[str], observed: State) -> None:
    """Refuse a change by which pods would lose their cards.

    :param fields: to be changed in the ClusterPolicy.
    :param ours: nodes of gpushare and HAMi.
    :param observed: the cluster's state.
    """
    spec = observed.spec
    # A pod that waits for a node has no card to lose: whoever may create one could stop every run, and of a node that
    # is switched the evicted ones wait.
    # HAMi's own resource has the same name, and stays on its nodes.
    left = {name for name in ours if (observed.labels(name) or {}).get(LABEL) != HAMI}
    held = [pod for pod in observed.pods if _asks(pod) and pod_node(pod) in left]
    if held:
        raise BadInput(
            f"gpushare_nodes: {_named(held)} {'asks' if len(held) == 1 else 'ask'} for NVIDIA's own resources, which "
            "these nodes would no longer announce; delete them first, or leave their nodes out"
        )
    if CDI in fields and _get(spec, CDI) is not False:
        bound = [pod for pod in observed.pods if (pod.get("spec") or {}).get("runtimeClassName") in CDI_CLASSES]
        if bound:
            raise BadInput(
                f"gpu_operator: {_named(bound)} use a runtime class of CDI ({' or '.join(CDI_CLASSES)}), "
                "change it to the class nvidia first"
            )
        if _get(spec, ("cdi", "nriPluginEnabled")) is True:
            raise BadInput(
                "gpu_operator: spec.cdi.nriPluginEnabled of the ClusterPolicy needs CDI, with which pods of "
                "gpushare get no card; set it to false first"
            )


def _refuse_second_plugin(options: Options, others: list[str], observed: State) -> None:
    """Refuse to restore NVIDIA's device plugin on a node that still runs gpushare's."""
    now = _get(observed.spec, DEVICE_PLUGIN)
    if options.fields.get(DEVICE_PLUGIN, now) is False:
        return
    for name in sorted({*others, *options.labels}):
        live = observed.labels(name) or {}
        away = now is False or live.get(PLUGIN) == "false"
        if not away or options.labels.get(name, live).get(PLUGIN) == "false":
            continue
        for (label, value), both in OWN_LABELS.items():
            if live.get(label) == value:
                raise BadInput(
                    f"gpushare_nodes: {name} isn't in it and has the label {label}={value}, so both {both} would "
                    "allocate its cards; remove the label first, or add the node"
                )
        here = [pod for pod in observed.pods if pod_node(pod) == name]
        held = [pod for pod in here if _asks(pod, re.compile(re.escape(RESOURCE_MEMORY))) or _claims(pod)]
        if held:
            raise BadInput(
                f"gpushare_nodes: {name} isn't in it, and NVIDIA's device plugin would allocate the cards that "
                f"{_named(held)} still {'has' if len(held) == 1 else 'have'}; delete them first, or add the node"
            )


def make_plan(options: Options, observed: State) -> Plan:
    """Return the changes that are still missing.

    :raises BadInput: the operator itself is changing the labels of a node that is to be changed.
    """
    spec, changes = observed.spec, []
    for name, wanted in options.labels.items():
        live = observed.labels(name)
        if live is not None and not all(live.get(key) == value for key, value in wanted.items()):
            before, after = {key: live.get(key) for key in wanted}, dict(wanted)
            changes.append(Change(f"Node {name}", _shown(before), _shown(after), ("labels", name)))
    # The value of an unset field is the API server's default, which only the next observation shows.
    wrong = _wrong(options, spec)
    if wrong:
        before = {".".join(path): _get(spec, path) for path in wrong}
        after = {".".join(path): value for path, value in wrong.items()}
        changes.append(Change(str(observed.ref), _shown(before), _shown(after), ("fields", "")))
    for name, label in observed.before["paused"].items():
        live = observed.labels(name)
        if live is not None and live.get(VALIDATOR) != label and VALIDATOR not in options.labels.get(name, {}):
            # An interrupted run has left it paused.
            now, then = _shown({VALIDATOR: live.get(VALIDATOR)}), _shown({VALIDATOR: label})
            changes.append(Change(f"Node {name}", now, then, ("resume", name)))
    note, kept = annotations_of(observed.policy).get(BEFORE), _kept(options, observed.before)
    text = _text(kept)
    _refuse_paused_nodes({change.step[1] for change in changes}, options, observed)
    if note is not None and not changes and (kept != observed.before or text is None):
        # An interrupted run didn't remove its note.
        left = f"annotation {BEFORE}: {text}\n" if text else ""
        changes.append(Change(str(observed.ref), f"annotation {BEFORE}: {note}\n", left, ("note", "")))
    return Plan(tuple(changes))


def _refuse_paused_nodes(changed: set[str], options: Options, observed: State) -> None:
    """Refuse a change of labels that the operator's driver or MIG manager sets back at its end.

    :param changed: the nodes whose labels are to be changed; others are paused meanwhile.
    """
    for name in sorted(changed | set(_to_pause(options, observed))):
        for key, value in sorted((observed.labels(name) or {}).items()):
            if key.startswith(DEPLOY) and str(value).startswith(PAUSED_FOR):
                raise BadInput(
                    f"the GPU Operator is changing node {name} ({key} is {value}) and sets its labels back at the end; "
                    "run again when it has finished, or if it has given up set the label to true"
                )


def _to_pause(options: Options, observed: State) -> dict[str, str | None]:
    """Return the validators to pause: on CRI-O their pods can't start while the toolkit changes the runtime's mode."""
    paused: dict[str, str | None] = {}
    has_toolkit = (observed.spec.get("toolkit") or {}).get("enabled") is not False
    if CDI not in _wrong(options, observed.spec) or not has_toolkit:
        return paused
    for node in observed.nodes:
        name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
        runtime = str(((node.get("status") or {}).get("nodeInfo") or {}).get("containerRuntimeVersion") or "")
        off = labels.get(VALIDATOR) == "false" or VALIDATOR in options.labels.get(name, {})
        changes = observed.has_gpu(node) and runtime.startswith("cri-o") and labels.get(OWN_TOOLKIT) == "true"
        if changes and not off:
            paused[name] = observed.former(name, {VALIDATOR: labels.get(VALIDATOR)})[VALIDATOR]
    return paused


def _wrong(options: Options, spec: JsonObject) -> dict[Field, t.Any]:
    """Return the fields that differ from the required ones."""

    def differs(live: t.Any, wanted: t.Any) -> bool:
        return live is False or isinstance(live, list) if wanted is None else bool(live != wanted)

    return {path: value for path, value in options.fields.items() if differs(_get(spec, path), value)}


def _kept(options: Options, noted: Note) -> Note:
    """Return the part of the note that stays once the operator is ready."""
    return {
        "fields": {name: value for name, value in noted["fields"].items() if ("fields", name) not in options.given},
        "labels": {name: value for name, value in noted["labels"].items() if ("labels", name) not in options.given},
        "paused": {},
        "unproven": {},
    }


def _text(noted: Note) -> str | None:
    """Return the note's text; None where it is empty."""
    parts = {part: value for part, value in noted.items() if value}
    return json.dumps(parts, sort_keys=True) if parts else None


def _fields(noted: t.Mapping[str, t.Any]) -> dict[Field, t.Any]:
    """Return fields by their paths instead of their dotted names."""
    return {tuple(name.split(".")): value for name, value in noted.items()}


def _prune(patch: JsonObject, gone: t.Iterable[Field], live: JsonObject, defaults: t.Mapping[str, t.Any]) -> None:
    """Remove in a patch of the specification also the objects that would have nothing but the API server's defaults."""
    for path in gone:
        for end in range(len(path) - 1, 0, -1):
            there = _get(live, path[:end]) or {}
            kept = [name for name in there if there[name] != defaults.get(".".join((*path[:end], name)), _OTHER)]
            if set(kept) - {path[end]}:
                break
            *parents, last = path[:end]
            _get(patch, tuple(parents))[last] = None


def _get(spec: JsonObject, path: Field) -> t.Any:
    value: t.Any = spec
    for part in path:
        value = (value or {}).get(part)
    return value


def _state(policy: JsonObject | None) -> str:
    """Return the state that the operator reports."""
    return str(((policy or {}).get("status") or {}).get("state") or "unknown")


def _asks(pod: JsonObject, resource: re.Pattern[str] = ANNOUNCED) -> bool:
    spec = pod.get("spec") or {}
    for container in (*(spec.get("initContainers") or []), *(spec.get("containers") or [])):
        limits = (container.get("resources") or {}).get("limits") or {}
        if any(resource.fullmatch(name) for name in limits):
            return True
    return False


def _claims(pod: JsonObject) -> bool:
    """Return whether a pod has a share by a claim, which admission has put into it in place of the resource."""
    claims = (pod.get("spec") or {}).get("resourceClaims") or []
    return any(shape_of(str(claim.get("resourceClaimTemplateName") or "")) is not None for claim in claims)


def _named(pods: t.Sequence[JsonObject]) -> str:
    names = sorted(map(pod_key, pods))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'pod' if len(names) == 1 else 'pods'} {', '.join(names[:3])}{more}"


def _shown(values: JsonObject) -> str:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in sorted(values.items()))


# --------------------------------------------------------------------------- applying


class OperatorReconciler:
    """Changes the operator's settings in the order that NVIDIA documents, and rolls back where it fails with them.

    :param state: of gpushare: present or absent.
    :param shared: nodes of gpushare and HAMi.
    """

    def __init__(self, kube: Kube, state: str, shared: t.Sequence[str], waiting: Waiting) -> None:
        self._kube = kube
        self._state = state
        self._shared = shared
        self._waiting = waiting
        self._options: Options | None = None
        self._defaults: t.Mapping[str, t.Any] = {}

    def observe(self) -> State:
        state = observe(self._kube)
        self._defaults = state.defaults
        return state

    def options(self, observed: State) -> Options:
        """Return the required settings, which follow from the first state: they record what is changed."""
        if self._options is None:
            self._options = options_of(self._state, self._shared, observed)
        return self._options

    def plan(self, state: State) -> Plan:
        return make_plan(self.options(state), state) if state.policy is not None else Plan()

    def apply(self, observed: State, plan: Plan) -> None:
        """Make the changes of a plan.

        :raises ShareError: it isn't in effect; this run's changes are rolled back.
        """
        options = self.options(observed)
        steps = [change.step for change in plan.changes]
        fields = _wrong(options, observed.spec)
        labels = {name: options.labels[name] for kind, name in steps if kind == "labels"}
        paused = _to_pause(options, observed)
        noted = self._remember(observed, labels, paused)
        why = message = ""
        try:
            why = self._change(observed, fields, labels, list(paused), noted)
            before = _state(observed.policy)
            also = "" if before == "ready" else f", nor was it before ({before})"
            message = f"the GPU Operator isn't ready with the change{also}: {why}"
        except ShareError as error:
            if self._state == "absent":
                raise
            why = message = str(error)
        if why and self._state == "present":
            self._roll_back(observed.ref, noted, message)
            raise NotInEffect(f"{message}; it was rolled back")
        if why:
            raise NotInEffect(f"the GPU Operator isn't ready with its former settings: {why}")
        self._note(observed.ref, _kept(options, noted))

    def _change(
        self,
        observed: State,
        fields: t.Mapping[Field, t.Any],
        labels: t.Mapping[str, Labels],
        paused: t.Sequence[str],
        noted: Note,
    ) -> str:
        """Make the change and wait.

        :param observed: the state before it.
        :param fields: to change in the ClusterPolicy.
        :param labels: to change, by the node's name.
        :param paused: the nodes whose validators are paused meanwhile.
        :param noted: the note on the ClusterPolicy.
        :returns: why the operator isn't ready; empty where it is.
        """
        ref = observed.ref
        try:
            before = self._generation(self._toolkit(observed)) if paused else 0
            for name in paused:
                self._label(name, {VALIDATOR: "false"})
            self._set(ref, fields, labels)
            # Not until the operator is ready: its other pods restart, and wait for a file that the validator writes.
            why = self._wait_for_toolkit(observed, before) if paused else ""
        finally:
            # Also after an error of the API server: no node may stay without its validator.
            self._resume(ref, noted)
        return why or self._wait(ref)

    def _set(self, ref: Ref, fields: t.Mapping[Field, t.Any], labels: t.Mapping[str, Labels]) -> None:
        """Disable NVIDIA's device plugin before it is restored elsewhere: two never run on one node."""
        last = sorted(labels, key=lambda name: labels[name].get(PLUGIN) != "false")
        away = sum(1 for row in labels.values() if row.get(PLUGIN) == "false")
        for name in last[:away]:
            self._label(name, labels[name])
        spec: JsonObject = {}
        for path, value in fields.items():
            part = spec
            for name in path[:-1]:
                part = part.setdefault(name, {})
            part[path[-1]] = value
        gone = [path for path, value in fields.items() if value is None]
        _prune(spec, gone, ((self._kube.get(ref) or {}).get("spec") or {}) if gone else {}, self._defaults)
        if spec:
            self._kube.patch(ref, {"spec": spec})
        for name in last[away:]:
            self._label(name, labels[name])

    def _resume(self, ref: Ref, noted: Note) -> None:
        if noted["paused"]:
            for name, label in noted["paused"].items():
                self._label(name, {VALIDATOR: label})
            noted["paused"] = {}
            self._note(ref, noted)

    def _roll_back(self, ref: Ref, noted: Note, message: str) -> None:
        fields, labels = noted["unproven"].get("fields") or {}, noted["unproven"].get("labels") or {}
        try:
            self._resume(ref, noted)
            self._set(ref, _fields(fields), labels)
            # What equals the settings before gpushare doesn't have to be restored later.
            kept: Note = {
                "fields": {key: old for key, old in noted["fields"].items() if fields.get(key, _OTHER) != old},
                "labels": {key: old for key, old in noted["labels"].items() if labels.get(key) != old},
                "paused": noted["paused"],
                "unproven": {},
            }
            self._note(ref, kept)
        except ShareError as error:
            raise NotInEffect(f"{message}; the rollback failed too ({error}): run again") from error

    def _remember(self, observed: State, labels: t.Mapping[str, Labels], paused: Labels) -> Note:
        """Record the present settings before the change; older records stay."""
        options, noted = self.options(observed), observed.before
        if self._state == "present":
            old_fields, old_labels = noted["unproven"].get("fields") or {}, noted["unproven"].get("labels") or {}
            for path in _wrong(options, observed.spec):
                for fields in (old_fields, noted["fields"]):
                    fields.setdefault(".".join(path), _get(observed.spec, path))
            for name, wanted in labels.items():
                # A validator that a run left paused isn't the former setting.
                away = {VALIDATOR: noted["paused"][name]} if name in noted["paused"] else {}
                there = {**(observed.labels(name) or {}), **away}
                for known in (old_labels, noted["labels"]):
                    known.setdefault(name, {key: there.get(key) for key in wanted})
            if BEFORE not in annotations_of(observed.policy):
                # The ClusterPolicy was made anew: its note is gone, and the labels of gpushare's nodes stayed.
                for name in options.labels:
                    live = observed.labels(name) or {}
                    if not OWN_LABELS.keys().isdisjoint(live.items()) and live.get(PLUGIN) == "false":
                        noted["labels"].setdefault(name, {PLUGIN: "true"})
            old_labels = {name: row for name, row in old_labels.items() if observed.labels(name) is not None}
            noted["unproven"] = {
                **({"fields": old_fields} if old_fields else {}),
                **({"labels": old_labels} if old_labels else {}),
            }
        noted["paused"] = {
            name: label
            for name, label in {**paused, **noted["paused"]}.items()
            if observed.labels(name) is not None and VALIDATOR not in options.labels.get(name, {})
        }
        if noted != observed.before:
            self._note(observed.ref, noted)
        return noted

    def _note(self, ref: Ref, noted: Note) -> None:
        self._kube.patch(ref, {"metadata": {"annotations": {BEFORE: _text(noted)}}})

    def _label(self, name: str, labels: Labels) -> None:
        self._kube.patch(Ref("v1", "Node", "", name), {"metadata": {"labels": dict(labels)}})

    def _toolkit(self, observed: State) -> JsonObject | None:
        """Return the toolkit's DaemonSet, in the operator's namespace where the ClusterPolicy tells it."""
        namespace = ((observed.policy or {}).get("status") or {}).get("namespace") or ""
        toolkits = self._kube.list_all("apps/v1", "DaemonSet", namespace, field_selector=f"metadata.name={TOOLKIT}")
        return next((daemon_set for daemon_set in toolkits if daemon_set["metadata"]["name"] == TOOLKIT), None)

    @staticmethod
    def _generation(daemon_set: JsonObject | None) -> int:
        return int(((daemon_set or {}).get("metadata") or {}).get("generation") or 0)

    def _wait_for_toolkit(self, observed: State, before: int) -> str:
        """Wait until the toolkit runs on its nodes with the change; return why not where it isn't in time.

        :param before: the DaemonSet's generation before the change, which the operator makes later.
        """

        def problem() -> tuple[str, bool]:
            live = self._toolkit(observed)
            if live is None:
                return f"there is no DaemonSet {TOOLKIT}", False
            status = live.get("status") or {}
            if self._generation(live) <= before:
                return f"the operator hasn't changed the DaemonSet {TOOLKIT}", False
            if int(status.get("observedGeneration") or 0) < self._generation(live):
                return f"the change of the DaemonSet {TOOLKIT} isn't processed", False
            wanted = int(status.get("desiredNumberScheduled") or 0)
            counted = ("updatedNumberScheduled", "numberReady", "numberAvailable")
            done = min(int(status.get(name) or 0) for name in counted)
            # No pod at all proves nothing.
            return ("", False) if done >= max(wanted, 1) else (f"DaemonSet {TOOLKIT}: {done} of {wanted} pods", False)

        return self._waiting.until_stable(problem)

    def _wait(self, ref: Ref) -> str:
        """Wait until the operator is ready; return its state and errors where it isn't in time."""

        def problem() -> tuple[str, bool]:
            live = self._kube.get(ref)
            state = _state(live)
            if state == "ready":
                return "", False
            conditions = ((live or {}).get("status") or {}).get("conditions") or []
            errors = [condition.get("message") for condition in conditions if condition.get("type") == "Error"]
            return f"its state is {state}" + "".join(f": {error}" for error in errors if error), False

        # Its first state may be older than the change.
        self._waiting.sleep(self._waiting.pause)
        return self._waiting.until_stable(problem)


def work(kube: Kube, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Run the module.

    :param kube: the cluster.
    :param params: the module's parameters.
    :param check: predict the changes without applying them.
    :param waiting: for the operator; by default as long as the option ``timeout`` says.
    :raises ShareError: with ``changed`` in its details.
    """
    waiting = waiting or Waiting(params["timeout"], PAUSE)
    reconciler = OperatorReconciler(kube, str(params["state"]), params["nodes"], waiting)

    def details(state: State) -> JsonObject:
        if state.policy is None:
            return {"policy": "", "reasons": []}
        return {"policy": state.ref.name, "reasons": list(reconciler.options(state).why)}

    return run(reconciler, check, details)
