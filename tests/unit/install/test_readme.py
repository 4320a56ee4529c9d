# SPDX-License-Identifier: GPL-3.0-or-later
"""README.md's commands, as far as they need no cluster with nodes; tests/lab/test_95_readme.py types the others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from real_apiserver import own_api_server

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))
import built_collection  # noqa: E402
import reader  # noqa: E402
import readme  # noqa: E402

PLAYBOOK = re.compile(r"ansible-playbook(?: -i inventory)? kubegpu\.share\.(\w+)(?: .*)?")


def test_every_block_of_commands_is_typed_by_a_test():
    demo, *others = readme.blocks()
    # These two are the lab itself and the test run.
    assert demo.commands == ("make demo", "make test")
    assert others == readme.on_a_cluster() and len(others) == 5
    install, git, init, usual, rest = (block.commands for block in others)
    assert (len(install), len(git), len(init)) == (5, 1, 1)
    playbooks = [PLAYBOOK.fullmatch(command) for command in (*init, *usual, *rest)]
    assert all(playbooks)
    names = {playbook[1] for playbook in playbooks}
    assert names <= {path.stem for path in (ROOT / "playbooks").glob("*.yml")}
    version = yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"]
    assert f"kubegpu-share-{version}.tar.gz" in install[3]
    # What a reader could take for a command in the text.
    said = re.sub(r"```.*?```", "", readme.README.read_text(), flags=re.DOTALL)
    assert set(re.findall(r"`((?:ansible|pip|python3|make)[\w-]* [^`]+)`", said)) <= {
        "make demo",
        "make lab-down",
        "make build",
        # These run the tests.
        "make test",
        "make test-all",
        "make kernel",
    }


@pytest.mark.long
def test_the_collection_is_installed_from_pypi_and_the_tarball(tmp_path):
    install, git, init, usual, rest = (block.commands for block in readme.on_a_cluster())
    built_collection.build(tmp_path)
    person = reader.Reader(tmp_path)
    person.types(install)
    with own_api_server() as api:
        api.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu1"}})
        (tmp_path / ".kube").mkdir()
        (tmp_path / ".kube/config").write_text(Path(api.kubeconfig).read_text())
        said = person.types(init)
    assert "GPU nodes gpu1" in said and (tmp_path / "inventory/hosts.yml").exists()
    listed = person.types([f"{command} --list-tasks" for command in (*usual, *rest)])
    assert str(ROOT) not in listed
    # From Git: the collection's repository is this one.
    subprocess.run(["git", "config", "--global", f"url.file://{ROOT}.insteadOf", "https://github.com/kubegpu/kubegpu.share.git"],
                   env=person.environment, check=True)  # fmt: skip
    installed = tmp_path / ".ansible/collections/ansible_collections/kubegpu/share"
    person.types([f"rm -r {installed}", *git])
    assert (installed / "playbooks/site.yml").exists() and not (installed / "tests").exists()
