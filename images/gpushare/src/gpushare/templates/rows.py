# SPDX-License-Identifier: GPL-3.0-or-later
"""What is kept of a waiting pod and of a template. No I/O."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json

from gpushare.shared._contracts import claim_templates as contract
from gpushare.shared._core.types import JsonObject
from gpushare.templates.objects import template_of

# Admission adds one to a pod. Its owner may name others, for example one for each of a node's eight cards.
MOST_PER_POD = 8
# So many different names with the prefix are looked at, valid or not.
MOST_LOOKED_AT = 64
# On a template: the hash of what this server has put in, which differs with another unit of memory.
DIGEST = "kubegpu.share/digest"


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A pod that waits for a node.

    :param templates: the names of the templates of this server's kind that it names, each once; empty where there are
        too many.
    :param needed: of them, those by which a claim has still to be made.
    """

    namespace: str
    name: str
    uid: str
    templates: tuple[str, ...]
    needed: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def has_too_many(self) -> bool:
        return not self.templates


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A template that this server has made.

    :param digest: of its content.
    :param is_going: whether it is being deleted, and waits for somebody's finalizer.
    """

    namespace: str
    name: str
    digest: str
    is_going: bool = False


def waiting(pod: JsonObject) -> Waiting | None:
    """Return a pod's row; None for one that names no template of this kind."""
    metadata = pod["metadata"]
    if metadata.get("deletionTimestamp"):
        return None
    # By name: whether a claim has still to be made by it.
    waiting_names: dict[str, bool] = {}
    others: set[str] = set()
    with_claim: frozenset[str] | None = None
    for claim in (pod.get("spec") or {}).get("resourceClaims") or []:
        name = str(claim.get("resourceClaimTemplateName") or "")
        if not name.startswith(contract.PREFIX) or name in others:
            continue
        if name not in waiting_names and contract.shape_of(name) is None:
            others.add(name)
            if len(others) < MOST_LOOKED_AT:
                continue
            waiting_names.clear()
            break
        if with_claim is None:
            with_claim = _with_claim(pod)
        waiting_names[name] = waiting_names.get(name, False) or claim.get("name") not in with_claim
        if len(waiting_names) > MOST_PER_POD:
            waiting_names.clear()
            break
    else:
        if not waiting_names:
            return None
    needed = tuple(name for name, is_needed in waiting_names.items() if is_needed)
    who = (str(metadata["namespace"]), str(metadata["name"]), str(metadata.get("uid", "")))
    return Waiting(*who, tuple(waiting_names), needed)


def _with_claim(pod: JsonObject) -> frozenset[str]:
    """Return the names in a pod's specification of those claims that the controller of claims has made."""
    listed = (pod.get("status") or {}).get("resourceClaimStatuses") or []
    return frozenset(str(claim.get("name")) for claim in listed)


def made(template: JsonObject) -> Made | None:
    """Return a template's row; None for one that isn't of this kind."""
    metadata = template["metadata"]
    if contract.shape_of(str(metadata["name"])) is None:
        return None
    digest = str((metadata.get("annotations") or {}).get(DIGEST, ""))[:64]
    is_going = bool(metadata.get("deletionTimestamp"))
    return Made(str(metadata["namespace"]), str(metadata["name"]), digest, is_going)


def filled(namespace: str, name: str, unit: str) -> JsonObject:
    """Return the template of a name, with its digest.

    :param unit: of the cluster's memory, ``GiB`` or ``MiB``.
    """
    template = template_of(namespace, name, unit)
    assert template is not None, f"{name} is no name of a template"
    template["metadata"]["annotations"] = {DIGEST: digest_of(name, unit)}
    return template


@functools.lru_cache(4096)
def digest_of(name: str, unit: str) -> str:
    """Return the hash of the content of a name's template."""
    template = template_of("", name, unit)
    assert template is not None, f"{name} is no name of a template"
    text = json.dumps(template["spec"], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
