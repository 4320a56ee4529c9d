# SPDX-License-Identifier: GPL-3.0-or-later
"""The rule and VFIO's modules in the images of the real initramfs-tools and the real dracut, and out of them again.

Long: each image takes seconds to build. The card is a directory of sysfs, which nothing binds.
"""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check import virtual_node
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nouveau import LISTERS
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import files
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.kernel import RealKernel
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.model import ARGUMENTS, RECORD, options_of
from pci_machine import CARD, GROUPS, PCI, NoPods
from real_initramfs import Machine

pytestmark = pytest.mark.long

both_tools = pytest.mark.parametrize("tool", ["initramfs-tools", "dracut"])


def machine(folder, tool):
    node = Machine(folder / "tree", tool, kernels=1)
    release = next(path.name for path in (node.root / "usr/lib/modules").iterdir())
    node.put("/proc/sys/kernel/osrelease", f"{release}\n")
    for name, text in (
        ("vendor", "0x10de"),
        ("device", "0x2236"),
        ("class", "0x030200"),
        ("driver_override", "(null)"),
        ("modalias", "pci:v000010DEd00002236sv000010DEsd00001482bc03sc02i00"),
    ):
        node.put(f"{PCI}/{CARD}/{name}", f"{text}\n")
    link = node.root / f"{PCI}/{CARD}/iommu_group".lstrip("/")
    link.symlink_to("../../../../kernel/iommu_groups/14")
    node.put(f"{GROUPS}/14/devices/{CARD}/vendor", "0x10de\n")
    return node


def bind(node, **given):
    params = {name: given.get(name, option.get("default")) for name, option in ARGUMENTS.items()}
    return work(options_of({**params, "live": False}), False, node, RealKernel("/nowhere"), NoPods())


def listed(node):
    [path] = [one for one in node.names("/boot") if one.startswith("init")]
    return node.run([LISTERS[node.tool], f"/boot/{path}"]).out


@both_tools
def test_the_image_has_the_rule_and_vfio_and_then_neither(tool, tmp_path):
    node = machine(tmp_path, tool)
    before = {path for path in files.PATHS if node.exists(path)}
    assert bind(node, cards=[CARD])["reboot_required"]
    inside = listed(node)
    for name in (files.RULE, files.MODPROBE, "/vfio-pci.ko", "/vfio.ko", "/vfio_iommu_type1.ko"):
        assert name in inside.replace("\n", "\n/").replace(" ", " /"), name
    # As verify lists it.
    found = virtual_node.evidence(node, RealKernel("/nowhere"))
    assert found is not None
    assert [(image["rule"], image["lacking"], image["newer"]) for image in found["images"]] == [(True, [], True)]
    assert not bind(node, cards=[CARD])["changed"]
    assert bind(node, state="absent")["changed"]
    assert files.RULE[1:] not in listed(node)
    assert {path for path in files.PATHS if node.exists(path)} == before
    assert not node.exists(RECORD)
    assert not bind(node, state="absent")["changed"]


@both_tools
def test_an_image_without_the_modules_is_refused_and_the_old_one_stays(tool, tmp_path):
    node = machine(tmp_path, tool)
    for path in (node.root / "usr/lib/modules").rglob("vfio-pci.ko*"):
        path.unlink()
    boot = node.boot()
    with pytest.raises(ShareError, match="the old /boot/init"):
        bind(node, cards=[CARD])
    assert node.boot() == boot
    bind(node, state="absent")
    assert not [path for path in files.PATHS if node.exists(path)]
