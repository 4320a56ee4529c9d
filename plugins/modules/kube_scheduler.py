#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_scheduler
short_description: Tell kube-scheduler of gpushare's extender, or take it out again
version_added: 1.0.0
description:
  - Gives a control-plane machine's kube-scheduler gpushare's extender, in the form that its version reads, a
    C(KubeSchedulerConfiguration) or a Policy. What its flags said, and a configuration file would make it forget, is repeated
    there.
  - Where kube-scheduler has a C(--config) or C(--policy-config-file) already, the extender is merged into that very file.
    Profiles, other extenders and comments stay as they are.
  - Of a static pod, as kubeadm sets it up, the manifest gets one flag, one folder mounted and one annotation, or only the
    annotation. Everything else in it, comments included, stays as it is, and no other file is ever written into the manifests'
    folder, which is the one that kubelet's configuration names.
  - k3s and RKE2 get a drop-in beside their settings, which adds to C(kube-scheduler-arg), and are started again.
  - Files are edited on the controller. The machine is only touched when something has to change. There a new kube-scheduler
    process with the configuration has to come up and be healthy, and its lease in the cluster has to be renewed, by another
    process where this machine's held it. If that doesn't happen, the old files are put back, and the module fails with
    kube-scheduler's own words.
  - A manifest that is a symbolic link, a second kube-scheduler pod in the manifests' folder and a control plane that is half
    upgraded are refused, and nothing is changed.
  - A run that was cut short is finished by the next.
requirements:
  - PyYAML (on the controller)
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description: Whether kube-scheduler knows the extender.
    type: str
    choices: [present, absent]
    default: present
  extender_url:
    description: Where kube-scheduler reaches the extender.
    type: str
    default: http://127.0.0.1:12345/gpushare-scheduler
  extender_timeout:
    description: Seconds that kube-scheduler waits for an answer of the extender.
    type: int
    default: 30
  extender_preemption:
    description: Whether kube-scheduler asks the extender which pods to evict for one of higher priority. Upstream's can't tell.
    type: bool
    default: false
  configuration:
    description:
      - In which form kube-scheduler gets the extender. V(auto) is a Policy before 1.19 and where there is one already, and a
        C(KubeSchedulerConfiguration) otherwise. A Policy is read up to 1.22.
    type: str
    choices: [auto, policy, config]
    default: auto
  version:
    description: kube-scheduler's version, where its image's tag doesn't tell.
    type: str
  versions:
    description:
      - The kube-schedulers' versions of all control-plane machines, as M(kubegpu.share.scheduler_info) returned them. Where
        they differ by a minor version the cluster is half upgraded, and nothing is changed.
    type: list
    elements: str
    default: []
  patches_dir:
    description:
      - The folder on the machine that is given to C(kubeadm upgrade --patches). Where it is set, patches with what is ours in
        the manifest are written there too, so that an upgrade keeps it.
    type: path
  timeout:
    description: Seconds that kube-scheduler has to come up healthy.
    type: int
    default: 120
  kubeconfig:
    description:
      - Path of the cluster's kubeconfig on the controller, or its content as a dictionary. It isn't sent to the machine.
      - Unset, the cluster is found as the kubernetes.core collection finds it, by the controller's environment
        (C(K8S_AUTH_*)), a service account or the default kubeconfig. Where there is none of these the lease isn't looked at,
        and a warning says so.
    type: raw
  observed:
    description: The machine as M(kubegpu.share.control_plane_info) returned it. Has to be given.
    type: dict
  plan:
    description: What the action plugin made on the controller. Not to be set.
    type: dict
"""

EXAMPLES = r"""
- name: Look at kube-scheduler
  kubegpu.share.control_plane_info:
  register: found

- name: Tell kube-scheduler of the extender
  kubegpu.share.kube_scheduler:
    observed: "{{ found.control_plane }}"
"""

RETURN = r"""
lease:
  description: The holder of kube-scheduler's lease after the change.
  returned: changed, where it was looked at
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler_apply import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(module.params, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
