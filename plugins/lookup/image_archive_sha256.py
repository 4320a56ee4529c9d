# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: image_archive_sha256
short_description: SHA-256 of image archives on the controller
version_added: 1.0.0
description:
  - Returns the SHA-256 of each archive, in hexadecimal.
  - The result is cached in the user's cache folder until the file changes.
options:
  _terms:
    description: Paths of the archives.
    type: list
    elements: path
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the digest of an archive, which changes with the image
  ansible.builtin.debug:
    msg: "{{ lookup('kubegpu.share.image_archive_sha256', 'build/gpushare.tar') }}"
"""

RETURN = r"""
_raw:
  description: One digest per archive.
  type: list
  elements: str
"""

import os
import typing as t

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._images.archive import sha256


class LookupModule(LookupBase):  # type: ignore[misc]  # ansible-core carries no types
    def run(self, terms: list[str], variables: t.Any = None, **kwargs: t.Any) -> list[str]:
        self.set_options(var_options=variables, direct=kwargs)
        try:
            return [sha256(os.path.expanduser(term)) for term in terms]
        except BadInput as error:
            raise AnsibleLookupError(str(error)) from error
