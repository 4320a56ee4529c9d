#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: backend_objects
short_description: Wait for a back end in the cluster, or remove what its servers wrote and left there
version_added: 1.0.0
description:
  - "For the roles of this collection only: roles P(kubegpu.share.gpushare#role), P(kubegpu.share.hami#role) and P(kubegpu.share.nvidia_device_plugin#role)
    use it. No other component removes what a server wrote."
  - kubelet announces the resource of a device plugin that has gone with nothing allocatable, with its former size for five minutes, then 0 for good. It is
    removed when it is 0, because earlier it would come back.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  backend:
    description: The back end.
    type: str
    choices: [gpushare, hami, nvidia]
    required: true
  state:
    description:
      - V(complete), of V(hami) and V(nvidia), creates the objects of O(release) that somebody deleted, as O(rendered) has them. helm compares its records
        only, and what these say is created nowhere, since whoever writes Secrets there can write them. Without O(rendered), which is enough
        in check mode, it fails where something is to be created. Objects that exist are left as they are, and so are those of kinds that
        Kubernetes itself doesn't have.
      - V(ready), of V(hami), changes nothing. It waits until the pods of the release are ready, the webhook changes a new pod in
        O(proof_namespace), and HAMi's scheduler knows the cards of O(nodes).
      - V(off_nodes) removes from O(nodes) what the device plugin of the back end announced and wrote, annotations and resources. Of V(hami) it takes
        the plugin off the nodes, too, by their labels, and removes locks and annotations of pods; it refuses while pods hold parts of cards. Of
        V(nvidia) it waits until nothing is allocatable, and O(kubelet_timeout) until kubelet has given the resources up.
      - V(absent), of V(hami), removes everything that its release left in the cluster, whatever helm believes, and the annotations that its
        scheduler wrote on all nodes. It refuses while a node has the device plugin.
    type: str
    choices: [complete, ready, off_nodes, absent]
    required: true
  nodes:
    description: Names of the nodes.
    type: list
    elements: str
    default: []
  resources:
    description: Of V(nvidia), names of the resources, as a shell matches them.
    type: list
    elements: str
    default: []
  release:
    description: The release of the back end's chart.
    type: str
    default: hami
  rendered:
    description: Of V(complete), the objects of the release's chart, as C(helm template) prints them.
    type: str
    default: ""
  namespace:
    description: The release's namespace.
    type: str
    default: hami-system
  scheduler_name:
    description: Of V(hami), its scheduler's name.
    type: str
    default: hami-scheduler
  overwrites:
    description: Of V(hami), whether the webhook takes pods that name no scheduler.
    type: bool
    default: true
  proof_namespace:
    description: Of V(hami), a namespace whose pods the webhook sees. Empty for no proof.
    type: str
    default: ""
  wait_timeout:
    description: Seconds that each wait for a server may take.
    type: int
    default: 300
  kubelet_timeout:
    description: Of V(nvidia), seconds that kubelet may take to give up the resources. What is left then is in RV(left).
    type: int
    default: 420
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Take HAMi off a node
  kubegpu.share.backend_objects:
    backend: hami
    state: off_nodes
    nodes: [gpu1]
"""

RETURN = r"""
code:
  description: Of V(hami), why it refuses, V(pods_hold) or V(nodes_left), with their names in C(pods) or C(nodes).
  type: str
  returned: when it refuses
unready:
  description: What isn't ready now.
  type: list
  elements: str
  returned: with O(state=ready) in check mode
left:
  description: Of V(nvidia), by node the resources that kubelet still has, with their numbers.
  type: dict
  returned: with O(state=off_nodes)
announced:
  description: Of V(nvidia), by node the resources that a device plugin still announces.
  type: dict
  returned: failure
requests:
  description: Number of requests to the API server by HTTP method.
  type: dict
  returned: success
  sample:
    GET: 4
    PATCH: 2
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._backends.cluster import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
