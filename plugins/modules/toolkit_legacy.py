#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: toolkit_legacy
short_description: Take away what NVIDIA's container toolkit replaced, and give it back
version_added: 1.0.0
description:
  - Takes away lists of NVIDIA's container repositories that aren't this collection's (C(nvidia-docker.list),
    C(libnvidia-container.list), C(nvidia-container-runtime.list), C(nvidia-container-toolkit.repo) and the like), because
    one that is left beside ours names the same repository with another key, and then apt reads no list at all. A file that also holds other
    repositories loses only these entries and keeps its comments. Keyrings that nothing else names go too.
  - Removes packages of the toolkit's forerunners, never purging them. C(nvidia-docker2) calls Docker's C(daemon.json) its own
    and rpm takes it along; the file is copied before and has its old bytes, mode and owner afterwards.
  - What goes is kept in C(/var/lib/kubegpu-share/legacy), from where O(state=given_back) puts it back.
  - Drop-ins that releases of nvidia-ctk wrote for containerd and CRI-O are only told of, see RV(drop_ins).
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description:
      - V(absent) takes away what O(sources) and O(packages) say.
      - V(given_back) puts every file back that is still as it was left, and forgets what was kept. Packages aren't installed
        again; RV(packages) has their versions.
    type: str
    choices: [absent, given_back]
    default: absent
  sources:
    description: Whether stale lists and their keyrings go.
    type: bool
    default: true
  packages:
    description: Packages to remove where they are installed.
    type: list
    elements: str
    default: []
  observed:
    description:
      - The node as M(kubegpu.share.gpu_node_info) returned it.
      - With it the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

EXAMPLES = r"""
- name: Take away the lists and the wrapper of earlier years
  kubegpu.share.toolkit_legacy:
    packages: [nvidia-docker2]
    observed: "{{ gpu_node }}"

- name: Give back what was taken away
  kubegpu.share.toolkit_legacy:
    state: given_back
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
packages:
  description: Versions of the packages that this module has removed, by name.
  returned: success
  type: dict
  sample: {"nvidia-docker2": "2.13.0-1"}
drop_ins:
  description: Drop-ins of nvidia-ctk that are on the node.
  returned: success
  type: list
  elements: str
  sample: [/etc/containerd/conf.d/99-nvidia.toml]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_legacy import ARGUMENTS, wanted
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_legacy_apply import work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    finish(module, lambda: work(wanted(module.params), module.check_mode, system))


if __name__ == "__main__":
    main()
