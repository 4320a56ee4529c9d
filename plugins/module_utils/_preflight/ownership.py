# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight of who owns what is set up in the cluster: playbooks, or a resource of the operator. Pure."""

from __future__ import annotations

import typing as t

from .._allocation.foreign_bindings import Bindings
from .._core.types import JsonObject
from .._kube.setup_record import FOREIGN, PLAYBOOK, TAKEN, Record, owner_of, whose
from .findings import NOTE, PROBLEM, WARNING, Finding

# Can't be ignored: two owners would undo each other's changes.
INPUT = {"other-owner": "The operator, or the playbooks, own what is set up in the cluster, and this run isn't theirs."}
DESCRIBED = {
    "owner-taken": "This run takes over what somebody else has set up, as gpu_owner_take_over says.",
    "foreign-bindings": "Somebody has rights in a namespace of the servers that make him root on their nodes.",
    "foreign-bindings-unknown": "Who else has rights in a namespace of the servers isn't known.",
    "run-unfinished": "Another run has begun to change the cluster, and its checks haven't passed.",
}
# Bindings that a text names.
MOST_NAMED = 5
VARIABLE, TAKE_OVER = "gpu_owner", "gpu_owner_take_over"


def examine(record: Record, owner: str, take_over: str, set_up: bool) -> t.Iterator[Finding]:
    """Return the findings of a run.

    :param owner: whom the run is for.
    :param take_over: whose set-up is taken over on purpose; empty for nobody's.
    :param set_up: whether something is set up in the cluster.
    """
    verdict, present = whose(record, owner, take_over, set_up), owner_of(record, set_up)
    kind, _slash, name = present.partition("/")
    fields: JsonObject = {
        "owner": owner,
        "present": present,
        "kind": kind.lower(),
        "name": name,
        "take": TAKE_OVER,
        "recorded": bool(record["version"]),
        "exists": record["exists"],
    }
    if verdict == FOREIGN:
        what = "{present} owns what is set up in this cluster, and this run is for {owner}: each would undo the other's"
        take = "set {take}: {present} to take it over on purpose"
        if present == PLAYBOOK:
            do = f"leave it to the playbooks, or {take}"
        elif record["exists"] is False:
            what, do = f"{what}. There is no {{present}} any more", take
        else:
            do = f"change it there (kubectl edit {{kind}} {{name}}), or {take}: the operator then leaves it alone"
        yield Finding("other-owner", PROBLEM, what, do, variable=VARIABLE, fields=fields)
    elif verdict == TAKEN:
        what = "this run takes over for {owner} what {present} has set up in this cluster"
        yield Finding("owner-taken", NOTE, what, "unset it afterwards", variable=TAKE_OVER, fields=fields)
    if record["unverified"]:
        yield Finding(
            "run-unfinished",
            WARNING,
            "a run has begun to change this cluster and its checks haven't passed: it failed, was killed, or runs on",
            "wait for its end if it is still at work; otherwise go on, for this run does what that one has left",
            fields=fields,
        )


def bindings(read: Bindings) -> t.Iterator[Finding]:
    """Return the findings about RoleBindings of others in the servers' namespaces, one for each namespace.

    :param read: as ``foreign_bindings`` returns them.
    """
    found = read["found"]
    if read["refused"]:
        yield Finding(
            "foreign-bindings-unknown",
            WARNING,
            "whether somebody else has what the servers have, root on their nodes, isn't known: the API server refuses "
            "this user to list RoleBindings in {namespaces} (HTTP {status})",
            "give the user of gpu_kubeconfig the verbs get and list on rolebindings, roles and clusterroles, or look "
            "as somebody who may, by kubectl -n NAMESPACE get rolebindings",
            fields={"namespaces": list(read["refused"]), "status": 403},
        )
    for namespace in dict.fromkeys(binding["namespace"] for binding in found):
        there = [binding for binding in found if binding["namespace"] == namespace]
        named = [f"{binding['name']} ({', '.join(binding['subjects'][:MOST_NAMED])})" for binding in there[:MOST_NAMED]]
        fields: JsonObject = {
            "namespace": namespace,
            "bindings": named,
            "more": f" and {len(there) - MOST_NAMED} more" if len(there) > MOST_NAMED else "",
            "names": [binding["name"] for binding in there[:MOST_NAMED]],
            "rights": sorted({right for binding in there for right in binding["rights"]}),
        }
        yield Finding(
            "foreign-bindings",
            PROBLEM,
            "RoleBindings of others in the namespace {namespace} give what its servers have, root on their nodes, by "
            "{rights}: {bindings}{more}",
            "delete them (kubectl -n {namespace} get rolebindings), or where these are administrators of the cluster "
            "set preflight_ignore: [foreign-bindings]",
            fields=fields,
        )
