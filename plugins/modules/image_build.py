#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_build
short_description: Build the image of gpushare's servers
version_added: 1.0.0
description:
  - Builds the image from the collection's own C(images/gpushare) for each platform, without running anything of another platform, so that no
    emulation is needed. Python packages are pinned with their hashes.
  - Each platform's image becomes an archive for C(gpushare_image_archive), with its bill of materials (CycloneDX) beside. With O(push) the same
    archives go to a registry, as one reference.
  - The same sources, base and O(epoch) give the same bytes with the same engine, as far as the base is named by its digest.
  - What was built of what is noted beside the archives. With nothing to do nothing is built and nothing pushed.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  reference:
    description: The image's name with its tag; with O(push) that of a registry. Who has to log in there does so with the engine, beforehand.
    type: str
    required: true
  engine:
    description:
      - What builds. V(auto) is the first one that the machine has, in the order of the choices.
      - V(docker) builds for another platform than its own only with BuildKit.
    type: str
    choices: [auto, podman, buildah, docker]
    default: auto
  platforms:
    description: What it is built for.
    type: list
    elements: str
    choices: [linux/amd64, linux/arm64]
    default: [linux/amd64, linux/arm64]
  base:
    description: The image that it stands on, Debian's or made of it, with Python 3.11 or newer and pip. A digest pins it.
    type: str
    default: docker.io/library/python:3.13-slim-bookworm
  folder:
    description: Where archives, bills of materials and the note of what they were built of are, on the machine that builds.
    type: path
    required: true
  push:
    description: Whether the image goes to the registry that O(reference) names.
    type: bool
    default: false
  tls_verify:
    description: Whether the registry has to have a certificate that the machine trusts.
    type: bool
    default: true
  pip_args:
    description: More arguments for pip, such as the index of a place without PyPI.
    type: str
    default: ""
  epoch:
    description: The one time that the image tells, in seconds since 1970.
    type: int
    default: 1767225600
  timeout:
    description: Seconds that each build, and each push, may take.
    type: int
    default: 3600
  sources:
    description: SHA-256 of the sources. Not to be set.
    type: str
  context:
    description: Where the action plugin has put them. Not to be set.
    type: path
"""

EXAMPLES = r"""
- name: Build the image for a cluster without a registry
  kubegpu.share.image_build:
    reference: localhost/kubegpu/gpushare:1.0.0
    platforms: [linux/amd64]
    folder: /srv/images

- name: Build it for all nodes and push it
  kubegpu.share.image_build:
    reference: registry.example.org/kubegpu/gpushare:1.0.0
    folder: /srv/images
    push: true
"""

RETURN = r"""
archives:
  description: By platform, the archive.
  returned: success
  type: dict
  sample: {linux/amd64: /srv/images/gpushare-1.0.0-amd64.tar}
bills:
  description: By platform, the bill of materials.
  returned: success
  type: dict
  sample: {linux/amd64: /srv/images/gpushare-1.0.0-amd64.cdx.json}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._image_build import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
