# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Role driver's variables, as the filters ``driver_choice`` and ``driver_problems`` get them."""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.types import JsonObject


@dataclasses.dataclass(frozen=True)
class DriverOptions:
    """Role driver's variables without their prefix, and the host's name.

    :ivar tables: the collection's tables by section: ``keys`` (digests), ``nvidia`` and ``distribution`` (what package
        repositories hold).
    """

    host: str = ""
    state: str = "present"
    source: str = "repository"
    version: str = ""
    flavour: str = "auto"
    packages: tuple[str, ...] = ()
    hold: bool = True
    install_headers: str = "auto"
    prerequisites: str = "report"
    fabric_manager: str = "auto"
    repo_url: str = ""
    repo_key_url: str = ""
    repo_key_sha256: str = ""
    repo_suites: tuple[str, ...] = ("/",)
    repo_components: tuple[str, ...] = ()
    packages_dir: str = ""
    runfile: str = ""
    runfile_sha256: str = ""
    maintenance: str = "never"
    in_maintenance: bool = False
    ignore: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    tables: t.Mapping[str, t.Mapping[str, JsonObject]] = dataclasses.field(default_factory=dict)

    @property
    def of_runfile(self) -> bool:
        return self.source == "runfile"


def driver_options(values: JsonObject) -> DriverOptions:
    """Return the options; an empty or missing value means its default."""
    given: JsonObject = {}
    for field in dataclasses.fields(DriverOptions):
        value = values.get(field.name)
        if field.name == "tables":
            given[field.name] = value or {}
        elif isinstance(field.default, bool):
            given[field.name] = field.default if value is None else bool(value)
        elif isinstance(field.default, tuple):
            given[field.name] = tuple(str(one) for one in value or field.default)
        else:
            given[field.name] = str(value or field.default)
    return DriverOptions(**given)
