# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A door: the Kubernetes API, as plain JSON, counted.

Authentication is kubernetes.core's own code over its own options, so that a kubeconfig, a token, an environment
variable or a service account works here exactly as in ``kubernetes.core.k8s``. Its discovery is left out: it asks the
API server for what we know, and without a time limit.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import typing as t
from urllib.parse import quote

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._objects import KINDS, Json, Ref, ref_of

try:
    from ansible_collections.kubernetes.core.plugins.module_utils.args_common import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
        AUTH_ARG_SPEC,
    )
    from ansible_collections.kubernetes.core.plugins.module_utils.k8s import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
        client as core,
    )

    MISSING = ""
except ImportError as error:
    AUTH_ARG_SPEC = {}
    MISSING = str(error)

try:
    import kubernetes  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import kubernetes.dynamic  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import urllib3.exceptions  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError as error:
    MISSING = MISSING or str(error)

# Seconds to connect and to wait for an answer.
TIMEOUT = (5.0, 30.0)
PAGE = 500
KUBECONFIG = "kubeconfig (variable gpu_kubeconfig)"


def _credentials(kubeconfig: Json) -> set[str]:
    """Every text in the users' entries of a kubeconfig: keys, tokens, passwords, what a plugin is run with."""

    def texts(value: t.Any) -> t.Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for one in value.values():
                yield from texts(one)
        elif isinstance(value, list):
            for one in value:
                yield from texts(one)

    users = kubeconfig.get("users")
    entries = [one.get("user") for one in users if isinstance(one, dict)] if isinstance(users, list) else []
    return {text for entry in entries for text in texts(entry) if text}


def hide_credentials(module: t.Any) -> None:
    """Keep what a kubeconfig that is a dictionary holds of keys and tokens out of all that the module returns."""
    if isinstance(module.params.get("kubeconfig"), dict):
        module.no_log_values.update(_credentials(module.params["kubeconfig"]))


class Expired(ShareError):
    """The rest of a list can't be had any more: it was begun too long ago (410 Gone)."""


class Kube(t.Protocol):
    """What the collection asks of a cluster."""

    requests: collections.Counter[str]

    def get(self, ref: Ref) -> Json | None:
        """One object, or None where there is none (or no such kind)."""

    def list_all(
        self,
        api_version: str,
        kind: str,
        namespace: str = "",
        field_selector: str = "",
        label_selector: str = "",
    ) -> list[Json]:
        """All objects of a kind, page by page; of all namespaces where none is named."""

    def apply(self, definition: Json, manager: str) -> Json:
        """Server-side apply, taking fields over from others."""

    def patch(self, ref: Ref, body: Json, subresource: str = "") -> Json:
        """A JSON merge patch."""

    def delete(self, ref: Ref) -> None:
        """Ask for an object's removal; nothing happens where it doesn't exist."""

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        """The last lines that a container wrote; empty where it wrote none yet."""

    def version(self) -> Json:
        """What the API server says of itself (``gitVersion`` and so on)."""


def auth_arguments() -> dict[str, t.Any]:
    """kubernetes.core's own authentication options."""
    return dict(AUTH_ARG_SPEC)


