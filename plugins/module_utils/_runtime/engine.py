# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Change a daemon's configuration files, prove that the daemon runs with them, or roll back.

What is the same for every daemon is in ``ConfigUpdate``; how one is queried, activated and validated is its ``Engine``.
"""

from __future__ import annotations

import errno
import json
import posixpath
import re
import time
import typing as t

from .._core.digest import digest
from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.secrets import mask_words
from .._core.types import JsonObject
from .._host.file_transaction import Backup, FileTransaction, Put, Replacement, check_unchanged
from .._host.system import System
from .types import Loss

POLL_SECONDS = 0.5
# Settings that a message names.
SHOWN = 5


class ConfigOnDisk(t.NamedTuple):
    """The effective configuration of the files on disk, as the daemon's own program computes it.

    :param value: in the daemon's own form, compared as a whole; None where the program can't compute it.
    :param error: the program's message where it rejects the files.
    """

    value: t.Any
    error: str = ""


class Engine:
    """One kind of daemon on one node; the defaults fit a daemon that can only be restarted.

    :ivar name: for messages.
    :ivar unit: its systemd unit.
    :ivar record: path of the transaction's record while a change is under way.
    """

    name: str
    unit: str
    record: str

    def __init__(self, system: System) -> None:
        self._system = system
        self.restarted = False
        # The configuration that the daemon runs with; None where it has to be restarted in any case.
        self._active: t.Any = None

    def check_preconditions(self, changes: t.Sequence[Replacement]) -> None:
        """Refuse a change that can't be made, and find out whether the daemon runs with the files on disk.

        :param changes: of the files; none where the plan consists of a restart alone.
        :raises ShareError: nothing was changed.
        """

    def file_writer(self) -> Put | None:
        """Return the function that writes one file; None for ``System.write``."""
        return None

    def redact(self, text: str) -> str:
        """Replace the credentials of a file's text by placeholders, as the controller received it."""
        return text

    def unredact(self, text: str, real: str) -> str:
        """Restore the credentials of ``real`` in a text that was made from its redacted form."""
        return text

    def add_managed_files(self, changes: list[Replacement]) -> list[Replacement]:
        """Add this engine's own files to the changes, in the order in which they are written."""
        return changes

    def config_on_disk(self) -> ConfigOnDisk:
        """Query the effective configuration of the files on disk."""
        return ConfigOnDisk(None)

    def own_files(self) -> list[str]:
        """Return the paths of files that hold settings of this collection alone, and that may be empty."""
        return []

    def compare(self, before: ConfigOnDisk, after: ConfigOnDisk) -> tuple[list[str], list[Loss]]:
        """Compare the effective configurations of the old files and of new ones that no daemon has read yet.

        :returns: the reasons to reject the new files, and the user's settings that they would alter.
        """
        return [], []

    def activate(self, transaction: FileTransaction, timeout: float) -> str:
        """Make the daemon run with the files on disk.

        :param timeout: seconds that a restart may take.
        :returns: the error, or nothing.
        """
        if self._active is not None and self.config_on_disk().value == self._active:
            return ""
        self._active = None
        return self.restart(timeout)

    def health_error(self) -> tuple[str, bool]:
        """Return why the daemon isn't healthy (or nothing), and whether waiting is pointless."""
        raise NotImplementedError

    def running_config(self) -> t.Any:
        """Query the running daemon's configuration, compared as a whole; None where it can't be queried."""
        return None

    def unmet_requirements(self) -> list[str]:
        """List how the running daemon differs from the requested state."""
        return []

    def journal_errors(self, journal: str) -> str:
        """Extract the error lines of the daemon's journal, without credentials."""
        return mask_words(error_lines(journal))

    def result(self) -> JsonObject:
        """Return the module's results after a change."""
        return {}

    def restart(self, timeout: float) -> str:
        """Restart the unit; return the error, or nothing."""
        self.restarted = True
        # systemd's start limit counts earlier failures, and would refuse this start.
        self._system.run(["systemctl", "reset-failed", self.unit])
        done = self._system.run(["systemctl", "restart", self.unit], timeout=timeout)
        if done.rc == 0:
            return ""
        # systemctl itself says why nothing was started, as of a masked unit, of which no journal tells.
        reason = " ".join(done.err.split())
        return f"systemctl restart ended with {done.rc}" + (f": {reason}" if reason else "")

    def journal(self, *options: str) -> str:
        """Read the journal of the unit's current start.

        :param options: further options of journalctl.
        """
        shown = self._system.run(["systemctl", "show", self.unit, "-p", "InvocationID", "--value"])
        which = [f"_SYSTEMD_INVOCATION_ID={shown.out.strip()}"] if shown.out.strip() else ["-u", self.unit]
        return self._system.run(["journalctl", *which, *options, "-o", "cat", "--no-pager"]).out


