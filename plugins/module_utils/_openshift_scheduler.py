# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A Policy for OpenShift's own kube-scheduler, up to 4.9: the concern of the module ``openshift_scheduler``.

Scheduler/cluster names a ConfigMap in openshift-config. The operator copies it and rolls a new revision of the static
pods out, one node after the other. A Policy that kube-scheduler doesn't accept stops that on the first node for good:
nothing falls back by itself. So no ConfigMap that is named is ever written to or deleted. Each text has a ConfigMap of
its own, called after its digest; a change is another name, and the way back is the name before. What the next run has
to know if this one is killed stands on the ConfigMap: which Policy is the user's, which one was replaced, after which
revision, whether the new one was seen in effect, and whether it was being taken out.

Taking ours out is begun whatever kube-scheduler's state is, since ours may be what is wrong with it. What wasn't seen
in effect, degrades kube-scheduler, or isn't read by this release, isn't put back then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _openshift as openshift
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._objects import FIELD_MANAGER, Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import SCHEDULER, Rollout
from ansible_collections.kubegpu.share.plugins.module_utils._openshift_client import LIBRARIES
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

NAMESPACE = "openshift-config"
KEY = "policy.cfg"
# Where the operator copies the Policy to, and what the pods are started with (from 4.5 on).
COPY = Ref("v1", "ConfigMap", "openshift-kube-scheduler", "policy-configmap")
PODS = ("openshift-kube-scheduler", "app=openshift-kube-scheduler")
FIRST_WITH_COPY = (4, 5)

PART_OF = {"app.kubernetes.io/part-of": "gpushare"}
USERS = "kubegpu.share/user-policy"
REPLACED = "kubegpu.share/replaced-policy"
SINCE = "kubegpu.share/after-revision"
PROVEN = "kubegpu.share/in-effect"
# Set while ours is being taken out: the revision after which that has to come.
LEAVING = "kubegpu.share/leaving-after-revision"
# Of the second ConfigMap for a text, for where somebody else has edited the first one while it is named.
SECOND = "-2"

PAUSE = 5.0

ARGUMENTS: Json = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "extender_url": {"type": "str", "default": "http://127.0.0.1:12345/gpushare-scheduler"},
    "extender_timeout": {"type": "int", "default": 30},
    "extender_preemption": {"type": "bool", "default": False},
    "config_map": {"type": "str", "default": "gpushare-scheduler-policy"},
    "timeout": {"type": "int", "default": 1800},
    "library": {"type": "str", "choices": list(LIBRARIES), "default": "auto"},
    "plan": {"type": "dict"},
}


class Api(t.Protocol):
    """What is asked of the cluster."""

    library: str

    def get(self, ref: Ref) -> Json | None: ...

    def list_all(self, api_version: str, kind: str, namespace: str = "", label_selector: str = "") -> list[Json]: ...

    def apply(self, definition: Json, manager: str) -> Json: ...

    def patch(self, ref: Ref, body: Json) -> Json: ...

    def delete(self, ref: Ref) -> None: ...


@dataclasses.dataclass(frozen=True)
class Wish:
    """What is asked for.

    :param policy: the whole Policy that kube-scheduler is to read; empty for none of ours.
    :param prefix: how the names of our ConfigMaps begin.
    """

    policy: str
    prefix: str

    @property
    def name(self) -> str:
        return f"{self.prefix}-{hashlib.sha256(self.policy.encode()).hexdigest()[:10]}" if self.policy else ""

    def place(self, seen: Json) -> str:
        """The name of the ConfigMap for it: never one that is named and has another text."""
        first, second = self.name, f"{self.name}{SECOND}"
        if seen["name"] == second:
            return second if seen["maps"][second]["text"] == self.policy else first
        named = seen["maps"].get(first) if seen["name"] == first else None
        return second if named is not None and named["ours"] and named["text"] != self.policy else first


def ref(name: str) -> Ref:
    return Ref("v1", "ConfigMap", NAMESPACE, name)


# --------------------------------------------------------------------------- looking


