# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_node_info: special cases of each section; whole machines are in test_node_info_trees.py."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._driver import facts as driver
from ansible_collections.kubegpu.share.plugins.module_utils._driver import facts as modules
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nouveau
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nvidia_smi as smi
from ansible_collections.kubegpu.share.plugins.module_utils._host import cached_reader as files
from ansible_collections.kubegpu.share.plugins.module_utils._host import facts as host
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done, target
from ansible_collections.kubegpu.share.plugins.module_utils._node import facts
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus as gpu
from ansible_collections.kubegpu.share.plugins.module_utils._packages import installed as packages
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit import facts as toolkit
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit import memory_limit
from node_fakes import AptMachine, FakeSystem
from node_trees import TreeSystem

# --------------------------------------------------------------------------- reading


def test_a_command_runs_once():
    system = FakeSystem({}, {"a": Done(0, "1", "")})
    once = files.Once(system)
    assert [once.run(["a", "b"]).out, once.run(("a", "b")).out, once.run(["a"], stdin="x").out] == ["1", "1", "1"]
    assert once.run(["a"], stdin="x").out == "1" and system.ran == ["a b", "a", "a"]


def test_an_unreadable_file_counts_as_missing(monkeypatch):
    def fail(_path):
        raise ShareError("/sys/x can't be read: Input/output error")

    def deny(_path):
        raise ShareError("/x can't be listed: Permission denied")

    system = FakeSystem()
    monkeypatch.setattr(system, "read", fail)
    monkeypatch.setattr(system, "names", deny)
    assert files.text(system, "/sys/x") == "" and files.names(system, "/x") == []


@pytest.mark.parametrize(
    ("links", "start", "end"),
    [
        ({}, "/a/b", "/a/b"),
        ({"/a/b": "c"}, "/a/b", "/a/c"),
        ({"/a/b": "../d/c", "/d/c": "/e"}, "/a/b", "/e"),
        ({"/a": "/b", "/b": "/a"}, "/a", "/a"),
        # A directory of the way is a link, too.
        ({"/etc/c": "/data/c", "/data/c/f": "../g"}, "/etc/c/f", "/data/g"),
        ({"/lib": "usr/lib"}, "/lib/f", "/usr/lib/f"),
    ],
)
def test_links_are_followed(links, start, end):
    system = FakeSystem()
    system.links = links
    assert target(system, start) == end


# --------------------------------------------------------------------------- PCI


def test_gpus_and_switches_on_pci(tmp_path):
    devices = {
        "0000:41:00.0": "10de:1eb8 030000 nouveau",
        "0000:01:00.0": "10de:1eb8 030200 vfio-pci",
        "0001:01:00.0": "10de:1eb8 030200 nvidia",
        "0000:02:00.0": "10de:1eb8 030200",
        "0000:01:00.1": "10de:10f8 040300",
        "0000:03:00.0": "10de:1af1 068000 nvidia-nvswitch",
        "0000:04:00.0": "8086:1234 068000",
        "0000:00:02.0": "8086:3e92 030000 i915",
    }
    gpus, switches = gpu.pci(TreeSystem(tmp_path, {"pci": devices}))
    assert [(one["address"], one["driver"], one["class"]) for one in gpus] == [
        ("0000:01:00.0", "vfio-pci", "0x030200"),
        ("0000:02:00.0", None, "0x030200"),
        ("0000:41:00.0", "nouveau", "0x030000"),
        ("0001:01:00.0", "nvidia", "0x030200"),
    ]
    assert switches == [{"address": "0000:03:00.0", "device": "0x1af1", "driver": "nvidia-nvswitch"}]
    assert gpu.pci(FakeSystem()) == ([], [])


# --------------------------------------------------------------------------- nvidia-smi

