# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The folder that a web server gives to nodes: repositories, charts, keys and wheels of an archive, and their indexes.

The signatures of packages and their lists are the vendors'; charts, keys and wheels are held to digests by who takes
them. So the server needs no TLS.
"""

from __future__ import annotations

import html
import re
import typing as t

import yaml

from . import archive
from .archive import Archive, Broken, Entry
from .needed import CHART

# Of charts, as helm reads it, and of wheels, as pip does.
CHART_INDEX, SIMPLE = f"{archive.CHARTS}/index.yaml", f"{archive.WHEELS}/simple"
FOLDERS = (archive.PACKAGES, archive.CHARTS, archive.FILES, archive.WHEELS)
_WHEEL = re.compile(r"([A-Za-z0-9](?:[\w.]|-(?![0-9]))*)-[0-9][\w.!+]*(?:-[\w.]+){0,4}\.(?:whl|tar\.gz)", re.ASCII)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


def files(found: Archive) -> dict[str, str]:
    """Return the SHA-256 of the archive's files that are served, by their paths."""
    return {path: sha256 for path, sha256 in found.sums.items() if path.partition("/")[0] in FOLDERS}


def indexes(found: Archive) -> dict[str, str]:
    """Return the texts that are served beside the archive's files, by their paths; none where nothing needs them.

    :raises Broken: two charts have one name and version, or a path of the archive is one of them.
    """
    entries = found.contents.items
    texts = {**_charts([entry for entry in entries if entry["kind"] == CHART], found.contents.created)}
    texts |= _simple([path for path in found.sums if path.startswith(f"{archive.WHEELS}/")])
    taken = sorted(set(texts) & set(found.sums))
    if taken:
        raise Broken("contents", f"{found.folder} has {taken[0]}, which is made where its files are served")
    return texts


def _charts(entries: t.Sequence[Entry], created: str) -> dict[str, str]:
    rows: dict[str, dict[str, t.Any]] = {}
    for entry in entries:
        same = rows.setdefault(entry["name"], {})
        row = {
            "apiVersion": "v2",
            "name": entry["name"],
            "version": entry["version"],
            "digest": entry["sha256"],
            "urls": [entry["path"].removeprefix(f"{archive.CHARTS}/")],
        }
        if same.setdefault(entry["version"], row) != row:
            raise Broken("contents", f"the archive has two charts {entry['name']} {entry['version']}")
    if not rows:
        return {}
    known = {name: [rows[name][version] for version in sorted(rows[name])] for name in sorted(rows)}
    made = {"generated": created} if TIME.fullmatch(created) else {}
    document = {"apiVersion": "v1", **made, "entries": known}
    return {CHART_INDEX: yaml.safe_dump(document, sort_keys=False)}


def _simple(paths: t.Sequence[str]) -> dict[str, str]:
    """Return pip's index: a page for each package, with its files."""
    by_name: dict[str, list[str]] = {}
    for path in sorted(paths):
        match = _WHEEL.fullmatch(path.rpartition("/")[2])
        if match:
            name = re.sub(r"[-_.]+", "-", match.group(1)).lower()
            by_name.setdefault(name, []).append(path.removeprefix(f"{archive.WHEELS}/"))
    pages = {f"{SIMPLE}/{name}/index.html": _page(f"../../{path}" for path in rows) for name, rows in by_name.items()}
    return {**pages, f"{SIMPLE}/index.html": _page(f"{name}/" for name in by_name)} if pages else {}


def _page(links: t.Iterable[str]) -> str:
    rows = "".join(
        f'<a href="{html.escape(link)}">{html.escape(link.rstrip("/").rpartition("/")[2])}</a>\n' for link in links
    )
    return f"<!DOCTYPE html>\n<html><body>\n{rows}</body></html>\n"
