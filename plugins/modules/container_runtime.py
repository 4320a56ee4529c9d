#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: container_runtime
short_description: Make NVIDIA's runtime the default of a node's container runtime, or remove it
version_added: 1.0.0
description:
  - Merges the runtime C(nvidia) into the configuration of containerd, Docker, CRI-O, k3s or RKE2, as its default runtime. The user's
    settings keep their bytes, including comments, order and numbers.
  - The files are edited on the controller. Nothing is executed on the node without drift. With drift, the runtime's own program validates
    the new files, where it can, and no setting of the user's may be lost. Then the daemon loads them, has to become healthy, and has to
    report that it runs with them. Otherwise the old files are restored and verified, and the module fails with the daemon's own error.
    C(systemctl daemon-reload) is never called.
  - The user's default runtime is replaced only where it is runc, or with O(replace_default=true).
  - The next run finishes an interrupted one.
  - "B(containerd) 2.0 and newer: a drop-in, C(conf.d/99-kubegpu-nvidia.toml), in the format of the main file, which gets one import. In
    older releases an imported file replaces a whole plugin, so there the keys are added to the file with the CRI plugin's section.
    C(nvidia) is a copy of the effective C(runc). containerd is restarted; running pods keep running."
  - "B(Docker): C(runtimes.nvidia), C(default-runtime) and, since release 25, C(features.cdi) in C(daemon.json). The original file is
    backed up on the node, so that the removal restores the same bytes. Docker reloads the file (SIGHUP), which stops no container. It is
    restarted only where a reload isn't sufficient; for C(features.cdi) alone only where a restart stops no container (C(live-restore),
    or none runs)."
  - "B(CRI-O): a drop-in, C(crio.conf.d/99-zz-kubegpu-nvidia.conf), with all settings of the default runtime, including its monitor.
    Before 1.25.1 CRI-O deletes the runtime C(runc) where a file sets another default; C(99-zz-kubegpu-runc.conf) has its table again.
    Where the toolkit wouldn't find CRI-O's crun or runc by name, its path is added to the toolkit's C(config.toml). CRI-O is restarted;
    running pods keep running."
  - "B(k3s) and B(RKE2): their own setting C(default-runtime) in C(config.yaml.d/99-kubegpu-nvidia.yaml). They detect NVIDIA's runtime
    by themselves. The service is restarted; running pods keep running."
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  runtime:
    description:
      - The container runtime. V(auto) is the one that the node's kubelet uses; without a kubelet the only installed one.
    type: str
    choices: [auto, containerd, docker, crio, k3s, rke2]
    default: auto
  state:
    description:
      - Whether NVIDIA's runtime is configured. V(absent) removes the settings of this module and nothing else. A CRI plugin that
        O(enable_cri) enabled stays enabled where the kubelet uses this containerd.
    type: str
    choices: [present, absent]
    default: present
  binary:
    description: NVIDIA's runtime on the node. It has to be installed before the container runtime loads its files.
    type: path
    default: /usr/bin/nvidia-container-runtime
  set_default:
    description: Whether it is the default runtime, for pods without a runtime class. Otherwise a pod has to select it.
    type: bool
    default: true
  cdi:
    description: Whether to enable CDI, where the runtime has a setting for it (containerd and Docker).
    type: bool
    default: true
  enable_cri:
    description: Whether to remove containerd's CRI plugin from C(disabled_plugins). Otherwise such a node is refused.
    type: bool
    default: false
  replace_default:
    description:
      - Whether NVIDIA's runtime may become the default where the user's default runtime isn't runc, like Kata or gVisor. Pods without a
        runtime class then run by runc, without that runtime's isolation. Otherwise such a node is refused.
    type: bool
    default: false
  timeout:
    description: Seconds that the runtime has to become healthy.
    type: int
    default: 120
  observed:
    description: The node as M(kubegpu.share.gpu_node_info) returned it. Required.
    type: dict
  plan:
    description: Set by the action plugin. Not for users.
    type: dict
"""

EXAMPLES = r"""
- name: Make nvidia the default runtime of the kubelet's container runtime
  kubegpu.share.container_runtime:
    observed: "{{ gpu_node }}"

- name: Add the runtime nvidia to Docker without making it the default
  kubegpu.share.container_runtime:
    runtime: docker
    set_default: false
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
runtime:
  description: The container runtime that was changed.
  returned: changed
  type: str
  sample: containerd
effective:
  description:
    - The effective configuration after the change, as the runtime reports it. For containerd its dump, with credentials masked; for
      all others the default runtime and the runtimes.
  returned: changed
  type: raw
restarted:
  description: Whether the daemon was restarted. Docker is reloaded, and nothing is restarted where the effective configuration stays the same.
  returned: changed
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.module import ARGUMENTS, run_plan


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: run_plan(module.params, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
