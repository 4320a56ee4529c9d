#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: pinned_packages
short_description: Install packages at exact versions from given repositories and hold them
version_added: 1.0.0
description:
  - Manages a set of packages in one execution, that is the repositories with their keys, the pins or module streams, the packages, and
    their holds or version locks.
  - Works with apt, dnf 4, dnf 5 and zypper, whichever the node has.
  - Observes first and changes only what differs. Without a difference it lists the installed packages and runs no package manager.
  - With apt it writes C(/etc/apt/sources.list.d/kubegpu-*.sources), C(/etc/apt/keyrings/kubegpu-*.asc),
    C(/etc/apt/preferences.d/kubegpu-*.pref) and C(/etc/apt/apt.conf.d/90kubegpu-*), and changes no other list. A list that names the same
    repository with another key is refused, because apt then reads no list at all.
  - With dnf and zypper it writes C(/etc/yum.repos.d/kubegpu-*.repo) or C(/etc/zypp/repos.d/kubegpu-*.repo), and
    C(/etc/pki/rpm-gpg/KUBEGPU-*.asc). Its locks have a form that differs from a user's own locks, which are never removed.
  - A new repository that doesn't work is removed again, and so is its key. With dnf, a repository that stops working later doesn't stop
    the machine's other updates.
  - Packages that others installed aren't removed; where one conflicts, the task fails and names it, unless O(replaces) covers it.
  - Waits while another package manager holds the lock. An interrupted run of dpkg or rpm is completed first.
  - needrestart doesn't restart services because of it.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.observed
