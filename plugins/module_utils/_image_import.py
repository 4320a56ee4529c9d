# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Bring an image archive, which already lies on the node, into containerd's image store."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _images
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._observe_images import images_command, observe
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan, run
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

IMPORT_SECONDS = 600

ARGUMENTS: dict[str, t.Any] = {
    "reference": {"type": "str", "required": True},
    "archive": {"type": "path", "required": True},
    "sha256": {"type": "str"},
    "remote_path": {"type": "path"},
    "observed": {"type": "dict"},
}


def work(params: dict[str, t.Any], check: bool, system: System) -> dict[str, t.Any]:
    """The module: import the archive that the action plugin brought; without one, only say whether it is needed."""
    if not params["sha256"]:
        raise BadInput("sha256: this module only runs through its action plugin, which computes it")
    concern = ImageImport(system, params["reference"], params["remote_path"] or "", params["sha256"])
    return run(concern, check or not params["remote_path"])


def make_plan(reference: str, sha256: str, present: t.Mapping[str, str]) -> Plan:
    """Import unless the store has this very archive's image under that name.

    :param present: references with the archives they came from.
    """
    if present.get(reference) == sha256:
        return Plan()
    before = f"archive: {present[reference] or 'another'}\n" if reference in present else ""
    return Plan((Change(f"image {reference}", before, f"archive: {sha256}\n"),))


class ImageImport:
    """The concern of one image in containerd's store.

    :param archive: the archive's path on the node.
    """

    def __init__(self, system: System, reference: str, archive: str, sha256: str) -> None:
        self._system = system
        self._reference = reference
        self._archive = archive
        self._sha256 = sha256

    def observe(self) -> dict[str, str]:
        return observe(self._system, [self._reference])

    def plan(self, seen: dict[str, str]) -> Plan:
        return make_plan(self._reference, self._sha256, seen)

    def apply(self, seen: dict[str, str], plan: Plan) -> None:
        ctr = images_command(self._system)
        name = _images.full_reference(self._reference)
        done = self._system.run([*ctr, "import", self._archive], timeout=IMPORT_SECONDS)
        if done.rc != 0:
            raise NotInEffect(f"containerd didn't import {self._reference}: {_words(done.err or done.out)}")
        if self._reference not in self.observe():
            raise BadInput(f"image_archive: it holds no image {name}")
        # Last, for it says that all before it was done.
        labels = [f"{_images.PINNED_LABEL}=pinned", f"{_images.ARCHIVE_LABEL}={self._sha256}"]
        done = self._system.run([*ctr, "label", name, *labels])
        if done.rc != 0:
            raise NotInEffect(f"image {name} is imported and can't be labelled: {_words(done.err)}")


def _words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])
