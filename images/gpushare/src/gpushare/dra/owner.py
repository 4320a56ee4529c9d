# SPDX-License-Identifier: GPL-3.0-or-later
"""The UID of this node's object in the API, with which the node's slices go.

A token that is bound to a pod names the pod's node, so that the account needs no right to read nodes.
"""

from __future__ import annotations

import base64
import binascii
import json
import typing as t
from pathlib import Path

from gpushare.api import paths
from gpushare.api.client import Kube


def node_of_token(token: str) -> tuple[str, str]:
    """Return name and UID of the node in a service account's token; empty if it names none.

    The API server has signed it for us; it isn't checked, since nothing is allowed because of it.
    """
    try:
        payload = token.split(".")[1]
        claims: t.Any = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        node = claims["kubernetes.io"]["node"]
        return str(node["name"]), str(node["uid"])
    except (IndexError, ValueError, binascii.Error, KeyError, TypeError):
        return "", ""


class Owner:
    """Returns the UID when it is called.

    :param token: the file of the account's token, which kubelet replaces now and then.
    """

    def __init__(self, kube: Kube, node: str, token: Path) -> None:
        self._kube, self._node, self._token = kube, node, token

    def __call__(self) -> str:
        """Return the UID.

        :raises KubeError: the token doesn't name this node, and the node can't be read.
        """
        try:
            name, uid = node_of_token(self._token.read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            name = uid = ""
        if name == self._node and uid:
            return uid
        node = self._kube.get(paths.node(self._node))
        return str(node["metadata"]["uid"])
