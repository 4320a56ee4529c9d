#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: openshift_scheduler
short_description: Tell the scheduler of OpenShift up to 4.9 of gpushare's extender, or take it out again
version_added: 1.0.0
description:
  - Puts a Policy with gpushare's extender into a ConfigMap in C(openshift-config) and lets C(Scheduler/cluster) name it. OpenShift's operator
    then rolls kube-scheduler out with it, one control-plane node after the other.
  - A Policy that C(Scheduler/cluster) names already is the user's. It is merged into ours and is itself never written to. Predicates, priorities
    and other extenders stay.
  - Waits until every control-plane node runs a newer revision with this Policy and the operator is content. Where it is degraded, a
    revision fails or the time is over, the name before is put back, that one is proven healthy, and the module fails with the operator's own words.
  - Refuses OpenShift 4.10 and newer, where kube-scheduler takes no Policy and a named one degrades the cluster. Refuses to begin while the cluster is
    being upgraded or its scheduler isn't settled.
  - O(state=absent) is begun in each of these cases, since our Policy may be their cause; only an upgrade of a healthy cluster is to end before. Ours
    is named again only where it was seen in effect before and kube-scheduler was healthy with it.
  - A ConfigMap of ours that somebody edited while it is named is replaced by another one.
  - A run that was cut short is finished by the next, whichever O(state) that one asks for.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubernetes.core.k8s_auth_options
options:
  state:
    description: Whether the scheduler knows the extender. V(absent) lets C(Scheduler/cluster) name what it named before, and
      nothing from OpenShift 4.10 on, with a warning where a Policy of the user's isn't named again by that.
    type: str
    choices: [present, absent]
    default: present
  extender_url:
    description: Where kube-scheduler reaches the extender. It is a pod on the host's network and knows no names of services.
    type: str
    default: http://127.0.0.1:12345/gpushare-scheduler
  extender_timeout:
    description: Seconds that kube-scheduler waits for an answer of the extender.
    type: int
    default: 30
  extender_preemption:
    description: Whether kube-scheduler asks the extender which pods to evict for one of higher priority. Upstream's can't tell.
    type: bool
    default: false
  config_map:
    description: How the names of our ConfigMaps begin. A digest of the Policy follows.
    type: str
    default: gpushare-scheduler-policy
  timeout:
    description: Seconds that every control-plane node together has to run the new revision, and again to run the old one where it is put back.
    type: int
    default: 1800
  library:
    description:
      - Whose dynamic client is used. V(auto) takes that of C(openshift), and that of C(kubernetes) where it isn't installed, with the same calls.
    type: str
    choices: [auto, openshift, kubernetes]
    default: auto
  plan:
    description: What the action plugin made on the controller. Not to be set.
    type: dict
requirements:
  - python >= 3.9
  - openshift >= 0.13.2 (or kubernetes alone, see O(library))
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Tell OpenShift's scheduler of the extender
  kubegpu.share.openshift_scheduler:
    extender_url: http://127.0.0.1:12345/gpushare-scheduler

- name: Let it run as it did before
  kubegpu.share.openshift_scheduler:
    state: absent
"""

RETURN = r"""
library:
  description: Whose dynamic client was used.
  returned: changed
  type: str
  sample: openshift
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._openshift_client import DynamicKube
from ansible_collections.kubegpu.share.plugins.module_utils._openshift_scheduler import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(DynamicKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
