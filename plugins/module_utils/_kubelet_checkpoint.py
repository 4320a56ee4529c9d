# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""kubelet's checkpoint of devices: which container was given which IDs, and what the device plugin answered. No I/O.

The file is kubelet's own and promised to nobody: what doesn't look as it did in Kubernetes 1.10 to 1.36 is "unknown".
Entries of pods that ended stay until the next allocation, so a reader must intersect them with the pods of the API.

``Checksum`` can't be verified here: it is a hash of how Go prints the structure, names of Go's types included, and has
changed with them.
"""

from __future__ import annotations

import base64
import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_wire import Broken, fields, text, text_map

# Variables that say what a container was given. A device plugin may set others, which are nobody's business.
ENVS = ("NVIDIA_", "ALIYUN_COM_GPU_MEM_", "CUDA_DEVICE_", "CUDA_MPS_")
ENV_NAMES = frozenset(("CGPU_DISABLE", "CUDA_DISABLE_CONTROL", "CUDA_OVERSUBSCRIBE"))

# -1: none. The rest are as the kernel counts them.
NUMA_NODE = re.compile(r"-?[0-9]{1,19}")


class Unreadable(ValueError):
    """The text isn't JSON as kubelet writes it, in one clause."""


class Unknown(Exception):
    """It is JSON, and not of a shape that is known, in one clause."""


def read(raw: bytes, resources: t.Sequence[str]) -> Json:
    """State, problem, entries and registered devices of the checkpoint; never raises.

    :param raw: the whole file.
    :param resources: beginnings of the resource names that are of interest; nothing else is returned.
    :returns: ``state`` is ``ok``, ``unreadable`` (no JSON, or cut short) or ``unknown`` (another shape). Where it isn't
        ``ok`` there are no entries, and that means nothing. An entry whose answer can't be decoded has ``envs`` None
        and its own ``problem``.
    """
    try:
        return _checkpoint(_parsed(raw), tuple(resources))
    except Unreadable as error:
        return state("unreadable", f"kubelet's checkpoint isn't whole JSON: {error}")
    except Unknown as error:
        return state("unknown", f"kubelet's checkpoint has a form that isn't known: {error}")


def state(name: str, problem: str = "") -> Json:
    return {"state": name, "problem": problem, "entries": [], "registered": {}}


def _parsed(raw: bytes) -> t.Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refused)
    except Unreadable:
        raise
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} isn't UTF-8") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"{error.msg} at character {error.pos} of {len(error.doc)}") from None
    except (ValueError, RecursionError):
        # A number of thousands of digits, or thousands of brackets.
        raise Unreadable("a number is too long, or it is nested too deeply") from None


def _once(pairs: list[tuple[str, t.Any]]) -> Json:
    found: Json = {}
    for name, value in pairs:
        if name in found:
            raise Unreadable(f"key {name[:80]!r} stands twice in an object")
        found[name] = value
    return found


def _refused(constant: str) -> t.NoReturn:
    raise Unreadable(f"{constant} is no number")


def _checkpoint(document: t.Any, resources: tuple[str, ...]) -> Json:
    document = _object(document, "it")
    data = _object(document.get("Data"), "Data")
    if any(name.lower() in ("version", "apiversion") for where in (document, data) for name in where):
        raise Unknown("it has a version")
    if "PodDeviceEntries" not in data:
        raise Unknown("Data has no PodDeviceEntries")
    checksum = document.get("Checksum")
    if not isinstance(checksum, int) or isinstance(checksum, bool):
        raise Unknown("it has no Checksum")
    entries = [_entry(one, resources) for one in _list(data["PodDeviceEntries"], "PodDeviceEntries")]
    kept = [one for one in entries if one is not None]
    keys = [(one["pod_uid"], one["container"], one["resource"]) for one in kept]
    if len(set(keys)) != len(keys):
        raise Unknown("two entries are of one container and one resource")
    registered = _object(data.get("RegisteredDevices"), "RegisteredDevices")
    return {
        **state("ok"),
        "entries": sorted(kept, key=lambda one: (one["pod_uid"], one["container"], one["resource"])),
        "registered": {
            _text(name, "the name of a resource"): _texts(ids, "RegisteredDevices")
            for name, ids in sorted(registered.items())
            if name.startswith(resources)
        },
    }


def _entry(found: t.Any, resources: tuple[str, ...]) -> Json | None:
    """One entry, or None where it is of another resource."""
    entry = _object(found, "an entry")
    resource = _text(entry.get("ResourceName"), "ResourceName")
    if not resource.startswith(resources):
        return None
    ids = _ids(entry.get("DeviceIDs"))
    return {
        "pod_uid": _text(entry.get("PodUID"), "PodUID"),
        "container": _text(entry.get("ContainerName"), "ContainerName"),
        "resource": resource,
        "ids": ids,
        "count": len(ids),
        **_answer(entry.get("AllocResp")),
    }


def _ids(found: t.Any) -> list[str]:
    """A list before Kubernetes 1.20, lists by NUMA node since; a device of several nodes stands with each of them."""
    if isinstance(found, list):
        return list(dict.fromkeys(_texts(found, "DeviceIDs")))
    by_node = _object(found, "DeviceIDs")
    if not all(NUMA_NODE.fullmatch(one) for one in by_node):
        raise Unknown("DeviceIDs aren't by NUMA node")
    nodes = sorted(by_node, key=int)
    return list(dict.fromkeys(one for node in nodes for one in _texts(by_node[node], "DeviceIDs")))


def _answer(found: t.Any) -> Json:
    """What the device plugin answered: base64 of a ContainerAllocateResponse (k8s.io/kubelet, deviceplugin/v1beta1)."""
    try:
        # Go writes null for no bytes, which is a message in which nothing is set.
        raw = base64.b64decode(_text("" if found is None else found, "AllocResp"), validate=True)
        # Mounts (2) are left out.
        parts = fields(raw, (1, 3, 4, 5))
        envs = text_map(parts.get(1))
        return {
            "envs": {name: envs[name] for name in sorted(envs) if name.startswith(ENVS) or name in ENV_NAMES},
            "cdi_devices": [text(fields(one, (1,)).get(1)) for one in parts.get(5, [])],
            # DeviceSpec: path in the container (1), on the host (2), permissions (3).
            "devices": [text(fields(one, (2,)).get(2)) for one in parts.get(3, [])],
            "annotations": text_map(parts.get(4)),
            "problem": "",
        }
    except (Broken, Unknown, ValueError) as error:
        why = f"the device plugin's answer (AllocResp) can't be decoded: {error}"
        return {"envs": None, "cdi_devices": [], "devices": [], "annotations": {}, "problem": why}


def _object(found: t.Any, what: str) -> Json:
    # Go writes null for a map or a list that was never filled.
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Unknown(f"{what} is no object")
    return found


def _list(found: t.Any, what: str) -> list[t.Any]:
    if found is None:
        return []
    if not isinstance(found, list):
        raise Unknown(f"{what} is no list")
    return found


def _text(found: t.Any, what: str) -> str:
    if not isinstance(found, str):
        raise Unknown(f"{what} is no text")
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:
        # Half of a pair in UTF-16, which JSON can escape and nothing can print.
        raise Unknown(f"{what} is no text that can be written") from None
    return found


def _texts(found: t.Any, what: str) -> list[str]:
    return [_text(one, what) for one in _list(found, what)]
