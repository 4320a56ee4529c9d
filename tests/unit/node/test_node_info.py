# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_node_info: each section over made-up trees and scripted commands."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info, _nouveau_apply
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_gpu as gpu
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_host as host
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done, RealSystem
from node_fakes import AptMachine, FakeSystem


class TreeSystem(RealSystem):
    """A real tree of files, scripted commands."""

    def __init__(self, root):
        super().__init__(str(root))

    def run(self, argv, timeout=60, stdin=None):
        return Done(0, "x86_64\n", "") if argv[0] == "uname" else Done(127, "", "")


def put(root, path, text=""):
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


# --------------------------------------------------------------------------- PCI


def pci(root, address, vendor="0x10de", device="0x1eb8", kind="0x030200", driver=None):
    for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
        put(root, f"{gpu.PCI}/{address}/{name}", value + "\n")
    if driver:
        (root / gpu.PCI.lstrip("/") / address / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")


def test_gpus_on_pci_with_what_each_is_bound_to(tmp_path):
    pci(tmp_path, "0000:41:00.0", kind="0x030000", driver="nouveau")
    pci(tmp_path, "0000:01:00.0", driver="vfio-pci")
    pci(tmp_path, "0001:01:00.0", driver="nvidia")
    pci(tmp_path, "0000:02:00.0")
    pci(tmp_path, "0000:01:00.1", kind="0x040300")  # its audio function
    pci(tmp_path, "0000:03:00.0", kind="0x068000")  # an NVSwitch
    pci(tmp_path, "0000:00:02.0", vendor="0x8086", kind="0x030000")
    found = gpu.gpus(TreeSystem(tmp_path))
    assert [(one["address"], one["driver"]) for one in found] == [
        ("0000:01:00.0", "vfio-pci"),
        ("0000:02:00.0", None),
        ("0000:41:00.0", "nouveau"),
        ("0001:01:00.0", "nvidia"),
    ]
    assert found[0] == {
        "address": "0000:01:00.0",
        "vendor": "0x10de",
        "device": "0x1eb8",
        "class": "0x030200",
        "driver": "vfio-pci",
    }


def test_machine_without_pci(tmp_path):
    assert gpu.gpus(TreeSystem(tmp_path)) == []


# --------------------------------------------------------------------------- driver


ROWS = (
    "0, GPU-aaaa, NVIDIA A100-SXM4-40GB, 40960, 00000000:07:00.0, 580.95.05\n"
    "1, GPU-bbbb, NVIDIA H100, 80GB HBM3, 81559, 00000001:0F:00.0, 580.95.05\n"
)


def with_smi(done, **files):
    system = FakeSystem({gpu.SMI: "", **files}, {"timeout -k 2 20 /usr/bin/nvidia-smi --query-gpu": done})
    return gpu.driver(system)


def test_cards_with_minors_that_have_gaps():
    information = {f"{gpu.PROC}/gpus/0001:0f:00.0/information": "Model: \t x\nDevice Minor: \t 3\nGPU Excluded:\t No\n"}
    seen = with_smi(Done(0, ROWS, ""), **information)
    assert seen["version"] == "580.95.05" and seen["error"] is None
    assert seen["cards"] == [
        {
            "index": 0,
            "uuid": "GPU-aaaa",
            "name": "NVIDIA A100-SXM4-40GB",
            "memory_mib": 40960,
            "address": "0000:07:00.0",
            "minor": None,
        },
        {
            "index": 1,
            "uuid": "GPU-bbbb",
            "name": "NVIDIA H100, 80GB HBM3",
            "memory_mib": 81559,
            "address": "0001:0f:00.0",
            "minor": 3,
        },
    ]


@pytest.mark.parametrize(
    ("done", "cards", "words"),
    [
        (Done(124, "", "nvidia-smi didn't end within 20 s"), 0, "nvidia-smi didn't answer within 20 s"),
        (Done(137, ROWS, ""), 0, "nvidia-smi didn't answer within 20 s"),
        (
            Done(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure.\n\n", ""),
            0,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure.",
        ),
        (
            Done(18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n", ""),
            0,
            "Failed to initialize NVML: Driver/library version mismatch NVML library version: 580.95",
        ),
        (Done(6, "No devices were found\n", ""), 0, "No devices were found"),
        (
            Done(15, ROWS.splitlines()[0] + "\nUnable to determine the device handle: GPU is lost\n", ""),
            1,
            "Unable to determine the device handle: GPU is lost",
        ),
        (Done(0, "0, GPU-a, NVIDIA GB10, [N/A], 0000000F:01:00.0, 580.95.05\n", ""), 1, None),
        (Done(0, "0, [Unknown Error], x, 1, 0:1, 5\n", ""), 0, "0, [Unknown Error], x, 1, 0:1, 5"),
        (Done(0, ROWS, "a warning that hurts nobody\n"), 2, None),
        (Done(127, "", "nvidia-smi: libnvidia-ml.so.1 missing"), 0, "nvidia-smi: libnvidia-ml.so.1 missing"),
        (Done(3, "", ""), 0, "nvidia-smi ended with status 3"),
    ],
)
def test_nvidia_smi_that_fails_is_quoted(done, cards, words):
    seen = with_smi(done)
    assert len(seen["cards"]) == cards and seen["error"] == words


def test_no_driver_is_no_error_and_runs_nothing():
    system = FakeSystem()
    seen = gpu.driver(system)
    assert seen == {
        "module_version": None,
        "module_open": None,
        "version": None,
        "cards": [],
        "error": None,
        "others": [],
    }
    assert system.ran == []


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC x", "580.95.05", True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jun 10\n", "535.261.03", False),
        ("", None, None),
    ],
)
def test_kernel_module(text, version, is_open):
    seen = gpu.driver(FakeSystem({f"{gpu.PROC}/version": text} if text else {}))
    assert (seen["module_version"], seen["module_open"]) == (version, is_open)


