# SPDX-License-Identifier: GPL-3.0-or-later
"""A controller without helm, where a back end needs its chart."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.kubegpu.share.plugins.action.preflight import _helm
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import NO_PARTS


@pytest.mark.parametrize(
    ("parts", "variables", "missing"),
    [
        ({}, {}, []),
        ({"hami": True}, {}, ["hami_helm"]),
        ({"hami": True, "nvidia": True}, {"hami_helm": sys.executable}, ["nvidia_device_plugin_helm"]),
        ({"nvidia": True}, {"nvidia_device_plugin_helm": "/nowhere/helm"}, ["nvidia_device_plugin_helm"]),
    ],
)
def test_a_missing_helm_is_named_by_its_variable(monkeypatch, parts, variables, missing):
    monkeypatch.setenv("PATH", "/nowhere")
    found = list(_helm({**NO_PARTS, **parts}, variables))
    assert [one.variable for one in found] == missing
    assert all("by which the chart is deployed" in one.text for one in found)
