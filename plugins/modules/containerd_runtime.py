#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: containerd_runtime
short_description: Make NVIDIA's container runtime containerd's default, or take it out again
version_added: 1.0.0
description:
  - Merges the runtime C(nvidia) into containerd's configuration, as its default runtime. It is a copy of C(runc) as that is in
    effect, with another binary.
  - With containerd 2.1 and newer it lies in a drop-in of its own, C(conf.d/99-kubegpu-nvidia.toml), in the format of the main
    file, which gets one import. Older containerd lets an imported file replace a whole plugin, so there the keys go into the
    file that holds the CRI plugin's section. Comments and all that is the user's stay as they are.
  - The files are edited on the controller. The node is only touched when something has to change. There containerd is asked
    whether the new files mean what they should and lose nothing; then it is restarted, once, and has to come up with its CRI
    plugin. If it doesn't, the old files are put back, and the module fails with containerd's own words. Running pods go on.
  - A run that was cut short is finished by the next.
requirements:
  - tomlkit (on the controller)
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description: Whether the runtime is there.
    type: str
    choices: [present, absent]
    default: present
  binary:
    description: NVIDIA's runtime on the node. It has to be there before containerd is restarted.
    type: path
    default: /usr/bin/nvidia-container-runtime
  set_default:
    description: Whether it serves pods that name no runtime class.
    type: bool
    default: true
  cdi:
    description: Whether CDI is switched on, where containerd knows of it.
    type: bool
    default: true
  enable_cri:
    description: Whether the CRI plugin is taken out of C(disabled_plugins). Otherwise such a node is refused.
    type: bool
    default: false
  timeout:
    description: Seconds that containerd has to come up healthy.
    type: int
    default: 120
  observed:
    description: The node as M(kubegpu.share.gpu_node_info) returned it. Has to be given.
    type: dict
  plan:
    description: What the action plugin made on the controller. Not to be set.
    type: dict
"""

EXAMPLES = r"""
- name: Make nvidia containerd's default runtime
  kubegpu.share.containerd_runtime:
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
dump:
  description: containerd's effective configuration after the change, with credentials masked.
  returned: changed
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._containerd_apply import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(module.params, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
