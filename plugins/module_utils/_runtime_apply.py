# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Give a node's container runtime a new configuration, prove that it runs with it, or put the old one back.

What is the same for every runtime is here; how each is asked, made to read its files and judged is its ``Engine``.
"""

from __future__ import annotations

import posixpath
import re
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import (
    Kept,
    Put,
    PutBack,
    Replacement,
    check_unchanged,
    digest,
)
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

POLL_SECONDS = 0.5
# In the name of every drop-in of ours.
OURS = "kubegpu"


class Meaning(t.NamedTuple):
    """What a runtime says that its files amount to.

    :param what: in the runtime's own form; compared as a whole. None where the runtime can't be asked.
    :param error: its own words where it can't read them.
    """

    what: t.Any
    error: str = ""


class Engine(t.Protocol):
    """One kind of container runtime on one node."""

    name: str
    """As people call it."""
    unit: str
    """Its systemd unit."""
    record: str
    """Where the old files are written down while a change is under way."""

    def refuse(self) -> None:
        """Look whether the change can be made at all.

        :raises ShareError: it can't; nothing was changed.
        """

    def put(self) -> Put | None:
        """How one file is written; None for the usual way."""

    def show(self, text: str) -> str:
        """A file as the controller sees it: without credentials."""

    def reveal(self, text: str, real: str) -> str:
        """A text that was made from a shown one, with the credentials of the real one."""

    def accompany(self, changes: list[Replacement]) -> list[Replacement]:
        """The changes, with files of our own beside them; in the order in which they are written."""

    def meaning(self) -> Meaning:
        """What the files on disk amount to, by the runtime itself."""

    def objections(self, before: Meaning, after: Meaning) -> list[str]:
        """Why new files, which no daemon has read yet, won't do."""

    def activate(self, put_back: PutBack, timeout: float) -> str:
        """Make the daemon run with the files on disk; why it couldn't, or nothing."""

    def unwell(self) -> tuple[str, bool]:
        """Why the daemon isn't healthy (or nothing), and whether waiting can't help."""

    def running(self) -> t.Any:
        """What the running daemon says of itself; compared as a whole. None where it can't be asked."""

    def shortcomings(self) -> list[str]:
        """Why the running daemon isn't what is wanted."""

    def words(self, journal: str) -> str:
        """The telling lines of the daemon's journal."""

    def result(self) -> dict[str, t.Any]:
        """What the module returns after a change."""


