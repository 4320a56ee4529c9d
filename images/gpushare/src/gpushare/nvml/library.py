# SPDX-License-Identifier: GPL-3.0-or-later
"""Read cards and their errors from NVIDIA's management library, through nvidia-ml-py."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import logging
import typing as t

from gpushare.shared._contracts.card_exclusion import NOTHING, Exclusion
from gpushare.shared._contracts.gpushare import Reason, Refusal

log = logging.getLogger("gpushare.nvml")

MIB = 1024 * 1024
MIG = Refusal(
    Reason.MIG_ENABLED, "MIG is on: its instances have memory of their own, which shares of the card would cut across"
)
UNIFIED = Refusal(
    Reason.UNIFIED_MEMORY, "it has no memory of its own: it uses the machine's, which shares of a card can't be made of"
)
REMAP_FAILED = Refusal(Reason.ROW_REMAP_FAILED, "a broken row of its memory can't be remapped")
UNREGISTERED = Refusal(
    Reason.FABRIC_NOT_READY, "it isn't registered with its NVSwitches, so CUDA fails on it: see the fabric manager"
)
# What the driver requires before the card works again. Actions that concern only links between cards are left out.
RECOVERY_ACTIONS: t.Mapping[int, str] = {
    1: "the driver requests a reset of the card",
    2: "the driver requests a reboot of the node",
    4: "the driver requests that the card is drained and reset",
    6: "the driver requests a reset of the card by its bus",
    7: "the driver requests a reboot of the whole system",
}


class NvmlError(Exception):
    """NVML doesn't return the cards; one sentence."""


@dataclasses.dataclass(frozen=True)
class NvmlCard:
    """A card as NVML reports it now.

    :param memory_mib: all of its memory, MiB.
    :param used_mib: memory in use by any process, the driver's own included, MiB.
    :param reserved_mib: what driver and firmware keep of its memory, MiB; 0 if the driver doesn't report it.
    :param problem: why it can't be shared now; None if it can.
    :param bus: its PCI address as ``0000:01:00.0``; empty if NVML doesn't tell.
    """

    index: int
    uuid: str
    minor: int
    memory_mib: int
    model: str
    used_mib: int = 0
    problem: Refusal | None = None
    reserved_mib: int = 0
    bus: str = ""


class Xid(t.NamedTuple):
    """An error that the driver reports of a card."""

    uuid: str
    number: int


class Nvml(t.Protocol):
    """Access to NVML."""

    @property
    def left_out(self) -> frozenset[str]:
        """UUIDs of the cards that the last query has left out, since ``gpu_exclude`` names them."""

    def cards(self) -> list[NvmlCard]:
        """Return the cards that answer now.

        :raises NvmlError: the driver is missing or doesn't answer.
        """

    def xids(self, seconds: float) -> list[Xid]:
        """Return errors since the last call of ``cards``; waits at most so long, and may return earlier without any."""


