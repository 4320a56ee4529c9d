# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._image_import import ARGUMENTS, make_plan
from ansible_collections.kubegpu.share.plugins.plugin_utils import _image_archive
from ansible_collections.kubegpu.share.plugins.plugin_utils._transfer import Transferring

Json = dict[str, t.Any]


class ActionModule(Transferring):
    """Copies an image archive to a node only when the node's runtime lacks what is in it."""

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=ARGUMENTS)
        try:
            result.update(self._work(params, task_vars))
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
        return result

    def _work(self, params: Json, task_vars: Json | None) -> Json:
        archive, reference = params["archive"], params["reference"]
        sha256 = params["sha256"] or _image_archive.sha256(archive)
        images = (params["observed"] or {}).get("images") or {}
        plan = make_plan(reference, sha256, images)
        if plan.empty:
            return {"changed": False, "diff": []}
        arguments = {"reference": reference, "archive": archive, "sha256": sha256}
        if reference not in images:
            # The observation may not have been asked for this image.
            look: Json = self._execute_module(module_args=arguments, task_vars=task_vars)
            if look.get("failed") or not look.get("changed"):
                return look
            plan = make_plan(reference, sha256, {})
        _image_archive.require(archive, reference)
        if self._task.check_mode:
            return {"changed": True, "diff": plan.diff()}
        return self.execute_with_files(
            [archive], lambda _folder, there: {**arguments, "remote_path": there[0]}, task_vars
        )
