# SPDX-License-Identifier: GPL-3.0-or-later
"""Conflicts with the driver are detected before anything changes, with the command that resolves them."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._driver.conflicts import IDS, conflicts

CUDA = "https://developer.download.nvidia.com/compute/cuda/repos/"


def deb(packages=None, sources=(), others=(), id="debian", version="12", keys=()):
    return {
        "distribution": {"id": id, "version": version, "family": "debian"},
        "packages": {
            name: {"version": "580.95.05-1", "held": False, "origin": "", **row}
            for name, row in (packages or {}).items()
        },
        "apt": {"sources": list(sources), "keys": {key: "" for key in keys}},
        "driver": {"others": list(others)},
    }


def rpm(packages=None, repositories=(), others=(), id="rocky", family="redhat", keys=()):
    return {
        "distribution": {"id": id, "version": "9.6", "family": family},
        "packages": {
            name: {"version": "3:580.95.05-1.el9", "origin": "", **row} for name, row in (packages or {}).items()
        },
        "apt": None,
        "rpm": {"repositories": list(repositories), "keys": {}, "imported": list(keys)},
        "driver": {"others": list(others)},
    }


def ubuntu(packages=None, sources=(), others=()):
    return deb(packages, sources, others, id="ubuntu", version="22.04")


NEGATIVO17 = {"id": "fedora-nvidia", "url": "https://negativo17.org/repos/nvidia/", "file": "/x.repo", "enabled": True}


def source(url, file="/etc/apt/sources.list.d/x.list", signed_by=""):
    return {"file": file, "url": url, "suite": "/", "signed_by": signed_by}


CASES = [
    # node, changed options, id, part of the finding, part of the remedy
    (deb(others=["runfile"]), {}, "driver-runfile", "from a .run file", "/usr/bin/nvidia-uninstall --silent"),
    (deb({"nvidia-driver-cuda": {}, "nvidia-container-toolkit": {}}), {"source": "runfile"}, "driver-packages-present",
     "has the driver's packages nvidia-driver-cuda", "run 'apt-get purge nvidia-driver-cuda', or"),
    (deb(others=["gpu-operator", "runfile"]), {}, "driver-twice",
     "the driver container of NVIDIA's GPU Operator, and one of its own: its .run file", "driver.enabled=false"),
    (rpm({"akmod-nvidia": {}, "xorg-x11-drv-nvidia-cuda": {}}, others=["rpmfusion"]), {}, "driver-rpmfusion",
     "RPM Fusion's akmod-nvidia, xorg-x11-drv-nvidia-cuda", "dnf remove akmod-nvidia xorg-x11-drv-nvidia-cuda"),
    (rpm({"kmod-nvidia": {"origin": "The ELRepo Project (http://elrepo.org)"}, "nvidia-x11-drv": {}}), {},
     "driver-elrepo", "ELRepo's kmod-nvidia, nvidia-x11-drv", "dnf remove kmod-nvidia nvidia-x11-drv"),
    (rpm(repositories=[NEGATIVO17]), {}, "driver-negativo17", "negativo17's repository enabled", "rm /x.repo"),
    (rpm({"nvidia-driver": {"origin": "negativo17 - Simone Caronni"}}), {}, "driver-negativo17",
     "negativo17's nvidia-driver", "dnf remove nvidia-driver"),
    (ubuntu(sources=[source("https://ppa.launchpadcontent.net/graphics-drivers/ppa/ubuntu")]), {},
     "driver-graphics-ppa", "the graphics-drivers PPA in /etc/apt/sources.list.d/x.list",
     "add-apt-repository --remove ppa:graphics-drivers/ppa"),
    (deb({"nvidia-tesla-470-driver": {"version": "470.256.02-1"}}), {}, "driver-debian-legacy",
     "nvidia-tesla-470-driver", "apt-get purge 'nvidia-legacy-*' 'nvidia-tesla-*'"),
    (deb({"nvidia-legacy-390xx-driver": {"version": "390.157-1"}}), {}, "driver-debian-legacy",
     "nvidia-legacy-390xx-driver", "apt-get purge"),
    # The archive's packages where NVIDIA's are chosen, and the reverse.
    (deb({"nvidia-open-kernel-dkms": {"version": "535.261.03-1"}}), {}, "driver-other-source",
     "nvidia-open-kernel-dkms from the distribution, and driver_source is repository",
     "apt-get purge nvidia-open-kernel-dkms"),
    (deb({"nvidia-smi": {"version": "535.261.03-1~deb12u1"}, "nvidia-container-toolkit": {"version": "1.20.1-1"}}), {},
     "driver-other-source", "nvidia-smi", "apt-get purge nvidia-smi'"),
    (ubuntu({"nvidia-utils-580-server": {"version": "580.95.05-0ubuntu0.22.04.2"}}), {},
     "driver-other-source", "nvidia-utils-580-server", "apt-get purge"),
    (ubuntu({"nvidia-dkms-580": {"version": "580.95.05-0ubuntu0.24.04.2"}}), {},
     "driver-other-source", "nvidia-dkms-580 from the distribution", "apt-get purge nvidia-dkms-580"),
    (deb({"nvidia-driver-cuda": {}}), {"source": "distribution"}, "driver-other-source",
     "nvidia-driver-cuda from NVIDIA's repository, and driver_source is distribution",
     "apt-get purge nvidia-driver-cuda"),
    (ubuntu({"libnvidia-compute-580": {"version": "580.95.05-0ubuntu1"}}), {"source": "distribution"},
     "driver-other-source", "libnvidia-compute-580", "apt-get purge"),
    (rpm({"kmod-nvidia-open": {}, "nvidia-container-toolkit": {}}, others=["distribution"], id="almalinux"), {},
     "driver-other-source", "kmod-nvidia-open from the distribution", "dnf remove kmod-nvidia-open'"),
    (rpm({"nvidia-open-driver-G06-signed-kmp-default": {}}, others=["distribution"], family="suse", id="sles"), {},
     "driver-other-source", "nvidia-open-driver-G06-signed-kmp-default", "zypper remove"),
    # Keys and lists.
    (deb({"cuda-keyring": {"version": "1.0-1"}}), {}, "driver-old-key", "cuda-keyring 1.0-1",
     "apt-get purge cuda-keyring"),
    (deb(sources=[source(CUDA + "debian12/x86_64/", signed_by="/usr/share/keyrings/7fa2af80.gpg")]), {},
     "driver-old-key", "/etc/apt/sources.list.d/x.list, which trusts", "rm /etc/apt/sources.list.d/x.list"),
    (rpm(keys=["7fa2af80-576db785"]), {}, "driver-old-key", "7fa2af80", "rpm -e gpg-pubkey-7fa2af80"),
    (deb(sources=[source(CUDA + "debian11/x86_64/")]), {}, "driver-other-release",
     "repository for debian11 in /etc/apt/sources.list.d/x.list and is debian12",
     "apt-get purge cuda-keyring; rm -f /etc/apt/sources.list.d/x.list"),
    (deb({"cuda-keyring": {"version": "1.1-1"}}, [source(CUDA + "debian12/x86_64/", signed_by="/c.gpg")]),
     {"repo_url": CUDA + "debian12/x86_64"}, "driver-source-twice", "already, with a key of its own",
     "apt-get purge cuda-keyring"),
    # Tools.
    (deb({"dkms": {"version": "3.0.10-8", "held": True}}), {}, "driver-dkms-old",
     "dkms 3.0.10-8, and driver 580.95.05 is built with 3.1.8", "apt-mark unhold dkms"),
    (deb({"dkms": {"version": "3.0.10-8"}}), {"source": "packages"}, "driver-dkms-old", "3.1.8", "install dkms 3.1.8"),
]  # fmt: skip
DEFAULTS = {"state": "present", "source": "repository", "version": "580.95.05"}


@pytest.mark.parametrize(("node", "changes", "id", "found", "remedy"), CASES)
def test_each_conflict_is_detected_with_its_remedy(node, changes, id, found, remedy):
    all_found = conflicts(node, **{**DEFAULTS, **changes})
    assert [one["id"] for one in all_found] == [id]
    assert found in all_found[0]["found"] and remedy in all_found[0]["remedy"]
    assert all_found[0]["found"].startswith("has ")


def test_every_conflict_id_has_a_case_and_a_description():
    assert {case[2] for case in CASES} == set(IDS)
    assert all(text.endswith(".") for text in IDS.values())


@pytest.mark.parametrize("state", ["external", "absent"])
def test_no_conflict_where_nothing_is_installed(state):
    assert conflicts(deb(others=["runfile", "gpu-operator"]), **{**DEFAULTS, "state": state}) == []


COMPATIBLE = [
    (deb(), {}),
    ({}, {}),
    # The role's own packages, whatever maintainer NVIDIA's packages name.
    (deb({"nvidia-driver-cuda": {}, "nvidia-kernel-open-dkms": {}, "libcuda1": {}}, others=["distribution"]), {}),
    (ubuntu({name: {"version": "580.95.05-0ubuntu1"} for name in ("libnvidia-compute-580", "nvidia-dkms-580-open")},
            others=["distribution"]), {}),
    (ubuntu({name: {"version": "580.95.05-0ubuntu0.22.04.2"} for name in ("nvidia-utils-580-server",
             "libnvidia-compute-580-server", "linux-modules-nvidia-580-server-open-5.15.0-144-generic")}),
     {"source": "distribution"}),
    (deb({"nvidia-smi": {"version": "535.261.03-1~deb12u1"}}), {"source": "distribution", "version": "535.261.03"}),
    (rpm({"nvidia-driver-cuda": {}}, others=["nvidia"]), {}),
    (rpm({"nvidia-open-kmod": {}, "nvidia-driver-cuda": {}}, others=["distribution", "nvidia"]),
     {"source": "distribution"}),
    # Our own list of NVIDIA's repository, a newer keyring beside another mirror, a dkms that may be replaced.
    (deb(sources=[source(CUDA + "debian12/x86_64/", "/etc/apt/sources.list.d/kubegpu-cuda.sources")]), {}),
    (deb({"cuda-keyring": {"version": "1.1-1"}}), {}),
    (deb({"dkms": {"version": "3.0.10-8"}}), {}),
    (deb({"dkms": {"version": "3.0.10-8", "held": True}}), {"version": "535.261.03"}),
    # A toolkit for CUDA from the archive is no driver.
    (deb({"nvidia-cuda-toolkit": {"version": "11.8.89~11.8.0-5~deb12u1"}}), {}),
    (deb(others=["runfile"]), {"source": "runfile"}),
    (rpm(repositories=[{**NEGATIVO17, "enabled": False}]), {}),
    # Drivers that others provide stay; AKS' is from a .run file, and EKS' is NVIDIA's packages.
    (deb(others=["gpu-operator"]), {}),
    (ubuntu(others=["aks", "runfile"]), {}),
    (rpm({"nvidia-driver-cuda": {}}, others=["eks", "nvidia"]), {"source": "distribution"}),
]  # fmt: skip


@pytest.mark.parametrize(("node", "changes"), COMPATIBLE)
def test_compatible_installation_is_no_conflict(node, changes):
    assert conflicts(node, **{**DEFAULTS, "repo_url": "https://mirror.example.org/", **changes}) == []


def test_several_conflicts_are_all_reported():
    node = deb({"nvidia-tesla-470-driver": {"version": "470.1-1"}}, others=["runfile", "gpu-operator"])
    found = [conflict["id"] for conflict in conflicts(node, **DEFAULTS)]
    # A container provides the driver, so that nothing is installed: what matters is that there are two.
    assert found == ["driver-twice"]
    node["driver"]["others"] = ["runfile"]
    assert [conflict["id"] for conflict in conflicts(node, **DEFAULTS)] == ["driver-runfile", "driver-debian-legacy"]
