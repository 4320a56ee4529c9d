#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_objects
short_description: Create, change or remove a set of Kubernetes objects in one execution
version_added: 1.0.0
description:
  - Compares each definition with the live object and applies (server-side apply) only those that differ. If nothing differs, it sends one
    request per object and changes nothing.
  - A definition contains only the fields that it manages. Defaults of the API server and fields of others are left unchanged. A field that an
    earlier definition set and this one doesn't is removed.
  - Objects are created after the objects that they need, and deleted in the reverse order.
  - Nodes are labelled and annotated only, never created and never deleted. With O(state=absent) the fields that this module has set on them are removed.
  - A namespace with objects of others is not deleted, and is returned as V(kept).
  - The diff never shows the values of a Secret.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  definitions:
    description:
      - "The objects: YAML text with any number of documents, a mapping, or a list of texts and mappings."
    type: raw
    required: true
  state:
    description: Whether the objects exist.
    type: str
    choices: [present, absent]
    default: present
  wait:
    description:
      - Wait until every DaemonSet, Deployment and StatefulSet among the objects is rolled out and every node announces its O(node_resources).
        A workload that is to have no pod is never rolled out, unless it is a DaemonSet and O(min_nodes) is V(0). With O(state=absent), until the objects are deleted.
      - After O(wait_timeout) the module fails with the reasons from the pods' states, events and logs.
      - Check mode doesn't wait.
    type: bool
    default: false
  wait_timeout:
    description: Time limit in seconds.
    type: int
    default: 300
  node_resources:
    description:
      - Resources of which every node among the objects must announce this many before the wait ends; any number above 0 where it is 0.
      - Without a node among the objects it is refused.
    type: dict
    default: {}
  min_nodes:
    description:
      - On how many nodes each DaemonSet among the objects must run, at least. One that fewer nodes match isn't rolled out.
      - V(0) where its nodes come later.
    type: int
    default: 1
    version_added: 1.1.0
  replace_unready:
    description:
      - Delete pods of the DaemonSets among the objects that run without being ready, so that they are recreated.
      - This helps pods that need something that was installed after they started. A pod keeps the container runtime with which it was created.
    type: bool
    default: false
  status_file:
    description: A file for what is waited for. The action plugin sets it, to print its text; don't set it yourself.
    type: path
  field_manager:
    description:
      - The field manager for server-side apply.
      - Use different ones for sets of objects that change the same nodes.
    type: str
    default: kubegpu-share
requirements:
  - PyYAML >= 3.11
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Apply a namespace and a workload from a template
  kubegpu.share.cluster_objects:
    definitions: "{{ lookup('ansible.builtin.template', 'extender.yml.j2') }}"
    wait: true

- name: Label a node and wait until its device plugin announces a resource
  kubegpu.share.cluster_objects:
    definitions:
      - apiVersion: v1
        kind: Node
        metadata:
          name: gpu1
          labels:
            gpushare: "true"
    node_resources: {aliyun.com/gpu-mem: 0}
    wait: true
"""

RETURN = r"""
objects:
  description: The action for each object, in the order of the changes; in check mode the predicted one.
  type: list
  elements: dict
  returned: always
  contains:
    kind:
      description: Kind of the object.
      type: str
    namespace:
      description: Its namespace; empty for cluster-wide objects.
      type: str
    name:
      description: Its name.
      type: str
    because:
      description: The objects of others because of which a namespace was kept.
      type: str
    action:
      description: V(created), V(changed), V(unchanged), V(deleted), V(absent) or V(kept).
      type: str
  sample:
    - kind: Namespace
      namespace: ""
      name: gpushare-system
      action: unchanged
unready:
  description: The objects that don't change and aren't in the desired state yet, each with the reason; without check mode the run waits for them.
  type: list
  elements: str
  returned: in check mode with O(wait)
requests:
  description: Number of requests to the API server by HTTP method.
  type: dict
  returned: always
  sample:
    GET: 5
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.apply_set import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
