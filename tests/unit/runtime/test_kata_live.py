# SPDX-License-Identifier: GPL-3.0-or-later
"""Kata's runtime in a containerd that runs: what it answers over the CRI before and after the change, and its undo."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import real_containerd
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import protobuf
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import cri, handler_plan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.handler import Handler

KATA = Handler("kata-qemu-nvidia-gpu", "/opt/kata/bin/containerd-shim-kata-v2", "/opt/kata/share/kata.toml")
STATUS = "/runtime.v1.RuntimeService/Status"
# StatusRequest with verbose, field 1; and StatusResponse's map of texts.
VERBOSE, INFO = b"\x08\x01", 2
START = 60.0


class Daemon:
    """A containerd of its own, in a folder of its own, with a drop-in folder beside its configuration."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.binary, self.folder, self.config = binary, folder, folder / "config.toml"
        self.config.write_text(
            f'version = 3\nroot = "{folder}/root"\nstate = "{folder}/state"\nimports = ["{folder}/conf.d/*.toml"]\n'
            f'[grpc]\naddress = "{folder}/s"\n[ttrpc]\naddress = "{folder}/t"\n'
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with (self.folder / "log").open("a") as log:
            argv = [self.binary, "--config", str(self.config)]
            process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)

    def runtimes(self) -> dict[str, dict[str, object]]:
        """Return the runtimes that the process has, by the CRI's Status, which crictl info prints."""
        end = time.monotonic() + START
        while True:
            try:
                with grpc.insecure_channel(f"unix://{self.folder}/s") as channel:
                    call = channel.unary_unary(STATUS, request_serializer=bytes, response_deserializer=bytes)
                    answer = call(VERBOSE, timeout=10)
                break
            except grpc.RpcError:
                if time.monotonic() > end:
                    raise AssertionError((self.folder / "log").read_text()[-2000:]) from None
                time.sleep(0.2)
        info = protobuf.decode_string_map(protobuf.decode_fields(answer, (INFO,))[INFO])
        config = json.loads(info["config"])
        # The product's own reader takes it, too.
        parsed = cri.parse_info(json.dumps({"config": config}))
        runtimes: dict[str, dict[str, object]] = config["containerd"]["runtimes"]
        assert parsed is not None and set(parsed.binaries) == set(runtimes)
        return runtimes


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    # A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kata-", dir="/tmp") as folder:
        yield Daemon(real_containerd.of("2.4"), Path(folder))


def change(daemon: Daemon, present: bool) -> int:
    """Apply the product's plan to the files; return how many it changed."""
    files = handler_plan.make_plan(KATA, present, real_containerd.observe(daemon.binary, daemon.config)).files
    real_containerd.apply(files)
    return len(files)


def test_the_running_daemon_has_the_runtime_after_the_change_and_not_before_or_after_its_undo(daemon: Daemon) -> None:
    """A file that no daemon has read would prove nothing: the old process doesn't have it until it is restarted."""
    with daemon.running():
        assert set(daemon.runtimes()) == {"runc"}
        assert change(daemon, True) > 0
        assert KATA.name not in daemon.runtimes()
    with daemon.running():
        runtime = daemon.runtimes()[KATA.name]
        assert runtime["runtimeType"] == f"io.containerd.{KATA.name}.v2" and runtime["runtimePath"] == KATA.shim
        assert runtime["options"] == {"ConfigPath": KATA.config}
        assert runtime["privileged_without_host_devices"] is True
        assert change(daemon, True) == 0 and change(daemon, False) > 0
    with daemon.running():
        assert set(daemon.runtimes()) == {"runc"}
