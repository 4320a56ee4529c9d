#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Report what would stop the set-up, before anything changes
version_added: 1.0.0
description:
  - "For the roles of this collection only: role P(kubegpu.share.preflight#role) uses it."
  - Evaluates variables, the cluster and the machines' facts together, and prints a list of findings and what to do. Doesn't fail; the role does where
    there is a problem.
  - Runs on the controller alone. It reads each host's facts (C(gpu_node)) and C(gpu_node_name) from its host variables, and the variables
    C(driver_state), C(driver_source), C(driver_version), C(toolkit_state), C(toolkit_version), C(gpu_maintenance) and those of role runtime.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
options:
  cluster:
    description: The result of M(kubegpu.share.cluster_info). Without it the machines alone are examined.
    type: dict
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
  nodes:
    description:
      - The variable C(gpushare_nodes), names of nodes of the cluster whose cards are to be shared. Empty for the hosts of O(gpu_nodes).
      - Nodes that are no hosts of the inventory are examined by their state in the cluster.
    type: list
    elements: str
    default: []
  alone:
    description: Names of the nodes that join in this run. Of the others, those that aren't in the cluster are named and left out.
    type: list
    elements: str
    default: []
  gpu_operator:
    description:
      - Whether NVIDIA's GPU Operator will remove its device plugin from these nodes (M(kubegpu.share.gpu_operator)). Then the resources that
        it announces now are no problem.
    type: bool
    default: false
  memory_unit:
    description: The variable C(gpushare_memory_unit).
    type: str
    default: GiB
  memory_limit:
    description: The variable C(gpushare_memory_limit).
    type: str
    default: auto
  image_delivery:
    description: The variable C(gpushare_image_delivery).
    type: str
    default: import
  image:
    description: The variable C(gpushare_image).
    type: str
    default: ""
  image_archive:
    description: The variable C(gpushare_image_archive).
    type: path
    default: ""
  extender_image:
    description: The variable C(gpushare_extender_image).
    type: str
    default: ""
  device_plugin_image:
    description: The variable C(gpushare_device_plugin_image).
    type: str
    default: ""
  switch:
    description: Names of the nodes that are switched to another allocation in this run. Others keep theirs, with a warning.
    type: list
    elements: str
    default: []
  ignore:
    description: Ids of findings that do not stop the run; V(id@host) for one host only.
    type: list
    elements: str
    default: []
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Read the cluster
  kubegpu.share.cluster_info:
  delegate_to: localhost
  run_once: true
  register: cluster

- name: Report what would stop the set-up
  kubegpu.share.preflight:
    cluster: "{{ cluster }}"
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
    All findings, each with C(id), C(severity) (V(problem), V(warning), V(note) or V(ignored)), C(hosts), C(variable), the C(fields) of its text,
    and its texts C(found) and C(do).
  type: list
  elements: dict
  returned: always
"""
