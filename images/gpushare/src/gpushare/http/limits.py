# SPDX-License-Identifier: GPL-3.0-or-later
"""What clients may take of a server: connections, time and memory."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import Protocol

# Kinds of clients. A client on a loopback address or a Unix socket is local; a verified one has a certificate of
# the server's authority, or its last request was authorized; any other is anonymous.
LOCAL, VERIFIED, ANONYMOUS = "local", "verified", "anonymous"

# Requests of a scheduler that sends names only: a pod (the API server takes 3 MiB), the names of 5,000 nodes
# (1.3 MiB at most) or the UIDs of victims (500 nodes of 110 pods, 3 MiB).
BODY_BYTES = 8 * 1024 * 1024
# Everybody else's.
SMALL_BODY_BYTES = 4 * 1024


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one server.

    :param connections: of all clients.
    :param anonymous: of those, connections of anonymous clients; the rest is kept for others.
    :param peer: anonymous connections of one address.
    :param head: seconds for a request's head; for an anonymous client from the connection's first moment.
    :param request: seconds from a request's first byte to its last.
    :param answer: seconds for sending an answer.
    :param idle: seconds that a client that isn't anonymous may send nothing between requests.
    :param bodies: bytes of the large bodies that are held at once.
    """

    connections: int = 256
    anonymous: int = 64
    peer: int = 16
    head: float = 5.0
    request: float = 15.0
    answer: float = 15.0
    # Longer than a scheduler keeps an unused connection.
    idle: float = 150.0
    bodies: int = 3 * BODY_BYTES


class State(enum.Enum):
    """What a connection is doing."""

    IDLE = "idle"
    READING = "reading"
    ANSWERING = "answering"
    SENDING = "sending"


class Client(Protocol):
    """A connection, as far as its limits go.

    ``since`` is the time of its latest beginning: of the connection, of a request, or of the wait for the next one. An
    anonymous client's time starts with the connection, or with the end of its last answer.
    """

    peer: str
    client: str
    state: State
    since: float
    dropped: bool

    def silent_for(self) -> float: ...

    def drop(self) -> None: ...


def connection_to_drop(clients: list[Client], peer: str, limits: Limits) -> Client | None:
    """Choose the connection that ends for a new anonymous one of ``peer``.

    It is the oldest of the same address if that has its number, otherwise of the address that has the most: an address
    with many connections costs no other one a place.

    :returns: None while below the limits.
    :raises Full: none can end, since a reply is being made on every connection in question.
    """
    anonymous = [client for client in clients if client.client == ANONYMOUS and not client.dropped]
    by_peer: dict[str, int] = {}
    for client in anonymous:
        by_peer[client.peer] = by_peer.get(client.peer, 0) + 1
    if by_peer.get(peer, 0) >= limits.peer:
        anonymous = [client for client in anonymous if client.peer == peer]
    elif len(anonymous) >= limits.anonymous:
        most = max(by_peer.values())
        anonymous = [client for client in anonymous if by_peer[client.peer] == most]
    else:
        return None
    ending = [client for client in anonymous if client.state is not State.ANSWERING]
    if not ending:
        raise Full
    return min(ending, key=lambda client: client.since)


class Full(Exception):
    """A connection can't be served."""


class Bodies:
    """Large request bodies in memory; above the limit, the largest unfinished one ends.

    :param most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._held: dict[Client, int] = {}

    def hold(self, client: Client, size: int) -> bool:
        """Record the size of a client's body, which is small, or growing.

        :param size: in bytes, so far.
        :returns: False if this body must end.
        """
        if size <= SMALL_BODY_BYTES:
            return True
        with self._lock:
            self._held[client] = size
            while sum(self._held.values()) > self._most:
                unfinished = [other for other in self._held if other.state is State.READING]
                largest = max(unfinished, key=lambda other: self._held[other], default=client)
                del self._held[largest]
                if largest is client:
                    return False
                largest.drop()
        return True

    def release(self, client: Client) -> None:
        with self._lock:
            self._held.pop(client, None)


BodyLimit = Callable[[str, bytes, str], int]
