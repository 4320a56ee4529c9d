# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Policy, which every kube-scheduler up to 1.22 reads and those before 1.19 need, and an extender's place in it. Pure.

Written without predicates and priorities: kube-scheduler then has its defaults.
"""

from __future__ import annotations

import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils import _extender_list
from ansible_collections.kubegpu.share.plugins.plugin_utils._extender_list import (
    has_exactly,
    opened,
    put_in,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_config import NO_POLICY_SINCE, Extender
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_decode import Decoded, Source
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_fields import POLICY
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_rules import validate_extenders

Json = dict[str, t.Any]

KIND = "Policy"
API_VERSION = "v1"
NANOSECONDS = 10**9
# kube-scheduler's sum of a node's scores, each up to 100, has to fit into an int64.
HIGHEST_WEIGHT = ((1 << 63) - 1) // 100
RATIO = "requestedToCapacityRatioArguments"
# In the order in which kube-scheduler looks for them.
ARGUMENTS = ("labelPreference", "serviceAntiAffinity", RATIO)
# Before, kube-scheduler passed over all that it didn't know.
STRICT_SINCE = 17


def entry(extender: Extender) -> Json:
    """The extender as a Policy writes it."""
    names = {"enableHTTPS": "enableHttps"}
    found = {names.get(key, key): value for key, value in extender.entry().items()}
    return {**found, "httpTimeout": extender.timeout_seconds * NANOSECONDS}


def new_policy(extender: Extender) -> str:
    """A whole Policy for a kube-scheduler that had none."""
    text = json.dumps({"kind": KIND, "apiVersion": API_VERSION, "extenders": [entry(extender)]}, indent=2) + "\n"
    check("the new Policy", text)
    return text


def merged(path: str, text: str, extender: Extender, minor: int | None = None) -> str:
    """The user's Policy with our extender in it; all else stays as it is, byte for byte.

    :param minor: of kube-scheduler 1.``minor``, where it is known.
    :raises BadInput: it can't be: another extender binds, the file isn't one that kube-scheduler reads.
    """
    _decoded(path, text, minor)
    extenders = opened(path, text)
    put_in(path, extenders, entry(extender), fold=True)
    check(path, text, minor)
    after = extenders.checked()
    check(path, after, minor)
    return after


def without(path: str, text: str) -> str:
    """The user's Policy with our extender taken out."""
    return _extender_list.without(path, text, fold=True)


def undone(path: str, text: str, before: str, extender: Extender) -> str:
    """The user's Policy without our extender, and with the one that ours took the place of.

    :param before: what the file held before ours came; changed since then.
    """
    return _extender_list.undone(path, text, before, extender.url, fold=True)


def has(path: str, text: str, extender: Extender) -> bool:
    """Whether an extender there can only be ours."""
    return has_exactly(path, text, entry(extender), fold=True)


def check(path: str, text: str, minor: int | None = None) -> None:
    """Refuse what kube-scheduler would refuse, which passes over an extender's fields that it doesn't know.

    :raises BadInput: one sentence with the line and the path of the field.
    """
    policy = _decoded(path, text, minor)
    weight = policy.tree.get("hardPodAffinitySymmetricWeight") or 0
    if not 0 <= weight <= 100:
        raise policy.fault("hardPodAffinitySymmetricWeight", "isn't between 0 and 100")
    _priorities(policy)
    validate_extenders(policy)


def _decoded(path: str, text: str, minor: int | None) -> Decoded:
    source = Source(path, text)
    if source.top("kind") != KIND:
        raise BadInput(f"{path} isn't a {KIND}")
    if source.top("apiVersion") != API_VERSION:
        raise BadInput(f"{path}: kube-scheduler reads a {KIND} of {API_VERSION}, not {source.top('apiVersion')}")
    minor = NO_POLICY_SINCE - 1 if minor is None else minor
    return source.decode(POLICY, minor, strict=minor >= STRICT_SINCE)


def _priorities(policy: Decoded) -> None:
    seen: dict[str, int] = {}
    for number, one in enumerate(policy.tree.get("priorities") or []):
        here = f"priorities[{number}]"
        priority: Json = one or {}
        if not 0 < (priority.get("weight") or 0) < HIGHEST_WEIGHT:
            raise policy.fault(f"{here}.weight", "isn't greater than 0, or is too great")
        argument = priority.get("argument")
        if argument is None:
            continue
        kind = next((key for key in ARGUMENTS if argument.get(key) is not None), "")
        if not kind:
            raise policy.fault(f"{here}.argument", f"has none of {', '.join(ARGUMENTS)}")
        if kind in seen and (kind == RATIO or seen[kind] != priority["weight"]):
            raise policy.fault(here, f"has a {kind}, and so has an earlier priority with which it can't be combined")
        seen[kind] = priority["weight"]