ROWS = (
    "0, GPU-aaaa, NVIDIA A100-SXM4-40GB, 40960, 00000000:07:00.0, 580.95.05, Enabled, Disabled, Completed\n"
    "1, GPU-bbbb, NVIDIA H100, 80GB HBM3, 81559, 00000001:0F:00.0, 580.95.05, Disabled, [N/A], [N/A]\n"
)
ALL = (*smi.FIELDS, *smi.NEWER_FIELDS)


def test_cards_whose_names_have_commas_and_whose_modes_differ():
    cards, versions, other = smi.parse(ROWS, ALL)
    assert versions == ["580.95.05"] * 2 and other == []
    assert cards[1] == {
        **{"index": 1, "uuid": "GPU-bbbb", "name": "NVIDIA H100, 80GB HBM3", "memory_mib": 81559},
        **{"address": "0001:0f:00.0", "minor": None, "persistence": False, "mig": None},
        **{"unified": False, "fabric": None},
    }
    assert (cards[0]["persistence"], cards[0]["mig"], cards[0]["fabric"]) == (True, False, "completed")


def test_minors_come_from_the_kernel_and_may_have_gaps():
    information = {
        f"{driver.PROC}/gpus/0001:0f:00.0/information": "Model: \t x\nDevice Minor: \t 3\nGPU Excluded:\t No\n"
    }
    system = FakeSystem({smi.SMI: "", **information}, {"timeout -k 2 20 /usr/bin/nvidia-smi": Done(0, ROWS, "")})
    found = driver.driver(system, [], {})
    assert [card["minor"] for card in found["cards"]] == [None, 3]
    assert found["persistence"] is False and found["version"] == "580.95.05" and found["code"] == 0


