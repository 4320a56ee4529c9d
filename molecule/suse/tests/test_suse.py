# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of the installed packages, as zypper and rpm report it."""

from __future__ import annotations

import re
from typing import Any

testinfra_hosts = ["ansible://gpu_nodes"]

DRIVER = {"nvidia-compute-G06", "nvidia-compute-utils-G06", "nvidia-open-driver-G06", "nvidia-common-G06"}
TOOLKIT = {
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
}


def installed(host: Any) -> dict[str, str]:
    return dict(line.split() for line in host.check_output("rpm -qa --qf '%{NAME} %{VERSION}\\n'").splitlines())


def test_driver_and_toolkit_have_one_version_each(host: Any) -> None:
    found = installed(host)
    assert {found[name] for name in DRIVER} == {"580.95.05"}
    assert {found[name] for name in TOOLKIT} == {"1.20.2"}
    assert "nvidia-driver-G06" not in found


def test_both_are_locked(host: Any) -> None:
    locks = host.check_output("zypper --non-interactive locks")
    for name in ("nvidia-compute-utils-G06", "nvidia-open-driver-G06", "nvidia-container-toolkit"):
        assert name in locks, locks


def test_an_update_does_not_touch_them(host: Any) -> None:
    planned = host.check_output("zypper --non-interactive update --dry-run")
    assert "Nothing to do." in planned, planned


def test_rpm_is_consistent(host: Any) -> None:
    assert host.run("rpm -Va --nouser --nogroup '*nvidia*' | grep -v ' c /etc/'").stdout == ""


def test_nvidia_is_containerds_effective_default(host: Any) -> None:
    dump = host.check_output("containerd config dump")
    assert re.search(r"default_runtime_name = ['\"]nvidia['\"]", dump)
