#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: container_runtime
short_description: Make NVIDIA's runtime the default of a node's container runtime, or take it out again
version_added: 1.0.0
description:
  - Merges the runtime C(nvidia) into the configuration of containerd, Docker, CRI-O, k3s or RKE2, as its default runtime. All that
    is the user's stays as it is written, comments, order and numbers included.
  - The files are edited on the controller. The node is only touched when something has to change. There the runtime is asked, where
    it can be, whether the new files mean what they should and lose nothing; then it is made to read them and has to come up healthy,
    and is asked whether it runs with them. If it doesn't, the old files are put back, proven, and the module fails with the
    runtime's own words. C(systemctl daemon-reload) is never called.
  - A run that was cut short is finished by the next.
  - "B(containerd) 2.0 and newer: a drop-in of our own, C(conf.d/99-kubegpu-nvidia.toml), in the format of the main file, which gets
    one import. Older ones let an imported file replace a whole plugin, so there the keys go into the file that holds the CRI plugin's
    section. C(nvidia) is a copy of C(runc) as that is in effect. containerd is restarted; running pods go on."
  - "B(Docker): C(runtimes.nvidia), C(default-runtime) and, from release 25 on, C(features.cdi) in C(daemon.json). What the file was
    before is kept on the node, so that taking ours out gives back the same bytes. Docker is made to reload the file (SIGHUP), which
    stops no container. It is restarted only where a reload doesn't suffice; for C(features.cdi) alone only where that stops no
    container either (C(live-restore), or none runs)."
  - "B(CRI-O): a drop-in of our own, C(crio.conf.d/99-zz-kubegpu-nvidia.conf), with all that the default runtime has, its monitor
    above all. Where the toolkit wouldn't find CRI-O's crun or runc by its name, its path goes into the toolkit's C(config.toml).
    CRI-O is restarted; running pods go on."
  - "B(k3s) and B(RKE2): their own setting C(default-runtime) in C(config.yaml.d/99-kubegpu-nvidia.yaml). They find NVIDIA's runtime
    by themselves. The service is restarted; running pods go on."
requirements:
  - tomlkit (on the controller)
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  runtime:
    description:
      - The container runtime. V(auto) is the one that the node's kubelet uses; without a kubelet the only one that there is.
    type: str
    choices: [auto, containerd, docker, crio, k3s, rke2]
    default: auto
  state:
    description: Whether NVIDIA's runtime is there. V(absent) takes out what this module has put in, and nothing else.
    type: str
    choices: [present, absent]
    default: present
  binary:
    description: NVIDIA's runtime on the node. It has to be there before the runtime reads its files again.
    type: path
    default: /usr/bin/nvidia-container-runtime
  set_default:
    description: Whether it serves pods that name no runtime class. Otherwise it is only there to be chosen.
    type: bool
    default: true
  cdi:
    description: Whether CDI is switched on, where the runtime knows of it and can be told (containerd and Docker).
    type: bool
    default: true
  enable_cri:
    description: Whether containerd's CRI plugin is taken out of C(disabled_plugins). Otherwise such a node is refused.
    type: bool
    default: false
  timeout:
    description: Seconds that the runtime has to come up healthy.
    type: int
    default: 120
  observed:
    description: The node as M(kubegpu.share.gpu_node_info) returned it. Has to be given.
    type: dict
  plan:
    description: What the action plugin made on the controller. Not to be set.
    type: dict
"""

EXAMPLES = r"""
- name: Make nvidia the default runtime of whatever the kubelet uses
  kubegpu.share.container_runtime:
    observed: "{{ gpu_node }}"

- name: Let Docker's containers choose it
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
    - The effective configuration after the change, by the runtime's own word. containerd's dump, with credentials masked; of all
      others the default runtime and the runtimes.
  returned: changed
  type: raw
restarted:
  description: Whether the daemon was restarted. Docker reloads; and where the files mean what they meant before nothing is done.
  returned: changed
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(module.params, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
