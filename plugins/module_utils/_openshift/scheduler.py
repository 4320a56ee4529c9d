# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module ``openshift_scheduler`` and its client: the Policy up to 4.9, a secondary scheduler from 4.10 on.

The library caches the API server's resources in a file with a predictable name in a shared folder. Here that file is in
the module's own temporary folder, which no other user can write.

Without the library the client is that of ``kubernetes``, on which it is built, with the same calls. Authentication is
that of every other module (``_kube.client``).
"""

from __future__ import annotations

import collections
import contextlib
import json
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import APPLY
from .._kube.client import RealKube, api_errors
from .._kube.errors import TIMEOUT, KubeError
from .._kube.options import auth_arguments
from .._kube.refs import Ref, ref_of
from . import policy, secondary
from .objects import PAUSE, Api

LIBRARIES = ("auto", "openshift", "kubernetes")
MERGE = "application/merge-patch+json"


def client_class(wanted: str) -> tuple[t.Any, str]:
    """Return the class of the dynamic client and its library.

    :raises ShareError: the library isn't installed.
    """
    if wanted != "kubernetes":
        try:
            from openshift.dynamic import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
                DynamicClient as OpenShiftClient,
            )

            return OpenShiftClient, "openshift"
        except ImportError as error:
            if wanted == "openshift":
                raise ShareError(
                    f"library: the Python that runs this module lacks openshift ({error}); install it with pip, or "
                    "set library to auto"
                ) from error
    try:
        from kubernetes.dynamic import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
            DynamicClient as KubernetesClient,
        )

        return KubernetesClient, "kubernetes"
    except ImportError as error:
        raise ShareError(
            f"the Python that runs this module lacks openshift and kubernetes ({error}); install openshift with pip"
        ) from error


class DynamicKube:
    """A cluster through a dynamic client, with the part of ``Kube`` that is used for OpenShift."""

    def __init__(self, client: t.Any, library: str) -> None:
        self._client = client
        self._host = str(client.configuration.host)
        self.library = library
        self.requests: collections.Counter[str] = collections.Counter()

    @classmethod
    def of_module(cls, module: t.Any) -> DynamicKube:
        """Return the cluster of a module's authentication options.

        :raises ShareError: a library is missing, or the API server doesn't answer.
        """
        chosen, library = client_class(str(module.params.get("library") or "auto"))
        api_client = RealKube.of_module(module).api_client
        host = str(api_client.configuration.host)
        with _api_errors(host, "discovery"):
            return cls(chosen(api_client, cache_file=f"{module.tmpdir}/discovery.json"), library)

    def get(self, ref: Ref) -> JsonObject | None:
        """Return one object; None where it or its kind doesn't exist."""
        resource = self._resource(ref.api_version, ref.kind)
        if resource is None:
            return None
        try:
            return self._request("GET", resource, str(ref), ref.name, ref.namespace, {})
        except _Absent:
            return None

    def list_all(self, api_version: str, kind: str, namespace: str = "", label_selector: str = "") -> list[JsonObject]:
        """Return all objects of a kind; none where the cluster doesn't serve it.

        :param namespace: the objects' namespace; empty for all.
        :param label_selector: as the API takes it; empty for all objects.
        """
        resource = self._resource(api_version, kind)
        if resource is None:
            return []
        query = {"label_selector": label_selector} if label_selector else {}
        answer = self._request("GET", resource, kind, None, namespace, query)
        return [{"apiVersion": api_version, "kind": kind, **item} for item in answer.get("items") or []]

    def apply(self, definition: JsonObject, manager: str) -> JsonObject:
        """Apply an object on the server, taking fields over from other managers."""
        ref = ref_of(definition)
        return self._write(
            ref,
            body=json.dumps(definition),
            content_type=APPLY,
            field_manager=manager,
            force_conflicts=True,
        )

    def patch(self, ref: Ref, body: JsonObject) -> JsonObject:
        """Send a JSON merge patch."""
        return self._write(ref, body=body, content_type=MERGE)

    def delete(self, ref: Ref) -> None:
        """Delete an object, if it exists."""
        resource = self._resource(ref.api_version, ref.kind)
        if resource is not None:
            with contextlib.suppress(_Absent):
                self._request("DELETE", resource, str(ref), ref.name, ref.namespace, {})

    # ----------------------------------------------------------------- requests

    def _write(self, ref: Ref, **arguments: t.Any) -> JsonObject:
        resource = self._resource(ref.api_version, ref.kind)
        if resource is None:
            raise ShareError(f"{ref}: the cluster doesn't serve {ref.kind} in {ref.api_version}")
        self.requests["PATCH"] += 1
        with _api_errors(self._host, str(ref)):
            answer = self._client.patch(
                resource,
                name=ref.name,
                namespace=ref.namespace or None,
                serialize=False,
                _request_timeout=TIMEOUT,
                **arguments,
            )
        return _plain(answer)

    def _request(
        self, method: str, resource: t.Any, subject: str, name: str | None, namespace: str, query: JsonObject
    ) -> JsonObject:
        self.requests[method] += 1
        call = {"GET": self._client.get, "DELETE": self._client.delete}[method]
        where = {"name": name, "namespace": namespace or None}
        with _api_errors(self._host, subject):
            answer = call(resource, serialize=False, _request_timeout=TIMEOUT, **where, **query)
        return _plain(answer)

    def _resource(self, api_version: str, kind: str) -> t.Any:
        """Return the API server's resource of a kind; None where it doesn't serve it."""
        try:
            with _api_errors(self._host, f"discovery of {kind}"):
                return self._client.resources.get(api_version=api_version, kind=kind)
        except _Absent:
            return None


