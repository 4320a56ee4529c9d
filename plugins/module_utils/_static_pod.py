# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Give a static kube-scheduler new files, prove that a new process runs with them, or put the old ones back."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import EXTENDER_PORT, EXTENDER_PREFIX
from ansible_collections.kubegpu.share.plugins.module_utils._probe import Probe, probe
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import (
    Kept,
    PutBack,
    Replacement,
    check_unchanged,
    digest,
    replacements,
)
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

POLL_SECONDS = 0.5
STABLE_SECONDS = 4.0
# Kubelet has started the container again twice: it won't come up by waiting.
FAILED_STARTS = 2

ARGUMENTS: dict[str, t.Any] = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "extender_url": {"type": "str", "default": f"http://127.0.0.1:{EXTENDER_PORT}{EXTENDER_PREFIX}"},
    "extender_timeout": {"type": "int", "default": 30},
    "version": {"type": "str"},
    "timeout": {"type": "int", "default": 120},
    "kubeconfig": {"type": "path"},
    "observed": {"type": "dict"},
    "plan": {"type": "dict"},
}


def work(params: dict[str, t.Any], system: System) -> dict[str, t.Any]:
    """The module: carry out the plan that the action plugin made on the controller."""
    plan = params["plan"]
    if not plan:
        raise BadInput("plan: this module only runs through its action plugin, which makes the plan")
    Apply(system, params["timeout"]).run(replacements(plan["files"]), Proof(plan["config"], plan["urls"]))
    return {"changed": True}


@dataclasses.dataclass(frozen=True)
class Proof:
    """When kube-scheduler counts as running as it should.

    :param config: the --config of its process; empty for none.
    :param urls: each of these answers 200.
    """

    config: str
    urls: t.Sequence[str]


class Apply:
    """One change of a static kube-scheduler on its machine.

    :param timeout: seconds that kube-scheduler has to come up healthy.
    """

    def __init__(
        self,
        system: System,
        timeout: float,
        ask: Probe = probe,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._timeout = timeout
        self._ask = ask
        self._sleep = sleep
        self._now = now
        self._put_back = PutBack(system, cp.PENDING, self._put)

    def run(self, changes: t.Sequence[Replacement], proof: Proof) -> None:
        """Write the files in this order and wait until kube-scheduler is what the proof says.

        :raises ShareError: nothing was written.
        :raises NotInEffect: the old files are back and kube-scheduler runs with them, or the message says otherwise.
        """
        check_unchanged(changes, self._system.read)
        fresh = bool(changes) or self._put_back.pending()
        pods = set(self._pods())
        # kube-scheduler needn't be root, so that its folder is for everybody to read.
        self._system.run(["mkdir", "-p", "-m", "0755", cp.FOLDER])
        kept = self._put_back.keep(changes)
        self._put_back.replace(changes, kept)
        wrong = self._wait(proof, fresh, pods)
        if wrong:
            self._give_up(kept, proof, wrong, pods)
        self._put_back.forget()
        if self._system.read(cp.CONFIG) is None:
            self._system.run(["rmdir", cp.FOLDER])

    def _give_up(self, kept: t.Sequence[Kept], proof: Proof, wrong: str, pods: set[str]) -> t.NoReturn:
        words = self._last_words(pods)
        if all(digest(one.text) == one.replaced_by for one in kept):
            self._put_back.forget()
            raise NotInEffect(f"kube-scheduler isn't healthy ({wrong}): {words}")
        known = set(self._pods())
        self._put_back.restore(kept)
        old = cp.flag(self._system.read(cp.MANIFEST) or "", "config")
        still = self._wait(Proof(old, proof.urls), True, known)
        if still:
            raise NotInEffect(
                f"kube-scheduler didn't come up with the new configuration ({wrong}: {words}), and with the old one, "
                f"which is back in place, it doesn't come up either ({still}): {self._last_words(known)}"
            )
        self._put_back.forget()
        raise NotInEffect(
            "kube-scheduler didn't come up with the new configuration and runs with the old one again "
            f"({wrong}): {words}"
        )

    # ----------------------------------------------------------------- files

    def _put(self, path: str, text: str, mode: int) -> None:
        """Kubelet runs every file of its manifests' folder, so that nothing unfinished is ever written there."""
        if posixpath.dirname(path) != posixpath.dirname(cp.MANIFEST):
            self._system.write(path, text, mode)
            return
        self._system.write(cp.STAGED, text, mode)
        done = self._system.run(["mv", "-fT", cp.STAGED, path])
        if done.rc != 0:
            raise ShareError(f"{path} can't be written: {done.err.strip()}")

    # ----------------------------------------------------------------- proof

    def _wait(self, proof: Proof, fresh: bool, pods: set[str]) -> str:
        """Wait for the proof; why it failed, or nothing.

        :param fresh: only a process that was started after the manifest was written counts.
        """
        oldest = self._manifest_age() if fresh else None
        end = self._now() + self._timeout
        begun = self._now()
        since: dict[int, float] = {}
        while True:
            limit = None if oldest is None else oldest + (self._now() - begun)
            good = {
                one.pid
                for one in cp.running(self._system)
                if one.config == proof.config and (limit is None or one.age <= limit)
            }
            if good and all(self._ask(url) == 200 for url in proof.urls):
                since = {pid: since.get(pid, self._now()) for pid in good}
                if any(self._now() - first >= STABLE_SECONDS for first in since.values()):
                    return ""
            else:
                since = {}
            if self._starts(pods) >= FAILED_STARTS:
                return "its container ends again and again"
            if self._now() >= end:
                what = "it isn't healthy" if good else "no new process with this configuration was started"
                return f"{what} after {self._timeout:g} s"
            self._sleep(POLL_SECONDS)

    def _manifest_age(self) -> float | None:
        """Seconds since the manifest was put there, a little generously."""
        done = self._system.run(["stat", "-c", "%.6Y", cp.MANIFEST])
        now = self._system.run(["date", "+%s.%N"])
        try:
            return float(now.out) - float(done.out) + 0.2
        except ValueError:
            return None

    def _pods(self) -> list[str]:
        return [name for name in self._system.names(cp.LOGS) if name.startswith(cp.POD_PREFIX)]

    def _starts(self, before: set[str]) -> int:
        """How often kubelet has started the newest kube-scheduler pod's container again."""
        return max((self._restarts(name) for name in self._pods() if name not in before), default=0)

    def _restarts(self, pod: str) -> int:
        logs = self._system.names(f"{cp.LOGS}/{pod}/kube-scheduler")
        return max((int(name[:-4]) for name in logs if re.match(r"^[0-9]+\.log$", name)), default=0)

    def _last_words(self, before: set[str]) -> str:
        """The last lines that kube-scheduler's container has written."""
        pods = [name for name in self._pods() if name not in before] or self._pods()
        for pod in pods:
            text = self._system.read(f"{cp.LOGS}/{pod}/kube-scheduler/{self._restarts(pod)}.log")
            if text:
                return last_words(text)
        return "it has written no log"


def last_words(log: str) -> str:
    """The lines of a container's log that say what is wrong: the last three errors, else the last three lines."""
    # A line is "<time> stderr F <text>".
    lines = [line.split(" ", 3)[-1].strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"^[EF][0-9]{4} |^Error|.*\berr=|panic:", line)]
    return " | ".join((telling or lines)[-3:])
