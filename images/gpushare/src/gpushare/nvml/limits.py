# SPDX-License-Identifier: GPL-3.0-or-later
"""Set and read the driver's memory limits per card and cgroup, through NVIDIA's management library (nvidia-ml-py).

Setting needs root with CAP_SYS_ADMIN; reading doesn't. The driver opens the cgroup's folder by the caller's own path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import threading
import typing as t

MIB = 1024 * 1024
# A hard limit of this many bytes is none.
UNLIMITED = 0xFFFFFFFFFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit of a cgroup on a card, in bytes."""

    soft: int
    hard: int
    used: int = 0

    @property
    def used_mib(self) -> int:
        """Return the memory that the cgroup holds in MiB, rounded up."""
        return -(-self.used // MIB)

    @property
    def absent(self) -> bool:
        return self.soft == 0 and self.hard == UNLIMITED


class Refusal(Exception):
    """The driver refused a call.

    :param code: NVML's; 0 if NVML wasn't called.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class LimitBackend(t.Protocol):
    """Access to the driver's limits; every method raises :class:`Refusal`."""

    def driver(self) -> str: ...

    def divided(self, uuid: str) -> bool: ...

    def used_mib(self, uuid: str) -> int: ...

    def get(self, uuid: str, folder: str) -> Limit | None: ...

    def set(self, uuid: str, folder: str, limit: Limit) -> None: ...


# What NVML's return codes mean for limits.
MESSAGES = {
    2: "it takes this limit for invalid: it may be above the card's memory",
    3: "it doesn't support limits on this card (they may be turned off by RmMemacctMode)",
    4: "the plugin lacks the right to (it needs the capability SYS_ADMIN)",
    6: "it finds no controller for this cgroup (on a kernel with dmem, that must be on for containers' cgroups)",
    13: "its library has no limits",
    15: "the card is lost",
    17: "it can't open the cgroup's folder for that (the node's /sys/fs/cgroup must be mounted, and writable)",
}
NO_FOLDER = 17


class NvidiaLimits:
    """The library itself; it counts its users, so that this one and the inventory's are independent."""

    def __init__(self) -> None:
        # nvidia-ml-py has no types; nothing of it leaves this class.
        self._library: t.Any = importlib.import_module("pynvml")
        self._lock = threading.Lock()
        self._handles: dict[str, t.Any] | None = None

    def driver(self) -> str:
        """Return the driver's version."""
        return str(self._ask("the driver's version", lambda library: library.nvmlSystemGetDriverVersion()))

    def divided(self, uuid: str) -> bool:
        """Return whether MIG is on for this card, or will be after a reset."""

        def ask(library: t.Any) -> bool:
            try:
                return any(library.nvmlDeviceGetMigMode(self._handle(uuid)))
            except library.NVMLError_NotSupported:
                return False

        return bool(self._ask("the card's MIG mode", ask))

    def used_mib(self, uuid: str) -> int:
        """Return the MiB of a card that are in use by any process, with what driver and firmware keep."""

        def ask(library: t.Any) -> int:
            return int(library.nvmlDeviceGetMemoryInfo(self._handle(uuid)).used)

        return -(-int(self._ask("the card's memory", ask)) // MIB)

    def get(self, uuid: str, folder: str) -> Limit | None:
        """Return the effective limit of a cgroup, which may be its parent's; None without a limit.

        "Not supported" is the answer of a driver without limits, and also of one on which none was ever set.
        """

        def ask(library: t.Any) -> Limit | None:
            answer = library.c_nvmlGetMemoryLimits_v1_t(nameSpace=folder.encode())
            try:
                library.nvmlDeviceGetMemoryLimits_v1(self._handle(uuid), answer)
            except (library.NVMLError_NotSupported, library.NVMLError_NotFound):
                return None
            limit = Limit(int(answer.softLimit), int(answer.hardLimit), int(answer.currentUsed))
            return None if limit.absent else limit

        return t.cast("Limit | None", self._ask("a limit", ask))

    def set(self, uuid: str, folder: str, limit: Limit) -> None:
        """Set a limit; an ``absent`` one clears it."""

        def ask(library: t.Any) -> None:
            demand = library.c_nvmlSetMemoryLimits_v1_t(
                nameSpace=folder.encode(), softLimit=limit.soft, hardLimit=min(limit.hard, UNLIMITED)
            )
            library.nvmlDeviceSetMemoryLimits_v1(self._handle(uuid), demand)

        self._ask("a limit", ask)

    def _ask(self, what: str, ask: t.Callable[[t.Any], t.Any]) -> t.Any:
        with self._lock:
            try:
                if self._handles is None:
                    self._library.nvmlInit()
                    self._handles = {}
                return ask(self._library)
            except self._library.NVMLError as error:
                code = int(getattr(error, "value", 0))
                if code not in MESSAGES:
                    # The driver may have been reloaded; the next call initialises the library again.
                    self._shut()
                raise Refusal(MESSAGES.get(code, f"it answers {error} when asked for {what}"), code) from error

    def _handle(self, uuid: str) -> t.Any:
        assert self._handles is not None
        if uuid not in self._handles:
            self._handles[uuid] = self._library.nvmlDeviceGetHandleByUUID(uuid.encode())
        return self._handles[uuid]

    def _shut(self) -> None:
        if self._handles is not None:
            self._handles = None
            # If it fails, the library isn't initialised.
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlShutdown()
