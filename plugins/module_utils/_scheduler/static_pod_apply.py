# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Replace the files of a static kube-scheduler and prove that a new process runs with them, or restore the old ones."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .._core.digest import digest
from .._core.errors import NotInEffect, ShareError
from .._host.file_transaction import Backup, FileTransaction, Replacement, check_unchanged
from .._host.http_probe import Probe
from .._host.system import System
from .._host.systemd import changed_at
from . import control_plane as cp
from .constants import CONFIG, FOLDER, POLICY

POLL_SECONDS = 0.5
STABLE_SECONDS = 4.0
# Kubelet scans its folder of manifests every 20 s.
NOTICED_SECONDS = 25.0
# After so many restarts of the container waiting doesn't help.
FAILED_STARTS = 2


@dataclasses.dataclass(frozen=True)
class Proof:
    """What has to be true of the kube-scheduler process.

    :param config: its --config; empty for none.
    :param urls: each of these answers 200.
    :param policy: its --policy-config-file; empty for none.
    :param loads: the path on the machine of each file that it has to see, by its path for the process.
    """

    config: str
    urls: t.Sequence[str]
    policy: str
    loads: t.Mapping[str, str] = dataclasses.field(default_factory=dict)

    def matches(self, process: cp.Process) -> bool:
        return (process.config, process.policy) == (self.config, self.policy)


