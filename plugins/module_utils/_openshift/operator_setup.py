# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Install NVIDIA's GPU Operator by OLM, wait until it is ready, or remove what it leaves; ``gpu_operator_setup``.

By OLM it needs the Node Feature Discovery Operator with an instance, and a ClusterPolicy. With its chart helm makes
these, and this module waits, and removes what stays. Of a ClusterPolicy that exists, the fields that module
``gpu_operator`` changes are left as they are. A ClusterPolicy is ready, too, where the operator has found no node:
nodes have to have its label.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing as t

from .._contracts.nvidia_plugin import LABEL_PRESENT
from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.errors import KubeError
from .._kube.objects import CREATED, foreign_objects
from .._kube.options import auth_arguments
from .._kube.refs import FIELD_MANAGER, USER_AGENT, Ref, ref_of
from .._kube.rollout import not_ready_reason
from . import gpu_operator, olm, operator_plan
from .cluster import condition
from .objects import PART_OF, PAUSE, annotations_of

LABELS = {**PART_OF, "app.kubernetes.io/component": "gpu-operator"}
DISCOVERY = ("nfd.openshift.io/v1", "NodeFeatureDiscovery")
DISCOVERY_DEFINITION = olm.definition_ref("nodefeaturediscoveries.nfd.openshift.io")
DISCOVERY_PACKAGE, DISCOVERY_NAME = "nfd", "nfd-instance"
POLICY_NAME = "gpu-cluster-policy"
# Field managers of the operator's programs and of node feature discovery's, and of module gpu_operator's patches, which
# pauses the operator's pods by its labels: what they alone have set on nodes.
PROGRAMS = frozenset(("gpu-operator", "nfd-master", "nfd-worker", "k8s-driver-manager", USER_AGENT))
PREFIXES = ("nvidia.com/", "feature.node.kubernetes.io/", "nfd.node.kubernetes.io/")
# Fields of a ClusterPolicy that module gpu_operator changes.
MODULES_FIELDS = (gpu_operator.DEVICE_PLUGIN, gpu_operator.CDI, gpu_operator.PLUGIN_CHECK)

CATALOG: JsonObject = {
    "namespace": {"type": "str", "required": True},
    "channel": {"type": "str", "default": ""},
    "source": {"type": "str", "default": ""},
    "source_namespace": {"type": "str", "default": ""},
    "starting_csv": {"type": "str", "default": ""},
}
ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "ready", "absent"], "default": "present"},
    "subscription": {"type": "dict", "options": CATALOG},
    "discovery": {"type": "dict", "options": CATALOG},
    "instance": {"type": "dict", "default": {}},
    "policy": {"type": "dict", "default": {}},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "definitions": {"type": "list", "elements": "str", "default": []},
    "timeout": {"type": "int", "default": 1200},
}


@dataclasses.dataclass(frozen=True)
class State:
    """What of the operator is in the cluster.

    :param packages: what OLM has of each package, in the order of installation.
    :param instances: of node feature discovery.
    :param elsewhere: OLM has installed the discovery's package in another namespace.
    :param foreign: namespaces of packages in which others have objects, listed for a removal only.
    :param definitions: those in the option that exist.
    """

    packages: t.Sequence[tuple[olm.Package, olm.State]]
    policies: t.Sequence[JsonObject]
    instances: t.Sequence[JsonObject]
    elsewhere: bool
    nodes: t.Sequence[JsonObject]
    foreign: frozenset[str] = frozenset()
    definitions: tuple[str, ...] = ()

    @property
    def discovered(self) -> bool:
        """Somebody else runs node feature discovery."""
        return self.elsewhere or any(CREATED not in annotations_of(instance) for instance in self.instances)


def package_of(name: str, definition: str, options: JsonObject) -> olm.Package:
    """Return a package of the options of a Subscription."""
    return olm.Package(
        name,
        definition,
        namespace=str(options["namespace"]),
        channel=str(options["channel"]),
        source=str(options["source"]),
        source_namespace=str(options["source_namespace"]),
        labels=LABELS,
        starting_csv=str(options["starting_csv"]),
    )