class RealKube:
    """A cluster over its API server."""

    def __init__(self, client: t.Any) -> None:
        self._client = client
        self._kinds = dict(KINDS)
        self._asked: set[str] = set()
        self.requests: collections.Counter[str] = collections.Counter()

    @property
    def api_client(self) -> t.Any:
        """The client library's own client, for what isn't plain JSON over HTTP (exec)."""
        return self._client.client

    @classmethod
    def of_module(cls, module: t.Any) -> RealKube:
        """The cluster that a module's authentication options name; nothing is asked of it yet.

        :raises ShareError: a library is missing, or the options name no usable kubeconfig.
        """
        hide_credentials(module)
        if MISSING:
            raise ShareError(f"the Python that runs this module lacks kubernetes.core or kubernetes: {MISSING}")
        try:
            configuration = core._create_configuration(core._create_auth_spec(module))
            # Refused connections are told at once; waiting is the caller's decision.
            configuration.retries = 0
            api = kubernetes.client.ApiClient(configuration)
            for header, value in core._create_headers(module).items():
                core._set_header(api, header, value)
        except Exception as error:  # a kubeconfig can be broken in more ways than the library has exceptions for
            raise BadInput(f"{KUBECONFIG}: {_where(module)} {_unusable(module, error)}") from error
        return cls(kubernetes.dynamic.DynamicClient(api, discoverer=_NoDiscovery))

    def get(self, ref: Ref) -> Json | None:
        return self._ask("GET", self._path(ref), missing_is_none=True) if self._known(ref) else None

    def list_all(
        self,
        api_version: str,
        kind: str,
        namespace: str = "",
        field_selector: str = "",
        label_selector: str = "",
    ) -> list[Json]:
        ref = Ref(api_version, kind, namespace, "")
        if not self._known(ref):
            return []
        query = [("limit", str(PAGE))]
        query += [("fieldSelector", field_selector)] if field_selector else []
        query += [("labelSelector", label_selector)] if label_selector else []
        items: list[Json] = []
        more = ""
        while True:
            page = self._ask("GET", self._path(ref), query + ([("continue", more)] if more else []))
            items += (page or {}).get("items") or []
            more = str(((page or {}).get("metadata") or {}).get("continue") or "")
            if not more:
                # Items of a list carry neither.
                return [{"apiVersion": api_version, "kind": kind, **item} for item in items]

    def chunks(
        self, api_version: str, kind: str, query: t.Sequence[tuple[str, str]], size: int
    ) -> t.Generator[bytes, None, None]:
        """The answer to one request for a list of all namespaces, so many bytes at a time while it comes in.

        :raises Expired: the query's ``continue`` is too old.
        """
        ref = Ref(api_version, kind, "", "")
        self._demand(ref)
        path = self._path(ref)
        self.requests["GET"] += 1
        with self._told(f"GET {path}"):
            answer = self._client.request(
                "GET",
                path,
                query_params=list(query),
                # A tenth of the bytes, which cost both ends more than to make them small.
                header_params={"Accept-Encoding": "gzip"},
                _request_timeout=TIMEOUT,
                serialize=False,
            )
            try:
                yield from iter(lambda: answer.read(size), b"")
            finally:
                # Not read to its end, the connection can't serve another request.
                answer.close()

    def apply(self, definition: Json, manager: str) -> Json:
        query = [("fieldManager", manager), ("force", "true"), ("fieldValidation", "Strict")]
        ref = ref_of(definition)
        self._demand(ref)
        return self._answer(
            "PATCH", self._path(ref), query, json.dumps(definition), "application/apply-patch+yaml", str(ref)
        )

    def patch(self, ref: Ref, body: Json, subresource: str = "") -> Json:
        self._demand(ref)
        path = self._path(ref) + (f"/{subresource}" if subresource else "")
        return self._answer("PATCH", path, [], json.dumps(body), "application/merge-patch+json", str(ref))

    def delete(self, ref: Ref) -> None:
        if self._known(ref):
            query = [("propagationPolicy", "Foreground")]
            self._ask("DELETE", self._path(ref), query, missing_is_none=True, subject=str(ref))

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        query = [("container", container), ("tailLines", str(lines))]
        return self._send("GET", self._path(Ref("v1", "Pod", namespace, pod)) + "/log", query) or ""

    def version(self) -> Json:
        return self._answer("GET", "/version", [])

    # ----------------------------------------------------------------- paths

    def _known(self, ref: Ref) -> bool:
        """Look a kind up; one request per group and version that isn't in the table."""
        key = (ref.api_version, ref.kind)
        if key not in self._kinds and ref.api_version not in self._asked:
            self._asked.add(ref.api_version)
            found = self._ask("GET", self._group(ref.api_version), missing_is_none=True) or {}
            for one in found.get("resources") or []:
                if "/" not in one["name"]:
                    self._kinds.setdefault((ref.api_version, one["kind"]), (one["name"], bool(one["namespaced"])))
        return key in self._kinds

    def _demand(self, ref: Ref) -> None:
        if not self._known(ref):
            raise ShareError(f"{ref}: the cluster doesn't know {ref.kind} in {ref.api_version}")

    @staticmethod
    def _group(api_version: str) -> str:
        return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"

    def _path(self, ref: Ref) -> str:
        plural, namespaced = self._kinds[(ref.api_version, ref.kind)]
        parts = [self._group(ref.api_version)]
        if namespaced and ref.namespace:
            parts += ["namespaces", quote(ref.namespace, safe="")]
        parts += [plural] + ([quote(ref.name, safe="")] if ref.name else [])
        return "/".join(parts)

    # ----------------------------------------------------------------- requests

    def _answer(
        self, method: str, path: str, query: list[tuple[str, str]], body: str = "", content: str = "", subject: str = ""
    ) -> Json:
        return self._ask(method, path, query, body, content, subject=subject) or {}

    def _ask(
        self,
        method: str,
        path: str,
        query: t.Sequence[tuple[str, str]] = (),
        body: str = "",
        content: str = "",
        missing_is_none: bool = False,
        subject: str = "",
    ) -> Json | None:
        text = self._send(method, path, query, body, content, missing_is_none, subject)
        if text is None:
            return None
        try:
            return t.cast(Json, json.loads(text))
        except ValueError as error:
            raise BadInput(_stranger(str(self._client.configuration.host))) from error

    def _send(
        self,
        method: str,
        path: str,
        query: t.Sequence[tuple[str, str]] = (),
        body: str = "",
        content: str = "",
        missing_is_none: bool = False,
        subject: str = "",
    ) -> str | None:
        self.requests[method] += 1
        host = str(self._client.configuration.host)
        try:
            answer = self._client.request(
                method,
                path,
                # The client sends merge patches as JSON it makes itself, and apply patches as the text they are.
                body=json.loads(body) if content.endswith("+json") else (body or None),
                query_params=list(query),
                content_type=content or None,
                _request_timeout=TIMEOUT,
                serialize=False,
            )
            text = answer.data
            return text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        except kubernetes.client.rest.ApiException as error:
            if error.status == 404 and missing_is_none:
                return None
            raise _refusal(error, host, subject or f"{method} {path}") from error
        except urllib3.exceptions.HTTPError as error:
            raise BadInput(f"{KUBECONFIG}: the API server at {host} can't be reached: {_reason(error)}") from error

    @contextlib.contextmanager
    def _told(self, subject: str) -> t.Iterator[None]:
        """The library's errors as ours."""
        host = str(self._client.configuration.host)
        try:
            yield
        except kubernetes.client.rest.ApiException as error:
            raise _refusal(error, host, subject) from error
        except urllib3.exceptions.HTTPError as error:
            raise BadInput(f"{KUBECONFIG}: the API server at {host} can't be reached: {_reason(error)}") from error


