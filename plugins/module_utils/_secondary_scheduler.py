# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A scheduler beside OpenShift's own, from 4.10 on: the concern of the module ``openshift_secondary_scheduler``.

OLM installs the Secondary Scheduler Operator where it is asked to by a Subscription, in a namespace with exactly one
OperatorGroup; what of these is there already is somebody else's and stays. The operator serves one object,
SecondaryScheduler/cluster, and makes a Deployment of it. It says
nothing of how that Deployment fares, so the Deployment itself is judged: it has to mount the configuration and run the
image that were asked for, and every pod of it has to be of that revision and ready. Each configuration has a ConfigMap
of its own, called after its digest, so that the way back is the name before.
"""

from __future__ import annotations

import hashlib
import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _openshift as openshift
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._namespace_use import CREATED, strangers
from ansible_collections.kubegpu.share.plugins.module_utils._objects import FIELD_MANAGER, HIDDEN, Json, Ref, ref_of
from ansible_collections.kubegpu.share.plugins.module_utils._openshift_client import LIBRARIES
from ansible_collections.kubegpu.share.plugins.module_utils._openshift_scheduler import PAUSE, Api
from ansible_collections.kubegpu.share.plugins.module_utils._rollout import reasons, selector, unfinished
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

NAMESPACE = "openshift-secondary-scheduler-operator"
PACKAGE = "openshift-secondary-scheduler-operator"
DEFINITION = Ref("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "secondaryschedulers.operator.openshift.io")
# The operator knows no other name and namespace.
SECONDARY = Ref("operator.openshift.io/v1", "SecondaryScheduler", NAMESPACE, "cluster")
DEPLOYMENT = Ref("apps/v1", "Deployment", NAMESPACE, "secondary-scheduler")
KEY = "config.yaml"
SPACE = Ref("v1", "Namespace", "", NAMESPACE)
GROUPS = "operators.coreos.com/v1"
SUBSCRIPTIONS = "operators.coreos.com/v1alpha1"

LABELS = {"app.kubernetes.io/part-of": "gpushare", "app.kubernetes.io/component": "scheduler"}
# On SecondaryScheduler/cluster, as long as what it asks for wasn't seen in effect: what it asked for before.
BEFORE = "kubegpu.share/replaced-spec"
FIELDS = ("managementState", "schedulerConfig", "schedulerImage", "topology")

ARGUMENTS: Json = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    # It holds a key.
    "config": {"type": "str", "no_log": True},
    "image": {"type": "str"},
    "channel": {"type": "str", "default": "stable"},
    "source": {"type": "str", "default": "redhat-operators"},
    "source_namespace": {"type": "str", "default": "openshift-marketplace"},
    "topology": {"type": "str", "choices": ["", "SingleReplica", "HighlyAvailable"], "default": ""},
    "config_map": {"type": "str", "default": "gpushare-scheduler-config"},
    "timeout": {"type": "int", "default": 600},
    "library": {"type": "str", "choices": list(LIBRARIES), "default": "auto"},
}
REQUIRED_IF = [("state", "present", ("config", "image"))]


def ref(name: str) -> Ref:
    return Ref("v1", "ConfigMap", NAMESPACE, name)


class Wish:
    """What is asked for; without a configuration: that nothing of ours is there."""

    def __init__(self, params: Json) -> None:
        present = params["state"] == "present"
        self.config = str(params["config"]) if present else ""
        self.prefix = str(params["config_map"])
        self.name = f"{self.prefix}-{hashlib.sha256(self.config.encode()).hexdigest()[:10]}"
        self.spec: Json = {
            "managementState": "Managed",
            "schedulerConfig": self.name,
            "schedulerImage": str(params["image"] or ""),
        }
        if params["topology"]:
            self.spec["topology"] = {"mode": params["topology"]}
        self.subscription: Json = {
            "name": PACKAGE,
            "channel": str(params["channel"]),
            "source": str(params["source"]),
            "sourceNamespace": str(params["source_namespace"]),
            "installPlanApproval": "Automatic",
        }

    def installing(self, seen: Json) -> list[Json]:
        """What OLM needs and isn't there."""
        missing = []
        if not seen["space"]:
            labels = {**LABELS, "openshift.io/cluster-monitoring": "true"}
            missing.append(_made("v1", "Namespace", {"name": NAMESPACE, "labels": labels}))
        place = {"name": PACKAGE, "namespace": NAMESPACE, "labels": LABELS}
        if not seen["groups"]:
            # The operator watches its own namespace alone.
            missing.append(_made(GROUPS, "OperatorGroup", place, {"targetNamespaces": [NAMESPACE]}))
        if not seen["subscriptions"]:
            missing.append(_made(SUBSCRIPTIONS, "Subscription", place, self.subscription))
        return missing


