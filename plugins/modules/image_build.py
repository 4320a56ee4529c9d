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
  - Writes an archive per platform for C(gpushare_image_archive), with its bill of materials (CycloneDX). With O(push) the same archives are
    pushed to a registry, as one reference.
  - The same sources, base and O(epoch) give the same bytes with the same engine, if the base is a digest.
  - A record beside the archives has the digests of their inputs. If nothing differs, nothing is built and nothing pushed.
  - In check mode it fails where something differs and nothing on the machine can build it.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  reference:
    description: The image's name with its tag; with O(push) that of a registry. Log in to the registry with the engine beforehand.
    type: str
    required: true
  engine:
    description:
      - The build tool. V(auto) is the first one that works on the machine, in the order of the choices.
      - V(docker) needs its plugin buildx to build for another platform than its own.
    type: str
    choices: [auto, podman, buildah, docker]
    default: auto
  platforms:
    description: The platforms of the image.
    type: list
    elements: str
    choices: [linux/amd64, linux/arm64]
    default: [linux/amd64, linux/arm64]
  base:
    description:
      - The base image, Debian or derived from it, with Python 3.11 or newer and pip, as C(name:tag@sha256:digest), or as C(name:tag) where
        the machine has it under that name only.
    type: str
    required: true
  folder:
    description: Folder for the archives, their bills of materials and the record, on the machine that builds, where C(~) is its user's home.
    type: path
    required: true
  push:
    description: Whether the image is pushed to the registry in O(reference).
    type: bool
    default: false
  tls_verify:
    description: Whether the registry's certificate is verified.
    type: bool
    default: true
  pip_args:
    description: Additional arguments for pip, such as another package index.
    type: str
    default: ""
  epoch:
    description: The timestamp of everything in the image, in seconds since 1970.
    type: int
    default: 1767225600
  timeout:
    description: Time limit of each build and each push, in seconds.
    type: int
    default: 3600
  sources:
    description: SHA-256 of the sources. Set by the action plugin.
    type: str
  context:
    description: Archive of the sources on the machine. Set by the action plugin.
    type: path
"""

EXAMPLES = r"""
- name: Build the image for a cluster without a registry
  vars:
    base: "{{ lookup('kubegpu.share.pins', 'images').base }}"
  kubegpu.share.image_build:
    reference: localhost/kubegpu/gpushare:1.1.0
    base: "{{ base.url }}@{{ base.digest }}"
    platforms: [linux/amd64]
    folder: /srv/images

- name: Build the image for all platforms and push it
  vars:
    base: "{{ lookup('kubegpu.share.pins', 'images').base }}"
  kubegpu.share.image_build:
    reference: registry.example.org/kubegpu/gpushare:1.1.0
    base: "{{ base.url }}@{{ base.digest }}"
    folder: /srv/images
    push: true
"""

RETURN = r"""
archives:
  description: The archive of each platform.
  returned: success
  type: dict
  sample: {linux/amd64: /srv/images/gpushare-1.1.0-amd64.tar}
bills:
  description: The bill of materials of each platform.
  returned: success
  type: dict
  sample: {linux/amd64: /srv/images/gpushare-1.1.0-amd64.cdx.json}
digest:
  description: The digest under which the registry has the image. Empty without O(push), and where the engine doesn't say.
  returned: success
  type: str
  sample: sha256:0f5c2b3b0d8a4d9b6c7f0d1d6f5f3b0a9a6b1c2d3e4f5061728394a5b6c7d8e9
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._images.build import ARGUMENTS, ensure


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