@pytest.mark.parametrize(
    ("done", "cards", "message", "code"),
    [
        (Done(137, ROWS, ""), 0, "nvidia-smi didn't finish within 20 s", None),
        (Done(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure.\n\n", ""), 0,
         "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure.", 9),
        (Done(4, "Failed to initialize NVML: Insufficient Permissions\n", ""), 0, None, 4),
        (Done(12, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please\n", ""), 0, None, 12),
        (Done(6, "No devices were found\n", ""), 0, "No devices were found", 6),
        (Done(15, ROWS.splitlines()[0] + "\nUnable to determine the device handle: GPU is lost\n", ""), 1,
         "Unable to determine the device handle: GPU is lost", 15),
        (Done(0, "0, GPU-a, NVIDIA GB10, [N/A], 0000000F:01:00.0, 580.95.05, Enabled, [N/A], [N/A]\n", ""), 1, "", 0),
        (Done(0, "0, [Unknown Error], x, 1, 0:1, 5, x, y, z\n", ""), 0,
         "0, [Unknown Error], x, 1, 0:1, 5, x, y, z", 999),
        (Done(0, ROWS, "a warning\n"), 2, "", 0),
        (Done(127, "", "nvidia-smi: libnvidia-ml.so.1 missing"), 0, "nvidia-smi: libnvidia-ml.so.1 missing", None),
        (Done(3, "", ""), 0, "nvidia-smi ended with status 3", None),
    ],
)  # fmt: skip
def test_output_and_code_of_a_failing_nvidia_smi(done, cards, message, code):
    found = smi.parse_result(done, ALL)
    assert len(found["cards"]) == cards and found["code"] == code
    assert found["error"] == (message or None) if message is not None else found["error"]


@pytest.mark.parametrize(
    "unknown", [["mig.mode.current"], ["persistence_mode"], ["persistence_mode", "mig.mode.current"], ["uuid"]]
)
def test_a_newer_field_is_left_out_for_an_older_driver(unknown, tmp_path):
    card = {"uuid": "GPU-a", "pci.bus_id": "0:1", "persistence_mode": "Enabled", "mig.mode.current": "Enabled"}
    common = {"name": "x", "memory.total": 1, "driver_version": "418.1"}
    system = TreeSystem(tmp_path, {"smi": {"unknown": unknown, "all": common, "cards": [card]}})
    found = smi.ask(system)
    if unknown == ["uuid"]:
        assert found["error"] == 'Field "uuid" is not a valid field to query.' and len(system.ran) == 1
        return
    assert found["error"] is None and len(system.ran) == 1 + len(unknown)
    assert found["cards"][0]["persistence"] is (None if "persistence_mode" in unknown else True)
    assert found["cards"][0]["mig"] is (None if "mig.mode.current" in unknown else True)


# --------------------------------------------------------------------------- driver


def test_no_driver_is_no_error_and_runs_nothing():
    system = FakeSystem()
    found = driver.driver(system, [], {})
    assert {found[key] for key in ("module_version", "module_open", "version", "error")} == {None}
    assert (found["loaded"], found["cards"], found["others"], system.ran) == (False, [], [], [])


def test_the_library_behind_debians_alternatives():
    folder, alternative = "/usr/lib/x86_64-linux-gnu", "/etc/alternatives/glx--libnvidia-ml.so.1-x86_64-linux-gnu"
    file = f"{folder}/nvidia/current/libnvidia-ml.so.535.261.03"
    system = FakeSystem({file: ""})
    system.links = {
        f"{folder}/libnvidia-ml.so.1": alternative,
        alternative: f"{folder}/nvidia/current/libnvidia-ml.so.1",
        f"{folder}/nvidia/current/libnvidia-ml.so.1": "libnvidia-ml.so.535.261.03",
    }
    assert driver.library_version(system) == "535.261.03"
    # A dangling link has no version.
    del system.files[file]
    assert driver.library_version(system) == ""


@pytest.mark.parametrize(
    ("name", "version", "origin", "vendor"),
    [
        ("nvidia-driver-cuda", "3:580.95.05-1.el9", "NVIDIA Corporation", "nvidia"),
        ("nvidia-dkms-open", "580.95.05-0ubuntu1", "cudatools <cudatools@nvidia.com>", "nvidia"),
        ("nvidia-kernel-dkms", "535.261.03-1", "Debian NVIDIA Maintainers <pkg-nvidia-devel@lists.debian.org>",
         "distribution"),
        ("nvidia-dkms-580-server", "580.95.05-0ubuntu0.24.04.2", "Ubuntu Core Developers <x@lists.ubuntu.com>",
         "distribution"),
        ("nvidia-dkms-560", "560.35.03-0ubuntu0~gpu24.04.5", "Ubuntu Core Developers <x@lists.ubuntu.com>",
         "graphics-ppa"),
        ("akmod-nvidia", "3:570.153.02-1.el9", "RPM Fusion", "rpmfusion"),
        ("kmod-nvidia", "570.1-1.el9_6.elrepo", "The ELRepo Project (https://elrepo.org)", "elrepo"),
        ("dkms-nvidia", "3:570.153.02-1.el9", "negativo17.org", "negativo17"),
        ("kmod-nvidia-open", "580.95.05-1.el9", "AlmaLinux Packaging Team <packager@almalinux.org>", "distribution"),
        ("nvidia-open-driver-G06-signed-kmp-default", "1", "SUSE LLC <https://www.suse.com/>", "distribution"),
        ("dkms-nvidia", "1", "", "negativo17"),
        ("xorg-x11-drv-nvidia", "1", "", "rpmfusion"),
        ("nvidia-x11-drv", "1", "", "elrepo"),
        ("nvidia-driver", "1", "", ""),
    ],
)  # fmt: skip
def test_vendor_of_a_package(name, version, origin, vendor):
    assert driver.DRIVER_PACKAGE.fullmatch(name)
    assert driver.maker(name, version, origin) == vendor


OTHER_PACKAGES = """libnvidia-container1 nvidia-container-toolkit libnvidia-egl-wayland1 nvidia-modprobe
nvidia-settings nvidia-detect nvidia-driver-pinning-580 nvidia-driver-assistant nvidia-driver-local-repo-ubuntu2404-580
glx-alternative-nvidia nvidia-support nvidia-fabricmanager cuda-drivers kernel-devel"""


@pytest.mark.parametrize("name", OTHER_PACKAGES.split())
def test_package_without_a_driver_is_none_of_the_driver(name):
    assert driver.DRIVER_PACKAGE.fullmatch(name) is None


def test_an_empty_folder_of_the_gpu_operator_is_no_driver():
    system = FakeSystem()
    system.folders.add("/run/nvidia/driver")
    assert driver.other_managers(system, {}) == []


def test_modules_that_manage_nvswitches_of_nvlink_5():
    dep = "/lib/modules/6.1/modules.dep"
    files = {
        "/sys/module/mlx5_ib/refcnt": "0",
        dep: "kernel/drivers/infiniband/core/ib_umad.ko.xz: kernel/drivers/infiniband/core/ib_core.ko.xz\n",
    }
    cards = [{"device": "0x2901", "generation": "blackwell"}] * 8
    found = driver.fabric(FakeSystem(files), cards, [], "6.1")
    assert (found["unloaded"], found["missing"]) == (["ib_umad"], [])
    assert driver.fabric(FakeSystem({}), cards, [], "6.1")["missing"] == ["mlx5_ib", "ib_umad"]
    # Where the switches are on PCI, or there are none, no such module is needed.
    assert driver.fabric(FakeSystem({}), cards[:1], [], "6.1")["unloaded"] == []


def test_product_data_is_read_only_where_hidden_switches_can_be():
    vpd = f"{driver.INFINIBAND}/mlx5_0/device/vpd"
    system = FakeSystem({vpd: "SMDL=SW_MNG"})
    for generation, needed in (("hopper", False), ("blackwell", True)):
        assert driver.fabric(system, [{"device": "0x1", "generation": generation}], [], "6.1")["needed"] is needed
    card = {"device": "0x1", "generation": "blackwell"}
    assert driver.fabric(FakeSystem({vpd: "ConnectX-7"}), [card], [], "6.1")["needed"] is False


# --------------------------------------------------------------------------- toolkit and CDI


@pytest.mark.parametrize(
    ("out", "version"),
    [
        ("NVIDIA Container Toolkit CLI version 1.20.1\ncommit: abc\n", "1.20.1"),
        ("nvidia-ctk version v1.17.8-rc.1\n", "1.17.8-rc.1"),
        ("NVIDIA Container Toolkit CLI version unknown\n", None),
        ("", None),
    ],
)
def test_version_of_the_toolkit(out, version):
    files = {toolkit.CTK: "", "/usr/bin/nvidia-cdi-hook": ""}
    found = toolkit.toolkit(FakeSystem(files, {"/usr/bin/nvidia-ctk --version": Done(0, out, "")}), {})
    assert (found["version"], found["binaries"]) == (version, ["nvidia-ctk", "nvidia-cdi-hook"])
    assert toolkit.toolkit(FakeSystem(), {})["version"] is None


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("", "auto"),
        ('[nvidia-container-runtime]\nmode = "cdi"\n', "cdi"),
        ("[nvidia-container-runtime]\n  mode = 'legacy' # mine\n", "legacy"),
        ('[nvidia-container-runtime]\n#mode = "cdi"\n', "auto"),
        ('[nvidia-container-runtime.modes.cdi]\nmode = "x"\n[nvidia-container-runtime]\nlog-level = "info"\n', "auto"),
        ('mode = "x"\n', "auto"),
        ('["nvidia-container-runtime"] # x\n"mode" = "legacy"\n', "legacy"),
        ("\ufeffnvidia-container-runtime.mode = 'legacy'\n", "legacy"),
        ('nvidia-container-runtime = { log-level = "info", mode = "legacy" }\n', "legacy"),
        ('[nvidia-container-runtime]\nmode = """legacy"""\n', "legacy"),
        ('[nvidia-container-runtime]\nmode = ""\n', "auto"),
    ],
)
def test_mode_of_the_runtime(text, mode):
    assert toolkit.mode_in(text) == mode


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("kind: nvidia.com/gpu\ndevices:\n- name: a\n  containerEdits:\n    env:\n    - X=1\n- name: b\n", 2),
        ("devices:\n  - name: a\n    containerEdits:\n      env:\n      - X=1\nkind: nvidia.com/gpu\n", 1),
        ("kind: nvidia.com/gpu\ndevices: []\n", 0),
        ("kind: nvidia.com/gpu\n", 0),
    ],
)
def test_devices_of_a_spec(text, devices):
    assert toolkit.parse_yaml(text)["devices"] == devices