def _made(api_version: str, kind: str, metadata: Json, spec: Json | None = None) -> Json:
    noted = {**metadata, "annotations": {CREATED: "true"}}
    return {"apiVersion": api_version, "kind": kind, "metadata": noted, **({"spec": spec} if spec else {})}


# --------------------------------------------------------------------------- looking and planning


def observe(api: Api, going: bool = False) -> Json:
    """All that a plan is made from.

    :param going: whether all that is ours is to go; only then it matters what others have in the namespace.
    :raises BadInput: this is no OpenShift.
    """
    definition = api.get(DEFINITION)
    served = definition is not None and openshift.condition(definition, "Established")[0] == "True"
    selected = ",".join(f"{key}={value}" for key, value in LABELS.items())
    maps = api.list_all("v1", "ConfigMap", NAMESPACE, label_selector=selected)
    live = (api.get(SECONDARY) if served else None) or {}
    if going and (live.get("metadata") or {}).get("deletionTimestamp"):
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
        "before": ((live.get("metadata") or {}).get("annotations") or {}).get(BEFORE),
        "space": space,
        "leaving": bool(spaces) and not space,
        "strangers": strangers(api, NAMESPACE, ours) if going and [one for one in space if one["ours"]] else [],
        "groups": _found(api.list_all(GROUPS, "OperatorGroup", NAMESPACE)),
        "subscriptions": _found([one for one in subscriptions if (one.get("spec") or {}).get("name") == PACKAGE]),
        "maps": {one["metadata"]["name"]: (one.get("data") or {}).get(KEY) or "" for one in maps},
    }


def _found(objects: list[Json]) -> list[Json]:
    """Of each that isn't going already: its name, whether we made it, and what it is about."""
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


def make_plan(wish: Wish, seen: Json) -> Plan:
    """What has to be done.

    :raises BadInput: the cluster can't be served.
    :raises ShareError: it can't be served yet.
    """
    named = str(seen["spec"].get("schedulerConfig") or "")
    foreign = seen["there"] and named not in seen["maps"] and not named.startswith(f"{wish.prefix}-")
    if not wish.config:
        return Plan(()) if foreign else _absent(seen)
    if openshift.takes_policy(str(seen["version"])):
        raise BadInput(
            f"scheduler_mode: OpenShift {seen['version']} has no Secondary Scheduler Operator; its own scheduler takes "
            "a Policy"
        )
    if foreign:
        raise BadInput(
            f"scheduler_mode: {SECONDARY} is there already with somebody else's configuration ({named or 'none'}), and "
            "the operator serves only one"
        )
    if seen["leaving"]:
        raise ShareError(f"{SPACE} is being deleted; run again when it is gone")
    if "topology" in wish.spec and seen["served"] and not seen["topology"]:
        raise BadInput("scheduler_openshift_topology: this release of the Secondary Scheduler Operator knows none")
    for group in seen["groups"]:
        if group["targets"] != [NAMESPACE]:
            raise BadInput(
                f"scheduler_mode: OperatorGroup {group['name']} in {NAMESPACE} watches other namespaces than its own, "
                "which the Secondary Scheduler Operator can't"
            )
    changes = [
        Change(str(ref_of(one)), "", json.dumps(one, indent=2) + "\n", "install") for one in wish.installing(seen)
    ]
    if seen["maps"].get(wish.name) != wish.config:
        before = _hidden(seen["maps"].get(wish.name, ""))
        changes.append(Change(str(ref(wish.name)), before, _hidden(wish.config), "write"))
    if not _holds(seen["spec"], wish.spec):
        changes.append(Change(str(SECONDARY), _shown(seen["spec"]), _shown(wish.spec), "switch"))
    elif seen["before"] is not None:
        changes.append(Change(str(DEPLOYMENT), "", "every pod with this configuration and image\n", "prove"))
    return Plan((*changes, *_swept(seen, wish.name)))


