# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The order and formats of containerd's configuration files."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject
from . import containerd
from .containerd import CRI_PLUGIN

# The newest format that a release reads.
NEWEST_FORMAT = (((2, 3), 4), ((2, 0), 3), ((0, 0), 2))
# Before it an imported file's plugin replaces the same plugin of the files before it.
DEEP_MERGE_SINCE = (2, 0)
# Before it containerd merges all files first, and reads the result in one format.
EACH_FILE_ITS_FORMAT = (2, 3)


def newest_format(release: tuple[int, int]) -> int:
    """Return the newest configuration format that a release reads."""
    return next(number for since, number in NEWEST_FORMAT if release >= since)


def reads_one_format(release: tuple[int, int]) -> bool:
    """Return whether a release merges all files deeply, and migrates the result from one format."""
    return DEEP_MERGE_SINCE <= release < EACH_FILE_ITS_FORMAT


def own_format(tree: JsonObject) -> int:
    """Return the version that a file names; 0 for none, which means 1."""
    version = tree.get("version", 0)
    # To Python, true and false are numbers.
    return version if isinstance(version, int) and not isinstance(version, bool) else 0


def merged_format(release: tuple[int, int], trees: t.Iterable[JsonObject]) -> int:
    """Return the format in which a release reads the files that it has merged: that of the last one that names any.

    2.0 and newer rename the plugins of a file of version 1 while they load it, so that it names none. A file that is
    added in this format changes nothing in how the others are read.

    :param trees: the files in the order in which they are merged.
    """
    lowest, default = (2, 3) if release >= DEEP_MERGE_SINCE else (1, 1)
    named = [number for tree in trees if (number := own_format(tree)) >= lowest]
    return named[-1] if named else default


def cri_sections(release: tuple[int, int], trees: t.Mapping[str, JsonObject]) -> list[tuple[str, str]]:
    """Return the files' tables of the CRI plugin that count, by path and the plugin's name; the later one wins.

    :param trees: the files in the order in which they are merged.
    """
    merged = merged_format(release, trees.values())
    sections = []
    for path, tree in trees.items():
        own = own_format(tree)
        if release < DEEP_MERGE_SINCE:
            names = [CRI_PLUGIN[merged]]
        else:
            # A file of the newest format isn't migrated, and neither are tables under older names in it.
            old = (merged if reads_one_format(release) else own) < newest_format(release)
            names = [*([CRI_PLUGIN[1]] if old and own < 2 else []), *([CRI_PLUGIN[2]] if old else []), CRI_PLUGIN[3]]
        plugins = tree.get("plugins")
        sections += [
            (path, name) for name in names if isinstance(plugins, dict) and isinstance(plugins.get(name), dict)
        ]
    if release < DEEP_MERGE_SINCE:
        return sections[-1:]
    # Where all files are migrated together, a setting under the new name wins wherever it is.
    return sorted(sections, key=lambda section: section[1] == CRI_PLUGIN[3]) if reads_one_format(release) else sections


class Loaded(t.NamedTuple):
    """The files of a configuration.

    :param order: in which containerd merges them; the later one wins.
    :param missing: the importing file and the path of each import without a wildcard that doesn't exist: containerd
        doesn't start with them, and since 2.0 its dump doesn't report them.
    """

    order: list[str]
    missing: list[tuple[str, str]]


def loaded(main: str, texts: t.Mapping[str, str]) -> Loaded:
    """Follow a configuration's imports."""

    def names(folder: str) -> list[str]:
        start = folder.rstrip("/") + "/"
        return list({path[len(start) :].partition("/")[0] for path in texts if path.startswith(start)})

    order: list[str] = []
    missing: list[tuple[str, str]] = []
    pending = [main]
    while pending:
        path = pending.pop(0)
        if path in order or path not in texts:
            continue
        order.append(path)
        for pattern in containerd.imports_of(texts[path]):
            paths = containerd.resolve(path, [pattern], names)
            missing += [(path, imported) for imported in paths if "*" not in pattern and imported not in texts]
            pending += paths
    return Loaded(order, missing)
