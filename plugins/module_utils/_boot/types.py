# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shape of the section ``boot`` of ``gpu_node``, and of the record that is kept on a node."""

from __future__ import annotations

import typing as t

from .._host.iommu import Iommu


class Entry(t.TypedDict):
    """The entry that the loader boots next: where it stands, and the arguments that the kernel gets from it.

    ``once``: it is chosen for the next boot only. ``proven`` is False where the file is only what the loader's own
    files are made of, because those aren't mounted.
    """

    id: str
    path: str
    arguments: str
    once: bool
    proven: bool


class RecordedText(t.TypedDict):
    """A file, or a variable of GRUB, before the first change (None: none), and the digest of what it became."""

    before: str | None
    after: str


class Record(t.TypedDict):
    """What this collection has added to the kernel's arguments, and what each file was before."""

    added: list[str]
    files: dict[str, RecordedText]
    kernelopts: RecordedText | None


class BootFacts(t.TypedDict):
    """How a machine boots: the section ``boot``.

    ``loader`` is one of ``loaders.LOADERS``, or empty; then ``refused`` is one of ``loaders.REFUSALS``, and ``found``
    what it is about. ``now`` is /proc/cmdline. ``files`` are those that decide arguments, by path; ``config`` is the
    path of GRUB's menu, ``environment`` that of its variables, and ``kernelopts`` one of these.
    """

    loader: str
    refused: str
    found: list[str]
    firmware: str
    now: str
    next: Entry | None
    files: dict[str, str]
    config: str
    environment: str
    kernelopts: str | None
    record: Record | None
    record_error: str
    pending: bool


class Boot(BootFacts):
    """What the plan reads: how a machine boots, and its IOMMU, which is a section of its own."""

    iommu: Iommu
