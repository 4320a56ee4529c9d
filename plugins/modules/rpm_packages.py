#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rpm_packages
short_description: Keep RPM packages at exact versions from repositories of their own, held
version_added: 1.0.0
description:
  - One concern in one execution, namely the repositories with their keys, the streams of modules, the packages and their
    locks, with dnf 4, dnf 5, zypper or CentOS 7's yum, whichever is the node's own.
  - Looks first and acts only on drift. With nothing to do it runs C(rpm -qa) and no package manager.
  - Files of ours are C(/etc/yum.repos.d/kubegpu-*.repo) or C(/etc/zypp/repos.d/kubegpu-*.repo), and
    C(/etc/pki/rpm-gpg/KUBEGPU-*.asc). Locks of ours have a form that tells them from a user's own, which are never lifted.
  - A repository that doesn't work is taken out again, and so is its key. One that stops working later doesn't stop the
    machine's other updates.
  - Nothing that others installed is removed on the way; what would have to go is named, and refused unless O(replaces)
    covers it.
  - While another package manager is at work this waits. What a killed transaction left twice is finished first.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  name:
    description: Name of the set of packages.
    type: str
    required: true
  state:
    description:
      - With V(absent) the packages, their locks and the files of the set are removed.
    type: str
    choices: [present, absent]
    default: present
  repositories:
    description: The repositories that the packages come from.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the repository; part of the names of its files and of its id.
        type: str
        required: true
      url:
        description: Its address, the folder that holds C(repodata).
        type: str
        required: true
      signed:
        description:
          - What of it is signed, and therefore checked. NVIDIA signs the packages of its driver repositories, and only the
            metadata of the container toolkit's.
        type: list
        elements: str
        choices: [packages, metadata]
        default: [packages]
      key_url:
        description:
          - Address of its armoured public key, fetched by the node. Exactly one of O(repositories[].key_url) and
            O(repositories[].key_text) is needed.
          - Without O(repositories[].key_sha256), that the key changed at this address is noticed only when something else
            of the repository changes.
        type: str
      key_text:
        description: Its armoured public key.
        type: str
      key_sha256:
        description: SHA-256 of the armoured key; any other is refused. When it changes the key is fetched again.
        type: str
  streams:
    description: Streams of modules to enable; dnf 4 only.
    type: list
    elements: dict
    default: []
    suboptions:
      module:
        description: The module, such as V(nvidia-driver).
        type: str
        required: true
      stream:
        description: Its stream, such as V(580-open).
        type: str
        required: true
      switch:
        description:
          - Whether to leave another stream for this one though packages of the set are installed. Without any of them it
            is left anyway.
        type: bool
        default: false
  packages:
    description:
      - The packages, each a name or C(name=version); a version that ends in V(*) stands for all that begin so.
      - The version is compared without epoch, and without release unless it has a C(-); with V(580.95.05) any build of it
        is satisfied. With V(3:580.95.05-1.el9) nothing else is.
      - A name without version is satisfied by whatever version is installed.
      - Of kernel packages several versions may be installed; one of them must be the one that is asked for.
    type: list
    elements: str
    default: []
  hold:
    description: Whether the packages are locked at their versions. dnf 4 and yum get the plugin for it where it is missing.
    type: bool
    default: true
  hold_also:
    description:
      - Patterns of package names that are locked too where they are installed, which is to say what came with the packages.
      - Without them C(dnf upgrade) of everything fails where a newer dependency asks for a newer version of a locked package.
    type: list
    elements: str
    default: []
  conflicts:
    description: Patterns of names of packages that can't be beside these; where one is installed the task fails and names the command that removes it.
    type: list
    elements: str
    default: []
  replaces:
    description: Patterns of names of installed packages that may be removed where the new ones can't be beside them. yum removes none.
    type: list
    elements: str
    default: []
  source_dir:
    description:
      - Folder of C(.rpm) files on the controller. On drift all of them travel to a temporary folder of the node, those that
        the packages need are installed from it, and it is removed.
      - What isn't in it comes from the repositories.
    type: path
  node_dir:
    description: Folder of C(.rpm) files on the node, used like O(source_dir) and left as it is.
    type: path
  keep:
    description: Patterns of names of packages that stay installed with O(state=absent), such as those that were there before.
    type: list
    elements: str
    default: []
  erase_dependencies:
    description:
      - Whether O(state=absent) also removes what was installed only for the packages and nothing else needs, and the locking
        plugin once nothing is locked; O(keep) excepted.
    type: bool
    default: false
  observed:
    description:
      - The node as M(kubegpu.share.gpu_node_info) returned it.
      - With it the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

EXAMPLES = r"""
- name: Keep the driver at one version
  kubegpu.share.rpm_packages:
    name: driver
    repositories:
      - name: cuda
        url: https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64/
        key_url: https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64/D42D0685.pub
    streams:
      - module: nvidia-driver
        stream: 580-open
    packages:
      - nvidia-driver-cuda=580.95.05
      - kmod-nvidia-open-dkms=580.95.05
    hold_also: ["*nvidia*"]
    observed: "{{ gpu_node }}"

- name: Take it away again, with what came for it
  kubegpu.share.rpm_packages:
    name: driver
    state: absent
    packages: [nvidia-driver-cuda, kmod-nvidia-open-dkms]
    hold_also: ["*nvidia*"]
    keep: [dkms]
    erase_dependencies: true
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._rpm import ARGUMENTS, package_set
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_apply import RpmConcern
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish, run
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    finish(module, lambda: run(RpmConcern(package_set(module.params), system), module.check_mode))


if __name__ == "__main__":
    main()
