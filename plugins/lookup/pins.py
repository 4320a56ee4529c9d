# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: pins
short_description: Digests of what the collection downloads, and what package repositories hold
version_added: 1.1.0
description:
  - Returns sections of the collection's C(meta/pins.yml), which has the digests of keys, charts and images that the
    roles download by default, and of its C(meta/repositories.yml), which says what the package repositories of the
    driver (V(nvidia), V(distribution)) and of the container toolkit (V(toolkit)) hold.
options:
  _terms:
    description: The sections.
    type: list
    elements: str
    choices: [keys, charts, images, nvidia, distribution, toolkit]
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the image that the servers' image is built from
  ansible.builtin.debug:
    msg: "{{ base.url }}@{{ base.digest }}"
  vars:
    base: "{{ lookup('kubegpu.share.pins', 'images').base }}"
"""

RETURN = r"""
_raw:
  description: >-
    Each section, by name what is pinned: C(url), C(known) (when and from where the digest was learnt), and C(sha256)
    and C(fingerprint) of a key, C(version) and C(sha256) of a chart, or C(digest) of an image. Of repositories, by
    folder and architecture, C(url), C(arch), C(key), C(source), C(date), and of the driver's C(first) and C(last)
    branch, C(modules) and C(kernels).
  type: list
  elements: dict
"""

import typing as t

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins.table import section


class LookupModule(LookupBase):  # type: ignore[misc]  # ansible-core carries no types
    def run(self, terms: list[str], variables: t.Any = None, **kwargs: t.Any) -> list[JsonObject]:
        self.set_options(var_options=variables, direct=kwargs)
        try:
            return [section(term) for term in terms]
        except ShareError as error:
            raise AnsibleLookupError(str(error)) from error
