# SPDX-License-Identifier: GPL-3.0-or-later
"""Code for nodes runs on Python 3.9: every file parses, and the facts of this machine are collected with it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLOOR = (3, 9)
# pyenv's interpreters before those on PATH, which may be shims that find none.
PLACES = [*sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9")), shutil.which("python3.9")]
# Imports all files, collects the facts of this machine with its real commands and prints them.
SCRIPT = """
import glob, importlib, json, os, subprocess, sys
sys.path.insert(0, {path!r})
package = "ansible_collections.kubegpu.share.plugins.module_utils"
top = {path!r} + "/" + package.replace(".", "/")
for name in sorted(glob.glob(top + "/_*/*.py")):
    try:
        importlib.import_module(package + os.path.splitext(name)[0][len(top):].replace("/", "."))
    except ImportError as error:
        # The client of the cluster's API imports ansible's YAML and never runs on a node.
        if error.name != "ansible":
            raise
from ansible_collections.kubegpu.share.plugins.module_utils._node import facts
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem

def run_command(argv, data=None, environ_update=None):
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, input=(data or "").encode())
    except OSError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

print(json.dumps(facts.observe(RealSystem("/", run_command))))
"""


def test_every_file_parses():
    files = [*(ROOT / "plugins/modules").glob("*.py"), *(ROOT / "plugins/module_utils").glob("*/*.py")]
    assert len(files) > 100
    for path in files:
        ast.parse(path.read_text(), filename=str(path), feature_version=FLOOR)


def test_all_files_import_and_facts_are_collected():
    found = [str(place) for place in PLACES if place and subprocess.run([place, "-c", ""], check=False).returncode == 0]
    if not found:
        pytest.skip("no python3.9 on this machine")
    script = SCRIPT.format(path=str(ROOT / ".collections"))
    done = subprocess.run([found[0], "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    facts_of_machine = json.loads(done.stdout)
    assert facts_of_machine["python"]["version"].startswith("3.9.")
    assert facts_of_machine["distribution"]["arch"] and facts_of_machine["kernel"]["release"]
