# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Give the scheduler of OpenShift up to 4.9 a Policy with the extender, or remove it again.

Scheduler/cluster names a ConfigMap in openshift-config. The operator copies it and rolls out a new revision of the
static pods, one node after the other. A Policy that kube-scheduler refuses stops that on the first node permanently:
nothing rolls back by itself. So a ConfigMap that is named is never written to or deleted. Each text has a ConfigMap of
its own, named after its digest; a change is another name, and a rollback is the old name. Its annotations record what
the next run needs if this one is killed: which Policy is the user's, which one was replaced, after which revision,
whether the new one took effect, and whether its removal has begun.

The removal begins whatever kube-scheduler's state is, because our Policy may be the cause of that state. A Policy that
never took effect, that degrades kube-scheduler or that this release doesn't read isn't restored then.
"""

from __future__ import annotations

import dataclasses
import json
import typing as t

from .._core.errors import BadInput, NotInEffect
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.refs import FIELD_MANAGER, Ref
from . import cluster as openshift
from .cluster import SCHEDULER, Rollout
from .objects import PART_OF, Api, annotations_of, label_selector, name_by_digest

NAMESPACE = "openshift-config"
KEY = "policy.cfg"
# The operator's copy of the Policy, which the pods read (from 4.5 on).
COPY = Ref("v1", "ConfigMap", "openshift-kube-scheduler", "policy-configmap")
PODS = ("openshift-kube-scheduler", "app=openshift-kube-scheduler")
FIRST_WITH_COPY = (4, 5)

USERS = "kubegpu.share/user-policy"
REPLACED = "kubegpu.share/replaced-policy"
SINCE = "kubegpu.share/after-revision"
PROVEN = "kubegpu.share/in-effect"
# Set during the removal of ours: the removal is in effect with a revision after this one.
LEAVING = "kubegpu.share/leaving-after-revision"
# Suffix of the second ConfigMap for a text, where the first one was edited while it is named.
SECOND = "-2"

CONFIG_MAP = "gpushare-scheduler-policy"


class PolicyMap(t.TypedDict):
    """A ConfigMap with a Policy; its annotations are those of the same purpose above."""

    text: str | None
    there: bool
    ours: bool
    users: str
    replaced: str
    since: int
    proven: bool
    leaving: str


class State(t.TypedDict):
    """The state that a plan is made from, as JSON for the action plugin.

    ``name`` is the Policy that Scheduler/cluster names, ``copy`` the text of the operator's copy, ``rollout`` the
    fields of ``Rollout``.
    """

    version: str
    upgrading: str
    there: bool
    name: str
    resource_version: str
    maps: dict[str, PolicyMap]
    copy: str | None
    rollout: JsonObject


@dataclasses.dataclass(frozen=True)
class Options:
    """The requested Policy.

    :param policy: the complete Policy that kube-scheduler has to read; empty to remove ours.
    :param prefix: the beginning of our ConfigMaps' names.
    """

    policy: str
    prefix: str

    @property
    def name(self) -> str:
        return name_by_digest(self.prefix, self.policy) if self.policy else ""

    def config_map(self, state: State) -> str:
        """Return the name of its ConfigMap: never one that is named and has another text."""
        first, second = self.name, f"{self.name}{SECOND}"
        if state["name"] == second:
            return second if state["maps"][second]["text"] == self.policy else first
        named = state["maps"].get(first) if state["name"] == first else None
        return second if named is not None and named["ours"] and named["text"] != self.policy else first


def ref(name: str) -> Ref:
    """Return the reference of a Policy's ConfigMap."""
    return Ref("v1", "ConfigMap", NAMESPACE, name)


# --------------------------------------------------------------------------- observing


