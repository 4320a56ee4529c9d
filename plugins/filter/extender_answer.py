# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: extender_answer
short_description: Why the answer to a filter request isn't that of a working extender
version_added: 1.1.0
description:
  - Used by role scheduler on OpenShift, where the extender is asked by a pod.
positional: url
options:
  _input:
    description:
      - The answer as JSON, with its C(status), C(failure) and C(text). Anything else is why none was received.
    type: str
    required: true
  url:
    description: The URL that was asked.
    type: str
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Refuse an extender that doesn't answer
  ansible.builtin.fail:
    msg: "{{ found.problem }}"
  vars:
    url: https://gpushare-extender.gpushare-system.svc:12345/gpushare-scheduler/filter
    found: "{{ answer | kubegpu.share.extender_answer(url) }}"
  when: found.problem | length > 0
"""

RETURN = r"""
_value:
  description:
    - C(problem), the reason with its way out, empty for the answer of a working extender; C(reason), its code.
    - C(request), what is to be posted, and C(seconds), how long.
  type: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject


def extender_answer(text: str, url: str) -> JsonObject:
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import apply

    code, why = apply.problem(apply.parsed(text))
    asked = {"request": apply.REQUEST, "seconds": int(apply.PROOF_SECONDS), "reason": code}
    error = apply.unanswered("The secondary scheduler", url, code, why) if code else ""
    return {**asked, "problem": str(error)}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"extender_answer": extender_answer}
