# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A directory of packages on the controller, for nodes that reach no repository."""

from __future__ import annotations

import os

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject


def packages_in(params: JsonObject, endings: tuple[str, ...]) -> list[str]:
    """Return the package files of ``source_dir``; none where it isn't set or nothing is to be installed.

    :param params: the options of ``pinned_packages``.
    :param endings: of the files' names.
    :raises BadInput: the directory can't be read or contains none.
    """
    folder = params["source_dir"]
    if not folder or params["state"] != "present":
        return []
    if params["node_dir"]:
        raise BadInput("source_dir: node_dir is set too; set only one of them")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise BadInput(f"source_dir: {folder} can't be read on the controller: {error.strerror}") from error
    paths = [os.path.join(folder, name) for name in names if name.endswith(endings)]
    if not paths:
        raise BadInput(f"source_dir: {folder} on the controller contains no {' or '.join(endings)} file")
    return paths