@pytest.mark.parametrize("text", ["", "{", "[]", '{"devices": []}', '{"kind": 3}'])
def test_files_that_are_no_spec(text):
    assert toolkit.parse_json(text) is None and toolkit.parse_yaml(text) is None


def test_of_several_drivers_in_cdi_specs_the_oldest_is_reported():
    text = "".join(f"/usr/lib/libcuda.so.{one}\n" for one in ("570.133.20", "570.9.1", "580.95.05"))
    system = FakeSystem({f"{toolkit.CDI[0]}/nvidia.yaml": f"cdiVersion: 0.6.0\nkind: nvidia.com/gpu\n{text}"})
    assert toolkit.cdi(system, "580.95.05")["driver_version"] == "570.9.1"


@pytest.mark.parametrize(
    ("driver_version", "toolkit_version", "cgroup", "mig", "unmet"),
    [
        ("615.10", "1.20.1", 2, {}, 0),
        ("620.1", "1.21.0-rc.1", 2, {}, 0),
        ("610.99.99", "1.20.0", 2, {}, 2),
        ("", "", 0, {3: True}, 4),
        ("615.10", "1.20.1", 2, {0: False, 1: True}, 0),
    ],
)
def test_memory_limit_lists_every_unmet_condition(driver_version, toolkit_version, cgroup, mig, unmet):
    found = memory_limit.conditions(driver_version, toolkit_version, cgroup, mig)
    assert found["possible"] is (unmet == 0) and len(found["why"]) == unmet


