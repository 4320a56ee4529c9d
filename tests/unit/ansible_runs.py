# SPDX-License-Identifier: GPL-3.0-or-later
"""Run programs of Ansible with this checkout's collection, and with nothing else of this process's Ansible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing as t
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


class Ran(t.NamedTuple):
    """The exit status and the output, errors included."""

    rc: int
    text: str

    @property
    def changed(self) -> int:
        match = re.search(r"changed=(\d+)", self.text)
        assert match, self.text
        return int(match[1])


def ansible(folder: Path, program: str, *words: str | Path, **variables: str) -> Ran:
    """Run one program in a folder.

    :param variables: of the environment, beside those of this process that aren't Ansible's.
    """
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
        **{"PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "0"},
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        **{"ANSIBLE_LOCAL_TEMP": str(folder / "tmp"), "ANSIBLE_HOME": str(folder / "home")},
        **variables,
    }
    done = subprocess.run(
        [BIN / program, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Ran(done.returncode, done.stdout + done.stderr)


def write_inventory(folder: Path, groups: t.Mapping[str, t.Any], **variables: t.Any) -> None:
    """Write ``hosts.yml``, whose hosts are this machine.

    :param groups: the hosts of each group, or the variables of each host by its name.
    :param variables: of all hosts, localhost included.
    """
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    named = {
        name: {"hosts": hosts if isinstance(hosts, dict) else dict.fromkeys(hosts)} for name, hosts in groups.items()
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"vars": {**local, **variables}}, **named}))
