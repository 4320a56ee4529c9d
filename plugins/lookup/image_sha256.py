# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: image_sha256
short_description: SHA-256 that identifies the servers' image
version_added: 1.0.0
description:
  - Returns what identifies the content of the image on the nodes, in hexadecimal, for each way to deliver it.
  - For V(build) this is the digest of the collection's sources of the image together with the image's name, base and
    timestamp. For V(import) it is that of the archive, which is cached in the user's cache folder until the file
    changes. For V(registry) it is empty.
options:
  _terms:
    description: Name of the image.
    type: list
    elements: str
    required: true
  delivery:
    description: How nodes get the image.
    type: str
    choices: [build, import, registry]
    default: build
  archive:
    description: Path of the archive on the controller, for V(import). Without one the result is empty.
    type: str
    default: ""
  base:
    description: The variable C(image_build_base), for V(build). Empty for its default.
    type: str
    default: ""
  epoch:
    description: The variable C(image_build_epoch), for V(build). Empty for its default.
    type: str
    default: ""
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print what identifies the image that is built from this collection
  ansible.builtin.debug:
    msg: "{{ lookup('kubegpu.share.image_sha256', 'localhost/kubegpu/gpushare:1.1.0') }}"

- name: Print what identifies an archive
  vars:
    image: localhost/kubegpu/gpushare:1.1.0
  ansible.builtin.debug:
    msg: "{{ lookup('kubegpu.share.image_sha256', image, delivery='import', archive='/srv/images/gpushare.tar') }}"
"""

RETURN = r"""
_raw:
  description: One digest per image, or an empty text.
  type: list
  elements: str
"""

import os
import typing as t

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._images.build import ARGUMENTS, identity_of
from ansible_collections.kubegpu.share.plugins.module_utils._images.delivery import BUILD, IMPORT
from ansible_collections.kubegpu.share.plugins.module_utils._images.image_archive import sha256
from ansible_collections.kubegpu.share.plugins.module_utils._images.sources import digest
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins.table import image as pinned_image


class LookupModule(LookupBase):  # type: ignore[misc]  # ansible-core carries no types
    def run(self, terms: list[str], variables: t.Any = None, **kwargs: t.Any) -> list[str]:
        self.set_options(var_options=variables, direct=kwargs)
        try:
            return [self._identity(term) for term in terms]
        except ShareError as error:
            raise AnsibleLookupError(str(error)) from error

    def _identity(self, reference: str) -> str:
        delivery, archive = self.get_option("delivery"), self.get_option("archive")
        if delivery == IMPORT and archive:
            return sha256(os.path.expanduser(archive))
        if delivery == BUILD:
            base = self.get_option("base") or pinned_image("base")
            epoch = int(self.get_option("epoch") or ARGUMENTS["epoch"]["default"])
            return identity_of({"sources": digest(), "base": base, "epoch": epoch, "reference": reference})
        return ""
