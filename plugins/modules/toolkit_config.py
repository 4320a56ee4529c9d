#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: toolkit_config
short_description: "Configure NVIDIA's container toolkit and remove the tools that it replaces"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
extends_documentation_fragment: kubegpu.share.attributes.observed
options:
  state:
    description: Whether the toolkit is configured. V(absent) restores what was removed.
    type: str
    choices: [present, absent]
    default: present
  files: {description: "Whether to manage the toolkit's files.", type: bool, default: true}
  old_cdi: {description: "Whether the node's runtime needs a specification older than version 0.7.", type: bool, default: false}
  accept_unprivileged: {description: Whether an unprivileged container gets the GPUs that its environment requests., type: bool, default: true}
  driver_root: {description: "The root of the driver's files, for the driver container of NVIDIA's GPU Operator.", type: path, default: /}
  keep: {description: Files that existed before the toolkit and that V(absent) keeps., type: list, elements: path, default: []}
  remove_sources: {description: Whether to remove stale package sources and their keyrings., type: bool, default: false}
  remove_packages: {description: Replaced packages to remove where they are installed., type: list, elements: str, default: []}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.module import ARGUMENTS, reconcile


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    run_module(module, lambda: reconcile(module.params, module.check_mode, system))


if __name__ == "__main__":
    main()
