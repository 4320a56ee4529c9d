# SPDX-License-Identifier: GPL-3.0-or-later
"""No secret on a command line, in a log, or in a file that others can read, in all runs of the preceding files."""

from __future__ import annotations

import base64

import pytest
from _lab import LOGS, ROOT, Lab


@pytest.fixture(scope="module")
def secrets(lab: Lab) -> list[str]:
    """Parts of the administrator's key, as text and as in the kubeconfig, and tokens of the cluster."""
    found = []
    for text in lab.api.secrets:
        found += [text[-80:], base64.b64decode(text).decode().splitlines()[1]]
    for one in lab.api.items("/api/v1/secrets"):
        for key, value in (one.get("data") or {}).items():
            if "token" in key or key.endswith(".key"):
                found.append(base64.b64decode(value).decode(errors="replace").strip()[-60:])
    return [one for one in found if len(one) > 20]


def test_secrets_are_known(secrets: list[str]) -> None:
    assert len(secrets) >= 2


def test_a_verbose_run(lab: Lab) -> None:
    """Add logs that contain the modules' arguments, to those of test_20_site.py."""
    assert lab.playbook("playbooks/inspect.yml", "-vvv").rc == 0


def test_logs(lab: Lab, secrets: list[str]) -> None:
    logs = sorted(LOGS.glob("*.log"))
    assert logs
    for path in logs:
        text = path.read_text()
        assert [secret for secret in secrets if secret in text] == [], path.name


def test_command_lines(lab: Lab, secrets: list[str]) -> None:
    assert any("ansible-playbook" in one for one in lab.commands.seen), "nothing was watched"
    shown = [line[:200] for line in lab.commands.seen for secret in secrets if secret in line]
    assert shown == []


def test_logs_of_the_servers(lab: Lab, secrets: list[str]) -> None:
    for node in lab.nodes:
        text = lab.ssh(node, "cat /var/log/pods/*/*/*.log 2>/dev/null | tail -c 20000000; true")
        assert [secret for secret in secrets if secret in text] == [], node


def test_files_on_the_nodes(lab: Lab) -> None:
    """Only its owner can read a file with a private key or a token."""
    for node in lab.nodes:
        readable = lab.ssh(
            node,
            "find /etc /root /home /opt /usr/local /var/lib /tmp -xdev -type f -perm /o=r -size -1000k"
            " -not -path '/var/lib/containerd/*' -not -path '/var/lib/dpkg/*' -not -path '/var/lib/kubelet/pods/*'"
            " -exec grep -lE 'PRIVATE KEY-----|client-key-data: .{40}|token: ey' {} + 2>/dev/null; true",
        ).split()
        assert readable == [], node


def test_files_on_this_machine(lab: Lab) -> None:
    for path in (ROOT / lab.state["kubeconfig"], ROOT / lab.state["ssh"]["key"]):
        assert path.stat().st_mode & 0o077 == 0, path
