#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: helm_chart
short_description: Download a chart whose digest is known
version_added: 1.1.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
options:
  chart: {description: "The chart's name in O(repository), an C(oci://) reference, or a path on the controller.", type: str, required: true}
  repository: {description: "URL of the repository, which a chart with a slash needs none of.", type: str, default: ""}
  version: {description: "The chart's version.", type: str, default: ""}
  sha256: {description: "SHA-256 of the archive. V(pinned) takes that of O(pins), and an empty text accepts any archive.", type: str, default: pinned}
  pins: {description: "The section C(charts) of P(kubegpu.share.pins#lookup).", type: dict, default: {}}
  variable: {description: "The role's variable for O(sha256), which errors name.", type: str, default: sha256}
  helm: {description: Path of helm., type: str, default: helm}
  folder: {description: Folder of verified archives., type: path, default: ~/.cache/kubegpu-share/charts}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._backends.chart import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(RealSystem(run_command=module.run_command), module.params))


if __name__ == "__main__":
    main()
