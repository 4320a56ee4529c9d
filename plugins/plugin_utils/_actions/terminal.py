# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What actions and callbacks of this collection print themselves; nothing else calls Ansible's display."""

from __future__ import annotations

import typing as t

from ...module_utils._core.untrusted import lines


class Display(t.Protocol):
    """Ansible's."""

    columns: int

    def display(self, msg: str, color: str | None = None, stderr: bool = False) -> None: ...


def show(display: Display, text: str, color: str | None = None, stderr: bool = False) -> None:
    """Print a text, which may contain what a cluster or a node says, without what controls a terminal.

    A task's process hands it to that of ansible-playbook. ``display`` does the same, but a callback may have wrapped
    it: ansible-runner's, before 2.4.2, writes to standard output in each process, of which Ansible warns.
    """
    clean, queue = lines(text), getattr(display, "_final_q", None)
    if queue is None:
        display.display(clean, color=color, stderr=stderr)
    else:
        queue.send_display("display", clean, color=color, stderr=stderr)
