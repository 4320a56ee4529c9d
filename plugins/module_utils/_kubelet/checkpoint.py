# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What kubelet and the DRA driver have recorded on this node: devices of containers, prepared claims. No I/O.

The file is internal to kubelet: a form other than that of Kubernetes 1.10 to 1.36 is reported as "unknown". Entries of
finished pods stay until the next allocation, so readers must intersect them with the pods of the API. Source:
kubernetes/kubernetes v1.36.0, pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go.

``Checksum`` isn't verified: it is a hash of Go's printed form of the structure, which includes names of Go types and
has changed with them.

The driver writes a claim's record first, then its specification, and removes them in the other order
(``gpushare.dra.records`` and ``specifications`` of the servers' image).
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import typing as t

from .._contracts.claim_templates import DRIVER
from .._contracts.protobuf import decode_fields, decode_string, decode_string_map
from .._core.types import JsonObject
from .source import KubeletSource, Missing, Unreadable
from .types import Checkpoint, Entry, PreparedClaims, RecordedClaim, SpecifiedClaim, no_checkpoint

# Variables that state a container's GPUs. A device plugin may set others, which may be confidential.
ENVS = ("NVIDIA_", "ALIYUN_COM_GPU_MEM_", "CUDA_DEVICE_", "CUDA_MPS_")
ENV_NAMES = frozenset(("CGPU_DISABLE", "CUDA_DISABLE_CONTROL", "CUDA_OVERSUBSCRIBE"))

# -1: no node. The others are the kernel's numbers.
NUMA_NODE = re.compile(r"-?[0-9]{1,19}")


class InvalidJson(ValueError):
    """The text isn't JSON as kubelet writes it; the message is one clause."""


class UnknownForm(Exception):
    """The text is JSON of an unknown form; the message is one clause."""


def parse_checkpoint(raw: bytes, resources: t.Sequence[str]) -> Checkpoint:
    """Parse the checkpoint; never raises.

    :param raw: the whole file.
    :param resources: prefixes of the resource names to return; all others are dropped.
    :returns: ``state`` is ``ok``, ``unreadable`` (no JSON, or truncated) or ``unknown`` (another form).
    """
    try:
        return _checkpoint(_parse_json(raw), tuple(resources))
    except InvalidJson as error:
        return no_checkpoint("unreadable", f"kubelet's checkpoint isn't complete JSON: {error}")
    except UnknownForm as error:
        return no_checkpoint("unknown", f"kubelet's checkpoint has an unknown form: {error}")


def _parse_json(raw: bytes) -> t.Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except InvalidJson:
        raise
    except UnicodeDecodeError as error:
        raise InvalidJson(f"byte {error.start} isn't UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"{error.msg} at character {error.pos} of {len(error.doc)}") from None
    except (ValueError, RecursionError):
        # A number of thousands of digits, or thousands of brackets.
        raise InvalidJson("a number is too long, or it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, t.Any]]) -> JsonObject:
    members: JsonObject = {}
    for name, value in pairs:
        if name in members:
            raise InvalidJson(f"an object has the key {name[:80]!r} twice")
        members[name] = value
    return members


def _refuse_constant(constant: str) -> t.NoReturn:
    raise InvalidJson(f"{constant} is no number")


def _checkpoint(document: t.Any, resources: tuple[str, ...]) -> Checkpoint:
    document = _object(document, "it")
    data = _object(document.get("Data"), "Data")
    if any(name.lower() in ("version", "apiversion") for where in (document, data) for name in where):
        raise UnknownForm("it has a version")
    if "PodDeviceEntries" not in data:
        raise UnknownForm("Data has no PodDeviceEntries")
    checksum = document.get("Checksum")
    if not isinstance(checksum, int) or isinstance(checksum, bool):
        raise UnknownForm("it has no Checksum")
    rows = (_entry(row, resources) for row in _list(data["PodDeviceEntries"], "PodDeviceEntries"))
    entries = [row for row in rows if row is not None]
    if len(set(map(_key, entries))) != len(entries):
        raise UnknownForm("two entries have the same container and resource")
    registered = _object(data.get("RegisteredDevices"), "RegisteredDevices")
    return {
        "state": "ok",
        "problem": "",
        "entries": sorted(entries, key=_key),
        "registered": {
            _string(name, "a resource's name"): _strings(ids, "RegisteredDevices")
            for name, ids in sorted(registered.items())
            if name.startswith(resources)
        },
    }


def _key(entry: Entry) -> tuple[str, str, str]:
    return entry["pod_uid"], entry["container"], entry["resource"]


def _entry(value: t.Any, resources: tuple[str, ...]) -> Entry | None:
    """Parse one entry; None if it is of another resource."""
    raw = _object(value, "an entry")
    resource = _string(raw.get("ResourceName"), "ResourceName")
    if not resource.startswith(resources):
        return None
    ids = _ids(raw.get("DeviceIDs"))
    entry: Entry = {
        "pod_uid": _string(raw.get("PodUID"), "PodUID"),
        "container": _string(raw.get("ContainerName"), "ContainerName"),
        "resource": resource,
        "ids": ids,
        "count": len(ids),
        "envs": None,
        "cdi_devices": [],
        "devices": [],
        "annotations": {},
        "problem": "",
    }
    try:
        _add_response(entry, raw.get("AllocResp"))
    except (UnknownForm, ValueError) as error:
        entry["problem"] = f"the device plugin's response (AllocResp) can't be decoded: {error}"
    return entry


def _ids(value: t.Any) -> list[str]:
    """Read DeviceIDs: a list before Kubernetes 1.20, lists by NUMA node since.

    A device of several nodes is listed with each of them.
    """
    if isinstance(value, list):
        return list(dict.fromkeys(_strings(value, "DeviceIDs")))
    by_node = _object(value, "DeviceIDs")
    if not all(NUMA_NODE.fullmatch(number) for number in by_node):
        raise UnknownForm("DeviceIDs aren't by NUMA node")
    nodes = sorted(by_node, key=int)
    return list(dict.fromkeys(device for node in nodes for device in _strings(by_node[node], "DeviceIDs")))


def _add_response(entry: Entry, value: t.Any) -> None:
    """Decode the base64 of a ContainerAllocateResponse (k8s.io/kubelet, pkg/apis/deviceplugin/v1beta1)."""
    # Go writes null for no bytes, which is an empty message.
    raw = base64.b64decode(_string("" if value is None else value, "AllocResp"), validate=True)
    # Without mounts (2).
    fields = decode_fields(raw, (1, 3, 4, 5))
    envs = decode_string_map(fields.get(1))
    cdi_devices = [decode_string(decode_fields(message, (1,)).get(1)) for message in fields.get(5, [])]
    # DeviceSpec: path in the container (1), on the host (2), permissions (3).
    devices = [decode_string(decode_fields(message, (2,)).get(2)) for message in fields.get(3, [])]
    annotations = decode_string_map(fields.get(4))
    # Only now: a response is decoded as a whole or not at all.
    entry["envs"] = {name: envs[name] for name in sorted(envs) if name.startswith(ENVS) or name in ENV_NAMES}
    entry["cdi_devices"], entry["devices"], entry["annotations"] = cdi_devices, devices, annotations


def _object(value: t.Any, name: str) -> JsonObject:
    # Go writes null for a map or a list that was never filled.
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnknownForm(f"{name} is no object")
    return value


def _list(value: t.Any, name: str) -> list[t.Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnknownForm(f"{name} is no list")
    return value


def _string(value: t.Any, name: str) -> str:
    if not isinstance(value, str):
        raise UnknownForm(f"{name} is no string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # One half of a UTF-16 surrogate pair, which JSON can escape and nothing can print.
        raise UnknownForm(f"{name} isn't valid Unicode") from None
    return value


def _strings(values: t.Any, name: str) -> list[str]:
    return [_string(value, name) for value in _list(values, name)]


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
        "records": [_record(uid, content) for uid, content in raw.items() if content is not None],
        "specifications": [
            _specification(uid, content, raw.get(uid)) for uid, content in files.items() if content is not None
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


def _record(uid: str, file: t.Any) -> RecordedClaim:
    about: RecordedClaim = {"uid": uid, "namespace": "", "name": "", "shares": [], "problem": ""}
    try:
        if isinstance(file, str):
            raise ValueError(file)
        claim = file["claim"]
        if claim["uid"] != uid:
            raise ValueError(f"the record {uid} is of claim {claim['uid']}")
        return {
            **about,
            "namespace": str(claim["namespace"]),
            "name": str(claim["name"]),
            "shares": [
                {
                    "request": str(share["request"]),
                    "device": str(share["device"]),
                    "share": str(share["share"]),
                    "mib": int(share["mib"]),
                }
                for share in claim["shares"]
            ],
        }
    except MALFORMED as error:
        return {**about, "problem": str(error)[:300] or "it is malformed"}


def _specification(uid: str, file: t.Any, record: t.Any) -> SpecifiedClaim:
    about: SpecifiedClaim = {"uid": uid, "envs": [], "recorded": False, "problem": ""}
    try:
        if isinstance(file, str):
            raise ValueError(file)
        variables = [_variables(device) for device in file["devices"]]
        recorded = isinstance(record, dict) and record.get("specification") == file
        return {**about, "envs": variables, "recorded": recorded}
    except MALFORMED as error:
        return {**about, "problem": str(error)[:300] or "it is malformed"}


def _variables(device: JsonObject) -> dict[str, str]:
    pairs = (text.partition("=") for text in device["containerEdits"]["env"])
    return {name: value for name, _equals, value in pairs}
