#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_node_info
short_description: Collect all facts of a GPU node that the roles plan from
version_added: 1.0.0
description:
  - Returns the node's system, its NVIDIA GPUs, and the states of nouveau, the driver, the toolkit, the packages, the container runtimes and
    kubelet. One execution, a few cheap commands, no change.
  - Anything missing on a node is empty or null and never an error. Every key is always there.
  - The role P(kubegpu.share.node_facts#role) sets the result as the fact C(gpu_node).
  - Where the node's Python is missing or older than 3.9, the error names the interpreter that was found, the package to install on this
    distribution and the value for C(ansible_python_interpreter).
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.info
options:
  exclude:
    description:
      - Cards that Kubernetes must not get, as the variable C(gpu_exclude) names them, by PCI address, UUID or a pattern of the model.
      - The facts have them in C(driver.excluded), and in C(vgpu.excluded) for role vgpu, whose layouts count all cards.
    type: list
    elements: str
    default: []
  sysroot:
    description:
      - Directory that the files are read below.
      - Commands always run on the machine itself.
    type: path
    default: /
  images:
    description: References of images to search in the node's container runtime.
    type: list
    elements: str
    default: []
  packages:
    description: Patterns of names of packages to include, beside those of NVIDIA, of kernel headers and of dkms.
    type: list
    elements: str
    default: []
  control_plane:
    description:
      - Collect what M(kubegpu.share.control_plane_info) collects, too, in the same execution.
      - The action plugin reads it.
    type: bool
    default: false
  patches_dir:
    description: With O(control_plane), the option of M(kubegpu.share.control_plane_info).
    type: path
  report_trouble:
    description:
      - Where the machine can't be reached, where the user isn't root there, or where the facts can't be collected otherwise, return RV(trouble) in place
        of failing.
      - Only with the action plugin of this name, that is in a task.
    type: bool
    default: false
  driver_version:
    description:
      - Version of the driver that is to be installed. Where it, or its module for the running or the newest kernel, isn't installed on a machine with a
        card, the machine's own package lists are asked what they have (RV(gpu_node.package_lists)). Empty asks nothing.
      - That takes a second or two, and downloads nothing.
    type: str
    default: ""
  baseline:
    description:
      - Return the snapshot of the baseline, too, that M(kubegpu.share.node_baseline) recorded before anything was changed.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Collect the node's facts
  kubegpu.share.gpu_node_info:
  register: found

- name: Print the names of its cards
  ansible.builtin.debug:
    msg: "{{ found.gpu_node.driver.cards | map(attribute='name') }}"

- name: Fail if the open kernel module doesn't support a card
  ansible.builtin.assert:
    that: found.gpu_node.gpus | selectattr('generation', 'in', ['maxwell', 'pascal', 'volta']) | length == 0

- name: Collect the facts of a directory tree
  kubegpu.share.gpu_node_info:
    sysroot: /srv/made-up/node
"""

RETURN = r"""
user:
  description: C(uid) and C(name) of the user that the module ran as.
  returned: success
  type: dict
control_plane:
  description: The machine's kube-scheduler, which the role scheduler decides on.
  returned: with O(control_plane)
  type: dict
trouble:
  description: >-
    Why there are no facts, or not all. C(id) is V(unreachable), V(not-root) (the user isn't root, and nothing was asked to make it so), V(no-escalation)
    (it was, in vain) or V(no-facts); C(user) is the user that connects, C(reason) the machine's or Ansible's own words.
  returned: with O(report_trouble), where there is any
  type: dict
gpu_node:
  description: The facts.
  returned: success
  type: dict
  contains:
    distribution:
      description: The operating system.
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
          description: V(amd64), V(arm64), or the output of C(uname -m).
          type: str
    python:
      description: C(version) and C(executable) of the interpreter that ran the module.
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
          description: Whether the headers of the running one are installed.
          type: bool
        compiler:
          description: Version of gcc that compiled the running kernel (C(kernel)) and of the installed one (C(gcc)), or empty.
          type: dict
        modules:
          description: For each installed kernel whether its C(headers) are there and whether it finds an C(nvidia) module.
          type: dict
        command_line:
          description: The command line of the running kernel.
          type: str
    boot:
      description: How the machine boots, and the kernel's arguments; M(kubegpu.share.kernel_arguments) plans from it.
      type: dict
      contains:
        loader:
          description: >-
            V(grub-drop-in), V(grub-default), V(grub-bls), V(systemd-boot), V(kernelstub), V(proxmox) or V(rpm-ostree); empty for any other.
          type: str
        refused:
          description: Why arguments can't be changed on it, as a code such as V(several); empty where they can.
          type: str
        found:
          description: What that is about.
          type: list
          elements: str
        firmware:
          description: V(efi), V(bios), or empty where a machine has neither.
          type: str
        now:
          description: The running kernel's arguments.
          type: str
        next:
          description: >-
            The entry that boots next, with its C(id), the C(path) of its file, its C(arguments), whether it is chosen C(once), and whether it is C(proven)
            by the loader's own files; null where it isn't known.
          type: dict
        files:
          description: Texts of the files that decide the arguments, by path.
          type: dict
        config:
          description: Path of GRUB's menu, or empty.
          type: str
        environment:
          description: Path of GRUB's environment block, or empty.
          type: str
        kernelopts:
          description: The variable of GRUB's environment from which entries of Red Hat's release 8 take their arguments; null without it.
          type: str
        record:
          description: What M(kubegpu.share.kernel_arguments) has added, and the files before; null where it has added nothing.
          type: dict
        record_error:
          description: Why the record can't be read, or empty.
          type: str
        pending:
          description: Whether a run was interrupted.
          type: bool
    secure_boot:
      description: Whether firmware checks signatures; null without UEFI.
      type: bool
    security:
      description: C(selinux) (V(enforcing), V(permissive), V(disabled) or empty) and whether C(apparmor) is on.
      type: dict
    mok:
      description: >-
        Path of the certificate (C(key)) that modules built here are signed with, or empty; whether firmware has it C(enrolled) and whether that is
        C(pending) until somebody confirms it at the console. Both null where firmware checks nothing or they are unknown.
      type: dict
    reboot_required:
      description: Whether the distribution asks for a reboot.
      type: bool
    services:
      description: >-
        Services that exist, of NVIDIA, of container runtimes, of the kubelet and of automatic upgrades, each with C(active) and C(enabled). The name has
        its suffix where that isn't C(.service).
      type: dict
    iommu:
      description: The machine's IOMMU, without which no virtual machine can be given a card.
      type: dict
      contains:
        groups:
          description: Number of IOMMU groups; V(0) where it is off.
          type: int
        table:
          description: The firmware's description of one, V(DMAR) (Intel), V(IVRS) (AMD), V(IORT) (Arm), V(VIOT) (virtual), or empty.
          type: str
        arguments:
          description: Arguments about it on the running kernel's command line.
          type: list
          elements: str
        default_on:
          description: Whether the running kernel turns Intel's on without an argument; null where its configuration isn't known.
          type: bool
    gpus:
      description: NVIDIA's cards on PCI. Virtual functions of a card are no cards, but part of it.
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
          description: The kernel driver that it is bound to (V(nvidia), V(nouveau), V(nova_core), V(vfio-pci), ...), or null.
          type: str
        driver_override:
          description: The only driver that may take it, such as V(vfio-pci); empty where any may.
          type: str
        generation:
          description: >-
            V(kepler), V(maxwell), V(pascal), V(volta), V(turing), V(ampere), V(ada), V(hopper), V(blackwell), or V(unknown) for an id that isn't
            listed.
          type: str
        vgpu:
          description: Whether it is a hypervisor's slice of a card, which only NVIDIA's vGPU software for guests has a driver for.
          type: bool
        link:
          description: C(speed), C(width), C(max_speed), C(max_width) in the kernel's words, or null.
          type: dict
        iommu_group:
          description: Number of its IOMMU group; null where the IOMMU is off.
          type: int
        group:
          description: >-
            The other functions of its IOMMU group, which a virtual machine gets together with it, each with C(address), C(class), C(vendor), C(device),
            C(driver), and whether it is a C(bridge), which may stay as it is.
          type: list
          elements: dict
        display:
          description: >-
            Whether it is the display that firmware uses at C(boot), the C(framebuffers) on it, and its C(connectors) with a screen.
          type: dict
        numa_node:
          description: Number of its NUMA node, or null.
          type: int
        reset_methods:
          description: How the kernel can reset it, the preferred one first (V(flr), V(pm), V(bus), ...).
          type: list
          elements: str
        virtual_functions:
          description: >-
            How many it can have in C(total) (V(0) without SR-IOV), and those that are C(enabled), each with C(address), C(driver) and C(iommu_group).
          type: dict
        vgpu_host:
          description: >-
            vGPUs that it can have and has. C(framework) is V(mdev) (mediated devices), V(vendor) (a type is written into a virtual function) or V(none),
            by what the driver shows. C(types) have C(id), C(name), and how many more are C(available); with virtual functions that is the number of those
            that offer it. C(vgpus) have the C(address) of their function, the C(uuid) of a mediated device or null, the id of their C(type),
            and the C(iommu_group) of the mediated device, or of the function.
          type: dict
    nvswitches:
      description: NVSwitches on PCI, each with C(address), C(device), C(driver).
      type: list
      elements: dict
    integrated:
      description: The model of a Jetson, whose integrated GPU isn't on PCI and has no memory of its own; empty for other machines.
      type: str
    passthrough:
      description: >-
        What M(kubegpu.share.pci_binding) plans from; null where its record can't be read. Its form may change at any time.
      type: dict
      contains:
        functions: {description: NVIDIA's functions on PCI and all of their IOMMU groups., type: list, elements: dict}
        uuids: {description: "UUIDs of the cards that NVIDIA's driver has, by PCI address.", type: dict}
        names: {description: "Their names, by PCI address.", type: dict}
        persistence: {description: "Whether they are in persistence mode, by PCI address.", type: dict}
        record: {description: The text of the role's record; null without one., type: str}
        pending: {description: Whether a run was interrupted while it replaced files., type: bool}
        files: {description: "The role's files by path, null for those that aren't there.", type: dict}
        tool: {description: What builds the initramfs., type: str}
        images: {description: The initramfs images where the role has written something., type: list, elements: dict}
        boot_free: {description: Bytes free in C(/boot)., type: int}
        boot_read_only: {description: Whether C(/boot) is mounted read-only., type: bool}
        owner: {description: The file that shows that the GPU Operator's vfio-manager binds the cards., type: str}
        fabric_mode: {description: FABRIC_MODE of the fabric manager's configuration., type: str}
        loadable: {description: Recorded drivers that are still there., type: list, elements: str}
    vgpu:
      description: >-
        What M(kubegpu.share.vgpu) plans from, beside the cards' C(vgpu_host). Its form may change at any time.
      type: dict
      contains:
        record: {description: The text of the role's record; null without one., type: str}
        unit: {description: The text of the unit that restores vGPUs at boot; null without one., type: str}
        names: {description: "Names of types by their ids, as JSON; null where none are kept.", type: str}
        programs: {description: "SHA-256 of the program's files, by path.", type: dict}
        enabled: {description: Whether the unit starts at boot., type: bool}
        systemd: {description: Whether systemd is the machine's init., type: bool}
        read_only: {description: Folders for these files that are on file systems mounted read-only., type: list, elements: str}
        excluded: {description: "Cards of O(exclude), as RV(gpu_node.gpus) has cards.", type: list, elements: dict}
    nouveau:
      description: The kernel's own driver, which conflicts with NVIDIA's.
      type: dict
      contains:
        nova:
          description: >-
            Its successor in the kernel: the loaded C(modules) (V(nova_drm), V(nova_core)), whether anything else uses them (C(in_use)), and whether the
            running kernel has it C(built_in).
          type: dict
        loaded:
          description: Whether it is loaded.
          type: bool
        refcnt:
          description: Its reference count; null where it isn't loaded.
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
          description: Virtual consoles on its framebuffer.
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
          description: The tool that builds initramfs images here (V(initramfs-tools), V(dracut)), or null.
          type: str
        dracut:
          description: Text of this collection's configuration of dracut, or null.
          type: str
        images:
          description: >-
            The initramfs images of the installed kernels, each with C(path), C(release), C(bytes), whether it is C(newer) than the blacklist file, whether
            C(nouveau) and the C(blacklist) are inside (null where it can't be read), and whether an older image is C(kept).
          type: list
          elements: dict
        leftovers:
          description: Images that an interrupted run left in C(/boot).
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
          description: Version that nvidia-smi reports, or null.
          type: str
        cards:
          description: >-
            The cards that nvidia-smi lists: C(index), C(uuid), C(name), C(memory_mib), whether its memory is the machine's (C(unified)), C(address), C(minor),
            C(persistence), C(mig) and C(fabric), the last three null where a card has no such mode, or isn't connected to NVSwitches.
          type: list
          elements: dict
        error:
          description: nvidia-smi's output where it fails or lists a card that it can't read.
          type: str
        code:
          description: NVML's return code of that output; V(0) without an error, null without nvidia-smi or where the code is unknown.
          type: int
        persistence:
          description: Whether all cards have persistence mode on; null where it is unknown.
          type: bool
        persistence_daemon:
          description: >-
            Whether nvidia-persistenced C(enables) persistence mode, by the arguments of its process, or null where it doesn't run; whether its unit is
            C(masked); and the C(files) that role driver wrote for it.
          type: dict
        runfile:
          description: C(version) of the driver that role driver installs from its .run file, and whether that is C(finished); null where it has installed none.
          type: dict
        fabric:
          description: >-
            C(version) of the fabric manager, or empty, whether it is C(needed) because there are NVSwitches, and for those of NVLink 5 (C(nvlink5)), which
            aren't on PCI, the kernel modules that manage them and aren't loaded (C(unloaded)), and those of them that the kernel doesn't have (C(missing)).
            C(at_boot) is whether role driver has them loaded at boot.
          type: dict
        others:
          description: >-
            Sources of the installed driver: V(gpu-operator), V(gke), V(aks), V(eks) or V(vgpu) where a container, the cloud or a vGPU guest provides it, V(runfile), and by packages
            V(nvidia), V(distribution), V(graphics-ppa), V(rpmfusion), V(elrepo), V(negativo17). More than one is a conflict, but for what a cloud installs.
          type: list
          elements: str
        root:
          description: The root of the driver's files, V(/) but for a driver container of the GPU Operator.
          type: str
        excluded:
          description: >-
            What O(exclude) leaves out: the C(cards), each with C(address), C(uuid), C(name) and the C(entry) that names it, the C(unmatched) entries, and
            whether the driver doesn't list a card of PCI (C(unnamed)), whose UUID and model aren't known then.
          type: dict
        licences:
          description: Of a vGPU guest the licence of each card, as nvidia-smi reports it, with C(address), C(product) and C(status).
          type: list
          elements: dict
    memory_limit:
      description: Whether it is C(possible) to limit the GPU memory of a container, and the unmet conditions (C(why)).
      type: dict
    toolkit:
      description: NVIDIA's container toolkit.
      type: dict
      contains:
        version:
          description: Version that nvidia-ctk reports, or null.
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
      description: Modules of dkms, with C(module), C(version), C(kernel) and C(state) (V(added), V(built), V(installed), V(installed-weak)).
      type: list
      elements: dict
    log:
      description: >-
        From the kernel's log since boot, on a machine with a card or a driver: C(xids) with C(address) and C(code), whether a module's key was rejected
        (C(key_rejected)), whether a card isn't supported by the open module (C(unsupported_by_open)) or needs it (C(requires_open)).
      type: dict
    apt:
      description: >-
        Null without dpkg. C(files) and C(keys) (SHA-256) of this collection, C(sources) of all other lists, whether dpkg was C(interrupted), and
        C(unfinished) packages.
      type: dict
    rpm:
      description: >-
        Null without rpm. The package C(manager) (V(dnf), V(dnf5), V(zypper)), C(files) and C(keys) (SHA-256) of this collection, C(imported) keys, all
        C(repositories) with C(file), C(id), C(url) and whether they are C(enabled), C(locks) with the C(lock_path) they stand in and the state of the
        C(lock_plugin), enabled module C(streams), and packages that an interrupted transaction left twice (C(duplicates)).
      type: dict
    packages:
      description: >-
        Installed packages by name, each with C(version) (of rpm with epoch and release), C(held) and C(origin) (dpkg's Maintainer, rpm's Vendor); of rpm
        with all C(versions) where there are several. Those of NVIDIA, kernel headers, dkms and O(packages).
      type: dict
    package_lists:
      description:
        - Null where they weren't asked. C(packages), of each name of the driver's packages, and of the headers and compiled modules for the node's kernels,
          the versions that its package lists have, each with its repositories (URLs with apt, ids otherwise).
        - C(age_hours) since the lists were downloaded, null where that is unknown; C(error), why they can't be read.
        - Without any package nothing is known of the repositories.
      type: dict
    sources_stale:
      description: >-
        Package sources of NVIDIA's earlier container tools, each with C(file), C(text) and C(line_count).
      type: list
      elements: dict
    toolkit_legacy:
      description: The C(record) of such tools that were removed, or an empty text; and the C(drop_ins) of nvidia-ctk that are there.
      type: dict
    runtimes:
      description: >-
        Container runtimes by name (C(containerd), C(docker), C(crio), C(k3s), C(rke2)); null where one isn't installed. Each with its C(version), its
        configuration with credentials masked, the effective configuration as the runtime reports it, and whether it runs with it.
      type: dict
    kubelet:
      description: >-
        Null without one. C(version), the C(endpoint) that it uses, the C(runtime) that this is (V(containerd), V(docker), V(crio), V(k3s), V(rke2) or
        empty) and its C(cgroup_driver) (V(systemd), V(cgroupfs) or empty).
      type: dict
    baseline:
      description: >-
        Null without one. C(path), when it was C(taken) (UTC), the C(own_files) of this collection that were there already, and the C(error) if it
        can't be read; with O(baseline) its C(snapshot), too.
      type: dict
    maintenance:
      description: C(unfinished), whether a run of M(kubegpu.share.kernel_driver) was interrupted while services were stopped.
      type: dict
    images:
      description: The requested references, each with the SHA-256 of the archive it was imported from or an empty text.
      type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem, naming_user, user
from ansible_collections.kubegpu.share.plugins.module_utils._node.facts import ARGUMENTS, observe


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    asked = module.params
    system = RealSystem(asked["sysroot"], module.run_command)

    def collect() -> JsonObject:
        with naming_user():
            gpu_node = observe(
                system, asked["images"], asked["packages"], asked["baseline"], asked["driver_version"], asked["exclude"]
            )
        return {"changed": False, "user": user(), "gpu_node": gpu_node}

    run_module(module, collect)


if __name__ == "__main__":
    main()
