# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a GPU node after site.yml, as its own tools report it."""

from __future__ import annotations

import json
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


def test_the_plugin_is_registered_with_kubelet(host: Any) -> None:
    sockets = host.check_output("ls /var/lib/kubelet/device-plugins").split()
    assert "kubelet.sock" in sockets
    assert len([name for name in sockets if name.endswith(".sock")]) == 2, sockets
    registered = json.loads(host.check_output("cat /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"))
    identifiers = registered["Data"]["RegisteredDevices"][RESOURCE]
    cards = host.check_output("nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits").split()
    assert len(identifiers) == sum(int(mib) // 1024 for mib in cards) > 0
