# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: printable
short_description: A text of others as one printable line
version_added: 1.1.0
description:
  - Returns a text without line breaks, control characters, terminal sequences and characters that reorder text, for
    messages. Ansible prints these as they are.
  - Modules of this collection return such texts already. This is for results of other modules, such as a pod's log.
options:
  _input:
    description: The text; of more than 2000 characters, the beginning.
    type: raw
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print what a container printed
  ansible.builtin.debug:
    msg: "{{ container.log | kubegpu.share.printable }}"
"""

RETURN = r"""
_value:
  description: The line; empty for no value.
  type: str
"""

import typing as t


def printable(value: t.Any) -> str:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line

    return line(value)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"printable": printable}
