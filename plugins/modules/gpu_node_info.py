#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_node_info
short_description: Look once at a GPU node and return all that the roles decide on
version_added: 1.0.0
description:
  - Returns what a node is, which NVIDIA GPUs it has, and in what state nouveau, the driver, the toolkit, the packages and
    the container runtime are. One execution, a few cheap commands, no change.
  - The role P(kubegpu.share.observe#role) keeps the result as the fact C(gpu_node).
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.info
options:
  sysroot:
    description:
      - Folder under which the files are looked for.
      - Commands are the running machine's own whatever stands here.
    type: path
    default: /
  images:
    description: References of images to look for in the node's container runtime.
    type: list
    elements: str
    default: []
  packages:
    description: Patterns of further names of packages to be told of, beside those of NVIDIA, of kernel headers and of dkms.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Look at the node
  kubegpu.share.gpu_node_info:
  register: found

- name: Say which cards it has
  ansible.builtin.debug:
    msg: "{{ found.gpu_node.driver.cards | map(attribute='name') }}"
"""

RETURN = r"""
gpu_node:
  description: What was seen.
  returned: success
  type: dict
  contains:
    distribution:
      description: C(id), C(version), C(codename), C(family) (V(debian), V(redhat), V(suse) or the C(id)) and C(arch) (V(amd64), V(arm64)).
      type: dict
    kernel:
      description: C(release) that runs, releases C(installed) in C(/boot) (none in a container), whether C(headers) of the running one are there.
      type: dict
    secure_boot:
      description: Whether firmware checks signatures; null without UEFI.
      type: bool
    reboot_required:
      description: Whether the distribution asks for a reboot.
      type: bool
    services:
      description: NVIDIA's services that exist, each with C(active) and C(enabled).
      type: dict
    gpus:
      description: NVIDIA's display devices on PCI, each with C(address), C(vendor), C(device), C(class), C(driver) (null where none is bound).
      type: list
      elements: dict
    nouveau:
      description: >-
        Whether it is C(loaded), its C(refcnt), whether any file has it C(blacklisted), those C(files) with their text, the initramfs C(images) with
        C(path), C(bytes) and whether each is C(newer) than our file, and C(boot_free) bytes.
      type: dict
    driver:
      description: >-
        C(module_version) and C(module_open) of the loaded kernel module, C(version) and C(cards) as nvidia-smi shows them
        (C(index), C(uuid), C(name), C(memory_mib), C(address), C(minor)), its own words where it fails in C(error), and
        who C(others) manage the driver (V(runfile), V(gpu-operator)).
      type: dict
    toolkit:
      description: C(version) that nvidia-ctk answers with, and which C(binaries) are in C(/usr/bin).
      type: dict
    apt:
      description: >-
        Null without dpkg. C(files) and C(keys) (SHA-256) of ours, C(sources) of everybody else's lists, whether dpkg was C(interrupted), and
        C(unfinished) packages.
      type: dict
    packages:
      description: Installed packages by name, each with C(version) and C(held).
      type: dict
    runtimes:
      description: Container runtimes by name; null where one isn't installed.
      type: dict
    images:
      description: The references that were asked for, each with the SHA-256 of the archive it was imported from or an empty text.
      type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._node_info import ARGUMENTS, observe
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(module.params["sysroot"], module.run_command)
    finish(
        module,
        lambda: {"changed": False, "gpu_node": observe(system, module.params["images"], module.params["packages"])},
    )


if __name__ == "__main__":
    main()
