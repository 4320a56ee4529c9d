#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_info
short_description: "For the roles of this collection only: read a cluster's nodes and detect how it runs its scheduler"
version_added: 1.0.0
description:
  - "For the roles of this collection only: options and return values may change in any release."
  - Reads the version of the API server and all nodes in two requests. Changes nothing.
  - With O(scheduler), detects from the API alone whether kube-scheduler is a static pod, a part of k3s or RKE2, OpenShift's, or not
    reachable at all (a managed control plane), and reports the reason.
  - Fails where a scheduler would be left without the extender, because that scheduler would bind pods that then have no card.
  - Fails where a dedicated scheduler of an earlier set-up would stay at work beside schedulers on machines.
  - With O(backends), decides which back end has the cards of each node, and whether they are allocated by the extender or by claims.
  - Fails within seconds when the API server can't be reached or doesn't accept the credentials.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubegpu.share.attributes.cluster
options:
  memory_unit:
    description:
      - The memory unit in which the nodes will count shares. When a node counts in another unit now, the pods that hold shares are read too
        (RV(sharing_pods)), because the change would invalidate their shares.
      - With it, the ResourceSlices are read, too.
    type: str
    choices: [GiB, MiB]
  sharing_pods:
    description: Whether to read the pods that hold shares in any case.
    type: bool
    default: false
  scheduler:
    description: Detect how the cluster runs its scheduler, with these options. Unset, the scheduler isn't detected.
    type: dict
    suboptions:
      mode:
        description: The requested mode. V(auto) selects the one that fits the cluster.
        type: str
        choices: [auto, static_pod, k3s, rke2, dedicated, openshift]
        default: auto
      hosts:
        description: The inventory hosts on which schedulers run, each with the name of its node.
        type: dict
        default: {}
      state:
        description: With V(absent), objects of another mode are reported in C(leftovers) and not refused.
        type: str
        choices: [present, absent]
        default: present
      namespace:
        description: Namespace of gpushare's servers.
        type: str
        default: gpushare-system
      dedicated_namespace:
        description: Namespace of a dedicated scheduler.
        type: str
        default: gpushare-scheduler
  backends:
    description:
      - Decide the back end of each node. With V(dra) or V(auto) among them, the pods that hold shares are read, and the API server is asked by a dry run
        whether it keeps the capacity that a claim asks for.
      - With O(scheduler), the scheduler is detected only where a node needs the extender, or where it is left without one; then as with
        O(scheduler.state=absent).
    type: dict
    suboptions:
      wanted:
        description: >-
          The nodes whose cards are used. Without it nothing is asked for, and each node has the back end that it has now, by its label C(gpushare) and what
          it announces.
        type: list
        elements: dict
        suboptions:
          node:
            description: Its name in the cluster.
            type: str
            required: true
          backend:
            description: The variable C(gpu_backend) of the node.
            type: str
            choices: [gpushare, hami, nvidia]
            default: gpushare
          allocation:
            description: The variable C(gpushare_allocation) of the node.
            type: str
            choices: [extender, dra, auto]
            default: extender
      values:
        description: >-
          The variables that not every allocation can serve, by name, each as its type has it; C(gpushare_dra_templates_nodes), and C(imported), the control
          plane's nodes that get the servers' image from the playbooks, null where each node pulls it.
        type: dict
        default: {}
      switch:
        description: Names of the nodes that are switched in this run. Others keep the allocation that they have.
        type: list
        elements: str
        default: []
      alone:
        description: Names of the nodes that join in this run. Others that aren't in the cluster are left out then.
        type: list
        elements: str
        default: []
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Read the cluster's nodes and detect its scheduler
  kubegpu.share.cluster_info:
    scheduler:
      hosts:
        cp1.example.com: cp1
  register: cluster
"""

RETURN = r"""
version:
  description: Version of the API server.
  type: str
  returned: success
  sample: v1.36.3
server:
  description: URL of the API server.
  type: str
  returned: success
  sample: https://192.0.2.1:6443