def packages_of(params: JsonObject) -> list[olm.Package]:
    """Return the packages that OLM is to install or remove, in the order of installation."""
    named = (
        ("discovery", DISCOVERY_PACKAGE, DISCOVERY_DEFINITION.name),
        ("subscription", operator_plan.PACKAGE, gpu_operator.DEFINITION.name),
    )
    return [package_of(name, definition, params[key]) for key, name, definition in named if params[key]]


class Setup:
    """Installs the operator by OLM, or removes it and what it leaves; a ``Reconciler``."""

    def __init__(self, kube: Kube, params: JsonObject, waiting: Waiting) -> None:
        self._kube = kube
        self._params = params
        self._absent = params["state"] == "absent"
        self._packages = packages_of(params)
        self._waiting = waiting

    # ----------------------------------------------------------------- observing and planning

    def observe(self) -> State:
        kube = self._kube
        packages = [(package, olm.observe(kube, package)) for package in self._packages]
        spaces = {package.namespace for package in self._packages}
        subscriptions = kube.list_all(olm.SUBSCRIPTIONS, "Subscription") if self._packages else []
        foreign = []
        for package, installed in packages if self._absent else ():
            if any(space.ours for space in installed.namespaces):
                foreign += [package.namespace] * bool(foreign_objects(kube, package.namespace, ()))
        return State(
            packages=packages,
            policies=self._all(gpu_operator.DEFINITION, gpu_operator.API, gpu_operator.KIND),
            instances=self._all(DISCOVERY_DEFINITION, *DISCOVERY) if self._packages else [],
            elsewhere=any(
                (item.get("spec") or {}).get("name") == DISCOVERY_PACKAGE
                and item["metadata"]["namespace"] not in spaces
                and olm.installed(item)
                for item in subscriptions
            ),
            nodes=kube.list_all("v1", "Node") if self._absent else [],
            foreign=frozenset(foreign),
            definitions=tuple(
                name
                for name in self._params["definitions"]
                if self._absent and kube.get(olm.definition_ref(name)) is not None
            ),
        )

    def _all(self, definition: Ref, api_version: str, kind: str) -> list[JsonObject]:
        """List resources; none where their definition is gone, for which the API server has no path any more."""
        return self._kube.list_all(api_version, kind) if self._kube.get(definition) is not None else []

    def plan(self, state: State) -> Plan:
        """Plan the change.

        :raises ShareError: it isn't possible, or not yet.
        """
        return Plan(tuple(self._removals(state) if self._absent else self._additions(state)))

    def _additions(self, state: State) -> t.Iterator[Change]:
        for package, installed in state.packages:
            if package.name == DISCOVERY_PACKAGE and state.discovered:
                continue
            if installed.terminating:
                raise ShareError(f"{package.space} is being deleted; run again when it is gone")
            for group in installed.groups:
                if list(group.targets) != [package.namespace]:
                    raise BadInput(
                        f"gpu_operator_namespace: OperatorGroup {group.ref.name} in {package.namespace} watches other "
                        f"namespaces than its own, which package {package.name} doesn't support"
                    )
            for item in olm.missing(package, installed):
                yield _created(item)
            if not installed.served:
                yield Change(str(olm.definition_ref(package.definition)), "", f"{package.definition}\n", package)
            if package.name == DISCOVERY_PACKAGE and not state.instances:
                metadata = {"name": DISCOVERY_NAME, "namespace": package.namespace, "labels": LABELS}
                yield _created(olm.made(*DISCOVERY, metadata, self._params["instance"]))
        yield from self._policy(state)

    def _policy(self, state: State) -> t.Iterator[Change]:
        wanted = self._params["policy"]
        if not wanted:
            return
        own = [policy for policy in state.policies if CREATED in annotations_of(policy)]
        if not own:
            if state.policies:
                names = ", ".join(sorted(policy["metadata"]["name"] for policy in state.policies))
                raise BadInput(
                    f"gpu_operator: ClusterPolicy {names} is somebody else's, and the operator uses only one"
                )
            metadata = {"name": POLICY_NAME, "labels": LABELS}
            yield _created(olm.made(gpu_operator.API, gpu_operator.KIND, metadata, wanted))
            return
        live = own[0].get("spec") or {}
        noted = json.loads(annotations_of(own[0]).get(gpu_operator.BEFORE) or "{}").get("fields") or {}
        differing = _differing(live, _settled(wanted, live, noted))
        if differing:
            before = {name: live.get(name) for name in differing}
            yield Change(str(ref_of(own[0])), _shown(before), _shown(differing), (ref_of(own[0]), {"spec": differing}))

    def _removals(self, state: State) -> t.Iterator[Change]:
        for item in (*state.policies, *state.instances):
            if CREATED in annotations_of(item):
                yield _deleted(ref_of(item))
        for package, installed in reversed(state.packages):
            # The role has made the operator's own namespace, and removes it last.
            keep = package.name != DISCOVERY_PACKAGE or package.namespace in state.foreign
            for owned in olm.ours(installed, package, keep):
                yield _deleted(owned)
        for node in state.nodes:
            left = left_on(node)
            if left:
                body = {"metadata": {part: dict.fromkeys(names) for part, names in left.items()}}
                before = "".join(f"{name}\n" for part in left.values() for name in part)
                yield Change(str(ref_of(node)), before, "", (ref_of(node), body))
        for name in state.definitions:
            yield _deleted(olm.definition_ref(name))

    # ----------------------------------------------------------------- applying

    def apply(self, state: State, plan: Plan) -> None:
        """Make the changes of a plan, in their order.

        :raises ShareError: one isn't in effect in time.
        """
        for change in plan.changes:
            step = change.step
            if isinstance(step, olm.Package):
                served = functools.partial(olm.not_served, self._kube, step)
                self._waiting.until_done(served, f"OLM doesn't install {step.name}")
            elif isinstance(step, Ref):
                self._delete(step)
            elif isinstance(step, tuple):
                self._kube.patch(*step)
            else:
                self._waiting.until_done(functools.partial(self._apply, step), f"{change.header} can't be created")

    def _apply(self, item: JsonObject) -> str:
        """Apply an object; return why it isn't possible yet: the storage of a definition is ready a moment later."""
        try:
            self._kube.apply(item, FIELD_MANAGER)
        except KubeError as error:
            if error.status == 404:
                return str(error)
            raise
        return ""

    def _delete(self, ref: Ref) -> None:
        self._kube.delete(ref)
        # The operator removes a resource's pods; and what it labels, it labels again while it runs.
        self._waiting.until_done(functools.partial(self._there, ref), f"{ref} isn't deleted")
        if ref.kind == "ClusterServiceVersion":
            self._waiting.until_done(functools.partial(self._running, ref), f"the operator of {ref} still runs")

    def _there(self, ref: Ref) -> str:
        return f"{ref} still exists" if self._kube.get(ref) else ""

    def _running(self, version: Ref) -> str:
        for deployment in self._kube.list_all("apps/v1", "Deployment", version.namespace):
            owners = deployment["metadata"].get("ownerReferences") or []
            if any((owner.get("kind"), owner.get("name")) == (version.kind, version.name) for owner in owners):
                return str(ref_of(deployment))
        return ""


