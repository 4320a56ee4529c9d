#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Say what would stop the set-up, before anything changes
version_added: 1.0.0
description:
  - Judges variables, the cluster and the observed machines together, prints a table of what it found and what to do, and fails with one
    sentence for each problem.
  - Runs on the controller alone. It reads each host's observation (the fact C(gpu_node)) and C(gpu_node_name) from its host variables, and of the
    nodes' roles C(driver_state), C(driver_source), C(driver_version), C(toolkit_state), C(toolkit_version) and C(gpu_maintenance) from the task's.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
options:
  cluster:
    description: What M(kubegpu.share.cluster_info) returned. Without it the machines alone are judged.
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
      - Nodes that are no hosts of the inventory are judged by what the cluster says of them.
    type: list
    elements: str
    default: []
  gpu_operator:
    description:
      - Whether NVIDIA's GPU Operator will be told to take its device plugin from these nodes (M(kubegpu.share.gpu_operator)), so that what it
        announces now stops nobody.
    type: bool
    default: false
  backend:
    description: The variable C(gpu_backend).
    type: str
    default: gpushare
  memory_unit:
    description: The variable C(gpushare_memory_unit).
    type: str
    default: GiB
  placement:
    description: The variable C(gpushare_placement).
    type: str
    default: binpack
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
  ignore:
    description: Ids of findings that shall not stop the run; V(id@host) for one host only.
    type: list
    elements: str
    default: []
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Look at the cluster
  kubegpu.share.cluster_info:
  delegate_to: localhost
  run_once: true
  register: cluster

- name: Say what would stop the set-up
  kubegpu.share.preflight:
    cluster: "{{ cluster }}"
    gpu_nodes: "{{ groups['gpu_nodes'] }}"
    control_plane: "{{ groups['control_plane'] }}"
  run_once: true
"""

RETURN = r"""
problems:
  description: What stops the run, one sentence each. The task fails where there is any.
  type: list
  elements: str
  returned: always
findings:
  description: >-
    All of it, each with C(id), C(severity) (V(problem), V(warning), V(note) or V(ignored)), C(found), C(do) and C(host).
  type: list
  elements: dict
  returned: always
notes:
  description: What can't be known yet.
  type: list
  elements: str
  returned: always
"""
