#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: report
short_description: Print a text as it is
version_added: 1.0.0
description:
  - Prints a text with its lines and columns as they are, whatever the callback plugin makes of results. Runs on the controller alone.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
options:
  text:
    description: What to print. An empty text prints nothing.
    type: str
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show the table
  kubegpu.share.report:
    text: "{{ allocation.table }}"
"""

RETURN = r"""
# Nothing beside what every task returns.
"""
