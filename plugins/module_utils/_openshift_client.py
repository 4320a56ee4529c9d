# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A door: OpenShift's API through the dynamic client of the library ``openshift``, as plain JSON.

The library asks the API server which resources it serves, and keeps the answer in a file of a name that everybody on
the machine can guess. Ours goes into the module's own folder, which no other user can write and which goes with it.

Where the library isn't there, the client is that of ``kubernetes``, on which the library's is built: the calls are the
same. Authentication is that of every other module (``_kube``).
"""

from __future__ import annotations

import collections
import contextlib
import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import (
    KUBECONFIG,
    TIMEOUT,
    RealKube,
    _reason,
    _refusal,
)
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref, ref_of

LIBRARIES = ("auto", "openshift", "kubernetes")
MERGE = "application/merge-patch+json"


def client_class(wanted: str) -> tuple[t.Any, str]:
    """The class of the dynamic client and the library that it is of.

    :raises ShareError: the library isn't there.
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
    """A cluster through a dynamic client; the part of ``Kube`` that its users need."""

    def __init__(self, client: t.Any, library: str) -> None:
        self._client = client
        self._host = str(client.configuration.host)
        self.library = library
        self.requests: collections.Counter[str] = collections.Counter()

    @classmethod
    def of_module(cls, module: t.Any) -> DynamicKube:
        """The cluster that a module's authentication options name.

        :raises ShareError: a library is missing, or the API server doesn't answer.
        """
        chosen, library = client_class(str(module.params.get("library") or "auto"))
        api_client = RealKube.of_module(module).api_client
        host = str(api_client.configuration.host)
        with _told(host, "discovery"):
            return cls(chosen(api_client, cache_file=f"{module.tmpdir}/discovery.json"), library)

    def get(self, ref: Ref) -> Json | None:
        """One object, or None where there is none (or no such kind)."""
        resource = self._resource(ref.api_version, ref.kind)
        if resource is None:
            return None
        try:
            return self._ask("GET", resource, str(ref), ref.name, ref.namespace, {})
        except _Absent:
            return None

    def list_all(self, api_version: str, kind: str, namespace: str = "", label_selector: str = "") -> list[Json]:
        """All objects of a kind, of all namespaces where none is named."""
        resource = self._resource(api_version, kind)
        if resource is None:
            return []
        query = {"label_selector": label_selector} if label_selector else {}
        found = self._ask("GET", resource, kind, None, namespace, query)
        return [{"apiVersion": api_version, "kind": kind, **item} for item in found.get("items") or []]

    def apply(self, definition: Json, manager: str) -> Json:
        """Server-side apply, taking fields over from others."""
        ref = ref_of(definition)
        return self._sent(
            ref,
            "server_side_apply",
            body=definition,
            name=ref.name,
            namespace=ref.namespace or None,
            field_manager=manager,
            force_conflicts=True,
        )

    def patch(self, ref: Ref, body: Json) -> Json:
        """A JSON merge patch."""
        return self._sent(ref, "patch", body=body, name=ref.name, namespace=ref.namespace or None, content_type=MERGE)

    def delete(self, ref: Ref) -> None:
        """Ask for an object's removal; nothing happens where it doesn't exist."""
        resource = self._resource(ref.api_version, ref.kind)
        if resource is not None:
            with contextlib.suppress(_Absent):
                self._ask("DELETE", resource, str(ref), ref.name, ref.namespace, {})

    # ----------------------------------------------------------------- requests

    def _sent(self, ref: Ref, call: str, **arguments: t.Any) -> Json:
        resource = self._resource(ref.api_version, ref.kind)
        if resource is None:
            raise ShareError(f"{ref}: the cluster doesn't know {ref.kind} in {ref.api_version}")
        self.requests["PATCH"] += 1
        with _told(self._host, str(ref)):
            answer = getattr(self._client, call)(resource, serialize=False, _request_timeout=TIMEOUT, **arguments)
        return _plain(answer)

    def _ask(self, method: str, resource: t.Any, subject: str, name: str | None, namespace: str, query: Json) -> Json:
        self.requests[method] += 1
        call = {"GET": self._client.get, "DELETE": self._client.delete}[method]
        place = {"name": name, "namespace": namespace or None}
        with _told(self._host, subject):
            answer = call(resource, serialize=False, _request_timeout=TIMEOUT, **place, **query)
        return _plain(answer)

    def _resource(self, api_version: str, kind: str) -> t.Any:
        """What the API server serves under this name; None where it doesn't."""
        try:
            with _told(self._host, f"discovery of {kind}"):
                return self._client.resources.get(api_version=api_version, kind=kind)
        except _Absent:
            return None


class _Absent(ShareError):
    """There is no such object, or no such kind."""


@contextlib.contextmanager
def _told(host: str, subject: str) -> t.Iterator[None]:
    """Turn the client's exceptions into one sentence."""
    try:
        yield
    except ShareError:
        raise
    except Exception as error:  # the libraries' own families of errors aren't importable where they are missing
        if getattr(error, "status", None) == 404 or type(error).__name__ == "ResourceNotFoundError":
            raise _Absent(f"{subject}: the cluster doesn't have it (404)") from error
        if hasattr(error, "status") and hasattr(error, "body"):
            raise _refusal(error, host, subject) from error
        if type(error).__module__.startswith("urllib3."):
            raise BadInput(f"{KUBECONFIG}: the API server at {host} can't be reached: {_reason(error)}") from error
        raise


def _plain(answer: t.Any) -> Json:
    text = answer.data
    return t.cast(Json, json.loads(text.decode() if isinstance(text, bytes) else text))
