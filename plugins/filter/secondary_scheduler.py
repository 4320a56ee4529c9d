# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: secondary_scheduler
short_description: What a scheduler beside OpenShift's own has to be like
version_added: 1.0.0
description:
  - Tells which image and which configuration fit a release of OpenShift from 4.10 on.
positional: wish
options:
  _input:
    description: The cluster's release.
    type: str
    required: true
  wish:
    description:
      - C(state), C(name), C(image), C(version), C(timeout), C(preemption) and, as C(extender), name and namespace of
        the extender's Service with a dot between them.
      - As C(tls), what P(kubegpu.share.extender_certificates#filter) gives as C(client).
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show which image it takes
  vars:
    wish:
      state: present
      name: gpushare-scheduler
      image: ""
      version: ""
      extender: gpushare-extender.gpushare-system
      timeout: 30
      preemption: true
      tls: "{{ certificates.client }}"
  ansible.builtin.debug:
    msg: "{{ ('4.20.3' | kubegpu.share.secondary_scheduler(wish)).image }}"
"""

RETURN = r"""
_value:
  description:
    - C(problem), one sentence, empty where there is none. In that case also C(image), C(minor), C(config) and
      C(policy_api), the version of admission policies that the cluster serves (empty for none).
  type: dict
"""

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._secondary_config import plan


def secondary_scheduler(version: str, wish: dict[str, t.Any]) -> dict[str, t.Any]:
    try:
        return {"problem": "", **plan(version, wish)}
    except BadInput as error:
        return {"problem": str(error)}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"secondary_scheduler": secondary_scheduler}
