# SPDX-License-Identifier: GPL-3.0-or-later
"""In a network without a way out, whose packets are counted: push an archive, and have preflight ask for its things."""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import sys
import traceback
import urllib.request
from pathlib import Path

import archives
import pytest
import real_skopeo
import yaml
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import needed
from ansible_runs import ansible, write_inventory
from lab_repository import skip_without
from ports import free_port, serving
from test_airgap_needed import LIST, machine, of
from test_airgap_push import KEY_SHA256, Quiet, playbook

# A cable to nobody with the only route: what is sent anywhere but to this machine goes there, and is counted.
COMMANDS = (
    "ip link set lo up",
    "ip link add out type veth peer name nobody",
    "ip link set nobody up",
    "ip addr add 192.0.2.1/24 dev out",
    "ip link set out up",
    "ip route add default dev out",
)
COUNTER = Path("/sys/class/net/out/statistics/tx_packets")


def closed(function):
    """Run a function in a network namespace of its own; returns the packets that would have left, or fails.

    The process is a copy of this one, and its network is gone when it ends.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        result = {}
        try:
            os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS)
            # The kernel's own, such as a search for routers, aren't the program's.
            subprocess.run("mount --make-rprivate / && mount -t sysfs sysfs /sys", shell=True, check=True)
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
            for command in COMMANDS:
                subprocess.run(command.split(), check=True)
            function()
            result = {"packets": int(COUNTER.read_text())}
        except BaseException:
            result = {"error": traceback.format_exc()}
        os.write(writing, json.dumps(result).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = json.loads(answer.read())
    os.waitpid(child, 0)
    assert "error" not in found, found["error"]
    return found["packets"]


@pytest.fixture(scope="module", autouse=True)
def possible():
    skip_without("ip", "openssl", "mount")
    if os.geteuid() != 0:
        pytest.skip("it needs root")
    probe = "import os; os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS)"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode != 0:
        pytest.skip("no network namespaces here, or an older Python")


def test_what_goes_out_is_counted():
    def asks():
        with pytest.raises(OSError):
            urllib.request.urlopen("http://198.51.100.1/", timeout=1)

    assert closed(asks) >= 1 and closed(lambda: None) == 0


@pytest.mark.long
def test_no_packet_leaves_while_an_archive_is_pushed_and_preflight_asks(tmp_path):
    try:
        skopeo = real_skopeo.program()
        real_skopeo.local_registry.program()
    except LookupError as reason:
        pytest.skip(str(reason))
    known = of(machine("debian-12", "gpu1"), backends=("hami",))
    wanted = ("images/hami", "charts/hami", "packages/toolkit/apt", "files/key/libnvidia-container/gpgkey")
    maker = archives.Maker(tmp_path / "archive")
    maker.take([item for item in needed(LIST, known) if item["id"] in wanted])
    folder = maker.close()
    assert {entry["id"] for entry in maker.entries} == set(wanted)
    (tmp_path / "inventory").mkdir()
    own = {"driver_state": "external", "toolkit_repo_key_sha256": KEY_SHA256}
    write_inventory(tmp_path / "inventory", {"gpu_nodes": {"gpu1": own}})
    role = {"role": "kubegpu.share.preflight", "preflight_scope": "nodes"}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "gpu_nodes", "gather_facts": False, "roles": [role]}]))
    port = free_port()

    def inside():
        with real_skopeo.registry(tmp_path / "registry") as registry:
            handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
            given = {
                **{"folder": folder, "unsigned": True, "skopeo": skopeo, "registry": f"{registry.host}/gpu"},
                **{"registry_ca": registry.authority, "registry_auth_file": registry.auth_file},
                **{"files_folder": str(tmp_path / "served"), "files_url": f"http://127.0.0.1:{port}"},
            }
            done = playbook(tmp_path, **given)
            assert done.rc == 0, done.text
            assert registry.manifest("gpu/projecthami/hami", "v2.10.0")
            with serving(http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)):
                asked = ansible(tmp_path, "ansible-playbook", "-i", "inventory/hosts.yml", "play.yml")
                assert "TASK [kubegpu.share.preflight : Report what would stop" in asked.text, asked.text
                assert "mirror-" not in asked.text, asked.text
                # And it does ask: without a list the same run finds its packages missing.
                next((tmp_path / "served").glob("packages/apt/*/Packages.gz")).unlink()
                asked = ansible(tmp_path, "ansible-playbook", "-i", "inventory/hosts.yml", "play.yml")
                assert "4 of 5 missing: libnvidia-container-tools 1.20.2-1" in " ".join(asked.text.split()), asked.text

    assert closed(inside) == 0
