# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: image_platforms
short_description: Platforms of the machines that lack an image
version_added: 1.0.0
description:
  - Returns the platforms for which an image has to be built, because a machine of that platform doesn't have it.
positional: reference, identity
options:
  _input:
    description: Facts of the machines from M(kubegpu.share.gpu_node_info); an empty dictionary where they are unknown.
    type: list
    elements: dict
    required: true
  reference:
    description: The image's name.
    type: str
    required: true
  identity:
    description: What identifies its content, as the lookup P(kubegpu.share.image_sha256#lookup) returns it.
    type: str
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the platforms of the machines that lack the image, such as linux/amd64
  vars:
    image: localhost/kubegpu/gpushare:1.1.0
  ansible.builtin.debug:
    msg: "{{ [gpu_node] | kubegpu.share.image_platforms(image, lookup('kubegpu.share.image_sha256', image)) }}"
"""

RETURN = r"""
_value:
  description: The platforms.
  type: list
  elements: str
"""

import typing as t


def image_platforms(nodes: t.Sequence[t.Mapping[str, t.Any]], reference: str, identity: str) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._images.build import missing_platforms

    return missing_platforms(nodes, reference, identity)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"image_platforms": image_platforms}
