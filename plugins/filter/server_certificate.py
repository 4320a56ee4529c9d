# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: server_certificate
short_description: Certificate for a server whose clients need none
version_added: 1.0.0
description:
  - Returns the certificate in a Secret, if it is for these names and valid for another year. Otherwise it makes a new
    one, valid for ten years, with an authority whose key is discarded.
positional: names
options:
  _input:
    description: The existing Secret, if any.
    type: list
    elements: dict
    required: true
  names:
    description: The server's host names and addresses.
    type: list
    elements: str
    required: true
requirements:
  - cryptography
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Keep or make the certificate of a webhook
  ansible.builtin.set_fact:
    certificate: "{{ [] | kubegpu.share.server_certificate(['hami-scheduler.hami-system.svc']) }}"
  no_log: true
"""

RETURN = r"""
_value:
  description: C(authority), C(certificate) and C(key) as PEM texts.
  type: dict
"""

import datetime
import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.certificates import Side


def server_certificate(secrets: list[JsonObject], names: list[str]) -> Side:
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.certificates import of_server

    return of_server(secrets, names, datetime.datetime.now(datetime.UTC))


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"server_certificate": server_certificate}
