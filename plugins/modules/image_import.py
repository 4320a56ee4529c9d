#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_import
short_description: Bring an image archive into a node's container runtime without a registry
version_added: 1.0.0
description:
  - Imports a Docker or OCI archive that lies on the controller into containerd's image store for Kubernetes, unless the store
    has that image from that very archive.
  - Which archive an image came from is written on the image as the label C(kubegpu.share/archive). The image is also marked
    as pinned, so that kubelet's garbage collection spares what couldn't be pulled again.
  - The archive is only copied to a node that needs it, into Ansible's temporary folder, and removed afterwards.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  reference:
    description: The image's name with its tag, as pods ask for it.
    type: str
    required: true
  archive:
    description: The archive on the controller.
    type: path
    required: true
  observed:
    description: The node as M(kubegpu.share.gpu_node_info) returned it, best with this image among its O(kubegpu.share.gpu_node_info#module:images).
    type: dict
  sha256:
    description: SHA-256 of the archive. Computed where it isn't given.
    type: str
  remote_path:
    description: Where the action plugin has put the archive on the node. Not to be set.
    type: path
"""

EXAMPLES = r"""
- name: Bring the image to the node
  kubegpu.share.image_import:
    reference: localhost/kubegpu/gpushare:1.0.0
    archive: /srv/images/gpushare.tar
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
# Nothing beside what every module returns.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._image_import import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
