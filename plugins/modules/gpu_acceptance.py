#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_acceptance
short_description: Run real workloads that share a GPU, and say what held
version_added: 1.0.0
author: The kubegpu.share authors (@kubegpu)
description:
  - Runs small pods in a namespace of its own and checks six things, in this order. A, three pods that ask for 1 unit each run on
    one card. B, a pod that fits the node's total but no single card stays Pending, for the scheduler extender's reason. C, a pod
    larger than the cluster stays Pending. D, each container sees its own card's device node and no other. E, both containers of a
    pod get the same card. F, after deletion everything is free again.
  - Sizes are computed from what the cluster has left. A check that a cluster can't show, such as B where no node has two cards, is
    skipped with the reason.
  - The namespace is removed whatever happens. Namespaces of earlier runs that were killed are removed first, so that only one run
    can be made on a cluster at a time.
  - Fails when a check fails, with the table in the message.
extends_documentation_fragment:
  - kubernetes.core.k8s_auth_options
attributes:
  check_mode:
    support: full
    description: Creates nothing; every check is skipped, and says on which node it would run.
  diff_mode:
    support: N/A
    description: What it creates it removes, so that there is no difference to show.
  platform:
    description: Target systems.
    platforms: posix
    support: full
requirements:
  - kubernetes >= 24.2.0
  - PyYAML >= 3.11
options:
  image:
    description:
      - Image of the workloads. It needs C(sleep) and C(ls).
      - Unset, it is the image of the cluster's own gpushare device plugin, which is already on every GPU node.
    type: str
  node_selector:
    description: Only nodes with these labels are used.
    type: dict
    default: {}
  runtime_class:
    description: RuntimeClass of the workloads, for a cluster on which the nvidia runtime isn't the default one.
    type: str
  scheduler_name:
    description: The scheduler that places the workloads, where that isn't the cluster's own.
    type: str
  timeout:
    description: Seconds that a check may wait for something to happen.
    type: int
    default: 120
"""

EXAMPLES = r"""
- name: Show that pods share a card
  kubegpu.share.gpu_acceptance:
    kubeconfig: ~/.kube/config
"""

RETURN = r"""
rows:
  description: One row per check, in order.
  returned: when the checks were made
  type: list
  elements: dict
  contains:
    id:
      description: Letter of the check.
      type: str
      sample: a
    what:
      description: What is checked.
      type: str
      sample: three pods of 1 unit run on one card
    result:
      description: V(pass), V(fail) or V(skip).
      type: str
      sample: pass
    detail:
      description: What was seen, or why the check was skipped.
      type: str
      sample: card 0 of node gpu1
table:
  description: The rows as text.
  returned: when the checks were made
  type: str
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._acceptance import Wish, run
from ansible_collections.kubegpu.share.plugins.module_utils._acceptance_cluster import ApiCluster, RealClock
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    spec = {
        **auth_arguments(),
        "image": {"type": "str"},
        "node_selector": {"type": "dict", "default": {}},
        "runtime_class": {"type": "str"},
        "scheduler_name": {"type": "str"},
        "timeout": {"type": "int", "default": 120},
    }
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)

    def work() -> dict[str, t.Any]:
        names = ("image", "node_selector", "runtime_class", "scheduler_name", "timeout")
        wish = Wish(**{name: module.params[name] for name in names})
        return run(ApiCluster(RealKube.of_module(module)), RealClock(), wish, module.check_mode)

    finish(module, work)


if __name__ == "__main__":
    main()
