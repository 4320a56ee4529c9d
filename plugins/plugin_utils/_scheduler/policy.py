# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Policy that kube-scheduler read up to 1.22, and the extender in it. Pure.

A new one has no predicates and priorities, so kube-scheduler uses its defaults.
https://github.com/kubernetes/kubernetes/blob/v1.22.17/staging/src/k8s.io/kube-scheduler/config/v1/types.go
"""

from __future__ import annotations

import json
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._scheduler.constants import POLICY as PATH
from .config import NO_POLICY_SINCE
from .decode import Decoded, Source
from .form import Extender, Form
from .schema import POLICY
from .validate import validate_extenders

KIND = "Policy"
API_VERSION = "v1"
# The sum of a node's scores, each up to 100, has to fit into an int64.
HIGHEST_WEIGHT = ((1 << 63) - 1) // 100
RATIO = "requestedToCapacityRatioArguments"
# In the order in which kube-scheduler checks them.
ARGUMENTS = ("labelPreference", "serviceAntiAffinity", RATIO)
# Before this version kube-scheduler ignored unknown fields.
STRICT_SINCE = 17


class Policy(Form):
    """A Policy; kube-scheduler ignores unknown fields of its extenders."""

    name, flag, path, kind = "policy", "policy-config-file", PATH, KIND

    def like_policy(self, text: str) -> bool:
        return True

    def new(self, minor: int | None, flags: t.Mapping[str, str], extender: Extender) -> str:
        policy = {"kind": KIND, "apiVersion": API_VERSION, "extenders": [extender.policy_entry()]}
        text = json.dumps(policy, indent=2) + "\n"
        self.check("the new Policy", text, None)
        return text

    def decode(self, path: str, text: str, minor: int | None) -> Decoded:
        source = Source(path, text)
        self.require_kind(path, source.top("kind"))
        if source.top("apiVersion") != API_VERSION:
            raise BadInput(f"{path}: kube-scheduler reads a {KIND} of {API_VERSION}, not {source.top('apiVersion')}")
        minor = NO_POLICY_SINCE - 1 if minor is None else minor
        return source.decode(POLICY, minor, strict=minor >= STRICT_SINCE)

    def validate(self, decoded: Decoded, minor: int | None) -> None:
        weight = decoded.tree.get("hardPodAffinitySymmetricWeight") or 0
        if not 0 <= weight <= 100:
            raise decoded.fault("hardPodAffinitySymmetricWeight", "isn't between 0 and 100")
        _priorities(decoded)
        validate_extenders(decoded)


FORM = Policy()


def _priorities(policy: Decoded) -> None:
    seen: dict[str, int] = {}
    for number, one in enumerate(policy.tree.get("priorities") or []):
        here = f"priorities[{number}]"
        priority: JsonObject = one or {}
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
