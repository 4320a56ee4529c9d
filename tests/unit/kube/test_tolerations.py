# SPDX-License-Identifier: GPL-3.0-or-later
"""Which tolerations a real API server takes, and which taints they match."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._kube import tolerations
from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight.variables import problem
from real_apiserver import ApiServer

VALID: list[dict[str, t.Any]] = [
    {"operator": "Exists"},
    {"operator": "Exists", "effect": "NoSchedule"},
    {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"},
    {"key": "sku", "value": "gpu"},
    {"key": "sku"},
    {"key": "sku", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30},
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": None},
]
INVALID: list[t.Any] = [
    {},
    {"value": "gpu"},
    {"key": "sku", "operator": "In"},
    {"key": "sku", "operator": "Exists", "value": "gpu"},
    {"key": "sku", "effect": "noschedule"},
    {"key": "sku", "effect": "NoSchedule", "tolerationSeconds": 30},
    {"key": "sku", "value": True},
    {"key": 1},
    {"key": "sku", "tolerationSeconds": "x"},
    "sku",
]


@pytest.mark.parametrize("one", [*VALID, *INVALID], ids=str)
def test_what_is_refused_before_the_run_is_what_the_api_server_refuses(api_server: ApiServer, one: t.Any) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "tolerant"},
        "spec": {"containers": [{"name": "c", "image": "x"}], "tolerations": [one]},
    }
    status, _answer = api_server.ask("POST", "/api/v1/namespaces/default/pods?dryRun=All", pod)
    assert (status < 300) is (one in VALID)
    assert bool(problem(one)) is (one not in VALID)


@pytest.mark.parametrize(
    ("toleration", "taint", "matches"),
    [
        ({"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoExecute"}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, {"key": "a", "effect": "NoExecute"}, False),
        ({"key": "a", "operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoSchedule"}, True),
        ({"key": "a", "operator": "Exists"}, {"key": "ab", "effect": "NoSchedule"}, False),
        ({"key": "a", "value": "b"}, {"key": "a", "value": "b", "effect": "NoSchedule"}, True),
        ({"key": "a", "value": "b"}, {"key": "a", "effect": "NoSchedule"}, False),
        ({"key": "a"}, {"key": "a", "effect": "NoSchedule"}, True),
        ({"key": "a", "effect": "NoExecute"}, {"key": "a", "effect": "NoSchedule"}, False),
    ],
)
def test_a_toleration_matches_as_in_the_scheduler(toleration: t.Any, taint: t.Any, matches: bool) -> None:
    assert (tolerations.untolerated([taint], [toleration]) == []) is matches
