# SPDX-License-Identifier: GPL-3.0-or-later
"""The requests of the operator's own program to the API server, with the service account's token."""

from __future__ import annotations

import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kube import direct
from ansible_collections.kubegpu.share.plugins.module_utils._kube.api import Request
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import PagesSeen, key_of

from .resource import GROUP, PLURAL, VERSION, JsonObject

PAGE = 500
# Of resources: anybody who may create them decides how many there are, and how large their metadata is.
FEW = 20
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
RESOURCES = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
MERGE = "application/merge-patch+json"
NOT_FOUND = 404


class Cluster:
    """An API server.

    :param kubeconfig: the path of a kubeconfig with a token's file and the authority's certificate.
    """

    def __init__(self, kubeconfig: str) -> None:
        access = direct.access_of({"kubeconfig": kubeconfig}, {})
        if access is None:
            raise BadInput(f"{kubeconfig} is no kubeconfig with a token's file and a certificate of the authority")
        self._whole = direct.DirectKube(access)
        self._metadata = direct.DirectKube(access._replace(headers={**access.headers, "Accept": METADATA}))

    def read(self, path: str) -> JsonObject | None:
        try:
            return _object(self._whole.send(Request("GET", path)))
        except KubeError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def pages(self, path: str, label: str = "", metadata: bool = False, most: int = PAGE) -> t.Iterator[JsonObject]:
        client = self._metadata if metadata else self._whole
        query = [("limit", str(most)), *([("labelSelector", label)] if label else [])]
        seen, more = PagesSeen(), ""
        while True:
            try:
                page = _object(client.send(Request("GET", path, [*query, *([("continue", more)] if more else [])])))
            except KubeError as error:
                if error.status == NOT_FOUND and not more:
                    return
                raise
            more = str((page.get("metadata") or {}).get("continue") or "")
            items = page.get("items") or []
            if seen.again(more, map(key_of, items)):
                raise KubeError(f"{path}: the API server answers a page twice", 0)
            yield from items
            if not more:
                return

    def resource(self, name: str) -> JsonObject | None:
        return self.read(f"{RESOURCES}/{name}")

    def resources(self) -> t.Iterator[JsonObject]:
        """Yield the metadata of all resources, page by page."""
        return self.pages(RESOURCES, metadata=True, most=FEW)

    def write_status(self, name: str, status: JsonObject) -> None:
        self._whole.send(Request("PATCH", f"{RESOURCES}/{name}/status", (), {"status": status}, MERGE))

    def write_event(self, event: JsonObject) -> None:
        self._whole.send(Request("POST", "/api/v1/namespaces/default/events", (), event))


def _object(text: str) -> JsonObject:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise KubeError("the API server's answer is no object", 0)
    return value
