# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Create the objects of a helm release that somebody deleted: helm compares its own records only.

Objects that exist are left as they are, and so are kinds that Kubernetes itself doesn't have. The texts are those that
helm has recorded, so that neither helm nor the chart is needed.
"""

from __future__ import annotations

import typing as t

from ansible.module_utils.common.yaml import yaml_load_all

from .._core.errors import BadInput
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._kube import helm, objects
from .._kube.api import Kube
from .._kube.refs import KINDS, Ref, ref_of

# As in helm's own requests, so that helm goes on with the objects.
MANAGER = "helm"
HOOK = "helm.sh/hook"


def recorded_objects(secrets: t.Iterable[JsonObject], name: str, namespace: str) -> list[JsonObject]:
    """Return the objects of a deployed release with helm's marks, in the order of their creation.

    :param secrets: those of the release.
    :param namespace: the release's; objects that name none are in it.
    """
    found = helm.release(secrets)
    # helm itself completes an unfinished revision.
    if found is None or found["status"] != helm.DEPLOYED:
        return []
    return objects.parse(
        [
            _marked(one, name, namespace)
            for one in yaml_load_all(found["manifest"])
            if isinstance(one, dict) and (one.get("apiVersion"), one.get("kind")) in KINDS
        ]
    )


def chart_objects(rendered: str, name: str, namespace: str) -> dict[Ref, JsonObject]:
    """Return the objects of a rendered chart with helm's marks, without hooks, which belong to no release.

    :param rendered: as ``helm template`` prints it.
    """
    found = [
        _marked(one, name, namespace)
        for one in yaml_load_all(rendered)
        if isinstance(one, dict) and (one.get("apiVersion"), one.get("kind")) in KINDS
    ]
    own = [one for one in found if HOOK not in one["metadata"]["annotations"]]
    return {ref_of(one): one for one in objects.parse(own)}


def _marked(one: JsonObject, name: str, namespace: str) -> JsonObject:
    metadata = one["metadata"]
    return {
        **one,
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
        missing = [one for one in recorded if self._kube.get(ref_of(one)) is None]
        if not self._rendered:
            return missing
        chart = chart_objects(self._rendered, self._name, self._namespace)
        return [chart[ref_of(one)] for one in missing if ref_of(one) in chart]

    def plan(self, missing: list[JsonObject]) -> Plan:
        return Plan(tuple(Change(str(ref_of(one)), *objects.diff_texts(None, one), one) for one in missing))

    def apply(self, missing: list[JsonObject], plan: Plan) -> None:
        if not self._rendered:
            # Whoever may write Secrets in the namespace has written it.
            raise BadInput("rendered: without the chart nothing is created; what helm has recorded isn't enough")
        for change in plan.changes:
            self._kube.apply(change.step, MANAGER)


def ensure(kube: Kube, params: JsonObject, check: bool) -> JsonObject:
    """Create what is missing; see module backend_objects.

    :param params: the module's options.
    :param check: predict the changes without applying them.
    """
    result = run(ReleaseReconciler(kube, params["release"], params["namespace"], params["rendered"]), check)
    return {**result, "requests": dict(kube.requests)}
