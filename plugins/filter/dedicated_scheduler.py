# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: dedicated_scheduler
short_description: What a kube-scheduler of our own has to be like on a cluster
version_added: 1.0.0
description:
  - Tells which image, configuration, health endpoints and API versions fit the cluster's version, and on which nodes it
    can run.
positional: wish
options:
  _input:
    description: The cluster as M(kubegpu.share.cluster_info) returned it.
    type: dict
    required: true
  wish:
    description:
      - C(state), C(name), C(namespace), C(image), C(version), C(replicas), C(nodes), C(extender_timeout) and
        C(preemption), as the role C(scheduler) has them.
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show which image it takes
  vars:
    wish:
      state: present
      name: gpushare-scheduler
      namespace: gpushare-scheduler
      image: registry.k8s.io/kube-scheduler
      version: ""
      replicas: 2
      nodes: []
      extender_timeout: 30
      preemption: true
  ansible.builtin.debug:
    msg: "{{ (cluster | kubegpu.share.dedicated_scheduler(wish)).image }}"
"""

RETURN = r"""
_value:
  description:
    - C(problem), one sentence, empty where there is none. In that case also C(image), C(minor), C(config),
      C(config_name), C(nodes), C(live), C(ready), C(policy_api) and C(budget_api).
  type: dict
"""

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._dedicated_scheduler import plan


def dedicated_scheduler(cluster: dict[str, t.Any], wish: dict[str, t.Any]) -> dict[str, t.Any]:
    try:
        return {"problem": "", **plan(cluster, wish)}
    except BadInput as error:
        return {"problem": str(error)}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"dedicated_scheduler": dedicated_scheduler}
