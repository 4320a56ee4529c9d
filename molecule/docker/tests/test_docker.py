# SPDX-License-Identifier: GPL-3.0-or-later
"""A Docker host: the state of the daemon, and the cards of a container."""

from __future__ import annotations

import json
from typing import Any

testinfra_hosts = ["ansible://gpu_nodes"]

LIBC = "$(dpkg -L libc6 | grep -E '/(libc.so.6|ld-linux[^/]*)$' | xargs -n1 readlink -f | sort -u | cut -c2-)"


def test_docker_reports_nvidia_as_the_default(host: Any) -> None:
    info = json.loads(host.check_output("docker info --format '{{json .}}'"))
    assert info["DefaultRuntime"] == "nvidia"
    assert info["Runtimes"]["nvidia"]["path"].endswith("nvidia-container-runtime")
    assert "runc" in info["Runtimes"]


def test_the_daemon_runs_with_its_file(host: Any) -> None:
    file = json.loads(host.file("/etc/docker/daemon.json").content_string)
    assert file["default-runtime"] == "nvidia"
    assert host.service("docker").is_running


def test_a_container_gets_the_requested_card_only(host: Any) -> None:
    """Uses the real nvidia-container-runtime, and an image of the machine's own shell and C library."""
    uuid = host.check_output("nvidia-smi --query-gpu=uuid --format=csv,noheader | tail -1")
    host.check_output(f"tar -C / -c bin lib lib64 usr/bin/dash usr/bin/sh usr/lib64 {LIBC} | docker import - probe")
    command = "sh -c 'echo /dev/nvidia*; nvidia-smi -L'"
    inside = host.check_output(f"docker run --rm --network=none --env NVIDIA_VISIBLE_DEVICES={uuid} probe {command}")
    assert "/dev/nvidia1" in inside.split() and "/dev/nvidia0" not in inside.split()
    assert uuid in inside
    host.check_output("docker rmi probe")


def test_driver_and_toolkit_are_held(host: Any) -> None:
    held = set(host.check_output("apt-mark showhold").split())
    assert {"nvidia-driver-cuda", "nvidia-container-toolkit", "libnvidia-container1"} <= held
