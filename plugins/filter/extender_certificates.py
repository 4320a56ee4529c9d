# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: extender_certificates
short_description: Certificates for a kube-scheduler and an extender that isn't beside it
version_added: 1.0.0
description:
  - Gives back the certificates in two Secrets, C(gpushare-extender-tls) of the extender and C(gpushare-extender-client)
    of kube-scheduler, where they fit each other and the extender's names. Otherwise it makes new ones, valid for ten
    years, with an authority whose key nobody keeps.
  - Certificates that somebody else made, such as cert-manager, are never replaced. Those of this filter are made anew
    in their last year.
positional: names
options:
  _input:
    description: Those of the two Secrets that are in the cluster.
    type: list
    elements: dict
    required: true
  names:
    description: What kube-scheduler may call the extender.
    type: list
    elements: str
    required: true
requirements:
  - cryptography
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Have certificates for the extender of a namespace
  ansible.builtin.set_fact:
    certificates: "{{ [] | kubegpu.share.extender_certificates(['gpushare-extender.gpushare-system.svc']) }}"
  no_log: true
"""

RETURN = r"""
_value:
  description:
    - C(problem), one sentence, empty where there is none. In that case also C(server) and C(client), each with
      C(authority), C(certificate) and C(key) as PEM texts, and C(ours), whether this filter made them.
  type: dict
"""

import datetime
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._extender_certificates import fitting


def extender_certificates(secrets: list[dict[str, t.Any]], names: list[str]) -> dict[str, t.Any]:
    try:
        return {"problem": "", **fitting(secrets, names, datetime.datetime.now(datetime.UTC))}
    except BadInput as error:
        return {"problem": str(error)}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"extender_certificates": extender_certificates}
