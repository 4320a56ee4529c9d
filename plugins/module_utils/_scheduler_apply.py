# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The module ``kube_scheduler``: carry out what was planned on the controller, for whoever runs kube-scheduler here."""

from __future__ import annotations

import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils import _embedded, _runtime_apply, _static_pod
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import EXTENDER_PORT, EXTENDER_PREFIX
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import stale, unit
from ansible_collections.kubegpu.share.plugins.module_utils._probe import Probe, probe
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import Put, PutBack, Replacement, replacements
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

# A server starts the API server, and RKE2 its own pods, before it comes to kube-scheduler.
RESTART_SECONDS = 300.0

ARGUMENTS: dict[str, t.Any] = {
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
    params: dict[str, t.Any],
    system: System,
    ask: Probe = probe,
    sleep: t.Callable[[float], None] = time.sleep,
    now: t.Callable[[], float] = time.monotonic,
) -> dict[str, t.Any]:
    """Carry out the plan that the action plugin made on the controller."""
    plan = params["plan"]
    if not plan:
        raise BadInput("plan: this module only runs through its action plugin, which makes the plan")
    changes = replacements(plan["files"])
    if plan["kind"] in _embedded.PLACES:
        engine = Server(system, plan, params["timeout"], ask, now)
        _runtime_apply.Apply(system, engine, RESTART_SECONDS + params["timeout"], sleep, now).run(changes)
    else:
        proof = _static_pod.Proof(plan["config"], plan["urls"], plan["policy"])
        manifest = plan["manifest"]
        _static_pod.Apply(system, params["timeout"], ask, sleep, now, manifest).run(changes, proof)
    return {"changed": True}


class Server:
    """k3s or RKE2 with a kube-scheduler whose arguments it takes from its settings.

    The proof is what those settings amount to on disk, so that it holds for new files and for old ones put back.

    :param plan: ``config`` (the --config, empty for none) and ``urls`` that answer 200.
    :param timeout: seconds that kube-scheduler has to come up healthy when the service is up.
    """

    def __init__(
        self, system: System, plan: dict[str, t.Any], timeout: float, ask: Probe, now: t.Callable[[], float]
    ) -> None:
        self._system = system
        self._plan = plan
        self._timeout = timeout
        self._ask = ask
        self._now = now
        self._places = _embedded.PLACES[plan["kind"]]
        self._since: float | None = None
        self._end = 0.0
        self._restarts = 0
        self.name = self._places.kind.title
        self.unit = self._places.unit
        self.record = self._places.record

    def refuse(self) -> None:
        if not unit(self._system, self.unit).loaded:
            raise BadInput(f"scheduler_mode: this machine has no {self.unit}")
        if self._plan["config"] == self._places.config:
            # kube-scheduler needn't be root.
            self._system.run(["mkdir", "-p", "-m", "0755", self._places.folder])

    def put(self) -> Put | None:
        return None

    def show(self, text: str) -> str:
        return text

    def reveal(self, text: str, real: str) -> str:
        return text

    def accompany(self, changes: list[Replacement]) -> list[Replacement]:
        return changes

    def meaning(self) -> _runtime_apply.Meaning:
        return _runtime_apply.Meaning(None)

    def objections(self, before: _runtime_apply.Meaning, after: _runtime_apply.Meaning) -> list[str]:
        return []

    def activate(self, put_back: PutBack, timeout: float) -> str:
        self._since = None
        failure = _runtime_apply.restart(self._system, self.unit, RESTART_SECONDS)
        self._end = self._now() + self._timeout
        self._restarts = self._restarted()
        return failure

    def _restarted(self) -> int:
        """How often systemd has started the service again by itself."""
        count = self._system.run(["systemctl", "show", self.unit, "-p", "NRestarts", "--value"]).out.strip()
        return int(count) if count.isdigit() else 0

    def unwell(self) -> tuple[str, bool]:
        """Healthy is what stays so for a while."""
        wrong = self._unwell()
        if wrong:
            self._since = None
            if self._restarted() - self._restarts >= _static_pod.FAILED_STARTS:
                return "it ends again and again", True
            return wrong, self._now() >= self._end
        if self._since is None:
            self._since = self._now()
        settled = self._now() - self._since >= _static_pod.STABLE_SECONDS
        return ("", True) if settled else ("its kube-scheduler has only just come up", False)

    def _unwell(self) -> str:
        daemon = unit(self._system, self.unit)
        if not daemon.active:
            return "it isn't running"
        seen = _embedded.observe(self._system, self._places.kind.name) or {}
        named, stamp = str(seen.get("named", "")), _embedded.stamp_of(str(seen.get("drop_in") or ""))
        if self._places.kind.name == "rke2":
            there = cp.running(self._system)
            if not any(one.config == named and _embedded.stamp(self._system, one.pid) == stamp for one in there):
                return f"it hasn't started kube-scheduler {f'with {named}' if named else 'without a configuration'}"
        elif stale(self._system, daemon.pid, [path for path in (named,) if path]):
            return "its process is older than kube-scheduler's configuration"
        if not all(self._ask(url) == 200 for url in self._plan["urls"]):
            return "its kube-scheduler isn't healthy"
        return ""

    def running(self) -> t.Any:
        return None

    def shortcomings(self) -> list[str]:
        seen = _embedded.observe(self._system, self._places.kind.name) or {}
        wrong = [] if seen.get("named", "") == self._plan["config"] else ["its settings name another configuration"]
        if self._places.kind.name == "k3s":
            said = [line for line in self._journal().splitlines() if "Running kube-scheduler " in line]
            if said and self._plan["config"] and f"--config={self._plan['config']}" not in said[-1]:
                wrong.append("it has started kube-scheduler without this configuration")
        return wrong

    def words(self, journal: str) -> str:
        return _runtime_apply.last_words(journal)

    def result(self) -> dict[str, t.Any]:
        if not self._system.exists(self._places.config):
            self._system.run(["rmdir", self._places.folder])
        return {}

    def _journal(self) -> str:
        shown = self._system.run(["systemctl", "show", self.unit, "-p", "InvocationID", "--value"])
        which = [f"_SYSTEMD_INVOCATION_ID={shown.out.strip()}"] if shown.out.strip() else ["-u", self.unit]
        pattern = ["-g", "Running kube-scheduler "]
        return self._system.run(["journalctl", *which, *pattern, "-o", "cat", "--no-pager"]).out
