# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Give a node's containerd a new configuration, prove that it runs with it, or put the old one back."""

from __future__ import annotations

import posixpath
import re
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _containerd
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._observe_containerd import UNIT, dump, service
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

ARGUMENTS: dict[str, t.Any] = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "binary": {"type": "path", "default": "/usr/bin/nvidia-container-runtime"},
    "set_default": {"type": "bool", "default": True},
    "cdi": {"type": "bool", "default": True},
    "enable_cri": {"type": "bool", "default": False},
    "timeout": {"type": "int", "default": 120},
    "observed": {"type": "dict"},
    "plan": {"type": "dict"},
}


def work(params: dict[str, t.Any], system: System) -> dict[str, t.Any]:
    """The module: carry out the plan that the action plugin made on the controller."""
    if not params["plan"]:
        raise BadInput("plan: this module only runs through its action plugin, which makes the plan")
    wanted = _containerd.Wanted(
        params["state"] == "present", params["set_default"], params["binary"], params["cdi"], params["enable_cri"]
    )
    done = Apply(system, params["timeout"]).run(replacements(params["plan"]["files"]), wanted)
    return {"changed": True, **done}


class Apply:
    """One change of containerd's configuration on the node.

    :param timeout: seconds that containerd has to come up healthy.
    """

    def __init__(
        self,
        system: System,
        timeout: float,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._timeout = timeout
        self._sleep = sleep
        self._now = now
        self._put_back = PutBack(system, _containerd.PENDING_PATH)

    def run(self, changes: t.Sequence[Replacement], wanted: _containerd.Wanted) -> dict[str, t.Any]:
        """Write, ask containerd whether that is what was wanted, restart it and wait until it is healthy.

        :param changes: texts with masked credentials, in the order in which they have to be written.
        :returns: the new ``dump``.
        :raises ShareError: nothing was written.
        :raises NotInEffect: the old files are back and containerd runs with them, or the message says otherwise.
        """
        unit = service(self._system)
        binary = unit.binary or "containerd"
        if wanted.present and not self._system.exists(wanted.binary):
            raise BadInput(
                f"runtime_nvidia_binary: {wanted.binary} isn't on this node; containerd couldn't start any pod"
            )
        check_unchanged(changes, lambda path: _masked(self._system.read(path)))
        before, _error = dump(self._system, binary, unit.config_path)
        real = [
            Replacement(
                one.path,
                digest(self._system.read(one.path)),
                None if one.after is None else _containerd.unmask(one.after, self._system.read(one.path) or ""),
            )
            for one in changes
        ]
        kept = self._put_back.keep(real)
        self._put_back.replace(real, kept)
        after, error = dump(self._system, binary, unit.config_path)
        wrong = [error] if error else _containerd.shortcomings(_containerd.effective(after), wanted)
        if not wrong and before and changes:
            lost = _containerd.losses(_containerd.effective(before), _containerd.effective(after), wanted)
            wrong = [f"{path} would change" for path in lost]
        if wrong:
            # containerd was only asked, not restarted: putting the files back is all.
            self._put_back.restore(kept)
            self._put_back.forget()
            raise NotInEffect(
                f"containerd's configuration is as it was, because the new one would not do: {'; '.join(wrong)}"
            )
        self._restart(kept, binary)
        self._put_back.forget()
        for one in changes:
            if one.after is None:
                # The folder may hold others' files, and then it stays.
                self._system.run(["rmdir", posixpath.dirname(one.path)])
        return {"dump": _containerd.mask(after)}

    # ----------------------------------------------------------------- the daemon

    def _restart(self, kept: t.Sequence[Kept], binary: str) -> None:
        failure = self._restarted(binary)
        if not failure:
            return
        words = self._journal()
        if all(digest(one.text) == one.replaced_by for one in kept):
            # There is no other configuration to go back to.
            raise NotInEffect(f"containerd doesn't come up ({failure}): {words}")
        self._put_back.restore(kept)
        again = self._restarted(binary)
        if again:
            raise NotInEffect(
                f"containerd didn't come up with the new configuration ({failure}: {words}), and with the old one, "
                f"which is back in place, it doesn't come up either ({again}): {self._journal()}"
            )
        self._put_back.forget()
        raise NotInEffect(
            f"containerd didn't come up with the new configuration and runs with the old one again ({failure}): {words}"
        )

    def _restarted(self, binary: str) -> str:
        """Restart containerd and wait; why it isn't healthy, or nothing."""
        # Start limits count failures of before; they are no reason to refuse this start.
        self._system.run(["systemctl", "reset-failed", UNIT])
        end = self._now() + self._timeout
        done = self._system.run(["systemctl", "restart", UNIT], timeout=self._timeout)
        if done.rc != 0:
            return f"systemctl restart ended with {done.rc}"
        reason = "its CRI plugin didn't answer in time"
        while True:
            state = self._cri(binary)
            if state == "ok" and service(self._system).active:
                return ""
            if state == "error":
                return "its CRI plugin failed to load"
            if self._now() >= end:
                return reason
            self._sleep(POLL_SECONDS)

    def _cri(self, binary: str) -> str:
        """State of the CRI plugin by the running daemon: ok, error, or nothing while it can't be asked."""
        ctr = posixpath.join(posixpath.dirname(binary), "ctr")
        found = _containerd.effective(dump(self._system, binary, service(self._system).config_path)[0])
        socket = str(found.flat.get(("grpc", "address")) or _containerd.DEFAULT_SOCKET)
        done = self._system.run([ctr, "--address", socket, "--connect-timeout", "2s", "plugins", "ls"], timeout=10)
        state = cri_state(done.out) if done.rc == 0 else ""
        # Where the CRI is switched off on purpose (and we are only taking ours out), its absence is health.
        return "ok" if state == "missing" and _containerd.cri_disabled(found) else state

    def _journal(self) -> str:
        """The daemon's last words since it was last started."""
        shown = self._system.run(["systemctl", "show", UNIT, "-p", "InvocationID", "--value"])
        which = [f"_SYSTEMD_INVOCATION_ID={shown.out.strip()}"] if shown.out.strip() else ["-u", UNIT]
        done = self._system.run(["journalctl", *which, "-n", "200", "-o", "cat", "--no-pager"])
        return last_words(done.out)


def cri_state(listing: str) -> str:
    """State of the CRI in ``ctr plugins ls``: ok, error as soon as any part of it has failed, or missing."""
    states = []
    for line in listing.splitlines():
        columns = line.split()
        # From 2.0 on the CRI is three plugins: images, runtime and the service itself.
        if len(columns) >= 3 and (
            columns[0] == "io.containerd.cri.v1" or columns[:2] == ["io.containerd.grpc.v1", "cri"]
        ):
            states.append(columns[-1])
    if not states:
        return "missing"
    return "ok" if all(state == "ok" for state in states) else "error"


def last_words(journal: str) -> str:
    """The lines of a journal that say what is wrong: the last three errors, else the last three lines."""
    lines = [re.sub(r'^time="[^"]*" ', "", line.strip()) for line in journal.splitlines() if line.strip()]
    # A plugin that fails is only a warning to containerd.
    wrong = re.compile(r"level=(error|fatal)|^containerd: |panic:|failed to load plugin.*cri")
    telling = [line for line in lines if wrong.search(line)]
    return " | ".join((telling or lines)[-3:]) or "its journal is empty"


def _masked(text: str | None) -> str | None:
    return None if text is None else _containerd.mask(text)
