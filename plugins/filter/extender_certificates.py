# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: extender_certificates
short_description: Certificates for a kube-scheduler and an extender in another pod
version_added: 1.0.0
description:
  - Returns the certificates in two Secrets, C(gpushare-extender-tls) of the extender and C(gpushare-extender-client) of
    kube-scheduler, if they match each other and the extender's names. Otherwise it makes new ones, valid for ten years,
    with an authority whose key is discarded.
  - Certificates of another authority, such as cert-manager, are never replaced. Those of this filter are renewed in
    their last year.
positional: names
options:
  _input:
    description: The existing ones of the two Secrets.
    type: list
    elements: dict
    required: true
  names:
    description: The extender's host names for kube-scheduler.
    type: list
    elements: str
    required: true
requirements:
  - cryptography
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Keep or make the certificates of a namespace's extender
  ansible.builtin.set_fact:
    certificates: "{{ [] | kubegpu.share.extender_certificates(['gpushare-extender.gpushare-system.svc']) }}"
  no_log: true
"""

RETURN = r"""
_value:
  description:
    - C(problem), why the certificates can't be used; empty where they can. In that case also C(server) and C(client),
      each with C(authority), C(certificate) and C(key) as PEM texts, and C(ours), whether this filter made them.
  type: dict
"""

import datetime
import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject


def extender_certificates(secrets: list[JsonObject], names: list[str]) -> JsonObject:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.certificates import fitting

    try:
        return {"problem": "", **fitting(secrets, names, datetime.datetime.now(datetime.UTC))}
    except BadInput as error:
        return {"problem": str(error)}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"extender_certificates": extender_certificates}
