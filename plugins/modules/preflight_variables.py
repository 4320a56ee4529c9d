#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_variables
short_description: Report variables that would stop the set-up
version_added: 1.0.0
description:
  - "For the roles of this collection only: role P(kubegpu.share.preflight#role) uses it."
  - Checks the variables of all hosts against the argument specifications of every role that runs there, names variables that no role knows and the
    nearest that one does, and files that aren't there. Prints a list of its findings, each with the file and line where the variable is set.
  - Runs on the controller alone and connects to no machine. Doesn't fail; the role does where there is a problem.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
options:
  gpu_nodes:
    description: Hosts of the inventory whose GPUs are to be shared.
    type: list
    elements: str
    required: true
  control_plane:
    description: Hosts of the inventory on which a scheduler runs.
    type: list
    elements: str
    default: []
  cluster:
    description: Whether there is a cluster. Before there is one, the kubeconfig may be missing.
    type: bool
    default: true
  ignore:
    description: Ids of findings that do not stop the run; V(id@variable) for one variable only.
    type: list
    elements: str
    default: []
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Report variables that would stop the set-up
  kubegpu.share.preflight_variables:
    gpu_nodes: "{{ groups['gpu_nodes'] }}"
    control_plane: "{{ groups['control_plane'] }}"
  run_once: true
"""

RETURN = r"""
problems:
  description: How many entries of the printed list stop the run. Hosts with the same finding share an entry.
  type: int
  returned: always
findings:
  description: >-
    All findings, each with C(id), C(severity) (V(problem), V(warning), V(note) or V(ignored)), C(hosts) (none where all have it), C(variable), the
    C(fields) of its text, and its texts C(found) and C(do).
  type: list
  elements: dict
  returned: always
"""