class Apply:
    """One change of a static kube-scheduler on its machine.

    :param timeout: seconds that kube-scheduler has to become healthy.
    :param manifest: path of its manifest, in the folder that kubelet watches.
    """

    def __init__(
        self,
        system: System,
        timeout: float,
        ask: Probe,
        sleep: t.Callable[[float], None],
        now: t.Callable[[], float],
        manifest: str,
    ) -> None:
        self._system = system
        self._timeout = timeout
        self._manifest = manifest
        self._watched = posixpath.dirname(manifest)
        self._staged = ""
        self._ask = ask
        self._sleep = sleep
        self._now = now
        self._files = FileTransaction(system, cp.PENDING, self._put)

    def run(self, changes: t.Sequence[Replacement], proof: Proof) -> None:
        """Write the files in this order and wait until kube-scheduler matches the proof.

        :raises ShareError: nothing was written.
        :raises NotInEffect: the old files are restored and kube-scheduler runs with them, or the message says why not.
        """
        check_unchanged(changes, {change.path: self._system.read(change.path) for change in changes})
        if any(change.path == self._manifest for change in changes) and self._system.link(self._manifest) is not None:
            raise ShareError(f"{self._manifest} is a symbolic link; nothing was changed")
        self._staged = self._staging()
        interrupted = self._files.pending() and self._written(self._manifest) >= self._written(cp.PENDING)
        replaced = interrupted or any(change.path == self._manifest for change in changes)
        pods = set(self._pods())
        manifest = self._system.read(self._manifest)
        ending = self._running_with(manifest)
        # kube-scheduler may run without root, so everybody can read the folder.
        done = self._system.run(["mkdir", "-p", "-m", "0755", FOLDER])
        if done.rc != 0:
            raise ShareError(f"{FOLDER} can't be created: {done.err.strip()}")
        backups = self._files.backup(changes)
        old_seconds: float | None = None if replaced else STABLE_SECONDS
        for backup in backups:
            if backup.path == self._manifest:
                if backup.text != manifest:
                    ending |= self._running_with(backup.text)
                if digest(backup.text) == backup.replaced_by:
                    # It returns to its state before an earlier run, which kubelet may not have noticed.
                    old_seconds = NOTICED_SECONDS
        try:
            self._files.replace(changes, backups)
        except ShareError as error:
            self._undo(backups, error)
        failure = self._wait(proof, old_seconds, pods, ending)
        if failure:
            self._roll_back(backups, proof, failure, pods)
        self._commit()

    def _commit(self) -> None:
        """Remove staged files and backups, and the folder where nothing is left in it."""
        for path in self._stages():
            self._system.remove(path)
        self._files.commit()
        if not any(self._system.exists(path) for path in (CONFIG, POLICY)):
            self._system.run(["rmdir", FOLDER])

    def _undo(self, backups: t.Sequence[Backup], error: ShareError) -> t.NoReturn:
        """Restore the files that were written before one that can't be; kube-scheduler has read none of them."""
        try:
            still = self._restore(backups, (), only_if_replaced=True)
        except ShareError as again:
            raise ShareError(
                f"{error}; restoring the files written before it failed too ({again}): free disk space and run again"
            ) from error
        if still:
            raise ShareError(f"{error}; the old files are restored, and kube-scheduler isn't healthy ({still})")
        self._commit()
        raise ShareError(f"{error}; kube-scheduler's files are restored") from error

    def _roll_back(self, backups: t.Sequence[Backup], proof: Proof, failure: str, pods: set[str]) -> t.NoReturn:
        log = self._log_errors(pods)
        if all(digest(backup.text) == backup.replaced_by for backup in backups):
            self._commit()
            raise NotInEffect(f"kube-scheduler isn't healthy ({failure}): {log}")
        known = set(self._pods())
        still = self._restore(backups, proof.urls)
        if still:
            raise NotInEffect(
                f"kube-scheduler didn't start with the new configuration ({failure}: {log}). The old configuration is "
                f"restored, and kube-scheduler isn't healthy with it either ({still}): {self._log_errors(known)}"
            )
        self._commit()
        raise NotInEffect(
            f"kube-scheduler didn't start with the new configuration ({failure}); rolled back, it runs with the old "
            f"one: {log}"
        )

    def _restore(self, backups: t.Sequence[Backup], urls: t.Sequence[str], only_if_replaced: bool = False) -> str:
        """Restore the files and wait for the old process; why it isn't healthy, or nothing.

        :param only_if_replaced: wait only where the manifest itself had been replaced.
        :raises ShareError: a file can't be restored.
        """
        known, ending = set(self._pods()), self._running_with(self._system.read(self._manifest))
        written = digest(self._system.read(self._manifest))
        self._files.restore(backups)
        manifest = self._system.read(self._manifest)
        if only_if_replaced and digest(manifest) == written:
            return ""
        config, policy = _named(manifest)
        return self._wait(Proof(config, urls, policy), NOTICED_SECONDS, known, ending)

    def _running_with(self, manifest: str | None) -> set[int]:
        named = _named(manifest)
        return {process.pid for process in cp.running(self._system) if (process.config, process.policy) == named}

    # ----------------------------------------------------------------- files

    def _stages(self) -> tuple[str, str]:
        """Return the paths where a new manifest may be staged, both outside kubelet's folder."""
        name = posixpath.basename(cp.STAGED)
        return cp.STAGED, posixpath.join(posixpath.dirname(self._watched), name)

    def _staging(self) -> str:
        """Return the path from which a file can be renamed into kubelet's folder.

        :raises ShareError: there is none.
        """
        device = self._device(self._watched)
        parents = (posixpath.dirname(FOLDER), posixpath.dirname(self._watched))
        for path, parent in zip(self._stages(), parents):
            if device and self._device(parent) == device:
                return path
        raise ShareError(
            f"{self._watched} is a file system of its own, so kubelet could read a half-written manifest there; "
            "nothing was changed"
        )

    def _device(self, path: str) -> str:
        return self._system.run(["stat", "-L", "-c", "%d", path]).out.strip()

    def _put(self, path: str, text: str, mode: int) -> None:
        """Write a file; kubelet runs every file of its folder, so manifests are renamed into it."""
        if posixpath.dirname(path) != self._watched:
            self._system.write(path, text, mode)
            return
        self._system.write(self._staged, text, mode)
        done = self._system.run(["mv", "-fT", self._staged, path])
        if done.rc != 0:
            raise ShareError(f"{path} can't be written: {done.err.strip()}")

    # ----------------------------------------------------------------- proof

    def _wait(self, proof: Proof, old_seconds: float | None, pods: set[str], ending: set[int]) -> str:
        """Wait for the proof; why it failed, or nothing.

        :param old_seconds: how long a process older than the manifest has to be healthy; None where it doesn't count.
        :param pods: pods that kubelet had started before.
        :param ending: the processes that have to end when a new one runs, by PID.
        """
        manifest_age = self._manifest_age()
        begun = self._now()
        healthy_since: dict[int, float] = {}
        while True:
            waited = self._now() - begun
            processes = cp.running(self._system)
            new = {process.pid for process in processes if manifest_age is None or process.age <= manifest_age + waited}
            pids = {process.pid for process in processes}
            counting = new if old_seconds is None else pids
            matching = {process.pid for process in processes if process.pid in counting and proof.matches(process)}
            # Those that see other files than the machine has, each with the reason.
            unseeing = {pid: reason for pid in matching if (reason := cp.unseen(self._system, pid, proof.loads))}
            proven = matching - set(unseeing)
            remaining = (ending & pids) - new - proven
            if proven and not remaining and all(self._ask(url) == 200 for url in proof.urls):
                healthy_since = {pid: healthy_since.get(pid, self._now()) for pid in proven}
                for pid, since in healthy_since.items():
                    required = STABLE_SECONDS
                    if pid not in new and old_seconds is not None:
                        required = min(old_seconds, self._timeout / 2)
                    if self._now() - since >= required:
                        return ""
            else:
                healthy_since = {}
            if self._restarts(pods) >= FAILED_STARTS:
                return "its container restarts again and again"
            if self._now() - begun >= self._timeout:
                if unseeing:
                    failure = next(iter(unseeing.values()))
                elif not proven:
                    failure = "no new process with this configuration was started"
                elif remaining:
                    failure = "its old process is still running"
                else:
                    failure = "it isn't healthy"
                return f"{failure} after {self._timeout:g} s"
            self._sleep(POLL_SECONDS)

    def _manifest_age(self) -> float | None:
        """Return the seconds since the manifest was written, rounded up a little."""
        written = self._written(self._manifest)
        now = self._system.run(["date", "+%s.%N"])
        try:
            return float(now.out) - written + 0.2 if written else None
        except ValueError:
            return None

    def _written(self, path: str) -> float:
        """Return when a file was written; 0 where that is unknown."""
        return (changed_at(self._system, [path]) or [0.0])[0]

    def _pods(self) -> list[str]:
        return [name for name in self._system.names(cp.LOGS) if name.startswith(cp.POD_PREFIX)]

    def _restarts(self, before: set[str]) -> int:
        """Return how often kubelet has restarted the container of the newest kube-scheduler pod."""
        return max((cp.restarts(self._system, name) for name in self._pods() if name not in before), default=0)

    def _log_errors(self, before: set[str]) -> str:
        """Return the last lines of kube-scheduler's log that report an error."""
        pods = [name for name in self._pods() if name not in before] or self._pods()
        for pod in pods:
            # A container that has just started has an empty log; its predecessor's is used.
            for number in range(cp.restarts(self._system, pod), -1, -1):
                text = self._system.read(f"{cp.log_folder(self._system, pod)}/{number}.log")
                if text:
                    return error_lines(text)
        return "it has written no log"


def _named(manifest: str | None) -> tuple[str, str]:
    """Return a manifest's --config and --policy-config-file."""
    return cp.flag(manifest or "", "config"), cp.flag(manifest or "", "policy-config-file")


def error_lines(log: str) -> str:
    """Return the last three errors in a container's log, else its last three lines."""
    # A line is "<time> stderr F <text>".
    lines = [line.split(" ", 3)[-1].strip() for line in log.splitlines() if line.strip()]
    # Kubernetes 1.36 logs this at every start.
    lines = [line for line in lines if "The manifest file is empty, ignoring" not in line]
    errors = [line for line in lines if re.match(r"^[EF][0-9]{4} |^Error|.*\berr=|panic:", line)]
    return " | ".join((errors or lines)[-3:])
