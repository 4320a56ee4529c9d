# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a scheduler beside OpenShift's own, from 4.10 on, by the Secondary Scheduler Operator.

OLM installs the operator (``olm``). It serves one object, SecondaryScheduler/cluster, and creates a Deployment for it.
It doesn't report that Deployment's health, so the Deployment itself is checked: it has to mount the configuration and
run the image, and every pod has to be of that revision and ready. Each configuration has a ConfigMap of its own, named
after its digest, so a rollback is the old name.
https://docs.openshift.com/container-platform/4.17/nodes/scheduling/secondary_scheduler/index.html
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.objects import HIDDEN, foreign_objects
from .._kube.refs import FIELD_MANAGER, Ref, ref_of
from .._kube.rollout import not_ready_reason, reasons, selector
from . import cluster as openshift
from . import olm
from .objects import PART_OF, Api, annotations_of, label_selector, name_by_digest

NAMESPACE = "openshift-secondary-scheduler-operator"
PACKAGE = "openshift-secondary-scheduler-operator"
DEFINITION = olm.definition_ref("secondaryschedulers.operator.openshift.io")
# The operator reads no other name and namespace.
SECONDARY = Ref("operator.openshift.io/v1", "SecondaryScheduler", NAMESPACE, "cluster")
DEPLOYMENT = Ref("apps/v1", "Deployment", NAMESPACE, "secondary-scheduler")
KEY = "config.yaml"

LABELS = {**PART_OF, "app.kubernetes.io/component": "scheduler"}
# On SecondaryScheduler/cluster until its specification is in effect: the specification before.
BEFORE = "kubegpu.share/replaced-spec"
FIELDS = ("managementState", "schedulerConfig", "schedulerImage", "topology")

CONFIG_MAP = "gpushare-scheduler-config"


@dataclasses.dataclass(frozen=True)
class State:
    """The objects of the cluster that a secondary scheduler depends on.

    :param version: of OpenShift.
    :param installed: what OLM has of the operator.
    :param topology: its release supports the field.
    :param spec: our fields of SecondaryScheduler/cluster; None where it doesn't exist.
    :param before: those before a change that isn't proven yet, as JSON.
    :param foreign: other objects in the namespace, listed for a removal only.
    :param maps: our configurations by the names of their ConfigMaps.
    """

    version: str
    installed: olm.State
    topology: bool
    spec: JsonObject | None
    before: str | None
    foreign: t.Sequence[str]
    maps: t.Mapping[str, str]


def ref(name: str) -> Ref:
    """Return the reference of a configuration's ConfigMap."""
    return Ref("v1", "ConfigMap", NAMESPACE, name)


class Options:
    """The requested scheduler; without a configuration everything of ours has to be removed."""

    def __init__(self, params: JsonObject) -> None:
        present = params["state"] == "present"
        self.config = str(params["config"]) if present else ""
        self.prefix = str(params["config_map"] or CONFIG_MAP)
        self.name = name_by_digest(self.prefix, self.config)
        self.spec: JsonObject = {
            "managementState": "Managed",
            "schedulerConfig": self.name,
            "schedulerImage": str(params["image"] or ""),
        }
        if params["topology"]:
            self.spec["topology"] = {"mode": params["topology"]}
        self.package = package_of(str(params["channel"]), str(params["source"]), str(params["source_namespace"]))


def package_of(channel: str = "", source: str = "", source_namespace: str = "") -> olm.Package:
    """Return the operator's package; a removal needs no catalog."""
    return olm.Package(PACKAGE, DEFINITION.name, NAMESPACE, channel, source, source_namespace, LABELS)


# --------------------------------------------------------------------------- observing and planning


def observe(api: Api, removal: bool = False) -> State:
    """Collect the state that a plan is made from.

    :param removal: of everything of ours; only then other objects in the namespace are listed.
    :raises BadInput: this isn't OpenShift.
    """
    definition = api.get(DEFINITION)
    installed = olm.observe(api, package_of())
    maps = api.list_all("v1", "ConfigMap", NAMESPACE, label_selector=label_selector(LABELS))
    live = api.get(SECONDARY) if installed.served else None
    if removal and live and live["metadata"].get("deletionTimestamp"):
        live = None
    ours = {DEPLOYMENT, *(ref(item["metadata"]["name"]) for item in maps)}
    created = any(namespace.ours for namespace in installed.namespaces)
    return State(
        version=openshift.version_of(openshift.cluster_version(api)),
        installed=installed,
        topology=installed.served and "topology" in json.dumps(definition),
        spec={key: value for key, value in (live.get("spec") or {}).items() if key in FIELDS} if live else None,
        before=annotations_of(live).get(BEFORE),
        foreign=foreign_objects(api, NAMESPACE, ours) if removal and created else [],
        maps={item["metadata"]["name"]: (item.get("data") or {}).get(KEY) or "" for item in maps},
    )


