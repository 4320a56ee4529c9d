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
    manifest_path:
      description: Where kubeadm keeps kube-scheduler's manifest.
      type: str
    manifest:
      description: Its text; null where there is none.
      type: str
    config_path:
      description: The file that was read as kube-scheduler's configuration; empty where it has none.
      type: str
    config:
      description: Its text; null where it isn't there.
      type: str
    ours:
      description: Text of this collection's own configuration file; null where it isn't there.
      type: str
    running:
      description: The kube-scheduler processes of the machine, each with C(pid) and C(config), its C(--config).
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
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._control_plane import ARGUMENTS, observe
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    finish(module, lambda: {"changed": False, "control_plane": observe(system, module.params["config_path"])})


if __name__ == "__main__":
    main()