def observe(api: Api, prefix: str) -> State:
    """Collect the state that a plan is made from.

    :param prefix: the beginning of our ConfigMaps' names.
    :raises BadInput: this isn't OpenShift.
    """
    version = openshift.cluster_version(api)
    scheduler = api.get(SCHEDULER) or {}
    name = str((((scheduler.get("spec") or {}).get("policy")) or {}).get("name") or "")
    items = api.list_all("v1", "ConfigMap", NAMESPACE, label_selector=label_selector(PART_OF))
    maps = {item["metadata"]["name"]: _policy(item) for item in items}
    for other in (name, *(row["users"] for row in list(maps.values()))):
        if other and other not in maps:
            live = api.get(ref(other))
            if live is not None:
                maps[other] = _policy(live)
    if name.startswith(f"{prefix}-") and name not in maps:
        # Ours was deleted while it is named.
        maps[name] = {**_policy({}), "ours": True}
    copy = api.get(COPY)
    return {
        "version": openshift.version_of(version),
        "upgrading": openshift.upgrading(version),
        "there": bool(scheduler),
        "name": name,
        "resource_version": str((scheduler.get("metadata") or {}).get("resourceVersion") or ""),
        "maps": maps,
        "copy": _text(copy) if copy is not None else None,
        "rollout": dataclasses.asdict(openshift.observe_rollout(api)),
    }


def _text(config_map: JsonObject) -> str | None:
    return (config_map.get("data") or {}).get(KEY)


def _policy(config_map: JsonObject) -> PolicyMap:
    notes = annotations_of(config_map)
    return {
        "text": _text(config_map),
        "there": bool(config_map),
        "ours": USERS in notes,
        "users": str(notes.get(USERS) or ""),
        "replaced": str(notes.get(REPLACED) or ""),
        "since": int(notes.get(SINCE) or 0),
        "proven": notes.get(PROVEN) == "true",
        "leaving": str(notes.get(LEAVING) or ""),
    }


def rollout(state: State) -> Rollout:
    """Return the rollout's state as an object."""
    given = state["rollout"]
    nodes = tuple(openshift.Node(**{**node, "errors": tuple(node["errors"])}) for node in given["nodes"])
    return Rollout(**{**given, "nodes": nodes})


def users_policy(state: State) -> tuple[str, str | None]:
    """Return name and text of the user's own Policy; an empty name for none, None for a map without a Policy."""
    name = state["name"]
    named = state["maps"].get(name)
    if named is not None and named["ours"]:
        users = state["maps"].get(named["users"])
        return (named["users"], users["text"]) if users is not None else ("", None)
    return name, named["text"] if named is not None else None


def require_users_policy(state: State) -> tuple[str, str | None]:
    """Return ``users_policy`` for a change that merges into it.

    :raises BadInput: the one that Scheduler/cluster names doesn't exist.
    """
    name, named = state["name"], state["maps"].get(state["name"])
    if name and (named is None or (named["text"] is None and not named["ours"])):
        what = "doesn't exist" if named is None else f"has no {KEY}"
        raise BadInput(
            f"scheduler_mode: Scheduler/cluster names the policy {name}, and ConfigMap {NAMESPACE}/{name} {what}"
        )
    return users_policy(state)


# --------------------------------------------------------------------------- planning


def require_policy_support(state: State, present: bool) -> None:
    """Refuse a change that would leave the cluster without a scheduler, or degrade it.

    :raises BadInput: nothing was changed.
    """
    version = state["version"]
    if present and not openshift.takes_policy(version):
        raise BadInput(
            f"scheduler_mode: the scheduler of OpenShift {version} reads no Policy, and one that Scheduler/cluster "
            "names degrades the cluster; from 4.10 on use a secondary scheduler"
        )
    if not state["there"]:
        raise BadInput(
            "scheduler_mode: this cluster has no Scheduler/cluster, by which OpenShift's scheduler is configured"
        )


def require_settled(state: State, removal: bool) -> None:
    """Refuse to begin a change whose outcome couldn't be distinguished from the present state.

    :param removal: of ours, which may be why kube-scheduler is degraded or still being rolled out.
    :raises BadInput: nothing was changed.
    """
    now = rollout(state)
    if state["upgrading"] and not (removal and now.degraded):
        raise BadInput(
            f"scheduler_mode: the cluster is being upgraded ({state['upgrading']}); wait until it is finished"
        )
    if removal:
        return
    named = state["maps"].get(state["name"])
    way_out = "; it reads our policy, which state absent removes" if named and named["ours"] else ""
    if now.degraded:
        raise BadInput(f"scheduler_mode: OpenShift's kube-scheduler is degraded already: {now.degraded}{way_out}")
    if not now.settled:
        message = f"scheduler_mode: OpenShift's kube-scheduler is still being rolled out: {now}{way_out}"
        raise BadInput(message, code="RolloutInProgress")


