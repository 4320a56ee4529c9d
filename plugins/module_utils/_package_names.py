# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Names of packages and patterns of them, the same for every package manager. Pure."""

from __future__ import annotations

import fnmatch
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput

Json = t.Dict[str, t.Any]


def matches_any(name: str, patterns: t.Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(params: Json, options: t.Iterable[str]) -> None:
    """Refuse what can't be a pattern of names.

    :raises BadInput: the sentence names the option.
    """
    for option in options:
        for pattern in params[option]:
            if not re.fullmatch(r"[A-Za-z0-9_.+*?\[\]!-]+", pattern):
                raise BadInput(f"{option}: {pattern!r} isn't a pattern of package names")


def refuse_conflicts(
    conflicts: t.Iterable[str], own: t.Container[str], installed: t.Mapping[str, Json], remove: str
) -> None:
    """Refuse where packages are installed that can't be beside the set.

    :param own: names of the set's packages, which no pattern means.
    :raises BadInput: the sentence ends with the command that removes them.
    """
    patterns = tuple(conflicts)
    found = sorted(name for name in installed if name not in own and matches_any(name, patterns))
    if found:
        told = ", ".join(f"{name} {installed[name]['version']}" for name in found)
        raise BadInput(f"conflicts: {told} can't be beside these packages; to remove: {remove} {' '.join(found)}")


def described(version: str, held: bool) -> str:
    """A package in a diff."""
    return f"{version}, held\n" if held else f"{version}\n"
