# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The check D10, and S1, S4 and S5 of this collection's servers where kube-scheduler allocates claims."""

from __future__ import annotations

from .._contracts import gpushare as contract
from .._contracts.claim_templates import API_VERSION, DRIVER
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._kube.refs import FIELD_MANAGER, Ref
from .model import DRA, Node, ObjectReader, Snapshot
from .parse import join
from .result import CheckResult
from .servers_needed import needed

ADMISSION = "admissionregistration.k8s.io/v1"
CLAIMS, ALLOCATED = "gpushare-claims", "gpushare-allocated-claims"
SLICES, OF_DRIVER, OF_TEMPLATES = "gpushare-slices", "gpushare-dra-driver", "gpushare-dra-templates"
DENY = "Deny"
# Each policy with the kind of its binding, which has its name.
POLICIES = (
    *(("ValidatingAdmissionPolicy", name) for name in (CLAIMS, ALLOCATED, SLICES, OF_DRIVER, OF_TEMPLATES)),
    ("MutatingAdmissionPolicy", CLAIMS),
)


def objects_are_unchanged(snapshot: Snapshot, result: CheckResult) -> None:
    """Check D10: what turns pods into claims, keeps these, and ties the servers' accounts, is as site.yml wrote it."""
    servers = snapshot.servers
    if servers is None or servers.api is None or DRA not in needed(snapshot):
        return
    api = servers.api
    _check_object(api, Ref(API_VERSION, "DeviceClass", "", DRIVER), result)
    for kind, name in POLICIES:
        _check_object(api, Ref(ADMISSION, kind, "", name), result)
        binding = Ref(ADMISSION, f"{kind}Binding", "", name)
        live = _check_object(api, binding, result)
        if live is None:
            continue
        spec = live.get("spec") or {}
        if spec.get("policyName") != name:
            named = str(spec.get("policyName"))
            shown = {"policy": named, "expected": name, "api": f"policyName {named}"}
            result.fail("other_policy", key=str(binding), object=binding, **shown)
        elif kind.startswith("Validating") and DENY not in (spec.get("validationActions") or []):
            shown = {"api": f"validationActions {join(spec.get('validationActions') or ['-'])}"}
            result.fail("other_action", key=str(binding), object=binding, **shown)


def _check_object(api: ObjectReader, ref: Ref, result: CheckResult) -> JsonObject | None:
    """Check that an object is there and that nobody else has written its specification; return it."""
    result.count()
    try:
        live = api.get(ref)
    except ShareError as error:
        result.unknown("no_data", key=str(ref), object=ref, why=str(error))
        return None
    if live is None:
        result.fail("missing", key=str(ref), object=ref, api="not found")
        return None
    others = _other_writers(live)
    if others:
        result.fail("changed", key=str(ref), object=ref, managers=join(others), api=f"managedFields: {join(others)}")
    return live


def _other_writers(live: JsonObject) -> list[str]:
    """Return who else has written the specification: a field's last writer owns it, by managedFields."""
    found = []
    own = False
    for entry in (live.get("metadata") or {}).get("managedFields") or []:
        fields = entry.get("fieldsV1") or {}
        if "f:spec" not in fields or entry.get("subresource"):
            continue
        if entry.get("manager") == FIELD_MANAGER:
            own = True
        else:
            found.append(str(entry.get("manager")))
    return sorted(set(found)) or ([] if own else ["somebody else"])


def nodes_offer_cards(node: Node, result: CheckResult) -> None:
    """Check S4 on a node: the driver offers cards in slices."""
    if not node.devices:
        result.fail("not_offered", node=node.name, driver=DRIVER, key="slices", api="no device in a ResourceSlice")


def unenforced(node: Node, violations: frozenset[str] | set[str], result: CheckResult) -> set[str]:
    """Check S5 on a node: return why limits aren't enforced, and report what pods hold beyond their claims."""
    reasons = set()
    for device in node.devices:
        if device.limit in violations:
            kind = "unaccounted" if device.limit == contract.Reason.UNACCOUNTED_MEMORY_HELD.value else "violated"
            why = "the driver's log names who"
            result.warn(kind, node=node.name, card=device.index, uuid=device.uuid, code=device.limit, why=why)
        elif device.limit not in ("", contract.LIMIT_ENFORCED, contract.LIMIT_OFF):
            reasons.add(device.limit)
    return reasons
