# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A folder of packages on the controller, for nodes that no repository reaches."""

from __future__ import annotations

import os
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput


def packages_in(params: dict[str, t.Any], ending: str) -> list[str]:
    """The package files of ``source_dir``; none where it isn't set or nothing is to be installed.

    :raises BadInput: the folder can't be read or holds none.
    """
    folder = params["source_dir"]
    if not folder or params["state"] != "present":
        return []
    if params["node_dir"]:
        raise BadInput("source_dir: node_dir is set too; only one of them names the packages")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise BadInput(f"source_dir: {folder} can't be read on the controller: {error.strerror}") from error
    paths = [os.path.join(folder, name) for name in names if name.endswith(ending)]
    if not paths:
        raise BadInput(f"source_dir: {folder} on the controller holds no {ending} file")
    return paths
