# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import shutil
import tempfile
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._image_build import ARGUMENTS, check
from ansible_collections.kubegpu.share.plugins.plugin_utils._image_sources import packed
from ansible_collections.kubegpu.share.plugins.plugin_utils._transfer import Transferring

Json = dict[str, t.Any]


class ActionModule(Transferring):
    """Brings the image's sources to the machine that builds it, when it has something to build."""

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=ARGUMENTS)
        folder = tempfile.mkdtemp(prefix="kubegpu-")
        try:
            check(params)
            result.update(self._work(params, os.path.join(folder, "sources.tar"), task_vars))
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
        finally:
            shutil.rmtree(folder)
        return result

    def _work(self, params: Json, sources: str, task_vars: Json | None) -> Json:
        arguments = {**params, "sources": packed(sources)}
        look: Json = self._execute_module(module_args=arguments, task_vars=task_vars)
        if look.get("failed") or not look.get("changed") or self._task.check_mode:
            return look
        return self.execute_with_files([sources], lambda _folder, there: {**arguments, "context": there[0]}, task_vars)
