#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: toolkit_files
short_description: Keep the container toolkit's files right for the node's runtime, and take away what its packages leave
version_added: 1.0.0
description:
  - The toolkit's service C(nvidia-cdi-refresh) writes a CDI specification of version 0.7 where a device node needs a group of its
    own. containerd before 1.7.16, Docker before 26.1 and CRI-O before 1.30 refuse that version. With O(old_cdi) the service's environment
    gets the flag C(no-additional-gids-for-device-nodes), beside whatever else stands there, and the specification is made anew.
  - With O(accept_unprivileged=false) the toolkit's configuration gets C(accept-nvidia-visible-devices-envvar-when-unprivileged = false). What stood
    there is kept in a comment and comes back. nvidia-ctk has to read the file with it, otherwise the old one is put back.
  - The toolkit's packages write C(/etc/nvidia-container-runtime/config.toml) and C(/run/cdi/nvidia.yaml) without owning them. With
    O(state=absent) they go.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description: V(absent) removes what the packages leave.
    type: str
    choices: [present, absent]
    default: present
  old_cdi:
    description: Whether the node's runtime needs a specification older than version 0.7. A flag that the user set is never taken out.
    type: bool
    default: false
  accept_unprivileged:
    description:
      - Whether a container without privileges gets the cards that C(NVIDIA_VISIBLE_DEVICES) in its environment asks for, which a pod can set
        to what it likes. V(false) needs cards that come to containers by CDI.
    type: bool
    default: true
  keep:
    description: Files that O(state=absent) leaves alone, because they were there before.
    type: list
    elements: path
    default: []
  observed:
    description:
      - The node as M(kubegpu.share.gpu_node_info) returned it.
      - With it the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

EXAMPLES = r"""
- name: Have CDI specifications written that an older containerd reads
  kubegpu.share.toolkit_files:
    old_cdi: "{{ gpu_node.runtimes.containerd.version is version('1.7.16', '<') }}"
    observed: "{{ gpu_node }}"
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish, run
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_files import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_files_apply import ToolkitFiles


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    finish(module, lambda: run(ToolkitFiles(module.params, system), module.check_mode))


if __name__ == "__main__":
    main()