class Apply:
    """One change of a container runtime's configuration on the node.

    :param timeout: seconds that the runtime has to come up healthy.
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
        self._put_back = PutBack(system, engine.record, engine.put())

    def run(self, changes: t.Sequence[Replacement]) -> dict[str, t.Any]:
        """Write, ask the runtime whether that is what was wanted, make it read the files and wait until it is healthy.

        :param changes: texts as the controller knows them, in the order in which they have to be written.
        :returns: what the module returns.
        :raises ShareError: nothing was changed.
        :raises NotInEffect: the old files are back and the runtime runs with them, or the message says otherwise.
        """
        engine = self._engine
        engine.refuse()
        check_unchanged(changes, self._shown)
        before, ran = engine.meaning(), engine.running()
        real = engine.accompany([self._revealed(one) for one in changes])
        kept = self._written(real)
        after = engine.meaning()
        wrong = [after.error] if after.error else engine.objections(before, after) if changes else []
        if wrong:
            # The runtime was only asked: putting the files back is all.
            self._put_back.restore(kept)
            self._put_back.forget()
            raise NotInEffect(
                f"{engine.name}'s configuration is as it was, because the new one would not do: {'; '.join(wrong)}"
            )
        self._activate(kept, ran)
        self._put_back.forget()
        for one in changes:
            if one.after is None and OURS in posixpath.basename(one.path):
                # The folder of a drop-in may hold others' files, and then it stays.
                self._system.run(["rmdir", posixpath.dirname(one.path)])
        return engine.result()

    # ----------------------------------------------------------------- files

    def _shown(self, path: str) -> str | None:
        text = self._system.read(path)
        return None if text is None else self._engine.show(text)

    def _revealed(self, change: Replacement) -> Replacement:
        real = self._system.read(change.path)
        after = None if change.after is None else self._engine.reveal(change.after, real or "")
        return Replacement(change.path, digest(real), after)

    def _written(self, changes: t.Sequence[Replacement]) -> list[Kept]:
        """The new files are in place, or the old ones are."""
        kept = self._put_back.keep(changes)
        try:
            self._put_back.replace(changes, kept)
        except ShareError as error:
            try:
                self._put_back.restore(kept)
            except ShareError as again:
                raise ShareError(
                    f"{error}; putting back what was written before failed too ({again}): run again when there is room"
                ) from error
            self._put_back.forget()
            # What even root may not do has one usual reason.
            hint = " (immutable? lsattr shows it)" if "not permitted" in str(error) else ""
            raise ShareError(f"{error}{hint}; {self._engine.name}'s configuration is as it was") from error
        return kept

    # ----------------------------------------------------------------- the daemon

    def _activate(self, kept: t.Sequence[Kept], ran: t.Any) -> None:
        name = self._engine.name
        failure = self._activated() or "; ".join(self._engine.shortcomings())
        if not failure:
            return
        words = self._words()
        if all(digest(one.text) == one.replaced_by for one in kept):
            # There is no other configuration to go back to.
            raise NotInEffect(f"{name} doesn't come up ({failure}): {words}")
        self._put_back.restore(kept)
        again = self._activated()
        if not again and ran is not None and self._engine.running() != ran:
            again = "it says that it runs with another one than before"
        if again:
            raise NotInEffect(
                f"{name} didn't come up with the new configuration ({failure}: {words}), and with the old one, "
                f"which is back in place, it doesn't come up either ({again}): {self._words()}"
            )
        self._put_back.forget()
        raise NotInEffect(
            f"{name} didn't come up with the new configuration and runs with the old one again ({failure}): {words}"
        )

    def _activated(self) -> str:
        """Make the daemon run with the files and wait; why it isn't healthy, or nothing."""
        end = self._now() + self._timeout
        failure = self._engine.activate(self._put_back, self._timeout)
        if failure:
            return failure
        while True:
            reason, final = self._engine.unwell()
            if not reason or final or self._now() >= end:
                return reason
            self._sleep(POLL_SECONDS)

    def _words(self) -> str:
        return self._engine.words(journal(self._system, self._engine.unit))


def restart(system: System, unit: str, timeout: float) -> str:
    """Restart a unit; why that failed, or nothing."""
    # Start limits count failures of before; they are no reason to refuse this start.
    system.run(["systemctl", "reset-failed", unit])
    done = system.run(["systemctl", "restart", unit], timeout=timeout)
    return "" if done.rc == 0 else f"systemctl restart ended with {done.rc}"


def journal(system: System, unit: str) -> str:
    """What a unit has written since it was last started."""
    shown = system.run(["systemctl", "show", unit, "-p", "InvocationID", "--value"])
    which = [f"_SYSTEMD_INVOCATION_ID={shown.out.strip()}"] if shown.out.strip() else ["-u", unit]
    return system.run(["journalctl", *which, "-n", "200", "-o", "cat", "--no-pager"]).out


# A plugin of containerd that fails is only a warning to it.
_WRONG = re.compile(
    r"level=\"?(error|fatal)|^(containerd|dockerd|crio|k3s|rke2): |panic:|failed to load plugin.*cri"
    r"|failed to start|unable to configure|validating"
)


def last_words(text: str) -> str:
    """The lines of a journal that say what is wrong: the last three errors, else the last three lines."""
    lines = [re.sub(r'^time="[^"]*" ', "", line.strip()) for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if _WRONG.search(line)]
    return " | ".join((telling or lines)[-3:]) or "its journal is empty"