class ConfigUpdate:
    """One change of a daemon's configuration files.

    :param timeout: seconds that the daemon has to become healthy.
    :param sleep: injected by tests, as ``now`` is.
    """

    def __init__(
        self,
        system: System,
        engine: Engine,
        timeout: float,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._engine = engine
        self._timeout = timeout
        self._sleep = sleep
        self._now = now
        self._transaction = FileTransaction(system, engine.record, engine.file_writer())

    def run(self, changes: t.Sequence[Replacement]) -> JsonObject:
        """Write the files, validate them, activate them and wait until the daemon is healthy.

        :param changes: redacted texts from the controller, in the order in which they are written.
        :returns: the module's results.
        :raises ShareError: nothing was changed.
        :raises NotInEffect: the change was rolled back; the message says if that failed.
        """
        engine = self._engine
        engine.check_preconditions(changes)
        texts = {change.path: self._system.read(change.path) for change in changes}
        check_unchanged(changes, {path: None if text is None else engine.redact(text) for path, text in texts.items()})
        before, ran_with = engine.config_on_disk(), engine.running_config()
        files = []
        for change in changes:
            real = texts[change.path]
            text = None if change.after is None else engine.unredact(change.after, real or "")
            files.append(Replacement(change.path, digest(real), text))
        files = engine.add_managed_files(files)
        backups = self._write(files)
        after = engine.config_on_disk()
        reasons = [after.error] if after.error else []
        losses: list[Loss] = []
        if changes and not after.error:
            reasons, losses = engine.compare(before, after)
        if reasons:
            self._undo(backups)
            raise NotInEffect(f"{engine.name} rejects the new configuration; it was rolled back: {'; '.join(reasons)}")
        if losses and before.value:
            # An earlier file of ours may have hidden what the user wrote: compare with his files alone.
            self._transaction.restore(backups)
            _reasons, losses = engine.compare(self._users_config(before), after)
            if losses:
                self._undo(backups)
                paths = [mask_words(".".join(loss.path)) for loss in losses]
                raise NotInEffect(explain(engine.name, losses, engine.redact), losses=paths)
            backups = self._write(files)
        self._activate(backups, ran_with)
        self._transaction.commit()
        for change in changes:
            # Every drop-in of this collection has its name.
            if change.after is None and "kubegpu" in posixpath.basename(change.path):
                # rmdir refuses a directory that holds other files.
                self._system.run(["rmdir", posixpath.dirname(change.path)])
        return engine.result()

    def _undo(self, backups: t.Sequence[Backup]) -> None:
        """Restore the old files, which is enough while no daemon has read the new ones."""
        self._transaction.restore(backups)
        self._transaction.commit()

    def _users_config(self, now: ConfigOnDisk) -> ConfigOnDisk:
        """Query the effective configuration of the user's files alone, while ours are empty.

        :param now: that of all files, which is the same where none of ours exists.
        """
        texts = {path: self._system.read(path) for path in self._engine.own_files()}
        empty = [Replacement(path, digest(text), "") for path, text in texts.items() if text is not None]
        if not empty:
            return now
        backups = self._transaction.backup(empty)
        try:
            self._transaction.replace(empty, backups)
            return self._engine.config_on_disk()
        finally:
            self._transaction.restore(backups)

    def _write(self, changes: t.Sequence[Replacement]) -> list[Backup]:
        """Write all files, or none."""
        backups = self._transaction.backup(changes)
        try:
            self._transaction.replace(changes, backups)
        except ShareError as error:
            try:
                self._transaction.restore(backups)
            except ShareError as again:
                raise ShareError(
                    f"{error}; the rollback of files written before failed too ({again}): free some disk space and run "
                    "again"
                ) from error
            self._transaction.commit()
            # Only an immutable file refuses root.
            immutable = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EPERM
            hint = " (immutable? check with lsattr)" if immutable else ""
            raise ShareError(f"{error}{hint}; {self._engine.name}'s configuration was rolled back") from error
        return backups

    def _activate(self, backups: t.Sequence[Backup], ran_with: t.Any) -> None:
        engine = self._engine
        failure = self._activation_error() or "; ".join(engine.unmet_requirements())
        if not failure:
            return
        errors = self._journal_errors()
        if all(digest(backup.text) == backup.replaced_by for backup in backups):
            # No file was changed, so there is nothing to roll back to.
            raise NotInEffect(f"{engine.name} doesn't become healthy ({failure}): {errors}")
        self._transaction.restore(backups)
        again = self._activation_error()
        if not again and ran_with is not None and engine.running_config() != ran_with:
            again = "its running configuration differs from the one before"
        if again:
            raise NotInEffect(
                f"{engine.name} didn't become healthy with the new configuration ({failure}: {errors}). The old "
                f"configuration was restored, and {engine.name} isn't healthy with it either ({again}): "
                f"{self._journal_errors()}"
            )
        self._transaction.commit()
        raise NotInEffect(
            f"{engine.name} didn't become healthy with the new configuration ({failure}); rolled back, it runs with "
            f"the old one: {errors}"
        )

    def _activation_error(self) -> str:
        """Activate the files on disk and wait; return why the daemon isn't healthy, or nothing."""
        end = self._now() + self._timeout
        failure = self._engine.activate(self._transaction, self._timeout)
        if failure:
            return failure
        while True:
            reason, final = self._engine.health_error()
            if not reason or final or self._now() >= end:
                return reason
            self._sleep(POLL_SECONDS)

    def _journal_errors(self) -> str:
        return self._engine.journal_errors(self._engine.journal("-n", "200"))


def require_binary(system: System, binary: str, consequence: str) -> None:
    """Check that NVIDIA's runtime is installed.

    :param consequence: completes the message.
    :raises BadInput: it isn't.
    """
    if not system.exists(binary):
        raise BadInput(f"runtime_nvidia_binary: {binary} isn't on this node, {consequence}")


def explain(name: str, lost: t.Sequence[Loss], redact: t.Callable[[str], str]) -> str:
    """Explain which of the user's settings a change would have altered, in the words of his files.

    :param name: of the daemon.
    :param lost: at least one.
    :param redact: masks the credentials of a line as in a file.
    """
    lines = []
    for loss in lost[:SHOWN]:
        *table, key = (
            part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part, ensure_ascii=False)
            for part in loss.path
        )
        where = " in " + redact(f"[{'.'.join(table)}]") if table else ""
        before, after = (
            "nothing" if value is None else redact(f"{key} = {value}").removeprefix(f"{key} = ")
            for value in (loss.before, loss.after)
        )
        lines.append(f"your `{key}`{where} would be {after} instead of {before}")
    if len(lost) > SHOWN:
        lines.append(f"and {len(lost) - SHOWN} more")
    return (
        f"{name}'s configuration was rolled back, because more than NVIDIA's runtime would change: {'; '.join(lines)}; "
        f"this collection doesn't write these, {name} reads them differently beside the new settings: write the values "
        "that you want into your own files, and run again"
    )


# containerd logs a plugin that fails only as a warning.
_ERROR = re.compile(
    r"level=\"?(error|fatal)|^(containerd|dockerd|crio|k3s|rke2): |panic:|failed to load plugin.*cri"
    r"|failed to start|unable to configure|validating"
)


def error_lines(text: str) -> str:
    """Return a journal's last three errors, else its last three lines."""
    lines = [re.sub(r'^time="[^"]*" ', "", line.strip()) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return " | ".join((errors or lines)[-3:]) or "its journal is empty"
