# SPDX-License-Identifier: GPL-3.0-or-later
"""What gpu_exclude of each host becomes in the DaemonSets of gpushare's servers."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import card_exclusion as exclusion
from gpushare_objects import rendered

OPTION = "--exclude-cards="
HOSTS = {
    "gpu1": {"gpu_exclude": ["3b:00.0", "NVIDIA T400*"]},
    "gpu2": {"gpu_node_name": "node2", "gpu_exclude": ["3b:00.0", "NVIDIA T400*"]},
    "gpu3": {},
}


def values(template: str, **variables: object) -> list[str]:
    given = {"groups": {"gpu_nodes": list(HOSTS)}, "hostvars": HOSTS, **variables}
    sets = [one for one in rendered(template, **given) if one["kind"] == "DaemonSet"]
    servers = [container for one in sets for container in one["spec"]["template"]["spec"]["containers"]]
    found = {tuple(a[len(OPTION) :] for a in server.get("command", []) if a.startswith(OPTION)) for server in servers}
    return list(max(found, key=len))


@pytest.mark.parametrize("template", ["device_plugin", "dra"])
def test_each_node_finds_its_own_entries_in_the_arguments(template: str) -> None:
    found = values(template)
    assert len(found) == 1
    assert exclusion.of_node("gpu1", found) == exclusion.of_node("node2", found) != exclusion.NOTHING
    assert exclusion.of_node("gpu1", found).of("0000:3B:00.0") and exclusion.of_node("gpu3", found) == exclusion.NOTHING


@pytest.mark.parametrize("template", ["device_plugin", "dra"])
def test_nothing_is_given_where_no_host_keeps_a_card(template: str) -> None:
    assert values(template, hostvars={host: {} for host in HOSTS}) == []
    # Nodes that are no hosts have the play's variable.
    found = values(template, groups={}, hostvars={}, gpushare_nodes=["node9"], gpu_exclude=["3b:00.0"])
    assert exclusion.of_node("node9", found).entries == ("0000:3b:00.0",)
