# SPDX-License-Identifier: GPL-3.0-or-later
"""Options, observed states and updates that the tests of all container runtimes share."""

from __future__ import annotations

import dataclasses
import itertools
import typing as t
from collections.abc import Callable, Iterable, Iterator

from ansible_collections.kubegpu.share.plugins.module_utils._host.file_transaction import replacements
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.engine import ConfigUpdate
from fake_clock import FakeClock
from fake_node import FakeNode, killed

BINARY = "/usr/bin/nvidia-container-runtime"
PRESENT = Options(present=True, binary=BINARY)
AVAILABLE = Options(present=True, default=False, binary=BINARY)
REPLACING = dataclasses.replace(PRESENT, replace_default=True)
# The warning of a run on a node whose default runtime an earlier one replaced; the brackets hold both names.
REPLACED = "an earlier run of this collection replaced {}'s default runtime {} by NVIDIA's, and pods"
ABSENT = Options(present=False)
DAEMON_JSON = "/etc/docker/daemon.json"


def containerd_state(files: dict[str, str], **changes: t.Any) -> dict[str, t.Any]:
    """Return the observed state of a containerd 2 with these files, the first of which is the main one."""
    base = "plugins.'io.containerd.cri.v1.runtime'.containerd"
    dump = f"[{base}]\ndefault_runtime_name = 'runc'\n[{base}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
    usual = {"version": "2.2.9", "config_path": next(iter(files), "/etc/containerd/config.toml"), "files": files}
    usual |= {"drop_in": None, "dump": dump, "error": "", "embedded": "", "low_level": "runc", "service_active": True}
    return {**usual, "stale": False, "pending": False, "operator": False, **changes}


def docker_state(text: str | None, **changes: t.Any) -> dict[str, t.Any]:
    """Return the observed state of a running Docker with this daemon.json; None stands for no file."""
    usual = {"version": "27.3.1", "config_path": DAEMON_JSON, "text": text, "flags": {}, "rootless": "", "error": ""}
    usual |= {"default_runtime": "runc", "runtimes": {"runc": "runc"}, "cgroup_driver": "systemd", "containers": 0}
    usual |= {"low_level": "runc", "live_restore": False, "service_active": True, "answers": True}
    return {**usual, "was": None, "ours": False, "pending": False, "operator": False, **changes}


def show_unit(pid: int, command: str, **properties: str) -> Done:
    """Return the output of ``systemctl show`` for a unit with this main process; 0 stands for a failed unit."""
    start = f"{{ path={command.split()[0]} ; argv[]={command} ; }}"
    shown = {"LoadState": "loaded", "ActiveState": "active" if pid else "failed", "MainPID": pid, "ExecStart": start}
    return Done(0, "".join(f"{name}={value}\n" for name, value in {**shown, **properties}.items()), "")


def update(
    node: FakeNode, engine: t.Any, files: Iterable[dict[str, t.Any]], clock: FakeClock | None = None
) -> dict[str, t.Any]:
    """Apply the files of a plan, with a timeout of 10 s on a clock that passes only by sleeping."""
    clock = clock or FakeClock()
    return ConfigUpdate(node, engine, 10, clock.sleep, clock.now).run(replacements(files))


Daemon = t.TypeVar("Daemon")


def kill_steps(
    start: Callable[[], tuple[FakeNode, Daemon]], run: Callable[[FakeNode], object], least: int = 10
) -> Iterator[tuple[FakeNode, Daemon]]:
    """Kill a run before each of its writes and commands in turn.

    :param start: makes a node and its daemon.
    :param least: the number of steps that the run has at least.
    :returns: each killed node with its daemon, and at last one whose run ended.
    """
    for at in itertools.count(1):
        node, daemon = start()
        was_killed = killed(node, at, lambda node=node: run(node))
        yield node, daemon
        if not was_killed:
            assert at > least
            return