def observe(api: Api, prefix: str) -> Json:
    """All that a plan is made from, as plain JSON.

    :param prefix: how the names of our ConfigMaps begin.
    :raises BadInput: this is no OpenShift.
    """
    version = openshift.cluster_version(api)
    scheduler = api.get(SCHEDULER) or {}
    name = str((((scheduler.get("spec") or {}).get("policy")) or {}).get("name") or "")
    selector = ",".join(f"{key}={value}" for key, value in PART_OF.items())
    found = api.list_all("v1", "ConfigMap", NAMESPACE, label_selector=selector)
    maps = {one["metadata"]["name"]: _seen(one) for one in found}
    for other in (name, *(one["users"] for one in list(maps.values()))):
        if other and other not in maps:
            live = api.get(ref(other))
            if live is not None:
                maps[other] = _seen(live)
    if name.startswith(f"{prefix}-") and name not in maps:
        # Somebody has deleted ours while it is named.
        maps[name] = {**_seen({}), "ours": True}
    copy = api.get(COPY)
    return {
        "version": openshift.version_of(version),
        "upgrading": openshift.upgrading(version),
        "there": bool(scheduler),
        "name": name,
        "resource_version": str((scheduler.get("metadata") or {}).get("resourceVersion") or ""),
        "maps": maps,
        "copy": _text(copy) if copy is not None else None,
        "rollout": dataclasses.asdict(openshift.look_at_rollout(api)),
    }


def _text(config_map: Json) -> str | None:
    return (config_map.get("data") or {}).get(KEY)


def _seen(config_map: Json) -> Json:
    metadata = config_map.get("metadata") or {}
    notes = metadata.get("annotations") or {}
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


def rollout(seen: Json) -> Rollout:
    given = seen["rollout"]
    nodes = tuple(openshift.Node(**{**one, "errors": tuple(one["errors"])}) for one in given["nodes"])
    return Rollout(**{**given, "nodes": nodes})


def users_policy(seen: Json) -> tuple[str, str | None]:
    """Name and text of the Policy that the user has beside ours; empty and None where he has none.

    :raises BadInput: the one that Scheduler/cluster names isn't there.
    """
    name = str(seen["name"])
    named = seen["maps"].get(name)
    if named is not None and named["ours"]:
        users = seen["maps"].get(named["users"])
        return (str(named["users"]), users["text"]) if users is not None else ("", None)
    if name and (named is None or named["text"] is None):
        what = "isn't there" if named is None else f"has no {KEY}"
        raise BadInput(
            f"scheduler_mode: Scheduler/cluster names the policy {name}, and ConfigMap {NAMESPACE}/{name} {what}"
        )
    return name, named["text"] if named is not None else None


# --------------------------------------------------------------------------- planning


def require_serving(seen: Json, present: bool) -> None:
    """Refuse what would leave the cluster without a scheduler, or degrade it.

    :raises BadInput: one sentence; nothing was changed.
    """
    version = str(seen["version"])
    if present and not openshift.takes_policy(version):
        raise BadInput(
            f"scheduler_mode: OpenShift {version} doesn't take a Policy for its scheduler any more, and one that "
            "Scheduler/cluster names degrades the cluster; from 4.10 on a secondary scheduler takes its place"
        )
    if not seen["there"]:
        raise BadInput(
            "scheduler_mode: this cluster has no Scheduler/cluster, where OpenShift's scheduler is told things"
        )


def require_quiet(seen: Json, leaving: bool) -> None:
    """A change is begun only where its outcome can be told from what was before.

    :param leaving: ours is to go; it may be why kube-scheduler is degraded, or still being rolled out.
    :raises BadInput: one sentence; nothing was changed.
    """
    now = rollout(seen)
    if seen["upgrading"] and not (leaving and now.degraded):
        raise BadInput(f"scheduler_mode: the cluster is being upgraded ({seen['upgrading']}); finish that first")
    if leaving:
        return
    named = seen["maps"].get(seen["name"]) or {}
    way_out = "; the policy that it is told to read is ours: state absent takes it out" if named.get("ours") else ""
    if now.degraded:
        raise BadInput(f"scheduler_mode: OpenShift's kube-scheduler is degraded already: {now.degraded}{way_out}")
    if not now.settled:
        raise BadInput(f"scheduler_mode: OpenShift's kube-scheduler is still being rolled out: {now}{way_out}")


