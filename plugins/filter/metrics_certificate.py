# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: metrics_certificate
short_description: Certificate for the metrics of a server
version_added: 1.0.0
description:
  - Returns the certificate in a Secret, if it is valid for another year. Otherwise it makes a new one for the name
    C(gpushare-metrics), valid for ten years, with an authority whose key is discarded.
options:
  _input:
    description: The existing Secret, if any.
    type: list
    elements: dict
    required: true
requirements:
  - cryptography
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Keep or make the certificate of a server's metrics
  ansible.builtin.set_fact:
    certificate: "{{ [] | kubegpu.share.metrics_certificate }}"
  no_log: true
"""

RETURN = r"""
_value:
  description: C(authority), C(certificate) and C(key) as PEM texts.
  type: dict
"""

import datetime

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler.certificates import Side, of_metrics


def metrics_certificate(secrets: list[JsonObject]) -> Side:
    return of_metrics(secrets, datetime.datetime.now(datetime.UTC))


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"metrics_certificate": metrics_certificate}
