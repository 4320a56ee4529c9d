# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A user's configuration or policy file with our extender merged into it, and a note of its text without it. Pure.

The note is kept on the machine. It records that the extender is ours where a regenerated manifest no longer does, and
restores the extender that ours replaced.
"""

from __future__ import annotations

import dataclasses
import json

from ...module_utils._core.digest import digest
from ...module_utils._core.errors import BadInput
from . import config, policy
from .extenders import BESIDE, AnotherBinds
from .form import Extender, Form, FormName

FORMS: dict[str, Form] = {one.name: one for one in (config.FORM, policy.FORM)}


@dataclasses.dataclass(frozen=True)
class Note:
    """The file into which the extender was merged.

    :param path: the file on the machine.
    :param form: ``config`` or ``policy``.
    :param sha256: of the merged text; empty where that isn't ``before`` with our extender.
    :param before: the text without our extender.
    """

    path: str
    form: FormName
    sha256: str
    before: str

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read(text: str | None) -> Note | None:
    """Parse the note; None where there is none, or an incomplete one."""
    try:
        found = json.loads(text) if text else {}
        note = Note(**{name: str(value) for name, value in found.items()})  # type: ignore[arg-type]  # checked below
    except (ValueError, TypeError, AttributeError):
        return None
    return note if note.form in FORMS else None


def put_in(
    path: str, form: FormName, text: str, minor: int, extender: Extender, note: Note | None, ours: bool
) -> tuple[str, Note]:
    """Return the file with our extender in it, and the note.

    :param path: of the file on the machine.
    :param form: ``config`` or ``policy``.
    :param text: its current text.
    :param minor: of kube-scheduler 1.``minor``.
    :param note: of the last run.
    :param ours: whether an extender for our resource in the file is known to be ours.
    :raises BadInput: the extender can't be merged.
    """
    try:
        after = FORMS[form].merged(path, text, minor, extender)
    except AnotherBinds as error:
        raise BadInput(f"{error}; {BESIDE}") from error
    kept = note if note is not None and note.path == path else None
    if kept is None and not ours and not FORMS[form].has(path, text, extender):
        return after, Note(path, form, digest(after), text)
    try:
        return after, Note(path, form, digest(after), take_out(path, form, text, extender, kept))
    except BadInput:
        # The edits since then and the removal of ours exclude each other; the removal reports that.
        return after, Note(path, form, "", kept.before if kept is not None else text)


def take_out(path: str, form: FormName, text: str, extender: Extender, note: Note | None) -> str:
    """Return the file without our extender.

    :param path: of the file, for messages.
    :param form: ``config`` or ``policy``.
    :param text: its current text.
    :param note: of the run that merged the extender; None where there is none.
    :raises BadInput: it can't be edited.
    """
    if note is None:
        return FORMS[form].without(path, text)
    return note.before if note.sha256 == digest(text) else FORMS[form].undone(path, text, note.before, extender)
