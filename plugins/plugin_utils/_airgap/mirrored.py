# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The partial package repositories that an archive has, as their descriptions say."""

from __future__ import annotations

import json
import re
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._mirrors.types import DESCRIPTION, FOLDER, MirroredRepository, repository
from . import archive

_PATH = re.compile(rf"({FOLDER}/(?:apt|rpm)/[^/]+)/{re.escape(DESCRIPTION)}")


def repositories(folder: str, sums: t.Mapping[str, str]) -> list[MirroredRepository]:
    """Return the descriptions of the repositories in an archive's folder, by their paths.

    :param sums: SHA-256 of each file of the archive by its path, as ``archive.read`` has compared it.
    :raises BadInput: a description isn't one, has another content than its digest says, is of another folder, or names
        a file that the archive hasn't.
    """
    found = []
    for path in sorted(sums):
        match = _PATH.fullmatch(path)
        if not match:
            continue
        where = f"{folder}/{path}"
        try:
            content = json.loads(archive.compared(folder, path, sums))
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where} isn't the description of a package repository: {error}") from error
        one = repository(content, where)
        if one["path"] != match.group(1):
            raise BadInput(f"{where} describes {one['path']}")
        for row in (one["key"], *one["metadata"], *one["packages"]):
            if sums.get(f"{one['path']}/{row['path']}") != row["sha256"]:
                raise BadInput(f"{where} names {row['path']}, which the archive hasn't, or has with another content")
        found.append(one)
    return found