# --------------------------------------------------------------------------- host


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('# x\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\n', ("rocky", "9.6", 9, "", "redhat")),
        ('ID="almalinux"\nVERSION_ID="10.0"\n', ("almalinux", "10.0", 10, "", "redhat")),
        ('ID="ol"\nID_LIKE="fedora"\nVERSION_ID="8.10"\n', ("ol", "8.10", 8, "", "redhat")),
        ('ID="sles"\nID_LIKE="suse"\nVERSION_ID="15.6"\n', ("sles", "15.6", 15, "", "suse")),
        ("ID=linuxmint\nID_LIKE='ubuntu debian'\nVERSION_ID=22\n", ("linuxmint", "22", 22, "", "debian")),
        ("ID=alpine\nVERSION_ID=3.20\n", ("alpine", "3.20", 3, "", "alpine")),
        ("ID=debian\nPRETTY_NAME=\"it's\nVERSION_CODENAME=sid\n", ("debian", "", 0, "sid", "debian")),
        ("", ("linux", "", 0, "", "linux")),
    ],
)
def test_distribution(text, expected):
    found = host.distribution(FakeSystem({"/etc/os-release": text}))
    assert (found["id"], found["version"], found["major"], found["codename"], found["family"]) == expected


@pytest.mark.parametrize(("machine", "arch"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("riscv64", "riscv64")])
def test_architecture(machine, arch):
    assert host.distribution(FakeSystem({}, {"uname -m": Done(0, machine + "\n", "")}))["arch"] == arch


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("vmlinuz-6.1.0-22-amd64", "6.1.0-22-amd64"),
        ("vmlinuz-5.14.0-570.el9.x86_64", "5.14.0-570.el9.x86_64"),
        ("Image-6.4.0-150600.21-default", "6.4.0-150600.21-default"),
        ("vmlinuz-0-rescue-0123456789abcdef", None),
        (".vmlinuz-5.14.0-570.el9.x86_64.hmac", None),
        ("vmlinuz-6.1.0-22-amd64.dpkg-tmp", None),
        ("vmlinuz", None),
        ("vmlinuz.old", None),
        ("config-6.1.0-22-amd64", None),
    ],
)
def test_kernels_in_boot_are_listed(name, release):
    assert host.kernel(FakeSystem({f"/boot/{name}": ""}))["installed"] == ([release] if release else [])


