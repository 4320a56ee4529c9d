# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A release as helm has recorded it in the cluster: one Secret for each revision. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import typing as t
import zlib

from .._core.types import JsonObject

DEPLOYED = "deployed"
# Bytes; a Secret has at most 1 MiB, which may be made of a thousand times as much.
LARGEST = 32 << 20


class Release(t.TypedDict):
    """The newest revision of a release.

    ``values`` are those that were given, ``chart_values`` the chart's own, and ``manifest`` the objects as text.
    """

    status: str
    revision: int
    chart: str
    chart_version: str
    values: JsonObject
    chart_values: JsonObject
    manifest: str


def selector(name: str) -> str:
    """Return the label selector of a release's Secrets."""
    return f"owner=helm,name={name}"


def release(secrets: t.Iterable[JsonObject]) -> Release | None:
    """Return a release by its Secrets; None without one, or where helm has written what isn't understood.

    :param secrets: those of one release, with their data.
    """
    revisions = sorted(secrets, key=_revision)
    if not revisions:
        return None
    newest = revisions[-1]
    try:
        stream = zlib.decompressobj(wbits=31)
        text = stream.decompress(base64.b64decode(base64.b64decode(newest["data"]["release"])), LARGEST)
        if not stream.eof:
            return None
        body = json.loads(text)
        chart = body["chart"]
        return {
            "status": str(body["info"]["status"]),
            "revision": _revision(newest),
            "chart": str(chart["metadata"]["name"]),
            "chart_version": str(chart["metadata"]["version"]),
            "values": body.get("config") or {},
            "chart_values": chart.get("values") or {},
            "manifest": str(body.get("manifest") or ""),
        }
    except (KeyError, TypeError, ValueError, zlib.error, RecursionError, binascii.Error):
        return None


def _revision(secret: JsonObject) -> int:
    text = str((secret["metadata"].get("labels") or {}).get("version", ""))
    return int(text) if text.isdigit() else 0
