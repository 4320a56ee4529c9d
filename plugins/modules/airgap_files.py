#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: airgap_files
short_description: "Bring an archive's packages, charts and files into a folder that a web server gives to machines"
version_added: 1.1.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
options:
  path: {description: The folder., type: str, required: true}
  wanted: {description: SHA-256 by path below it., type: dict, default: {}}
  state: {description: What to do with it., type: str, choices: [observed, taken, present, absent], default: observed}
  source: {description: Folder of files that have come., type: path}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.file_tree import ARGUMENTS, ensure


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(module.params, module.check_mode))


if __name__ == "__main__":
    main()
