# SPDX-License-Identifier: GPL-3.0-or-later
"""Charts with another digest than the expected one, from a web server, by a stand-in of helm and by the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import served
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.kubegpu.share.plugins.module_utils._backends import chart
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins import table
from layers import ROOT
from own_cluster import run_playbook

STANDIN = Path(__file__).with_name("standin_helm.py")
NAME, VERSION = "hami", "2.10.0"
GOOD, BAD = served.chart(NAME, VERSION), served.chart(NAME, VERSION, "another")


def run_command(argv, data, environ_update):
    """AnsibleModule's, as far as it is needed here."""
    environment = {**os.environ, **environ_update}
    done = subprocess.run(argv, input=data, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def server():
    with served.Server().running() as running:
        yield running


@pytest.fixture
def standin(tmp_path_factory):
    """Return the path of a program that executes the stand-in."""
    program = tmp_path_factory.mktemp("standin") / "helm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture(params=["standin", pytest.param("helm_binary", marks=pytest.mark.long)])
def helm(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def helm_binary():
    from lab import build
    from lab.shell import LabError

    try:
        return str(build.built(build.HELM) / "helm")
    except (LabError, OSError) as error:
        pytest.skip(f"no helm: {error}")


@pytest.fixture
def ask(server, helm, tmp_path):
    pins = {NAME: {"version": VERSION, "sha256": served.sha256(GOOD)}}

    def run(**given):
        params = {"chart": NAME, "repository": server.url, "version": VERSION, "pins": pins, "helm": helm}
        params |= {"folder": str(tmp_path / "kept"), "variable": "hami_chart_sha256", **given}
        result = ArgumentSpecValidator(chart.ARGUMENTS).validate(params)
        assert not result.error_messages
        return chart.ensure(RealSystem(run_command=run_command), result.validated_parameters)

    return run


def test_the_pinned_archive_is_what_helm_is_given_and_is_fetched_once(server, ask, tmp_path):
    served.repository(server, NAME, VERSION, GOOD)
    found = ask()
    assert Path(found["path"]).read_bytes() == GOOD and (found["repository"], found["changed"]) == ("", False)
    asked = len(server.asked)
    assert ask() == found and ask(version=f"v{VERSION}") == found and len(server.asked) == asked
    # What the cache has is verified, too.
    Path(found["path"]).write_bytes(BAD)
    assert ask() == found and Path(found["path"]).read_bytes() == GOOD and len(server.asked) > asked
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]


# An index that agrees with the archive, and one that claims what is expected.
@pytest.mark.parametrize("claimed", [None, served.sha256(GOOD)])
@pytest.mark.parametrize("given", [{}, {"sha256": served.sha256(GOOD)}, {"sha256": served.sha256(GOOD).upper()}])
def test_another_archive_is_refused(server, ask, tmp_path, claimed, given):
    served.repository(server, NAME, VERSION, BAD, claimed)
    with pytest.raises(ShareError) as caught:
        ask(**given)
    message = str(caught.value)
    # helm itself refuses an archive that its index contradicts.
    if "helm can't download" not in message:
        for words in (
            "hami_chart_sha256:",
            "hami 2.10.0",
            server.url,
            served.sha256(BAD),
            served.sha256(GOOD),
            "; where",
        ):
            assert words in message
        assert caught.value.details["code"] == "chart_refused"
    assert not (tmp_path / "kept").exists()


def test_a_version_without_digest_is_refused_before_anything_is_fetched(server, ask):
    for given in ({"version": "2.9.0"}, {"version": ""}, {"chart": "other"}, {"chart": "oci://example.org/other"}):
        with pytest.raises(BadInput, match="hami_chart_sha256 is pinned, and the collection has no digest of chart"):
            ask(**given)
    with pytest.raises(BadInput, match="neither a SHA-256, nor pinned, nor empty"):
        ask(sha256="abc")
    assert server.asked == []


def test_the_user_may_have_any_archive_or_one_of_his_own(server, ask, tmp_path):
    other = served.chart(NAME, "2.9.0")
    served.repository(server, NAME, "2.9.0", other)
    found = ask(version="2.9.0", sha256=served.sha256(other))
    assert Path(found["path"]).read_bytes() == other
    assert ask(sha256="", version="2.9.0") == {"changed": False, "path": NAME, "repository": server.url, "sha256": ""}
    path = tmp_path / "own.tgz"
    path.write_bytes(BAD)
    assert ask(chart=str(path))["path"] == str(path)
    assert ask(chart=str(path), sha256=served.sha256(BAD))["sha256"] == served.sha256(BAD)
    with pytest.raises(BadInput, match=f"has SHA-256 {served.sha256(BAD)}"):
        ask(chart=str(path), sha256=served.sha256(GOOD))
    with pytest.raises(BadInput, match="isn't a chart's archive"):
        ask(chart=str(tmp_path), sha256=served.sha256(GOOD))


def test_a_repository_without_the_chart_is_named(server, ask):
    server.files["/index.yaml"] = yaml.safe_dump({"apiVersion": "v1", "entries": {}}).encode()
    with pytest.raises(ShareError, match=r"helm can't download chart hami 2\.10\.0: .*not found"):
        ask()


@pytest.mark.parametrize("role", ["hami", "nvidia_device_plugin", "gpu_operator"])
def test_the_default_version_of_each_role_has_a_digest(role):
    defaults = yaml.safe_load((ROOT / f"roles/{role}/defaults/main.yml").read_text())
    name = defaults.get("hami_chart_ref") or defaults[f"{role}_chart"]
    params = {"chart": name, "version": defaults[f"{role}_chart_version"], "pins": table.section("charts")}
    params |= {"sha256": defaults[f"{role}_chart_sha256"], "variable": f"{role}_chart_sha256"}
    assert chart.expected_digest(params) == table.section("charts")[name]["sha256"]
    url = defaults.get("hami_chart_repo_url") or defaults[f"{role}_chart_repository"]
    assert table.section("charts")[name]["url"] == url


def test_ansible_refuses_the_chart_before_helm_reads_it(server, standin, tmp_path):
    """By the module as Ansible runs it, with a helm that does nothing but pull."""
    served.repository(server, NAME, VERSION, BAD)
    task = {
        "kubegpu.share.helm_chart": {
            **{"chart": NAME, "repository": server.url, "version": VERSION, "helm": standin},
            "pins": "{{ lookup('kubegpu.share.pins', 'charts') }}",
            "folder": str(tmp_path / "kept"),
        }
    }
    done = run_playbook(tmp_path, [{"hosts": "localhost", "gather_facts": False, "tasks": [task]}], "--check")
    assert done.rc != 0 and served.sha256(BAD) in done.text and "chart_refused" in done.text
