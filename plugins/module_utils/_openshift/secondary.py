# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Run a scheduler beside OpenShift's own, from 4.10 on, by the Secondary Scheduler Operator.

OLM installs the operator for a Subscription, in a namespace with exactly one OperatorGroup; existing ones belong to
others and stay. The operator serves one object, SecondaryScheduler/cluster, and creates a Deployment for it. It doesn't
report that Deployment's health, so the Deployment itself is checked: it has to mount the configuration and run the
image, and every pod has to be of that revision and ready. Each configuration has a ConfigMap of its own, named after
its digest, so a rollback is the old name.
https://docs.openshift.com/container-platform/4.17/nodes/scheduling/secondary_scheduler/index.html
"""

from __future__ import annotations

import json
import re
import typing as t

from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.namespace import CREATED, foreign_objects
from .._kube.objects import HIDDEN
from .._kube.refs import FIELD_MANAGER, Ref, ref_of
from .._kube.rollout import not_ready_reason, reasons, selector
from . import cluster as openshift
from .reconcile import PART_OF, Api, annotations_of, apply_plan, label_selector, name_by_digest

NAMESPACE = "openshift-secondary-scheduler-operator"
PACKAGE = "openshift-secondary-scheduler-operator"
DEFINITION = Ref("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "secondaryschedulers.operator.openshift.io")
# The operator reads no other name and namespace.
SECONDARY = Ref("operator.openshift.io/v1", "SecondaryScheduler", NAMESPACE, "cluster")
DEPLOYMENT = Ref("apps/v1", "Deployment", NAMESPACE, "secondary-scheduler")
KEY = "config.yaml"
SPACE = Ref("v1", "Namespace", "", NAMESPACE)
GROUPS = "operators.coreos.com/v1"
SUBSCRIPTIONS = "operators.coreos.com/v1alpha1"

LABELS = {**PART_OF, "app.kubernetes.io/component": "scheduler"}
# On SecondaryScheduler/cluster until its specification is in effect: the specification before.
BEFORE = "kubegpu.share/replaced-spec"
FIELDS = ("managementState", "schedulerConfig", "schedulerImage", "topology")

CONFIG_MAP = "gpushare-scheduler-config"


def ref(name: str) -> Ref:
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
        self.subscription: JsonObject = {
            "name": PACKAGE,
            "channel": str(params["channel"]),
            "source": str(params["source"]),
            "sourceNamespace": str(params["source_namespace"]),
            "installPlanApproval": "Automatic",
        }

    def missing_for_olm(self, state: JsonObject) -> list[JsonObject]:
        """Return the objects that OLM needs and that don't exist."""
        missing = []
        if not state["space"]:
            labels = {**LABELS, "openshift.io/cluster-monitoring": "true"}
            missing.append(_made("v1", "Namespace", {"name": NAMESPACE, "labels": labels}))
        place = {"name": PACKAGE, "namespace": NAMESPACE, "labels": LABELS}
        if not state["groups"]:
            # The operator watches its own namespace alone.
            missing.append(_made(GROUPS, "OperatorGroup", place, {"targetNamespaces": [NAMESPACE]}))
        if not state["subscriptions"]:
            missing.append(_made(SUBSCRIPTIONS, "Subscription", place, self.subscription))
        return missing


def _made(api_version: str, kind: str, metadata: JsonObject, spec: JsonObject | None = None) -> JsonObject:
    noted = {**metadata, "annotations": {CREATED: "true"}}
    return {"apiVersion": api_version, "kind": kind, "metadata": noted, **({"spec": spec} if spec else {})}


# --------------------------------------------------------------------------- observing and planning


def observe(api: Api, removal: bool = False) -> JsonObject:
    """Collect the state that a plan is made from.

    :param removal: of everything of ours; only then other objects in the namespace are listed.
    :raises BadInput: this isn't OpenShift.
    """
    definition = api.get(DEFINITION)
    served = definition is not None and openshift.condition(definition, "Established")[0] == "True"
    maps = api.list_all("v1", "ConfigMap", NAMESPACE, label_selector=label_selector(LABELS))
    live = (api.get(SECONDARY) if served else None) or {}
    if removal and (live.get("metadata") or {}).get("deletionTimestamp"):
        live = {}
    subscriptions = api.list_all(SUBSCRIPTIONS, "Subscription", NAMESPACE)
    spaces = [one for one in [api.get(SPACE)] if one]
    space = _found(spaces)
    ours = {DEPLOYMENT, *(ref(one["metadata"]["name"]) for one in maps)}
    return {
        "version": openshift.version_of(openshift.cluster_version(api)),
        "served": served,
        "topology": served and "topology" in json.dumps(definition),
        "there": bool(live),
        "spec": {key: value for key, value in (live.get("spec") or {}).items() if key in FIELDS},
        "before": annotations_of(live).get(BEFORE),
        "space": space,
        "leaving": bool(spaces) and not space,
        "foreign": foreign_objects(api, NAMESPACE, ours) if removal and [one for one in space if one["ours"]] else [],
        "groups": _found(api.list_all(GROUPS, "OperatorGroup", NAMESPACE)),
        "subscriptions": _found([one for one in subscriptions if (one.get("spec") or {}).get("name") == PACKAGE]),
        "maps": {one["metadata"]["name"]: (one.get("data") or {}).get(KEY) or "" for one in maps},
    }


