#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: openshift_scheduler
short_description: Configure OpenShift's scheduler, or a secondary one, to use gpushare's extender
version_added: 1.0.0
description:
  - V(method=policy), for OpenShift up to 4.9, writes a Policy with gpushare's extender to a ConfigMap in C(openshift-config) and names it in
    C(Scheduler/cluster). OpenShift's operator then rolls kube-scheduler out with it, one control-plane node after the other.
  - A Policy that C(Scheduler/cluster) already names is the user's. It is merged into ours and never written to. Predicates, priorities and
    other extenders stay.
  - V(method=secondary), from 4.10 on, has OLM install the Secondary Scheduler Operator, unless it is installed, and configures
    C(SecondaryScheduler/cluster). OpenShift's own scheduler isn't changed. Existing objects for OLM (namespace, OperatorGroup, Subscription) stay
    unchanged.
  - Waits until the change is in effect on every control-plane node, or in the Deployment of the secondary scheduler. If it fails or isn't in effect in
    time, the module rolls back, verifies that and fails with the messages of the operator, the pods or OLM.
  - V(method=policy) refuses OpenShift 4.10 and newer, where a named Policy degrades the cluster, and a cluster that is being upgraded or whose
    scheduler is degraded or being rolled out. V(method=secondary) refuses OpenShift before 4.10 and a C(SecondaryScheduler/cluster) that isn't ours.
  - O(state=absent) also begins in a degraded cluster, because our Policy may be the cause. It waits only for an upgrade of a healthy cluster.
  - A ConfigMap of ours that was edited while it is named is replaced by another one.
  - A run that was interrupted is completed by the next, with either O(state).
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  method:
    description: How the scheduler gets the extender.
    type: str
    choices: [policy, secondary]
    required: true
  state:
    description:
      - Whether the scheduler uses the extender.
      - With O(method=policy), V(absent) names the previous policy in C(Scheduler/cluster), and none from OpenShift 4.10 on, with a warning where
        a user's Policy isn't named again.
    type: str
    choices: [present, absent]
    default: present
  config_map:
    description:
      - The beginning of our ConfigMaps' names, which a digest of the text follows.
      - By default C(gpushare-scheduler-policy) or C(gpushare-scheduler-config).
    type: str
  timeout:
    description: Seconds for the rollout on all nodes, and again for a rollback; with O(method=secondary) for the installation and again for the scheduler.
    type: int
    default: 1800
  library:
    description:
      - The library whose dynamic client is used. V(auto) uses that of C(openshift), and that of C(kubernetes), with the same calls, where it isn't installed.
    type: str
    choices: [auto, openshift, kubernetes]
    default: auto
  extender_url:
    description: The extender's URL, for O(method=policy). kube-scheduler is on the host's network and can't resolve the names of Services.
    type: str
    default: http://127.0.0.1:12345/gpushare-scheduler
  extender_timeout:
    description: Seconds that kube-scheduler waits for a response of the extender, for O(method=policy).
    type: int
    default: 30
  extender_preemption:
    description:
      - Whether kube-scheduler asks the extender which pods to evict for one of higher priority, for O(method=policy). The upstream extender
        doesn't support it.
    type: bool
    default: false
  config:
    description: The C(KubeSchedulerConfiguration) as YAML. Required for O(method=secondary) with O(state=present).
    type: str
  image:
    description:
      - Image of the scheduler. Required for O(method=secondary) with O(state=present).
      - The operator runs C(/bin/kube-scheduler) in it, which the images of scheduler-plugins have, and those of Kubernetes haven't.
    type: str
  channel:
    description: Channel of the operator's package, for O(method=secondary).
    type: str
    default: stable
  source:
    description: Catalog with the operator's package; a mirrored one on clusters without internet access.
    type: str
    default: redhat-operators
  source_namespace:
    description: The catalog's namespace.
    type: str
    default: openshift-marketplace
  topology:
    description: Number of secondary schedulers, from release 1.6 of the operator on. Empty for the operator's default.
    type: str
    choices: ["", SingleReplica, HighlyAvailable]
    default: ""
  plan:
    description: Set by the action plugin.
    type: dict
requirements:
  - openshift >= 0.13.2 (or kubernetes alone, see O(library))
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Configure OpenShift's own scheduler with the extender (up to 4.9)
  kubegpu.share.openshift_scheduler:
    method: policy
    extender_url: http://127.0.0.1:12345/gpushare-scheduler

- name: Remove the extender from it
  kubegpu.share.openshift_scheduler:
    method: policy
    state: absent

- name: Run a secondary scheduler with the extender (from 4.10 on)
  kubegpu.share.openshift_scheduler:
    method: secondary
    image: registry.k8s.io/scheduler-plugins/kube-scheduler:v0.33.5
    config: "{{ lookup('ansible.builtin.file', 'scheduler.yaml') }}"
"""

RETURN = r"""
kept:
  description: Objects of others in the operator's namespace, which therefore stays.
  returned: with O(method=secondary) and O(state=absent)
  type: list
  elements: str
  sample: [Secret pull]
library:
  description: The library whose dynamic client was used.
  returned: changed
  type: str
  sample: openshift
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.scheduler import ARGUMENTS, DynamicKube, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(DynamicKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
