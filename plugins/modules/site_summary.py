#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: site_summary
short_description: "For the roles of this collection only: print what there is after a run of site.yml"
version_added: 1.0.0
description:
  - "For the roles of this collection only: role P(kubegpu.share.plan#role) uses it; options and return values may change in any release."
  - Reads the cluster's nodes on the controller, and prints how many nodes, cards and how much memory are shared.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubegpu.share.attributes.cluster
options:
  planned:
    description: The result of M(kubegpu.share.site_plan) with which the run began. Without changes its nodes aren't read again.
    type: dict
  claims:
    description: Whether claims allocate cards of a node. Then those of the DRA driver's ResourceSlices are counted, too.
    type: bool
    default: false
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print what there is now
  kubegpu.share.site_summary:
    planned: "{{ plan_site }}"
"""

RETURN = r"""
summary:
  description: >-
    C(nodes) and C(cards) that are shared, their memory (C(units) in C(unit)), C(steps) (of the plan; null without one), and whether nothing was
    changed because of C(check) mode. Null where ansible-playbook's own Python lacks the Kubernetes library.
  type: dict
  returned: always
"""
