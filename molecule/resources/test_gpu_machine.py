# SPDX-License-Identifier: GPL-3.0-or-later
"""What any machine is after nodes.yml, as its own tools tell it."""

from __future__ import annotations

import re
from typing import Any

testinfra_hosts = ["ansible://gpu_nodes"]

DRIVER = "580.95.05"
TOOLKIT = "1.20.1"
INITRAMFS = "(lsinitramfs /boot/initrd.img-* || lsinitrd /boot/initramfs-*.img || lsinitrd /boot/initrd-*) 2>/dev/null"


def test_nvidia_smi_lists_the_cards(host: Any) -> None:
    query = "nvidia-smi --query-gpu=index,uuid,driver_version --format=csv,noheader"
    rows = [line.split(", ") for line in host.check_output(query).splitlines()]
    assert [(row[0], row[2]) for row in rows] == [("0", DRIVER), ("1", DRIVER)]
    assert all(row[1].startswith("GPU-") for row in rows)


def test_the_persistence_daemon_is_at_work(host: Any) -> None:
    assert host.service("nvidia-persistenced").is_running
    assert host.service("nvidia-persistenced").is_enabled


def test_nouveau_stays_away(host: Any) -> None:
    assert "blacklist nouveau" in host.check_output("PATH=$PATH:/sbin modprobe --showconfig").splitlines()
    assert not host.file("/sys/module/nouveau").exists


def test_the_initramfs_keeps_nouveau_away(host: Any) -> None:
    """Made anew by the family's own tool: one that lacks the file loads nouveau before the root is there."""
    listed = host.check_output(INITRAMFS)
    assert "etc/modprobe.d/blacklist-nouveau.conf" in listed or "/nouveau.ko" not in listed


def test_the_toolkit_knows_the_cards(host: Any) -> None:
    assert TOOLKIT in host.check_output("nvidia-ctk --version")
    listed = host.check_output("nvidia-ctk --quiet cdi generate --device-name-strategy=uuid")
    assert len(re.findall(r"^ *- name: GPU-", listed, re.MULTILINE)) == 2


def test_nothing_half_written_is_left(host: Any) -> None:
    assert host.check_output("find /etc /usr/local /opt -xdev -name '.kubegpu-*'") == ""
