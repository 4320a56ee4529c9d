# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight's findings about mirrors: what they lack, what couldn't be checked, and what comes from elsewhere."""

from __future__ import annotations

import dataclasses
import typing as t
import urllib.parse

from ansible.module_utils.parsing.convert_bool import boolean

from ...module_utils._core.types import JsonObject
from ...module_utils._preflight.findings import NOTE, PROBLEM, WARNING, Finding
from . import mirrors, table, web
from .inventory import Variables, inventory
from .mirrors import MISSING, UNKNOWN, Found
from .needed import IMAGE, Item, needed

# Names in a text; all of them are in the finding's fields.
MOST = 6
Ask = t.Callable[..., list[Found]]
# The variables of playbook airgap_push.yml that say how its registry is reached.
REGISTRY, INSECURE = "airgap_registry", "airgap_registry_insecure"
AUTHORITY, AUTH_FILE = "airgap_registry_ca", "airgap_registry_auth_file"


def examine(
    hostvars: t.Mapping[str, Variables],
    choices: t.Mapping[str, JsonObject],
    cluster: JsonObject,
    seconds: float,
    ask: Ask = mirrors.ask,
) -> list[Finding]:
    """Ask the mirrors that the variables name for what is needed of them; without a mirror nothing is asked.

    :param choices: by host with facts, what the filter ``driver_choice`` returned.
    :param cluster: as ``cluster_info`` returned it; empty where the run is for machines alone.
    :param seconds: for all mirrors together.
    """
    known = inventory(hostvars, choices, cluster)
    if not cluster:
        known = dataclasses.replace(known, backends=frozenset(), scheduler="", software=frozenset())
    items = needed(table.listed(), known)
    registry = str(known.variables(REGISTRY) or "")
    checked = mirrors.at_mirrors(items, registry)
    if not checked:
        return []
    authority, auth_file = (web.own_path(str(known.variables(name) or "")) for name in (AUTHORITY, AUTH_FILE))
    insecure = {registry.partition("/")[0]} - {""} if boolean(known.variables(INSECURE) or False) else set()
    found = ask(checked, seconds, web.fetcher(authority, AUTHORITY), auth_file=auth_file, insecure=insecure)
    return list(_findings(found, mirrors.elsewhere(items, registry), insecure))


def _findings(
    found: t.Sequence[Found], elsewhere: t.Sequence[Item], insecure: t.Collection[str]
) -> t.Iterator[Finding]:
    plain = sorted({host(each.item) for each in found if each.plain} - set(insecure))
    if plain:
        yield Finding(
            "registry-without-tls",
            WARNING,
            "no TLS at {registries}: a container runtime pulls nothing from there unless its configuration says so",
            "give them certificates, or tell each node's runtime, which no role does (docs/howto/air-gap.md)",
            fields={"registries": plain},
        )
    missing = [each for each in found if each.state == MISSING]
    if missing:
        # The variable that names the place, and not one that takes another kind of place.
        variables = sorted({each.item["variables"][0] for each in missing if each.item["variables"]})
        yield Finding(
            "mirror-missing",
            PROBLEM,
            "{count} of {checked} missing: {shown}",
            "copy them to the mirrors ({variables}); playbook kubegpu.share.airgap_list lists what is needed, and "
            "where it is public",
            fields={
                "count": len(missing),
                "checked": len(found),
                "shown": _shown([f"{_name(each.item)} at {host(each.item)} ({each.reason})" for each in missing]),
                "variables": variables,
                "missing": [_fields(each) for each in missing],
            },
        )
    unknown = [each for each in found if each.state == UNKNOWN]
    if unknown:
        reasons = dict.fromkeys(f"{host(each.item)} ({each.reason})" for each in unknown)
        yield Finding(
            "mirror-not-checked",
            WARNING,
            "whether mirrors have {count} of {checked} isn't known: {shown}",
            "where only machines of the cluster reach a mirror, try one node first; for more time set "
            "preflight_mirror_timeout",
            fields={
                "count": len(unknown),
                "checked": len(found),
                "shown": _shown(list(reasons)),
                "not_checked": [_fields(each) for each in unknown],
            },
        )
    if elsewhere:
        names = [_name(item) for item in elsewhere]
        variables = sorted({item["variables"][0] for item in elsewhere if item["variables"]})
        yield Finding(
            "mirror-not-named",
            NOTE,
            "{checked} come from mirrors, and {count} from where they are public: {shown}",
            "without internet access set {variables}, unless the nodes' runtimes or package managers are redirected",
            fields={
                "count": len(names),
                "checked": len(found),
                "shown": _shown(names),
                "variables": variables,
                "names": names,
            },
        )


def _name(item: Item) -> str:
    return " ".join(filter(None, (item["name"], item["version"])))


def host(item: Item) -> str:
    """Return the name of the server from which an item is taken."""
    place = item["place"]
    return place.partition("/")[0] if item["kind"] == IMAGE else urllib.parse.urlsplit(place).netloc.rpartition("@")[2]


def _shown(names: t.Sequence[str]) -> list[str]:
    return [*names[:MOST], f"and {len(names) - MOST} more"] if len(names) > MOST else list(names)


def _fields(found: Found) -> JsonObject:
    item = found.item
    known: JsonObject = {field: item[field] for field in ("kind", "name", "version")}
    return {**known, "server": host(item), "variables": item["variables"], "reason": found.reason}
