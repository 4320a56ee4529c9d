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
  - Evaluates the tasks of the roles as in check mode, from what the run has observed of the machines (C(gpu_node), C(scheduler_observed)) and
    from one connection to the cluster that reads each object and each list once. Prints what would change, and fails where a role refuses.
  - Nothing is executed on a machine, and nothing is changed.
  - Sets the stat C(gpu_plan), which AWX keeps as an artifact.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubegpu.share.attributes.cluster
options:
  machines:
    description: Hosts of the inventory that site.yml would change.
    type: list
    elements: str
    default: []
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
  alone:
    description:
      - GPU nodes, by their hosts of the inventory, beside which nothing may change. It fails where something else would, and returns those steps as
        C(beyond), each with C(where).
      - Empty where anything may change.
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
    machines: "{{ groups['gpu_nodes'] }}"
"""

RETURN = r"""
plan:
  description:
    - C(changes) (whether there are any), C(seconds) (about how long the run takes), C(restarts) (hosts by service), C(drained) (hosts),
      C(hosts) (by machine its C(steps), C(refusal) and C(notes)) and C(cluster) (the same of it).
    - C(steps) are the tasks that would change something, each with C(stage) (a play of site.yml), C(role), C(task), C(module), C(changes)
      (names of files, packages and objects), C(restarts) (services) and C(waits) (what it would wait for). C(certain) is false where only the
      run tells whether there is something to change; C(reason) says why, where a template did.
    - C(refusal) is the C(role) and C(task) that would fail, with the C(reason); null for none. Nothing is planned after it. C(notes) is what
      the roles would print.
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