def make_plan(wish: Wish, seen: Json) -> Plan:
    """What has to be done; pure.

    :raises BadInput: the cluster can't be served.
    """
    require_serving(seen, bool(wish.policy))
    plan = _present(wish, seen) if wish.policy else _absent(seen)
    beginning = any(one.step == "switch" for one in plan.changes)
    if beginning and openshift.takes_policy(str(seen["version"])):
        require_quiet(seen, leaving=not wish.policy)
    return plan


def _present(wish: Wish, seen: Json) -> Plan:
    name, maps = str(seen["name"]), seen["maps"]
    named = maps.get(name)
    if named is not None and not named["ours"] and named["text"] == wish.policy:
        # The user's own Policy has the extender in it.
        return Plan(_swept(seen, keep={name}))
    place = wish.place(seen)
    mine = maps.get(place) or {}
    if mine and not mine["ours"]:
        raise BadInput(f"config_map: ConfigMap {NAMESPACE}/{place} is there and isn't ours; choose another name")
    changes = []
    if mine.get("text") != wish.policy:
        changes.append(Change(str(ref(place)), mine.get("text") or "", wish.policy, "write"))
    if name != place:
        changes.append(_switch(name, place))
    elif mine["leaving"] or not mine["proven"]:
        changes.append(_proof(seen, _since_of(seen, mine, wish.policy)))
    return Plan((*changes, *_swept(seen, keep={place})))


def _absent(seen: Json) -> Plan:
    name = str(seen["name"])
    named = seen["maps"].get(name)
    users, text = after_ours(seen)
    changes = []
    if named is not None and named["ours"]:
        changes.append(_switch(name, users))
    elif _leaving(seen):
        changes.append(_proof(seen, _since_leaving(seen, text)))
    return Plan((*changes, *_swept(seen, keep=set())))


def after_ours(seen: Json) -> tuple[str, str | None]:
    """Name and text of the Policy that is named when ours is out: the user's, where this release reads any."""
    return users_policy(seen) if openshift.takes_policy(str(seen["version"])) else ("", None)


def _given_up(seen: Json) -> str:
    """Name of the user's Policy that isn't named again with ours out; empty where there is none such."""
    named = seen["maps"].get(seen["name"]) or {}
    there = bool(named.get("ours")) and named["users"] in seen["maps"]
    return str(named["users"]) if there and after_ours(seen)[0] != named["users"] else ""


def _leaving(seen: Json) -> list[Json]:
    return [one for one in seen["maps"].values() if one["ours"] and one["leaving"]]


def _since(seen: Json, text: str | None) -> int:
    """After which revision the one with this text comes: none does where the operator's copy is that text already."""
    latest = int(seen["rollout"]["latest"])
    same = takes_copy(openshift.release(str(seen["version"]))) and seen["copy"] == text
    return latest - 1 if same else latest


def _since_of(seen: Json, mine: Json, text: str) -> int:
    # What was noted when it was named says nothing any more once it was being taken out.
    return _since(seen, text) if mine["leaving"] else int(mine["since"])


def _since_leaving(seen: Json, text: str | None) -> int:
    return min([_since(seen, text), *(int(one["leaving"]) for one in _leaving(seen))])


def takes_copy(release: tuple[int, int]) -> bool:
    return FIRST_WITH_COPY <= release <= openshift.LAST_WITH_POLICY


def _switch(before: str, after: str) -> Change:
    def text(name: str) -> str:
        return f"spec:\n  policy:\n    name: {json.dumps(name)}\n"

    return Change(str(SCHEDULER), text(before), text(after), "switch")


def _proof(seen: Json, since: int) -> Change:
    before, after = f"{rollout(seen)}\n", f"a revision after {since} on every node\n"
    return Change("revision of kube-scheduler", before, after, "prove")


