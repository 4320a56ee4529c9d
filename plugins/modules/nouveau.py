#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nouveau
short_description: Keep the nouveau driver away from a node's cards
version_added: 1.0.0
description:
  - Writes C(/etc/modprobe.d/blacklist-nouveau.conf) with the two lines of NVIDIA's guide, keeping what else stands there.
  - Makes the initramfs of every installed kernel anew that doesn't hold the file, or an older one, by initramfs-tools or dracut, whichever
    the machine has. Images of rescue kernels and of crash dumps are left alone. With dracut, C(/etc/dracut.conf.d/kubegpu-nouveau.conf)
    puts the file also into images that are made for every host.
  - A new image that can't be trusted (the tool failed, it can't be read, it is a scrap, the file isn't inside) leaves the old one in its
    place, and the module fails. What a run that was killed left is mended by the next one. Refuses to begin when C(/boot) is mounted
    read-only or hasn't twice the room of the largest image.
  - Unloads the module when nothing but a console uses it. Otherwise says so in RV(reboot_required); it never reboots.
  - On a machine without a kernel of its own, which is a container, there is only the file.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description: Whether nouveau is kept away.
    type: str
    choices: [present, absent]
    default: present
  keep_file:
    description: Whether the file stays with O(state=absent), because it was the user's before.
    type: bool
    default: false
  observed:
    description:
      - The node as M(kubegpu.share.gpu_node_info) returned it.
      - With it the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

EXAMPLES = r"""
- name: Keep nouveau away
  kubegpu.share.nouveau:
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
reboot_required:
  description: Whether nouveau is loaded and only a reboot rids the node of it.
  returned: success
  type: bool
  sample: false
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._nouveau import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._nouveau_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    params = module.params
    finish(module, lambda: work(params["state"] == "present", module.check_mode, system, params["keep_file"]))


if __name__ == "__main__":
    main()
