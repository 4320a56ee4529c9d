#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubeadm_config
short_description: "For the roles of this collection only: keep kube-scheduler's extender over upgrades by kubeadm"
version_added: 1.0.0
description:
  - "For the roles of this collection only: options and return values may change in any release."
  - C(kubeadm upgrade) regenerates the manifests of the control plane from the ConfigMap C(kube-system/kubeadm-config), and so does
    C(kubeadm join) on a new control-plane machine. A change that M(kubegpu.share.kube_scheduler) made in a manifest is lost then, unless the
    ConfigMap has it too.
  - Adds kube-scheduler's flag and the folder with its configuration to C(scheduler.extraArgs) and C(scheduler.extraVolumes), in the form of
    the configuration's own version (C(v1beta1) to C(v1beta3), or C(v1beta4) and C(v1)). Everything else stays, comments included, and O(state=absent)
    restores the text byte for byte unless it was edited meanwhile.
  - The ConfigMap is replaced only if it is unchanged since it was read; otherwise it is read again.
  - Where it gives kube-scheduler a C(--config) or C(--policy-config-file) of the user's own, nothing is added.
  - Where a manifest has such a file of the user's own and the ConfigMap hasn't, this collection's flag would name a file that isn't on the
    machine. The flag is removed again, and RV(reason) states the action.
  - Does nothing in a cluster without that ConfigMap, which wasn't created by kubeadm.
  - Afterwards a control-plane machine needs the folder C(/etc/kubernetes/kubegpu-share) with kube-scheduler's configuration before it joins.
    Copy it from another one before C(kubeadm join --control-plane), which otherwise fails to start kube-scheduler there.
requirements:
  - kubernetes.core
  - PyYAML (on the controller)
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  state:
    description: Whether kubeadm's configuration has the change.
    type: str
    choices: [present, absent]
    default: present
  configuration:
    description:
      - The form of the extender's configuration, as in M(kubegpu.share.kube_scheduler).
      - V(auto) selects by the cluster's version.
    type: str
    choices: [auto, config, policy]
    default: auto
  version:
    description: kube-scheduler's version, where its image's tag has none.
    type: str
  machines:
    description:
      - The result C(control_plane) of M(kubegpu.share.control_plane_info) of each control-plane machine, by the machine's name, empty where it
        was not observed. The flag is added only where all of them use this collection's own file in the same form.
      - Without it the ConfigMap alone decides.
    type: dict
  plan:
    description: Set by the action plugin.
    type: dict
"""

EXAMPLES = r"""
- name: Add the change to kubeadm's configuration so that upgrades keep it
  kubegpu.share.kubeadm_config:
    kubeconfig: ~/.kube/config
  delegate_to: localhost
"""

RETURN = r"""
kept:
  description: Whether an upgrade by kubeadm keeps kube-scheduler's extender.
  returned: success
  type: bool
reason:
  description:
    - Why it doesn't, or a condition, such as before which upgrade the configuration has to be written again; empty where neither applies.
  returned: success
  type: str
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
