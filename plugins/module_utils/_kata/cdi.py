# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The CDI specification by which Kata's shim takes cards: NVIDIA's sandbox device plugin writes it when it starts.

It is YAML of one Go program with one value per line (tags.cncf.io/container-device-interface, pkg/cdi/spec.go), and
nodes have no YAML library. A device's name is the number of its IOMMU group, or of its device file with IOMMUFD.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._host.system import System

FOLDERS = ("/etc/cdi", "/var/run/cdi")
VENDOR, DEVICES = "nvidia.com/", "/dev/vfio/"
# With IOMMUFD.
CDEVS = "/dev/vfio/devices/"
# Blanks within a line, and few of them: a node writes the file, and with any number of them, over lines' ends, a search
# would take the square of its length.
_BLANKS, _VALUE = "[ ]{0,40}", "[\"']?([^\\s\"']{1,4096})"
_KIND = re.compile(rf"^kind:{_BLANKS}{_VALUE}", re.MULTILINE)
_NAME = re.compile(rf"^(?:- |  ){_BLANKS}(?:- )?name:{_BLANKS}{_VALUE}", re.MULTILINE)
_PATH = re.compile(rf"^{_BLANKS}(?:- )?path:{_BLANKS}{_VALUE}", re.MULTILINE)
# Characters: some hundred of each card.
LARGEST = 1 << 20


@dataclasses.dataclass(frozen=True)
class Spec:
    """A specification.

    :param devices: names of its devices, as often as they are there.
    :param nodes: paths of the device files that it gives.
    """

    path: str
    kind: str
    devices: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def of_plugin(self) -> bool:
        """Whether it gives VFIO's files of NVIDIA's cards alone, as that of the plugin does."""
        return (
            self.kind.startswith(VENDOR) and bool(self.nodes) and all(node.startswith(DEVICES) for node in self.nodes)
        )


def parse(path: str, text: str) -> Spec | None:
    """Return what a file specifies; None where it is none."""
    if path.endswith(".json"):
        return _parse_json(path, text)
    text = text[:LARGEST]
    kind = _KIND.search(text)
    return Spec(path, kind[1], tuple(_NAME.findall(text)), tuple(_PATH.findall(text))) if kind else None


def _parse_json(path: str, text: str) -> Spec | None:
    if len(text) > LARGEST:
        return None
    try:
        fields = json.loads(text)
        devices = fields["devices"]
        nodes = [node for each in devices for node in (each.get("containerEdits") or {}).get("deviceNodes") or ()]
        names = tuple(str(each["name"]) for each in devices)
        return Spec(path, str(fields["kind"]), names, tuple(str(node["path"]) for node in nodes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read(system: System) -> list[Spec]:
    """Return the specifications of a node that give VFIO's files of NVIDIA's cards."""
    found: list[Spec | None] = []
    for folder in FOLDERS:
        for name in system.names(folder):
            if name.endswith((".yaml", ".json")):
                found.append(parse(f"{folder}/{name}", system.read(f"{folder}/{name}") or ""))
    return [spec for spec in found if spec and spec.of_plugin]


def of_kind(specs: t.Iterable[Spec], kind: str) -> list[str]:
    """Return the names of the devices of a kind."""
    return [device for spec in specs if spec.kind == kind for device in spec.devices]