def test_a_dangling_link_to_headers():
    system = FakeSystem({"/proc/sys/kernel/osrelease": "5.14\n"})
    system.links["/lib/modules/5.14/build"] = "/usr/src/kernels/5.14"
    assert host.kernel(system)["headers"] is False
    system.files["/usr/src/kernels/5.14/Makefile"] = ""
    assert host.kernel(system)["headers"] is True


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("updates/dkms/nvidia.ko:", ["nvidia"]),
        ("kernel/nvidia-580-open/nvidia.ko.zst: kernel/x.ko", ["nvidia"]),
        ("updates/dkms/nvidia-current.ko:", ["nvidia-current"]),
        ("updates/dkms/nvidia-current-drm.ko: updates/dkms/nvidia-current.ko", []),
        ("updates/dkms/nvidia-tesla-470.ko.xz:", ["nvidia-tesla-470"]),
        ("updates/dkms/nvidia-uvm.ko: updates/dkms/nvidia.ko", []),
        ("kernel/drivers/video/fbdev/nvidia/nvidiafb.ko:", []),
        ("kernel/drivers/net/x.ko: updates/nvidia.ko", []),
    ],
)
def test_modules_of_the_driver(line, names):
    assert host.driver_modules(FakeSystem({"/lib/modules/6.1/modules.dep": line + "\n"}), "6.1") == names


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Linux version 6.1 (x@y) (gcc-12 (Debian 12.2.0-14) 12.2.0, GNU ld 2.40) #1", "12.2.0"),
        ("Linux version 3.10 (x@y) (gcc version 4.8.5 20150623 (Red Hat 4.8.5-44) (GCC) ) #1", "4.8.5"),
        ("Linux version 5.14 (x@y) (gcc (GCC) 11.5.0 20240719 (Red Hat 11.5.0-5), GNU ld) #1", "11.5.0"),
        ("Linux version 6.8 (x@y) (x86_64-linux-gnu-gcc-13 (Ubuntu 13.3.0-6) 13.3.0, GNU ld) #1", "13.3.0"),
        ("Linux version 6.12 (x@y) (Debian clang version 19.1.7, Debian LLD 19.1.7) #1", ""),
        ("", ""),
    ],
)
def test_compiler_of_a_kernel(text, version):
    assert host.compiled_by(text) == version


@pytest.mark.parametrize("path", host.REBOOT)
def test_reboot_required(path):
    assert host.reboot_required(FakeSystem({path: ""})) is True
    assert host.reboot_required(FakeSystem()) is False


def test_only_existing_services_are_listed():
    shown = (
        "Id=nvidia-persistenced.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
        "Id=dnf-automatic.timer\nLoadState=loaded\nActiveState=inactive\nUnitFileState=disabled\n\n"
        "Id=nvidia-fabricmanager.service\nLoadState=not-found\nActiveState=inactive\nUnitFileState=\n"
    )
    system = FakeSystem({}, {"systemctl show": Done(0, shown, "")})
    assert host.services(system) == {}
    system.folders.add("/run/systemd/system")
    assert host.services(system) == {
        "nvidia-persistenced": {"active": True, "enabled": True},
        "dnf-automatic.timer": {"active": False, "enabled": False},
    }


# --------------------------------------------------------------------------- security


@pytest.mark.parametrize(("text", "expected"), [("\x06\0\0\0\x01", True), ("\x06\0\0\0\0", False), (None, None)])
def test_secure_boot(text, expected):
    assert facts.secure_boot(FakeSystem({facts.SECURE_BOOT: text} if text else {})) is expected


