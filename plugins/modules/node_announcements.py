#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_announcements
short_description: Take from nodes what gpushare's device plugin has told of their cards
version_added: 1.0.0
description:
  - Removes the annotations C(kubegpu.share/cards), C(kubegpu.share/memory-limit) and C(kubegpu.share/runtime-cdi) and the resources
    C(aliyun.com/gpu-mem) and C(aliyun.com/gpu-count) from nodes on which the device plugin doesn't run any more. Neither Kubernetes nor the plugin does that.
  - Once the plugin is gone, nothing of C(aliyun.com/gpu-mem) can be had (C(allocatable) is 0). kubelet itself goes on to show its C(capacity) for
    five minutes, then 0 until it is restarted; that is left to it.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubernetes.core.k8s_auth_options
options:
  nodes:
    description: Names of the nodes. One that isn't in the cluster has nothing to take away.
    type: list
    elements: str
    required: true
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Take away what the device plugin has told
  kubegpu.share.node_announcements:
    nodes: [gpu1, gpu2]
"""

RETURN = r"""
requests:
  description: How many requests of each verb the API server was sent.
  type: dict
  returned: success
  sample:
    GET: 4
    PATCH: 4
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._node_announcements import ARGUMENTS, forget
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)
    finish(module, lambda: forget(RealKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
