# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the plans for OpenShift share: the client's protocol, names by digest, labels and annotations."""

from __future__ import annotations

import hashlib
import typing as t

from .._core.types import JsonObject
from .._kube.refs import Ref

PAUSE = 5.0
PART_OF = {"app.kubernetes.io/part-of": "gpushare"}


class Api(t.Protocol):
    """The requests to the cluster."""

    library: str

    def get(self, ref: Ref) -> JsonObject | None: ...

    def list_all(self, api_version: str, kind: str, namespace: str = "", label_selector: str = "") -> list[JsonObject]:
        """Return the objects of a kind; none if the cluster doesn't serve it.

        :param api_version: of the objects, such as ``apps/v1``.
        :param kind: of the objects, such as ``Deployment``.
        :param namespace: empty for all namespaces.
        :param label_selector: empty for all objects.
        """

    def apply(self, definition: JsonObject, manager: str) -> JsonObject: ...

    def patch(self, ref: Ref, body: JsonObject) -> JsonObject: ...

    def delete(self, ref: Ref) -> None: ...


def name_by_digest(prefix: str, text: str) -> str:
    """Return the name of the ConfigMap for a text: each text has one of its own, so a rollback is the old name."""
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def label_selector(labels: t.Mapping[str, str]) -> str:
    """Return the query for objects with these labels."""
    return ",".join(f"{key}={value}" for key, value in labels.items())


def annotations_of(live: JsonObject | None) -> JsonObject:
    """Return an object's annotations; empty where it doesn't exist."""
    return ((live or {}).get("metadata") or {}).get("annotations") or {}
