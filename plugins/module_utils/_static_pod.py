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
from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._probe import Probe, probe
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import (
    Kept,
    PutBack,
    Replacement,
    check_unchanged,
    digest,
)
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

POLL_SECONDS = 0.5
STABLE_SECONDS = 4.0
# Kubelet looks at its folder by itself every 20 s.
NOTICED_SECONDS = 25.0
# Kubelet has started the container again twice: it won't come up by waiting.
FAILED_STARTS = 2


@dataclasses.dataclass(frozen=True)
class Proof:
    """When kube-scheduler counts as running as it should.

    :param config: the --config of its process; empty for none.
    :param urls: each of these answers 200.
    :param policy: the --policy-config-file of its process; empty for none.
    """

    config: str
    urls: t.Sequence[str]
    policy: str = ""

    def named_by(self, one: cp.Scheduler) -> bool:
        return (one.config, one.policy) == (self.config, self.policy)


class Apply:
    """One change of a static kube-scheduler on its machine.

    :param timeout: seconds that kube-scheduler has to come up healthy.
    :param manifest: its manifest, in the folder that kubelet watches.
    """

    def __init__(
        self,
        system: System,
        timeout: float,
        ask: Probe = probe,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
        manifest: str = cp.MANIFEST,
    ) -> None:
        self._system = system
        self._timeout = timeout
        self._manifest = manifest
        self._watched = posixpath.dirname(manifest)
        self._staged = ""
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
        if any(one.path == self._manifest for one in changes) and self._system.link(self._manifest) is not None:
            raise ShareError(f"{self._manifest} is a symbolic link; nothing was changed")
        self._staged = self._staging()
        earlier = self._put_back.pending() and self._written(self._manifest) >= self._written(cp.PENDING)
        replaced = earlier or any(one.path == self._manifest for one in changes)
        pods = set(self._pods())
        old = self._running_as(self._system.read(self._manifest))
        # kube-scheduler needn't be root, so that its folder is for everybody to read.
        done = self._system.run(["mkdir", "-p", "-m", "0755", cp.FOLDER])
        if done.rc != 0:
            raise ShareError(f"{cp.FOLDER} can't be made: {done.err.strip()}")
        kept = self._put_back.keep(changes)
        older: float | None = None if replaced else STABLE_SECONDS
        for one in kept:
            if one.path == self._manifest:
                old |= self._running_as(one.text)
                if digest(one.text) == one.replaced_by:
                    # It becomes again what it was before an earlier run, of which kubelet may have seen nothing.
                    older = NOTICED_SECONDS
        try:
            self._put_back.replace(changes, kept)
        except ShareError as error:
            self._undo(kept, error)
        wrong = self._wait(proof, older, pods, old)
        if wrong:
            self._give_up(kept, proof, wrong, pods)
        self._finish()

    def _finish(self) -> None:
        """The files are as they should stay: nothing of the way there is left."""
        for path in self._stages():
            self._system.remove(path)
        self._put_back.forget()
        if not any(self._system.exists(path) for path in (cp.CONFIG, cp.POLICY)):
            self._system.run(["rmdir", cp.FOLDER])

    def _undo(self, kept: t.Sequence[Kept], error: ShareError) -> t.NoReturn:
        """A file can't be written: those before it are put back, and kube-scheduler has seen none of them."""
        known, old = set(self._pods()), self._running_as(self._system.read(self._manifest))
        written = digest(self._system.read(self._manifest))
        try:
            self._put_back.restore(kept)
        except ShareError as again:
            raise ShareError(
                f"{error}; putting back what was written before failed too ({again}): run again when there is room"
            ) from error
        if digest(self._system.read(self._manifest)) != written:
            # The manifest itself was replaced before, and what failed came after it.
            still = self._wait(self._as_before(()), NOTICED_SECONDS, known, old)
            if still:
                raise ShareError(f"{error}; the old files are back, and kube-scheduler doesn't come up ({still})")
        self._finish()
        raise ShareError(f"{error}; kube-scheduler's files are as they were") from error

    def _give_up(self, kept: t.Sequence[Kept], proof: Proof, wrong: str, pods: set[str]) -> t.NoReturn:
        words = self._last_words(pods)
        if all(digest(one.text) == one.replaced_by for one in kept):
            self._finish()
            raise NotInEffect(f"kube-scheduler isn't healthy ({wrong}): {words}")
        known, old = set(self._pods()), self._running_as(self._system.read(self._manifest))
        self._put_back.restore(kept)
        still = self._wait(self._as_before(proof.urls), NOTICED_SECONDS, known, old)
        if still:
            raise NotInEffect(
                f"kube-scheduler didn't come up with the new configuration ({wrong}: {words}), and with the old one, "
                f"which is back in place, it doesn't come up either ({still}): {self._last_words(known)}"
            )
        self._finish()
        raise NotInEffect(
            "kube-scheduler didn't come up with the new configuration and runs with the old one again "
            f"({wrong}): {words}"
        )

    def _as_before(self, urls: t.Sequence[str]) -> Proof:
        config, policy = _named(self._system.read(self._manifest))
        return Proof(config, urls, policy)

    def _running_as(self, manifest: str | None) -> set[int]:
        return {one.pid for one in cp.running(self._system) if (one.config, one.policy) == _named(manifest)}

    # ----------------------------------------------------------------- files

    def _stages(self) -> tuple[str, str]:
        """Where a new manifest may be made ready: never where kubelet looks."""
        name = posixpath.basename(cp.STAGED)
        return cp.STAGED, posixpath.join(posixpath.dirname(self._watched), name)

    def _staging(self) -> str:
        """The one from which a file gets into the watched folder in one step.

        :raises ShareError: there is none.
        """
        device = self._device(self._watched)
        parents = (posixpath.dirname(cp.FOLDER), posixpath.dirname(self._watched))
        for path, parent in zip(self._stages(), parents):
            if device and self._device(parent) == device:
                return path
        raise ShareError(
            f"{self._watched} is a file system of its own, so that kubelet could see a half-written manifest there; "
            "nothing was changed"
        )

    def _device(self, path: str) -> str:
        return self._system.run(["stat", "-L", "-c", "%d", path]).out.strip()

    def _put(self, path: str, text: str, mode: int) -> None:
        """Kubelet runs every file of its manifests' folder, so that nothing unfinished is ever written there."""
        if posixpath.dirname(path) != self._watched:
            self._system.write(path, text, mode)
            return
        self._system.write(self._staged, text, mode)
        done = self._system.run(["mv", "-fT", self._staged, path])
        if done.rc != 0:
            raise ShareError(f"{path} can't be written: {done.err.strip()}")

    # ----------------------------------------------------------------- proof

    def _wait(self, proof: Proof, older: float | None, pods: set[str], old: set[int]) -> str:
        """Wait for the proof; why it failed, or nothing.

        :param older: how many seconds a process has to be healthy that was there before the manifest was written; None
            where it doesn't count at all.
        :param pods: those that kubelet had started before.
        :param old: processes that have to end when a new one is there.
        """
        settled = STABLE_SECONDS if older is None else min(older, self._timeout / 2)
        oldest = self._manifest_age()
        end = self._now() + self._timeout
        begun = self._now()
        since: dict[int, float] = {}
        while True:
            limit = None if oldest is None else oldest + (self._now() - begun)
            there = cp.running(self._system)
            young = {one.pid for one in there if limit is None or one.age <= limit}
            good = {one.pid for one in there if proof.named_by(one) and (older is not None or one.pid in young)}
            two = old & {one.pid for one in there} - young - good
            if good and not two and all(self._ask(url) == 200 for url in proof.urls):
                since = {pid: since.get(pid, self._now()) for pid in good}
                for pid, first in since.items():
                    if self._now() - first >= (STABLE_SECONDS if pid in young else settled):
                        return ""
            else:
                since = {}
            if self._starts(pods) >= FAILED_STARTS:
                return "its container ends again and again"
            if self._now() >= end:
                what = "no new process with this configuration was started"
                if good:
                    what = "its old process is still there" if two else "it isn't healthy"
                return f"{what} after {self._timeout:g} s"
            self._sleep(POLL_SECONDS)

    def _manifest_age(self) -> float | None:
        """Seconds since the manifest was put there, a little generously."""
        written = self._written(self._manifest)
        now = self._system.run(["date", "+%s.%N"])
        try:
            return float(now.out) - written + 0.2 if written else None
        except ValueError:
            return None

    def _written(self, path: str) -> float:
        """When a file was written; 0 where that can't be told."""
        try:
            return float(self._system.run(["stat", "-c", "%.6Y", path]).out)
        except ValueError:
            return 0.0

    def _pods(self) -> list[str]:
        return [name for name in self._system.names(cp.LOGS) if name.startswith(cp.POD_PREFIX)]

    def _starts(self, before: set[str]) -> int:
        """How often kubelet has started the newest kube-scheduler pod's container again."""
        return max((cp.starts(self._system, name) for name in self._pods() if name not in before), default=0)

    def _last_words(self, before: set[str]) -> str:
        """The last lines that kube-scheduler's container has written."""
        pods = [name for name in self._pods() if name not in before] or self._pods()
        for pod in pods:
            # A container that was started this moment has written nothing; the one before it has.
            for number in range(cp.starts(self._system, pod), -1, -1):
                text = self._system.read(f"{cp.LOGS}/{pod}/{cp.CONTAINER}/{number}.log")
                if text:
                    return last_words(text)
        return "it has written no log"


def _named(manifest: str | None) -> tuple[str, str]:
    """What a manifest gives kube-scheduler: --config and --policy-config-file."""
    return cp.flag(manifest or "", "config"), cp.flag(manifest or "", "policy-config-file")


def last_words(log: str) -> str:
    """The lines of a container's log that say what is wrong: the last three errors, else the last three lines."""
    # A line is "<time> stderr F <text>".
    lines = [line.split(" ", 3)[-1].strip() for line in log.splitlines() if line.strip()]
    # 1.36 says so at every start.
    lines = [line for line in lines if "The manifest file is empty, ignoring" not in line]
    telling = [line for line in lines if re.match(r"^[EF][0-9]{4} |^Error|.*\berr=|panic:", line)]
    return " | ".join((telling or lines)[-3:])
