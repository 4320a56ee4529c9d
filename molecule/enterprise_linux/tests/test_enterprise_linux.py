# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of the installed packages, as dnf and rpm report it."""

from __future__ import annotations

import re
from typing import Any

testinfra_hosts = ["ansible://gpu_nodes"]

DRIVER = {"nvidia-driver-cuda", "nvidia-driver-cuda-libs", "libnvidia-ml", "nvidia-persistenced", "nvidia-kmod-common"}
TOOLKIT = {
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
}


def installed(host: Any) -> dict[str, str]:
    return dict(line.split() for line in host.check_output("rpm -qa --qf '%{NAME} %{VERSION}\\n'").splitlines())


def test_the_driver_has_one_version_and_the_right_kernel_module(host: Any) -> None:
    found = installed(host)
    assert {found[name] for name in (*DRIVER, "kmod-nvidia-open-dkms")} == {"580.95.05"}
    assert "kmod-nvidia-latest-dkms" not in found


def test_the_toolkit_has_one_version(host: Any) -> None:
    assert {installed(host)[name] for name in TOOLKIT} == {"1.20.2"}


def test_the_module_stream_is_the_branch(host: Any) -> None:
    listed = host.check_output("dnf -q -C module list --enabled nvidia-driver")
    assert re.search(r"^nvidia-driver\s+580-open \[e\]", listed, re.MULTILINE), listed


def test_both_are_locked_at_their_version(host: Any) -> None:
    locks = host.check_output("dnf -q -C versionlock list")
    for name in ("nvidia-driver-cuda", "kmod-nvidia-open-dkms", "nvidia-container-toolkit"):
        assert re.search(rf"^!?{re.escape(name)}-\d", locks, re.MULTILINE), locks


def test_packages_need_a_signature(host: Any) -> None:
    files = host.check_output("grep -lE 'nvidia|cuda|kubegpu' /etc/yum.repos.d/*.repo").split()
    assert files
    for path in files:
        text = host.file(path).content_string
        if "rocky" not in path:
            assert "gpgcheck=1" in text.replace(" ", "") or "repo_gpgcheck=1" in text.replace(" ", ""), text


def test_rpm_is_consistent(host: Any) -> None:
    assert host.run("rpm -Va --nouser --nogroup '*nvidia*' | grep -v ' c /etc/'").stdout == ""
    assert host.run("dnf -q -C check").rc == 0


def test_nvidia_is_containerds_effective_default(host: Any) -> None:
    dump = host.check_output("containerd config dump")
    assert re.search(r"default_runtime_name = ['\"]nvidia['\"]", dump)


def test_it_cannot_be_detected_as_debian(host: Any) -> None:
    assert not host.file("/var/lib/dpkg").exists
    assert not host.exists("dpkg") and not host.exists("apt-get")
