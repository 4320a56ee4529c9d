#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nouveau
short_description: Prevent the kernel's own drivers from using a node's GPUs
version_added: 1.0.0
description:
  - Writes the two lines of NVIDIA's guide into C(/etc/modprobe.d/blacklist-nouveau.conf), beside them the blacklist of nova (nova_core and
    nova_drm), nouveau's successor in the kernel, and keeps the file's other lines.
  - Rebuilds the initramfs of every installed kernel that lacks the file, or contains an older one, with initramfs-tools or dracut, whichever
    the machine has. Images of rescue kernels and of crash dumps stay. With dracut, C(/etc/dracut.conf.d/kubegpu-nouveau.conf) adds the file
    to images for every host too.
  - Validates a new image. Where the tool failed, or the image can't be read, is much too small or lacks the file, the old image stays in its
    place and the module fails. The next run completes one that was killed. Refuses to begin when C(/boot) is read-only or has less space than
    twice the largest image.
  - Unloads nouveau when only a console uses it, and nova when nothing does. Otherwise RV(reboot_required) is true; it never reboots.
  - On a container, which has no kernel of its own, it only writes the file.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.observed
options:
  state:
    description: Whether nouveau and nova are blacklisted.
    type: str
    choices: [present, absent]
    default: present
  keep_file:
    description: Whether O(state=absent) keeps the file, because it existed before.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Blacklist nouveau and nova
  kubegpu.share.nouveau:
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
reboot_required:
  description: Whether nouveau or nova is loaded and only a reboot unloads it.
  returned: success
  type: bool
  sample: false
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nouveau_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nouveau_plan import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    params = module.params
    run_module(module, lambda: work(params["state"] == "present", module.check_mode, system, params["keep_file"]))


if __name__ == "__main__":
    main()
