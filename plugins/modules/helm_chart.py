#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: helm_chart
short_description: Download a chart whose digest is known
version_added: 1.1.0
description:
  - For the roles of this collection only. Downloads a chart's archive by C(helm pull), compares its SHA-256, and returns the path that helm is
    given, so that what was verified is what is rendered and deployed.
  - Keeps the archive in the cache folder of the user, and downloads it only once. Changes nothing else, in check mode neither.
  - Has to run on the controller.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes.info
options:
  chart:
    description: The chart's name in O(repository), an C(oci://) reference, or a path on the controller.
    type: str
    required: true
  repository:
    description: URL of the repository. Ignored where O(chart) has a slash.
    type: str
    default: ""
  version:
    description: The chart's version.
    type: str
    default: ""
  sha256:
    description:
      - SHA-256 of the archive; any other archive is refused.
      - V(pinned) is the digest in O(pins). A chart or version that isn't there is refused; a path needs none.
      - Empty accepts any archive, and helm downloads it itself.
    type: str
    default: pinned
  pins:
    description: The section C(charts) of P(kubegpu.share.pins#lookup).
    type: dict
    default: {}
  variable:
    description: The role's variable for O(sha256), which errors name.
    type: str
    default: sha256
  helm:
    description: Path of helm.
    type: str
    default: helm
  folder:
    description: Folder of verified archives.
    type: path
    default: ~/.cache/kubegpu-share/charts
"""

EXAMPLES = r"""
- name: Download HAMi's chart
  kubegpu.share.helm_chart:
    chart: hami
    repository: https://project-hami.github.io/HAMi/
    version: 2.10.0
    pins: "{{ lookup('kubegpu.share.pins', 'charts') }}"
  register: chart
"""

RETURN = r"""
path:
  description: The chart as helm has to be given it.
  returned: success
  type: str
repository:
  description: The repository that helm has to be given with it; empty for none.
  returned: success
  type: str
sha256:
  description: The verified digest; empty where none was to be verified.
  returned: success
  type: str
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
