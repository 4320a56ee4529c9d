#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubeadm_config
short_description: "Keep kube-scheduler's extender over upgrades by kubeadm"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
extends_documentation_fragment: kubegpu.share.attributes.cluster
options:
  state: {description: "Whether kubeadm's configuration has the change.", type: str, choices: [present, absent], default: present}
  configuration: {description: "The form of the extender's configuration.", type: str, choices: [auto, config, policy], default: auto}
  version: {description: "kube-scheduler's version, where its image's tag has none.", type: str}
  machines:
    description: The result C(control_plane) of M(kubegpu.share.control_plane_info) by machine, empty where it wasn't observed.
    type: dict
  plan: {description: Set by the action plugin., type: dict}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.kubeadm import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(module.params, connect(module)))


if __name__ == "__main__":
    main()