def _absent(seen: Json) -> Plan:
    there = (Change(str(SECONDARY), _shown(seen["spec"]), "", "switch"),) if seen["there"] else ()
    return Plan((*there, *_swept(seen, ""), *(Change(str(one), str(one) + "\n", "", "remove") for one in _ours(seen))))


def _ours(seen: Json) -> list[Ref]:
    """What we had OLM install, in the order in which it goes. The namespace stays for what others have in it."""
    going = []
    for one in (*seen["subscriptions"], *seen["groups"], *([] if seen["strangers"] else seen["space"])):
        if one["ours"]:
            going.append(
                Ref(one["api_version"], one["kind"], NAMESPACE if one["kind"] != "Namespace" else "", one["name"])
            )
            if one["installed"]:
                # What a Subscription has installed stays without it.
                going.append(Ref(SUBSCRIPTIONS, "ClusterServiceVersion", NAMESPACE, one["installed"]))
    return going


def _swept(seen: Json, keep: str) -> tuple[Change, ...]:
    going = {name: _hidden(text) for name, text in seen["maps"].items() if name != keep}
    return tuple(Change(str(ref(name)), text, "", "sweep") for name, text in going.items())


def _hidden(config: str) -> str:
    """Without the key with which the scheduler proves to the extender who it is."""
    return re.sub(r"(\bkeyData:\s*)\S+", rf"\1{HIDDEN}", config)


def _holds(live: Json, wish: Json) -> bool:
    """The wish names only what it is about; the API server adds defaults."""
    for key, value in wish.items():
        same = _holds(live.get(key) or {}, value) if isinstance(value, dict) else live.get(key) == value
        if not same:
            return False
    return True


def _shown(spec: Json) -> str:
    return json.dumps({"spec": spec}, indent=2, sort_keys=True) + "\n" if spec else ""


# --------------------------------------------------------------------------- doing


