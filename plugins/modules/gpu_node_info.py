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
  - Returns what a node is, which NVIDIA GPUs it has, and in what state nouveau, the driver, the toolkit, the packages, the
    container runtimes and the kubelet are. One execution, a few cheap commands, no change.
  - What a node lacks is empty or null and never an error. Every key is always there.
  - The role P(kubegpu.share.observe#role) keeps the result as the fact C(gpu_node).
  - Where the node has no Python that ansible-core can use, the task fails with a sentence that names the interpreter that was
    found, the package to install on this distribution and what to set C(ansible_python_interpreter) to.
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
  first_look:
    description:
      - Return the whole of the first look that was kept on the node, too.
      - It is what M(kubegpu.share.first_look) kept before anything was changed.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Look at the node
  kubegpu.share.gpu_node_info:
  register: found

- name: Say which cards it has
  ansible.builtin.debug:
    msg: "{{ found.gpu_node.driver.cards | map(attribute='name') }}"

- name: Stop where a card is older than the open kernel module serves
  ansible.builtin.assert:
    that: found.gpu_node.gpus | selectattr('generation', 'in', ['maxwell', 'pascal', 'volta']) | length == 0

- name: Look at a tree that looks like a node
  kubegpu.share.gpu_node_info:
    sysroot: /srv/made-up/node
"""

RETURN = r"""
gpu_node:
  description: What was seen.
  returned: success
  type: dict
  contains:
    distribution:
      description: Who made the system.
      type: dict
      contains:
        id:
          description: C(ID) of os-release.
          type: str
        name:
          description: C(PRETTY_NAME) of os-release.
          type: str
        version:
          description: C(VERSION_ID) of os-release.
          type: str
        major:
          description: The version's first number; V(0) where there is none.
          type: int
        codename:
          description: C(VERSION_CODENAME) of os-release.
          type: str
        family:
          description: V(debian), V(redhat), V(suse), or the C(id) of any other.
          type: str
        arch:
          description: V(amd64), V(arm64), or what C(uname -m) says.
          type: str
    python:
      description: C(version) and C(executable) of the interpreter that looked.
      type: dict
    kernel:
      description: The kernels of this machine.
      type: dict
      contains:
        release:
          description: The running one.
          type: str
        installed:
          description: Releases in C(/boot), without rescue kernels; none in a container.
          type: list
          elements: str
        headers:
          description: Whether modules can be built for the running one.
          type: bool
        compiler:
          description: Versions of gcc that the running kernel was compiled with (C(kernel)) and that is installed (C(gcc)), or empty.
          type: dict
        modules:
          description: For each installed kernel whether its C(headers) are there and whether it finds an C(nvidia) module.
          type: dict
        command_line:
          description: What the kernel was booted with.
          type: str
    secure_boot:
      description: Whether firmware checks signatures; null without UEFI.
      type: bool
    security:
      description: C(selinux) (V(enforcing), V(permissive), V(disabled) or empty) and whether C(apparmor) is on.
      type: dict
    mok:
      description: >-
        Path of the certificate (C(key)) that modules built here are signed with, or empty; whether firmware has it C(enrolled) and whether that is
        C(pending) until somebody confirms it at the console. Both null where firmware checks nothing or nothing tells.
      type: dict
    reboot_required:
      description: Whether the distribution asks for a reboot.
      type: bool
    services:
      description: >-
        Services that exist, of NVIDIA, of container runtimes, of the kubelet and of automatic upgrades, each with C(active) and C(enabled). The name has
        its suffix where that isn't C(.service).
      type: dict
    gpus:
      description: NVIDIA's display devices on PCI.
      type: list
      elements: dict
      contains:
        address:
          description: Such as V(0000:3b:00.0).
          type: str
        vendor:
          description: V(0x10de).
          type: str
        device:
          description: PCI device id.
          type: str
        class:
          description: PCI class.
          type: str
        driver:
          description: The kernel driver that it is bound to (V(nvidia), V(nouveau), V(vfio-pci), ...), or null.
          type: str
        generation:
          description: >-
            V(kepler), V(maxwell), V(pascal), V(volta), V(turing), V(ampere), V(ada), V(hopper), V(blackwell), or V(unknown) for an id that isn't
            listed.
          type: str
        link:
          description: C(speed), C(width), C(max_speed), C(max_width) in the kernel's words, or null.
          type: dict
    nvswitches:
      description: NVSwitches on PCI, each with C(address), C(device), C(driver).
      type: list
      elements: dict
    nouveau:
      description: The free driver that stands in NVIDIA's way.
      type: dict
      contains:
        loaded:
          description: Whether it is loaded.
          type: bool
        refcnt:
          description: How often it is in use; null where it isn't loaded.
          type: int
        holders:
          description: Modules that use it.
          type: list
          elements: str
        users:
          description: Programs that have its devices open.
          type: list
          elements: str
        consoles:
          description: Virtual consoles that it shows.
          type: list
          elements: str
        framebuffers:
          description: Names of the framebuffers.
          type: list
          elements: str
        blacklisted:
          description: Whether any file keeps it from being loaded.
          type: bool
        files:
          description: Those files by path, with their text.
          type: dict
        tool:
          description: What makes initramfs images here (V(initramfs-tools), V(dracut)), or null.
          type: str
        dracut:
          description: Text of our configuration of dracut, or null.
          type: str
        images:
          description: >-
            The initramfs images of the installed kernels, each with C(path), C(release), C(bytes), whether it is C(newer) than our file, whether
            C(nouveau) and our C(blacklist) are inside (null where that can't be told), and whether an older image was C(kept).
          type: list
          elements: dict
        leftovers:
          description: Images that a run which was cut short left in C(/boot).
          type: list
          elements: str
        boot_free:
          description: Free bytes in C(/boot); null without an image.
          type: int
        boot_read_only:
          description: Whether C(/boot) is mounted read-only.
          type: bool
    driver:
      description: NVIDIA's driver.
      type: dict
      contains:
        loaded:
          description: Whether the kernel module is loaded.
          type: bool
        module_version:
          description: Version of the loaded module, or null.
          type: str
        module_open:
          description: Whether the loaded module is the open one; null without one.
          type: bool
        file_version:
          description: Version of the module file that the running kernel finds; it differs from the loaded one between upgrade and reboot.
          type: str
        signer:
          description: Who signed that file.
          type: str
        license:
          description: That file's license, V(NVIDIA) or V(Dual MIT/GPL) (the open one).
          type: str
        library_version:
          description: Version in the name of the file that C(libnvidia-ml.so.1) leads to.
          type: str
        version:
          description: What nvidia-smi answers, or null.
          type: str
        cards:
          description: >-
            What nvidia-smi shows: C(index), C(uuid), C(name), C(memory_mib), C(address), C(minor), C(persistence) and C(mig), the last two null where
            a card has no such mode.
          type: list
          elements: dict
        error:
          description: nvidia-smi's own words where it fails or shows a card that it can't read.
          type: str
        code:
          description: NVML's return code that these words stand for; V(0) where all is well, null without nvidia-smi or where its words don't tell.
          type: int
        persistence:
          description: Whether all cards have persistence mode on; null where that can't be told.
          type: bool
        fabric:
          description: C(version) of the fabric manager, or empty, and whether it is C(needed) because there are NVSwitches.
          type: dict
        others:
          description: >-
            Who brings the driver to this machine: V(runfile), V(gpu-operator), and by packages V(nvidia), V(distribution), V(graphics-ppa), V(rpmfusion),
            V(elrepo), V(negativo17). More than one is a conflict.
          type: list
          elements: str
    memory_limit:
      description: Whether it is C(possible) to limit the GPU memory of a container, and the sentences C(why) not.
      type: dict
    toolkit:
      description: NVIDIA's container toolkit.
      type: dict
      contains:
        version:
          description: What nvidia-ctk answers, or null.
          type: str
        binaries:
          description: Which of its programs are in C(/usr/bin).
          type: list
          elements: str
        packages:
          description: Versions of those of its four packages that are installed.
          type: dict
        config:
          description: C(path), C(text) of its configuration and the C(mode) of its runtime, or null.
          type: dict
        operator:
          description: Whether the GPU operator runs a toolkit of its own here.
          type: bool
    cdi:
      description: >-
        NVIDIA's CDI C(specs) with C(path), C(version), C(kinds) and number of C(devices); the C(driver_version) that their paths name, and whether they
        are C(stale) because another driver is loaded; C(refresh_env), the text of the environment that nvidia-cdi-refresh.service reads, or null.
      type: dict
    cgroup:
      description: C(version) of control groups, V(0) where there are none.
      type: dict
    devices:
      description: Device C(nodes) of the driver, whether C(uvm) is among them, and whether C(/dev/char) links to them (C(char_links)).
      type: dict
    dkms:
      description: What dkms has, with C(module), C(version), C(kernel) and C(state) (V(added), V(built), V(installed), V(installed-weak)).
      type: list
      elements: dict
    log:
      description: >-
        From the kernel's log since boot, on a machine with a card or a driver: C(xids) with C(address) and C(code), whether a module's key was rejected
        (C(key_rejected)), whether a card isn't supported by the open module (C(unsupported_by_open)) or needs it (C(requires_open)).
      type: dict
    apt:
      description: >-
        Null without dpkg. C(files) and C(keys) (SHA-256) of ours, C(sources) of everybody else's lists, whether dpkg was C(interrupted), and
        C(unfinished) packages.
      type: dict
    rpm:
      description: >-
        Null without rpm. The package C(manager) (V(dnf), V(dnf5), V(yum), V(zypper)), C(files) and C(keys) (SHA-256) of ours, C(imported) keys, all
        C(repositories) with C(file), C(id), C(url) and whether they are C(enabled), C(locks) with the C(lock_path) they stand in and the state of the
        C(lock_plugin), enabled module C(streams), packages that are there twice (C(duplicates)), and whether a transaction was C(interrupted).
      type: dict
    packages:
      description: >-
        Installed packages by name, each with C(version) (of rpm with epoch and release), C(held) and C(origin) (dpkg's Maintainer, rpm's Vendor); of rpm
        with all C(versions) where there are several. Those of NVIDIA, kernel headers, dkms and what O(packages) asks for.
      type: dict
    sources_stale:
      description: >-
        Lists of repositories that are left of NVIDIA's container tools of earlier years, each with C(file), C(text) and C(line_count).
      type: list
      elements: dict
    toolkit_legacy:
      description: The C(record) of what was kept aside of such tools, or an empty text; and the C(drop_ins) of nvidia-ctk that are there.
      type: dict
    runtimes:
      description: >-
        Container runtimes by name (C(containerd), C(docker), C(crio), C(k3s), C(rke2)); null where one isn't installed. Each with its C(version), its
        configuration with credentials masked, what that amounts to in the runtime's own words, and whether it runs with it.
      type: dict
    kubelet:
      description: >-
        Null without one. C(version), the C(endpoint) that it talks to, the C(runtime) that this is (V(containerd), V(docker), V(crio), V(k3s), V(rke2) or
        empty) and its C(cgroup_driver) (V(systemd), V(cgroupfs) or empty).
      type: dict
    first_look:
      description: >-
        Null, or C(path), when it was C(taken), the C(marks) that were made in it, and the C(error) if it can't be read; with O(first_look) all that was
        C(seen) then, too.
      type: dict
    maintenance:
      description: C(unfinished), whether a run of M(kubegpu.share.kernel_driver) was cut short while services were stopped.
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
    asked = module.params
    system = RealSystem(asked["sysroot"], module.run_command)
    finish(
        module,
        lambda: {
            "changed": False,
            "gpu_node": observe(system, asked["images"], asked["packages"], asked["first_look"]),
        },
    )


if __name__ == "__main__":
    main()
