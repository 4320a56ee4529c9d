# SPDX-License-Identifier: GPL-3.0-or-later
"""A machine that somebody else controls: its Python adds to each module's result what would be variables."""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

# Python with the module's arguments; then each JSON object of its output gets the keys of a file.
WRAPPER = """#!{python}
import json, subprocess, sys

done = subprocess.run([{python!r}, *sys.argv[1:]], stdin=sys.stdin, capture_output=True, text=True)
lines = []
for line in done.stdout.splitlines():
    try:
        result = json.loads(line)
        added = json.load(open({added!r}))
        for key, value in added.pop("replaced", {{}}).items():
            if key in result:
                result[key] = value
        line = json.dumps({{**result, **added}})
    except ValueError:
        pass
    lines.append(line)
print("\\n".join(lines))
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
"""


class TakenMachine:
    """Its interpreter, and the file that appears where the controller executes what the machine says."""

    def __init__(self, folder: Path) -> None:
        self.marker, self.python = folder / "marker", folder / "python-of-the-machine"
        self._added = folder / "added.json"
        self.python.write_text(WRAPPER.format(python=sys.executable, added=str(self._added)))
        self.python.chmod(0o755)
        self.adds()

    @property
    def kubeconfig(self) -> dict[str, t.Any]:
        """A kubeconfig as a mapping whose user is a program."""
        command = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", "command": "/bin/sh"}
        user = {"exec": {**command, "args": ["-c", f"touch {self.marker}"]}}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }

    @property
    def variables(self) -> dict[str, t.Any]:
        """Variables of roles, of the user's own, of a role's inside, and of Ansible's connections."""
        template = "{{ lookup('ansible.builtin.pipe', 'touch " + str(self.marker) + "') }}"
        return {
            **dict.fromkeys(("gpu_kubeconfig", "scheduler_kubeconfig", "own_kubeconfig"), self.kubeconfig),
            **{"gpu_maintenance": "drain", "maintenance_cluster": True, "maintenance_allowed": "drain"},
            **{"gpu_node_name": template, "gpushare_namespace": template, "gpushare_image_archive": template},
            **{"preflight_ignore": ["privileges"], "uninstall_with_pods": True, "driver_source_dir": "/"},
            **{"__maintenance_annotation": template, "__hami_kubeconfig": self.kubeconfig, "__plan_machines": []},
            **{"ansible_connection": "local", "ansible_become": True, "ansible_become_exe": f"touch {self.marker};"},
            **{"ansible_host": "127.0.0.1", "ansible_local": {"gpu_kubeconfig": self.kubeconfig}},
            **{"ansible_distribution": "Taken", "hostvars": {}, "groups": {}, "inventory_hostname": "other"},
        }

    def adds(self, **replaced: t.Any) -> None:
        """Let each result have these keys in place of its own, where it has them."""
        stats = {"data": {"gpu_kubeconfig": "taken-stat"}, "per_host": False, "aggregate": False}
        added = {
            **{"ansible_facts": self.variables, "ansible_stats": stats, "replaced": replaced},
            "add_host": {"host_name": "localhost", "groups": [], "host_vars": self.variables},
            "add_group": "gpu_nodes",
            "_ansible_item_label": "x",
        }
        self._added.write_text(json.dumps(added))
