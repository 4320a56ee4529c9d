# SPDX-License-Identifier: GPL-3.0-or-later
"""The arguments and the environment of a unit's next start."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._host.systemd import environment, next_arguments, unit
from node_fakes import FakeSystem


class Machine(FakeSystem):
    def __init__(self, command: str, files: dict[str, str], own: str = "") -> None:
        super().__init__(files)
        self.shown = f"ExecStart={{ path=/usr/local/bin/k3s ; argv[]={command} ; ignore_errors=no }}\n"
        self.shown += "".join(f"EnvironmentFiles={path} (ignore_errors=yes)\n" for path in files)
        self.shown += f"EnvironmentFiles=/etc/missing (ignore_errors=yes)\nEnvironment={own}\n"

    def run(self, argv: Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        return Done(0, self.shown, "")


@pytest.mark.parametrize(
    ("command", "own", "files", "arguments"),
    [
        ("k3s server --data-dir /a", "", {}, ["server", "--data-dir", "/a"]),
        ("k3s server $MORE", 'MORE="--data-dir /a"', {}, ["server", "--data-dir", "/a"]),
        ("k3s server $MORE", '"MORE=--data-dir /a"', {}, ["server", "--data-dir", "/a"]),
        ("k3s server $MORE $NONE", "MORE=x", {"/etc/default/k3s": "MORE=--docker\n"}, ["server", "--docker"]),
        (
            "k3s server --data-dir=${DIR}/k3s",
            "",
            {"/a": "DIR=/one\n", "/b": "# DIR=/x\nDIR='/two'\n"},
            ["server", "--data-dir=/two/k3s"],
        ),
        ("k3s server ${MORE}", "", {"/a": "; no\nMORE=a \\\n  b\n"}, ["server", "a   b"]),
        ("k3s server ${NONE}x", "", {}, ["server", "x"]),
    ],
)
def test_arguments_of_the_next_start(command: str, own: str, files: dict[str, str], arguments: list[str]) -> None:
    machine = Machine(command, files, own)
    found = unit(machine, "k3s.service")
    assert found.environment_files == (*files, "/etc/missing")
    assert next_arguments(found, environment(machine, found)) == arguments


def test_files_of_the_environment_may_be_a_pattern() -> None:
    files = {"/etc/k3s/b.env": "K3S_DATA_DIR=/b\n", "/etc/k3s/a.env": "K3S_DATA_DIR=/a\n", "/etc/k3s/.c.env": "X=1\n"}
    machine = Machine("k3s server", files)
    machine.shown = machine.shown.partition("EnvironmentFiles=")[0]
    machine.shown += "EnvironmentFiles=/etc/k3s/*.env (ignore_errors=yes)\n"
    found = unit(machine, "k3s.service")
    assert found.environment_files == ("/etc/k3s/a.env", "/etc/k3s/b.env")
    assert environment(machine, found) == {"K3S_DATA_DIR": "/b"}