def make_plan(options: Options, state: State) -> Plan:
    """Plan the change.

    :raises BadInput: the cluster doesn't support it.
    :raises ShareError: it isn't possible yet.
    """
    spec = state.spec or {}
    named = str(spec.get("schedulerConfig") or "")
    foreign = state.spec is not None and named not in state.maps and not named.startswith(f"{options.prefix}-")
    if not options.config:
        return Plan(()) if foreign else _absent(state)
    if openshift.takes_policy(state.version):
        raise BadInput(
            f"scheduler_mode: OpenShift {state.version} has no Secondary Scheduler Operator; its own scheduler "
            "reads a Policy"
        )
    if foreign:
        raise BadInput(
            f"scheduler_mode: {SECONDARY} exists already with a configuration that isn't ours ({named or 'none'}), "
            "and the operator serves only one"
        )
    if state.installed.terminating:
        raise ShareError(f"{package_of().space} is being deleted; run again when it is gone")
    if "topology" in options.spec and state.installed.served and not state.topology:
        raise BadInput(
            "scheduler_openshift_topology: this release of the Secondary Scheduler Operator doesn't support it"
        )
    for group in state.installed.groups:
        if list(group.targets) != [NAMESPACE]:
            raise BadInput(
                f"scheduler_mode: OperatorGroup {group.ref.name} in {NAMESPACE} watches other namespaces than its own, "
                "which the Secondary Scheduler Operator doesn't support"
            )
    changes = [
        Change(str(ref_of(item)), "", json.dumps(item, indent=2) + "\n", "install")
        for item in olm.missing(options.package, state.installed)
    ]
    if state.maps.get(options.name) != options.config:
        before = _masked(state.maps.get(options.name, ""))
        changes.append(Change(str(ref(options.name)), before, _masked(options.config), "write"))
    if not _holds(spec, options.spec):
        changes.append(Change(str(SECONDARY), _shown(spec), _shown(options.spec), "switch"))
    elif state.before is not None:
        changes.append(Change(str(DEPLOYMENT), "", "every pod with this configuration and image\n", "verify"))
    return Plan((*changes, *_obsolete(state, options.name)))


def _absent(state: State) -> Plan:
    there = (Change(str(SECONDARY), _shown(state.spec), "", "switch"),) if state.spec is not None else ()
    owned = olm.ours(state.installed, package_of(), bool(state.foreign))
    removed = [Change(str(ref), f"{ref}\n", "", ref) for ref in owned]
    return Plan((*there, *_obsolete(state, ""), *removed))


def _obsolete(state: State, keep: str) -> tuple[Change, ...]:
    return tuple(
        Change(str(ref(name)), _masked(text), "", ref(name)) for name, text in state.maps.items() if name != keep
    )


def _masked(config: str) -> str:
    """Mask the private key by which the scheduler authenticates to the extender."""
    return re.sub(r"(\bkeyData:\s*)\S+", rf"\1{HIDDEN}", config)


def _holds(live: JsonObject, options: JsonObject) -> bool:
    """Return whether the live object has these values; the API server adds defaults."""
    for key, value in options.items():
        same = _holds(live.get(key) or {}, value) if isinstance(value, dict) else live.get(key) == value
        if not same:
            return False
    return True


def _shown(spec: JsonObject | None) -> str:
    return json.dumps({"spec": spec}, indent=2, sort_keys=True) + "\n" if spec else ""


# --------------------------------------------------------------------------- applying