def test_permissive_selinux():
    assert facts.observe_security(FakeSystem({"/sys/fs/selinux/enforce": "0"}))["selinux"] == "permissive"


DROP_IN = f"{facts.DKMS}.d/x.conf"


@pytest.mark.parametrize(
    ("distribution", "files", "key"),
    [
        ("debian", {}, ""),
        ("debian", {facts.DKMS_KEY: "", facts.SHIM_KEY: ""}, facts.DKMS_KEY),
        ("ubuntu", {facts.DKMS_KEY: "", facts.SHIM_KEY: ""}, facts.SHIM_KEY),
        ("rocky", {facts.AKMODS_KEY: ""}, facts.AKMODS_KEY),
        ("debian", {facts.DKMS: "#mok_certificate=/a\n", "/a": "", facts.DKMS_KEY: ""}, facts.DKMS_KEY),
        ("debian", {facts.DKMS: 'mok_certificate="/a"\n', "/a": "", facts.DKMS_KEY: ""}, "/a"),
        ("debian", {facts.DKMS: "mok_certificate=/a", DROP_IN: "mok_certificate=/b", "/a": "", "/b": ""}, "/b"),
        ("debian", {facts.DKMS: "mok_certificate=$tree/mok.pub", facts.DKMS_KEY: ""}, facts.DKMS_KEY),
    ],
)  # fmt: skip
def test_key_that_modules_are_signed_with(distribution, files, key):
    assert facts.signing_key(FakeSystem(files), distribution) == key


@pytest.mark.parametrize(
    ("output", "enrolled", "pending"),
    [
        ("/k is already enrolled\n", True, False),
        ("/k is already in db\n", True, False),
        ("/k is already in the enrollment request\n", False, True),
        ("/k is not enrolled\n", False, False),
        ("mokutil: not found\n", None, None),
    ],
)
def test_enrolment_of_the_key(output, enrolled, pending):
    system = FakeSystem({facts.DKMS_KEY: ""}, {"mokutil --test-key": Done(1, output, "")})
    assert facts.mok(system, "debian", True) == {"key": facts.DKMS_KEY, "enrolled": enrolled, "pending": pending}
    assert facts.mok(system, "debian", False)["enrolled"] is None
    assert len(system.ran) == 1, "mokutil runs only under Secure Boot"


# --------------------------------------------------------------------------- dkms and the log


def test_states_of_dkms():
    tree = "/var/lib/dkms/nvidia"
    system = FakeSystem(
        {f"{tree}/580.1/6.1/x86_64/module/nvidia.ko": "", f"{tree}/580.1/6.2/x86_64/module/nvidia.ko": ""}
    )
    system.links = {
        f"{tree}/580.1/source": "/usr/src/nvidia-580.1",
        f"{tree}/590.1/source": "/usr/src/nvidia-590.1",
        f"{tree}/kernel-6.2-x86_64": "580.1/6.2/x86_64",
        f"{tree}/kernel-6.3-x86_64": "580.1/6.2/x86_64",
    }
    assert [(row["version"], row["kernel"], row["state"]) for row in modules.dkms(system)] == [
        ("580.1", "6.1", "built"),
        ("580.1", "6.2", "installed"),
        ("580.1", "6.3", "installed-weak"),
        ("590.1", "", "added"),
    ]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("nvidia: Loading of unsigned module is rejected", "key_rejected"),
        ("Loading of module with unavailable key is rejected", "key_rejected"),
        ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service", "key_rejected"),
        ("NVRM: installed in this system is not supported by open", "unsupported_by_open"),
        ("NVRM: installed in this system requires use of the NVIDIA open kernel modules.", "requires_open"),
        ("nvidia: module verification failed: signature and/or required key missing - tainting kernel", None),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05", None),
    ],
)
def test_errors_in_the_log(line, key):
    found = modules.log(FakeSystem({}, {"dmesg": Done(0, f"[ 1.0] {line}\n", "")}), True)
    assert {name for name in ("key_rejected", "unsupported_by_open", "requires_open") if found[name]} == {key} - {None}


