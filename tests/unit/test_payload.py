# SPDX-License-Identifier: GPL-3.0-or-later
"""The size of each module's payload: the files of this collection in the archive that ansible-core sends to a node."""

from __future__ import annotations

import base64
import io
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from ansible.executor.module_common import modify_module
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible_collections.kubegpu.share.plugins.modules import gpu_node_info

MODULES = Path(gpu_node_info.__file__).parent
# An archive begins with "PK\\3\\4"; ansible-core embeds it in base64.
ARCHIVE = re.compile(rb"UEsDB[A-Za-z0-9+/]+=*")
# Most files and KiB per module. Lower an entry when a module gets smaller; raise it only for what the node needs.
# Modules that send requests to the cluster run on the controller and have both clients, of which they import the one
# with the library kubernetes only for kubeconfigs that need it.
LIMITS: dict[str, tuple[int, int]] = {
    "vgpu": (16, 96),
    "virtual_machines_info": (26, 130),
    "kata_info": (16, 119),
    "kata_handler": (16, 128),
    "airgap_files": (5, 17),
    "airgap_packages": (32, 247),
    "backend_files": (13, 76),
    "backend_objects": (26, 191),
    "cluster_info": (41, 310),
    "cluster_objects": (19, 143),
    "container_runtime": (23, 178),
    "control_plane_info": (62, 437),
    "driver_runfile": (8, 30),
    "gpu_acceptance": (41, 342),
    "gpu_allocation_check": (66, 622),
    "gpu_allocation_info": (29, 236),
    "gpu_node_info": (56, 370),
    "gpu_operator": (20, 149),
    "gpu_operator_setup": (27, 215),
    "helm_chart": (6, 28),
    "image_build": (8, 40),
    "image_import": (14, 110),
    "kernel_arguments": (20, 127),
    "kernel_driver": (10, 48),
    "kube_scheduler": (22, 212),
    "kubeadm_config": (13, 68),
    "kubelet_devices_info": (14, 98),
    "kubevirt_devices": (19, 140),
    "machine_config": (16, 101),
    "node_baseline": (58, 384),
    "node_switch": (25, 182),
    "nouveau": (16, 75),
    "nvml_info": (13, 83),
    "openshift_scheduler": (22, 168),
    "pci_binding": (49, 303),
    "pinned_packages": (25, 173),
    "service_account_kubeconfig": (13, 72),
    "setup_record": (14, 84),
    "toolkit_config": (17, 83),
}
# For a module that has no entry yet.
DEFAULT = (15, 75)


class Payload(NamedTuple):
    files: int
    kib: int


def payload(name: str) -> Payload:
    """Build a module as ansible-core sends it, and count what is of this collection beside the module itself."""
    built = modify_module(
        module_name=f"kubegpu.share.{name}",
        module_path=str(MODULES / f"{name}.py"),
        module_args={},
        templar=Templar(loader=DataLoader()),
        task_vars={"ansible_python_interpreter": "/usr/bin/python3"},
    )
    archive = max(ARCHIVE.findall(built.b_module_data), key=len)
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(archive))) as content:
        sizes = [one.file_size for one in content.infolist() if "/share/plugins/module_utils/" in one.filename]
    sizes = [size for size in sizes if size]
    return Payload(len(sizes), -(-sum(sizes) // 1024))


def modules() -> list[str]:
    """Names of the modules that run somewhere: the others are the documentation of an action plugin."""
    return sorted(path.stem for path in MODULES.glob("*.py") if "def main" in path.read_text())


@pytest.mark.parametrize("name", modules())
def test_a_module_sends_only_what_it_needs(name: str) -> None:
    files, kib = LIMITS.get(name, DEFAULT)
    found = payload(name)
    assert found.files <= files, f"{name} sends {found.files} files, more than {files}"
    assert found.kib <= kib, f"{name} sends {found.kib} KiB, more than {kib}"