def _swept(seen: Json, keep: set[str]) -> tuple[Change, ...]:
    return tuple(
        Change(str(ref(name)), one["text"] or "", "", "sweep")
        for name, one in sorted(seen["maps"].items())
        if one["ours"] and name not in keep
    )


# --------------------------------------------------------------------------- doing


class OpenShiftScheduler:
    """Carries a plan out, and takes it back where kube-scheduler doesn't come up with it."""

    def __init__(self, api: Api, wish: Wish, waiting: Waiting) -> None:
        self._api = api
        self._wish = wish
        self._waiting = waiting

    def apply(self, seen: Json, plan: Plan) -> None:
        """:raises ShareError: it isn't in effect; what was before is, or the message says what isn't."""
        steps = [str(one.step) for one in plan.changes]
        release = openshift.release(str(seen["version"]))
        if self._wish.policy:
            self._to_ours(seen, steps, release)
        else:
            self._to_users(seen, steps, release)
        self._sweep([str(one.header).rpartition("/")[2] for one in plan.changes if one.step == "sweep"])

    def _to_ours(self, seen: Json, steps: list[str], release: tuple[int, int]) -> None:
        wish, maps = self._wish, seen["maps"]
        place = wish.place(seen)
        if "switch" in steps:
            before, since = str(seen["name"]), _since(seen, wish.policy)
            users, _text = users_policy(seen)
            notes = {USERS: users, REPLACED: before, SINCE: str(since), PROVEN: "false", LEAVING: ""}
            metadata = {"name": place, "namespace": NAMESPACE, "labels": PART_OF, "annotations": notes}
            self._api.apply(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: wish.policy}},
                FIELD_MANAGER,
            )
            self._name(place, str(seen["resource_version"]))
        elif "prove" in steps:
            mine = maps[place]
            # The one that it replaced is swept when it was proven; the user's stays.
            before = next((one for one in (mine["replaced"], mine["users"]) if one in maps), "")
            since = _since_of(seen, mine, wish.policy)
        else:
            return
        why = self._wait(since, wish.policy, release)
        if why:
            self._back(before, (maps.get(before) or {}).get("text"), release, why, swept=[place])
        self._note(place, {PROVEN: "true", LEAVING: ""})

    def _to_users(self, seen: Json, steps: list[str], release: tuple[int, int]) -> None:
        before = str(seen["name"])
        mine = seen["maps"].get(before) or {}
        users, text = after_ours(seen)
        degraded = bool(rollout(seen).degraded)
        if "switch" in steps:
            since = _since(seen, text)
            if mine["there"]:
                self._note(before, {LEAVING: str(since)})
            self._name(users, str(seen["resource_version"]))
        elif "prove" in steps:
            since = _since_leaving(seen, text)
        else:
            return
        why = self._wait(since, text, release, degraded)
        if not why:
            return
        sound = bool(mine.get("proven")) and not degraded and openshift.takes_policy(str(seen["version"]))
        if "switch" not in steps or not sound:
            named = f"policy {users}" if users else "no policy"
            raise NotInEffect(f"Scheduler/cluster names {named} in place of ours, and that isn't in effect yet: {why}")
        self._back(before, mine["text"], release, why, swept=[])

    def _back(self, before: str, old: str | None, release: tuple[int, int], why: str, swept: list[str]) -> t.NoReturn:
        """Let the policy be named that was before.

        :param swept: which ConfigMaps go when that is in effect.
        """
        named = f"policy {before}" if before else "no policy"
        self._name(before, "")
        left = self._wait_back(old, release)
        outcome = f"it has {named} again and isn't healthy with that yet: {left}"
        if not left:
            outcome = f"it has {named} again and is healthy"
            if not self._wish.policy:
                self._note(before, {LEAVING: ""})
            self._sweep(swept)
        raise NotInEffect(f"kube-scheduler didn't come up with the change: {why}; {outcome}")

    def _name(self, name: str, resource_version: str) -> None:
        """Let Scheduler/cluster name a policy; refused by the API server where somebody changed it meanwhile."""
        body: Json = {"spec": {"policy": {"name": name}}}
        if resource_version:
            body["metadata"] = {"resourceVersion": resource_version}
        self._api.patch(SCHEDULER, body)

    def _note(self, name: str, notes: Json) -> None:
        self._api.patch(ref(name), {"metadata": {"annotations": notes}})

    def _sweep(self, names: t.Iterable[str]) -> None:
        named = str((((self._api.get(SCHEDULER) or {}).get("spec") or {}).get("policy") or {}).get("name") or "")
        for name in names:
            if name != named:
                self._api.delete(ref(name))

    # ----------------------------------------------------------------- waiting

    def _wait(self, since: int, text: str | None, release: tuple[int, int], degraded: bool = False) -> str:
        """Until every node runs a revision after ``since`` with this Policy; why it didn't come to that, or nothing.

        :param degraded: it was before; what the operator says of that stays until the new revision is there.
        """
        # A scheduler that is degraded by a Policy that it can't read may have nothing to roll out after it.
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

    def _wait_back(self, text: str | None, release: tuple[int, int]) -> str:
        """Until the old Policy is in effect; it is degraded when that begins."""
        return self._until(lambda now: self._differs(now, text, release), lambda now: "")

    def _differs(self, now: Rollout, text: str | None, release: tuple[int, int]) -> str:
        if not now.settled:
            return str(now)
        if not takes_copy(release):
            return ""
        if _text(self._api.get(COPY) or {}) != text:
            return f"the operator's copy of the policy ({COPY}) isn't the one that was asked for"
        namespace, selector = PODS
        for pod in self._api.list_all("v1", "Pod", namespace, label_selector=selector):
            if (text is not None) != reads_policy(pod):
                word = "without" if text is not None else "with"
                return f"pod {pod['metadata']['name']} runs {word} --policy-configmap"
        return ""

    def _until(self, left: t.Callable[[Rollout], str], failed: t.Callable[[Rollout], str]) -> str:
        # A revision that is on its way isn't seen in the operator's conditions for a moment.
        def look() -> tuple[str, bool]:
            now = openshift.look_at_rollout(self._api)
            why = failed(now)
            return (why, True) if why else (left(now), False)

        return self._waiting.until_quiet(look)