def left_on(node: JsonObject) -> dict[str, list[str]]:
    """Return the labels and annotations of a node that the operator's programs alone have set."""
    metadata = node["metadata"]
    owners: dict[tuple[str, str], set[str]] = {}
    for entry in metadata.get("managedFields") or []:
        fields = ((entry.get("fieldsV1") or {}).get("f:metadata")) or {}
        for part in ("labels", "annotations"):
            for key in fields.get(f"f:{part}") or {}:
                owners.setdefault((part, key.removeprefix("f:")), set()).add(str(entry.get("manager")))
    left: dict[str, list[str]] = {}
    for (part, key), managers in sorted(owners.items()):
        if managers <= PROGRAMS and key.startswith(PREFIXES) and key in (metadata.get(part) or {}):
            left.setdefault(part, []).append(key)
    return left


def _settled(wanted: JsonObject, live: JsonObject, noted: JsonObject) -> JsonObject:
    """Return a specification without the fields that module ``gpu_operator`` changes.

    A device plugin that this collection's installation left out is added.

    :param noted: fields that module has changed.
    """
    settled = json.loads(json.dumps(wanted))
    for path in MODULES_FIELDS:
        value = _at(settled, path)
        added = path == gpu_operator.DEVICE_PLUGIN and value is True and ".".join(path) not in noted
        if value is not None and not added:
            _at(settled, path[:-1]).pop(path[-1])
    return t.cast(JsonObject, settled)


