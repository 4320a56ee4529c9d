# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module ``kube_scheduler``: prove the extender, then apply the controller's plan."""

from __future__ import annotations

import json
import time
import typing as t

from .._contracts.gpushare import EXTENDER_PORT, EXTENDER_PREFIX
from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from .._core.untrusted import line
from .._host.file_transaction import FileTransaction, Replacement, replacements
from .._host.http_probe import TIMEOUT, Answer, Post, Probe, post, probe
from .._host.system import System
from .._host.systemd import stale, unit
from .._runtime.engine import ConfigUpdate, Engine
from . import control_plane as cp
from . import embedded, static_pod_apply

# Its pod was ready a moment ago. A machine that has just started, or its API server, may need some time again.
PROOF_SECONDS, PAUSE_SECONDS = 60.0, 2.0
# A pod that asks for no share, and no node for it: nothing is booked. Keys as Go writes an ExtenderArgs.
_POD: JsonObject = {
    "metadata": {"name": "gpushare-proof", "namespace": "default", "uid": "gpushare-proof"},
    "spec": {"containers": [{"name": "proof", "image": "none"}]},
}
REQUEST = json.dumps({"Pod": _POD, "Nodes": None, "NodeNames": []})

# By code: why it isn't an answer of the extender, and the way out.
_POD_OF_IT = "kubectl get pods -A -o wide -l app.kubernetes.io/name=gpushare-extender shows whether its pod is here"
_TAKEN = "another program has this address: stop it, or set scheduler_extender_url"
REASONS: t.Mapping[str, tuple[str, str]] = {
    "refused": ("nothing listens there (connection refused)", _POD_OF_IT),
    "timeout": (f"it doesn't answer within {TIMEOUT} s", f"{_POD_OF_IT}, and a firewall may be between"),
    "unreachable": ("it can't be reached ({text})", f"set scheduler_extender_url to its address; {_POD_OF_IT}"),
    "tls": (
        "TLS fails ({text})",
        "its certificate has to be valid for this name, by an authority that is trusted here",
    ),
    "no_http": ("what listens there doesn't speak HTTP ({text})", _TAKEN),
    "http_status": ("it answers with HTTP status {text}", _TAKEN),
    "not_an_extender": ("what answers there is no extender of kube-scheduler", _TAKEN),
    "not_ready": ("it isn't ready: {text}", "read the log of its pod gpushare-extender on this node"),
}


def problem(answer: Answer) -> tuple[str, str]:
    """Return why this isn't the answer of a working extender: a code of ``REASONS`` and its text; empty for none."""
    if answer.failure:
        return answer.failure, answer.text
    if answer.status != 200:
        return "http_status", str(answer.status)
    try:
        result = json.loads(answer.text)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        return "not_an_extender", ""
    # Go reads keys in any case, and older releases write them in lower case.
    fields = {str(key).lower(): value for key, value in result.items()}
    if fields.get("error"):
        return "not_ready", str(fields["error"])
    return ("", "") if fields.get("nodenames", "") in ([], None) else ("not_an_extender", "")


def parsed(text: str) -> Answer:
    """Return an answer that a pod has received and written as JSON; one of its own where it wrote something else."""
    try:
        fields = json.loads(text)
        answer = Answer(int(fields["status"]), str(fields["failure"]), str(fields["text"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Answer(0, "unreachable", text or "the pod that asked has written nothing")
    return answer if answer.failure in ("", *REASONS) else Answer(0, "unreachable", answer.text)


def require_answer(
    url: str, host: str, post: Post, sleep: t.Callable[[float], None], now: t.Callable[[], float]
) -> None:
    """Ask the extender until it answers.

    :param url: its URL, as kube-scheduler has it.
    :param host: the machine on which this runs, for the message.
    :raises ShareError: it doesn't answer in time; the details have ``code``, ``reason``, ``url`` and ``host``.
    """
    asked = f"{url.rstrip('/')}/filter"
    end = now() + PROOF_SECONDS
    while True:
        code, text = problem(post(asked, REQUEST))
        if not code:
            return
        if now() >= end:
            raise unanswered(f"kube-scheduler on {host}", asked, code, text, host)
        sleep(PAUSE_SECONDS)


def unanswered(scheduler: str, asked: str, code: str, text: str, host: str = "") -> ShareError:
    """Return the error of an extender that doesn't answer.

    :param scheduler: what isn't changed therefore, for the message.
    :param asked: the URL.
    :param code: of ``REASONS``, and ``text`` its text.
    :param host: from where; empty for a pod.
    """
    why, way_out = REASONS[code]
    return ShareError(
        f"{scheduler} isn't changed, because the extender doesn't answer {asked} from there within "
        f"{PROOF_SECONDS:g} s: {why.format(text=line(text))}. {way_out[0].upper()}{way_out[1:]}.",
        code="extender_unanswered",
        reason=code,
        url=asked,
        host=host,
    )


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
        require_answer(plan["extender"], host, send, sleep, now)
    if plan["kind"] in embedded.PLACES:
        engine = Server(system, plan, params["timeout"], ask, now)
        ConfigUpdate(system, engine, RESTART_SECONDS + params["timeout"], sleep, now).run(changes)
    else:
        proof = static_pod_apply.Proof(plan["config"], plan["urls"], plan["policy"], plan["loads"])
        manifest = plan["manifest"]
        static_pod_apply.Apply(system, params["timeout"], ask, sleep, now, manifest).run(changes, proof)
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

    def check_preconditions(self, changes: t.Sequence[Replacement]) -> None:
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
            if self._restarted() - self._restarts >= static_pod_apply.FAILED_STARTS:
                return "it restarts again and again", True
            return wrong, self._now() >= self._end
        if self._since is None:
            self._since = self._now()
        settled = self._now() - self._since >= static_pod_apply.STABLE_SECONDS
        return ("", True) if settled else ("its kube-scheduler hasn't been healthy long enough", False)

    def _current_error(self) -> str:
        daemon = unit(self._system, self.unit)
        if not daemon.active:
            return "it isn't running"
        server = embedded.observe(self._system, self._places.kind.name)
        named, stamp = (server["named"], embedded.stamp_of(server["drop_in"] or "")) if server else ("", "")
        if self._places.kind.name == "rke2":
            there = cp.running(self._system)
            mine = [
                process
                for process in there
                if process.config == named and embedded.stamp(self._system, process.pid) == stamp
            ]
            if not mine:
                return f"it hasn't started kube-scheduler {f'with {named}' if named else 'without a configuration'}"
            unseen = [cp.unseen(self._system, process.pid, self._plan["loads"]) for process in mine]
            if all(unseen):
                return unseen[0]
        elif stale(self._system, daemon.pid, [path for path in (named,) if path]):
            return "its process is older than kube-scheduler's configuration"
        if not all(any(self._ask(address) == 200 for address in cp.loopbacks(url)) for url in self._plan["urls"]):
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
