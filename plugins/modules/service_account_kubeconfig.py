#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_account_kubeconfig
short_description: Write a kubeconfig with an expiring token of a service account
version_added: 1.0.0
description:
  - Requests a token of a service account and writes it to a kubeconfig with the API server and the certificate authority of the kubeconfig that
    this module uses. Runs on the machine with that kubeconfig, usually localhost.
  - The file has mode 0600. A file that this module hasn't written is never overwritten and never removed.
  - A file is kept while its token is for the same account and API server and valid for at least half of O(hours).
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  path:
    description: Path of the kubeconfig. Its content is JSON, which every YAML parser accepts.
    type: path
    required: true
  name:
    description: Name of the service account.
    type: str
    required: true
  namespace:
    description: Namespace of the service account.
    type: str
    required: true
  hours:
    description: Requested lifetime of the token in hours. The API server may grant less or more.
    type: int
    default: 24
  state:
    description: Whether the file exists. V(absent) sends no request; the token stays valid until it expires or its account is deleted.
    type: str
    choices: [present, absent]
    default: present
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Write a kubeconfig that is valid for a day
  kubegpu.share.service_account_kubeconfig:
    path: ~/readonly.kubeconfig
    name: kubegpu-readonly
    namespace: kube-system
"""

RETURN = r"""
expires:
  description: When the token in the file expires; empty without a file.
  type: str
  returned: success
  sample: "2026-11-22T12:00:00Z"
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import hide_credentials
from ansible_collections.kubegpu.share.plugins.module_utils._kube.service_account import ARGUMENTS, ApiAccounts, ensure


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    # Ansible returns the arguments also where no connection is made.
    hide_credentials(module)
    module.params["path"] = os.path.abspath(module.params["path"])
    run_module(
        module,
        lambda: ensure(lambda: ApiAccounts(RealKube.of_module(module)), RealSystem(), module.params, module.check_mode),
    )


if __name__ == "__main__":
    main()
