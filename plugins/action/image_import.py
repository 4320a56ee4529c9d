# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._images import image_archive as images_archive
from ansible_collections.kubegpu.share.plugins.module_utils._images.import_archive import ARGUMENTS, make_plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction


def _identity(params: JsonObject) -> str:
    """Return what identifies the image's content.

    :raises BadInput: the archive isn't the expected one.
    """
    if params["archive_sha256"]:
        images_archive.sha256_of(params["archive"], params["archive_sha256"])
    return str(params["sha256"] or images_archive.sha256(params["archive"]))


class ActionModule(ShareAction):
    """Copies an image archive to a node only if the node's container runtime lacks its image."""

    arguments = ARGUMENTS

    def predict(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject | None:
        observed = params["observed"] or {}
        if "images" not in observed:
            return None
        plan = make_plan(params["reference"], _identity(params), observed["images"] or {})
        return {"changed": not plan.empty, "diff": plan.diff()}

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        archive, reference = params["archive"], params["reference"]
        sha256 = _identity(params)
        images = (params["observed"] or {}).get("images") or {}
        plan = make_plan(reference, sha256, images)
        if plan.empty:
            return {"changed": False, "diff": []}
        arguments = {"reference": reference, "archive": archive, "sha256": sha256}
        if reference not in images:
            # The observation may be one that was made without this image.
            predicted = self.execute_module(arguments, task_vars)
            if predicted.get("failed") or not predicted.get("changed"):
                return predicted
            plan = make_plan(reference, sha256, {})
        # In check mode, one that is identified otherwise may be one that the run would build first.
        if not (self._task.check_mode and params["sha256"]):
            images_archive.require(archive, reference)
        if self._task.check_mode:
            return {"changed": True, "diff": plan.diff()}
        return self.execute_with_files(
            [archive], lambda _folder, copies: {**arguments, "remote_path": copies[0]}, task_vars
        )