@pytest.mark.parametrize(
    ("line", "address"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "0000:3b:00.0"),
        ("NVRM: Xid (0000:3B:00): 79", "0000:3b:00.0"),
        ("NVRM: Xid (PCI:0000:3b:00.0): 79", "0000:3b:00.0"),
    ],
)
def test_xids_in_the_log(line, address):
    assert list(modules.xids(line)) == [(address, 79)]


def test_a_log_that_cant_be_read_is_empty():
    system = FakeSystem({}, {"dmesg": Done(1, "", "dmesg: read kernel buffer failed: Operation not permitted")})
    assert modules.log(system, True)["xids"] == []


# --------------------------------------------------------------------------- nouveau


def test_nouveau_section(tmp_path):
    blacklist = "/usr/lib/modprobe.d/nvidia.conf"
    texts = {
        "/etc/modprobe.d/blacklist-nouveau.conf": "options nouveau modeset=0\n",
        blacklist: "blacklist nouveau\n",
        "/etc/modprobe.d/other.conf": "blacklist pcspkr\n",
        "/etc/modprobe.d/nvidia.conf.dpkg-old": "blacklist nouveau\n",
        "/sys/module/nouveau/refcnt": "2\n",
    }
    system = TreeSystem(tmp_path, {"files": texts})
    found = nouveau.observe(system, "debian", [])
    assert sorted(found["files"]) == ["/etc/modprobe.d/blacklist-nouveau.conf", blacklist]
    assert (found["loaded"], found["refcnt"], found["blacklisted"]) == (True, 2, True)
    (tmp_path / blacklist.lstrip("/")).write_text("#blacklist nouveau\n")
    assert nouveau.observe(system, "debian", [])["blacklisted"] is False


# --------------------------------------------------------------------------- all sections


def test_packages_that_are_returned(monkeypatch):
    monkeypatch.setattr(facts.images, "observe", lambda system, references: {reference: "" for reference in references})
    node = AptMachine({})
    node.installed = {"nvidia-driver-cuda": "580.95.05-1", "bash": "5", "libnvidia-ml1": "1", "linux-image-amd64": "6"}
    node.held = {"nvidia-driver-cuda"}
    node.files["/etc/os-release"] = "ID=debian\nVERSION_ID=12\n"
    found = facts.observe(node, ["example.org/a:1"], ["linux-image-*"])
    assert {name: (package["version"], package["held"]) for name, package in found["packages"].items()} == {
        "nvidia-driver-cuda": ("580.95.05-1", True),
        "libnvidia-ml1": ("1", False),
        "linux-image-amd64": ("6", False),
    }
    assert all("origin" in package for package in found["packages"].values())
    assert found["images"] == {"example.org/a:1": ""}


@pytest.mark.parametrize(
    ("family", "databases", "which"),
    [
        ("debian", ["dpkg"], "apt"),
        ("debian", ["dpkg", "rpm"], "apt"),
        ("redhat", ["rpm"], "rpm"),
        ("redhat", ["dpkg", "rpm"], "rpm"),
        ("suse", ["rpm"], "rpm"),
        ("azurelinux", ["rpm"], "rpm"),
        ("linuxfromscratch", ["dpkg"], "apt"),
        ("alpine", [], None),
    ],
)
def test_package_database_by_distribution(family, databases, which, tmp_path):
    rows = [["dkms", "3.0-1", "x"]]
    found = packages.observe(TreeSystem(tmp_path, dict.fromkeys(databases, rows)), family, "amd64")
    assert [name for name in ("apt", "rpm") if found[name] is not None] == ([which] if which else [])
    assert list(found["packages"]) == (["dkms"] if which else [])


def test_without_requested_images_no_runtime_is_queried(monkeypatch):
    monkeypatch.setattr(facts.images, "observe", lambda *_arguments: pytest.fail("asked"))
    assert facts.observe(FakeSystem())["images"] == {}
