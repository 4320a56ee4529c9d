# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The package sets that a list's items make: what machines of one distribution install together. Pure."""

from __future__ import annotations

import json
import typing as t

from ...module_utils._core.types import JsonObject
from ...module_utils._mirrors.types import APT, DRIVER, RPM, TOOLKIT
from .needed import FILE, Item, Machine
from .table import Table

# What NVIDIA signs of its rpm repositories, as roles driver and toolkit have it.
_SIGNED = {DRIVER: ["packages"], TOOLKIT: ["metadata"]}


def package_sets(table: Table, items: t.Sequence[Item], machines: t.Sequence[Machine] = ()) -> list[JsonObject]:
    """Return the entries of the option ``sets`` of module ``airgap_packages``; machines that need the same share one.

    :param machines: those whose facts are known; without them a machine's distribution is that of its rows of the list,
        which have no release below the first number.
    """
    known = {machine.host: machine for machine in machines}
    packages = [item for item in items if item["kind"] in (APT, RPM)]
    keys = {item["id"].removeprefix("files/key/"): item for item in items if item["id"].startswith("files/key/")}
    found: dict[str, JsonObject] = {}
    for host in sorted({host for item in packages for host in item["hosts"]}):
        own = [item for item in packages if host in item["hosts"]]
        one = _set(table, own, keys, known.get(host))
        content = json.dumps(one, sort_keys=True)
        found.setdefault(content, {"name": f"set-{len(found) + 1}", "hosts": [], **one})["hosts"].append(host)
    return list(found.values())


def _set(table: Table, items: t.Sequence[Item], keys: t.Mapping[str, Item], machine: Machine | None) -> JsonObject:
    rows = [item["id"].split("/") for item in items]
    roles = {f"airgap-{row[1]}": row[1] for row, item in zip(rows, items, strict=True) if item["source"]}
    facts: t.Mapping[str, t.Any] = machine.distribution if machine else {}
    driver: t.Mapping[str, t.Any] = (machine.driver if machine else None) or {}
    architectures = sorted({word for item in items for word in item["architectures"]})
    return {
        "manager": items[0]["kind"],
        "row": next((row[2] for row in rows if row[1] != TOOLKIT and len(row) > 2), ""),
        "id": str(facts.get("id") or ""),
        "version": str(facts.get("version") or ""),
        # A list without facts may have an item for machines of several architectures.
        "architectures": [str(facts["arch"])] if facts.get("arch") else architectures,
        "roles": roles,
        "repositories": [
            _repository(table, next(item for item in items if _role(item) == role and item["source"]), keys)
            for role in roles.values()
        ],
        "pins": [dict(row) for row in driver.get("pins") or ()] if machine else _pins(items),
        "streams": [dict(row) for row in driver.get("streams") or ()],
        "packages": list(dict.fromkeys(_text(item) for item in items)),
    }


def _pins(items: t.Sequence[Item]) -> list[JsonObject]:
    """Return preferences with which apt takes a driver's parts that nobody names in its version, not in the newest.

    apt has no versions for ``*`` alone.
    """
    versions = sorted({item["version"] for item in items if item["kind"] == APT and item["version"].endswith("*")})
    return [{"package": "?*", "pin": f"version {version}", "priority": 1001} for version in versions]


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
