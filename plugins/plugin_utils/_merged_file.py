# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A configuration or policy file of the user's own with our extender in it, and a note of what it was without. Pure.

The note lies on the machine. It says that our extender is ours where a manifest that was written anew doesn't any more,
and gives back what it took the place of.
"""

from __future__ import annotations

import dataclasses
import json

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import digest
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as config
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_policy as policy


@dataclasses.dataclass(frozen=True)
class Note:
    """What is known of the file that we have changed.

    :param path: the file on the machine.
    :param form: ``config`` or ``policy``.
    :param sha256: of the text that we left; empty where that isn't ``before`` with our extender.
    :param before: the text without our extender.
    """

    path: str
    form: str
    sha256: str
    before: str

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read(text: str | None) -> Note | None:
    """The note, or None where there is none; one that was cut short says nothing."""
    try:
        found = json.loads(text) if text else {}
        return Note(**{name: str(value) for name, value in found.items()})
    except (ValueError, TypeError, AttributeError):
        return None


def put_in(
    path: str, form: str, text: str, minor: int, extender: config.Extender, note: Note | None, ours: bool
) -> tuple[str, Note]:
    """The file with our extender in it, and what is to be noted.

    :param text: what it holds now.
    :param note: what was noted last time.
    :param ours: whether an extender for our resource in it is known to be ours.
    :raises BadInput: it can't be put in.
    """
    if form == "policy":
        after = policy.merged(path, text, extender, minor)
    else:
        after = config.merged(path, text, minor, extender)
    kept = note if note is not None and note.path == path else None
    if kept is None and not ours and not _has(path, form, text, extender):
        return after, Note(path, form, digest(after), text)
    try:
        return after, Note(path, form, digest(after), take_out(path, form, text, extender, kept))
    except BadInput:
        # What was changed there since can't be kept and ours be taken out; who takes it out is told so.
        return after, Note(path, form, "", kept.before if kept is not None else text)


def take_out(path: str, form: str, text: str, extender: config.Extender, note: Note | None) -> str:
    """The file as it would be without us.

    :raises BadInput: it can't be edited.
    """
    if note is not None and note.sha256 == digest(text):
        return note.before
    if form == "policy":
        return policy.undone(path, text, note.before, extender) if note is not None else policy.without(path, text)
    return config.undone(path, text, note.before, extender) if note is not None else config.without(path, text)


def is_ours(path: str, form: str, text: str | None, extender: config.Extender) -> bool:
    """Whether it has an extender that nobody but us can have put in."""
    return text is not None and _has(path, form, text, extender)


def _has(path: str, form: str, text: str, extender: config.Extender) -> bool:
    return policy.has(path, text, extender) if form == "policy" else config.has(path, text, extender)
