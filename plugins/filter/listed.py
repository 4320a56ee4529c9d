# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: listed
short_description: A list that may be text
version_added: 1.0.0
description:
  - "For the roles of this collection only."
  - The command line and a survey of AWX have a list as text, with commas between its entries.
  - Blanks around an entry and empty entries are dropped.
options:
  _input:
    description: A list, or text.
    type: raw
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print a list of two
  ansible.builtin.debug:
    msg: "{{ 'gpu1, gpu2' | kubegpu.share.listed }}"
"""

RETURN = r"""
_value:
  description: The entries.
  type: list
  elements: str
"""

import typing as t


def listed(given: t.Any) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.listed(given)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"listed": listed}
