# SPDX-License-Identifier: GPL-3.0-or-later
"""An extender over the API double, served on the loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from api_double import POLICIES, ApiDouble, make_node
from extender_kit import Client, eventually
from gpushare.extender.command import Extender
from gpushare.shared._contracts import gpushare as contract
from prometheus_client import CollectorRegistry
from real_apiserver import ApiServer, own_api_server


@pytest.fixture
def api() -> ApiDouble:
    """An API server with the admission policy that lets the servers alone write their annotations."""
    double = ApiDouble()
    policy = {"metadata": {"name": contract.ANNOTATIONS_POLICY}, "spec": {"validationActions": ["Deny"]}}
    double.put(POLICIES, policy)
    return double


@pytest.fixture
def start(api: ApiDouble) -> Iterator[Callable[..., Client]]:
    """Start an extender; sizes of cards, in units, make a node ``a`` of them first.

    Other objects of a test must exist before, or it starts without waiting for the lists: ``ready=False``.
    """
    running: list[Extender] = []

    def begin(*sizes: int, ready: bool = True, **options: Any) -> Client:
        if sizes:
            api.put("nodes", make_node("a", *sizes))
        options.setdefault("backoff", (0.01, 0.1))
        extender = Extender(api, port=0, registry=CollectorRegistry(), **options)
        extender.start()
        running.append(extender)
        if ready:
            eventually(lambda: extender.unsynced() is None)
        return Client(extender)

    yield begin
    for extender in running:
        extender.stop()


@pytest.fixture(scope="module")
def own_server() -> Iterator[ApiServer]:
    """A real API server that the tests of one file have for themselves."""
    with own_api_server() as server:
        yield server
