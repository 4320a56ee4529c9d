# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The section ``passthrough`` of ``gpu_node``: what the plan reads, as facts and back."""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.errors import ShareError
from .._host.system import System
from .model import RECORD, Function, Image, Record, State, parse_record
from .observe import boot_code, host, observe


class FunctionFacts(t.TypedDict):
    """See ``model.Function``."""

    address: str
    vendor: str
    device: str
    kind: str
    driver: str
    module: str
    override: str
    group: str
    boot_display: bool
    console: bool
    physical: str
    virtual: int
    mdevs: list[str]
    best: str
    nodes: list[str]
    usb: list[str]


class ImageFacts(t.TypedDict):
    """See ``model.Image``."""

    path: str
    release: str
    size: int
    newer: bool
    kept: bool
    inside: bool | None
    lacking: list[str]


class PassthroughFacts(t.TypedDict):
    """NVIDIA's functions with their IOMMU groups, and what role passthrough has written; ``record`` is its text.

    See ``model.State``. ``images`` are listed only where the role has written something.
    """

    functions: list[FunctionFacts]
    uuids: dict[str, str]
    names: dict[str, str]
    persistence: dict[str, bool | None]
    record: str | None
    pending: bool
    files: dict[str, str | None]
    tool: str | None
    images: list[ImageFacts]
    boot_free: int | None
    boot_read_only: bool
    owner: str
    fabric_mode: str
    loadable: list[str]


def facts(system: System) -> PassthroughFacts | None:
    """Return the section; None where the record can't be read, which the module reports."""
    try:
        state = observe(system, host(system), images=False)
    except ShareError:
        return None
    return {
        "functions": [t.cast(FunctionFacts, _row(function)) for function in state.functions.values()],
        "uuids": dict(state.uuids),
        "names": dict(state.names),
        "persistence": dict(state.persistence),
        "record": system.read(RECORD),
        "pending": state.pending,
        "files": dict(state.files),
        "tool": state.tool,
        "images": [t.cast(ImageFacts, _row(image)) for image in state.images],
        "boot_free": state.boot_free,
        "boot_read_only": state.boot_read_only,
        "owner": state.owner,
        "fabric_mode": state.fabric_mode,
        "loadable": sorted(state.loadable),
    }


def _row(observed: Function | Image) -> dict[str, t.Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(observed).items()
    }


def _tuples(row: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def functions_of(seen: PassthroughFacts) -> list[Function]:
    """Return NVIDIA's functions, and the others of their groups."""
    return [Function(**_tuples(row)) for row in seen["functions"]]


def state_of(seen: PassthroughFacts, family: str, container: bool, boot: t.Mapping[str, t.Any]) -> State:
    """Return the machine's state by its facts, without what holds its cards.

    :param boot: the section of ``gpu_node``.

    :raises ShareError: the record can't be read.
    """
    return State(
        family=family,
        container=container,
        functions={function.address: function for function in functions_of(seen)},
        uuids=seen["uuids"],
        names=seen["names"],
        persistence=seen["persistence"],
        record=parse_record(seen["record"]) if seen["record"] is not None else Record(),
        pending=seen["pending"],
        files=seen["files"],
        tool=seen["tool"],
        images=tuple(Image(**_tuples(row)) for row in seen["images"]),
        boot_free=seen["boot_free"],
        boot_read_only=seen["boot_read_only"],
        owner=seen["owner"],
        fabric_mode=seen["fabric_mode"],
        loadable=frozenset(seen["loadable"]),
        boot=boot_code(boot),
    )
