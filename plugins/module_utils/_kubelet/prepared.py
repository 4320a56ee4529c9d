# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read which claims the DRA driver has prepared on this node: its records, and their CDI specifications. No I/O.

The driver writes a claim's record first, then its specification, and removes them in the other order
(``gpushare.dra.records`` and ``specifications`` of the servers' image).
"""

from __future__ import annotations

import json
import posixpath
import typing as t

from .._contracts.claim_templates import DRIVER
from .._core.types import JsonObject
from .source import KubeletSource, Missing, Unreadable
from .types import PreparedClaims, RecordedClaim, SpecifiedClaim

# In kubelet's folder.
RECORDS = f"plugins/{DRIVER}/claims"
CDI_FOLDER = "/var/run/cdi"
PREFIX, ENDING = f"{DRIVER}-claim-", ".json"
MALFORMED = (AttributeError, TypeError, ValueError, KeyError, RecursionError)


def prepared_claims(source: KubeletSource, root: str, folder: str = CDI_FOLDER) -> PreparedClaims:
    """Read the records and specifications of this node; never raises.

    :param root: kubelet's directory.
    :param folder: of CDI specifications.
    """
    at = posixpath.join(root, RECORDS)
    try:
        names = source.names(at)
        specified = [name for name in source.names(folder, True) if name.startswith(PREFIX) and name.endswith(ENDING)]
    except Missing as error:
        return _nothing("missing", str(error))
    except Unreadable as error:
        return _nothing("unreadable", str(error))
    raw = {name[: -len(ENDING)]: _json(source, posixpath.join(at, name)) for name in names if name.endswith(ENDING)}
    files = {name[len(PREFIX) : -len(ENDING)]: _json(source, posixpath.join(folder, name)) for name in specified}
    # What was read a moment before may be gone: the driver works meanwhile.
    return {
        "state": "ok",
        "problem": "",
        "records": [_record(uid, found) for uid, found in raw.items() if found is not None],
        "specifications": [
            _specification(uid, found, raw.get(uid)) for uid, found in files.items() if found is not None
        ],
    }


def _nothing(state: str, problem: str) -> PreparedClaims:
    return {"state": state, "problem": problem, "records": [], "specifications": []}


def _json(source: KubeletSource, path: str) -> t.Any:
    """Return a file's JSON; None where the file is gone, and a text where it can't be read."""
    try:
        return json.loads(source.file(path))
    except Missing:
        return None
    except (Unreadable, ValueError, RecursionError) as error:
        return f"{path} can't be read: {' '.join(str(error).split())[:200]}"


def _record(uid: str, found: t.Any) -> RecordedClaim:
    about: RecordedClaim = {"uid": uid, "namespace": "", "name": "", "shares": [], "problem": ""}
    try:
        if isinstance(found, str):
            raise ValueError(found)
        claim = found["claim"]
        if claim["uid"] != uid:
            raise ValueError(f"the record {uid} is of claim {claim['uid']}")
        return {
            **about,
            "namespace": str(claim["namespace"]),
            "name": str(claim["name"]),
            "shares": [
                {
                    "request": str(one["request"]),
                    "device": str(one["device"]),
                    "share": str(one["share"]),
                    "mib": int(one["mib"]),
                }
                for one in claim["shares"]
            ],
        }
    except MALFORMED as error:
        return {**about, "problem": str(error)[:300] or "it is malformed"}


def _specification(uid: str, found: t.Any, record: t.Any) -> SpecifiedClaim:
    about: SpecifiedClaim = {"uid": uid, "envs": [], "recorded": False, "problem": ""}
    try:
        if isinstance(found, str):
            raise ValueError(found)
        variables = [_variables(one) for one in found["devices"]]
        recorded = isinstance(record, dict) and record.get("specification") == found
        return {**about, "envs": variables, "recorded": recorded}
    except MALFORMED as error:
        return {**about, "problem": str(error)[:300] or "it is malformed"}


def _variables(device: JsonObject) -> dict[str, str]:
    found = {}
    for one in device["containerEdits"]["env"]:
        name, _equals, value = one.partition("=")
        found[name] = value
    return found
