#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_import
short_description: Import an image archive on a node without a registry
version_added: 1.0.0
description:
  - Imports a Docker or OCI archive of the controller into containerd's image store for Kubernetes, unless the store has the image from the same
    archive.
  - Labels the image with O(sha256) (C(kubegpu.share/archive)), and pins it, so that kubelet's garbage collection doesn't remove an image
    that can't be pulled again.
  - Copies the archive only to a node that needs it, into Ansible's temporary folder, and removes it afterwards.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  reference:
    description: The image's name with its tag, as in pod specifications.
    type: str
    required: true
  archive:
    description: The archive on the controller.
    type: path
    required: true
  observed:
    description: Facts of the node from M(kubegpu.share.gpu_node_info), preferably with this image among its O(kubegpu.share.gpu_node_info#module:images).
    type: dict
  sha256:
    description:
      - What identifies the image's content, as the label on the node. By default the SHA-256 of the archive.
      - If set, the archive is read only where the image has to be imported.
    type: str
  archive_sha256:
    description: The SHA-256 that the archive must have, such as that of a release's C(SHA256SUMS). Another archive is refused on the controller.
    type: str
  remote_path:
    description: Path of the archive on the node. Set by the action plugin.
    type: path
"""

EXAMPLES = r"""
- name: Import the image on the node
  kubegpu.share.image_import:
    reference: localhost/kubegpu/gpushare:1.1.0
    archive: /srv/images/gpushare.tar
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
# Nothing beside what every module returns.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._images.import_archive import ARGUMENTS, ensure


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
