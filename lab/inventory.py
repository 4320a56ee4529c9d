# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's nodes, or its machines without a cluster, as Ansible's inventory, read from .lab/state.json.

inventories/lab/nodes runs this file with whatever Python there is, so it takes nothing but the standard library.
inventories/machines/nodes runs it with the word `machines`, and molecule's scenarios with a group's name behind it.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
GROUPS = {"control_plane": "control_plane", "gpu_node": "gpu_nodes"}


def _connection(state: dict[str, Any]) -> dict[str, str]:
    """Return the SSH settings of all hosts."""
    ssh = state["ssh"]
    # The user's known_hosts and ssh configuration are neither used nor changed.
    options = (f"UserKnownHostsFile={CHECKOUT / ssh['known_hosts']}", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes")
    return {
        "ansible_user": ssh["user"],
        "ansible_ssh_private_key_file": str(CHECKOUT / ssh["key"]),
        "ansible_ssh_common_args": shlex.join(["-F", "none", *(word for each in options for word in ("-o", each))]),
        "ansible_python_interpreter": "/usr/bin/python3",
    }


def inventory(state: dict[str, Any]) -> dict[str, Any]:
    """Return the groups of the cluster's nodes with the SSH settings of each host."""
    common = _connection(state)
    groups: dict[str, dict[str, list[str]]] = {name: {"hosts": []} for name in GROUPS.values()}
    hostvars = {}
    for name, node in state["nodes"].items():
        groups[GROUPS[node["role"]]]["hosts"].append(name)
        hostvars[name] = {**common, "ansible_host": node["address"]}
    # For group_vars: inventory_dir is not defined for the localhost of plays that work on the cluster.
    everywhere = {
        "lab_dir": str(CHECKOUT / ".lab"),
        "lab_repository": state["repository"]["url"].rstrip("/"),
        "lab_gpushare_image": state["gpushare_image"],
        "lab_driver_version": state["settings"]["driver_version"],
    }
    return {"_meta": {"hostvars": hostvars}, "all": {"vars": everywhere}, **groups}


def machines(state: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Return the machines without a cluster, all or those of one group."""
    wanted = {name: one for name, one in state.get("machines", {}).items() if not group or one["group"] == group}
    groups: dict[str, dict[str, list[str]]] = {"gpu_nodes": {"hosts": list(wanted)}}
    hostvars = {}
    for name, machine in wanted.items():
        groups.setdefault(machine["group"], {"hosts": []})["hosts"].append(name)
        hostvars[name] = {
            **_connection(state),
            "ansible_host": machine["address"],
            "lab_packages": machine["packages"],
        }
    everywhere = {}
    if wanted:
        everywhere = {
            "lab_repository": state["repository"]["url"].rstrip("/"),
            "lab_driver_version": state["settings"]["driver_version"],
        }
    return {"_meta": {"hostvars": hostvars}, "all": {"vars": everywhere}, **groups}


def main() -> int:
    try:
        state = json.loads((CHECKOUT / ".lab" / "state.json").read_text())
    except FileNotFoundError:
        state = {}
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if words[:1] == ["machines"]:
        print(json.dumps({} if "--host" in sys.argv else machines(state, *words[1:2]), indent=2))
        return 0
    if state.get("phase") != "up":
        print("The lab is not up; bring it up with `make lab-up`.", file=sys.stderr)
        return 1
    print(json.dumps({} if "--host" in sys.argv[1:] else inventory(state), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
