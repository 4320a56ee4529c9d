# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a back end has in the cluster beside its definitions, also of helm: module ``backend_objects``.

Objects that exist are left as they are, and so are kinds that Kubernetes itself doesn't have. The texts are those that
helm has recorded, so that neither helm nor the chart is needed.
"""

from __future__ import annotations

import typing as t

from ansible.module_utils.common.yaml import yaml_load_all

from .._contracts import hami
from .._contracts.backends import GPUSHARE, HAMI, NVIDIA
from .._core.errors import BadInput
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._hami import cluster
from .._kube import helm, objects
from .._kube.api import Kube
from .._kube.options import auth_arguments
from .._kube.refs import KINDS, Ref, ref_of
from . import node_status

# As in helm's own requests, so that helm goes on with the objects.
MANAGER = "helm"
HOOK = "helm.sh/hook"


def recorded_objects(secrets: t.Iterable[JsonObject], name: str, namespace: str) -> list[JsonObject]:
    """Return the objects of a deployed release with helm's marks, in the order of their creation.

    :param secrets: those of the release.
    :param namespace: the release's; objects that name none are in it.
    """
    release = helm.release(secrets)
    # helm itself completes an unfinished revision.
    if release is None or release["status"] != helm.DEPLOYED:
        return []
    return objects.parse(
        [
            _marked(document, name, namespace)
            for document in yaml_load_all(release["manifest"])
            if isinstance(document, dict) and (document.get("apiVersion"), document.get("kind")) in KINDS
        ]
    )


def chart_objects(rendered: str, name: str, namespace: str) -> dict[Ref, JsonObject]:
    """Return the objects of a rendered chart with helm's marks, without hooks, which belong to no release.

    :param rendered: as ``helm template`` prints it.
    """
    manifests = [
        _marked(document, name, namespace)
        for document in yaml_load_all(rendered)
        if isinstance(document, dict) and (document.get("apiVersion"), document.get("kind")) in KINDS
    ]
    own = [marked for marked in manifests if HOOK not in marked["metadata"]["annotations"]]
    return {ref_of(parsed): parsed for parsed in objects.parse(own)}


def _marked(manifest: JsonObject, name: str, namespace: str) -> JsonObject:
    metadata = manifest["metadata"]
    return {
        **manifest,
        "metadata": {
            **metadata,
            "namespace": metadata.get("namespace") or namespace,
            "labels": {**(metadata.get("labels") or {}), "app.kubernetes.io/managed-by": "Helm"},
            "annotations": {
                **(metadata.get("annotations") or {}),
                "meta.helm.sh/release-name": name,
                "meta.helm.sh/release-namespace": namespace,
            },
        },
    }


class ReleaseReconciler:
    """The objects of a release that are missing; what is created is the chart's, and not what helm has recorded.

    :param rendered: the chart; empty to find only what is missing.
    """

    def __init__(self, kube: Kube, name: str, namespace: str, rendered: str = "") -> None:
        self._kube = kube
        self._rendered = rendered
        self._name = name
        self._namespace = namespace

    def observe(self) -> list[JsonObject]:
        secrets = self._kube.list_all("v1", "Secret", self._namespace, label_selector=helm.selector(self._name))
        recorded = recorded_objects(secrets, self._name, self._namespace)
        missing = [manifest for manifest in recorded if self._kube.get(ref_of(manifest)) is None]
        if not self._rendered:
            return missing
        chart = chart_objects(self._rendered, self._name, self._namespace)
        return [chart[ref_of(manifest)] for manifest in missing if ref_of(manifest) in chart]

    def plan(self, missing: list[JsonObject]) -> Plan:
        return Plan(
            tuple(Change(str(ref_of(manifest)), *objects.diff_texts(None, manifest), manifest) for manifest in missing)
        )

    def apply(self, missing: list[JsonObject], plan: Plan) -> None:
        if not self._rendered:
            # Whoever may write Secrets in the namespace has written it.
            raise BadInput("rendered: without the chart nothing is created; what helm has recorded isn't enough")
        for change in plan.changes:
            self._kube.apply(change.step, MANAGER)


def ensure_release(kube: Kube, params: JsonObject, check: bool) -> JsonObject:
    """Create the objects of a release that somebody deleted, as the rendered chart has them.

    :param params: the module's options.
    :param check: predict the changes without applying them.
    """
    result = run(ReleaseReconciler(kube, params["release"], params["namespace"], params["rendered"]), check)
    return {**result, "requests": dict(kube.requests)}


# The release's objects exist; its servers answer; its server has left the nodes, with all that it wrote; nothing of it
# is in the cluster.
COMPLETE, READY, OFF_NODES, ABSENT = "complete", "ready", "off_nodes", "absent"
STATES = (COMPLETE, READY, OFF_NODES, ABSENT)
ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "backend": {"type": "str", "choices": [GPUSHARE, HAMI, NVIDIA], "required": True},
    "state": {"type": "str", "choices": list(STATES), "required": True},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "resources": {"type": "list", "elements": "str", "default": []},
    "release": {"type": "str", "default": "hami"},
    "rendered": {"type": "str", "default": ""},
    "namespace": {"type": "str", "default": "hami-system"},
    "scheduler_name": {"type": "str", "default": hami.SCHEDULER},
    "overwrites": {"type": "bool", "default": True},
    "proof_namespace": {"type": "str", "default": ""},
    "wait_timeout": {"type": "int", "default": 300},
    "kubelet_timeout": {"type": "int", "default": 420},
}
Work = t.Callable[[t.Any, JsonObject, bool], JsonObject]
TABLE: t.Mapping[tuple[str, str], Work] = {
    (GPUSHARE, OFF_NODES): node_status.remove_stale,
    (HAMI, COMPLETE): ensure_release,
    (HAMI, READY): cluster.ensure_ready,
    (HAMI, OFF_NODES): cluster.ensure_removed,
    (HAMI, ABSENT): cluster.ensure_removed,
    (NVIDIA, COMPLETE): ensure_release,
    (NVIDIA, OFF_NODES): node_status.remove,
}


def ensure(kube: Kube, params: JsonObject, check: bool) -> JsonObject:
    """Run the module.

    :param params: as ``ARGUMENTS``.
    :param check: predict the changes without applying them or waiting.
    :raises BadInput: the back end has no such state, or pods hold cards.
    :raises NotInEffect: a server still runs, or isn't ready.
    """
    backend, state = params["backend"], params["state"]
    if (backend, state) not in TABLE:
        known = [known_state for known_state in STATES if (backend, known_state) in TABLE]
        raise BadInput(f"state: {state} isn't one of {backend}'s, which are {', '.join(known)}")
    scope = "cluster" if state == ABSENT else "nodes"
    return TABLE[backend, state](kube, {**params, "scope": scope, "plugin_timeout": params["wait_timeout"]}, check)
