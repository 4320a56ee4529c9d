#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: control_plane_info
short_description: Look once at a control-plane machine's kube-scheduler
version_added: 1.0.0
description:
  - Returns what M(kubegpu.share.kube_scheduler) decides on. One execution, no change.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.info
options:
  config_path:
    description: Which file to read as kube-scheduler's configuration, where that isn't the path in its C(--config).
    type: path
  policy_path:
    description: Which file to read as kube-scheduler's Policy, where that isn't the path in its C(--policy-config-file).
    type: path
  patches_dir:
    description: The folder that is given to C(kubeadm upgrade --patches), where there is one.
    type: path
"""

EXAMPLES = r"""
- name: Look at kube-scheduler
  kubegpu.share.control_plane_info:
  register: found
"""

RETURN = r"""
control_plane:
  description: What was seen.
  returned: success
  type: dict
  contains:
    kind:
      description: Who runs kube-scheduler here, V(static_pod), V(k3s) or V(rke2); empty where nobody does.
      type: str
    version:
      description: kube-scheduler's version, by its manifest's image or by k3s's or RKE2's own word; empty where that doesn't tell.
      type: str
    folder:
      description: The folder of static pods that kubelet's configuration names.
      type: str
    manifest_path:
      description: Where kube-scheduler's manifest is, or would be.
      type: str
    manifest:
      description: Its text; null where there is none.
      type: str
    link:
      description: Where the manifest is a symbolic link, what it points to; otherwise empty.
      type: str
    others:
      description: Other files of that folder that may be kube-scheduler pods too, with their texts.
      type: dict
    config_path:
      description: The file that was read as kube-scheduler's configuration; empty where it has none.
      type: str
    config:
      description: Its text; null where it isn't there.
      type: str
    policy_path:
      description: The file that was read as kube-scheduler's Policy; empty where it has none.
      type: str
    policy:
      description: Its text; null where it isn't there.
      type: str
    ours:
      description: Text of this collection's own configuration file; null where it isn't there.
      type: str
    ours_policy:
      description: Text of this collection's own Policy file; null where it isn't there.
      type: str
    merged:
      description: Text of the note of what was put into a file of the user's own; null where it isn't there.
      type: str
    patches_dir:
      description: The folder of patches that was looked at; empty for none.
      type: str
    patches:
      description: Its patches of kube-scheduler with their texts.
      type: dict
    running:
      description:
        - The kube-scheduler processes that this machine's kubelet runs, not those of other clusters whose control planes are
          hosted here, each with C(pid), C(config) (its C(--config)), C(policy) (its
          C(--policy-config-file)), C(version) (a static pod's, as it stands in its log) and C(stamp) (RKE2's, the SHA-256 of the
          configuration that it was started with).
      type: list
      elements: dict
    health:
      description: HTTP status of kube-scheduler's C(/healthz) on this machine; 0 where it doesn't answer.
      type: int
    pending:
      description: Whether an earlier run was cut short.
      type: bool
    hostname:
      description: The machine's own name, as it stands in kube-scheduler's lease.
      type: str
    embedded:
      description: The distribution of Kubernetes that runs its scheduler in another way; empty where none was found.
      type: str
    server:
      description:
        - Where RV(control_plane.kind=k3s) or RV(control_plane.kind=rke2), its settings as far as they concern kube-scheduler.
      type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._control_plane import ARGUMENTS, observe
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    finish(module, lambda: {"changed": False, "control_plane": observe(system, **module.params)})


if __name__ == "__main__":
    main()