class _Absent(ShareError):
    """The cluster doesn't have the object, or doesn't serve its kind."""


@contextlib.contextmanager
def _api_errors(host: str, subject: str) -> t.Iterator[None]:
    """Turn the libraries' exceptions into ``KubeError``, and those for a missing object or kind into ``_Absent``."""
    try:
        with api_errors(host, subject):
            yield
    except KubeError as error:
        if error.status == 404:
            raise _Absent(f"{subject}: the cluster doesn't have it (404)") from error
        raise
    except Exception as error:
        # Discovery's own exception isn't importable where the library is missing.
        if type(error).__name__ == "ResourceNotFoundError":
            raise _Absent(f"{subject}: the cluster doesn't serve this kind") from error
        raise


def _plain(answer: t.Any) -> JsonObject:
    text = answer.data
    return t.cast(JsonObject, json.loads(text.decode() if isinstance(text, bytes) else text))


POLICY, SECONDARY = "policy", "secondary"

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "method": {"type": "str", "choices": [POLICY, SECONDARY], "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "config_map": {"type": "str"},
    "timeout": {"type": "int", "default": 1800},
    "library": {"type": "str", "choices": list(LIBRARIES), "default": "auto"},
    "extender_url": {"type": "str", "default": "http://127.0.0.1:12345/gpushare-scheduler"},
    "extender_timeout": {"type": "int", "default": 30},
    "extender_preemption": {"type": "bool", "default": False},
    # It contains a private key.
    "config": {"type": "str", "no_log": True},
    "image": {"type": "str"},
    "channel": {"type": "str", "default": "stable"},
    "source": {"type": "str", "default": "redhat-operators"},
    "source_namespace": {"type": "str", "default": "openshift-marketplace"},
    "topology": {"type": "str", "choices": ["", "SingleReplica", "HighlyAvailable"], "default": ""},
    "plan": {"type": "dict"},
}


def work(api: Api, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Run the module.

    :param params: the module's options.
    :param check: only return what would change.
    :param waiting: for the operators, in seconds.
    :raises ShareError: with ``changed`` in its details where something was changed.
    """
    waiting = waiting or Waiting(params["timeout"], PAUSE)
    if params["method"] == POLICY:
        return policy.work(api, params, check, waiting)
    if params["state"] == "present" and not (params["config"] and params["image"]):
        raise BadInput("config, image: both are required to install a secondary scheduler")
    return secondary.work(api, params, check, waiting)
