# SPDX-License-Identifier: GPL-3.0-or-later
"""awx.awx's real modules, and a run of configure.yml by the real ansible-playbook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import typing as t
import zipfile
from pathlib import Path

import yaml
from ansible_runs import ansible
from awx_stand_in import StandIn

from lab.paths import cache_root, made_once

ROOT = Path(__file__).resolve().parents[3]
# The last release of PyPI's ansible with awx.awx: 24.6.1, as awx/requirements.yml names it.
ANSIBLE = "12.3.0"


class _Loader(yaml.SafeLoader):
    """YAML of Ansible, whose ``!unsafe`` is plain text here."""


_Loader.add_constructor("!unsafe", lambda loader, node: loader.construct_scalar(node))


def variables() -> dict[str, t.Any]:
    """The content of awx/vars.yml; templates aren't evaluated."""
    return yaml.load((ROOT / "awx" / "vars.yml").read_text(), _Loader)


def awx_collection() -> Path:
    """A collections path with awx.awx alone, unpacked from PyPI's ansible once."""
    target = cache_root() / "awx" / ANSIBLE
    with made_once(target) as fresh:
        if fresh is not None:
            with tempfile.TemporaryDirectory() as folder:
                wanted = ("--quiet", "--no-deps", "--ignore-requires-python", f"--dest={folder}", f"ansible=={ANSIBLE}")
                subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=True)
                [wheel] = Path(folder).glob("*.whl")
                with zipfile.ZipFile(wheel) as packed:
                    names = [name for name in packed.namelist() if name.startswith("ansible_collections/awx/awx/")]
                    packed.extractall(fresh, names)
    return target


def recap(text: str) -> dict[str, int]:
    """The numbers of localhost in the recap."""
    [line] = re.findall(r"^localhost .*$", text, re.MULTILINE)
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", line)}


def changed(text: str) -> list[str]:
    """The tasks with a change, in their order."""
    blocks = re.split(r"^TASK \[(.*)\] \**$", text, flags=re.MULTILINE)[1:]
    return [
        name
        for name, block in zip(blocks[::2], blocks[1::2], strict=True)
        if re.search(r"^changed:", block, re.MULTILINE)
    ]


def configure(stand_in: StandIn, folder: Path, *words: str) -> tuple[int, str]:
    """Run configure.yml against a stand-in of AWX.

    :param folder: where a person stands.
    :returns: the exit status and the output.
    """
    of_others = {name: "" for name in os.environ if name.startswith(("CONTROLLER_", "TOWER_"))}
    given = {**of_others, **stand_in.environment, "ANSIBLE_COLLECTIONS_PATH": str(awx_collection()), "COLUMNS": "200"}
    return ansible(folder, "ansible-playbook", ROOT / "awx" / "configure.yml", *words, **given)


def display_callback(version: str) -> Path:
    """The folder of the callback by which a release of ansible-runner prints and reports, unpacked from PyPI once."""
    target = cache_root() / "ansible-runner" / version
    with made_once(target) as fresh:
        if fresh is not None:
            with tempfile.TemporaryDirectory() as folder:
                wanted = ("--quiet", "--no-deps", f"--dest={folder}", f"ansible-runner=={version}")
                subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=True)
                [wheel] = Path(folder).glob("*.whl")
                with zipfile.ZipFile(wheel) as packed:
                    packed.extract("ansible_runner/display_callback/callback/awx_display.py", fresh)
    return target / "ansible_runner" / "display_callback" / "callback"
