#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: openshift_secondary_scheduler
short_description: Run a scheduler with gpushare's extender beside OpenShift's own, from 4.10 on
version_added: 1.0.0
description:
  - Has OLM install the Secondary Scheduler Operator where it isn't there. What somebody else has made for that (namespace, OperatorGroup,
    Subscription) stays as it is.
  - Brings the one object that the Secondary Scheduler Operator serves, C(SecondaryScheduler/cluster), and its configuration. OpenShift's own
    scheduler is never touched.
  - Waits until OLM serves that kind of object, and then until the Deployment that the operator makes runs with this configuration and image. The
    operator itself tells nothing of that.
  - Where it doesn't come up, what was there before comes back, and the module fails with the words of the pods, or of OLM.
  - Refuses an OpenShift before 4.10, and a C(SecondaryScheduler/cluster) that is somebody else's.
  - A run that was cut short is finished by the next.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubernetes.core.k8s_auth_options
options:
  state:
    description: Whether the scheduler is there.
    type: str
    choices: [present, absent]
    default: present
  config:
    description: The C(KubeSchedulerConfiguration), as YAML. Required with O(state=present).
    type: str
  image:
    description:
      - Image of the scheduler. Required with O(state=present).
      - The operator runs C(/bin/kube-scheduler) in it, which Kubernetes' own images don't have, and those of scheduler-plugins do.
    type: str
  channel:
    description: Channel of the operator's package.
    type: str
    default: stable
  source:
    description: The catalog that has the package; a mirrored one on clusters without internet.
    type: str
    default: redhat-operators
  source_namespace:
    description: The catalog's namespace.
    type: str
    default: openshift-marketplace
  topology:
    description: How many of them there are, where the operator knows of that (from its release 1.6 on). Empty leaves it to the operator.
    type: str
    choices: ["", SingleReplica, HighlyAvailable]
    default: ""
  config_map:
    description: How the names of our ConfigMaps begin. A digest of the configuration follows.
    type: str
    default: gpushare-scheduler-config
  timeout:
    description: Seconds that the operator has to be installed, and again that the scheduler has to come up.
    type: int
    default: 600
  library:
    description: Whose dynamic client is used, as in M(kubegpu.share.openshift_scheduler).
    type: str
    choices: [auto, openshift, kubernetes]
    default: auto
requirements:
  - python >= 3.9
  - openshift >= 0.13.2 (or kubernetes alone, see O(library))
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Run a scheduler that knows the extender
  kubegpu.share.openshift_secondary_scheduler:
    image: registry.k8s.io/scheduler-plugins/kube-scheduler:v0.33.5
    config: "{{ lookup('ansible.builtin.file', 'scheduler.yaml') }}"
"""

RETURN = r"""
kept:
  description: With O(state=absent), what others have in the operator's namespace, for which it stays.
  returned: success
  type: list
  elements: str
  sample: [Secret pull]
library:
  description: Whose dynamic client was used.
  returned: always
  type: str
  sample: openshift
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._openshift_client import DynamicKube
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._secondary_scheduler import ARGUMENTS, REQUIRED_IF, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, required_if=REQUIRED_IF, supports_check_mode=True)
    finish(module, lambda: work(DynamicKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
