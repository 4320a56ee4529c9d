# SPDX-License-Identifier: GPL-3.0-or-later
"""What ansible-core imports to find a filter: every file of plugins/filter, in each process of a task that uses one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FILTERS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "plugins" / "filter").glob("[!_]*.py"))
FIND = """
import json, sys
from ansible.plugins.loader import filter_loader, init_plugin_loader
init_plugin_loader()
found = [name for name in json.loads(sys.argv[1]) if filter_loader.get(f"kubegpu.share.{name}")]
ours = "ansible_collections.kubegpu.share.plugins."
print(json.dumps([found, sorted(name for name in sys.modules if name.startswith(ours))]))
"""


def test_a_filter_imports_what_it_needs_when_it_is_called() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIND, json.dumps(FILTERS)], stdout=subprocess.PIPE, text=True, check=True
    )
    found, imported = json.loads(done.stdout)
    assert found == FILTERS
    assert {name.split(".")[4] for name in imported} == {"filter"}, imported
