# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Have a chart's archive on the controller with the expected digest, before helm reads it: module ``helm_chart``."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from .._host.system import System
from .._images.archives import digest_of

PINNED = "pinned"
SHA256 = re.compile(r"[0-9a-f]{64}")
# Seconds.
PULL_TIMEOUT = 300

ARGUMENTS: JsonObject = {
    "chart": {"type": "str", "required": True},
    "repository": {"type": "str", "default": ""},
    "version": {"type": "str", "default": ""},
    "sha256": {"type": "str", "default": PINNED},
    "pins": {"type": "dict", "default": {}},
    "variable": {"type": "str", "default": "sha256"},
    "helm": {"type": "str", "default": "helm"},
    "folder": {"type": "path", "default": "~/.cache/kubegpu-share/charts"},
}


def is_local(chart: str) -> bool:
    """Return whether a chart's name is a path of the controller."""
    return chart.startswith(("/", ".", "~")) or (chart.endswith(".tgz") and "://" not in chart)


def expected_digest(params: JsonObject) -> str:
    """Return the SHA-256 that the archive must have; empty where the user wants none, or names a path of his own.

    :raises BadInput: the option isn't a digest, or the table has none for this chart and version.
    """
    wanted, variable = params["sha256"].lower(), params["variable"]
    if wanted == PINNED:
        if is_local(params["chart"]):
            return ""
        name, version = params["chart"].rpartition("/")[2], params["version"]
        pin = params["pins"].get(name) or {}
        if not pin or version.removeprefix("v") != pin["version"].removeprefix("v") or not pin["sha256"]:
            known = f"only of {pin['version']}" if pin.get("sha256") else "none"
            raise BadInput(
                f"{variable} is {PINNED}, and the collection has no digest of chart {name} "
                f"{version or 'without a version'} ({known}): set {variable} to the SHA-256 of the chart's archive, or "
                "to an empty text to take any",
                code="chart_not_pinned",
                chart=name,
                version=version,
            )
        return t.cast(str, pin["sha256"])
    if wanted and not SHA256.fullmatch(wanted):
        raise BadInput(f"{variable} is {params['sha256']!r}, which is neither a SHA-256, nor {PINNED}, nor empty")
    return t.cast(str, wanted)


def ensure(system: System, params: JsonObject) -> JsonObject:
    """Return the chart as helm has to be given it: ``path``, ``repository`` and the verified ``sha256``.

    An archive with the expected digest is kept in the user's cache, so that helm needs no repository for it again.

    :raises BadInput: there is no digest to expect, or the archive has another one.
    :raises ShareError: helm can't download it.
    """
    chart, want = params["chart"], expected_digest(params)
    if is_local(chart):
        if want:
            _compare(params, chart, digest_of(chart), want)
        return _result(chart, "", want)
    if not want:
        return _result(chart, "" if "/" in chart else params["repository"], "")
    name = chart.rpartition("/")[2]
    kept = posixpath.join(params["folder"], f"{name}-{want}.tgz")
    if digest_of(kept) == want:
        return _result(kept, "", want)
    made = system.run(["mktemp", "-d", "-t", "kubegpu-chart-XXXXXXXX"])
    if made.rc != 0:
        raise ShareError(f"no temporary folder can be made: {made.err.strip()}")
    folder = made.out.strip()
    try:
        _pull(system, params, folder)
        archives = [name for name in system.names(folder) if name.endswith(".tgz")]
        if len(archives) != 1:
            raise ShareError(f"helm pull {chart} made {len(archives)} archives")
        archive = posixpath.join(folder, archives[0])
        _compare(params, params["repository"] if "/" not in chart else chart, digest_of(archive), want)
        system.run(["mkdir", "-p", params["folder"]])
        # On another file system mv copies: a copy that is cut short has another digest, and is fetched again.
        moved = system.run(["mv", "-f", archive, kept])
        if moved.rc != 0 or digest_of(kept) != want:
            raise ShareError(f"{kept} can't be written: {moved.err.strip()}")
    finally:
        system.run(["rm", "-rf", folder])
    return _result(kept, "", want)


def _result(path: str, repository: str, sha256: str) -> JsonObject:
    return {"changed": False, "path": path, "repository": repository, "sha256": sha256}


def _pull(system: System, params: JsonObject, folder: str) -> None:
    repository = [] if "/" in params["chart"] else ["--repo", params["repository"]]
    version = ["--version", params["version"]] if params["version"] else []
    command = [params["helm"], "pull", params["chart"], *repository, *version, "--destination", folder]
    done = system.run(command, timeout=PULL_TIMEOUT)
    if done.rc != 0:
        lines = [line.strip() for line in (done.err or done.out).splitlines() if line.strip()]
        raise ShareError(f"helm can't download chart {params['chart']} {params['version']}: {' | '.join(lines[-3:])}")


def _compare(params: JsonObject, origin: str, found: str | None, want: str) -> None:
    if found == want:
        return
    name = f"{params['chart'].rpartition('/')[2]} {params['version']}".strip()
    if found is None:
        raise BadInput(f"{params['variable']}: {origin} isn't a chart's archive, which alone has a SHA-256")
    raise BadInput(
        f"{params['variable']}: the archive of chart {name} ({origin}) has SHA-256 {found}, and {want} is expected: it "
        f"isn't deployed; where the chart's owner announces this archive, set {params['variable']} to its SHA-256, and "
        "otherwise don't use this repository",
        code="chart_refused",
        chart=name,
        origin=origin,
        expected=want,
        found=found,
    )
