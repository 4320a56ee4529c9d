# SPDX-License-Identifier: GPL-3.0-or-later
"""A GPUShare, parsed once from the API's answer, and the variables that it may set. Pure."""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

JsonObject = dict[str, t.Any]

GROUP, VERSION, PLURAL, KIND = "kubegpu.share", "v1alpha1", "gpushares", "GPUShare"
API_VERSION = f"{GROUP}/{VERSION}"
FINALIZER = "kubegpu.share/uninstall"
# Variables of watches.yaml, of the engine and of this program: a resource has none of them.
OWN = frozenset(("gpu_kubeconfig", "gpu_owner", "gpushare_namespace", "scheduler_dedicated_namespace"))
# What decides what a role does, how a machine is reached, or whether a refusal counts. The schema has none of them;
# this holds also where somebody has replaced the schema.
_NEVER = re.compile(
    r"^(_|ansible_|uninstall_)|_(state|step|kubeconfig|become|runfile|dir|archive|component|helm)$"
    r"|^(gpushare_(component|alone|openshift|node_allocation)|gpu_(backends|node))"
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Malformed(Exception):
    """The API's answer isn't a GPUShare."""


@dataclass(frozen=True)
class Resource:
    """A resource.

    :param generation: of its spec.
    :param created: its creation, as the API writes it.
    :param deleting: its deletion was requested.
    :param held: it has the operator's finalizer.
    :param spec: its variables by the names in the resource.
    :param status: as it is stored.
    """

    name: str
    uid: str
    generation: int
    created: str
    deleting: bool
    held: bool
    spec: JsonObject
    status: JsonObject


@dataclass(frozen=True)
class Problem:
    """Why a resource isn't acted on: an id and its fields; the sentence is made of them."""

    id: str
    fields: JsonObject

    @property
    def text(self) -> str:
        return TEXTS[self.id].format(**self.fields)


TEXTS = {
    "unknown-option": "spec.{option} is no option of a GPUShare; remove it from the resource",
    "another-resource": (
        "the GPUShare {owner} is older and decides what this cluster has; delete this one, or that one first"
    ),
}


def resource_of(item: t.Any) -> Resource:
    """Parse an object of the API.

    :raises Malformed: it is none.
    """
    try:
        metadata = item["metadata"]
        spec, status = item.get("spec") or {}, item.get("status") or {}
        if not isinstance(spec, dict) or not isinstance(status, dict):
            raise Malformed("spec and status of a GPUShare are mappings")
        return Resource(
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            generation=int(metadata["generation"]),
            created=str(metadata["creationTimestamp"]),
            deleting="deletionTimestamp" in metadata,
            held=FINALIZER in (metadata.get("finalizers") or ()),
            spec=spec,
            status=status,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(f"no GPUShare: {type(error).__name__}") from error


def snake(name: str) -> str:
    """Return the variable of an option: ``gpushareNodes`` is ``gpushare_nodes``, as ansible-operator converts it."""
    return re.sub(r"(?=[A-Z])(?<![A-Z])", "_", name).lower()


def is_allowed(variable: str, known: t.Container[str] | None) -> bool:
    """Return whether a resource may set a variable.

    :param known: the allow list; None where there is none.
    """
    if not _NAME.fullmatch(variable) or variable in OWN or _NEVER.search(variable):
        return False
    return known is None or variable in known


def refused(spec: JsonObject, known: t.Container[str] | None) -> Problem | None:
    """Return the first option that a resource may not set."""
    for name in sorted(spec):
        if not is_allowed(snake(name), known):
            shown = name if name.isprintable() and len(name) <= 60 else f"{ascii(name)[1:60]}…"
            return Problem("unknown-option", {"option": shown})
    return None


def owner_of(resources: t.Iterable[Resource]) -> Resource | None:
    """Return the resource that decides: the oldest, and of several that are equally old the first by name.

    One that was uninstalled and is kept by a finalizer of somebody else decides no more.
    """
    alive = (resource for resource in resources if resource.held or not resource.deleting)
    return min(alive, key=lambda resource: (resource.created, resource.name), default=None)
