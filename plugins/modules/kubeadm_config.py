#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubeadm_config
short_description: Have kubeadm keep kube-scheduler's extender when it upgrades the cluster
version_added: 1.0.0
description:
  - C(kubeadm upgrade) writes the manifests of the control plane anew from the configuration that it keeps in the ConfigMap
    C(kube-system/kubeadm-config), and so does C(kubeadm join) on a new control-plane machine. What M(kubegpu.share.kube_scheduler)
    changed in a manifest is lost then, unless it is written there, too.
  - Adds kube-scheduler's flag and the folder with its configuration to C(scheduler.extraArgs) and C(scheduler.extraVolumes), in the
    form of the configuration's own version (C(v1beta1) to C(v1beta3), or C(v1beta4)). Everything else in it, comments included, stays as
    it is, and O(state=absent) gives the very bytes back where nobody changed it meanwhile.
  - The ConfigMap is replaced only as it was read. Where somebody else was quicker it is read again.
  - Where it gives kube-scheduler a C(--config) or C(--policy-config-file) of the user's own, there is nothing to add.
  - Where a manifest has such a file of the user's own and the ConfigMap knows nothing of it, this collection's flag would name a file
    that isn't on the machine. It is taken out again, and RV(reason) says what to do.
  - Nothing happens in a cluster without that ConfigMap, which wasn't made by kubeadm.
  - From then on a control-plane machine needs the folder C(/etc/kubernetes/kubegpu-share) with kube-scheduler's configuration before
    it joins. Copy it from another one before C(kubeadm join --control-plane), which otherwise waits in vain for kube-scheduler there.
requirements:
  - kubernetes.core
  - kubernetes
  - PyYAML (on the controller)
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubernetes.core.k8s_auth_options
options:
  state:
    description: Whether kubeadm knows of the extender.
    type: str
    choices: [present, absent]
    default: present
  configuration:
    description:
      - How kube-scheduler is told of the extender, as in M(kubegpu.share.kube_scheduler).
      - V(auto) decides by the cluster's version.
    type: str
    choices: [auto, config, policy]
    default: auto
  version:
    description: kube-scheduler's version, where its image's tag doesn't tell.
    type: str
  machines:
    description:
      - What M(kubegpu.share.control_plane_info) returned of each control-plane machine, by the machine's name, empty where nobody looked.
        The flag is added only where all of them use this collection's own file in the same form.
      - Without it the ConfigMap alone decides.
    type: dict
  plan:
    description: What the action plugin made on the controller. Not to be set.
    type: dict
"""

EXAMPLES = r"""
- name: Have kubeadm keep the change when it upgrades the cluster
  kubegpu.share.kubeadm_config:
    kubeconfig: ~/.kube/config
  delegate_to: localhost
"""

RETURN = r"""
kept:
  description: Whether an upgrade by kubeadm keeps what kube-scheduler was told.
  returned: success
  type: bool
reason:
  description:
    - Why it doesn't, or what else is to be known, such as before which upgrade the configuration has to be written anew; empty where
      there is nothing to say.
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kubeadm_config import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(module.params, RealKube.of_module(module)))


if __name__ == "__main__":
    main()
