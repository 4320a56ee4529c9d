# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a kubeconfig with a token of a service account; the module ``service_account_kubeconfig``.

The token comes from the TokenRequest API and is bound to the account's UID: deleting the account invalidates it. It is
a JSON Web Token (RFC 7519) with the claims ``exp``, ``iat`` and ``kubernetes.io``, parsed here without verification.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host.system import System
from .client import RealKube
from .options import auth_arguments
from .refs import Ref

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "path": {"type": "path", "required": True},
    "name": {"type": "str", "required": True},
    "namespace": {"type": "str", "required": True},
    "hours": {"type": "int", "default": 24},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
}
# Marks the files of this module; an administrator's file must never be overwritten.
MARK = "kubegpu-share-kubeconfig"
MAX_HOURS = 24 * 366


class Accounts(t.Protocol):
    """The requests to the cluster."""

    def uid(self, namespace: str, name: str) -> str:
        """Return the UID of a service account; empty if it does not exist."""

    def token(self, namespace: str, name: str, seconds: int) -> str:
        """Request a new token of a service account."""

    def connection(self) -> JsonObject:
        """Return a kubeconfig's ``cluster`` for this API server; ``certificate-authority`` is a local path."""


class ApiAccounts:
    """``Accounts`` through the Kubernetes API."""

    def __init__(self, kube: RealKube) -> None:
        self._kube = kube

    def uid(self, namespace: str, name: str) -> str:
        account = self._kube.get(Ref("v1", "ServiceAccount", namespace, name)) or {}
        return str((account.get("metadata") or {}).get("uid") or "")

    def token(self, namespace: str, name: str, seconds: int) -> str:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        account = Ref("v1", "ServiceAccount", namespace, name)
        done = self._kube.post(account, "token", body, f"token for service account {namespace}/{name}")
        return str(done["status"]["token"])

    def connection(self) -> JsonObject:
        about = self._kube.api_client.configuration
        if not about.verify_ssl:
            trust: JsonObject = {"insecure-skip-tls-verify": True}
        else:
            trust = {"certificate-authority": about.ssl_ca_cert} if about.ssl_ca_cert else {}
        name, proxy = getattr(about, "tls_server_name", None), getattr(about, "proxy", None)
        named = {**({"tls-server-name": name} if name else {}), **({"proxy-url": proxy} if proxy else {})}
        return {"server": self._kube.server, **trust, **named}


# --------------------------------------------------------------------------- a token


