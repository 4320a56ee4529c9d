# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a machine gets to use partial mirrors behind HTTP: repositories' entries, files, roles' variables. Pure."""

from __future__ import annotations

import json
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._packages.apt import AptPlanner
from .._packages.options import ARGUMENTS, package_set
from .._packages.paths import MANAGERS
from .._packages.rpm import RpmPlanner
from .types import APT, DISTRIBUTION, DRIVER, TOOLKIT, MirroredRepository

# The role's variables that take the address, the key's address and its SHA-256.
VARIABLES = {
    role: tuple(f"{role}_repo_{name}" for name in ("url", "key_url", "key_sha256", "suites", "components"))
    for role in (DRIVER, TOOLKIT)
}
SOURCES = "airgap_distribution_sources"
# EPEL and the like are among the sources, by names of this collection, which the check for them doesn't know.
PREREQUISITES = "driver_manage_prerequisites"
# What distinguishes machines, as repositories do.
_MACHINE = "gpu_node.distribution.id ~ '/' ~ gpu_node.distribution.version ~ '/' ~ gpu_node.distribution.arch"


def machine_of(repository: MirroredRepository) -> str:
    """Return distribution, release and architecture as one key: ``debian/12/amd64``."""
    return "/".join((repository["distribution"], repository["release"], repository["architecture"]))


def option(repository: MirroredRepository, base: str) -> JsonObject:
    """Return an entry of the option ``repositories`` of ``pinned_packages``.

    :param base: where the archive's folder is served, such as ``http://10.0.0.5:8080``.
    """
    folder = f"{base.rstrip('/')}/{repository['path']}/"
    entry: JsonObject = {
        "name": repository["name"],
        "url": folder,
        "key_url": folder + repository["key"]["path"],
        "key_sha256": repository["key"]["sha256"],
    }
    if repository["manager"] == APT:
        entry.update(suites=list(repository["suites"]), components=list(repository["components"]))
        entry["architectures"] = [repository["architecture"]]
        # Release names lists of other things, too; apt takes none at all where one that it asks for isn't there.
        entry["targets"] = ["Packages"]
    else:
        entry["signed"] = list(repository["signed"])
    return entry


def source_text(repository: MirroredRepository, base: str, manager: str) -> tuple[str, str]:
    """Return path and text of the file that tells a machine's package manager of the mirror.

    :param manager: ``apt``, ``dnf``, ``dnf5`` or ``zypper``.
    """
    fields = {name: row.get("default") for name, row in ARGUMENTS["repositories"]["options"].items()}
    entry = {**fields, **option(repository, base)}
    defaults = {name: row.get("default") for name, row in ARGUMENTS.items()}
    spec = package_set({**defaults, "name": "airgap", "repositories": [entry]})
    planner: AptPlanner | RpmPlanner
    if manager == APT:
        planner = AptPlanner(spec, {"files": {}, "keys": {}, "sources": [], "interrupted": False, "unfinished": []}, {})
    else:
        known = MANAGERS[manager]
        planner = RpmPlanner(
            spec,
            {
                "manager": manager,
                "files": {},
                "keys": {},
                "imported": [],
                "repositories": [],
                "lock_path": known.lock_path,
                "lock_plugin": "",
                "locks": [],
                "streams": {},
                "duplicates": [],
            },
            {},
        )
    planner.validate()
    wanted = spec.repositories[0]
    return planner.repository_path(wanted), planner.repository_text(wanted)


def variables(repositories: t.Sequence[MirroredRepository], base: str) -> JsonObject:
    """Return the roles' variables with which machines take everything from the mirrors.

    A value that differs between the distributions of the machines is a template that asks ``gpu_node``.

    :param base: where the archive's folder is served.
    :raises BadInput: two mirrors of one role are for the same machines.
    """
    found: dict[str, dict[str, t.Any]] = {}
    for repository in repositories:
        machine, entry = machine_of(repository), option(repository, base)
        if repository["role"] == DISTRIBUTION:
            found.setdefault(SOURCES, {}).setdefault(machine, []).append(entry)
            if repository["manager"] != APT:
                found.setdefault(PREREQUISITES, {})[machine] = "ignore"
            continue
        for variable in VARIABLES[repository["role"]]:
            field = variable.partition("_repo_")[2]
            if field not in entry:
                continue
            values = found.setdefault(variable, {})
            if machine in values:
                raise BadInput(f"{variable}: two mirrors have the {repository['role']} for {machine}")
            values[machine] = entry[field]
    machines = {machine_of(repository) for repository in repositories}
    return {name: _chosen(values, machines, _DEFAULTS.get(name, "")) for name, values in sorted(found.items())}


_DEFAULTS: t.Mapping[str, t.Any] = {
    SOURCES: [],
    PREREQUISITES: "report",
    **{f"{role}_repo_suites": ["/"] for role in VARIABLES},
    **{f"{role}_repo_components": [] for role in VARIABLES},
    **{f"{role}_repo_key_sha256": "pinned" for role in VARIABLES},
}


def _chosen(values: t.Mapping[str, t.Any], machines: t.Collection[str], default: t.Any) -> t.Any:
    """Return the value that all machines have, or a template that chooses by the machine."""
    every = [values.get(machine, default) for machine in sorted(machines)]
    if all(value == every[0] for value in every):
        return every[0]
    table = json.dumps({machine: values[machine] for machine in sorted(values)})
    return f"{{{{ ({table}).get({_MACHINE}, {json.dumps(default)}) }}}}"
