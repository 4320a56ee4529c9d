# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: progress
type: aggregate
short_description: Print a line for tasks that take longer than ten seconds
version_added: 1.0.0
description:
  - Prints to standard error which task still runs, on which hosts and for how long, every ten seconds.
  - A module can't print while it runs, so that the installation of a driver is silent for minutes otherwise.
requirements:
  - enabled by C(callbacks_enabled = kubegpu.share.progress) in ansible.cfg, or by C(ANSIBLE_CALLBACKS_ENABLED)
options:
  interval:
    description: Seconds after which, and between which, a running task is printed.
    type: float
    default: 10
    env:
      - name: KUBEGPU_PROGRESS_INTERVAL
    ini:
      - section: kubegpu_progress
        key: interval
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
# ansible.cfg
# [defaults]
# callbacks_enabled = kubegpu.share.progress
"""

import threading
import time
import typing as t

from ansible.plugins.callback import CallbackBase
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.running_tasks import RunningTasks
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show


class CallbackModule(CallbackBase):  # type: ignore[misc]  # ansible-core carries no types
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "kubegpu.share.progress"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *args: t.Any, **kwargs: t.Any) -> None:
        super().__init__(*args, **kwargs)
        self._tasks: RunningTasks | None = None
        self._ended = threading.Event()

    def v2_playbook_on_start(self, playbook: t.Any) -> None:
        self._tasks = RunningTasks(float(self.get_option("interval")))
        threading.Thread(target=self._print, args=(self._tasks,), name="progress", daemon=True).start()

    def v2_runner_on_start(self, host: t.Any, task: t.Any) -> None:
        if self._tasks:
            self._tasks.start(host.get_name(), task._uuid, task.get_name().strip(), time.monotonic())

    def _end(self, result: t.Any) -> None:
        if self._tasks:
            self._tasks.end(result.host.get_name(), result.task._uuid)

    v2_runner_on_ok = v2_runner_on_skipped = v2_runner_on_unreachable = _end

    def v2_runner_on_failed(self, result: t.Any, ignore_errors: bool = False) -> None:
        self._end(result)

    def v2_playbook_on_stats(self, stats: t.Any) -> None:
        self._ended.set()

    def _print(self, tasks: RunningTasks) -> None:
        while not self._ended.wait(min(1.0, tasks.interval)):
            for line in tasks.due(time.monotonic()):
                # Standard output may be JSON.
                show(self._display, line, stderr=True)
