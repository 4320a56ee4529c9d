# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who owns the set-up of a cluster, playbooks or a resource of the operator, and whether its checks have passed.

One ConfigMap records both. It is written by compare-and-swap before the first change of a run, and deleted by
uninstall. Field managers don't tell who owns a set-up: all objects have the same one, so that whoever takes over
removes fields that the other has set.
"""

from __future__ import annotations

import re
import typing as t

from .._core.errors import BadInput
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.untrusted import line
from .api import Kube
from .errors import KubeError
from .objects import diff_texts
from .options import auth_arguments
from .refs import Ref

RECORD = Ref("v1", "ConfigMap", "kube-system", "kubegpu-share")
OWNER, UNVERIFIED = "owner", "unverified"
# An owner: playbooks, by any inventory, or a resource by its kind and name.
PLAYBOOK, RESOURCE = "playbook", "GPUShare"
RESOURCES_API = "kubegpu.share/v1alpha1"
_OWNER = re.compile(rf"{PLAYBOOK}|[A-Z][A-Za-z0-9]{{0,62}}/[a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?")
# The most characters of a recorded owner that are kept.
LONGEST = 320

# Whether a set-up is this run's: so it is, it is taken over on purpose, or it is another owner's.
OWN, TAKEN, FOREIGN = "own", "taken", "foreign"

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["read", "present", "verified", "absent"], "default": "read"},
    "owner": {"type": "str", "default": PLAYBOOK},
    "take_over": {"type": "str", "default": ""},
    "unverified": {"type": "bool", "default": False},
    "known": {"type": "dict"},
}


class Record(t.TypedDict):
    """What a cluster has recorded of its set-up.

    :ivar owner: as it was recorded; empty where nobody is.
    :ivar version: of the record's object; empty where there is none.
    :ivar unverified: a run has begun to change something, and its checks haven't passed since.
    :ivar exists: of an owner that is another run's resource, whether it is there; None where that isn't known.
    """

    owner: str
    version: str
    unverified: bool
    exists: bool | None


def require_owner(owner: str, variable: str = "gpu_owner") -> str:
    """Return an owner's name.

    :raises BadInput: it is none.
    """
    if not _OWNER.fullmatch(owner):
        raise BadInput(f"{variable}: {line(owner)!r} is neither {PLAYBOOK} nor a resource, as {RESOURCE}/NAME")
    return owner


def read(kube: Kube, owner: str) -> Record:
    """Return the record of a cluster; an empty one for who may not read it, and so may not begin a change.

    :param owner: this run's.
    :raises BadInput: it is no owner.
    """
    require_owner(owner)
    try:
        live = kube.get(RECORD)
    except KubeError as error:
        if error.status != 403:
            raise
        live = None
    # Deleted, it stays until the garbage collector has seen it.
    if live is None or live["metadata"].get("deletionTimestamp"):
        return Record(owner="", version="", unverified=False, exists=None)
    data = live.get("data") or {}
    recorded = str(line(data.get(OWNER) or "", LONGEST))
    there = _is_there(kube, recorded) if recorded != owner else None
    version = str(live["metadata"].get("resourceVersion") or "")
    return Record(owner=recorded, version=version, unverified=UNVERIFIED in data, exists=there)


def _is_there(kube: Kube, owner: str) -> bool | None:
    kind, _slash, name = owner.partition("/")
    if kind != RESOURCE or not _OWNER.fullmatch(owner):
        return None
    try:
        return kube.get(Ref(RESOURCES_API, kind, "", name)) is not None
    except KubeError as error:
        if error.status != 403:
            raise
        return None


def owner_of(record: Record, set_up: bool) -> str:
    """Return who owns a set-up; empty where nothing is set up.

    :param set_up: whether the cluster has a set-up. One without a record is older than the records, so a playbook's.
    """
    return record["owner"] or (PLAYBOOK if set_up else "")


def whose(record: Record, owner: str, take_over: str, set_up: bool) -> str:
    """Return ``OWN``, ``TAKEN`` or ``FOREIGN``.

    :param owner: this run's.
    :param take_over: whose set-up is taken over on purpose; empty for nobody's.
    :param set_up: as for ``owner_of``.
    """
    present = owner_of(record, set_up)
    if present in ("", owner):
        return OWN
    return TAKEN if take_over == present else FOREIGN


# --------------------------------------------------------------------------- writing


class SetupRecord:
    """Writes the record, or removes it; a ``Reconciler``.

    :param state: ``present``, ``verified`` or ``absent``.
    :param unverified: with ``present``, also record that the checks have to pass.
    :param known: what the run has decided by; None if it hasn't read the record.
    """

    def __init__(
        self, kube: Kube, state: str, owner: str, take_over: str, unverified: bool, known: Record | None
    ) -> None:
        self._kube = kube
        self._state = state
        self._owner = owner
        self._take_over = take_over
        self._unverified = unverified
        self._known = known

    def observe(self) -> Record:
        live = read(self._kube, self._owner)
        known, self._known = self._known, None
        if known is not None and live["version"] != known["version"]:
            raise _changed(live)
        return live

    def plan(self, state: Record) -> Plan:
        """Plan the change of the record.

        :raises BadInput: the set-up is another owner's.
        """
        if whose(state, self._owner, self._take_over, set_up=True) == FOREIGN and state["version"]:
            raise BadInput(
                f"{owner_of(state, True)} owns what is set up in this cluster, and this run is for {self._owner}. "
                f"Nothing was changed. To take it over on purpose set gpu_owner_take_over: {owner_of(state, True)}"
            )
        before = _data(state["owner"], state["unverified"]) if state["version"] else None
        after = before
        if self._state == "present":
            after = _data(self._owner, state["unverified"] or self._unverified)
        elif self._state == "verified" and before:
            after = _data(state["owner"], False)
        elif self._state == "absent":
            after = None
        if before == after:
            return Plan()
        return Plan((Change(str(RECORD), *diff_texts(_object(before), _object(after)), after),))

    def apply(self, state: Record, plan: Plan) -> None:
        """Write the record as it was planned.

        :raises BadInput: somebody else has written it since it was read.
        """
        [change] = plan.changes
        data: JsonObject | None = change.step
        try:
            if data is None:
                self._kube.delete(RECORD, state["version"])
                return
            if state["version"]:
                body = {name: data.get(name) for name in (OWNER, UNVERIFIED)}
                self._kube.patch(RECORD, {"metadata": {"resourceVersion": state["version"]}, "data": body})
            else:
                self._kube.create(t.cast(JsonObject, _object(data)))
        except KubeError as error:
            if error.status != 409:
                raise
            live = read(self._kube, self._owner)
            raise (_changed(live) if data is not None else _kept(live)) from error


def _data(owner: str, unverified: bool) -> dict[str, str]:
    return {**({OWNER: owner} if owner else {}), **({UNVERIFIED: "true"} if unverified else {})}


def _object(data: t.Mapping[str, str] | None) -> JsonObject | None:
    if data is None:
        return None
    labels = {"app.kubernetes.io/name": RECORD.name, "app.kubernetes.io/part-of": "gpushare"}
    metadata = {"name": RECORD.name, "namespace": RECORD.namespace, "labels": labels}
    return {"apiVersion": RECORD.api_version, "kind": RECORD.kind, "metadata": metadata, "data": dict(data)}


def _changed(live: Record) -> BadInput:
    now = f"{live['owner']}'s" if live["owner"] else "nobody's"
    return BadInput(
        f"another run has begun to change this cluster since this one planned ({RECORD} was written, and the set-up "
        f"is {now} now). Nothing was changed; run again when the other one has ended"
    )


def _kept(live: Record) -> BadInput:
    now = f"{live['owner']}'s" if live["owner"] else "nobody's"
    return BadInput(
        f"{RECORD} was written while this run removed the set-up, which is {now} now. The record was kept: "
        "run again if it is still to be removed"
    )


def work(kube: Kube, params: JsonObject, check: bool) -> JsonObject:
    """Run the module ``setup_record``.

    :param params: the module's options.
    :param check: predict the change without making it.
    :returns: with ``read`` the record, ``own`` (whether this run may change or remove the set-up) and ``present`` (who
        owns it).
    :raises BadInput: the set-up is another owner's, or somebody else has written the record meanwhile.
    """
    owner, take_over = require_owner(str(params["owner"])), str(params["take_over"])
    if params["state"] == "read":
        record = read(kube, owner)
        own = whose(record, owner, take_over, set_up=True) != FOREIGN
        return {"changed": False, "record": record, "own": own, "present": owner_of(record, True)}
    known = t.cast("Record | None", params.get("known") or None)
    return run(SetupRecord(kube, str(params["state"]), owner, take_over, bool(params["unverified"]), known), check)
