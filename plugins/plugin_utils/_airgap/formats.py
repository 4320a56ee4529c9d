# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The list of an inventory as YAML, as lines, and as what oc-mirror and Hauler take. Pure."""

from __future__ import annotations

import collections
import typing as t

import yaml

from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from . import needed
from .needed import KINDS, Inventory, Item
from .package_sets import facts_of

YAML, PLAIN, OC_MIRROR, HAULER = "yaml", "plain", "oc-mirror", "hauler"
# What each takes; of the rest the head says how much there is.
TAKES: t.Mapping[str, t.Collection[str]] = {
    YAML: KINDS,
    PLAIN: KINDS,
    # It would render a chart without the role's values, and NVIDIA's device plugin's refuses that.
    OC_MIRROR: (needed.IMAGE, needed.OPERATOR),
    HAULER: (needed.IMAGE, needed.CHART, needed.FILE),
}
HAULER_API, OC_MIRROR_API = "content.hauler.cattle.io/v1", "mirror.openshift.io/v2alpha1"
PLURALS = {"apt": "apt packages", "rpm": "rpm packages", **{kind: f"{kind}s" for kind in KINDS if len(kind) > 3}}
GB = 10**9


class _Plain(yaml.SafeDumper):
    """Writes equal values twice, instead of a reference to the first."""

    def ignore_aliases(self, data: t.Any) -> bool:
        return True


def size(item: Item) -> int | None:
    """Return the bytes of an image on the machines' architectures; None where one isn't known, as for other kinds."""
    wanted = item["architectures"] or list(item["platforms"])
    if not wanted or not set(wanted) <= set(item["platforms"]):
        return None
    sizes = [item["platforms"][name]["bytes"] for name in wanted if "bytes" in item["platforms"][name]]
    return sum(map(int, sizes)) if len(sizes) == len(wanted) else None


def totals(items: t.Sequence[Item]) -> list[JsonObject]:
    """Return for each kind how many there are, the bytes that are known, and of how many they aren't."""
    rows = []
    for kind in KINDS:
        own = [item for item in items if item["kind"] == kind]
        sizes = [size(item) for item in own]
        if own:
            known = sum(each for each in sizes if each is not None)
            rows.append({"kind": kind, "count": len(own), "bytes": known, "sizes_unknown": sizes.count(None)})
    return rows


def licences(items: t.Sequence[Item]) -> dict[str, int]:
    """Return the licences, with how many are under each."""
    return dict(sorted(collections.Counter(item["licence"] for item in items).items()))


def text(form: str, items: t.Sequence[Item], inventory: Inventory) -> str:
    """Return the list in a format.

    :param form: one of ``TAKES``.
    """
    writer = {YAML: _yaml, PLAIN: _lines, OC_MIRROR: _oc_mirror, HAULER: _hauler}[form]
    return _head(form, items) + writer(items, inventory)


def _head(form: str, items: t.Sequence[Item]) -> str:
    lines = ["What kubegpu.share.site fetches for this inventory."]
    for row in totals(items):
        shown = f"{row['count']} {PLURALS[row['kind']] if row['count'] != 1 else PLURALS[row['kind']][:-1]}"
        if row["bytes"]:
            more = f", and {row['sizes_unknown']} of unknown size" if row["sizes_unknown"] else ""
            shown += f": {row['bytes'] / GB:.2f} GB{more}"
        elif row["kind"] == needed.IMAGE:
            shown += " of unknown size"
        if row["kind"] not in TAKES[form]:
            shown += "; not in this format"
        lines.append(shown)
    lines += [f"{count} under: {name}" for name, count in licences(items).items()]
    return "".join(f"# {each}\n" for each in lines)


def _dumped(*documents: t.Any) -> str:
    # Without a first line of three dashes: Hauler would take the comments before it for a document, and warn of it.
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=1000)


def _yaml(items: t.Sequence[Item], inventory: Inventory) -> str:
    known = {"kubernetes": inventory.kubernetes, "openshift": inventory.openshift}
    rows = [{**item, "bytes": size(item)} for item in items]
    machines = [facts_of(machine) for machine in inventory.machines]
    return _dumped({"format": 1, **known, "totals": totals(items), "items": rows, "machines": machines})


def _lines(items: t.Sequence[Item], _inventory: Inventory) -> str:
    """Return a line for each: kind, name, version, digest and source, apart by tabs; a missing one is ``-``."""
    fields = ("kind", "name", "version", "digest", "source")
    # Names of kernels, and so of packages, are a node's.
    rows = ([line(item[field]) or "-" for field in fields] for item in items)  # type: ignore[literal-required]
    return "".join("\t".join(row) + "\n" for row in rows)


def _references(items: t.Sequence[Item]) -> list[str]:
    """Return the images with their tags: where only a digest is mirrored, what names a tag finds none."""
    images = (item for item in items if item["kind"] == needed.IMAGE and not item["source"].startswith("playbook"))
    return list(dict.fromkeys(item["source"] for item in images))


def _oc_mirror(items: t.Sequence[Item], _inventory: Inventory) -> str:
    mirror: JsonObject = {}
    operators = [item for item in items if item["kind"] == needed.OPERATOR]
    if operators:
        # oc-mirror refuses a configuration that names a catalogue twice.
        mirror["operators"] = [
            {"catalog": catalog, "packages": [_package(item) for item in operators if item["source"] == catalog]}
            for catalog in dict.fromkeys(item["source"] for item in operators)
        ]
    mirror["additionalImages"] = [{"name": name} for name in _references(items)]
    return _dumped({"kind": "ImageSetConfiguration", "apiVersion": OC_MIRROR_API, "mirror": mirror})


def _package(item: Item) -> JsonObject:
    """Return an operator of a catalogue; its own default channel needn't be the one that is taken."""
    channel = item["version"]
    return {"name": item["name"], "defaultChannel": channel, "channels": [{"name": channel}]}


def _last_name(address: str) -> str:
    return address.rpartition("/")[2].lower()


def _hauler(items: t.Sequence[Item], _inventory: Inventory) -> str:
    charts = [
        {"name": item["name"], "repoURL": item["source"], "version": item["version"]}
        for item in items
        if item["kind"] == needed.CHART
    ]
    paths = [
        item["source"].replace("{architecture}", architecture)
        for item in items
        if item["kind"] == needed.FILE and item["source"]
        for architecture in (("amd64", "arm64") if "{architecture}" in item["source"] else ("",))
    ]
    # Hauler keeps the last file of those whose addresses end with the same name, in any case of its letters.
    count = collections.Counter(_last_name(path) for path in paths)
    files = [
        {"path": path, **({"name": path.partition("://")[2].replace("/", "-")} if count[_last_name(path)] > 1 else {})}
        for path in paths
    ]
    parts = (("Images", [{"name": name} for name in _references(items)]), ("Charts", charts), ("Files", files))
    return _dumped(
        *(
            {
                "apiVersion": HAULER_API,
                "kind": kind,
                "metadata": {"name": f"kubegpu-share-{kind.lower()}"},
                "spec": {kind.lower(): rows},
            }
            for kind, rows in parts
            if rows
        )
    )
