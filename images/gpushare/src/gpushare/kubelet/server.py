# SPDX-License-Identifier: GPL-3.0-or-later
"""Serve kubelet's device plugin API on our socket, and keep the plugin registered across restarts of kubelet.

kubelet empties the socket folder whenever it starts. So if our socket is gone, or kubelet's socket has been replaced,
the plugin registers again. A stream that kubelet has given up is closed first: otherwise kubelet's clean-up of the old
connection would remove the new one, which has the same name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
import typing as t
from concurrent import futures
from pathlib import Path

import grpc
from gpushare.kubelet import wire
from gpushare.kubelet.errors import InvalidIds, NoDevices
from gpushare.kubelet.pod_resources import describe
from gpushare.nvml.inventory import Inventory
from gpushare.shared._contracts import gpushare as contract

log = logging.getLogger("gpushare.kubelet")

SOCKET = "kubegpu-gpushare.sock"
KUBELET_SOCKET = "kubelet.sock"

# If kubelet drops our list without a restart (it does after quick registrations), the plugin registers again.
UNHEARD_SECONDS = 3.0
# kubelet notices the end of a connection within milliseconds; a new one must not come before.
SETTLE_SECONDS = 0.5
REGISTER_SECONDS = 12.0


class Steering(t.Protocol):
    """The plugin's answers, which the gRPC server translates."""

    def preferred(self, ask: wire.Ask) -> tuple[str, ...]:
        """Choose IDs for a container.

        :raises NoDevices: no card has enough units.
        """

    def allocate(self, ids: tuple[str, ...]) -> wire.Answer:
        """Return environment and devices of a container.

        :raises InvalidIds: the IDs aren't equal shares of as many cards of this node as the pod requests.
        """