def make_plan(options: Options, state: State) -> Plan:
    """Plan the change; pure.

    :raises BadInput: the cluster doesn't support it.
    """
    require_policy_support(state, bool(options.policy))
    plan = _present(options, state) if options.policy else _absent(state)
    beginning = any(change.step == "switch" for change in plan.changes)
    if beginning and openshift.takes_policy(state["version"]):
        require_settled(state, removal=not options.policy)
    return plan


def _present(options: Options, state: State) -> Plan:
    name, maps = state["name"], state["maps"]
    named = maps.get(name)
    if named is not None and not named["ours"] and named["text"] == options.policy:
        # The extender is in the user's own Policy.
        return Plan(_obsolete(state, keep={name}))
    target = options.config_map(state)
    mine = maps.get(target)
    if mine and not mine["ours"]:
        raise BadInput(f"config_map: ConfigMap {NAMESPACE}/{target} exists and isn't ours; set another config_map")
    changes = []
    text = mine["text"] if mine else None
    if text != options.policy:
        changes.append(Change(str(ref(target)), text or "", options.policy, "write"))
    if name != target or not mine:
        changes.append(_switch(name, target))
    elif mine["leaving"] or not mine["proven"]:
        changes.append(_verification(state, _since_of(state, mine, options.policy)))
    return Plan((*changes, *_obsolete(state, keep={target})))


def _absent(state: State) -> Plan:
    name = state["name"]
    named = state["maps"].get(name)
    users, text = after_ours(state)
    changes = []
    if named is not None and named["ours"]:
        changes.append(_switch(name, users))
    elif _leaving(state):
        changes.append(_verification(state, _since_leaving(state, text)))
    return Plan((*changes, *_obsolete(state, keep=set())))


def after_ours(state: State) -> tuple[str, str | None]:
    """Return name and text of the Policy that replaces ours: the user's, where this release reads one."""
    name, text = users_policy(state)
    # kube-scheduler doesn't start with a map that has no Policy.
    return (name, text) if openshift.takes_policy(state["version"]) and text is not None else ("", None)


def _given_up(state: State) -> str:
    """Return the name of the user's Policy that isn't named again after the removal; empty for none."""
    named = state["maps"].get(state["name"])
    if not (named and named["ours"] and named["users"] in state["maps"]):
        return ""
    return named["users"] if after_ours(state)[0] != named["users"] else ""


def _leaving(state: State) -> list[PolicyMap]:
    return [row for row in state["maps"].values() if row["ours"] and row["leaving"]]


def _since(state: State, text: str | None) -> int:
    """Return the revision after which the one with this text comes; none comes where the operator's copy equals it."""
    latest = int(state["rollout"]["latest"])
    same = takes_copy(openshift.release(state["version"])) and state["copy"] == text
    return latest - 1 if same else latest


def _since_of(state: State, mine: PolicyMap, text: str) -> int:
    # The revision recorded at its installation is void once its removal has begun.
    return _since(state, text) if mine["leaving"] else mine["since"]


def _since_leaving(state: State, text: str | None) -> int:
    return min([_since(state, text), *(int(row["leaving"]) for row in _leaving(state))])


def takes_copy(release: tuple[int, int]) -> bool:
    """Return whether the operator of a release copies the Policy for its pods."""
    return FIRST_WITH_COPY <= release <= openshift.LAST_WITH_POLICY


def _switch(before: str, after: str) -> Change:
    def text(name: str) -> str:
        return f"spec:\n  policy:\n    name: {json.dumps(name)}\n"

    return Change(str(SCHEDULER), text(before), text(after), "switch")


def _verification(state: State, since: int) -> Change:
    before, after = f"{rollout(state)}\n", f"a revision after {since} on every node\n"
    return Change("revision of kube-scheduler", before, after, "verify")


def _obsolete(state: State, keep: set[str]) -> tuple[Change, ...]:
    return tuple(
        Change(str(ref(name)), row["text"] or "", "", ref(name))
        for name, row in sorted(state["maps"].items())
        if row["ours"] and name not in keep
    )


