# SPDX-License-Identifier: GPL-3.0-or-later
"""TLS of the servers: its options, and its files.

The files may be replaced while the server runs, as those of a mounted Secret are; the next connection takes the new
ones. Files that can't be loaded are said in the log, and the last good ones stay.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import threading
from typing import NamedTuple

# What a client is, for whom gets the connection.
VERIFIED, ANONYMOUS = "verified", "anonymous"
HANDSHAKE_SECONDS = 5.0
# Longer than a scheduler keeps a connection that it doesn't use; a client without a certificate has no such claim.
IDLE_SECONDS = {VERIFIED: 150.0, ANONYMOUS: 10.0}
CONNECTIONS = 256

log = logging.getLogger("gpushare.tls")


class Tls(NamedTuple):
    """PEM files: the server's certificate chain and its key; the authority of the clients' certificates, if any."""

    cert: str
    key: str
    client_ca: str = ""


def tls_options(address: str, cert: str, key: str, client_ca: str) -> Tls | None:
    """What the command line's options come to.

    :raises ValueError: they don't fit together, or something is missing on an address that others can reach.
    """
    if not is_loopback(address) and not (cert and key and client_ca):
        raise ValueError(
            f"--address: others can reach {address!r}, so --tls-cert, --tls-key and --tls-client-ca are needed"
        )
    if bool(cert) != bool(key):
        raise ValueError("--tls-cert and --tls-key go together")
    if client_ca and not cert:
        raise ValueError("--tls-client-ca: there are no client certificates without --tls-cert and --tls-key")
    return Tls(cert, key, client_ca) if cert else None


def is_loopback(address: str) -> bool:
    """Whether nobody but this machine reaches an address; of names only ``localhost`` is taken for such."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


class Context:
    """The files as an SSL context, made anew when one of them changes."""

    def __init__(self, tls: Tls) -> None:
        self._tls, self._lock = tls, threading.Lock()
        self._signature = self._look()
        self._context = self._load()

    def get(self) -> ssl.SSLContext:
        with self._lock:
            try:
                signature = self._look()
                if signature != self._signature:
                    self._context, self._signature = self._load(), signature
                    log.info("the certificates were read again")
            except OSError as error:
                # They may be half replaced; the next connection looks again.
                log.error("the certificates can't be read again: %s", error)
            return self._context

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        stats = [os.stat(file) for file in self._tls if file]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in stats)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A resumed session would outlive the authority that it was made under.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._tls.cert, self._tls.key)
        if self._tls.client_ca:
            context.load_verify_locations(self._tls.client_ca)
            # Optional, because kubelet's probes have none: what needs one is the server's to say.
            context.verify_mode = ssl.CERT_OPTIONAL
        return context
