# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: shared_namespace
short_description: A namespace that may be somebody else's
version_added: 1.0.0
description:
  - Marks a namespace that wasn't there before, so that only such a one is taken away again, and remembers the labels of
    another one, so that it gets them back.
positional: definition
options:
  _input:
    description: The live namespace's metadata, empty where there is none.
    type: dict
    required: true
  definition:
    description: The namespace with its labels, as it should be.
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show whether it is ours
  vars:
    wanted:
      apiVersion: v1
      kind: Namespace
      metadata:
        name: gpushare-system
        labels:
          pod-security.kubernetes.io/enforce: privileged
  ansible.builtin.debug:
    msg: "{{ ({} | kubegpu.share.shared_namespace(wanted)).ours }}"
"""

RETURN = r"""
_value:
  description:
    - C(ours), whether it is there because of us; C(wish), the definition with its mark; C(undo), a merge patch that
      gives somebody else's namespace its labels back, empty where there is nothing to give back.
  type: dict
"""

from ansible_collections.kubegpu.share.plugins.plugin_utils._shared_namespace import terms


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"shared_namespace": terms}
