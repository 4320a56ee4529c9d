# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A kubeconfig with a token of a service account: the concern of the module ``reader_kubeconfig``.

The token comes from the TokenRequest API and is bound to the account's UID: with the account it goes. It is a JSON Web
Token (RFC 7519) with the claims ``exp`` and ``kubernetes.io``; it is read here for when it ends, not to be trusted.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import TIMEOUT, RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

try:
    from kubernetes.client import CoreV1Api  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from kubernetes.client.rest import ApiException  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:
    # RealKube says what is missing before anything here is called.
    CoreV1Api = None
    ApiException = Exception

ARGUMENTS: Json = {
    **auth_arguments(),
    "path": {"type": "path", "required": True},
    "name": {"type": "str", "required": True},
    "namespace": {"type": "str", "required": True},
    "hours": {"type": "int", "default": 24},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
}
# What tells a file of ours from an administrator's, which must never be overwritten.
OURS = "kubegpu-reader-kubeconfig"
HOUR = 3600
MOST_HOURS = 24 * 366


class Accounts(t.Protocol):
    """What is asked of a cluster."""

    def uid(self, namespace: str, name: str) -> str:
        """UID of a service account; empty where there is none."""

    def token(self, namespace: str, name: str, seconds: int) -> str:
        """A new token of a service account."""

    def connection(self) -> Json:
        """How this API server is reached: ``server`` and what else a cluster of a kubeconfig has.

        ``certificate-authority`` is the path of a file here.
        """


class ApiAccounts:
    """The accounts of a cluster by its API."""

    def __init__(self, kube: RealKube) -> None:
        self._kube = kube

    def uid(self, namespace: str, name: str) -> str:
        found = self._kube.get(Ref("v1", "ServiceAccount", namespace, name)) or {}
        return str((found.get("metadata") or {}).get("uid") or "")

    def token(self, namespace: str, name: str, seconds: int) -> str:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        try:
            done = CoreV1Api(self._kube.api_client).create_namespaced_service_account_token(
                name, namespace, body, _request_timeout=TIMEOUT
            )
        except ApiException as error:
            raise ShareError(f"no token for service account {namespace}/{name}: {_said(error)}") from error
        return str(done.status.token)

    def connection(self) -> Json:
        about = self._kube.api_client.configuration
        if not about.verify_ssl:
            trust: Json = {"insecure-skip-tls-verify": True}
        else:
            trust = {"certificate-authority": about.ssl_ca_cert} if about.ssl_ca_cert else {}
        name, proxy = getattr(about, "tls_server_name", None), getattr(about, "proxy", None)
        named = {**({"tls-server-name": name} if name else {}), **({"proxy-url": proxy} if proxy else {})}
        return {"server": str(about.host), **trust, **named}


def _said(error: t.Any) -> str:
    """What the API server says, in one line."""
    try:
        said = json.loads(error.body)["message"]
    except (AttributeError, ValueError, TypeError, KeyError):
        said = getattr(error, "reason", None) or error
    return " ".join(str(said).split())[:400]


# --------------------------------------------------------------------------- a token


def claims(token: t.Any) -> Json:
    """What a token says of itself, unverified; nothing where it is none."""
    parts = token.split(".") if isinstance(token, str) else []
    if len(parts) != 3:
        return {}
    try:
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        found = json.loads(base64.urlsafe_b64decode(padded.encode()))
    except (ValueError, binascii.Error, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def ends(token: t.Any) -> int:
    """When a token ends to hold, in seconds since 1970; 0 where it doesn't say."""
    said = claims(token).get("exp")
    return said if isinstance(said, int) and not isinstance(said, bool) and 0 < said < 2**40 else 0


def lasts(token: t.Any) -> int:
    """For how many seconds a token was given; 0 where it doesn't say."""
    said = claims(token).get("iat")
    begun = said if isinstance(said, int) and not isinstance(said, bool) else 0
    return max(0, ends(token) - begun) if begun > 0 else 0


def account_uid(token: t.Any) -> str:
    """UID of the service account that a token is of."""
    inside = claims(token).get("kubernetes.io")
    account = inside.get("serviceaccount") if isinstance(inside, dict) else None
    return str(account.get("uid") or "") if isinstance(account, dict) else ""


def said_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if seconds else ""


# --------------------------------------------------------------------------- the file


def kubeconfig(cluster: Json, namespace: str, name: str, token: str, hours: int) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "preferences": {},
        "clusters": [{"name": OURS, "cluster": cluster}],
        "users": [{"name": f"{namespace}/{name}", "user": {"token": token}}],
        "contexts": [{"name": OURS, "context": {"cluster": OURS, "user": f"{namespace}/{name}"}}],
        "current-context": OURS,
        # How much was asked for, of which the API server may have given less.
        "extensions": [{"name": OURS, "extension": {"hours": hours}}],
    }


