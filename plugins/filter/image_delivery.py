# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: image_delivery
short_description: How nodes get the servers' image
version_added: 1.0.0
description:
  - Returns V(import) where C(gpushare_image_delivery) is V(auto) and an archive is named, V(registry) where the image's
    name is that of a registry, and V(build) otherwise.
  - Returns any other value unchanged.
positional: reference, archive
options:
  _input:
    description: The variable C(gpushare_image_delivery).
    type: str
    required: true
  reference:
    description: The image's name.
    type: str
    required: true
  archive:
    description: Path of the image's archive; empty if none is named.
    type: str
    default: ""
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print registry
  ansible.builtin.debug:
    msg: "{{ 'auto' | kubegpu.share.image_delivery('registry.example.org/kubegpu/gpushare:1.1.0') }}"
"""

RETURN = r"""
_value:
  description: V(build), V(import) or V(registry).
  type: str
"""


def image_delivery(delivery: str, reference: str, archive: str = "") -> str:
    from ansible_collections.kubegpu.share.plugins.module_utils._images.build import resolve

    return resolve(delivery, reference, archive)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"image_delivery": image_delivery}