# --------------------------------------------------------------------------- applying


class PolicyReconciler:
    """Configures kube-scheduler's Policy, and rolls it back where kube-scheduler doesn't become healthy with it.

    :param base: the user's Policy from which the requested one was made.
    """

    def __init__(self, api: Api, options: Options, base: str | None, waiting: Waiting) -> None:
        self._api = api
        self._options = options
        self._base = base
        self._waiting = waiting

    def observe(self) -> State:
        return observe(self._api, self._options.prefix)

    def plan(self, state: State) -> Plan:
        if self._options.policy and require_users_policy(state)[1] != self._base:
            raise BadInput("scheduler_mode: the policy that Scheduler/cluster names was changed meanwhile; run again")
        return make_plan(self._options, state)

    def apply(self, state: State, plan: Plan) -> None:
        """Make the changes of a plan.

        :raises ShareError: it isn't in effect; the message says whether it was rolled back.
        """
        steps = [str(change.step) for change in plan.changes]
        release = openshift.release(state["version"])
        if self._options.policy:
            self._to_ours(state, steps, release)
        else:
            self._to_users(state, steps, release)
        self._delete_unnamed([change.step.name for change in plan.changes if isinstance(change.step, Ref)])

    def _to_ours(self, state: State, steps: list[str], release: tuple[int, int]) -> None:
        options, maps = self._options, state["maps"]
        target = options.config_map(state)
        if "switch" in steps:
            before, since = state["name"], _since(state, options.policy)
            users, _text = users_policy(state)
            notes = {USERS: users, REPLACED: before, SINCE: str(since), PROVEN: "false", LEAVING: ""}
            metadata = {"name": target, "namespace": NAMESPACE, "labels": PART_OF, "annotations": notes}
            self._api.apply(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: options.policy}},
                FIELD_MANAGER,
            )
            self._name(target, state["resource_version"])
        elif "verify" in steps:
            mine = maps[target]
            # The one that it replaced is deleted once it is proven; the user's stays.
            before = next((name for name in (mine["replaced"], mine["users"]) if name in maps), "")
            since = _since_of(state, mine, options.policy)
        else:
            return
        why = self._wait(since, options.policy, release)
        if why:
            self._roll_back(before, maps[before]["text"] if before in maps else None, release, why, unused=[target])
        self._note(target, {PROVEN: "true", LEAVING: ""})

    def _to_users(self, state: State, steps: list[str], release: tuple[int, int]) -> None:
        before = state["name"]
        mine = state["maps"].get(before)
        users, text = after_ours(state)
        degraded = bool(rollout(state).degraded)
        if "switch" in steps:
            since = _since(state, text)
            if mine and mine["there"]:
                self._note(before, {LEAVING: str(since)})
            self._name(users, state["resource_version"])
        elif "verify" in steps:
            since = _since_leaving(state, text)
        else:
            return
        why = self._wait(since, text, release, degraded)
        if not why:
            return
        sound = mine and mine["proven"] and not degraded and openshift.takes_policy(state["version"])
        if "switch" not in steps or not mine or not sound:
            named = f"policy {users}" if users else "no policy"
            raise NotInEffect(f"Scheduler/cluster names {named} in place of ours, and that isn't in effect yet: {why}")
        self._roll_back(before, mine["text"], release, why, unused=[])

    def _roll_back(
        self, before: str, old: str | None, release: tuple[int, int], why: str, unused: list[str]
    ) -> t.NoReturn:
        """Name the old policy again.

        :param unused: the ConfigMaps to delete once that is in effect.
        """
        named = f"policy {before}" if before else "no policy"
        self._name(before, "")
        # The wait begins in a degraded state.
        left = self._until(lambda now: self._differs(now, old, release), lambda now: "")
        outcome = f"rolled back to {named}, with which it isn't healthy yet: {left}"
        if not left:
            outcome = f"rolled back to {named}, with which it is healthy"
            if not self._options.policy:
                self._note(before, {LEAVING: ""})
            self._delete_unnamed(unused)
        raise NotInEffect(f"kube-scheduler didn't become healthy with the change: {why}; {outcome}")

    def _name(self, name: str, resource_version: str) -> None:
        """Set the policy's name in Scheduler/cluster; the API server refuses it where that was changed meanwhile."""
        body: JsonObject = {"spec": {"policy": {"name": name}}}
        if resource_version:
            body["metadata"] = {"resourceVersion": resource_version}
        self._api.patch(SCHEDULER, body)

    def _note(self, name: str, notes: JsonObject) -> None:
        self._api.patch(ref(name), {"metadata": {"annotations": notes}})

    def _delete_unnamed(self, names: t.Iterable[str]) -> None:
        named = str((((self._api.get(SCHEDULER) or {}).get("spec") or {}).get("policy") or {}).get("name") or "")
        for name in names:
            if name != named:
                self._api.delete(ref(name))

    # ----------------------------------------------------------------- waiting

    def _wait(self, since: int, text: str | None, release: tuple[int, int], degraded: bool = False) -> str:
        """Wait until every node runs a revision after ``since`` with this Policy; why that failed, or nothing.

        :param text: of the Policy; None for none.
        :param release: of OpenShift.
        :param degraded: it was before; that condition stays until the new revision runs.
        """
        # A release that reads no Policy may have nothing to roll out once it is removed.
        degraded_by_it = release > openshift.LAST_WITH_POLICY

        def left(now: Rollout) -> str:
            if not degraded_by_it and now.latest <= since:
                return f"no revision after {since}: {now}"
            return self._differs(now, text, release)

        def failed(now: Rollout) -> str:
            if degraded_by_it:
                return ""
            return (dataclasses.replace(now, degraded="") if degraded else now).failure(since)

        return self._until(left, failed)

    def _differs(self, now: Rollout, text: str | None, release: tuple[int, int]) -> str:
        if not now.settled:
            return str(now)
        if not takes_copy(release):
            return ""
        if _text(self._api.get(COPY) or {}) != text:
            return f"the operator's copy of the policy ({COPY}) isn't the requested one"
        namespace, selector = PODS
        for pod in self._api.list_all("v1", "Pod", namespace, label_selector=selector):
            if (text is not None) != reads_policy(pod):
                wrong = "without" if text is not None else "with"
                return f"pod {pod['metadata']['name']} runs {wrong} --policy-configmap"
        return ""

    def _until(self, left: t.Callable[[Rollout], str], failed: t.Callable[[Rollout], str]) -> str:
        # The operator's conditions show a new revision only after a moment.
        def problem() -> tuple[str, bool]:
            now = openshift.observe_rollout(self._api)
            why = failed(now)
            return (why, True) if why else (left(now), False)

        return self._waiting.until_stable(problem)


