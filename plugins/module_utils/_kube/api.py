# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The requests to a cluster as plain JSON, by whichever client sends them. No I/O."""

from __future__ import annotations

import abc
import collections
import dataclasses
import json
import typing as t

from .._core.types import JsonObject
from .errors import KubeError
from .refs import FIELD_MANAGER, Reads, Ref, ref_of

# The parameter makes no difference to the API server. Without it the library kubernetes serializes the text once more
# from version 25 to 36, and versions up to 24 refuse an object.
APPLY = "application/apply-patch+yaml; charset=utf-8"
JSON = "application/json"


class Request(t.NamedTuple):
    """A request to the API server.

    :param body: text, or an object that the client serializes.
    :param content: the body's media type.
    :param subject: what is requested, for messages; method and path where it is empty.
    """

    method: str
    path: str
    query: t.Sequence[tuple[str, str]] = ()
    body: str | JsonObject | None = None
    content: str = JSON
    subject: str = ""

    def __str__(self) -> str:
        return self.subject or f"{self.method} {self.path}"


class Kube(t.Protocol):
    """The requests to a cluster."""

    requests: collections.Counter[str]

    @property
    def server(self) -> str:
        """The API server's URL."""

    def get(self, ref: Ref) -> JsonObject | None:
        """Return an object; None if it, or its kind, does not exist."""

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
    ) -> list[JsonObject]:
        """Return all objects of a kind, each with ``apiVersion`` and ``kind``.

        :param namespace: the objects' namespace; empty for all.
        :param field_selector: as the API takes it; empty for all objects, as for ``label_selector``.
        """

    def apply(self, definition: JsonObject, manager: str) -> JsonObject:
        """Apply a definition server-side, taking over fields from other managers."""

    def try_create(self, definition: JsonObject) -> JsonObject:
        """Return an object as it would be created, after admission; nothing is stored.

        :raises KubeError: the API server, or a webhook, refuses it.
        """

    def create(self, definition: JsonObject) -> JsonObject:
        """Create an object.

        :raises KubeError: with status 409 where it is there already.
        """

    def patch(self, ref: Ref, body: JsonObject, subresource: str = "") -> JsonObject:
        """Send a JSON merge patch."""

    def delete(self, ref: Ref, version: str = "") -> None:
        """Request the deletion of an object, if it exists.

        :param version: delete it only as it was read with this ``resourceVersion``; empty for any.
        :raises KubeError: with status 409 where it has changed since.
        """

    def evict(self, namespace: str, pod: str, grace: int | None = None) -> None:
        """Request the eviction of a pod.

        :param grace: seconds that it gets to end; None for its own number.
        """

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        """Return the end of a container's log.

        :param lines: how many lines of it.
        :raises KubeError: the API server refuses.
        """

    def version(self) -> JsonObject:
        """Return the API server's version (``gitVersion`` and so on)."""


class Client(Reads):
    """``Kube`` by whoever sends the requests, and lists in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: collections.Counter[str] = collections.Counter()

    @abc.abstractmethod
    def send(self, request: Request) -> str:
        """Return the answer as text, and count the request.

        :raises KubeError: the API server refuses or doesn't answer.
        """

    @abc.abstractmethod
    def answer(self, request: Request, size: int) -> t.Generator[bytes, None, None]:
        """Yield the answer in chunks, and count the request.

        :param size: the largest chunk, in bytes.
        :raises KubeError: the API server refuses or doesn't answer.
        """

    def chunks(
        self, api_version: str, kind: str, query: t.Sequence[tuple[str, str]], size: int
    ) -> t.Generator[bytes, None, None]:
        """Request a list over all namespaces and yield the response in chunks; see ``Streams``.

        :param query: the query parameters.
        :param size: the largest chunk, in bytes.
        :raises KubeError: the API server refuses or doesn't answer; with status 410 when the query's ``continue`` is
            too old.
        """
        ref = Ref(api_version, kind, "", "")
        self._demand(ref)
        yield from self.answer(Request("GET", self._path(ref), query), size)

    def fetch(self, path: str, query: t.Sequence[tuple[str, str]]) -> str:
        return self.send(Request("GET", path, query))

    def apply(self, definition: JsonObject, manager: str) -> JsonObject:
        query = [("fieldManager", manager), ("force", "true"), ("fieldValidation", "Strict")]
        ref = ref_of(definition)
        self._demand(ref)
        return self._ask(Request("PATCH", self._object_path(ref), query, json.dumps(definition), APPLY, str(ref)))

    def patch(self, ref: Ref, body: JsonObject, subresource: str = "") -> JsonObject:
        self._demand(ref)
        path = self._object_path(ref) + (f"/{subresource}" if subresource else "")
        return self._ask(Request("PATCH", path, (), body, "application/merge-patch+json", str(ref)))

    def try_create(self, definition: JsonObject) -> JsonObject:
        return self._create(definition, ("dryRun", "All"))

    def create(self, definition: JsonObject) -> JsonObject:
        return self._create(definition, ("fieldManager", FIELD_MANAGER))

    def _create(self, definition: JsonObject, option: tuple[str, str]) -> JsonObject:
        ref = ref_of(definition)
        self._demand(ref)
        path = self._path(dataclasses.replace(ref, name=""))
        return self._ask(Request("POST", path, [option], definition, subject=str(ref)))

    def delete(self, ref: Ref, version: str = "") -> None:
        if self._known(ref):
            query = [("propagationPolicy", "Foreground")]
            body: JsonObject | None = {"preconditions": {"resourceVersion": version}} if version else None
            try:
                self._ask(Request("DELETE", self._object_path(ref), query, body, subject=str(ref)))
            except KubeError as error:
                if error.status != 404:
                    raise

    def evict(self, namespace: str, pod: str, grace: int | None = None) -> None:
        ref = Ref("v1", "Pod", namespace, pod)
        options = {} if grace is None else {"deleteOptions": {"gracePeriodSeconds": grace}}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
            **options,
        }
        self.post(ref, "eviction", body, str(ref))

    def post(self, ref: Ref, subresource: str, body: JsonObject, subject: str) -> JsonObject:
        """Create a subresource, such as ``token``, and return the answer.

        :param subject: for messages.
        """
        return self._ask(Request("POST", f"{self._object_path(ref)}/{subresource}", (), body, subject=subject))

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        query = [("container", container), ("tailLines", str(lines))]
        return self.send(Request("GET", self._object_path(Ref("v1", "Pod", namespace, pod)) + "/log", query))

    def _ask(self, request: Request) -> JsonObject:
        return self._object(self.send(request))
