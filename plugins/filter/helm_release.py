# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: helm_release
short_description: A release as helm has recorded it
version_added: 1.0.0
description:
  - For the roles of this collection only. Decodes the newest revision of a release, so that neither helm nor the chart
    is needed to see whether something differs.
options:
  _input:
    description: The Secrets of one release, with their data.
    type: list
    elements: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show which version of the chart is deployed
  ansible.builtin.debug:
    msg: "{{ (found.resources | kubegpu.share.helm_release).chart_version }}"
"""

RETURN = r"""
_value:
  description: >-
    C(status), C(revision), C(chart), C(chart_version), C(values), C(chart_values) and C(manifest); empty without a
    release.
  type: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject


def helm_release(secrets: list[JsonObject]) -> JsonObject:
    from ansible_collections.kubegpu.share.plugins.module_utils._kube.helm import release

    return dict(release(secrets) or {})


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"helm_release": helm_release}
