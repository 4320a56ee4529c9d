# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: shared_namespace
short_description: Definition of a namespace that others may own
version_added: 1.0.0
description:
  - Marks a namespace that this collection creates, so that only such a namespace is deleted again. Records the labels
    of an existing one, so that they can be restored.
positional: definition
options:
  _input:
    description: Metadata of the live namespace; empty if it doesn't exist.
    type: dict
    required: true
  definition:
    description: The desired namespace with its labels.
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print whether this collection created the namespace
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
    - C(ours), whether this collection created the namespace; C(definition), the definition with its mark;
      C(undo), a merge patch that restores the labels of a namespace of others, empty if nothing has to be restored.
  type: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import Terms


def shared_namespace(metadata: JsonObject, definition: JsonObject) -> Terms:
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import terms

    return terms(metadata, definition)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"shared_namespace": shared_namespace}
