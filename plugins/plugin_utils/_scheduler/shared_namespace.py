# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A namespace that others may own: ours is deleted, and one of others gets its labels back. Pure."""

from __future__ import annotations

import json
import typing as t

from ...module_utils._core.types import JsonObject
from ...module_utils._kube.namespace import CREATED
from ...module_utils._kube.objects import DIGEST

# On another owner's namespace: the former values of our labels, null for those that weren't set.
BEFORE = "kubegpu.share/labels-before"


class Terms(t.TypedDict):
    """The result of the filter; ``undo`` is a merge patch, empty where there is nothing to restore."""

    ours: bool
    definition: JsonObject
    undo: JsonObject


def terms(metadata: JsonObject, definition: JsonObject) -> Terms:
    """Return whether the namespace is ours, the definition to apply, and the patch that reverts it.

    :param metadata: of the live namespace; empty where it doesn't exist.
    :param definition: the namespace with the labels that we need.
    """
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    wanted = definition["metadata"]["labels"]
    if not metadata or CREATED in annotations:
        return {"ours": True, "definition": _noted(definition, CREATED, "true"), "undo": {}}
    recorded = json.loads(annotations[BEFORE]) if BEFORE in annotations else {}
    before = {**{label: labels.get(label) for label in wanted}, **recorded}
    undo: JsonObject = {}
    if BEFORE in annotations:
        # Labels that were changed since then aren't ours.
        unchanged = {label: value for label, value in before.items() if labels.get(label) == wanted.get(label)}
        restored = {"labels": unchanged, "annotations": {BEFORE: None, DIGEST: None}}
        undo = {**definition, "metadata": {"name": definition["metadata"]["name"], **restored}}
    return {"ours": False, "definition": _noted(definition, BEFORE, json.dumps(before, sort_keys=True)), "undo": undo}


def _noted(definition: JsonObject, annotation: str, text: str) -> JsonObject:
    return {**definition, "metadata": {**definition["metadata"], "annotations": {annotation: text}}}
