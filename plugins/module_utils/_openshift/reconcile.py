# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Apply plans on OpenShift: the client's protocol, names by digest, and the check that a plan took effect."""

from __future__ import annotations

import hashlib
import typing as t

from .._core.errors import NotInEffect, ShareError
from .._core.plan import Plan
from .._core.types import JsonObject
from .._kube.refs import Ref

PAUSE = 5.0
PART_OF = {"app.kubernetes.io/part-of": "gpushare"}


class Api(t.Protocol):
    """The requests to the cluster."""

    library: str

    def get(self, ref: Ref) -> JsonObject | None: ...

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", label_selector: str = ""
    ) -> list[JsonObject]: ...

    def apply(self, definition: JsonObject, manager: str) -> JsonObject: ...

    def patch(self, ref: Ref, body: JsonObject) -> JsonObject: ...

    def delete(self, ref: Ref) -> None: ...


def name_by_digest(prefix: str, text: str) -> str:
    """Return the name of the ConfigMap for a text: each text has one of its own, so a rollback is the old name."""
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def label_selector(labels: t.Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def annotations_of(live: JsonObject | None) -> JsonObject:
    return ((live or {}).get("metadata") or {}).get("annotations") or {}


def apply_plan(
    plan: Plan, result: JsonObject, check: bool, apply: t.Callable[[], None], plan_again: t.Callable[[], Plan]
) -> JsonObject:
    """Apply a plan unless it is empty or in check mode, and verify that nothing is left of it.

    :param result: the module's result, completed with ``changed`` and ``diff`` and added to an error's details.
    :param check: whether the module runs in check mode.
    :param apply: makes the changes.
    :param plan_again: observes the cluster again and plans.
    :raises ShareError: the changes couldn't be made.
    :raises NotInEffect: they were made and have no effect.
    """
    result = {"changed": not plan.empty, "diff": plan.diff(), **result}
    if plan.empty or check:
        return result
    try:
        apply()
    except ShareError as error:
        error.details.update(result)
        raise
    missing = plan_again()
    if not missing.empty:
        raise NotInEffect(f"these changes were made but have no effect: {missing.headers()}", **result)
    return result
