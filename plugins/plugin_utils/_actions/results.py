# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results of actions with printable texts: Ansible prints messages as they are, and roles put other texts into them."""

from __future__ import annotations

import typing as t

from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import Line, line, lines

# The texts of files in results: a user's bytes, which are compared and edited. Ansible shows them as JSON, with -v.
FILES = frozenset(
    (
        *("text", "files", "dump", "drop_in", "record", "toolkit_config", "refresh_env"),
        *("manifest", "others", "config", "policy", "ours", "ours_policy", "merged", "patches"),
    )
)
# What callbacks of ansible-core print as it is, without JSON. A line break would begin a line like theirs.
_SENTENCES = frozenset(("msg", "warnings", "deprecations"))
_LONGEST_SENTENCE = 64 * 1024


def clean_result(result: t.Mapping[str, t.Any]) -> JsonObject:
    """Return the result of a module or an action with printable texts, except for those of ``FILES``.

    Whoever took a node chooses what a module returns there.
    """
    found: JsonObject = {}
    for key, value in result.items():
        if key in _SENTENCES:
            found[key] = _clean(value, (), _sentence)
        else:
            # --diff prints the texts of files, too.
            found[_clean(key, (), line)] = _clean(value, () if key == "diff" else FILES, lines)
    return found


def _sentence(text: str) -> Line:
    return line(text, _LONGEST_SENTENCE)


def _clean(value: t.Any, raw: t.Collection[str], clean: t.Callable[[str], str]) -> t.Any:
    """Return a value with printable texts; the same object where all of them are.

    :param raw: the keys whose values stay as they are.
    """
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        found = {_clean(key, (), clean): one if key in raw else _clean(one, raw, clean) for key, one in value.items()}
        pairs = zip(value.items(), found.items(), strict=False)
        same = len(value) == len(found) and all(a is b and one is two for (a, one), (b, two) in pairs)
        return value if same else found
    if isinstance(value, (list, tuple)):
        each = [_clean(one, raw, clean) for one in value]
        return value if all(a is b for a, b in zip(value, each, strict=True)) else each
    return value
