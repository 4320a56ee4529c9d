#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: scheduler_info
short_description: How a cluster runs its scheduler, and which machines have to be changed for it
version_added: 1.0.0
description:
  - Tells from the API alone whether kube-scheduler is a static pod, a part of k3s or RKE2, OpenShift's, or somebody else's (a managed
    control plane), and why it thinks so. Changes nothing.
  - Fails where a scheduler would be left without the extender, since that one would bind pods that then have no card.
  - Fails where a dedicated scheduler that was set up before would go on beside schedulers on machines.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubernetes.core.k8s_auth_options
options:
  mode:
    description: What is wanted. V(auto) chooses by looking.
    type: str
    choices: [auto, static_pod, k3s, rke2, dedicated, openshift]
    default: auto
  hosts:
    description: The hosts of the inventory on which schedulers run, each with the name of its node.
    type: dict
    default: {}
  state:
    description: V(absent) where it is all to be taken away. What another mode has left is then only told.
    type: str
    choices: [present, absent]
    default: present
  namespace:
    description: Namespace of gpushare's servers.
    type: str
    default: gpushare-system
  dedicated_namespace:
    description: Namespace of a dedicated scheduler.
    type: str
    default: gpushare-scheduler
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Find out how this cluster runs its scheduler
  kubegpu.share.scheduler_info:
    hosts:
      cp1.example.com: cp1
  register: found
"""

RETURN = r"""
scheduler:
  description: What was found.
  type: dict
  returned: success
  contains:
    mode:
      description: How to make the scheduler ask the extender.
      type: str
      sample: static_pod
    why:
      description: What tells so, in one sentence.
      type: str
      sample: node cp1 runs kube-scheduler as a static pod
    on_machines:
      description: Whether machines have to be changed, one after another; otherwise it is all done through the API.
      type: bool
    hosts:
      description: These machines, as hosts of the inventory. The one whose scheduler leads is the last.
      type: list
      elements: str
    versions:
      description: The versions of the kube-schedulers that are static pods, by their images' tags.
      type: list
      elements: str
      sample: [v1.36.3]
    version:
      description: Version of the API server.
      type: str
      sample: v1.36.3
    openshift:
      description: Version of OpenShift; empty where this isn't one.
      type: str
    policy:
      description: Whether this OpenShift's own scheduler takes a policy (before 4.10).
      type: bool
    left:
      description: What is still at work of another mode in which the cluster was set up before, as kind and name.
      type: list
      elements: str
      sample: [DaemonSet gpushare-system/gpushare-extender]
    namespace:
      description: "O(namespace) as it is: its C(name), and its C(metadata) with labels and the collection's own annotations, empty where
        it isn't there."
      type: dict
requests:
  description: How many requests of each verb the API server was sent.
  type: dict
  returned: success
  sample:
    GET: 4
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler_choice import ARGUMENTS, look


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)
    finish(module, lambda: {"changed": False, **look(RealKube.of_module(module), module.params)})


if __name__ == "__main__":
    main()
