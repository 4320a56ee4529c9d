# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The package sets that a list's items make: what machines of one distribution install together. Pure."""

from __future__ import annotations

import json
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from ...module_utils._mirrors.types import APT, DRIVER, RPM, TOOLKIT
from ...module_utils._packages.options import ARGUMENTS
from .needed import FILE, Item, Machine
from .table import Table

# What NVIDIA signs of its rpm repositories, as roles driver and toolkit have it.
_SIGNED = {DRIVER: ["packages"], TOOLKIT: ["metadata"]}
_WORDS = ("host", "id", "version", "arch")
# Fields of preferences and of module streams, as ``pinned_packages`` has them.
_ROWS = {
    "pins": {"package": str, "pin": str, "priority": int},
    "streams": {"module": str, "stream": str, "switch": bool},
}


class MachineFacts(t.TypedDict):
    """What of a machine decides on the packages that it gets, as the list has it.

    :ivar version: the whole release, such as 22.04, 9.4 or 15.6. An Ubuntu's or a SUSE's repositories are those of the
        whole release. Of the Enterprise Linux family each minor release has kernels, and so kernel-devel, of its own,
        and packages of a newer one need its libraries.
    """

    host: str
    id: str
    version: str
    arch: str
    pins: list[JsonObject]
    streams: list[JsonObject]


def facts_of(machine: Machine) -> MachineFacts:
    choice: t.Mapping[str, t.Any] = machine.driver or {}
    return {
        "host": machine.host,
        "id": str(machine.distribution.get("id") or ""),
        "version": str(machine.distribution.get("version") or ""),
        "arch": str(machine.distribution.get("arch") or ""),
        "pins": _rows("pins", choice),
        "streams": _rows("streams", choice),
    }


def _rows(field: str, choice: t.Mapping[str, t.Any]) -> list[JsonObject]:
    """Return preferences or streams with the defaults of ``pinned_packages``."""
    options = ARGUMENTS[field]["options"]
    return [
        {name: row.get(name, options[name].get("default")) for name in _ROWS[field]} for row in choice.get(field) or ()
    ]


def parsed(row: t.Any) -> MachineFacts:
    """Return a machine of a list that came from a file.

    :raises ValueError: it isn't one.
    """
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in _WORDS):
        raise ValueError("a machine isn't a mapping with host, id, version and arch")
    found: JsonObject = {name: str(line(row[name], 200)) for name in _WORDS}
    for field, types in _ROWS.items():
        rows = row.get(field)
        if not isinstance(rows, list) or not all(
            isinstance(one, dict) and all(type(one.get(name)) is kind for name, kind in types.items()) for one in rows
        ):
            raise ValueError(f"{field} of machine {found['host']} aren't a list of {', '.join(types)}")
        found[field] = [{name: one[name] for name in types} for one in rows]
    return t.cast(MachineFacts, found)


def package_sets(table: Table, items: t.Sequence[Item], machines: t.Iterable[MachineFacts]) -> list[JsonObject]:
    """Return the entries of the option ``sets`` of module ``airgap_packages``; machines that need the same share one.

    :raises BadInput: a host of the items isn't among the machines.
    """
    known = {machine["host"]: machine for machine in machines}
    packages = [item for item in items if item["kind"] in (APT, RPM)]
    keys = {item["id"].removeprefix("files/key/"): item for item in items if item["id"].startswith("files/key/")}
    found: dict[str, JsonObject] = {}
    for host in sorted({host for item in packages for host in item["hosts"]}):
        if host not in known:
            raise BadInput(
                f"airgap_needed: the list doesn't say which distribution host {line(host, 100)} has: make it again by "
                "playbook kubegpu.share.airgap_list"
            )
        own = [item for item in packages if host in item["hosts"]]
        one = _set(table, own, keys, known[host])
        content = json.dumps(one, sort_keys=True)
        found.setdefault(content, {"name": f"set-{len(found) + 1}", "hosts": [], **one})["hosts"].append(host)
    return list(found.values())


def _set(table: Table, items: t.Sequence[Item], keys: t.Mapping[str, Item], machine: MachineFacts) -> JsonObject:
    rows = [item["id"].split("/") for item in items]
    roles = {f"airgap-{row[1]}": row[1] for row, item in zip(rows, items, strict=True) if item["source"]}
    return {
        "manager": items[0]["kind"],
        "id": machine["id"],
        "version": machine["version"],
        "architectures": [machine["arch"]],
        "roles": roles,
        "repositories": [
            _repository(table, next(item for item in items if _role(item) == role and item["source"]), keys)
            for role in roles.values()
        ],
        "pins": [dict(row) for row in machine["pins"]],
        "streams": [dict(row) for row in machine["streams"]],
        "packages": list(dict.fromkeys(_text(item) for item in items)),
    }


def _role(item: Item) -> str:
    return item["id"].split("/")[1]


def _text(item: Item) -> str:
    return f"{item['name']}={item['version']}" if item["version"] else item["name"]


def _repository(table: Table, item: Item, keys: t.Mapping[str, Item]) -> JsonObject:
    """Return where a package is public, with the key that is announced there."""
    role, row = _role(item), table["files"][f"key/{item['key']}"]
    key = keys.get(item["key"])
    found: JsonObject = {
        "name": f"airgap-{role}",
        "url": item["source"],
        "signed": _SIGNED[role],
        "key_url": key["source"] if key and key["kind"] == FILE else row["url"],
        "key_sha256": key["digest"].removeprefix("sha256:") if key else row["sha256"],
        "key_fingerprint": row["fingerprint"],
    }
    if item["kind"] == APT:
        # NVIDIA's own are flat; a mirror of the inventory's may not be, and isn't asked here.
        found.update(suites=["/"], architectures=list(item["architectures"]))
    return found
