# SPDX-License-Identifier: GPL-3.0-or-later
"""What ansible-core imports to find a filter: every file of plugins/filter, in each process of a task that uses one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Each filter has a file of documentation, because ansible-doc shows that of a Python file for every filter in it.
DOCUMENTED = {path.stem for path in (Path(__file__).resolve().parents[2] / "plugins" / "filter").glob("*.yml")}
FIND = """
import json, sys
from ansible.plugins.loader import filter_loader, init_plugin_loader
init_plugin_loader()
found = [name for name in json.loads(sys.argv[1]) if filter_loader.get(f"kubegpu.share.{name}")]
ours = "ansible_collections.kubegpu.share.plugins."
imported = sorted(name for name in sys.modules if name.startswith(ours))
files = [sys.modules[name] for name in imported if name.startswith(f"{ours}filter.")]
defined = [name for file in files for name in file.FilterModule().filters()]
print(json.dumps([found, imported, sorted(defined)]))
"""


def test_a_filter_imports_what_it_needs_when_it_is_called() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIND, json.dumps(sorted(DOCUMENTED))], stdout=subprocess.PIPE, text=True, check=True
    )
    found, imported, defined = json.loads(done.stdout)
    assert {name.split(".")[4] for name in imported} == {"filter"}, imported
    assert found == defined == sorted(DOCUMENTED)
