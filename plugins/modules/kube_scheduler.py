#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_scheduler
short_description: Tell a static kube-scheduler of gpushare's extender, or take it out again
version_added: 1.0.0
description:
  - Gives the kube-scheduler that kubeadm set up on a control-plane machine a C(KubeSchedulerConfiguration) with gpushare's
    extender, in the version that this kube-scheduler reads. What its flags said, and a configuration file would make it forget,
    is repeated there.
  - Where kube-scheduler has a C(--config) already, the extender is merged into that very file. Profiles, other extenders and
    comments stay as they are.
  - The manifest gets one flag, one folder mounted and one annotation, or only the annotation. Everything else in it, comments
    included, stays as it is, and no other file is ever written into the manifests' folder.
  - Files are edited on the controller. The machine is only touched when something has to change. There a new kube-scheduler
    process with the configuration has to come up and be healthy. If it doesn't, the old files are put back, and the module
    fails with kube-scheduler's own words.
  - A run that was cut short is finished by the next.
requirements:
  - ruamel.yaml (on the controller)
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
  version:
    description: kube-scheduler's version, where its image's tag doesn't tell.
    type: str
  timeout:
    description: Seconds that kube-scheduler has to come up healthy.
    type: int
    default: 120
  kubeconfig:
    description:
      - Kubeconfig of the cluster, on the controller. With it the module also waits until kube-scheduler's lease is renewed, by
        another process where this machine's held it.
    type: path
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
  returned: changed, with O(kubeconfig)
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._static_pod import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(module.params, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