def read(text: str | None, path: str) -> Json | None:
    """A kubeconfig of ours, or None where there is no file.

    :raises BadInput: the file is somebody else's.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
        cluster, user = found["clusters"][0], found["users"][0]
        if found["current-context"] == OURS and isinstance(cluster["cluster"], dict) and isinstance(user["name"], str):
            token = user["user"].get("token")
            return {"cluster": cluster["cluster"], "user": user["name"], "token": token, "asked": _asked(found)}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        pass
    raise BadInput(f"path: {path} is there, and isn't a kubeconfig that this module has written; name another file")


def _asked(found: Json) -> t.Any:
    """For how many hours the token in a file was asked; None where the file doesn't say."""
    try:
        return found["extensions"][0]["extension"]["hours"]
    except (TypeError, KeyError, IndexError):
        return None


def bring(accounts: t.Callable[[], Accounts], system: System, params: Json, check: bool) -> Json:
    """Bring the file to where it should be.

    :param accounts: the cluster; asked for only where it is needed.
    :raises ShareError: in one sentence why it can't be.
    """
    path, text = params["path"], system.read(params["path"])
    if text is None and system.exists(path):
        raise BadInput(f"path: {path} is there, and is no file; name another one")
    live = read(text, path)
    if params["state"] == "absent":
        if live is not None and not check:
            system.remove(path)
        return _told(path, _until(live), "")
    if not 1 <= params["hours"] <= MOST_HOURS:
        raise BadInput(f"hours: {params['hours']} isn't between 1 and {MOST_HOURS}")
    return _present(accounts(), system, params, live, check)


def _present(api: Accounts, system: System, params: Json, live: Json | None, check: bool) -> Json:
    namespace, name, seconds = params["namespace"], params["name"], params["hours"] * HOUR
    uid = api.uid(namespace, name)
    cluster = _embedded(api.connection(), system)
    if live and uid and live["cluster"] == cluster and live["user"] == f"{namespace}/{name}":
        end, given = ends(live["token"]), lasts(live["token"])
        # Of an API server that gives less than it is asked for, more can't be had.
        enough = min(seconds, given) if given and live["asked"] == params["hours"] else seconds
        if account_uid(live["token"]) == uid and end - time.time() > enough / 2:
            return {"changed": False, "diff": [], "expires": said_time(end)}
    after = f"a token for {params['hours']} h\n"
    if check:
        return _told(params["path"], _until(live), after)
    if not uid:
        raise BadInput(f"there is no service account {namespace}/{name}")
    token = api.token(namespace, name, seconds)
    system.write(
        params["path"], json.dumps(kubeconfig(cluster, namespace, name, token, params["hours"]), indent=1) + "\n", 0o600
    )
    return {**_told(params["path"], _until(live), after), "expires": said_time(ends(token))}


def _until(live: Json | None) -> str:
    """What the diff shows of a file: never its token."""
    return "" if live is None else f"a token until {said_time(ends(live['token'])) or 'nobody knows when'}\n"


def _told(path: str, before: str, after: str) -> Json:
    plan = Plan((Change(path, before, after),) if before or after else ())
    return {"changed": not plan.empty, "diff": plan.diff(), "expires": ""}


def _embedded(cluster: Json, system: System) -> Json:
    """The certificate authority in the file itself, so that it can be taken elsewhere."""
    path = cluster.get("certificate-authority")
    if not path:
        return cluster
    text = system.read(str(path))
    if text is None:
        raise ShareError(f"the kubeconfig's certificate authority {path} isn't there")
    rest = {key: value for key, value in cluster.items() if key != "certificate-authority"}
    return {**rest, "certificate-authority-data": base64.b64encode(text.encode()).decode()}