def test_who_else_manages_the_driver():
    system = FakeSystem({"/usr/bin/nvidia-uninstall": "", "/run/nvidia/driver/usr/bin/nvidia-smi": ""})
    assert gpu.other_managers(system) == ["runfile", "gpu-operator"]
    system = FakeSystem()
    system.folders.add("/run/nvidia/driver")
    assert gpu.other_managers(system) == []


@pytest.mark.parametrize(
    ("out", "version"),
    [
        ("NVIDIA Container Toolkit CLI version 1.20.1\ncommit: abc\n", "1.20.1"),
        ("nvidia-ctk version v1.17.8-rc.1\n", "1.17.8-rc.1"),
        ("NVIDIA Container Toolkit CLI version unknown\n", None),
        ("", None),
    ],
)
def test_toolkit(out, version):
    files = {gpu.CTK: "", "/usr/bin/nvidia-cdi-hook": ""}
    seen = gpu.toolkit(FakeSystem(files, {"/usr/bin/nvidia-ctk --version": Done(0, out, "")}))
    assert seen == {"version": version, "binaries": ["nvidia-ctk", "nvidia-cdi-hook"]}
    assert gpu.toolkit(FakeSystem()) == {"version": None, "binaries": []}


# --------------------------------------------------------------------------- host


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n', ("debian", "12", "bookworm", "debian")),
        ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n', ("ubuntu", "24.04", "", "debian")),
        ('# x\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\n', ("rocky", "9.6", "", "redhat")),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\nVERSION_ID="15.6"\n', ("opensuse-leap", "15.6", "", "suse")),
        ("ID=linuxmint\nID_LIKE='ubuntu debian'\nVERSION_ID=22\n", ("linuxmint", "22", "", "debian")),
        ("ID=alpine\nVERSION_ID=3.20\n", ("alpine", "3.20", "", "alpine")),
        ("ID=debian\nPRETTY_NAME=\"it's\nVERSION_CODENAME=sid\n", ("debian", "", "sid", "debian")),
        ("", ("linux", "", "", "linux")),
    ],
)
def test_distribution(text, expected):
    seen = host.distribution(FakeSystem({"/etc/os-release": text}))
    assert (seen["id"], seen["version"], seen["codename"], seen["family"]) == expected


@pytest.mark.parametrize(("machine", "arch"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("riscv64", "riscv64")])
def test_architecture(machine, arch):
    assert host.distribution(FakeSystem({}, {"uname -m": Done(0, machine + "\n", "")}))["arch"] == arch


