#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: hami_leftovers
short_description: Remove what HAMi leaves in the Kubernetes API
version_added: 1.0.0
description:
  - For the role hami of this collection only.
  - With O(scope=nodes), removes HAMi's device plugin from O(nodes) by their label, waits until its pods are gone, and removes the annotations that
    HAMi wrote on these nodes and their pods, with the lock of a bind that never ended. Then it waits until HAMi's scheduler, where it still runs,
    has forgotten the nodes, up to 90 seconds. Cordon the nodes before.
  - kubelet itself reports the C(capacity) of C(nvidia.com/gpu) for five minutes after the plugin is gone, and then 0 for good. The module leaves the
    first to kubelet, and removes the second.
  - With O(scope=cluster), removes every object of the release in whatever state an interrupted run left it, what helm recorded of it, the
    webhook's certificate, the scheduler's Lease, and HAMi's annotations of all nodes and pods.
  - Annotations of HAMi's users, such as C(hami.io/device-cordon), stay.
  - Refuses while pods hold parts of cards by HAMi, and with O(scope=cluster) while a node has its device plugin.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  scope:
    description: What is cleaned.
    type: str
    choices: [nodes, cluster]
    required: true
  nodes:
    description: Names of the nodes, for O(scope=nodes). Nodes that aren't in the cluster are skipped.
    type: list
    elements: str
    default: []
  release:
    description: Name of the release.
    type: str
    default: hami
  namespace:
    description: Namespace of the release.
    type: str
    default: hami-system
  scheduler_name:
    description: Name of HAMi's scheduler, which is that of its Lease, too.
    type: str
    default: hami-scheduler
  wait_timeout:
    description: Time limit in seconds until the device plugin's pods are gone.
    type: int
    default: 300
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Remove HAMi from a node
  kubegpu.share.hami_leftovers:
    scope: nodes
    nodes: [gpu1]

- name: Remove what the release left
  kubegpu.share.hami_leftovers:
    scope: cluster
    namespace: hami-system
"""

RETURN = r"""
requests:
  description: Number of requests to the API server by HTTP method.
  type: dict
  returned: success
  sample:
    GET: 4
    PATCH: 2
code:
  description: Why it refuses, V(pods_hold) or V(nodes_left), with their names in C(pods) or C(nodes).
  type: str
  returned: when it refuses
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._hami.leftovers import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube, auth_arguments


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)
    run_module(module, lambda: ensure(RealKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
