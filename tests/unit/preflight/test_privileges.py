# SPDX-License-Identifier: GPL-3.0-or-later
"""Nothing on localhost needs root, whatever the command line and the inventory say of privilege escalation."""

from __future__ import annotations

import json
import sys
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kube_api import Api, kubeconfig
from verify_kit import ROOT, run_playbook

PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
FILES = [*PLAYBOOKS, *sorted((ROOT / "roles").glob("*/tasks/*.yml"))]
SUDO = """\
#!/bin/sh
echo "$@" >> {calls}
echo "sudo: a password is required" >&2
exit 1
"""


def items(value: t.Any) -> Iterator[dict[str, t.Any]]:
    """Every play, task and block of a file."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from items(one)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_play_and_task_on_localhost_needs_no_root(path: Path) -> None:
    for item in items(yaml.safe_load(path.read_text())):
        if str(item.get("hosts")).partition("{")[0] == "localhost" or item.get("delegate_to") == "localhost":
            # The keyword become loses to the inventory's variable ansible_become.
            assert item["vars"]["ansible_become"] is False, item.get("name")


# The test above reads all of it; these runs show that its rule is right.
USUAL = {("inspect", "ansible_become")}


@pytest.mark.parametrize(
    ("playbook", "escalation"),
    [
        pytest.param(path, way, marks=[] if (path.stem, way) in USUAL else pytest.mark.long, id=f"{path.stem}-{way}")
        for path in PLAYBOOKS
        # All plays of nodes and switch are on machines, which need root; limit's only one is skipped without --limit.
        if path.stem not in ("limit", "nodes", "switch")
        for way in ("--become", "ansible_become")
    ],
)
def test_sudo_is_never_called_on_localhost(
    playbook: Path, escalation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "sudo.calls"
    (tmp_path / "bin").mkdir()
    sudo = tmp_path / "bin" / "sudo"
    sudo.write_text(SUDO.format(calls=calls))
    sudo.chmod(0o755)
    api = Api()
    api.lists = {"/api/v1/nodes": [], "/api/v1/pods": []}
    (tmp_path / "config").write_text(json.dumps(kubeconfig(api.url)))
    variables: dict[str, t.Any] = {
        "gpu_kubeconfig": "config",
        "ansible_python_interpreter": sys.executable,
        # Tests run as root, which Ansible doesn't make root otherwise.
        "ansible_become_user": "nobody",
    }
    if escalation == "ansible_become":
        variables["ansible_become"] = True
    # A machine, so that localhost isn't all there is; its group is none of the playbooks'.
    inventory = {"all": {"vars": variables, "hosts": {"other": {"ansible_connection": "local"}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    words = ["--become"] if escalation == "--become" else []
    try:
        _code, text = run_playbook(tmp_path, playbook, "-i", "hosts.yml", *words)
    finally:
        api.close()
    assert not calls.exists(), calls.read_text()
    assert "TASK [" in text, text
