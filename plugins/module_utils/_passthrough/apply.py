# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Give cards to VFIO's drivers and back: record, files, images, then one group after the other, and the proof."""

from __future__ import annotations

import dataclasses
import posixpath
import typing as t

from .._boot import loaders
from .._core import plan as core_plan
from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.types import JsonObject
from .._driver.nouveau_apply import Image
from .._host.facts import distribution
from .._host.file_transaction import FileTransaction, Replacement, check_unchanged
from .._host.iommu import PCI, override_of
from .._host.system import System
from .._kubelet.source import KubeletSource
from . import files, messages
from .functions import DRIVERS, driver_name
from .holds import holds
from .kernel import Kernel
from .model import PENDING, RECORD, Before, FileBefore, Options, Record, State, module_of, parse_record
from .observe import boot_code, host, observe
from .plan import Bind, EndTransaction, ForgetRecord, GiveBack, PutRecord, Rebuild, make_plan
from .report import problems, report

PROBE = "/sys/bus/pci/drivers_probe"


class PassthroughReconciler:
    """The cards of the machine that the module runs on.

    :param kernel: writes what may wait in the kernel.
    :param kubelet: of the machine, for the pods that have a card.
    """

    def __init__(self, options: Options, system: System, kernel: Kernel, kubelet: KubeletSource) -> None:
        self._options = options
        self._system = system
        self._kernel = kernel
        self._kubelet = kubelet
        self._host = host(system)
        self._boot = boot_code(loaders.observe(system, dict(distribution(system))))
        # Of the last observation.
        self.state = State(self._host.family, False, {})

    def observe(self) -> State:
        state = observe(self._system, self._host)
        groups = sorted({function.group for function in state.functions.values() if function.vfio and function.group})
        self.state = dataclasses.replace(
            state,
            holds=tuple(holds(self._system, self._kubelet, state)),
            groups={group: self._kernel.group_state(group) for group in groups},
            boot=self._boot,
        )
        return self.state

    def plan(self, state: State) -> core_plan.Plan:
        return make_plan(self._options, state)

    def apply(self, state: State, plan: core_plan.Plan) -> None:
        steps = [change.step for change in plan.changes]
        replacements = [step for step in steps if isinstance(step, Replacement)]
        self._check_unchanged(state, replacements)
        record = state.record
        for step in steps:
            if isinstance(step, PutRecord):
                record = dataclasses.replace(record, functions=(*record.functions, *step.functions))
        self._replace(record, replacements)
        for step in steps:
            if isinstance(step, Rebuild):
                image = Image(
                    self._system, state.tool or "", step.path, step.release, files.RULE, step.inside, self._inside(step)
                )
                image.rebuild()
        if replacements:
            # The rules of the running udevd; it reads them anew by itself, but not at once.
            self._system.run(["udevadm", "control", "--reload"], timeout=30)
        for step in steps:
            if isinstance(step, GiveBack):
                self._give_back(step.before, step.exact)
            elif isinstance(step, Bind):
                self._bind(state, step)
        for step in steps:
            if isinstance(step, ForgetRecord):
                self._forget(step.addresses)
            elif isinstance(step, EndTransaction):
                FileTransaction(self._system, PENDING).commit()

    def _check_unchanged(self, state: State, replacements: t.Sequence[Replacement]) -> None:
        """Refuse to go on from a state that another run has changed: its record of the cards before would be lost.

        :raises ShareError: a file or the record is another one.
        """
        if parse_record(self._system.read(RECORD) or Record().text()) != state.record:
            raise ShareError(f"{RECORD} was changed by another process during this run; run again")
        check_unchanged(
            replacements, {replacement.path: self._system.read(replacement.path) for replacement in replacements}
        )

    def _inside(self, step: Rebuild) -> tuple[str, ...]:
        """Return the modules that the image must contain: not those that its kernel has built in."""
        if not step.inside:
            return ()
        built_in = (self._system.read(f"/lib/modules/{step.release}/modules.builtin") or "").replace("-", "_")
        return tuple(name for name in step.modules if f"/{name}.ko" not in built_in)

    def _replace(self, record: Record, replacements: t.Sequence[Replacement]) -> None:
        """Write the record, then the files, or restore them."""
        modes = {file.path: file.mode for file in record.files}

        def put(path: str, text: str, mode: int) -> None:
            known = modes.get(path, mode)
            self._system.write(path, text, 0o755 if path in files.EXECUTABLE and files.MARK in text else known)

        transaction = FileTransaction(self._system, PENDING, put)
        kept = transaction.backup(replacements)
        known = {file.path for file in record.files}
        before = [FileBefore(file.path, file.text, file.mode) for file in kept if file.path not in known]
        # Only the way there: on the way back all of them are known, or not of this collection.
        if self._options.state == "present":
            record = dataclasses.replace(record, files=(*record.files, *before))
        self._write_record(record)
        try:
            transaction.replace(replacements, kept)
        except ShareError:
            transaction.restore(kept)
            transaction.commit()
            raise
        transaction.commit()

    def _write_record(self, record: Record) -> None:
        if record.functions or record.files:
            self._system.write(RECORD, record.text(), 0o600)

    def _forget(self, addresses: t.Sequence[str]) -> None:
        record = parse_record(self._system.read(RECORD) or Record().text())
        left = tuple(function for function in record.functions if function.address not in addresses)
        if left:
            self._write_record(dataclasses.replace(record, functions=left))
            return
        self._system.remove(RECORD)
        # Fails while the folder has other records.
        self._system.run(["rmdir", posixpath.dirname(RECORD)])

    def _bind(self, state: State, step: Bind) -> None:
        """Give a group's functions to VFIO; where one can't be had, those before it are given back."""
        done: list[Before] = []
        try:
            for address, driver in step.targets:
                function = state.functions[address]
                self._load(driver, module_of(driver))
                done.append(
                    Before(
                        address, function.vendor, function.device, function.driver, function.module, function.override
                    )
                )
                self._move(address, function.driver if function.driver != driver else "", driver)
        except ShareError as error:
            if error.details.get("code") == "unbind_timeout":
                # Its lock is held, so that every further write would wait, too.
                done = done[:-1]
            error.details["not_given_back"] = [
                before.address for before in reversed(done) if not self._returned(before)
            ]
            raise

    def _returned(self, before: Before) -> bool:
        """Give a function back after an error, and return whether that succeeded: the others are tried all the same."""
        try:
            self._give_back(before, True)
        except ShareError:
            return False
        return True

    def _move(self, address: str, old: str, driver: str) -> None:
        """Give one function to a driver.

        :param old: the driver that has it; empty where none has.
        """
        self._put(address, "driver_override", driver + "\n")
        if old:
            self._unbind(address, old)
        if driver_name(self._system, address) != driver:
            # It succeeds also where no driver takes the function.
            self._write(PROBE, address + "\n", address, driver)
        bound = driver_name(self._system, address)
        if bound != driver:
            raise _error(NotInEffect, code="not_bound", address=address, found=bound, wanted=driver)

    def _give_back(self, before: Before, exact: bool) -> None:
        """Give a function its old driver and override back, or no driver where it had none."""
        address, now = before.address, driver_name(self._system, before.address)
        if now != before.driver:
            if before.driver and exact:
                self._load(before.driver, before.module)
            # With it no other driver that is loaded takes the function first.
            self._put(address, "driver_override", (before.driver if exact else "") + "\n")
            if now:
                self._unbind(address, now)
            if before.driver:
                self._write(PROBE, address + "\n", address, before.driver)
            left = driver_name(self._system, address)
            if exact and left != before.driver:
                raise _error(NotInEffect, code="not_bound", address=address, found=left, wanted=before.driver)
        if override_of(self._system, address) != before.override:
            self._put(address, "driver_override", before.override + "\n")

    def _unbind(self, address: str, driver: str) -> None:
        try:
            self._put(address, "driver/unbind", address + "\n", driver)
        except ShareError as error:
            # It lost its driver a moment before.
            if error.details.get("code") != "write_refused" or driver_name(self._system, address):
                raise

    def _put(self, address: str, name: str, text: str, driver: str = "") -> None:
        self._write(f"{PCI}/{address}/{name}", text, address, driver)

    def _write(self, path: str, text: str, address: str, driver: str) -> None:
        seconds = self._options.seconds
        done = self._kernel.put(path, text, seconds)
        if done.errno < 0:
            raise _error(
                ShareError, code="unbind_timeout", address=address, driver=driver, seconds=seconds, pid=done.pid
            )
        if done.errno:
            raise _error(
                ShareError, code="write_refused", address=address, path=path, value=text.strip(), errno=done.errno
            )

    def _load(self, driver: str, module: str) -> None:
        if self._system.exists(f"{DRIVERS}/{driver}") or not module:
            return
        done = self._system.run(["modprobe", module], timeout=120)
        if done.rc != 0:
            reason = (done.err.strip().splitlines() or ["it gave no reason"])[-1]
            raise _error(ShareError, code="no_module", module=module, reason=reason)


def _error(kind: type[ShareError], **row: t.Any) -> ShareError:
    return kind(messages.sentence(row), **row)


def work(options: Options, check: bool, system: System, kernel: Kernel, kubelet: KubeletSource) -> JsonObject:
    """Reconcile, prove, and report what only a reboot can do.

    :param check: predict the changes without applying them.
    :raises BadInput: ``stopping`` is given without ``check``.
    :raises NotInEffect: the proof lacks something.
    """
    if options.stopping and not check:
        raise BadInput("stopping is for check mode: a card that a pod has can't be bound before the pod has ended")
    reconciler = PassthroughReconciler(options, system, kernel, kubelet)
    result = core_plan.run(reconciler, check)
    state = reconciler.state
    result.update(report(options, state))
    lacking = problems(options, state) if not check or options.state == "external" else []
    if lacking:
        raise NotInEffect(messages.sentences(lacking), **{**result, "problems": lacking})
    return result
