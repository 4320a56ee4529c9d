# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight asks the machines' package lists where role driver will install something, and reports what they lack."""

from __future__ import annotations

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.action import preflight
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.node import NodeOptions, described
from layers import ROOT

DEFAULT = yaml.safe_load((ROOT / "roles/driver/defaults/main.yml").read_text())["driver_version"]
VARIABLES = yaml.safe_load((ROOT / "roles/preflight/vars/main.yml").read_text())


@pytest.mark.parametrize(
    ("given", "version"),
    [
        ({}, DEFAULT),
        ({"driver_version": "590.48.01"}, "590.48.01"),
        ({"driver_source": "distribution"}, DEFAULT),
        ({"driver_source": "packages"}, ""),
        ({"driver_source": "runfile"}, ""),
        ({"driver_state": "external"}, ""),
        ({"driver_state": "absent"}, ""),
        ({"inventory_hostname": "cp1"}, ""),
    ],
)
def test_the_version_that_lists_are_asked_for_is_the_one_that_the_role_installs(given, version):
    assert NodeOptions().driver_version == DEFAULT
    known = {"inventory_hostname": "gpu1", "preflight_gpu_nodes": ["gpu1"], **given}
    template = trust_as_template(VARIABLES["__preflight_driver_version"])
    assert Templar(loader=DataLoader(), variables=known).template(template) == version


def test_what_the_lists_lack_is_a_finding_with_its_own_id_and_fields():
    lists = [
        {
            "id": "driver-version-missing",
            "severity": "problem",
            "found": "has no x of version 1 in its package lists, which have 2",
            "remedy": "set driver_version to 2",
            "packages": ["x"],
            "versions": ["2"],
            "kernels": [],
        }
    ]
    validated = {"driver_choice": {"refusals": [], "lists": lists}}
    validated |= {"toolkit_refused": [], "runtime_refused": [], "runtime_warnings": []}
    [finding] = preflight._plans("gpu1", validated)
    assert (finding.id, finding.severity, finding.host) == ("driver-version-missing", "problem", "gpu1")
    assert finding.fields["versions"] == ["2"] and finding.fields["packages"] == ["x"]
    assert "driver-version-missing" in described()