def _found(objects: list[JsonObject]) -> list[JsonObject]:
    """Describe each object that isn't being deleted: its name, whether it is ours, and the fields that matter."""
    return [
        {
            "api_version": one["apiVersion"],
            "kind": one["kind"],
            "name": one["metadata"]["name"],
            "ours": CREATED in (one["metadata"].get("annotations") or {}),
            "targets": (one.get("spec") or {}).get("targetNamespaces") or [],
            "installed": str((one.get("status") or {}).get("installedCSV") or ""),
        }
        for one in objects
        if not one["metadata"].get("deletionTimestamp")
    ]


def make_plan(options: Options, state: JsonObject) -> Plan:
    """Plan the change.

    :raises BadInput: the cluster doesn't support it.
    :raises ShareError: it isn't possible yet.
    """
    named = str(state["spec"].get("schedulerConfig") or "")
    foreign = state["there"] and named not in state["maps"] and not named.startswith(f"{options.prefix}-")
    if not options.config:
        return Plan(()) if foreign else _absent(state)
    if openshift.takes_policy(str(state["version"])):
        raise BadInput(
            f"scheduler_mode: OpenShift {state['version']} has no Secondary Scheduler Operator; its own scheduler "
            "reads a Policy"
        )
    if foreign:
        raise BadInput(
            f"scheduler_mode: {SECONDARY} exists already with a configuration that isn't ours ({named or 'none'}), "
            "and the operator serves only one"
        )
    if state["leaving"]:
        raise ShareError(f"{SPACE} is being deleted; run again when it is gone")
    if "topology" in options.spec and state["served"] and not state["topology"]:
        raise BadInput(
            "scheduler_openshift_topology: this release of the Secondary Scheduler Operator doesn't support it"
        )
    for group in state["groups"]:
        if group["targets"] != [NAMESPACE]:
            raise BadInput(
                f"scheduler_mode: OperatorGroup {group['name']} in {NAMESPACE} watches other namespaces than its own, "
                "which the Secondary Scheduler Operator doesn't support"
            )
    changes = [
        Change(str(ref_of(one)), "", json.dumps(one, indent=2) + "\n", "install")
        for one in options.missing_for_olm(state)
    ]
    if state["maps"].get(options.name) != options.config:
        before = _masked(state["maps"].get(options.name, ""))
        changes.append(Change(str(ref(options.name)), before, _masked(options.config), "write"))
    if not _holds(state["spec"], options.spec):
        changes.append(Change(str(SECONDARY), _shown(state["spec"]), _shown(options.spec), "switch"))
    elif state["before"] is not None:
        changes.append(Change(str(DEPLOYMENT), "", "every pod with this configuration and image\n", "prove"))
    return Plan((*changes, *_swept(state, options.name)))


def _absent(state: JsonObject) -> Plan:
    there = (Change(str(SECONDARY), _shown(state["spec"]), "", "switch"),) if state["there"] else ()
    return Plan(
        (*there, *_swept(state, ""), *(Change(str(one), str(one) + "\n", "", "remove") for one in _ours(state)))
    )


def _ours(state: JsonObject) -> list[Ref]:
    """Return the objects that we had OLM install, in the order of removal; a namespace with others' objects stays."""
    going = []
    for one in (*state["subscriptions"], *state["groups"], *([] if state["foreign"] else state["space"])):
        if one["ours"]:
            going.append(
                Ref(one["api_version"], one["kind"], NAMESPACE if one["kind"] != "Namespace" else "", one["name"])
            )
            if one["installed"]:
                # OLM doesn't remove what a Subscription has installed.
                going.append(Ref(SUBSCRIPTIONS, "ClusterServiceVersion", NAMESPACE, one["installed"]))
    return going


def _swept(state: JsonObject, keep: str) -> tuple[Change, ...]:
    going = {name: _masked(text) for name, text in state["maps"].items() if name != keep}
    return tuple(Change(str(ref(name)), text, "", "sweep") for name, text in going.items())


def _masked(config: str) -> str:
    """Mask the private key by which the scheduler authenticates to the extender."""
    return re.sub(r"(\bkeyData:\s*)\S+", rf"\1{HIDDEN}", config)


