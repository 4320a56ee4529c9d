# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to HTTP health endpoints of the machine on which the module runs."""

from __future__ import annotations

import http.client
import ssl
import typing as t

# Requests a URL and returns the HTTP status, or 0 without a response.
Probe = t.Callable[[str], int]


def probe(url: str) -> int:
    """Return the status of a GET, or 0 without a response.

    Certificates are not verified, because kube-scheduler signs its own.
    """
    scheme, _colon, rest = url.partition("://")
    address, slash, path = rest.partition("/")
    try:
        if scheme == "https":
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(address, timeout=5, context=context)
        else:
            connection = http.client.HTTPConnection(address, timeout=5)
        connection.request("GET", slash + path)
        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException, ValueError):
        return 0
    return status
