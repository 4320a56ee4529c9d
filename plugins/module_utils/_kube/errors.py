# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Errors of requests to the API server. No I/O."""

from __future__ import annotations

import json
import re
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.untrusted import line

# Time limits in seconds to connect and to get a response.
TIMEOUT = (5.0, 30.0)
# Also the answer to an eviction that a disruption budget doesn't allow, whose causes name the budget.
TOO_MANY = 429
KUBECONFIG = "kubeconfig (variable gpu_kubeconfig)"
# The API has one status and one reason for both; its authorization names the user.
# A quota's scope has status 500.
_ADMISSION = re.compile(r"""is forbidden: (?!User ")|^admission webhook "|^insufficient quota """)


class KubeError(ShareError):
    """A request that the API server refused or did not answer.

    :ivar status: the HTTP status; 0 when there was no answer.
    :ivar reason: the API's own reason, such as ``NotFound``, ``Conflict`` or ``TooManyRequests``; empty without one.
        See the constants ``StatusReason`` in apimachinery's ``pkg/apis/meta/v1/types.go``, v0.36.0.
    :ivar message: the API's own message.
    :ivar admission: its admission refuses the object, such as for a quota or a policy, and not its authorization.
    """

    def __init__(self, text: str, status: int = 0, reason: str = "", message: str = "", **details: t.Any) -> None:
        super().__init__(text, **details)
        self.status = status
        self.reason = reason
        self.message = message
        self.admission = status in (403, 500) and _ADMISSION.search(message) is not None


class KubeUnusable(KubeError, BadInput):
    """The connection options reach no API server, or one that rejects their credentials; the user has to fix them."""


class LibraryMissing(ShareError):
    """The Python that runs this lacks a library that the connection options need."""


def refused(status: int, reason: str, body: t.Any, host: str, subject: str) -> KubeError:
    """Return the error of a refused request.

    :param status: the HTTP status.
    :param reason: its text, for answers that aren't the API's Status object.
    :param body: the answer's text.
    :param host: the API server's URL.
    :param subject: what was requested, for the message.
    """
    try:
        answer = json.loads(body)
        causes = (answer.get("details") or {}).get("causes") or [] if status == TOO_MANY else []
        texts = [str(cause.get("message") or "") for cause in causes]
        message = one_line(" ".join([answer["message"] or reason, *texts]))
        why = str(answer.get("reason") or "")
    except (ValueError, TypeError, KeyError, AttributeError):
        if status == 404:
            return not_kubernetes(host, status)
        message, why = one_line(reason), ""
    if status == 401:
        text = (
            f"{KUBECONFIG}: the API server at {host} doesn't accept these credentials (401 Unauthorized): "
            "they are wrong or have expired"
        )
        return KubeUnusable(text, status, why, message)
    if status in (403, 500) and _ADMISSION.search(message):
        text = f"{subject}: the API server's admission refuses it: {message}"
    elif status == 403:
        text = f"{KUBECONFIG}: its user lacks a permission: {message}"
    elif status == 404:
        text = f"{subject}: {message} (404)"
    else:
        text = f"{subject}: the API server rejected the request: {message} ({status})"
    return KubeError(text, status, why, message)


def unreachable(host: str, why: str) -> KubeError:
    """Return the error of a server that can't be reached."""
    return KubeUnusable(f"{KUBECONFIG}: the API server at {host} can't be reached: {why}", message=why)


def not_kubernetes(host: str, status: int = 0) -> KubeError:
    """Return the error of a server that isn't an API server."""
    return KubeUnusable(f"{KUBECONFIG}: the server at {host} isn't a Kubernetes API server", status)


def cause_of(error: BaseException, timed_out: bool) -> str:
    """Return why a connection failed, such as "connection refused"."""
    if timed_out:
        return f"no answer within {TIMEOUT[0]:g} s"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return one_line(error)


def one_line(value: t.Any) -> str:
    """Return any value as one short line, which is printable."""
    return line(value, 400)
