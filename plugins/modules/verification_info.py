#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: verification_info
short_description: Whether the API, kubelet and the machines tell one story about their GPUs
version_added: 1.0.0
description:
  - Compares what the nodes announce with the cards that the device plugin tells of, and these with the cards that were seen on the machines.
  - Looks whether each kube-scheduler still has the configuration with the extender, whether the extender is ready beside it and the device
    plugin on each labelled node, and whether any card is given away more than once.
  - On OpenShift up to 4.9 looks whether C(Scheduler/cluster) names a policy with the extender, whether each kube-scheduler was started with it and
    whether the extender is ready beside it; from 4.10 on whether it names none, and whether the secondary scheduler is at work with the extender.
  - In mode V(dedicated) and on OpenShift looks whether an admission policy guards GPU pods, where the API server has such policies.
  - Evidence that is missing is told as unknown and never as passed.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubernetes.core.k8s_auth_options
options:
  cards:
    description:
      - By name of the GPU node, the UUIDs of the cards that were seen on the machine itself. An empty list where nobody looked.
    type: dict
    default: {}
  control_plane:
    description: Names of the nodes on which a scheduler runs.
    type: list
    elements: str
    default: []
  namespace:
    description: Namespace of gpushare's servers.
    type: str
    default: gpushare-system
  scheduler:
    description:
      - How the cluster runs its scheduler, as M(kubegpu.share.scheduler_info) tells. It says where the extender has to be, and whether each
        node's kube-scheduler can be looked at.
    type: str
    choices: [static_pod, k3s, rke2, dedicated, openshift]
    default: static_pod
  admission:
    description:
      - What the admission policy does with a GPU pod for another scheduler, in mode V(dedicated) and on OpenShift from 4.10 on. V(none) where none
        is installed, which isn't looked for then.
    type: str
    choices: [deny, warn, none]
    default: deny
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Compare
  kubegpu.share.verification_info:
    cards:
      gpu1: [GPU-5a4d7f2e-0000-4000-8000-000000000001]
    control_plane: [cp1]
  register: story

- name: Stop where the stories differ
  ansible.builtin.assert:
    that: story.problems == []
"""

RETURN = r"""
problems:
  description: What contradicts, one sentence each.
  type: list
  elements: str
  returned: success
unknown:
  description: What can't be told for lack of evidence.
  type: list
  elements: str
  returned: success
passed:
  description: What agrees.
  type: list
  elements: str
  returned: success
notes:
  description: What contradicts nothing and somebody should know of, as where nobody holds pods to their shares.
  type: list
  elements: str
  returned: success
requests:
  description: How many requests of each verb the API server was sent.
  type: dict
  returned: success
  sample:
    GET: 2
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._verification import ARGUMENTS, look


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)
    finish(module, lambda: look(RealKube.of_module(module), module.params))


if __name__ == "__main__":
    main()
