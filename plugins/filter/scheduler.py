# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A kube-scheduler of its own, the extender that it asks, and the certificates between them."""

from __future__ import annotations

import datetime
import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.certificates import Side
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import (
        ClusterNodes,
        SchedulerOptions,
        Terms,
    )


def dedicated_scheduler(cluster: ClusterNodes, options: SchedulerOptions) -> JsonObject:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import plan

    try:
        return {"problem": "", **plan(cluster, options)}
    except BadInput as error:
        return {"problem": str(error)}


def shared_namespace(metadata: JsonObject, definition: JsonObject) -> Terms:
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import terms

    return terms(metadata, definition)


def extender_certificates(secrets: list[JsonObject], names: list[str]) -> JsonObject:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.certificates import fitting

    try:
        return {"problem": "", **fitting(secrets, names, datetime.datetime.now(datetime.UTC))}
    except BadInput as error:
        return {"problem": str(error)}


def server_certificate(secrets: list[JsonObject], names: list[str]) -> Side:
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.certificates import of_server

    return of_server(secrets, names, datetime.datetime.now(datetime.UTC))


def extender_answer(text: str, url: str) -> JsonObject:
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import apply

    code, why = apply.problem(apply.parsed(text))
    error = apply.unanswered("The secondary scheduler", url, code, why) if code else ""
    return {
        "problem": str(error),
        "reason": code,
        "request": apply.REQUEST,
        "seconds": int(apply.PROOF_SECONDS),
    }


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "dedicated_scheduler": dedicated_scheduler,
            "extender_answer": extender_answer,
            "extender_certificates": extender_certificates,
            "server_certificate": server_certificate,
            "shared_namespace": shared_namespace,
        }
