# SPDX-License-Identifier: GPL-3.0-or-later
"""Serve a DRA plugin to kubelet: its own socket, and the one in plugins_registry by which kubelet finds it.

kubelet watches plugins_registry. It asks each socket there who it is, also after its own restart, and drops the plugin
when the socket goes. The names are new for each process: kubelet waits longer and longer with a name that didn't
answer, and refuses a second plugin at the endpoint of one that it hasn't dropped yet. What a killed process has left is
removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import typing as t
import uuid
from concurrent import futures
from pathlib import Path

import grpc
from gpushare.kubelet import dra, wire

log = logging.getLogger("gpushare.kubelet")

THREADS = 16
# After the registration's end kubelet calls no more; running calls have so many seconds.
GRACE_SECONDS = 2.0


class Handler(t.Protocol):
    """The plugin's answers."""

    def prepare(
        self, refs: t.Sequence[dra.ClaimRef], is_wanted: t.Callable[[], bool]
    ) -> t.Mapping[str, t.Sequence[dra.Device] | str]: ...

    def unprepare(self, refs: t.Sequence[dra.ClaimRef]) -> t.Mapping[str, str]: ...


# Yields all devices whenever the health of one changes, and now and then; ends when the argument is false.
Watch = t.Callable[[t.Callable[[], bool]], t.Iterator[t.Sequence[dra.DeviceHealth]]]


class PluginSockets:
    """Both sockets; ``step`` is called a few times a second by one thread.

    :ivar registrations: how often kubelet has registered the plugin.
    """

    def __init__(
        self,
        driver: str,
        registry: Path,
        folder: Path,
        handler: Handler,
        watch: Watch,
        timed: t.Callable[[str], contextlib.AbstractContextManager[None]] = lambda call: contextlib.nullcontext(),
    ) -> None:
        """
        :param driver: the driver's name.
        :param registry: kubelet's folder plugins_registry.
        :param folder: of the driver's own socket.
        :param handler: prepares and unprepares.
        :param watch: of the devices' health, which kubelet shows in the status of pods that have them.
        :param timed: around each answer that kubelet waits for with a pod, with the call's name.
        """
        self._driver, self._handler, self._watch, self._timed = driver, handler, watch, timed
        name = uuid.uuid4().hex[:8]
        self._registry_socket, self._own_socket = registry / f"{driver}-{name}.sock", folder / f"dra-{name}.sock"
        prepare = wire.handlers({dra.PREPARE: self._prepare, dra.UNPREPARE: self._unprepare})
        health = [wire.handlers({watch: self._health}) for watch in dra.WATCHES]
        register = wire.handlers({dra.INFO: self._info, dra.NOTIFY: self._notified})
        # The own socket is there when kubelet is told of it.
        self._handlers = {self._own_socket: (prepare, *health), self._registry_socket: (register,)}
        self._servers: dict[Path, grpc.Server] = {}
        self._registered = False
        self._error: str | None = None
        self.registrations = 0

    @property
    def reason(self) -> str | None:
        """Return why kubelet doesn't have the plugin; None if it does."""
        if self._registered and not self._error:
            return None
        folder = self._registry_socket.parent
        return self._error or f"not registered with kubelet yet, which looks for plugins in {folder} if that is its own"

    def step(self) -> None:
        """Serve, and serve again if a socket is gone."""
        for path, handlers in self._handlers.items():
            if path in self._servers and path.is_socket():
                continue
            if path in self._servers:
                log.warning("socket %s is gone; creating it again", path)
                self._close(path)
            if not self._serve(path, handlers):
                return
        self._sweep()

    def stop(self) -> None:
        """End the registration first, then running calls."""
        for path in (self._registry_socket, self._own_socket):
            with contextlib.suppress(OSError):
                path.unlink()
        for path in (self._registry_socket, self._own_socket):
            self._close(path)

    def _serve(self, path: Path, handlers: t.Sequence[grpc.GenericRpcHandler]) -> bool:
        pool = futures.ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="kubelet")
        server = grpc.server(pool, options=wire.CHANNEL)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            server.add_generic_rpc_handlers(handlers)
            server.add_insecure_port(f"unix:{path}")
            server.start()
        except (OSError, RuntimeError) as error:
            text = f"socket {path} can't be created: {error}"
            if text != self._error:
                log.error("%s", text)
            self._error = text
            return False
        self._servers[path] = server
        if path == self._registry_socket:
            # kubelet registers it anew.
            self._registered, self._error = False, None
        return True

    def _close(self, path: Path) -> None:
        server = self._servers.pop(path, None)
        if server is not None:
            server.stop(grace=GRACE_SECONDS).wait(GRACE_SECONDS + 1)

    def _sweep(self) -> None:
        """Remove the sockets of processes before; the caller sees to it that none of them runs."""
        for own, pattern in ((self._registry_socket, f"{self._driver}*.sock"), (self._own_socket, "dra-*.sock")):
            for path in own.parent.glob(pattern):
                if path != own and path.is_socket():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                        log.info("socket %s of a process before is removed", path)

    def _info(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        return dra.plugin_info(self._driver, str(self._own_socket))

    def _prepare(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        with self._timed("prepare"):
            return dra.prepared(self._handler.prepare(dra.claims(request), context.is_active))

    def _unprepare(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        with self._timed("unprepare"):
            return dra.unprepared(self._handler.unprepare(dra.claims(request)))

    def _health(self, request: t.Any, context: grpc.ServicerContext) -> t.Iterator[t.Any]:
        for devices in self._watch(context.is_active):
            yield dra.health(devices, int(time.time()))

    def _notified(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        if request.plugin_registered:
            self._registered, self._error = True, None
            self.registrations += 1
            log.info("registered with kubelet as the plugin of %s", self._driver)
        else:
            self._registered, self._error = False, f"kubelet refuses the registration: {request.error}"
            log.error("%s", self._error)
        return dra.CLASSES[dra.NOTIFY.response]()
