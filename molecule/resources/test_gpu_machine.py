# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of any machine after nodes.yml, as its own tools report it."""

from __future__ import annotations

import re
from typing import Any

testinfra_hosts = ["ansible://gpu_nodes"]

DRIVER = "580.95.05"
TOOLKIT = "1.20.2"
INITRAMFS = "(lsinitramfs /boot/initrd.img-* || lsinitrd /boot/initramfs-*.img || lsinitrd /boot/initrd-*) 2>/dev/null"


def test_nvidia_smi_lists_the_cards(host: Any) -> None:
    query = "nvidia-smi --query-gpu=index,uuid,driver_version --format=csv,noheader"
    rows = [line.split(", ") for line in host.check_output(query).splitlines()]
    assert [(row[0], row[2]) for row in rows] == [("0", DRIVER), ("1", DRIVER)]
    assert all(row[1].startswith("GPU-") for row in rows)


def test_the_persistence_daemon_runs(host: Any) -> None:
    assert host.service("nvidia-persistenced").is_running
    assert host.service("nvidia-persistenced").is_enabled


def test_nouveau_is_disabled(host: Any) -> None:
    assert "blacklist nouveau" in host.check_output("PATH=$PATH:/sbin modprobe --showconfig").splitlines()
    assert not host.file("/sys/module/nouveau").exists


def test_the_initramfs_disables_nouveau(host: Any) -> None:
    """An initramfs without the file would load nouveau before the root file system is mounted."""
    listed = host.check_output(INITRAMFS)
    assert "etc/modprobe.d/blacklist-nouveau.conf" in listed or "/nouveau.ko" not in listed


def test_the_toolkit_lists_the_cards(host: Any) -> None:
    assert TOOLKIT in host.check_output("nvidia-ctk --version")
    listed = host.check_output("nvidia-ctk --quiet cdi generate --device-name-strategy=uuid")
    assert len(re.findall(r"^ *- name: GPU-", listed, re.MULTILINE)) == 2


def test_no_temporary_files_are_left(host: Any) -> None:
    assert host.check_output("find /etc /usr/local /opt -xdev -name '.kubegpu-*'") == ""
