# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results of actions with printable texts: Ansible prints messages as they are, and roles put other texts into them."""

from __future__ import annotations

import json
import re
import typing as t

from ansible.module_utils.json_utils import _filter_non_json_lines

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
# Other keys of a result that may have line breaks.
_TEXTS = frozenset(("diff", "table", "wide", "text", "exception", "stdout", "stderr", "module_stdout", "module_stderr"))
_LONGEST_SENTENCE = 64 * 1024
# In JSON, what may stand for a character that isn't printable; most results have none but line breaks in FILES.
_SUSPICIOUS = re.compile(r"\\(?:[bfnr]|u(?!00[2-6b-f]|0[1-57-9a-f]|1[0-79a-f]|2[1-9a-f]|[3-9a-c]))", re.IGNORECASE)


def clean_result(result: t.Mapping[str, t.Any]) -> JsonObject:
    """Return the result of a module or an action with printable texts, except for those of ``FILES``.

    Whoever took a node chooses what a module returns there.
    """
    cleaned: JsonObject = {}
    for key, value in result.items():
        if key in _SENTENCES:
            cleaned[key] = _clean(value, (), _sentence)
        else:
            # --diff prints the texts of files, too.
            cleaned[_value(key)] = _clean(value, (), lines) if key in _TEXTS else _clean(value, FILES, _value)
    return cleaned


def clean_sentences(result: t.Mapping[str, t.Any]) -> JsonObject:
    """Return the result of another collection's module with printable messages; its other values may be anything."""
    return {key: _clean(value, (), _sentence) if key in _SENTENCES else value for key, value in result.items()}


def clean_json(text: str) -> t.Any:
    """Return the data of a text of JSON in a result, with printable texts: the text itself shows escapes only."""
    data = json.loads(text)
    return _clean(data, FILES, _value) if _SUSPICIOUS.search(text) else data


def clean_answer(stdout: str, clean: t.Callable[[t.Mapping[str, t.Any]], JsonObject]) -> str:
    """Return what a module has printed with a clean result.

    Before ansible-core parses it, since that takes the warnings away: a callback gets them beside the result.

    :param clean: of this file.
    """
    text = lines(stdout) if clean is clean_result else stdout
    if text.isascii() and not _SUSPICIOUS.search(text):
        return text
    try:
        result, _warnings = _filter_non_json_lines(text, objects_only=True)
        return text.replace(result, json.dumps(clean(json.loads(result))), 1)
    except (ValueError, RecursionError, AttributeError):
        # It is no result, and ansible-core says so.
        return text


def _value(text: str) -> str:
    """Return a value without line breaks, which would begin a new line in a message or behind a loop's label."""
    clean = lines(text)
    return clean.replace("\n", " ") if "\n" in clean else clean


def _sentence(text: str) -> Line:
    return line(text, _LONGEST_SENTENCE)


def _clean(value: t.Any, raw: t.Collection[str], clean: t.Callable[[str], str]) -> t.Any:
    """Return a value with printable texts; the same object where all of them are.

    :param raw: the keys whose values stay as they are.
    """
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        cleaned = {
            _clean(key, (), clean): item if key in raw else _clean(item, raw, clean) for key, item in value.items()
        }
        pairs = zip(value.items(), cleaned.items(), strict=False)
        same = len(value) == len(cleaned) and all(a is b and c is d for (a, c), (b, d) in pairs)
        return value if same else cleaned
    if isinstance(value, (list, tuple)):
        each = [_clean(item, raw, clean) for item in value]
        same = all(a is b for a, b in zip(value, each, strict=True))
        if same:
            return value
        return tuple(each) if isinstance(value, tuple) else each
    return value
