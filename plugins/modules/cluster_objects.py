#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_objects
short_description: Bring a whole set of Kubernetes objects to where it should be, in one call
version_added: 1.0.0
description:
  - Compares each wished object with the live one and applies (server-side apply) only those that differ, so that a run with nothing to do
    costs one request per object and changes nothing.
  - A wish names only the fields that it is about. Defaults of the API server, and what others added, are left alone. What an earlier wish
    named and this one no longer does is removed.
  - Objects are created in an order in which each finds what it stands on, and removed in the reverse one.
  - Nodes are only ever labelled and annotated. They are never created and never deleted; with O(state=absent), what this module once set on
    them is taken back.
  - A namespace in which others have something stays when it should go, and is told as V(kept).
  - The values of a Secret are never shown in the diff.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubernetes.core.k8s_auth_options
options:
  definitions:
    description:
      - "The objects: YAML text, with any number of documents, or a map, or a list of texts and maps."
    type: raw
    required: true
  state:
    description: Whether the objects should be there.
    type: str
    choices: [present, absent]
    default: present
  wait:
    description:
      - Wait until every DaemonSet, Deployment and StatefulSet among the objects is rolled out and every node announces its O(node_resources).
        With O(state=absent), until the objects are gone.
      - When that takes longer than O(wait_timeout), the module fails and says why, in the words of the pods' states and events.
      - Nothing is waited for in check mode.
    type: bool
    default: false
  wait_timeout:
    description: How many seconds to wait.
    type: int
    default: 300
  node_resources:
    description: Resources that every node among the objects must announce more than none of, before the wait ends.
    type: list
    elements: str
    default: []
  replace_unready:
    description:
      - Delete pods of the DaemonSets among the objects that run without being ready, so that they are made anew.
      - This helps where what a pod needs came after it. A pod keeps the container runtime that it was made with.
    type: bool
    default: false
  field_manager:
    description:
      - Under which name the API server remembers the fields as ours.
      - Give a set of its own name when it labels nodes that another set labels too.
    type: str
    default: kubegpu-share
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
  - PyYAML >= 3.11
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Namespace and workload, from a template
  kubegpu.share.cluster_objects:
    definitions: "{{ lookup('ansible.builtin.template', 'extender.yml.j2') }}"
    wait: true

- name: A label on a node, and wait for the device plugin that runs there because of it
  kubegpu.share.cluster_objects:
    definitions:
      - apiVersion: v1
        kind: Node
        metadata:
          name: gpu1
          labels:
            gpushare: "true"
    node_resources: [aliyun.com/gpu-mem]
    wait: true
"""

RETURN = r"""
objects:
  description: What was, or in check mode would be, done with each object, in the order of doing.
  type: list
  elements: dict
  returned: always
  contains:
    kind:
      description: Kind of the object.
      type: str
    namespace:
      description: Its namespace; empty for objects of the cluster.
      type: str
    name:
      description: Its name.
      type: str
    because:
      description: What others have in a namespace that was kept for it.
      type: str
    action:
      description: V(created), V(changed), V(unchanged), V(deleted), V(absent) or V(kept).
      type: str
  sample:
    - kind: Namespace
      namespace: ""
      name: gpushare-system
      action: unchanged
requests:
  description: How many requests of each verb the API server was sent.
  type: dict
  returned: always
  sample:
    GET: 5
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_objects import ARGUMENTS, converge
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: converge(RealKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
