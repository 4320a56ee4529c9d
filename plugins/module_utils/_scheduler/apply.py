# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module ``kube_scheduler``: apply the controller's plan to a static pod, k3s or RKE2."""

from __future__ import annotations

import time
import typing as t

from .._contracts.gpushare import EXTENDER_PORT, EXTENDER_PREFIX
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._host.file_transaction import FileTransaction, replacements
from .._host.http_probe import Post, Probe, post, probe
from .._host.system import System
from .._host.systemd import stale, unit
from .._runtime.engine import ConfigUpdate, Engine
from . import control_plane as cp
from . import embedded, extender_proof, static_pod

# A server starts the API server, and RKE2 its own pods, before kube-scheduler.
RESTART_SECONDS = 300.0
# k3s logs kube-scheduler's arguments with it, and has no other interface that reports them.
STARTING = "Running kube-scheduler "

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "extender_url": {"type": "str", "default": f"http://127.0.0.1:{EXTENDER_PORT}{EXTENDER_PREFIX}"},
    "extender_timeout": {"type": "int", "default": 30},
    "extender_preemption": {"type": "bool", "default": False},
    "configuration": {"type": "str", "choices": ["auto", "policy", "config"], "default": "auto"},
    "version": {"type": "str"},
    "versions": {"type": "list", "elements": "str", "default": []},
    "patches_dir": {"type": "path"},
    "timeout": {"type": "int", "default": 120},
    "kubeconfig": {"type": "raw"},
    "observed": {"type": "dict"},
    "plan": {"type": "dict"},
}


def work(
    params: JsonObject,
    system: System,
    ask: Probe = probe,
    sleep: t.Callable[[float], None] = time.sleep,
    now: t.Callable[[], float] = time.monotonic,
    send: Post = post,
) -> JsonObject:
    """Apply the action plugin's plan.

    :param params: the module's options.
    :param ask: returns the HTTP status of a URL, 0 for none.
    :param send: posts the extender's request.
    :raises ShareError: the extender doesn't answer from this machine, on whose network kube-scheduler runs; nothing was
        changed.
    :raises NotInEffect: kube-scheduler doesn't run with the new files; they are rolled back.
    """
    plan = params["plan"]
    if not plan:
        raise BadInput("plan: the module needs its action plugin, which makes the plan")
    changes = replacements(plan["files"])
    if plan["extender"]:
        host = (system.read("/proc/sys/kernel/hostname") or "").strip()
        extender_proof.require_answer(plan["extender"], host, send, sleep, now)
    if plan["kind"] in embedded.PLACES:
        engine = Server(system, plan, params["timeout"], ask, now)
        ConfigUpdate(system, engine, RESTART_SECONDS + params["timeout"], sleep, now).run(changes)
    else:
        proof = static_pod.Proof(plan["config"], plan["urls"], plan["policy"], plan["loads"])
        manifest = plan["manifest"]
        static_pod.Apply(system, params["timeout"], ask, sleep, now, manifest).run(changes, proof)
    return {"changed": True}


class Server(Engine):
    """k3s or RKE2, which read kube-scheduler's arguments from their settings.

    The proof compares the process with the settings on disk, so it also holds after a rollback.

    :param plan: ``config`` (the --config, empty for none) and ``urls`` that answer 200.
    :param timeout: seconds that kube-scheduler has to become healthy once the service runs.
    """

    def __init__(
        self, system: System, plan: JsonObject, timeout: float, ask: Probe, now: t.Callable[[], float]
    ) -> None:
        super().__init__(system)
        self._plan = plan
        self._timeout = timeout
        self._ask = ask
        self._now = now
        self._places = embedded.PLACES[plan["kind"]]
        self._since: float | None = None
        self._end = 0.0
        self._restarts = 0
        self.name = self._places.kind.title
        self.unit = self._places.unit
        self.record = self._places.record

    def check_preconditions(self) -> None:
        if not unit(self._system, self.unit).loaded:
            raise BadInput(f"scheduler_mode: this machine has no {self.unit}")
        if self._plan["config"] == self._places.config:
            # kube-scheduler may run without root.
            self._system.run(["mkdir", "-p", "-m", "0755", self._places.folder])

    def activate(self, transaction: FileTransaction, timeout: float) -> str:
        self._since = None
        failure = self.restart(RESTART_SECONDS)
        self._end = self._now() + self._timeout
        self._restarts = self._restarted()
        return failure

    def _restarted(self) -> int:
        """Return how often systemd has restarted the service by itself."""
        count = self._system.run(["systemctl", "show", self.unit, "-p", "NRestarts", "--value"]).out.strip()
        return int(count) if count.isdigit() else 0

    def health_error(self) -> tuple[str, bool]:
        """Return why it isn't healthy: it has to stay so for some seconds."""
        wrong = self._current_error()
        if wrong:
            self._since = None
            if self._restarted() - self._restarts >= static_pod.FAILED_STARTS:
                return "it restarts again and again", True
            return wrong, self._now() >= self._end
        if self._since is None:
            self._since = self._now()
        settled = self._now() - self._since >= static_pod.STABLE_SECONDS
        return ("", True) if settled else ("its kube-scheduler hasn't been healthy long enough", False)

    def _current_error(self) -> str:
        daemon = unit(self._system, self.unit)
        if not daemon.active:
            return "it isn't running"
        server = embedded.observe(self._system, self._places.kind.name)
        named, stamp = (server["named"], embedded.stamp_of(server["drop_in"] or "")) if server else ("", "")
        if self._places.kind.name == "rke2":
            there = cp.running(self._system)
            mine = [one for one in there if one.config == named and embedded.stamp(self._system, one.pid) == stamp]
            if not mine:
                return f"it hasn't started kube-scheduler {f'with {named}' if named else 'without a configuration'}"
            unseen = [cp.unseen(self._system, one.pid, self._plan["loads"]) for one in mine]
            if all(unseen):
                return unseen[0]
        elif stale(self._system, daemon.pid, [path for path in (named,) if path]):
            return "its process is older than kube-scheduler's configuration"
        if not all(any(self._ask(one) == 200 for one in cp.loopbacks(url)) for url in self._plan["urls"]):
            return "its kube-scheduler isn't healthy"
        return ""

    def unmet_requirements(self) -> list[str]:
        server = embedded.observe(self._system, self._places.kind.name)
        named = server["named"] if server is not None else None
        wrong = [] if named == self._plan["config"] else ["its settings name another configuration"]
        if self._places.kind.name == "k3s":
            logged = [line for line in self.journal("-g", STARTING).splitlines() if STARTING in line]
            if logged and self._plan["config"] and f"--config={self._plan['config']}" not in logged[-1]:
                wrong.append("it has started kube-scheduler without this configuration")
        return wrong

    def result(self) -> JsonObject:
        if not self._system.exists(self._places.config):
            self._system.run(["rmdir", self._places.folder])
        return {}