def reads_policy(pod: JsonObject) -> bool:
    """Return whether a kube-scheduler pod reads the operator's copy of the Policy."""
    containers = (pod.get("spec") or {}).get("containers") or []
    fields = [container.get(name) or [] for container in containers for name in ("command", "args")]
    return any("--policy-configmap=" in str(word) for words in fields for word in words)


# --------------------------------------------------------------------------- the module


def work(api: Api, params: JsonObject, check: bool, waiting: Waiting) -> JsonObject:
    """Apply the plan of the action plugin; without a plan, return the state that it needs.

    :param params: the module's options.
    :param check: only return what would change.
    :param waiting: for the operators, in seconds.
    :raises ShareError: with ``changed`` in its details where something was changed.
    """
    prefix = str(params["config_map"] or CONFIG_MAP)
    given = params.get("plan")
    if given is None:
        return {"changed": False, "observed": observe(api, prefix)}
    options = Options(str(given["policy"]), prefix)

    def details(state: State) -> JsonObject:
        given_up = "" if options.policy else _given_up(state)
        if not given_up:
            return {"library": api.library}
        reads = openshift.takes_policy(state["version"])
        why = (
            f"ConfigMap {NAMESPACE}/{given_up} has no {KEY}"
            if reads
            else f"OpenShift {state['version']} reads no Policy"
        )
        warning = (
            f"{why}, so {given_up}, which Scheduler/cluster named before ours, "
            f"isn't named again; ConfigMap {NAMESPACE}/{given_up} stays"
        )
        return {"library": api.library, "warnings": [warning]}

    return run(PolicyReconciler(api, options, given["base"], waiting), check, details)
