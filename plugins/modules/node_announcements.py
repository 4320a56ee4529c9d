#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_announcements
short_description: Remove the annotations and resources of gpushare's device plugin from nodes
version_added: 1.0.0
description:
  - For the role gpushare of this collection only. Removes the annotations C(kubegpu.share/cards), C(kubegpu.share/memory-limit) and
    C(kubegpu.share/runtime-cdi) and the resources C(aliyun.com/gpu-mem) and C(aliyun.com/gpu-count) from nodes on which the device
    plugin no longer runs. Neither Kubernetes nor the plugin does that.
  - Without the plugin, C(allocatable) of C(aliyun.com/gpu-mem) is 0. kubelet itself reports its C(capacity) for another five minutes, and then 0 until
    it restarts; this module leaves that to kubelet.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  nodes:
    description: Names of the nodes. Nodes that aren't in the cluster are skipped.
    type: list
    elements: str
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Remove the annotations and resources of the device plugin
  kubegpu.share.node_announcements:
    nodes: [gpu1, gpu2]
"""

RETURN = r"""
requests:
  description: Number of requests to the API server by HTTP method.
  type: dict
  returned: success
  sample:
    GET: 4
    PATCH: 4
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.stale_status import ARGUMENTS, remove_stale
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube, auth_arguments


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)
    run_module(module, lambda: remove_stale(RealKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
