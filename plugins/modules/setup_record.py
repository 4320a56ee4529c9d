#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: setup_record
short_description: Read or write who owns what this collection has set up in a cluster
version_added: 1.1.0
description:
  - The record is the ConfigMap C(kubegpu-share) in C(kube-system). Playbooks write it before their first change and remove it with the uninstall.
  - A cluster without a record that is set up belongs to the playbooks.
author: The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  state:
    description:
      - V(read) returns the record, V(present) writes it, V(verified) records that the checks have passed, and V(absent) removes it.
      - The record of another owner is refused, unless O(take_over) names that one.
    type: str
    choices: [read, present, verified, absent]
    default: read
  owner: {description: "Who this run is for: V(playbook), or a resource as V(GPUShare/NAME).", type: str, default: playbook}
  take_over: {description: The owner whose set-up is taken over on purpose., type: str, default: ""}
  unverified: {description: "With O(state=present), record that the checks have to pass.", type: bool, default: false}
  known:
    description: RV(record) as the run has read it. If it was written since then, nothing is changed, and the module fails.
    type: dict
"""

EXAMPLES = r"""
- name: Read whose the set-up is
  kubegpu.share.setup_record:
    owner: GPUShare/main
  register: found
"""

RETURN = r"""
record:
  description: With O(state=read), the record's C(owner), C(version), C(unverified) and C(exists).
  returned: when O(state=read)
  type: dict
  sample: {owner: GPUShare/main, version: "812", unverified: false, exists: true}
own:
  description: Whether this run may change or remove what is set up.
  returned: when O(state=read)
  type: bool
  sample: true
present:
  description: Who owns what is set up.
  returned: when O(state=read)
  type: str
  sample: GPUShare/main
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.setup_record import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
