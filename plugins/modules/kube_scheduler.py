#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_scheduler
short_description: Configure kube-scheduler with gpushare's extender, or remove it again
version_added: 1.0.0
description:
  - Adds gpushare's extender to a control-plane machine's kube-scheduler, in the form that its version reads, a C(KubeSchedulerConfiguration)
    or a Policy. The configuration repeats the effect of flags that kube-scheduler ignores with it.
  - Where kube-scheduler already has a C(--config) or C(--policy-config-file), the extender is merged into that file. Profiles, other extenders
    and comments stay unchanged.
  - The manifest of a static pod, as kubeadm writes it, gets one flag, one mounted folder and one annotation, or only the annotation. Everything
    else in it stays, comments included, and no other file is written to the manifests' folder, which is the one that kubelet's configuration
    names.
  - k3s and RKE2 get a drop-in beside their settings, which adds to C(kube-scheduler-arg), and are restarted.
  - Files are edited on the controller. The machine is only accessed when something has to change. Then a new kube-scheduler process with the
    configuration has to become healthy, and its lease in the cluster has to be renewed, by another process where this machine's held it.
    Otherwise the module rolls the files back and fails with the last errors of kube-scheduler's log.
  - Before it changes anything, with O(state=present), the extender has to answer a filter request from the machine, within 60 seconds. Otherwise the
    module fails with C(code=extender_unanswered), C(reason), C(url) and C(host).
  - Refuses a manifest that is a symbolic link, a second kube-scheduler pod in the manifests' folder, and a control plane that is half upgraded.
  - A run that was interrupted is completed by the next.
requirements:
  - PyYAML (on the controller)
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description: Whether kube-scheduler uses the extender.
    type: str
    choices: [present, absent]
    default: present
  extender_url:
    description: The extender's URL, as kube-scheduler reaches it.
    type: str
    default: http://127.0.0.1:12345/gpushare-scheduler
  extender_timeout:
    description: Seconds that kube-scheduler waits for a response of the extender.
    type: int
    default: 30
  extender_preemption:
    description: Whether kube-scheduler asks the extender which pods to evict for one of higher priority. The upstream extender doesn't support it.
    type: bool
    default: false
  configuration:
    description:
      - The form of the extender's configuration. V(auto) is a Policy before 1.19 and where kube-scheduler already has one, and a
        C(KubeSchedulerConfiguration) otherwise, as where kube-scheduler 1.18 already has one of C(v1alpha2). kube-scheduler reads a Policy up to 1.22.
    type: str
    choices: [auto, policy, config]
    default: auto
  version:
    description: kube-scheduler's version, where its image's tag has none.
    type: str
  versions:
    description:
      - The kube-schedulers' versions of all control-plane machines, as M(kubegpu.share.cluster_info) returned them. Where
        they differ by a minor version, the cluster is half upgraded and the change is refused.
    type: list
    elements: str
    default: []
  patches_dir:
    description:
      - The folder on the machine that is passed to C(kubeadm upgrade --patches). If set, patches with our part of the manifest are written
        to it, so an upgrade keeps that.
    type: path
  timeout:
    description: Seconds that kube-scheduler has to become healthy.
    type: int
    default: 120
  kubeconfig:
    description:
      - Path of the cluster's kubeconfig on the controller, or its content as a dictionary. It isn't sent to the machine.
      - By default as in the kubernetes.core collection, by the controller's environment (C(K8S_AUTH_*)), a service account or the default
        kubeconfig. Where there is none of these, the lease isn't checked, with a warning.
    type: raw
  observed:
    description: The result C(control_plane) of M(kubegpu.share.control_plane_info). Required.
    type: dict
  plan:
    description: Set by the action plugin.
    type: dict
"""

EXAMPLES = r"""
- name: Observe the control plane's kube-scheduler
  kubegpu.share.control_plane_info:
  register: found

- name: Configure kube-scheduler with the extender
  kubegpu.share.kube_scheduler:
    observed: "{{ found.control_plane }}"
"""

RETURN = r"""
lease:
  description: The holder of kube-scheduler's lease after the change.
  returned: changed, where the lease was checked
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.apply import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(module.params, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
