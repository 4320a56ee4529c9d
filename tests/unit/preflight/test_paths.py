# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths that users give are relative to the working directory of ansible-playbook."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.action import preflight
from ansible_collections.kubegpu.share.plugins.module_utils._images.image_archive import sha256
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.local_path import kubeconfig as kubeconfig_path
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.local_path import local_path
from kube_api import Api, kubeconfig
from test_images import archive
from verify_kit import ROOT, run_playbook


def test_a_path_becomes_absolute_and_a_kubeconfigs_content_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/she")
    monkeypatch.setenv("PLACE", "/srv")
    assert local_path("reader.kubeconfig") == f"{tmp_path}/reader.kubeconfig"
    assert local_path("~/a:../b:/c:$PLACE/d") == f"/home/she/a:{tmp_path.parent}/b:/c:/srv/d"
    content = {"clusters": []}
    assert local_path(content) is content and local_path("") == "" and local_path(None) is None


def test_a_relative_archive_is_found_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    archive(tmp_path / "image.tar", manifest_json=[{"RepoTags": ["x/y:1"]}])
    assert list(preflight._archive("image.tar", "x/y:1")) == []
    assert len(sha256("image.tar")) == 64


def test_a_relative_kubeconfig_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("K8S_AUTH_KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert kubeconfig_path("") == ""
    monkeypatch.setenv("KUBECONFIG", "/etc/a")
    assert kubeconfig_path("") == "", "the client finds it, after other settings of the environment"
    monkeypatch.setenv("KUBECONFIG", "/etc/a:b")
    assert kubeconfig_path("") == f"/etc/a:{tmp_path}/b" and kubeconfig_path("c") == f"{tmp_path}/c"
    monkeypatch.setenv("K8S_AUTH_KUBECONFIG", "~/d")
    assert kubeconfig_path("") == f"{Path.home()}/d" and kubeconfig_path({"users": []}) == {"users": []}


def test_a_relative_kubeconfig_of_the_environment_is_found_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the variable is among the runs of test_inspect_playbook.py."""
    api = Api()
    api.lists = {"/api/v1/nodes": [], "/api/v1/pods": []}
    (tmp_path / "reader.kubeconfig").write_text(json.dumps(kubeconfig(api.url)))
    monkeypatch.setenv("KUBECONFIG", "reader.kubeconfig")
    try:
        words = ("-e", f"ansible_python_interpreter={sys.executable}")
        code, text = run_playbook(tmp_path, ROOT / "playbooks" / "inspect.yml", *words)
    finally:
        api.close()
    assert code == 0, text
