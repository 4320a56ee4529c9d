#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_packages
short_description: Keep packages at exact versions from repositories of their own, held
version_added: 1.0.0
description:
  - One concern in one execution, namely the repositories with their keys, the pins, the packages, their holds, and that
    unattended-upgrades leaves them alone.
  - Looks first and acts only on drift. With nothing to do it runs no apt command.
  - Files of ours are C(/etc/apt/sources.list.d/kubegpu-*.sources), C(/etc/apt/keyrings/kubegpu-*.asc),
    C(/etc/apt/preferences.d/kubegpu-*.pref) and C(/etc/apt/apt.conf.d/90kubegpu-*). No other list is ever touched; one that
    names the same repository with another key is refused, because apt then reads no list at all.
  - A run of dpkg that was interrupted is finished first. While another package manager holds the lock this waits.
  - A new repository that can't be read is taken out again.
  - Nothing that others installed is removed on the way; what would have to go is named, and refused unless O(replaces)
    covers it.
  - needrestart is kept from restarting services because of it.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  name:
    description: Name of the set of packages; part of the names of its files.
    type: str
    required: true
  state:
    description:
      - With V(absent) the packages are purged, unless O(keep) says otherwise, and the files of the set are removed.
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
        description: Name of the repository; part of the names of its files.
        type: str
        required: true
      url:
        description: Its address.
        type: str
        required: true
      suites:
        description: Its suites; one that ends in V(/) is a flat repository, which has no components.
        type: list
        elements: str
        default: ["/"]
      components:
        description: Its components.
        type: list
        elements: str
        default: []
      architectures:
        description: Architectures to take from it; all of the node's when empty.
        type: list
        elements: str
        default: []
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
  pins:
    description: Entries of the set's preferences file.
    type: list
    elements: dict
    default: []
    suboptions:
      package:
        description: Names or patterns of packages, separated by blanks.
        type: str
        required: true
      pin:
        description: What to prefer, such as V(version 580.95.05*) or V(origin example.org).
        type: str
        required: true
      priority:
        description: How much; more than 1000 also goes back to an older version.
        type: int
        default: 1001
  packages:
    description:
      - The packages, each a name or C(name=version); a version that ends in V(*) stands for all that begin so.
      - A name without version is satisfied by whatever version is installed.
    type: list
    elements: str
    default: []
  hold:
    description: Whether the packages are held.
    type: bool
    default: true
  never_upgrade:
    description: Patterns of packages that unattended-upgrades leaves alone.
    type: list
    elements: str
    default: []
  conflicts:
    description: Patterns of names of packages that can't be beside these; where one is installed the task fails and names the command that removes it.
    type: list
    elements: str
    default: []
  replaces:
    description: Patterns of names of installed packages that may be removed where the new ones can't be beside them.
    type: list
    elements: str
    default: []
  source_dir:
    description:
      - Folder of C(.deb) files on the controller. On drift all of them travel to a temporary folder of the node, apt chooses
        from them as from a repository, and the folder is removed.
      - What isn't in it comes from the repositories.
    type: path
  node_dir:
    description: Folder of C(.deb) files on the node, used like O(source_dir) and left as it is.
    type: path
  keep:
    description: Patterns of names of packages that stay installed with O(state=absent), such as those that were there before.
    type: list
    elements: str
    default: []
  erase_dependencies:
    description:
      - Whether O(state=absent) also purges what was installed only for the packages and nothing else needs; O(keep) excepted,
        and what nothing needed before either.
    type: bool
    default: false
  observed:
    description:
      - The node as M(kubegpu.share.gpu_node_info) returned it.
      - With it the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

EXAMPLES = r"""
- name: Keep the container toolkit at one version
  kubegpu.share.apt_packages:
    name: toolkit
    repositories:
      - name: nvidia-container-toolkit
        url: https://nvidia.github.io/libnvidia-container/stable/deb/amd64/
        key_url: https://nvidia.github.io/libnvidia-container/gpgkey
    packages:
      - nvidia-container-toolkit=1.20.1-1
      - nvidia-container-toolkit-base=1.20.1-1
      - libnvidia-container-tools=1.20.1-1
      - libnvidia-container1=1.20.1-1
    never_upgrade: [nvidia-container-, libnvidia-container]
    observed: "{{ gpu_node }}"
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._apt import ARGUMENTS, package_set
from ansible_collections.kubegpu.share.plugins.module_utils._apt_apply import AptConcern
from ansible_collections.kubegpu.share.plugins.module_utils._node_info_host import distribution
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish, run
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    finish(
        module,
        lambda: run(
            AptConcern(package_set(module.params), system, distribution(system)["arch"]),
            module.check_mode,
        ),
    )


if __name__ == "__main__":
    main()
