# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The partial repositories of an archive: which machines take which of them, and what a machine is told of it."""

from __future__ import annotations

import typing as t

from ...module_utils._core.types import JsonObject
from ...module_utils._mirrors.client import option
from ...module_utils._mirrors.types import DISTRIBUTION, TOOLKIT, MirroredRepository
from .archive import Entry


def folders(entries: t.Sequence[Entry], rows: t.Sequence[MirroredRepository]) -> dict[tuple[str, str], str]:
    """Return the folder of the repository that a machine takes a role's packages from, by host and variable.

    Of one repository the archive may have a part for each distribution; a machine takes that of its own release.
    """
    packages = [entry for entry in entries if entry["id"].startswith("packages/")]
    # The toolkit's rows are of a package manager, and the others of a release.
    parts = [(entry["id"].split("/"), entry["hosts"]) for entry in packages]
    releases = {host: row[2] for row, hosts in parts if len(row) > 2 and row[1] != TOOLKIT for host in hosts}
    found: dict[tuple[str, str], str] = {}
    for entry in packages:
        if not entry["variables"]:
            continue
        role = entry["id"].split("/")[1]
        those = [
            row
            for row in rows
            if (row["manager"], row["role"]) == (entry["kind"], role)
            and row["address"].rstrip("/") == entry["source"].rstrip("/")
        ]
        for host in entry["hosts"]:
            own = [row for row in those if _is_for(row, releases.get(host, ""))]
            paths = [row["path"] for row in own or those]
            found[host, entry["variables"][0]] = f"{paths[0] if paths else entry['path']}/"
    return found


def _is_for(row: MirroredRepository, release: str) -> bool:
    """Return whether a repository is for machines of a row of packages, such as debian_12, or redhat_9 for Rocky 9."""
    name, _line, major = release.partition("_")
    return row["release"].partition(".")[0] == major and name in (row["distribution"], "redhat", "suse")


def machine_of(row: MirroredRepository) -> str:
    """Return distribution, release and architecture as one word: ``debian-12-amd64``."""
    return "-".join((row["distribution"], row["release"], row["architecture"]))


def sources(rows: t.Sequence[MirroredRepository], url: str) -> dict[str, list[JsonObject]]:
    """Return what ``pinned_packages`` is told of the distributions' repositories, by ``machine_of``.

    :param url: of the folder that is served.
    """
    found: dict[str, list[JsonObject]] = {}
    for row in rows:
        if row["role"] == DISTRIBUTION:
            found.setdefault(machine_of(row), []).append(option(row, url))
    return found