class SecondaryReconciler:
    """Installs a secondary scheduler, and rolls it back where the Deployment doesn't become healthy with it."""

    def __init__(self, api: Api, options: Options, waiting: Waiting) -> None:
        self._api = api
        self._options = options
        self._waiting = waiting

    def observe(self) -> State:
        return observe(self._api, removal=not self._options.config)

    def plan(self, state: State) -> Plan:
        return make_plan(self._options, state)

    def apply(self, state: State, plan: Plan) -> None:
        """Make the changes of a plan.

        :raises ShareError: it isn't in effect.
        """
        steps = [str(change.step) for change in plan.changes]
        if not self._options.config:
            if "switch" in steps:
                self._api.delete(SECONDARY)
                self._until(lambda: f"{DEPLOYMENT} still exists" if self._api.get(DEPLOYMENT) else "")
        else:
            self._present(state, steps)
        for change in plan.changes:
            if isinstance(change.step, Ref):
                self._api.delete(change.step)

    def _present(self, state: State, steps: list[str]) -> None:
        options = self._options
        for item in olm.missing(options.package, state.installed):
            self._api.apply(item, FIELD_MANAGER)
        if "write" in steps:
            metadata = {"name": options.name, "namespace": NAMESPACE, "labels": LABELS}
            # An edit would change the running scheduler without a new Deployment.
            config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True}
            self._api.apply({**config_map, "data": {KEY: options.config}}, FIELD_MANAGER)
        if not state.installed.served:
            self._until(self._not_installed, "OLM doesn't install the Secondary Scheduler Operator")
        # The record of an interrupted run is older.
        before = json.dumps(state.spec or {}, sort_keys=True) if state.before is None else state.before
        if "switch" in steps:
            self._request(options.spec, before)
        if "switch" in steps or "verify" in steps:
            try:
                self.wait()
            except NotInEffect as error:
                raise NotInEffect(f"{error}; {self._roll_back(json.loads(before))}") from error
            self._api.patch(SECONDARY, {"metadata": {"annotations": {BEFORE: None}}})

    def _request(self, spec: JsonObject, before: str | None) -> None:
        metadata: JsonObject = {"name": SECONDARY.name, "namespace": NAMESPACE, "labels": LABELS}
        if before is not None:
            metadata["annotations"] = {BEFORE: before}
        options = {"apiVersion": SECONDARY.api_version, "kind": SECONDARY.kind, "metadata": metadata, "spec": spec}
        self._api.apply(options, FIELD_MANAGER)

    def _roll_back(self, before: JsonObject) -> str:
        """Restore the old specification; the result for the message."""
        if not before:
            self._api.delete(SECONDARY)
            self._api.delete(ref(self._options.name))
            return "rolled back: it was removed again, and the cluster's own scheduler is unchanged"
        name = before.get("schedulerConfig")
        self._request(before, None)
        try:
            self._wait_for(before)
        except NotInEffect as error:
            return f"rolled back to the configuration {name}, with which it isn't healthy yet: {error}"
        self._api.delete(ref(self._options.name))
        return f"rolled back to the configuration {name}, with which it is healthy"

    # ----------------------------------------------------------------- waiting

    def wait(self) -> None:
        """Wait until the Deployment has the requested configuration and image, and all its pods are ready.

        :raises NotInEffect: it isn't in time; with the pods' errors.
        """
        self._wait_for(self._options.spec)

    def _wait_for(self, spec: JsonObject) -> None:
        self._until(lambda: self._differs(spec), "the secondary scheduler isn't healthy", self._why)

    def _differs(self, spec: JsonObject) -> str:
        live = self._api.get(DEPLOYMENT)
        if live is None:
            return f"the operator created no {DEPLOYMENT}"
        pod = ((live.get("spec") or {}).get("template") or {}).get("spec") or {}
        mounted = [str((volume.get("configMap") or {}).get("name")) for volume in pod.get("volumes") or []]
        if spec["schedulerConfig"] not in mounted:
            return f"{DEPLOYMENT} doesn't mount the configuration {spec['schedulerConfig']}"
        if spec["schedulerImage"] not in [str(container.get("image")) for container in pod.get("containers") or []]:
            return f"{DEPLOYMENT} doesn't run {spec['schedulerImage']}"
        return not_ready_reason(live) or ""

    def _why(self) -> list[str]:
        live = self._api.get(DEPLOYMENT)
        if live is None or not selector(live):
            return []
        return reasons(None, self._api.list_all("v1", "Pod", NAMESPACE, label_selector=selector(live)), [])

    def _not_installed(self) -> str:
        reason = olm.not_served(self._api, self._options.package)
        if not reason:
            # Its storage is ready a moment later; until then this request fails.
            self._api.get(SECONDARY)
        return reason

    def _until(self, left: t.Callable[[], str], subject: str = "", why: t.Callable[[], list[str]] = lambda: []) -> None:
        # The API server may be away for a moment, as it is while it learns a new kind.
        self._waiting.until_done(left, subject, why, (ShareError,))


def work(api: Api, params: JsonObject, check: bool, waiting: Waiting) -> JsonObject:
    """Install, configure or remove the secondary scheduler.

    :param params: the module's options.
    :param check: only return what would change.
    :param waiting: for the operators, in seconds.
    :raises ShareError: with ``changed`` in its details.
    """
    options = Options(params)
    reconciler = SecondaryReconciler(api, options, waiting)
    result = run(reconciler, check, lambda state: {"library": api.library, "kept": list(state.foreign)})
    if not result["changed"] and options.config and not check:
        try:
            reconciler.wait()
        except ShareError as error:
            error.details.update(result)
            raise
    return result
