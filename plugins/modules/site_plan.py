#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: site_plan
short_description: "For the roles of this collection only: print what site.yml would change on all hosts"
version_added: 1.0.0
description:
  - "For the roles of this collection only: role P(kubegpu.share.plan#role) uses it; options and return values may change in any release."
  - Joins the plans of M(kubegpu.share.role_plan), prints them and fails where a role refuses.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
options:
  hosts:
    description: The result of M(kubegpu.share.role_plan) of each host.
    type: dict
    required: true
  schedulers:
    description: The hosts whose kube-scheduler is configured, in the order of the change.
    type: list
    elements: str
    default: []
  output:
    description: Path of a JSON file for the plan, relative to the current directory. It is written in check mode, too.
    type: path
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print what would change
  kubegpu.share.site_plan:
    hosts: "{{ plans }}"
"""

RETURN = r"""
plan:
  description:
    - C(changes) (whether there are any), C(seconds) (about how long the run takes), C(restarts) (hosts by service), C(drained) (hosts),
      C(hosts) (by host its C(steps), C(refusal) and C(notes), as M(kubegpu.share.role_plan) returns them).
    - C(patterns) has the hosts of each play of site.yml that has something to do.
  type: dict
  returned: always
output:
  description: The absolute path of the file.
  type: str
  returned: with O(output)
"""
