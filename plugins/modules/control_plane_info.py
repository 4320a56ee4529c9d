#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: control_plane_info
short_description: "For the roles of this collection only: observe a control-plane machine's kube-scheduler"
version_added: 1.0.0
description:
  - "For the roles of this collection only: options and return values may change in any release."
  - Returns everything that M(kubegpu.share.kube_scheduler) decides on. Changes nothing.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.info
options:
  config_path:
    description: The file to read as kube-scheduler's configuration, if it isn't the path in its C(--config).
    type: path
  policy_path:
    description: The file to read as kube-scheduler's Policy, if it isn't the path in its C(--policy-config-file).
    type: path
  patches_dir:
    description: The folder that is passed to C(kubeadm upgrade --patches), if there is one.
    type: path
  node:
    description: Collect the node's facts, too, with these options of M(kubegpu.share.gpu_node_info).
    type: dict
    suboptions:
      images:
        description: As there.
        type: list
        elements: str
        default: []
      packages:
        description: As there.
        type: list
        elements: str
        default: []
      baseline:
        description: As there.
        type: bool
        default: false
"""

EXAMPLES = r"""
- name: Observe the control plane's kube-scheduler
  kubegpu.share.control_plane_info:
  register: found
"""

RETURN = r"""
gpu_node:
  description: The node's facts, as M(kubegpu.share.gpu_node_info) returns them.
  returned: with O(node)
  type: dict
user:
  description: The user that ran the module, as M(kubegpu.share.gpu_node_info) returns it.
  returned: with O(node)
  type: dict
control_plane:
  description: The observed state.
  returned: success
  type: dict
  contains:
    kind:
      description: How kube-scheduler runs on this machine, V(static_pod), V(k3s) or V(rke2); empty where it doesn't.
      type: str
    version:
      description: kube-scheduler's version, from its manifest's image or reported by k3s or RKE2; empty where it is unknown.
      type: str
    folder:
      description: The folder of static pods that kubelet's configuration names.
      type: str
    manifest_path:
      description: Path of kube-scheduler's manifest, even where it doesn't exist.
      type: str
    manifest:
      description: Its text; null where it doesn't exist.
      type: str
    link:
      description: The target of the manifest if it is a symbolic link; otherwise empty.
      type: str
    others:
      description: Other files of that folder that may be kube-scheduler pods too, with their texts.
      type: dict
    config_path:
      description: The file that was read as kube-scheduler's configuration; empty where it has none.
      type: str
    config:
      description: Its text; null where it doesn't exist.
      type: str
    policy_path:
      description: The file that was read as kube-scheduler's Policy; empty where it has none.
      type: str
    policy:
      description: Its text; null where it doesn't exist.
      type: str
    ours:
      description: Text of this collection's own configuration file; null where it doesn't exist.
      type: str
    ours_policy:
      description: Text of this collection's own Policy file; null where it doesn't exist.
      type: str
    merged:
      description: Text of the note about a user's file into which the extender was merged; null where it doesn't exist.
      type: str
    patches_dir:
      description: The folder of patches that was read; empty for none.
      type: str
    patches:
      description: Its patches of kube-scheduler with their texts.
      type: dict
    running:
      description:
        - The kube-scheduler processes that this machine's kubelet runs, without those of other clusters whose control planes are
          hosted here; with k3s its own process.
        - Each has C(pid), C(config) (its C(--config)), C(policy) (its C(--policy-config-file)), C(version) (a static pod's, from
          its log) and C(stamp) (RKE2's, of the configuration that it was started with).
        - C(loaded) has the SHA-256 of the files that these name, by path, as the process sees them. C(fresh) is false where one of
          them was changed since the process started, and C(extender) is whether they name the extender's resource; both are
          null where that is unknown.
      type: list
      elements: dict
    health:
      description: HTTP status of kube-scheduler's C(/healthz) on this machine; 0 where it doesn't respond.
      type: int
    pending:
      description: Whether an earlier run was interrupted.
      type: bool
    hostname:
      description: The machine's own name, as kube-scheduler writes it to its lease.
      type: str
    embedded:
      description:
        - What runs kube-scheduler here in another way than by a manifest, a distribution of Kubernetes, a systemd unit or a process; empty
          where nothing was detected.
      type: str
    server:
      description:
        - Where RV(control_plane.kind=k3s) or RV(control_plane.kind=rke2), its settings for kube-scheduler.
      type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem, naming_user, user
from ansible_collections.kubegpu.share.plugins.module_utils._node import facts
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.control_plane import ARGUMENTS, observe


def main() -> None:
    node: JsonObject = {"type": "dict", "options": facts.OPTIONS}
    module = AnsibleModule(argument_spec={**ARGUMENTS, "node": node}, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    options = {name: module.params[name] for name in ARGUMENTS}
    asked = module.params["node"]

    def collect() -> JsonObject:
        with naming_user():
            result: JsonObject = {"changed": False, "control_plane": observe(system, **options)}
            if asked:
                gpu_node = facts.observe(
                    system,
                    asked["images"],
                    asked["packages"],
                    asked["baseline"],
                    asked["driver_version"],
                    asked["exclude"],
                )
                result |= {"user": user(), "gpu_node": gpu_node}
        return result

    run_module(module, collect)


if __name__ == "__main__":
    main()
