# SPDX-License-Identifier: GPL-3.0-or-later
"""A controller without helm, where a back end needs its chart."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.kubegpu.share.plugins.action.preflight import _helm
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import NO_PARTS


def missing(parts=(), there=(), leaving=(), operators=(), **variables):
    """By variable, how severe it is that its helm isn't there."""
    found = {
        key: {**NO_PARTS, **dict.fromkeys(names, True)}
        for key, names in (("parts", parts), ("there", there), ("leaving", leaving))
    }
    return {one.variable: one.severity for one in _helm(found, operators, variables)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        # The chart can't be deployed: a node that is switched would end without a back end.
        ({"parts": ["hami"]}, {"hami_helm": "problem"}),
        ({"parts": ["hami"], "there": ["hami"]}, {"hami_helm": "warning"}),
        ({"there": ["hami"], "leaving": ["hami"]}, {"hami_helm": "warning"}),
        ({"parts": ["hami", "nvidia"], "hami_helm": sys.executable}, {"nvidia_device_plugin_helm": "problem"}),
        (
            {"parts": ["nvidia"], "nvidia_device_plugin_helm": "/nowhere/helm"},
            {"nvidia_device_plugin_helm": "problem"},
        ),
        # The GPU Operator deploys the plugin.
        ({"parts": ["nvidia"], "operators": [{"kind": "ClusterPolicy", "name": "p"}]}, {}),
        ({"parts": ["hami"], "operators": [{"kind": "ClusterPolicy", "name": "p"}]}, {"hami_helm": "problem"}),
    ],
)
def test_a_missing_helm_is_named_by_its_variable(monkeypatch, given, expected):
    monkeypatch.setenv("PATH", "/nowhere")
    assert missing(**given) == expected
