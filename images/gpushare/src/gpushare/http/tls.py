# SPDX-License-Identifier: GPL-3.0-or-later
"""TLS options and certificates of the servers.

The files may be replaced while the server runs, as those of a mounted Secret are; the next connection uses the new
ones. Files that can't be loaded are logged, and the last valid ones stay in use.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import threading
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("gpushare.tls")


class Tls(NamedTuple):
    """PEM files: the server's certificate chain and its key.

    ``client_ca`` is the authority of the certificates that clients must have; empty: they need none.
    """

    cert: str
    key: str
    client_ca: str = ""


def tls_options(address: str, cert: str, key: str, client_ca: str) -> Tls | None:
    """Validate the command line's options.

    :param address: the address to listen on.
    :param cert: the server's certificate chain.
    :param key: its private key.
    :param client_ca: the authority of clients' certificates.
    :returns: the files; None for plain HTTP.
    :raises ValueError: they are inconsistent, or incomplete for an address that other machines can reach.
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


def metrics_tls(address: str, cert: str, key: str) -> Tls | None:
    """Validate the options of a server of metrics, whose clients have tokens.

    :param address: the address to listen on.
    :param cert: the server's certificate chain.
    :param key: its private key.
    :returns: the files; None for plain HTTP.
    :raises ValueError: they are inconsistent, or the address is one to which tokens would travel in the clear.
    """
    if bool(cert) != bool(key):
        raise ValueError("--metrics-tls-cert and --metrics-tls-key go together")
    if address and not is_loopback(address) and not cert:
        raise ValueError(
            f"--metrics-address: tokens are sent to {address!r}, so --metrics-tls-cert and --metrics-tls-key are needed"
        )
    return Tls(cert, key) if cert else None


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable from this machine only; the only such name is ``localhost``."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def signature(*files: str | Path) -> tuple[tuple[int, int, int], ...]:
    """Return a value that changes when one of the files is replaced or written; empty names are skipped.

    :raises OSError: one of them can't be read.
    """
    stats = [os.stat(file) for file in files if file]
    return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


class Context:
    """The files as an SSL context, recreated when one of them changes."""

    def __init__(self, tls: Tls) -> None:
        self._tls, self._lock = tls, threading.Lock()
        self._signature = signature(*self._tls)
        self._context = self._load()

    def get(self) -> ssl.SSLContext:
        """Return the context of the current files, or of the last valid ones."""
        with self._lock:
            try:
                now = signature(*self._tls)
                if now != self._signature:
                    self._context, self._signature = self._load(), now
                    log.info("the certificates were read again")
            except OSError as error:
                # They may be partly replaced; the next connection checks again.
                log.error("the certificates can't be read again: %s", error)
            return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A resumed session would stay valid after its authority was replaced.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._tls.cert, self._tls.key)
        if self._tls.client_ca:
            context.load_verify_locations(self._tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
