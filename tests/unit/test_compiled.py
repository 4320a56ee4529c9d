# SPDX-License-Identifier: GPL-3.0-or-later
"""tests/compiled: the processes of a test run share compiled code, and each finds its own files in it."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ansible_runs import ansible

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


def run(kept: Path, *words: str) -> str:
    """Run Python's words as a process of a test run does; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "compiled"), "KUBEGPU_COMPILED": str(kept)}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def archive(path: Path, text: str) -> str:
    """Write a module into an archive; return the program that prints where its code is from."""
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("part.py", text)
    return f"import sys; sys.path.insert(0, {str(path)!r}); import part; print(part.where())"


def test_a_module_is_compiled_once_and_names_its_own_archive(tmp_path: Path, kept: Path) -> None:
    text = "def where():\n    return where.__code__.co_filename\n"
    for name in ("one", "two"):
        assert run(kept, "-c", archive(tmp_path / f"{name}.zip", text)) == str(tmp_path / f"{name}.zip" / "part.py")
    [file] = kept.iterdir()
    file.write_bytes(marshal.dumps(compile("where = lambda: 'kept'", "", "exec")))
    assert run(kept, "-c", archive(tmp_path / "three.zip", text)) == "kept"
    assert run(kept, "-c", archive(tmp_path / "four.zip", "def where():\n    return 'changed'\n")) == "changed"


def test_a_modules_archive_is_built_again_when_a_file_changes(tmp_path: Path, kept: Path) -> None:
    plugins = tmp_path / "ansible_collections" / "kubegpu" / "share" / "plugins"
    (plugins / "modules").mkdir(parents=True)
    (plugins / "module_utils").mkdir()
    (plugins / "modules" / "say.py").write_text(
        "from ansible.module_utils.basic import AnsibleModule\n"
        "from ansible_collections.kubegpu.share.plugins.module_utils.words import WORD\n"
        "AnsibleModule({}).exit_json(word=WORD)\n"
    )
    (tmp_path / "play.yml").write_text(
        "- {hosts: localhost, gather_facts: false, connection: local, tasks: [{kubegpu.share.say: , register: said},"
        " {debug: {var: said.word}}]}\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "tests" / "compiled"), "KUBEGPU_COMPILED": str(kept)}
    built = []
    for word in ("first", "second"):
        (plugins / "module_utils" / "words.py").write_text(f"WORD = {word!r}\n")
        done = ansible(tmp_path, "ansible-playbook", "play.yml", **environment, ANSIBLE_COLLECTIONS_PATH=str(tmp_path))
        assert done.rc == 0 and f'"said.word": "{word}"' in done.text, done.text
        built.append({str(path) for path in kept.glob("archives-*/*kubegpu.share*say*") if path.suffix != ".lock"})
    assert [len(paths) for paths in built] == [1, 2], built