class DevicePlugin:
    """The service that kubelet calls.

    :param timed: around each answer that kubelet waits for with a pod, with the call's name.
    """

    def __init__(
        self,
        inventory: Inventory,
        steering: Steering,
        timed: t.Callable[[str], contextlib.AbstractContextManager[None]] = lambda call: contextlib.nullcontext(),
    ) -> None:
        self._inventory = inventory
        self._steering = steering
        self._timed = timed
        self._stopped = False
        self._streams = 0

    def handler(self) -> grpc.GenericRpcHandler:
        return wire.handlers(
            {
                wire.OPTIONS: lambda request, context: wire.options(),
                wire.LIST_AND_WATCH: self._list_and_watch,
                wire.PREFERRED: self._preferred,
                wire.ALLOCATE: self._allocate,
                wire.PRE_START: lambda request, context: wire.message(wire.PRE_START.response)(),
            }
        )

    @property
    def streams(self) -> int:
        """Return the number of device lists that kubelet watches; normally one."""
        with self._inventory.changed:
            return self._streams

    def stop(self) -> None:
        """End the lists, so that their threads end."""
        with self._inventory.changed:
            self._stopped = True
            self._inventory.changed.notify_all()

    def _list_and_watch(self, request: t.Any, context: grpc.ServicerContext) -> t.Iterator[bytes]:
        changed = self._inventory.changed
        gone = threading.Event()

        def wake() -> None:
            gone.set()
            with changed:
                changed.notify_all()

        if not context.add_callback(wake):
            return
        with changed:
            self._streams += 1
        sent: tuple[tuple[contract.Card, ...], frozenset[str]] | None = None
        try:
            while True:
                with changed:
                    while (self._inventory.cards, self._inventory.withheld) == sent and not (
                        self._stopped or gone.is_set()
                    ):
                        changed.wait()
                    if self._stopped or gone.is_set():
                        return
                    sent = self._inventory.cards, self._inventory.withheld
                yield wire.device_list(*sent)
        finally:
            with changed:
                self._streams -= 1

    def _preferred(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        try:
            with self._timed("preferred"):
                return wire.preferred_response([self._steering.preferred(ask) for ask in wire.asks(request)])
        except NoDevices as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def _allocate(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        try:
            with self._timed("allocate"):
                return wire.allocate_response([self._steering.allocate(ids) for ids in wire.allocations(request)])
        except InvalidIds as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _identity(path: str) -> tuple[int, int, int] | None:
    """Return the identity of a socket file; an inode's number alone is reused."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_ctime_ns) if stat.S_ISSOCK(status.st_mode) else None


class Registration:
    """Keeps the plugin registered with whatever kubelet is there; ``step`` is called a few times a second."""

    def __init__(self, folder: Path, plugin_for: t.Callable[[], DevicePlugin], inventory: Inventory) -> None:
        # Strings: they are checked several times a second.
        self._socket, self._kubelet_socket = str(folder / SOCKET), str(folder / KUBELET_SOCKET)
        self._plugin_for = plugin_for
        self._inventory = inventory
        self._server: grpc.Server | None = None
        self._plugin: DevicePlugin | None = None
        self._own: tuple[int, int, int] | None = None
        self._kubelet: tuple[int, int, int] | None = None
        self._registered_at: float | None = None
        self._heard_at = 0.0
        self._not_before = 0.0
        self._failures = 0
        self.registrations = 0
        self.error: str | None = None

    @property
    def reason(self) -> str | None:
        """Return why kubelet doesn't have the plugin's units; None if it does."""
        if self._registered_at is not None and self._plugin is not None:
            return (
                None
                if self._plugin.streams
                else "kubelet has accepted the registration but doesn't watch the device list"
            )
        return self.error or "not registered with kubelet yet"

    def step(self) -> None:
        """Check kubelet's socket and ours, and serve or register again if one was replaced."""
        now = time.monotonic()
        if not self._inventory.cards:
            # Without cards there is nothing to register.
            self.error = self._inventory.reason
            return
        if self._server is not None and _identity(self._socket) != self._own:
            log.warning("socket %s is gone: kubelet has restarted; registering again", self._socket)
            self._close()
        if now < self._not_before:
            return
        if self._server is None and not self._serve():
            return
        kubelet = _identity(self._kubelet_socket)
        if self._registered_at is not None and kubelet != self._kubelet:
            log.warning("kubelet's socket was replaced: registering again")
            self._close()
            return
        if self._registered_at is not None and self._plugin is not None:
            if self._plugin.streams:
                self._heard_at = now
            elif now - self._heard_at > UNHEARD_SECONDS:
                log.warning("kubelet doesn't watch the device list any more: registering again")
                self._close()
            return
        if kubelet is None:
            self.error = f"kubelet isn't there: {self._kubelet_socket} doesn't exist"
            return
        self._register(kubelet)

    def stop(self) -> None:
        self._close()
        if self._own is not None and _identity(self._socket) == self._own:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._socket)

    def _serve(self) -> bool:
        path = self._socket
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            plugin = self._plugin_for()
            server = grpc.server(
                futures.ThreadPoolExecutor(max_workers=16, thread_name_prefix="kubelet"), options=wire.CHANNEL
            )
            server.add_generic_rpc_handlers((plugin.handler(),))
            server.add_insecure_port(f"unix:{path}")
            server.start()
        except (OSError, RuntimeError) as error:
            self._put_off(f"socket {path} can't be created: {error}")
            return False
        self._server, self._plugin, self._own = server, plugin, _identity(path)
        return True

    def _register(self, kubelet: tuple[int, int, int]) -> None:
        try:
            request = wire.register_request(SOCKET)
            wire.call(self._kubelet_socket, wire.REGISTER, request, REGISTER_SECONDS)
        except grpc.RpcError as error:
            self._put_off(f"kubelet refuses the registration: {describe(error)}")
            return
        self._kubelet, self._failures, self.error = kubelet, 0, None
        self._registered_at = self._heard_at = time.monotonic()
        self.registrations += 1
        units = sum(card.units for card in self._inventory.cards)
        log.info("registered with kubelet: %d units on %d cards", units, len(self._inventory.cards))

    def _put_off(self, error: str) -> None:
        if error != self.error:
            log.warning("%s", error)
        self.error = error
        self._failures += 1
        self._not_before = time.monotonic() + min(5.0, 0.2 * 2 ** min(self._failures, 10))

    def _close(self) -> None:
        # After a restart of kubelet no stream is open, and pods are refused while the plugin isn't registered.
        followed = self._plugin is not None and self._plugin.streams > 0
        if self._plugin is not None:
            self._plugin.stop()
        if self._server is not None:
            # gRPC unlinks the path that it was bound to, so ours must not be another's by then.
            self._server.stop(grace=1).wait(3)
        self._server = self._plugin = None
        self._registered_at = None
        self._not_before = time.monotonic() + (SETTLE_SECONDS if followed else 0)
