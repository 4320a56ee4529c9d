#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: hami_files
short_description: Remove the files that HAMi leaves on a node
version_added: 1.0.0
description:
  - Removes the folder of HAMi's library with the containers' caches, the locks of its library and of its device plugin in C(/tmp), and, unless a
    device plugin runs, the CDI specification and the socket that HAMi's device plugin and NVIDIA's have in common.
  - Refuses while a container has a part of the library's folder mounted. Such a container couldn't be restarted without it.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  library_folder:
    description: The folder in which HAMi installed its folder C(vgpu), the chart's C(global.gpuHookPath).
    type: path
    default: /usr/local
"""

EXAMPLES = r"""
- name: Remove HAMi's files
  kubegpu.share.hami_files:
"""

RETURN = r"""
code:
  description: Why it refuses, V(preloaded), with the process, command and pod of each container in C(containers).
  type: str
  returned: when it refuses
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._hami.files import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    run_module(module, lambda: ensure(system, module.params, module.check_mode))


if __name__ == "__main__":
    main()
