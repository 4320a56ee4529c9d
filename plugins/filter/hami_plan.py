# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: hami_plan
short_description: Plan the values of HAMi's chart
version_added: 1.0.0
description:
  - For the role hami of this collection only. Turns its variables into values of HAMi's chart, from the cluster's
    version, the nodes and their container runtimes.
  - Values of 4paradigm's time are mapped to today's. A value that the chart doesn't have is a problem, because helm
    would ignore it.
positional: cluster
options:
  _input:
    description: The role's variables, without C(hami_).
    type: dict
    required: true
  cluster:
    description:
      - C(version) of the API server, C(nodes) and C(runtime_classes) as objects of the API, C(facts) by the node's
        name, C(chart_values) of the chart.
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show what would be deployed
  ansible.builtin.debug:
    msg: "{{ options | kubegpu.share.hami_plan(cluster) }}"
  vars:
    options: "{{ __hami_options }}"
    cluster: "{{ __hami_cluster }}"
"""

RETURN = r"""
_value:
  description:
    - C(release_values) of the chart, C(defaults) of the device configuration, C(runtime_class) that has to exist,
      C(overwrites), C(certificate), C(chart_version), C(notes) and C(problems), each of the last two with C(code),
      C(path) and C(message).
  type: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.chart import ReleasePlan
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.values import Cluster, Options


def hami_plan(options: Options, cluster: Cluster) -> ReleasePlan:
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.values import plan

    return plan(options, cluster)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"hami_plan": hami_plan}
