# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Import an image archive on the node into containerd's image store; the module ``image_import``."""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.errors import BadInput, NotInEffect
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._host.system import System
from . import names
from .names import images_command, observe

IMPORT_SECONDS = 600

ARGUMENTS: JsonObject = {
    "reference": {"type": "str", "required": True},
    "archive": {"type": "path", "required": True},
    "sha256": {"type": "str"},
    "archive_sha256": {"type": "str"},
    "remote_path": {"type": "path"},
    "observed": {"type": "dict"},
}


def ensure(params: JsonObject, check: bool, system: System) -> JsonObject:
    """Import the archive that the action plugin has copied; without a copy only predict the change."""
    if not params["sha256"]:
        raise BadInput("sha256: the module runs only through its action plugin, which sets this option")
    reconciler = ImageImport(system, params["reference"], params["remote_path"] or "", params["sha256"])
    return run(reconciler, check or not params["remote_path"])


def make_plan(reference: str, sha256: str, present: t.Mapping[str, str]) -> Plan:
    """Plan the import, unless the store has the image from the same archive.

    :param present: the SHA-256 of each image's archive by reference; empty if unknown.
    """
    if present.get(reference) == sha256:
        return Plan()
    before = f"archive: {present[reference] or 'another'}\n" if reference in present else ""
    return Plan((Change(f"image {reference}", before, f"archive: {sha256}\n"),))


@dataclasses.dataclass(frozen=True)
class ImageImport:
    """The ``Reconciler`` of one image in containerd's store.

    :param archive: the archive's path on the node.
    """

    system: System
    reference: str
    archive: str
    sha256: str

    def observe(self) -> dict[str, str]:
        return observe(self.system, [self.reference])

    def plan(self, state: dict[str, str]) -> Plan:
        return make_plan(self.reference, self.sha256, state)

    def apply(self, state: dict[str, str], plan: Plan) -> None:
        ctr = images_command(self.system)
        name = names.full_reference(self.reference)
        done = self.system.run([*ctr, "import", self.archive], timeout=IMPORT_SECONDS)
        if done.rc != 0:
            raise NotInEffect(f"containerd didn't import {self.reference}: {_last_lines(done.err or done.out)}")
        if self.reference not in self.observe():
            raise BadInput(f"image_archive: it doesn't contain the image {name}")
        # Last, because the label marks a complete import.
        labels = [f"{names.PINNED_LABEL}=pinned", f"{names.ARCHIVE_LABEL}={self.sha256}"]
        done = self.system.run([*ctr, "label", name, *labels])
        if done.rc != 0:
            raise NotInEffect(f"image {name} was imported but can't be labelled: {_last_lines(done.err)}")


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])