def claims(token: t.Any) -> JsonObject:
    """Return the claims of a token without verifying it; empty if it is not a token."""
    parts = token.split(".") if isinstance(token, str) else []
    if len(parts) != 3:
        return {}
    try:
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        payload = json.loads(base64.urlsafe_b64decode(padded.encode()))
    except (ValueError, binascii.Error, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def expiry(token: t.Any) -> int:
    """Return when a token expires, in seconds since 1970; 0 if it has no such claim."""
    value = claims(token).get("exp")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 else 0


def lifetime(token: t.Any) -> int:
    """Return the lifetime that a token was issued with, in seconds; 0 if the claims are missing."""
    value = claims(token).get("iat")
    issued = value if isinstance(value, int) and not isinstance(value, bool) else 0
    return max(0, expiry(token) - issued) if issued > 0 else 0


def account_uid(token: t.Any) -> str:
    """Return the UID of the service account of a token."""
    inside = claims(token).get("kubernetes.io")
    account = inside.get("serviceaccount") if isinstance(inside, dict) else None
    return str(account.get("uid") or "") if isinstance(account, dict) else ""


def timestamp(seconds: int) -> str:
    """Return a time as RFC 3339 in UTC; empty for 0."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if seconds else ""


# --------------------------------------------------------------------------- the file


class Written(t.NamedTuple):
    """The content of a kubeconfig that this module wrote.

    :param user: ``namespace/name`` of the service account.
    :param asked: the requested lifetime of the token in hours; None if it isn't recorded.
    """

    cluster: JsonObject
    user: str
    token: t.Any
    asked: t.Any


def kubeconfig(cluster: JsonObject, namespace: str, name: str, token: str, hours: int) -> JsonObject:
    """Return the kubeconfig's content.

    :param cluster: the content of its ``cluster``.
    :param namespace: the service account's, as ``name`` is.
    :param hours: the requested lifetime of the token; the API server may have granted less.
    """
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "preferences": {},
        "clusters": [{"name": MARK, "cluster": cluster}],
        "users": [{"name": f"{namespace}/{name}", "user": {"token": token}}],
        "contexts": [{"name": MARK, "context": {"cluster": MARK, "user": f"{namespace}/{name}"}}],
        "current-context": MARK,
        "extensions": [{"name": MARK, "extension": {"hours": hours}}],
    }


def read(text: str | None, path: str) -> Written | None:
    """Parse a kubeconfig that this module wrote; None without a file.

    :raises BadInput: this module did not write the file.
    """
    if text is None:
        return None
    try:
        kubeconfig = json.loads(text)
        cluster, user = kubeconfig["clusters"][0], kubeconfig["users"][0]
        if (
            kubeconfig["current-context"] == MARK
            and isinstance(cluster["cluster"], dict)
            and isinstance(user["name"], str)
        ):
            return Written(cluster["cluster"], user["name"], user["user"].get("token"), _asked(kubeconfig))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        pass
    raise BadInput(f"path: {path} exists and isn't a kubeconfig that this module wrote; set another path")


def _asked(kubeconfig: JsonObject) -> t.Any:
    try:
        return kubeconfig["extensions"][0]["extension"]["hours"]
    except (TypeError, KeyError, IndexError):
        return None


def ensure(accounts: t.Callable[[], Accounts], system: System, params: JsonObject, check: bool) -> JsonObject:
    """Create, renew or remove the kubeconfig.

    :param accounts: connects to the cluster; called only if a request is needed.
    :param system: the machine that holds the file.
    :param params: the module's options.
    :param check: predict the result and change nothing.
    :raises ShareError: the token or the file can't be created.
    """
    path, text = params["path"], system.read(params["path"])
    if text is None and system.exists(path):
        raise BadInput(f"path: {path} exists and isn't a file; set another path")
    live = read(text, path)
    if params["state"] == "absent":
        if live is not None and not check:
            system.remove(path)
        return _result(path, _until(live), "")
    if not 1 <= params["hours"] <= MAX_HOURS:
        raise BadInput(f"hours: {params['hours']} isn't between 1 and {MAX_HOURS}")
    return _present(accounts(), system, params, live, check)


def _present(api: Accounts, system: System, params: JsonObject, live: Written | None, check: bool) -> JsonObject:
    namespace, name, seconds = params["namespace"], params["name"], params["hours"] * 3600
    uid = api.uid(namespace, name)
    cluster = _embedded(api.connection(), system)
    if live and uid and live.cluster == cluster and live.user == f"{namespace}/{name}":
        end, given = expiry(live.token), lifetime(live.token)
        # Renewing can't help where the API server grants less than requested.
        enough = min(seconds, given) if given and live.asked == params["hours"] else seconds
        if account_uid(live.token) == uid and end - time.time() > enough / 2:
            return {"changed": False, "diff": [], "expires": timestamp(end)}
    after = f"a token for {params['hours']} h\n"
    if check:
        return _result(params["path"], _until(live), after)
    if not uid:
        raise BadInput(f"service account {namespace}/{name} doesn't exist")
    token = api.token(namespace, name, seconds)
    system.write(
        params["path"], json.dumps(kubeconfig(cluster, namespace, name, token, params["hours"]), indent=1) + "\n", 0o600
    )
    return {**_result(params["path"], _until(live), after), "expires": timestamp(expiry(token))}


def _until(live: Written | None) -> str:
    """Return the diff's text for a file, without its token."""
    return "" if live is None else f"a token until {timestamp(expiry(live.token)) or 'an unknown time'}\n"


def _result(path: str, before: str, after: str) -> JsonObject:
    plan = Plan((Change(path, before, after),) if before or after else ())
    return {"changed": not plan.empty, "diff": plan.diff(), "expires": ""}


def _embedded(cluster: JsonObject, system: System) -> JsonObject:
    """Embed the certificate authority, so that the kubeconfig works on other machines."""
    path = cluster.get("certificate-authority")
    if not path:
        return cluster
    text = system.read(str(path))
    if text is None:
        raise ShareError(f"the certificate authority {path} of the kubeconfig doesn't exist")
    rest = {key: value for key, value in cluster.items() if key != "certificate-authority"}
    return {**rest, "certificate-authority-data": base64.b64encode(text.encode()).decode()}