class SecondaryScheduler:
    """Carries a plan out, and takes it back where the Deployment doesn't come up with it."""

    def __init__(self, api: Api, wish: Wish, waiting: Waiting) -> None:
        self._api = api
        self._wish = wish
        self._waiting = waiting

    def apply(self, seen: Json, plan: Plan) -> None:
        """:raises ShareError: it isn't in effect."""
        steps = [str(one.step) for one in plan.changes]
        if not self._wish.config:
            if "switch" in steps:
                self._api.delete(SECONDARY)
                self._until(lambda: f"{DEPLOYMENT} is still there" if self._api.get(DEPLOYMENT) else "")
        else:
            self._present(seen, steps)
        for change in plan.changes:
            if change.step == "sweep":
                self._api.delete(ref(change.header.rpartition("/")[2]))
        if "remove" in steps:
            for one in _ours(seen):
                self._api.delete(one)

    def _present(self, seen: Json, steps: list[str]) -> None:
        wish = self._wish
        for one in wish.installing(seen):
            self._api.apply(one, FIELD_MANAGER)
        if "write" in steps:
            metadata = {"name": wish.name, "namespace": NAMESPACE, "labels": LABELS}
            # Whoever changes it would change what runs without this being asked.
            config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True}
            self._api.apply({**config_map, "data": {KEY: wish.config}}, FIELD_MANAGER)
        if not seen["served"]:
            self._until(self._unserved, "OLM doesn't bring the Secondary Scheduler Operator")
        before = seen["before"]
        if "switch" in steps:
            before = json.dumps(seen["spec"], sort_keys=True) if before is None else before
            self._ask_for(wish.spec, before)
        if "switch" in steps or "prove" in steps:
            try:
                self.wait()
            except NotInEffect as error:
                raise NotInEffect(f"{error}; {self._put_back(json.loads(before))}") from error
            self._api.patch(SECONDARY, {"metadata": {"annotations": {BEFORE: None}}})

    def _ask_for(self, spec: Json, before: str | None) -> None:
        metadata: Json = {"name": SECONDARY.name, "namespace": NAMESPACE, "labels": LABELS}
        if before is not None:
            metadata["annotations"] = {BEFORE: before}
        wish = {"apiVersion": SECONDARY.api_version, "kind": SECONDARY.kind, "metadata": metadata, "spec": spec}
        self._api.apply(wish, FIELD_MANAGER)

    def _put_back(self, before: Json) -> str:
        if not before:
            self._api.delete(SECONDARY)
            self._api.delete(ref(self._wish.name))
            return "it was taken away again; the cluster's own scheduler was never touched"
        self._ask_for(before, None)
        try:
            self._wait_for(before)
        except NotInEffect as error:
            return f"it has the configuration {before.get('schedulerConfig')} again and isn't healthy yet: {error}"
        self._api.delete(ref(self._wish.name))
        return f"it has the configuration {before.get('schedulerConfig')} again and is healthy"

    # ----------------------------------------------------------------- waiting

    def wait(self) -> None:
        """Until the Deployment is what was asked for, and all of it runs.

        :raises NotInEffect: it isn't in time; with the pods' own words.
        """
        self._wait_for(self._wish.spec)

    def _wait_for(self, spec: Json) -> None:
        self._until(lambda: self._differs(spec), "the secondary scheduler doesn't come up", self._why)

    def _differs(self, spec: Json) -> str:
        live = self._api.get(DEPLOYMENT)
        if live is None:
            return f"the operator made no {DEPLOYMENT}"
        pod = ((live.get("spec") or {}).get("template") or {}).get("spec") or {}
        mounted = [str((one.get("configMap") or {}).get("name")) for one in pod.get("volumes") or []]
        if spec["schedulerConfig"] not in mounted:
            return f"{DEPLOYMENT} doesn't mount the configuration {spec['schedulerConfig']}"
        if spec["schedulerImage"] not in [str(one.get("image")) for one in pod.get("containers") or []]:
            return f"{DEPLOYMENT} doesn't run {spec['schedulerImage']}"
        return unfinished(live) or ""

    def _why(self) -> list[str]:
        live = self._api.get(DEPLOYMENT)
        if live is None or not selector(live):
            return []
        return reasons(None, self._api.list_all("v1", "Pod", NAMESPACE, label_selector=selector(live)), [])

    def _unserved(self) -> str:
        definition = self._api.get(DEFINITION)
        if definition is not None and openshift.condition(definition, "Established")[0] == "True":
            # For a moment after that its storage isn't there yet, which is told by an error.
            self._api.get(SECONDARY)
            return ""
        said = []
        for one in self._api.list_all("operators.coreos.com/v1alpha1", "Subscription", NAMESPACE):
            for kind in ("CatalogSourcesUnhealthy", "ResolutionFailed", "InstallPlanFailed", "InstallPlanPending"):
                status, message = openshift.condition(one, kind)
                said += [f"{kind}: {message}"] if status == "True" else []
        return "; ".join(said) or f"{DEFINITION.name} isn't served"

    def _until(
        self, left: t.Callable[[], str], subject: str = "", why: t.Callable[[], list[str]] | None = None
    ) -> None:
        said = ""
        for _look in self._waiting.looks():
            try:
                said = left()
            except ShareError as error:
                # The API server may be away for a moment.
                said = str(error)
            if not said:
                return
        try:
            telling = why() if why is not None else []
        except ShareError as error:
            telling = [str(error)]
        begin = f"{subject} within" if subject else "not within"
        raise NotInEffect(f"{begin} {self._waiting.timeout:g} s: {'; '.join([said, *telling])}")


def work(api: Api, params: Json, check: bool, waiting: Waiting | None = None) -> Json:
    """The module's whole work.

    :raises ShareError: with ``changed`` in its details.
    """
    wish = Wish(params)
    seen = observe(api, not wish.config)
    plan = make_plan(wish, seen)
    result: Json = {"changed": not plan.empty, "diff": plan.diff(), "library": api.library, "kept": seen["strangers"]}
    if check:
        return result
    concern = SecondaryScheduler(api, wish, waiting or Waiting(params["timeout"], PAUSE))
    try:
        concern.apply(seen, plan)
        if wish.config and plan.empty:
            concern.wait()
    except ShareError as error:
        error.details.update(result)
        raise
    left = make_plan(wish, observe(api, not wish.config))
    if not left.empty:
        raise NotInEffect(f"changed, but still not as asked for: {left.headers()}", **result)
    return result
