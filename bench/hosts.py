# SPDX-License-Identifier: GPL-3.0-or-later
"""Growth of plan.yml with the number of hosts: seconds and seconds of a processor per host, and the ratio to ping.

The machines are local connections with recorded facts of a node that has its driver, and nodes of a real
kube-apiserver. No machine is observed: what is measured is the controller's work in preflight and plan.
``ansible -m ping`` alternates with it on the same hosts.

    python bench/hosts.py [--hosts N ...] [--growth RATIO]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
from noop import NoResult as Failed
from noop import timed
from processes import ROOT, NoResult, verdict

from real_apiserver import ApiServer, Missing  # isort: skip

sys.path += [str(ROOT / "tests" / "unit" / name) for name in ("node", "runtime")]
_AnsibleCollectionFinder(paths=[str(ROOT / ".collections")])._install()

from ansible_collections.kubegpu.share.plugins.module_utils._node.facts import observe  # noqa: E402
from node_trees import TreeSystem, load  # noqa: E402
from runtime_kit import containerd_state  # noqa: E402

TREE = "ubuntu-24.04-cuda-repo"
# Not built, and nothing is asked of a machine.
GIVEN: dict[str, Any] = {
    "ansible_connection": "local",
    "ansible_python_interpreter": sys.executable,
    "gpushare_image_delivery": "registry",
    "scheduler_mode": "dedicated",
    "preflight_ignore": ["runtime"],
}


def add_nodes(server: ApiServer, names: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}}), names))


def measure(folder: Path, server: ApiServer, facts: Any, count: int) -> dict[str, float]:
    """Run plan.yml and ping alternately on this number of hosts, twice, and return the better times."""
    names = [f"gpu{number:04}" for number in range(count)]
    shared = {**GIVEN, "gpu_kubeconfig": str(server.kubeconfig)}
    inventory = {
        "all": {"vars": shared},
        "gpu_nodes": {"hosts": dict.fromkeys(names), "vars": {"gpu_node": facts}},
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_NOCOLOR": "1",
    }
    hosts = str(folder / "hosts.yml")
    plan = [str(programs / "ansible-playbook"), "-i", hosts, "playbooks/plan.yml"]
    ping = [str(programs / "ansible"), "-i", hosts, "gpu_nodes", "-m", "ansible.builtin.ping"]
    planned, pinged = [], []
    for _round in range(2):
        planned.append(timed(plan, environment))
        pinged.append(timed(ping, environment))
    return {
        "seconds": min(one.seconds for one in planned),
        "cpu": min(one.cpu for one in planned),
        "over_ping": min(one.seconds for one in planned) / min(one.seconds for one in pinged),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, nargs="+", default=[50, 500])
    parser.add_argument(
        "--growth", type=float, default=1.25, help="most seconds of CPU per host, over those of the first"
    )
    options = parser.parse_args()
    per_host: list[float] = []
    try:
        with tempfile.TemporaryDirectory() as folder, ApiServer() as server:
            facts = observe(TreeSystem(Path(folder) / TREE, load(TREE)))
            facts["runtimes"]["containerd"] = containerd_state({"/etc/containerd/config.toml": "version = 2\n"})
            known = 0
            for count in options.hosts:
                add_nodes(server, [f"gpu{number:04}" for number in range(known, count)])
                known = max(known, count)
                found = measure(Path(folder), server, facts, count)
                per_host.append(found["cpu"] / count)
                print(
                    f"{count:5} hosts: {found['seconds']:7.1f} s, {found['cpu']:7.1f} s of CPU,"
                    f" {per_host[-1] * 1000:5.0f} ms of CPU per host, {found['over_ping']:.2f} x ping",
                    flush=True,
                )
    except (NoResult, Failed, Missing) as reason:
        print(f"no result: {reason}", file=sys.stderr)
        return 1
    growth = per_host[-1] / per_host[0]
    return verdict([(f"CPU per host grows {growth:.2f} times, at most {options.growth}", growth <= options.growth)])


if __name__ == "__main__":
    sys.exit(main())
