#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: toolkit_config
short_description: "For the role toolkit: configure NVIDIA's container toolkit and remove the tools that it replaces"
version_added: 1.0.0
description:
  - "For the roles of this collection only: its options may change in any release."
  - Keeps the toolkit's CDI specification in a version that the node's container runtime reads. Since release 1.19 C(nvidia-cdi-refresh.service)
    writes specifications of version 0.7, which containerd before 1.7.16, Docker before 26.1 and CRI-O before 1.30 reject. A flag in the service's
    environment prevents that; the flag is marked, and the service regenerates the specification at once.
  - Has the toolkit ignore the environment of unprivileged containers, if requested, by a key in its C(config.toml). nvidia-ctk has to read the
    key, or the old file is restored. The original line is kept in a comment, and comes back when the key is removed.
  - Removes package sources with NVIDIA's container repositories that aren't this collection's (C(nvidia-docker.list),
    C(libnvidia-container.list), C(nvidia-container-toolkit.repo) and the like), because apt reads no source at all while two of them name one
    repository with different keys. A file with other repositories loses only these entries and keeps its comments. Keyrings that nothing
    else names are removed too.
  - Removes replaced packages, without purging. C(nvidia-docker2) owns Docker's C(daemon.json), which its removal may delete; the file is
    backed up first and keeps its bytes, mode and owner.
  - Everything removed is backed up in C(/var/lib/kubegpu-share/legacy); O(state=absent) restores it.
  - Where the toolkit's packages are gone while containers run that its runtime has started, O(state=absent) writes a script to
    C(/usr/bin/nvidia-container-runtime) by which containerd stops them, and which removes itself with the last of them. Without it their
    pods would stay in C(Terminating). It needs O(observed) to be left out.
  - Drop-ins that releases of nvidia-ctk wrote for containerd and CRI-O are only reported, see RV(drop_ins).
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.observed
options:
  state:
    description:
      - V(absent) removes the files that the toolkit's packages leave, and restores every removed file that is unchanged since. Packages
        aren't installed again; RV(packages) has their versions.
    type: str
    choices: [present, absent]
    default: present
  files:
    description: Whether to manage the toolkit's files. V(false) only removes or restores the replaced tools.
    type: bool
    default: true
  old_cdi:
    description: Whether the node's runtime needs a specification older than version 0.7. A flag that the user set is never removed.
    type: bool
    default: false
  accept_unprivileged:
    description:
      - Whether an unprivileged container gets the GPUs that C(NVIDIA_VISIBLE_DEVICES) in its environment requests; any pod can set that
        variable. V(false) requires that containers get their GPUs by CDI.
    type: bool
    default: true
  driver_root:
    description:
      - The root of the driver's files, C(/run/nvidia/driver) for the driver container of NVIDIA's GPU Operator. It is set as C(nvidia-container-cli.root) in
        C(config.toml), which the runtime and C(nvidia-ctk cdi generate) read.
      - With V(/), the machine's own driver, a root that this module has set is taken out again.
    type: path
    default: /
  keep:
    description: Files that existed before the toolkit and that O(state=absent) keeps, without this collection's settings.
    type: list
    elements: path
    default: []
  remove_sources:
    description: Whether to remove stale package sources and their keyrings.
    type: bool
    default: false
  remove_packages:
    description: Replaced packages to remove where they are installed.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Remove stale package sources and nvidia-docker2
  kubegpu.share.toolkit_config:
    files: false
    remove_sources: true
    remove_packages: [nvidia-docker2]
    observed: "{{ gpu_node }}"

- name: Generate CDI specifications that an older containerd reads
  kubegpu.share.toolkit_config:
    old_cdi: "{{ gpu_node.runtimes.containerd.version is version('1.7.16', '<') }}"
    observed: "{{ gpu_node }}"

- name: Remove the toolkit's files and restore the replaced tools
  kubegpu.share.toolkit_config:
    state: absent
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
packages:
  description: Versions of the packages that this module has removed, by name.
  returned: success
  type: dict
  sample: {"nvidia-docker2": "2.13.0-1"}
drop_ins:
  description: Drop-ins of nvidia-ctk on the node.
  returned: success
  type: list
  elements: str
  sample: [/etc/containerd/conf.d/99-nvidia.toml]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.module import ARGUMENTS, reconcile


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    run_module(module, lambda: reconcile(module.params, module.check_mode, system))


if __name__ == "__main__":
    main()