class NvidiaMl:
    """The library itself. It stays initialised between queries: initialising takes seconds on a real node.

    ``cards`` and ``xids`` are called by one and the same thread, so that nothing is shut down under a wait.
    """

    def __init__(self, exclude: Exclusion = NOTHING) -> None:
        """
        :param exclude: cards of which nothing but the identity is read.
        """
        self._exclude = exclude
        self.left_out: frozenset[str] = frozenset()
        # nvidia-ml-py has no types; nothing of it leaves this class.
        self._library: t.Any = importlib.import_module("pynvml")
        self._initialised = False
        self._events: t.Any = None
        self._watched: dict[int, str] = {}
        self._unwatched: set[str] = set()

    def cards(self) -> list[NvmlCard]:
        try:
            if self._initialised:
                try:
                    return self._query()
                except self._library.NVMLError as error:
                    log.warning("NVML answers %s; initialising it again", error)
                    self.close()
            self._library.nvmlInit()
            self._initialised = True
            return self._query()
        except self._library.NVMLError_LibraryNotFound as error:
            raise NvmlError("NVIDIA's driver isn't there: libnvidia-ml.so.1 can't be loaded") from error
        except self._library.NVMLError as error:
            self.close()
            raise NvmlError(f"NVIDIA's driver doesn't answer: {error}") from error

    def xids(self, seconds: float) -> list[Xid]:
        if self._events is None:
            return []
        library = self._library
        try:
            event = library.nvmlEventSetWait_v2(self._events, max(1, int(seconds * 1000)))
        except library.NVMLError_Timeout:
            return []
        except library.NVMLError as error:
            # A lost card ends the wait; the next query finds out which one, and watches the remaining ones.
            log.info("NVML's events: %s", error)
            self._unwatch()
            return []
        uuid = self._watched.get(_address(event.device))
        if uuid is None or not event.eventType & library.nvmlEventTypeXidCriticalError:
            return []
        return [Xid(uuid, int(event.eventData))]

    def close(self) -> None:
        if self._initialised:
            self._unwatch()
            self._initialised = False
            try:
                self._library.nvmlShutdown()
            except self._library.NVMLError as error:
                log.info("NVML could not be shut down: %s", error)

    def _query(self) -> list[NvmlCard]:
        cards = []
        left_out = set()
        handles: dict[str, t.Any] = {}
        for index in range(self._library.nvmlDeviceGetCount()):
            try:
                handle = self._library.nvmlDeviceGetHandleByIndex(index)
                uuid = str(self._library.nvmlDeviceGetUUID(handle))
                model, bus = str(self._library.nvmlDeviceGetName(handle)), self._bus(handle)
                if self._exclude.of(bus, uuid, model):
                    left_out.add(uuid)
                    continue
                total, used = self._memory(handle)
                cards.append(
                    NvmlCard(
                        index=index,
                        uuid=uuid,
                        minor=int(self._library.nvmlDeviceGetMinorNumber(handle)),
                        memory_mib=total // MIB,
                        model=model,
                        # Up, as the reserve, which is a part of it.
                        used_mib=-(-used // MIB),
                        problem=self._problem_of(handle) if total else UNIFIED,
                        reserved_mib=self._reserved_mib(handle, total) if total else 0,
                        bus=bus,
                    )
                )
                handles[uuid] = handle
            except self._library.NVMLError_Uninitialized:
                raise
            except self._library.NVMLError as error:
                # One card that is lost doesn't take the others with it.
                log.warning("card %d doesn't answer: %s", index, error)
        self.left_out = frozenset(left_out)
        self._watch(handles)
        return cards

    def _memory(self, handle: t.Any) -> tuple[int, int]:
        """Return all and used memory of a card in bytes; 0 where it has none of its own."""
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        except self._library.NVMLError_NotSupported:
            return 0, 0
        return int(memory.total), int(memory.used)

    def _bus(self, handle: t.Any) -> str:
        pci = self._query_optional(self._library.nvmlDeviceGetPciInfo, handle)
        # Every GPU is function 0 of its device.
        return f"{int(pci.domain):04x}:{int(pci.bus):02x}:{int(pci.device):02x}.0" if pci is not None else ""

    def _reserved_mib(self, handle: t.Any, total: int) -> int:
        """Return the reserve of driver and firmware in MiB, which version 2 of the query has (R510 and newer).

        :param total: by version 1, in bytes. Inside a limited cgroup version 2 counts the limit as the card's memory,
            and its reserve isn't the card's.
        """
        library = self._library
        try:
            memory = library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
        except (
            library.NVMLError_NotSupported,
            library.NVMLError_FunctionNotFound,
            library.NVMLError_InvalidArgument,
            library.NVMLError_ArgumentVersionMismatch,
            library.NVMLError_Unknown,
        ):
            return 0
        return -(-int(memory.reserved) // MIB) if int(memory.total) == total else 0

    def _problem_of(self, handle: t.Any) -> Refusal | None:
        """Return why a card that answers can't be shared; few cards and drivers support every query."""
        library = self._library
        if (self._query_optional(library.nvmlDeviceGetMigMode, handle) or (0,))[0] == library.NVML_DEVICE_MIG_ENABLE:
            return MIG
        values = self._query_optional(
            library.nvmlDeviceGetFieldValues, handle, [library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        )
        if values and values[0].nvmlReturn == library.NVML_SUCCESS:
            wanted = RECOVERY_ACTIONS.get(int(values[0].value.uiVal))
            if wanted:
                return Refusal(Reason.RECOVERY_REQUIRED, wanted)
        if not self._is_registered(handle):
            return UNREGISTERED
        rows = self._query_optional(library.nvmlDeviceGetRemappedRows, handle)
        return REMAP_FAILED if rows and rows[3] else None

    def _is_registered(self, handle: t.Any) -> bool:
        """Return whether CUDA can use a card that may be one of a board with NVSwitches."""
        library, info = self._library, self._library.c_nvmlGpuFabricInfo_t()
        # Without an answer its state stays "not supported", as that of a card without NVSwitches is.
        self._query_optional(library.nvmlDeviceGetGpuFabricInfo, handle, ctypes.byref(info))
        if info.state == library.NVML_GPU_FABRIC_STATE_COMPLETED:
            return bool(info.status == library.NVML_SUCCESS)
        # A card whose links are all off doesn't begin to register, and may work.
        return bool(info.state != library.NVML_GPU_FABRIC_STATE_IN_PROGRESS)

    def _query_optional(self, call: t.Callable[..., t.Any], *arguments: t.Any) -> t.Any:
        """Return the answer to a query; None if the card or the driver doesn't support it."""
        library = self._library
        try:
            return call(*arguments)
        except (library.NVMLError_NotSupported, library.NVMLError_FunctionNotFound, library.NVMLError_InvalidArgument):
            return None

    def _watch(self, handles: t.Mapping[str, t.Any]) -> None:
        """Have the driver's errors of exactly these cards reported."""
        if handles and self._events is not None and set(self._watched.values()) | self._unwatched == set(handles):
            return
        self._unwatch()
        library = self._library
        try:
            self._events = library.nvmlEventSetCreate()
        except library.NVMLError as error:
            log.info("NVML reports no events: %s", error)
            return
        for uuid, handle in handles.items():
            try:
                library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, self._events)
            except library.NVMLError as error:
                log.info("NVML reports no events of %s: %s", uuid, error)
                self._unwatched.add(uuid)
            else:
                self._watched[_address(handle)] = uuid

    def _unwatch(self) -> None:
        events, self._events = self._events, None
        self._watched, self._unwatched = {}, set()
        if events is not None:
            try:
                self._library.nvmlEventSetFree(events)
            except self._library.NVMLError as error:
                log.info("NVML's set of events could not be freed: %s", error)


def _address(handle: t.Any) -> int:
    """Return the identity of a handle; a lost card can't be asked for its UUID."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)
