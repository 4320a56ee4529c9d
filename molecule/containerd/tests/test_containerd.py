# SPDX-License-Identifier: GPL-3.0-or-later
"""Three Debian releases, each with its own containerd."""

from __future__ import annotations

import re
from typing import Any

testinfra_hosts = ["ansible://gpu_nodes"]


def test_nvidia_is_the_effective_default_runtime(host: Any) -> None:
    dump = host.check_output("containerd config dump")
    assert re.search(r"default_runtime_name = ['\"]nvidia['\"]", dump)
    # The dump of containerd 1.4 (Debian 11) has no runtime options; use the file that it reads.
    old = " 1.4." in host.check_output("containerd --version")
    text = host.file("/etc/containerd/config.toml").content_string if old else dump
    assert re.search(r"BinaryName = ['\"]/usr/bin/nvidia-container-runtime['\"]", text)


def test_containerd_runs_with_its_current_files(host: Any) -> None:
    assert host.service("containerd").is_running
    assert host.check_output("ctr plugins ls | awk '$2 ~ /^(cri|runtime)$/ {print $4}' | sort -u") == "ok"
    pid = host.check_output("systemctl show containerd -p MainPID --value")
    newest = host.check_output("find /etc/containerd -type f -printf '%T@\\n' | sort -n | tail -1")
    started = host.check_output(f"stat -c %Y /proc/{pid}")
    assert float(newest) <= float(started) + 1


def test_driver_and_toolkit_are_held(host: Any) -> None:
    held = set(host.check_output("apt-mark showhold").split())
    assert {
        "nvidia-driver-cuda",
        "nvidia-kernel-open-dkms",
        "nvidia-container-toolkit",
        "nvidia-container-toolkit-base",
        "libnvidia-container-tools",
        "libnvidia-container1",
    } <= held


def test_an_upgrade_does_not_touch_them(host: Any) -> None:
    planned = host.check_output("apt-get --simulate --quiet dist-upgrade")
    assert not re.search(r"^(Inst|Remv) \S*(nvidia|cuda)", planned, re.MULTILINE), planned


def test_dpkg_is_consistent(host: Any) -> None:
    assert host.check_output("dpkg --audit") == ""
    versions = host.check_output("dpkg-query -W -f '${Package} ${Version}\\n' '*nvidia*' 'libcuda1'").splitlines()
    installed = dict(line.split() for line in versions if len(line.split()) == 2)
    assert installed["nvidia-driver-cuda"] == installed["libcuda1"] == installed["libnvidia-ml1"] == "580.95.05-1"