def _differing(live: JsonObject, wanted: JsonObject) -> JsonObject:
    """Return the part of a specification that the live one doesn't have; the API server adds defaults."""
    differing: JsonObject = {}
    for key, value in wanted.items():
        if isinstance(value, dict) and isinstance(live.get(key), dict):
            inner = _differing(live[key], value)
            if inner:
                differing[key] = inner
        elif live.get(key) != value and not (value == {} and key not in live):
            differing[key] = value
    return differing


def _at(values: t.Any, path: t.Sequence[str]) -> t.Any:
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _created(item: JsonObject) -> Change:
    return Change(str(ref_of(item)), "", json.dumps(item, indent=2) + "\n", item)


def _deleted(ref: Ref) -> Change:
    return Change(str(ref), f"{ref}\n", "", ref)


def _shown(values: JsonObject) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


# --------------------------------------------------------------------------- waiting


def not_ready(kube: Kube, nodes: t.Sequence[str]) -> str:
    """Return why the operator isn't ready on nodes; empty where it is.

    :raises BadInput: as for ``gpu_operator.observe``.
    """
    observed = gpu_operator.observe(kube)
    if observed.policy is None:
        return "there is no ClusterPolicy"
    labels = {name: observed.labels(name) for name in nodes}
    unseen = sorted(name for name, found in labels.items() if (found or {}).get(LABEL_PRESENT) != "true")
    if unseen:
        more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
        return f"node feature discovery has found no card on {', '.join(unseen[:3])}{more} (label {LABEL_PRESENT})"
    status = observed.policy.get("status") or {}
    state = str(status.get("state") or "unknown")
    if state == "ready":
        return ""
    _status, error = condition(observed.policy, "Error")
    return (
        f"{observed.ref} is {state}" + (f": {error}" if error else "") + _operands(kube, status.get("namespace") or "")
    )


def _operands(kube: Kube, namespace: str) -> str:
    """Return which of the operator's DaemonSets aren't ready, and why."""
    sets = kube.list_all("apps/v1", "DaemonSet", namespace) if namespace else []
    operands = [daemon_set for daemon_set in sets if _of_operator(daemon_set)]
    reasons = [(operand["metadata"]["name"], not_ready_reason(operand, min_nodes=0)) for operand in operands]
    waiting = [str(reason) for _name, reason in sorted(reasons, key=lambda pair: pair[0]) if reason]
    return f"; {'; '.join(waiting[:3])}" if waiting else ""


def _of_operator(daemon_set: JsonObject) -> bool:
    owners = daemon_set["metadata"].get("ownerReferences") or []
    return any(owner.get("kind") == gpu_operator.KIND for owner in owners)


def _ready(kube: Kube, params: JsonObject, check: bool, waiting: Waiting) -> JsonObject:
    nodes = params["nodes"]
    if not nodes:
        raise BadInput("gpu_operator_nodes: no node is named, so nothing would be waited for")
    reason = not_ready(kube, nodes)
    result: JsonObject = {"changed": False, "diff": []}
    if not reason:
        return result
    if check:
        return {**result, "unready": [f"the GPU Operator: {reason}"]}

    def problem() -> tuple[str, bool]:
        why = not_ready(kube, nodes)
        waiting.status(why)
        return why, False

    why = waiting.until_stable(problem)
    if why:
        raise NotInEffect(
            f"the GPU Operator isn't ready: {why}. Its driver container takes minutes, and longer where it downloads "
            "packages; the logs of its pods say what they wait for. Run the same command again when it is mended"
        )
    return result


def work(kube: Kube, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Run the module.

    :param check: predict the changes without applying them.
    :param waiting: by default as long as the option ``timeout`` says.
    :raises ShareError: with ``changed`` in its details.
    """
    waiting = waiting or Waiting(params["timeout"], PAUSE)
    if params["state"] == "ready":
        return _ready(kube, params, check, waiting)
    return run(Setup(kube, params, waiting), check)
