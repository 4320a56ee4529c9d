#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: role_plan
short_description: "For the roles of this collection only: plan what site.yml's roles would change on a host"
version_added: 1.0.0
description:
  - "For the roles of this collection only: role P(kubegpu.share.plan#role) uses it; options and return values may change in any release."
  - Evaluates the tasks of the roles as in check mode, from what the run has observed of the machine (C(gpu_node), C(scheduler_observed)).
    Nothing is executed on the machine, and nothing is changed.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
options:
  validate:
    description: Evaluate only what the roles driver, toolkit and runtime would refuse, for the preflight.
    type: bool
    default: false
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Plan the changes of the machine
  kubegpu.share.role_plan:
  register: planned
"""

RETURN = r"""
driver_choice:
  description: What role driver would install, as P(kubegpu.share.driver_choice#filter) returns it.
  type: dict
  returned: with O(validate)
toolkit_refused:
  description: Why role toolkit would refuse the machine.
  type: list
  elements: str
  returned: with O(validate)
runtime_refused:
  description: Why role runtime would refuse the machine.
  type: list
  elements: str
  returned: with O(validate)
runtime_warnings:
  description: What role runtime would warn of.
  type: list
  elements: str
  returned: with O(validate)
steps:
  description:
    - The tasks that would change something, each with C(stage) (a play of site.yml), C(role), C(task), C(module), C(changes) (names of
      files, packages and objects), C(restarts) (services) and C(waits) (what it would wait for).
    - C(certain) is false where only the run tells whether there is something to change; C(reason) says why, where a template did.
  type: list
  elements: dict
  returned: without O(validate)
refusal:
  description: The C(role) and C(task) that would fail, with the C(reason); null for none. Nothing is planned after it.
  type: dict
  returned: without O(validate)
groups:
  description: Groups that the roles would add the host to.
  type: list
  elements: str
  returned: without O(validate)
notes:
  description: What the roles would print.
  type: list
  elements: str
  returned: without O(validate)
"""