def test_kernels_of_a_machine_and_of_a_container():
    files = {
        "/proc/sys/kernel/osrelease": "6.1.0-22-amd64\n",
        "/boot/vmlinuz-6.1.0-18-amd64": "",
        "/boot/vmlinuz-6.1.0-22-amd64": "",
        "/boot/config-6.1.0-22-amd64": "",
    }
    system = FakeSystem(files)
    system.links["/lib/modules/6.1.0-22-amd64/build"] = "/usr/src/linux-headers-6.1.0-22-amd64"
    assert host.kernel(system) == {
        "release": "6.1.0-22-amd64",
        "installed": ["6.1.0-18-amd64", "6.1.0-22-amd64"],
        "headers": True,
    }
    assert host.kernel(FakeSystem({"/proc/sys/kernel/osrelease": "6.8\n"}))["installed"] == []


@pytest.mark.parametrize(("text", "expected"), [("\x06\0\0\0\x01", True), ("\x06\0\0\0\0", False), (None, None)])
def test_secure_boot(text, expected):
    assert host.secure_boot(FakeSystem({host.SECURE_BOOT: text} if text else {})) is expected


def test_services_that_exist():
    shown = (
        "Id=nvidia-persistenced.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
        "Id=nvidia-fabricmanager.service\nLoadState=not-found\nActiveState=inactive\nUnitFileState=\n"
    )
    system = FakeSystem({}, {"systemctl show": Done(0, shown, "")})
    assert host.services(system) == {}
    system.folders.add("/run/systemd/system")
    assert host.services(system) == {"nvidia-persistenced": {"active": True, "enabled": True}}


# --------------------------------------------------------------------------- nouveau


def test_nouveau_section(tmp_path):
    put(tmp_path, "/etc/modprobe.d/blacklist-nouveau.conf", "options nouveau modeset=0\n")
    put(tmp_path, "/usr/lib/modprobe.d/nvidia.conf", "blacklist nouveau\n")
    put(tmp_path, "/etc/modprobe.d/other.conf", "blacklist pcspkr\n")
    put(tmp_path, "/etc/modprobe.d/nvidia.conf.dpkg-old", "blacklist nouveau\n")
    put(tmp_path, "/sys/module/nouveau/refcnt", "2\n")
    seen = _nouveau_apply.observe(TreeSystem(tmp_path), "debian", [])
    assert sorted(seen["files"]) == ["/etc/modprobe.d/blacklist-nouveau.conf", "/usr/lib/modprobe.d/nvidia.conf"]
    assert (seen["loaded"], seen["refcnt"], seen["blacklisted"]) == (True, 2, True)
    put(tmp_path, "/usr/lib/modprobe.d/nvidia.conf", "#blacklist nouveau\n")
    assert _nouveau_apply.observe(TreeSystem(tmp_path), "debian", [])["blacklisted"] is False


# --------------------------------------------------------------------------- the whole


def test_all_sections_from_few_commands(monkeypatch):
    monkeypatch.setattr(_node_info.containerd, "observe", lambda system: {"version": "2.2.9"})
    monkeypatch.setattr(_node_info.images, "observe", lambda system, references: {one: "" for one in references})
    node = AptMachine({})
    node.installed = {"nvidia-driver-cuda": "580.95.05-1", "bash": "5", "libnvidia-ml1": "1", "linux-image-amd64": "6"}
    node.held = {"nvidia-driver-cuda"}
    node.files["/etc/os-release"] = "ID=debian\nVERSION_ID=12\n"
    seen = _node_info.observe(node, ["example.org/a:1"], ["linux-image-*"])
    assert set(seen) == {
        "distribution", "kernel", "secure_boot", "reboot_required", "services", "gpus", "nouveau", "driver", "toolkit",
        "apt", "packages", "runtimes", "images",
    }  # fmt: skip
    assert seen["packages"] == {
        "nvidia-driver-cuda": {"version": "580.95.05-1", "held": True},
        "libnvidia-ml1": {"version": "1", "held": False},
        "linux-image-amd64": {"version": "6", "held": False},
    }
    assert seen["images"] == {"example.org/a:1": ""}
    assert [line.split()[0] for line in node.ran] == ["uname", "dpkg-query"]


def test_no_images_asked_for_no_runtime_asked(monkeypatch):
    monkeypatch.setattr(_node_info.containerd, "observe", lambda system: None)
    monkeypatch.setattr(_node_info.images, "observe", lambda *_arguments: pytest.fail("asked"))
    seen = _node_info.observe(FakeSystem(), [], [])
    assert seen["images"] == {} and seen["runtimes"] == {"containerd": None} and seen["apt"] is None
