# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of a run of site.yml without changes: executions per host, tasks, and wall time relative to ``ansible -m ping``.

The two commands alternate on the same hosts and medians are compared, so that other load affects both.
There is no result unless every run reported changed=0 and failed=0.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class NoResult(Exception):
    """The benchmark has no result; the message has the reason."""


class Recorded(NamedTuple):
    """The callback's file: executions by host, by host and module, the run's sums by host, and the number of tasks."""

    hosts: collections.Counter[str]
    modules: collections.Counter[tuple[str, str]]
    stats: dict[str, dict[str, int]]
    tasks: int


class Timed(NamedTuple):
    """A command: seconds until it ended, seconds of this machine's CPU that it took, and the callback's file."""

    seconds: float
    cpu: float
    lines: str


def parse(lines: str) -> Recorded:
    """Parse the callback's file."""
    tasks = 0
    hosts: collections.Counter[str] = collections.Counter()
    modules: collections.Counter[tuple[str, str]] = collections.Counter()
    stats: dict[str, dict[str, int]] = {}
    for line in lines.splitlines():
        record = json.loads(line)
        if "stats" in record:
            stats, tasks = record["stats"], record.get("tasks", 0)
        else:
            hosts[record["host"]] += 1
            modules[record["host"], record["module"]] += 1
    return Recorded(hosts, modules, stats, tasks)


def refuse(stats: dict[str, dict[str, int]]) -> None:
    """Refuse a run that changed something.

    :raises NoResult: some host isn't ``changed=0 failed=0``.
    """
    if not stats:
        raise NoResult("the run ended without a recap.")
    for host, sums in sorted(stats.items()):
        bad = {
            name: sums[name] for name in ("changed", "failures", "unreachable", "rescued", "ignored") if sums.get(name)
        }
        if bad:
            counts = ", ".join(f"{name}={count}" for name, count in bad.items())
            raise NoResult(f"{host} reports {counts}: only a run without changes is measured; run site.yml first.")


def timed(command: list[str], environment: dict[str, str]) -> Timed:
    """Run a command.

    :raises NoResult: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "executions"
        record.touch()
        start, cpu = time.perf_counter(), _cpu_of_children()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**environment, "COUNT_EXECUTIONS_FILE": str(record)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            raise NoResult(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return Timed(seconds, _cpu_of_children() - cpu, record.read_text())


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(site: list[str], ping: list[str], environment: dict[str, str], rounds: int) -> dict[str, Any]:
    """Measure both commands alternately, after one round that fills caches and opens connections."""
    times: dict[str, list[float]] = {"site": [], "ping": []}
    cpu: list[float] = []
    seen: list[tuple[dict[str, int], dict[str, int], int]] = []
    for number in range(rounds + 1):
        done = timed(site, environment)
        found = parse(done.lines)
        refuse(found.stats)
        pinged = timed(ping, environment)
        if number:
            times["site"].append(done.seconds)
            times["ping"].append(pinged.seconds)
            cpu.append(done.cpu)
            named = {f"{host} {module}": count for (host, module), count in sorted(found.modules.items())}
            seen.append((dict(sorted(found.hosts.items())), named, found.tasks))
    if any(one != seen[0] for one in seen):
        raise NoResult(f"runs executed different modules: {seen}")
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "executions": seen[0][0],
        "modules": seen[0][1],
        "tasks": seen[0][2],
        "cpu_seconds": statistics.median(cpu),
        "seconds": times,
        "median_seconds": medians,
        "over_ping": medians["site"] / medians["ping"],
        "rounds": rounds,
        "cpus": os.cpu_count(),
    }


def table(found: dict[str, Any]) -> str:
    """Format the result as a table."""
    rows = [("HOST", "MODULE EXECUTIONS")] + [(host, str(count)) for host, count in found["executions"].items()]
    width = max(len(host) for host, _count in rows)
    lines = [f"{host:{width}}  {count}" for host, count in rows]
    medians = found["median_seconds"]
    lines += [
        "",
        f"site.yml, nothing to do   {medians['site']:6.2f} s   median of {found['rounds']}",
        f"ansible -m ping           {medians['ping']:6.2f} s   median of {found['rounds']}",
        f"site.yml over ping        {found['over_ping']:6.2f}     on {found['cpus']} CPUs",
        f"site.yml, this machine    {found['cpu_seconds']:6.2f} s   of CPU",
        f"site.yml                  {found['tasks']:6}     tasks",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-i", "--inventory", default="inventories/lab", help="default: the lab's")
    parser.add_argument("--playbook", default="playbooks/site.yml")
    parser.add_argument(
        "--hosts", default="gpu_nodes:control_plane", help="the hosts that are pinged: those of the playbook"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write everything there, too")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "bench" / "callback_plugins"),
        "ANSIBLE_CALLBACKS_ENABLED": "count_executions",
        "ANSIBLE_NOCOLOR": "1",
    }
    site = [str(folder / "ansible-playbook"), "-i", options.inventory, options.playbook]
    ping = [str(folder / "ansible"), "-i", options.inventory, options.hosts, "-m", "ansible.builtin.ping"]
    try:
        found = measure(site, ping, environment, options.rounds)
    except NoResult as reason:
        print(f"no result: {reason}", file=sys.stderr)
        return 1
    print(table(found))
    text = json.dumps(found, indent=2, sort_keys=True)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
