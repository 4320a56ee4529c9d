# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What of an inventory decides on the list: variables with the roles' defaults, the machines' facts, the cluster."""

from __future__ import annotations

import functools
import typing as t
from pathlib import Path

import yaml
from ansible.errors import AnsibleError

from ...module_utils._contracts.backends import VIRTUAL
from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from ...module_utils._images import delivery
from ...module_utils._preflight.inventory import node_name, wanted_backends, wanted_software
from .needed import DEDICATED, GPUSHARE, OPENSHIFT, OPERATOR_SOFTWARE, Inventory, Machine

ROLES = Path(__file__).resolve().parents[3] / "roles"
LOCAL = "localhost"
Variables = t.Mapping[str, t.Any]


@functools.cache
def defaults() -> dict[str, t.Any]:
    """Return the defaults of all roles that aren't computed."""
    found: dict[str, t.Any] = {}
    for path in sorted(ROLES.glob("*/defaults/main.yml")):
        rows = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
        found.update({name: value for name, value in rows.items() if "{{" not in str(value)})
    return found


class Moved(t.TypedDict):
    """A variable's value that airgap_push.yml has written, and the one that it had where the archive was made."""

    inside: str
    outside: str


def variables(host: str, own: Variables, outside: t.Mapping[str, Moved] | None = None) -> t.Callable[[str], t.Any]:
    """Return what looks up a role's variable on a host: its value there, or the role's default; None without one.

    :param own: the host's, with their templates evaluated on access.
    :param outside: by variable what it was outside; a value that somebody has set since then stays.
    """

    def value(name: str) -> t.Any:
        try:
            found = own[name] if name in own else defaults().get(name)
        except AnsibleError as error:
            raise BadInput(f"host {host}: {name} can't be evaluated: {error}") from error
        moved = (outside or {}).get(name)
        return moved["outside"] if moved and found == moved["inside"] else found

    return value


def inventory(
    hostvars: t.Mapping[str, Variables],
    machines: t.Mapping[str, JsonObject],
    cluster: JsonObject,
    kubernetes: str = "",
    planned: bool = False,
    outside: t.Mapping[str, Moved] | None = None,
) -> Inventory:
    """Return what decides on the list.

    :param machines: by host of group gpu_nodes what the filter ``driver_choice`` returned.
    :param cluster: what ``cluster_info`` returned with back ends and scheduler; empty where the cluster isn't asked.
    :param kubernetes: the cluster's version where it isn't asked.
    :param planned: also the back ends that variables ask for on nodes which playbook switch.yml hasn't switched yet.
    :param outside: as ``variables`` takes it, for a list by which something is downloaded outside.
    """
    # The get of Ansible's hostvars has no default.
    local = variables(LOCAL, hostvars[LOCAL] if LOCAL in hostvars else {}, outside)  # noqa: SIM401
    scheduler = cluster.get("scheduler") or {}
    mode = str(scheduler.get("mode") or (local("scheduler_mode") if not cluster else ""))
    if mode == OPENSHIFT and scheduler.get("takes_policy"):
        mode = ""
    image, archive = str(local("gpushare_image")), str(local("gpushare_image_archive") or "")
    return Inventory(
        str(cluster.get("version") or kubernetes),
        str(scheduler.get("openshift") or ""),
        frozenset(_backends(hostvars, machines, cluster, local, planned)),
        mode if mode in (DEDICATED, OPENSHIFT) else "",
        delivery.resolve(str(local("gpushare_image_delivery")), image, archive),
        local,
        tuple(_machine(host, hostvars[host], choice, cluster, outside) for host, choice in machines.items()),
        frozenset(_software(hostvars, machines, cluster, local)),
    )


def moved(given: t.Any) -> dict[str, Moved]:
    """Return variable ``airgap_outside`` of the file that airgap_push.yml writes.

    :raises BadInput: somebody has made it something else.
    """
    found: dict[str, Moved] = {}
    for name, row in given.items() if isinstance(given, dict) else ():
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("inside", "outside")):
            raise BadInput(
                f"airgap_outside: {line(name, 100)} hasn't the two names that airgap_push.yml wrote: run that again"
            )
        found[str(name)] = {"inside": row["inside"], "outside": row["outside"]}
    return found


def _software(
    hostvars: t.Mapping[str, Variables],
    machines: t.Iterable[str],
    cluster: JsonObject,
    local: t.Callable[[str], t.Any],
) -> set[str]:
    """Return who installs the software of nodes beside the roles; without the cluster, what variables ask for."""
    decided = (cluster.get("backends") or {}).get("software")
    if decided:
        return {OPERATOR_SOFTWARE} if decided["installs"] else set()
    rows = wanted_software(hostvars, list(machines), local("gpushare_nodes") or (), local("gpu_node_software"))
    return {row["software"] for row in rows} & {OPERATOR_SOFTWARE}


def _by_roles(host: str, own: Variables, cluster: JsonObject) -> bool:
    """Return whether roles install a machine's software for containers; where the cluster isn't asked, as its variables
    say. Where virtual machines have all cards they install none.
    """
    known = cluster.get("backends") or {}
    if node_name(host, own) in known["virtual"] if "virtual" in known else own.get("gpu_backend") in VIRTUAL:
        return False
    decided = known.get("software")
    if decided:
        return node_name(host, own) in decided["roles"]
    return "gpu_node_software" not in own or str(own["gpu_node_software"]) in ("auto", "roles")


def _backends(
    hostvars: t.Mapping[str, Variables],
    machines: t.Iterable[str],
    cluster: JsonObject,
    local: t.Callable[[str], t.Any],
    planned: bool,
) -> set[str]:
    """Return the back ends that are to be in the cluster; without it, what variables ask for."""
    resolved = cluster.get("backends")
    found: set[str] = set()
    if planned or not resolved:
        given = {"gpu_backend": str(local("gpu_backend") or "")}
        rows = wanted_backends(hostvars, list(machines), local("gpushare_nodes") or (), given)
        found |= {row["backend"] for row in rows}
    if not resolved:
        return found
    found |= {name for name in ("hami", "nvidia") if resolved["parts"][name]}
    # The GPU Operator deploys NVIDIA's device plugin without a chart of this collection.
    if any(operator["kind"] == "ClusterPolicy" for operator in cluster.get("operators") or ()):
        found -= {"nvidia"}
    return found | ({GPUSHARE} if resolved["gpushare"] else set())


def _machine(
    host: str, own: Variables, choice: JsonObject, cluster: JsonObject, outside: t.Mapping[str, Moved] | None
) -> Machine:
    lookup = variables(host, own, outside)
    return Machine(
        host,
        own["gpu_node"]["distribution"],
        lookup,
        choice if lookup("driver_state") == "present" else None,
        _by_roles(host, own, cluster),
    )
