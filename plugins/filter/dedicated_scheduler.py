# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: dedicated_scheduler
short_description: Image and configuration of a kube-scheduler beside the cluster's own
version_added: 1.0.0
description:
  - Returns the image, configuration, health endpoints and API versions that fit the cluster's version, and the nodes on
    which the scheduler can run.
positional: options
options:
  _input:
    description:
      - The cluster as M(kubegpu.share.cluster_info) returned it. For OpenShift a dictionary with its release as
        C(version) and an empty list C(nodes).
    type: dict
    required: true
  options:
    description:
      - C(mode) (V(dedicated), or V(openshift) from 4.10 on), C(state), C(name), C(image), C(version), C(timeout) (of
        the extender, in seconds) and C(preemption), as the role C(scheduler) has them.
      - For V(dedicated) also C(namespace), C(replicas), C(nodes), and C(imported), the nodes that get the extender's
        image from the playbooks, null where each node pulls it.
      - For V(openshift) also C(extender), name and namespace of the extender's Service with a dot between them, and
        C(tls), which is C(client) of the result of P(kubegpu.share.extender_certificates#filter).
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the scheduler's image
  vars:
    options:
      mode: dedicated
      state: present
      name: gpushare-scheduler
      namespace: gpushare-scheduler
      image: registry.k8s.io/kube-scheduler
      version: ""
      replicas: 2
      nodes: []
      timeout: 30
      preemption: true
  ansible.builtin.debug:
    msg: "{{ (cluster | kubegpu.share.dedicated_scheduler(options)).image }}"
"""

RETURN = r"""
_value:
  description:
    - C(problem), the reason why the scheduler can't run; empty where it can. In that case also C(image), C(minor),
      C(config), C(config_name), C(nodes), C(control_plane) (whether it runs on the nodes with that label), C(live),
      C(ready), C(policy_api) (the version of admission policies that the cluster serves, empty for none) and
      C(budget_api).
  type: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import (
        ClusterNodes,
        SchedulerOptions,
    )


def dedicated_scheduler(cluster: ClusterNodes, options: SchedulerOptions) -> JsonObject:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import plan

    try:
        return {"problem": "", **plan(cluster, options)}
    except BadInput as error:
        return {"problem": str(error)}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"dedicated_scheduler": dedicated_scheduler}
