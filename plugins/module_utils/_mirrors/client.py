# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a machine gets to use a partial mirror behind HTTP: an entry of ``pinned_packages``, and its file. Pure."""

from __future__ import annotations

from .._core.types import JsonObject
from .._packages.apt import AptPlanner
from .._packages.options import ARGUMENTS, package_set
from .._packages.paths import INSIDE, MANAGERS
from .._packages.rpm import RpmPlanner
from .types import APT, MirroredRepository


def option(repository: MirroredRepository, base: str) -> JsonObject:
    """Return an entry of the option ``repositories`` of ``pinned_packages``.

    :param base: where the archive's folder is served, such as ``http://10.0.0.5:8080``.
    """
    folder = f"{base.rstrip('/')}/{repository['path']}/"
    entry: JsonObject = {
        "name": f"{INSIDE}{repository['name']}",
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