nodes:
  description: The nodes.
  type: list
  elements: dict
  returned: success
  contains:
    name:
      description: Its name.
      type: str
    address:
      description: Its internal address.
      type: str
    labels:
      description: Its labels.
      type: dict
    annotations:
      description: Those of its annotations that GPU sharing stacks write.
      type: dict
    taints:
      description: Its taints.
      type: list
    schedulable:
      description: Whether it isn't cordoned.
      type: bool
    ready:
      description: Whether its condition Ready is True.
      type: bool
    capacity:
      description: Its capacity by resource.
      type: dict
    allocatable:
      description: Its allocatable amounts by resource.
      type: dict
    runtime:
      description: Its container runtime and version.
      type: str
      sample: containerd://2.2.9
    kubelet:
      description: Version of its kubelet.
      type: str
    os:
      description: Its operating system.
      type: str
    arch:
      description: Its architecture.
      type: str
sharing_pods:
  description: Pods that hold a share of a card (namespace, name, node, units); null where they were not read.
  type: list
  elements: dict
  returned: success
claiming_pods:
  description: Pods with a share by a claim template, also those without a node (namespace, name, node); null where they were not read.
  type: list
  elements: dict
  returned: success
slices:
  description: >-
    Driver and node of each ResourceSlice, and the memory unit of the cards in this collection's; null without O(memory_unit), before Kubernetes
    1.36, which divides no device by claims, and where the user may not list them.
  type: list
  elements: dict
  returned: success
capacity:
  description: Whether the API server keeps the capacity that a claim asks for; null where it wasn't asked, or the user may not create claim templates.
  type: bool
  returned: success
given:
  description: O(backends.values).
  type: dict
  returned: success
releases:
  description: >-
    By back end of a chart that is still to be deployed, helm's releases of the same name, as C(namespace/name). O(backends.values) names them.
  type: dict
  returned: success
backends:
  description: >-
    The back ends; null without O(backends). C(nodes) has C(node), C(backend), C(allocation), C(wanted), C(present), and why, as C(code) and C(fields).
    C(extender), C(dra), C(hami) and C(nvidia) name nodes, C(absent) those that are left out with O(backends.alone). C(parts) says which
    allocations the cluster needs parts of, C(there) of which it has parts, C(leaving) of which it has parts that no node needs, and C(dedicated)
    whether a scheduler of its own has the extender. C(claims) says which new pods are turned into claims (V(all), V(asked) or V(none)).
    C(templates) has the C(place) of gpushare-dra-templates (V(named), V(control_plane) or V(gpu_nodes)) with its C(nodes), C(control_plane_image) says
    whether the control plane's machines need the servers' image, and C(unrestricted) names nodes that would lose their server, since nobody named them.
  type: dict
  returned: success
scheduler:
  description: How the cluster runs its scheduler; null without O(scheduler).
  type: dict
  returned: success
  contains:
    mode:
      description: How the scheduler is configured with the extender.
      type: str
      sample: static_pod
    reason:
      description: Why this mode was selected.
      type: str
      sample: node cp1 runs kube-scheduler as a static pod
    on_machines:
      description: Whether machines have to be changed, one after another; otherwise all changes go through the API.
      type: bool
    hosts:
      description: These machines, as hosts of the inventory. The holder of the scheduler's lease is the last.
      type: list
      elements: str
    unlabelled:
      description: The nodes of these machines that have no label of a control plane.
      type: list
      elements: str
    versions:
      description: The versions of the kube-schedulers that are static pods, from the tags of their images.
      type: list
      elements: str
      sample: [v1.36.3]
    version:
      description: Version of the API server.
      type: str
      sample: v1.36.3
    openshift:
      description: Version of OpenShift; empty for another cluster.
      type: str
    takes_policy:
      description: Whether this OpenShift's own scheduler reads a policy (before 4.10).
      type: bool
    leftovers:
      description: Objects of a set-up in another mode that still exist, as kind and name.
      type: list
      elements: str
      sample: [DaemonSet gpushare-system/gpushare-extender]
    namespace:
      description: "The servers' namespace: its C(name), and its C(metadata) with labels and the collection's own annotations, empty where
        it doesn't exist."
      type: dict
requests:
  description: Number of requests to the API server, by HTTP verb.
  type: dict
  returned: success
  sample:
    GET: 2
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import ARGUMENTS, collect


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: collect(connect(module), module.params))


if __name__ == "__main__":
    main()
