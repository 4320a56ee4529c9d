# SPDX-License-Identifier: GPL-3.0-or-later
"""Certificates of servers and of their clients."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

from gpushare.http.tls import Tls
from real_apiserver import _Authority


class Files:
    """The files that a Secret mounts for the server, and the certificates of clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.authority, self.other = (_Authority(folder / name) for name in ("authority", "other"))
        self.cert, self.key, self.ca = (folder / name for name in ("tls.crt", "tls.key", "ca.crt"))
        self.renew()

    def renew(self) -> None:
        """Give the server a new certificate."""
        self.count += 1
        files = self.authority.sign(f"serving{self.count}", "gpushare-extender", server=True)
        pairs = [(files[0], self.cert), (files[1], self.key), (self.authority.folder / "ca.crt", self.ca)]
        for source, place in pairs:
            # As a mounted Secret is replaced: there is never half a file.
            shutil.copy(source, f"{place}.new")
            os.replace(f"{place}.new", place)

    def tls(self) -> Tls:
        return Tls(str(self.cert), str(self.key), str(self.ca))

    def client(self, authority: _Authority | None = None, server: bool = False) -> ssl.SSLContext:
        """Make the TLS context of a client of an authority, or of one without a certificate."""
        context = ssl.create_default_context(cafile=str(self.authority.folder / "ca.crt"))
        if authority is not None:
            context.load_cert_chain(*authority.sign("client", "kube-scheduler", server=server))
        return context
