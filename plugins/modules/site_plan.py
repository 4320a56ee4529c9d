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
  - Plans the roles that change the cluster, from one connection that reads each object and each list once; joins this plan with those of
    M(kubegpu.share.role_plan), prints them and fails where a role refuses.
  - Sets the stat C(gpu_plan), which AWX keeps as an artifact.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubegpu.share.attributes.cluster
options:
  hosts:
    description: The result of M(kubegpu.share.role_plan) of each machine.
    type: dict
    required: true
  schedulers:
    description: The hosts whose kube-scheduler is configured, in the order of the change.
    type: list
    elements: str
    default: []
  verify:
    description: Whether site.yml runs its checks after changes only, or always.
    type: str
    choices: [changes, always]
    default: changes
  claims:
    description: Whether claims allocate cards of a node. Then those of the DRA driver's ResourceSlices are counted, too.
    type: bool
    default: false
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
      C(hosts) (by machine its C(steps), C(refusal) and C(notes), as M(kubegpu.share.role_plan) returns them) and C(cluster) (the same of it).
    - C(patterns) has the hosts of each play of site.yml that has something to do.
  type: dict
  returned: always
summary:
  description: Where there are no changes, what there is, as M(kubegpu.share.site_summary) returns it.
  type: dict
  returned: without changes
output:
  description: The absolute path of the file.
  type: str
  returned: with O(output)
"""
