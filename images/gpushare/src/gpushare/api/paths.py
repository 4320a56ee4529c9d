# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths of requests to the Kubernetes API: the only place where names become parts of one."""

from __future__ import annotations

from gpushare.api.client import KubeError
from gpushare.shared._core.untrusted import Refused, path


def under(parent: str, *names: str) -> str:
    """Return the path of an object, or of a subresource, below a path.

    :param parent: a path of the API that contains no name of others.
    :param names: its further components, as they are in objects.
    :raises KubeError: no object has such a name; status 404, as the API server would answer.
    """
    try:
        return parent + path(*names)
    except Refused as error:
        raise KubeError(404, "NotFound", f"a name in {parent} {error}") from error


def pod(namespace: str, name: str, *more: str) -> str:
    """Return the path of a pod, or of its subresource."""
    return under("/api/v1", "namespaces", namespace, "pods", name, *more)


def node(name: str, *more: str) -> str:
    """Return the path of a node, or of its subresource."""
    return under("/api/v1", "nodes", name, *more)


def of_node(name: str) -> dict[str, str]:
    """Return the query of the pods that are bound to a node."""
    return {"fieldSelector": f"spec.nodeName={name}"}