def reads_policy(pod: Json) -> bool:
    """Whether a kube-scheduler was started with the operator's copy of the Policy."""
    containers = (pod.get("spec") or {}).get("containers") or []
    words = [str(word) for one in containers for word in [*(one.get("command") or []), *(one.get("args") or [])]]
    return any("--policy-configmap=" in word for word in words)


# --------------------------------------------------------------------------- the module


def work(api: Api, params: Json, check: bool, waiting: Waiting | None = None) -> Json:
    """The module's whole work: without a plan, a look.

    :raises ShareError: with ``changed`` in its details where something was.
    """
    handed = params.get("plan")
    if handed is None:
        # The action plugin asks before it makes the policy.
        return {"changed": False, "observed": observe(api, str(params["config_map"]))}
    wish = Wish(str(handed["policy"]), str(params["config_map"]))
    seen = observe(api, wish.prefix)
    _users, text = users_policy(seen)
    if wish.policy and text != handed["base"]:
        raise BadInput("scheduler_mode: the policy that Scheduler/cluster names was changed meanwhile; run again")
    plan = make_plan(wish, seen)
    result: Json = {"changed": not plan.empty, "diff": plan.diff(), "library": api.library}
    given_up = "" if wish.policy else _given_up(seen)
    if given_up:
        result["warnings"] = [
            f"OpenShift {seen['version']} takes no Policy, so {given_up}, which Scheduler/cluster named before ours, "
            f"isn't named again; ConfigMap {NAMESPACE}/{given_up} stays"
        ]
    if not plan.empty and not check:
        try:
            OpenShiftScheduler(api, wish, waiting or Waiting(params["timeout"], PAUSE)).apply(seen, plan)
        except ShareError as error:
            error.details.update(result)
            raise
        left = make_plan(wish, observe(api, wish.prefix))
        if not left.empty:
            raise NotInEffect(f"changed, but still not as asked for: {left.headers()}", **result)
    return result