def _holds(live: JsonObject, options: JsonObject) -> bool:
    """Whether the live object has these values; the API server adds defaults."""
    for key, value in options.items():
        same = _holds(live.get(key) or {}, value) if isinstance(value, dict) else live.get(key) == value
        if not same:
            return False
    return True


def _shown(spec: JsonObject) -> str:
    return json.dumps({"spec": spec}, indent=2, sort_keys=True) + "\n" if spec else ""


# --------------------------------------------------------------------------- applying


class SecondaryChange:
    """Applies a plan, and rolls it back where the Deployment doesn't become healthy with it."""

    def __init__(self, api: Api, options: Options, waiting: Waiting) -> None:
        self._api = api
        self._options = options
        self._waiting = waiting

    def apply(self, state: JsonObject, plan: Plan) -> None:
        """:raises ShareError: it isn't in effect."""
        steps = [str(one.step) for one in plan.changes]
        if not self._options.config:
            if "switch" in steps:
                self._api.delete(SECONDARY)
                self._until(lambda: f"{DEPLOYMENT} still exists" if self._api.get(DEPLOYMENT) else "")
        else:
            self._present(state, steps)
        for change in plan.changes:
            if change.step == "sweep":
                self._api.delete(ref(change.header.rpartition("/")[2]))
        if "remove" in steps:
            for one in _ours(state):
                self._api.delete(one)

    def _present(self, state: JsonObject, steps: list[str]) -> None:
        options = self._options
        for one in options.missing_for_olm(state):
            self._api.apply(one, FIELD_MANAGER)
        if "write" in steps:
            metadata = {"name": options.name, "namespace": NAMESPACE, "labels": LABELS}
            # An edit would change the running scheduler without a new Deployment.
            config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True}
            self._api.apply({**config_map, "data": {KEY: options.config}}, FIELD_MANAGER)
        if not state["served"]:
            self._until(self._not_installed, "OLM doesn't install the Secondary Scheduler Operator")
        before = state["before"]
        if "switch" in steps:
            before = json.dumps(state["spec"], sort_keys=True) if before is None else before
            self._request(options.spec, before)
        if "switch" in steps or "prove" in steps:
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
        mounted = [str((one.get("configMap") or {}).get("name")) for one in pod.get("volumes") or []]
        if spec["schedulerConfig"] not in mounted:
            return f"{DEPLOYMENT} doesn't mount the configuration {spec['schedulerConfig']}"
        if spec["schedulerImage"] not in [str(one.get("image")) for one in pod.get("containers") or []]:
            return f"{DEPLOYMENT} doesn't run {spec['schedulerImage']}"
        return not_ready_reason(live) or ""

    def _why(self) -> list[str]:
        live = self._api.get(DEPLOYMENT)
        if live is None or not selector(live):
            return []
        return reasons(None, self._api.list_all("v1", "Pod", NAMESPACE, label_selector=selector(live)), [])

    def _not_installed(self) -> str:
        definition = self._api.get(DEFINITION)
        if definition is not None and openshift.condition(definition, "Established")[0] == "True":
            # Its storage is ready a moment later; until then this request fails.
            self._api.get(SECONDARY)
            return ""
        reason = []
        for one in self._api.list_all("operators.coreos.com/v1alpha1", "Subscription", NAMESPACE):
            for kind in ("CatalogSourcesUnhealthy", "ResolutionFailed", "InstallPlanFailed", "InstallPlanPending"):
                status, message = openshift.condition(one, kind)
                reason += [f"{kind}: {message}"] if status == "True" else []
        return "; ".join(reason) or f"{DEFINITION.name} isn't served"

    def _until(
        self, left: t.Callable[[], str], subject: str = "", why: t.Callable[[], list[str]] | None = None
    ) -> None:
        reason = ""
        for _attempt in self._waiting.attempts():
            try:
                reason = left()
            except ShareError as error:
                # The API server may be away for a moment.
                reason = str(error)
            if not reason:
                return
        try:
            details = why() if why is not None else []
        except ShareError as error:
            details = [str(error)]
        begin = f"{subject} within" if subject else "not within"
        raise NotInEffect(f"{begin} {self._waiting.timeout:g} s: {'; '.join([reason, *details])}")


def work(api: Api, params: JsonObject, check: bool, waiting: Waiting) -> JsonObject:
    """Install, configure or remove the secondary scheduler.

    :raises ShareError: with ``changed`` in its details.
    """
    options = Options(params)
    removal = not options.config
    state = observe(api, removal)
    plan = make_plan(options, state)
    change = SecondaryChange(api, options, waiting)
    result = apply_plan(
        plan,
        {"library": api.library, "kept": state["foreign"]},
        check,
        lambda: change.apply(state, plan),
        lambda: make_plan(options, observe(api, removal)),
    )
    if plan.empty and options.config and not check:
        try:
            change.wait()
        except ShareError as error:
            error.details.update(result)
            raise
    return result
