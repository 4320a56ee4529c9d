#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: airgap_packages
short_description: "Make partial mirrors of the package repositories that GPU nodes need"
version_added: 1.1.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
options:
  folder: {description: "Gets C(packages) and the lists and caches in C(work).", type: path, default: /var/cache/kubegpu-airgap}
  sets: {description: What machines install together; the action plugin makes them from the list., type: list, elements: dict, required: true}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors.mirror import ensure
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors.wanted import ARGUMENTS


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
