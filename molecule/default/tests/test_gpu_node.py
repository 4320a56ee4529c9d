# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a GPU node after site.yml, as its own tools report it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

testinfra_hosts = ["ansible://gpu_nodes"]

RESOURCE = "aliyun.com/gpu-mem"


@pytest.mark.parametrize(
    ("pattern", "count", "words"),
    [
        ("/etc/apt/sources.list.d/kubegpu-*.sources", 2, "Signed-By: /etc/apt/keyrings/kubegpu-"),
        ("/etc/apt/keyrings/kubegpu-*.asc", 2, "BEGIN PGP PUBLIC KEY BLOCK"),
        # The toolkit's packages depend on exact versions of each other; the driver's need pins.
        ("/etc/apt/preferences.d/kubegpu-*.pref", 1, "Pin: version"),
    ],
)
def test_apt_files_of_driver_and_toolkit(host: Any, pattern: str, count: int, words: str) -> None:
    paths = host.check_output(f"ls {pattern}").split()
    assert len(paths) == count, paths
    for path in paths:
        file = host.file(path)
        assert words in file.content_string
        assert (file.user, file.mode) == ("root", 0o644)


def test_no_key_is_trusted_for_all_repositories(host: Any) -> None:
    assert host.check_output("ls /etc/apt/trusted.gpg.d | grep -iE 'cuda|nvidia|kubegpu'; true") == ""


def test_driver_and_toolkit_are_held(host: Any) -> None:
    held = set(host.check_output("apt-mark showhold").split())
    installed = host.check_output("dpkg-query -W -f '${Package} ${db:Status-Status}\\n'")
    names = {line.split()[0] for line in installed.splitlines() if line.endswith(" installed")}
    assert {"nvidia-container-toolkit", "nvidia-driver-cuda"} <= names & held


def test_an_upgrade_does_not_touch_them(host: Any) -> None:
    planned = host.check_output("apt-get --simulate --quiet dist-upgrade")
    assert not re.search(r"^(Inst|Remv) \S*(nvidia|cuda)", planned, re.MULTILINE), planned


def test_nouveau_is_disabled(host: Any) -> None:
    file = host.file("/etc/modprobe.d/blacklist-nouveau.conf")
    lines = [
        "blacklist nouveau",
        "options nouveau modeset=0",
        *(f"blacklist {name}" for name in ("nova", "nova_drm", "nova_core")),
        "",
    ]
    assert file.content_string.split("\n")[-6:] == lines
    # A kernel without modules has no /proc/modules.
    assert not host.file("/sys/module/nouveau").exists


def test_nvidia_smi_lists_the_cards(host: Any) -> None:
    query = "nvidia-smi --query-gpu=index,uuid,driver_version --format=csv,noheader"
    rows = [line.split(", ") for line in host.check_output(query).splitlines()]
    assert [row[0] for row in rows] == [str(number) for number in range(len(rows))]
    assert rows and all(row[1].startswith("GPU-") for row in rows)


def test_nvidia_is_the_effective_default_runtime(host: Any) -> None:
    dump = host.check_output("containerd config dump")
    assert re.search(r"default_runtime_name = ['\"]nvidia['\"]", dump)
    assert "/usr/bin/nvidia-container-runtime" in dump


def test_containerd_runs_with_its_current_files(host: Any) -> None:
    started = host.check_output("systemctl show containerd -p ActiveEnterTimestamp --value --timestamp=unix").strip("@")
    newest = host.check_output("find /etc/containerd -type f -printf '%T@\\n' | sort -n | tail -1")
    assert float(newest) <= float(started) + 1


def test_the_plugin_is_registered_with_kubelet(host: Any) -> None:
    sockets = host.check_output("ls /var/lib/kubelet/device-plugins").split()
    assert "kubelet.sock" in sockets
    assert len([name for name in sockets if name.endswith(".sock")]) == 2, sockets
    registered = json.loads(host.check_output("cat /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"))
    identifiers = registered["Data"]["RegisteredDevices"][RESOURCE]
    cards = host.check_output("nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits").split()
    assert len(identifiers) == sum(int(mib) // 1024 for mib in cards) > 0


def test_no_temporary_files_are_left(host: Any) -> None:
    assert host.check_output("find /etc /usr/local /opt /var/lib/kubelet -xdev -name '.kubegpu-*'") == ""