class _NoDiscovery:
    """In the place of the client's discovery, which would ask before anything is asked of it."""

    def __init__(self, client: t.Any, cache_file: t.Any = None) -> None:
        pass


def _refusal(error: t.Any, host: str, subject: str) -> ShareError:
    """What the API server said, in one sentence."""
    if error.status == 401:
        return BadInput(
            f"{KUBECONFIG}: the API server at {host} doesn't accept these credentials (401 Unauthorized): "
            "they are wrong or have expired"
        )
    if not error.status:
        return BadInput(f"{KUBECONFIG}: the API server at {host} can't be reached: {_one_line(error.reason)}")
    try:
        said = json.loads(error.body)["message"] or error.reason
    except (ValueError, TypeError, KeyError):
        if error.status == 404:
            return BadInput(_stranger(host))
        said = error.reason
    if error.status == 403:
        return ShareError(f"{KUBECONFIG}: its user may not do this: {_one_line(said)}")
    if error.status == 404:
        return ShareError(f"{subject}: {_one_line(said)} (404)")
    refused = f"{subject}: the API server refuses it: {_one_line(said)} ({error.status})"
    return Expired(refused) if error.status == 410 else ShareError(refused)


def _stranger(host: str) -> str:
    return f"{KUBECONFIG}: what answers at {host} isn't a Kubernetes API server"


def _reason(error: BaseException) -> str:
    """The innermost cause: "connection refused" rather than the pool that counted the attempts."""
    inner = getattr(error, "reason", None)
    cause: BaseException = inner if isinstance(inner, BaseException) else error
    while isinstance(getattr(cause, "__cause__", None), BaseException):
        cause = t.cast(BaseException, cause.__cause__)
    if isinstance(cause, TimeoutError) or "timed out" in str(cause):
        return f"no answer within {TIMEOUT[0]:g} s"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return _one_line(cause)


def _one_line(value: t.Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 400 else text[:400] + "…"


def _unusable(module: t.Any, error: Exception) -> str:
    given = module.params.get("kubeconfig")
    if isinstance(given, str) and os.pathsep not in given and not os.path.isfile(os.path.expanduser(given)):
        return "is no file"
    if isinstance(error, (kubernetes.config.ConfigException, OSError)):
        return f"can't be used: {_one_line(error)}"
    return f"isn't a kubeconfig ({_one_line(error)})"


def _where(module: t.Any) -> str:
    given = module.params.get("kubeconfig")
    return str(given) if isinstance(given, str) else "what it holds" if given else "the default kubeconfig"
