# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A namespace that may be somebody else's: made by us it goes again, otherwise it gets its own labels back. Pure."""

from __future__ import annotations

import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._namespace_use import CREATED
from ansible_collections.kubegpu.share.plugins.module_utils._objects import DIGEST

Json = dict[str, t.Any]

# On somebody else's namespace: the values that our labels had there before us, null for those that weren't there.
BEFORE = "kubegpu.share/labels-before"


def terms(metadata: Json, definition: Json) -> Json:
    """Whether it is ours, how it should be, and what gives it back.

    :param metadata: that of the live namespace; empty where there is none.
    :param definition: the namespace with the labels that we need on it.
    """
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    wanted = definition["metadata"]["labels"]
    if not metadata or CREATED in annotations:
        return {"ours": True, "wish": _noted(definition, CREATED, "true"), "undo": {}}
    remembered = json.loads(annotations[BEFORE]) if BEFORE in annotations else {}
    before = {**{label: labels.get(label) for label in wanted}, **remembered}
    undo: Json = {}
    if BEFORE in annotations:
        # What somebody has set anew since then is theirs.
        back = {label: value for label, value in before.items() if labels.get(label) == wanted.get(label)}
        told = {"labels": back, "annotations": {BEFORE: None, DIGEST: None}}
        undo = {**definition, "metadata": {"name": definition["metadata"]["name"], **told}}
    return {"ours": False, "wish": _noted(definition, BEFORE, json.dumps(before, sort_keys=True)), "undo": undo}


def _noted(definition: Json, annotation: str, text: str) -> Json:
    return {**definition, "metadata": {**definition["metadata"], "annotations": {annotation: text}}}
