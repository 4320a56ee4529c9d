# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: containerd_cdi
short_description: Whether containerd injects devices by CDI
version_added: 1.1.0
description:
  - For the roles of this collection only. Its setting is C(enable_cdi); containerd 2.4 and newer have none and always
    do.
options:
  _input:
    description: The facts of containerd, C(gpu_node.runtimes.containerd) of M(kubegpu.share.gpu_node_info).
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Say whether CDI is on
  ansible.builtin.debug:
    msg: "{{ gpu_node.runtimes.containerd | kubegpu.share.containerd_cdi }}"
"""

RETURN = r"""
_value:
  description: Whether it does.
  type: bool
"""

import typing as t


def containerd_cdi(state: t.Mapping[str, t.Any]) -> bool:
    from ansible_collections.kubegpu.share.plugins.module_utils._runtime.common import injects_cdi

    return injects_cdi(state)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"containerd_cdi": containerd_cdi}
