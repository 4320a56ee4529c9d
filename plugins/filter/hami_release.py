# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: hami_release
short_description: Compare HAMi's rendered chart with the plan
version_added: 1.0.0
description:
  - For the role hami of this collection only. Reports planned values that a version of the chart ignores, and completes
    its device configuration with defaults for which the chart has no value.
positional: planned
options:
  _input:
    description: The chart, rendered with the planned values.
    type: str
    required: true
  planned:
    description: The result of P(kubegpu.share.hami_plan#filter).
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show the values to deploy
  ansible.builtin.debug:
    msg: "{{ rendered | kubegpu.share.hami_release(planned) }}"
  vars:
    rendered: "{{ __hami_rendered.stdout }}"
    planned: "{{ __hami_plan }}"
"""

RETURN = r"""
_value:
  description: C(release_values) to deploy and C(problems), each with C(code), C(path) and C(message).
  type: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.chart import Release, ReleasePlan


def hami_release(rendered: str, planned: ReleasePlan) -> Release:
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.chart import release

    return release(rendered, planned)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"hami_release": hami_release}
