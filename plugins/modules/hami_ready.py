#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: hami_ready
short_description: Wait until a release of HAMi works
version_added: 1.0.0
description:
  - For the role hami of this collection only. Waits until all pods of the release are ready.
  - With O(proof_namespace), waits until its webhook changes a new pod there. For that it asks the API server what a pod with C(nvidia.com/gpumem)
    would become; the pod is never stored.
  - With O(nodes), waits until HAMi's device plugin has registered healthy cards on each of them, so that its scheduler can place pods there.
  - Changes nothing, and doesn't wait in check mode. After O(wait_timeout) it fails with the reasons from the pods' states, events and logs, or with
    the webhook's.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  release:
    description: Name of the release.
    type: str
    required: true
  namespace:
    description: Namespace of the release.
    type: str
    required: true
  scheduler_name:
    description: Name of HAMi's scheduler.
    type: str
    default: hami-scheduler
  overwrites:
    description: Whether the webhook gives HAMi's scheduler to pods that name none. Otherwise the pod that is tried names it.
    type: bool
    default: true
  proof_namespace:
    description: Namespace of the pod that is tried. It must be one of the webhook's. Empty, none is tried.
    type: str
    default: ""
  nodes:
    description: Names of the nodes that must be registered.
    type: list
    elements: str
    default: []
  wait_timeout:
    description: Time limit in seconds, for each of the three.
    type: int
    default: 300
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Wait until HAMi places pods
  kubegpu.share.hami_ready:
    release: hami
    namespace: hami-system
    proof_namespace: default
"""

RETURN = r"""
requests:
  description: Number of requests to the API server by HTTP method.
  type: dict
  returned: success
  sample:
    GET: 4
    POST: 1
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._hami.ready import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube, auth_arguments


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)
    run_module(module, lambda: ensure(RealKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
