# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Import what many tasks of site.yml need, once.

ansible-playbook itself imports each task's action plugin, and starts a process for each task and host, which inherits
what is imported. Whatever isn't, each of these processes compiles again: ansible-core keeps no compiled code of
collections, and for one filter it loads all filters of the collection.
"""

from __future__ import annotations

import importlib
import pkgutil

from ansible.plugins.loader import filter_loader, test_loader

from .._actions import observations

PLUGINS = __name__.partition(".plugin_utils.")[0]


def load() -> None:
    """Import them; the plan of the roles needs most of it itself."""
    importlib.import_module(f"{PLUGINS}.plugin_utils._plan.engine")
    observations.prepare()
    # Filters in the tasks of each GPU node import it when they are called.
    importlib.import_module(f"{PLUGINS}.module_utils._driver.select")
    for module in pkgutil.iter_modules(importlib.import_module(f"{PLUGINS}.filter").__path__):
        importlib.import_module(f"{PLUGINS}.filter.{module.name}")
    for loader in (filter_loader, test_loader):
        # ansible-core's own, which it looks for in every process that uses one.
        list(loader.all())
