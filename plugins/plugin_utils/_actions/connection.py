# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connection of an action plugin to the cluster, on the controller itself."""

from __future__ import annotations

import contextlib
import os
import typing as t

from ansible.module_utils.common.parameters import remove_values

from ...module_utils._core.errors import ShareError
from ...module_utils._core.types import JsonObject


class Connection:
    """The connection options of a module, as ``direct.connect`` reads them.

    :param options: kubernetes.core's; those of a task may contain others, too.
    """

    def __init__(self, options: JsonObject) -> None:
        kubeconfig = options.get("kubeconfig")
        if isinstance(kubeconfig, str):
            kubeconfig = os.path.expanduser(os.path.expandvars(kubeconfig)) or None
        self.params: JsonObject = {**options, "kubeconfig": kubeconfig}
        self.no_log_values: set[str] = set()

    @contextlib.contextmanager
    def masked(self) -> t.Iterator[None]:
        """Mask credentials in errors: Ansible masks a module's results only, not an action plugin's."""
        try:
            yield
        except ShareError as error:
            raise type(error)(str(remove_values(str(error), self.no_log_values)), **error.details) from None
