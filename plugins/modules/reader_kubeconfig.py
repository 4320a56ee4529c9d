#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: reader_kubeconfig
short_description: A kubeconfig with a token of a service account that expires
version_added: 1.0.0
description:
  - Asks the API server for a token of a service account, and writes it into a kubeconfig that names the same API server and the same certificate
    authority as the one that this module is given. Runs where that kubeconfig is, as on localhost.
  - The file has mode 0600. One that this module hasn't written is never overwritten and never removed.
  - A file whose token still holds for half of O(hours), for the same account and API server, stays as it is.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubernetes.core.k8s_auth_options
options:
  path:
    description: Where the kubeconfig is written to. It is JSON, which every reader of YAML reads.
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
    description: For how many hours the token is asked for. The API server may give it for less or for more.
    type: int
    default: 24
  state:
    description: Whether the file is there. V(absent) asks nothing of the API server; the token holds until it expires or its account goes.
    type: str
    choices: [present, absent]
    default: present
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: A kubeconfig for a day
  kubegpu.share.reader_kubeconfig:
    path: ~/reader.kubeconfig
    name: kubegpu-reader
    namespace: kube-system
"""

RETURN = r"""
expires:
  description: When the token in the file ends to hold; empty where there is none.
  type: str
  returned: success
  sample: "2026-11-22T12:00:00Z"
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, hide_credentials
from ansible_collections.kubegpu.share.plugins.module_utils._reader_kubeconfig import ARGUMENTS, ApiAccounts, bring
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    # The cluster isn't always asked, and the arguments are returned all the same.
    hide_credentials(module)
    module.params["path"] = os.path.abspath(module.params["path"])
    finish(
        module,
        lambda: bring(lambda: ApiAccounts(RealKube.of_module(module)), RealSystem(), module.params, module.check_mode),
    )


if __name__ == "__main__":
    main()
