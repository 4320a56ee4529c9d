#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_info
short_description: What a cluster says of itself and its nodes
version_added: 1.0.0
description:
  - Reads the version of the API server and all nodes, in two requests.
  - Fails in seconds, with one sentence, when the API server can't be reached or doesn't accept the credentials.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubernetes.core.k8s_auth_options
options:
  memory_unit:
    description:
      - The memory unit that the nodes are about to count shares in. When a node counts in another one now, the pods that hold shares are
        read too (RV(sharing_pods)), since such a change would hurt them.
    type: str
    choices: [GiB, MiB]
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Look at the cluster
  kubegpu.share.cluster_info:
  register: cluster
"""

RETURN = r"""
version:
  description: Version of the API server.
  type: str
  returned: success
  sample: v1.36.3
nodes:
  description: The nodes.
  type: list
  elements: dict
  returned: success
  contains:
    name:
      description: Its name.
      type: str
    address:
      description: Its internal address.
      type: str
    labels:
      description: Its labels.
      type: dict
    annotations:
      description: Those of its annotations that GPU sharing stacks write.
      type: dict
    taints:
      description: Its taints.
      type: list
    schedulable:
      description: It isn't cordoned.
      type: bool
    ready:
      description: Its kubelet says Ready.
      type: bool
    capacity:
      description: What it has, by resource.
      type: dict
    allocatable:
      description: What it has to give, by resource.
      type: dict
    runtime:
      description: Its container runtime and version.
      type: str
      sample: containerd://2.2.9
    kubelet:
      description: Version of its kubelet.
      type: str
    os:
      description: Its operating system.
      type: str
    arch:
      description: Its architecture.
      type: str
sharing_pods:
  description: Pods that hold a share of a card (namespace, name, node, units); null where they weren't asked for.
  type: list
  elements: dict
  returned: success
requests:
  description: How many requests of each verb the API server was sent.
  type: dict
  returned: success
  sample:
    GET: 2
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_info import ARGUMENTS, look
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)
    finish(module, lambda: look(RealKube.of_module(module), module.params["memory_unit"]))


if __name__ == "__main__":
    main()
