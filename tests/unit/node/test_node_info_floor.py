# SPDX-License-Identifier: GPL-3.0-or-later
"""Code that runs on nodes holds Python 3.8: all of it parses there, and the observation runs there."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLOOR = (3, 8)
# A real one before what may be no more than a shim of it.
PLACES = [*sorted(Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")), shutil.which("python3.8")]
# Imports all that may come to a node, runs the real observation of this very machine with its real commands, prints it.
SCRIPT = """
import importlib, json, os, subprocess, sys
sys.path.insert(0, {path!r})
room = "ansible_collections.kubegpu.share.plugins.module_utils"
for name in sorted(os.listdir({path!r} + "/" + room.replace(".", "/"))):
    try:
        importlib.import_module(room + "." + os.path.splitext(name)[0]) if name.endswith(".py") else None
    except ImportError as error:
        # What speaks with the cluster takes ansible's YAML and never runs on a node.
        if error.name != "ansible":
            raise
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem

def run_command(argv, data=None, environ_update=None):
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, input=(data or "").encode())
    except OSError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

print(json.dumps(_node_info.observe(RealSystem("/", run_command))))
"""


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "plugins/modules").glob("*.py")), *sorted((ROOT / "plugins/module_utils").glob("*.py"))],
    ids=lambda path: path.stem,
)
def test_it_parses_there(path):
    ast.parse(path.read_text(), filename=str(path), feature_version=FLOOR)


def test_all_of_it_imports_and_the_observation_runs_there():
    found = [str(place) for place in PLACES if place]
    if not found:
        pytest.skip("no python3.8 on this machine")
    script = SCRIPT.format(path=str(ROOT / ".collections"))
    done = subprocess.run([found[0], "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["python"]["version"].startswith("3.8.")
    assert seen["distribution"]["arch"] and seen["kernel"]["release"]