options:
  name:
    description: Name of the set of packages; part of the names of its files.
    type: str
    required: true
  state:
    description:
      - With V(absent) the packages (apt purges them), their holds and the files of the set are removed, except for O(keep).
      - With V(verified) nothing changes. Keys that V(present) would write are downloaded and compared with
        O(repositories[].key_sha256) and O(repositories[].key_fingerprint), in check mode too, so that a wrong one is refused before other
        tasks change the node.
    type: str
    choices: [present, absent, verified]
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
        description: Its URL; with dnf and zypper that of the directory that contains C(repodata).
        type: str
        required: true
      suites:
        description: Its suites (apt only); one that ends in V(/) is a flat repository, which has no components.
        type: list
        elements: str
        default: ["/"]
      components:
        description: Its components (apt only).
        type: list
        elements: str
        default: []
      architectures:
        description: Architectures to use of it (apt only); all of the node's when empty.
        type: list
        elements: str
        default: []
      targets:
        description:
          - Which of its lists are used (apt only), such as V(Packages); all that apt is configured for when empty. A partial mirror has no
            others.
        type: list
        elements: str
        default: []
      signed:
        description:
          - What of it is signed, and therefore verified (dnf and zypper only). NVIDIA signs the packages of its driver repositories, and
            only the metadata of the container toolkit's.
        type: list
        elements: str
        choices: [packages, metadata]
        default: [packages]
      key_url:
        description:
          - URL of its armoured public key, which the node downloads. Exactly one of O(repositories[].key_url) and
            O(repositories[].key_text) is required.
          - Without O(repositories[].key_sha256), a key that changed at this URL is noticed only when something else of the repository
            changes.
        type: str
      key_text:
        description: Its armoured public key.
        type: str
      key_sha256:
        description: SHA-256 of the armoured key; any other key is refused. When it changes the key is downloaded again.
        type: str
      key_fingerprint:
        description:
          - Fingerprint of the key, for a file whose SHA-256 isn't known. A file with another key is refused, and so is one with anything
            beside this key, its names and their signatures.
          - Has no effect with O(repositories[].key_sha256).
        type: str
  pins:
    description: Entries of the set's preferences file (apt only; refused elsewhere).
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
        description: The priority; above 1000 it also downgrades.
        type: int
        default: 1001
  streams:
    description: Module streams to enable (dnf 4 only; refused elsewhere).
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
          - Whether to change from another stream to this one although packages of the set are installed. Without any of them the stream is
            changed anyway.
        type: bool
        default: false
  packages:
    description:
      - The packages, each a name or C(name=version). A version that ends in V(*) matches every version that begins so.
      - rpm versions are compared without epoch, and without release unless the version has a C(-). V(580.95.05) matches any build of it,
        and V(3:580.95.05-1.el9) only this one.
      - A name without version is satisfied by whatever version is installed.
      - Of kernel packages several versions may be installed; one of them must be the wanted one.
    type: list
    elements: str
    default: []
  hold:
    description:
      - Whether the packages are held (apt) or locked at their versions (dnf, zypper). dnf 4 gets the plugin for it where it is missing.
    type: bool
    default: true
  hold_also:
    description:
      - Patterns of names of packages that are locked too where they are installed, usually what came with the packages (dnf and zypper only;
        ignored elsewhere).
      - Without them C(dnf upgrade) of everything fails where a newer dependency needs a newer version of a locked package.
    type: list
    elements: str
    default: []
  never_upgrade:
    description: Patterns of packages that unattended-upgrades doesn't upgrade (apt only; ignored elsewhere).
    type: list
    elements: str
    default: []
  conflicts:
    description:
      - Patterns of names of packages that can't be installed beside these. Where one is installed the task fails and names the command that
        removes it.
    type: list
    elements: str
    default: []
  replaces:
    description: Patterns of names of installed packages that may be removed where the new ones can't be installed beside them.
    type: list
    elements: str
    default: []
  source_dir:
    description:
      - Directory of C(.deb) or C(.rpm) files on the controller. When something has to be installed they are copied to a temporary directory of
        the node, which is removed afterwards.
      - Packages that it lacks come from the repositories.
    type: path
  node_dir:
    description: Directory of C(.deb) or C(.rpm) files on the node, used like O(source_dir) and left as it is.
    type: path
  keep:
    description: Patterns of names of packages that stay installed with O(state=absent), such as those that were there before.
    type: list
    elements: str
    default: []
  erase_dependencies:
    description:
      - Whether O(state=absent) also removes what was installed only for the packages and nothing else needs, and dnf 4's locking plugin once
        nothing is locked. O(keep) and packages that nothing needed before stay.
    type: bool
    default: false
  exclusive:
    description:
      - Whether repositories that this set has written earlier and that aren't in O(repositories) any more are removed with their keys, with
        O(state=absent) too. Each repository's file then has a record of the set and of its content.
      - A file that somebody has changed since stays, and is named in RV(left).
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Install the container toolkit at one version on Debian
  kubegpu.share.pinned_packages:
    name: toolkit
    repositories:
      - name: nvidia-container-toolkit
        url: https://nvidia.github.io/libnvidia-container/stable/deb/amd64/
        key_url: https://nvidia.github.io/libnvidia-container/gpgkey
    packages:
      - nvidia-container-toolkit=1.20.2-1
      - nvidia-container-toolkit-base=1.20.2-1
      - libnvidia-container-tools=1.20.2-1
      - libnvidia-container1=1.20.2-1
    never_upgrade: [nvidia-container-, libnvidia-container]
    observed: "{{ gpu_node }}"

- name: Install the driver at one version on Enterprise Linux 9
  kubegpu.share.pinned_packages:
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

- name: Remove it with its dependencies
  kubegpu.share.pinned_packages:
    name: driver
    state: absent
    packages: [nvidia-driver-cuda, kmod-nvidia-open-dkms]
    hold_also: ["*nvidia*"]
    keep: [dkms]
    erase_dependencies: true
"""

RETURN = r"""
left:
  description: Paths of files of repositories that aren't in O(repositories) any more, and that stay because somebody has changed them.
  returned: with O(exclusive=true)
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run, run_module
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._host.facts import distribution
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._packages.options import ARGUMENTS, package_set
from ansible_collections.kubegpu.share.plugins.module_utils._packages.reconcile import PackagesReconciler


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    host = distribution(system)

    def ensure() -> JsonObject:
        work = PackagesReconciler(package_set(module.params), system, host["family"], host["arch"])
        return run(work, module.check_mode, work.details)

    run_module(module, ensure)


if __name__ == "__main__":
    main()
