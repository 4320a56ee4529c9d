# SPDX-License-Identifier: GPL-3.0-or-later
"""The module over HTTP: chunked and paged lists, errors of the API server, and the output of its result."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import ansible
import pytest
from allocation_snapshots import asks, booked, given, hami_node, mixed_cluster, ours, pod
from ansible.module_utils.common import warnings
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.table import (
    LargeResult,
    _parts,
    collect,
    report,
)
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import direct, stream
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from kube_api import SECRET, Api, connect, forget_environment, kubeconfig, module

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def api():
    server = Api()
    server.lists = {
        "/api/v1/nodes": [ours(), hami_node(name="n2")],
        "/api/v1/pods": [
            pod("a", [asks(mem=10)], annotations=booked(1, 10)),
            pod("plain", [asks()]),
            pod("b", [asks(gpu=1)], on="n2", annotations=given("GPU-x,NVIDIA,3000,30:;", on="n2")),
        ]
        + [pod(f"other-{at}", [asks()]) for at in range(20)],
    }
    yield server
    server.close()


@pytest.fixture(params=["direct", "client"])
def kube(api, monkeypatch, tmp_path, request):
    forget_environment(monkeypatch, tmp_path)
    if request.param == "client":
        return connect(api.url)
    found = direct.connect(module(kubeconfig=kubeconfig(api.url)))
    assert isinstance(found, direct.DirectKube)
    return found


def test_two_requests_whatever_the_number_of_pods(api, kube):
    assert isinstance(kube, stream.Streams)
    found = collect(kube)
    assert found["requests"] == {"GET": 2}
    assert [path for path, _query in api.asked] == ["/api/v1/nodes", "/api/v1/pods"]
    assert api.asked[1][1]["fieldSelector"] == "status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
    assert "fieldSelector" not in api.asked[0][1]
    assert [(each["name"], each["used"]) for each in found["nodes"]] == [("n1", 10), ("n2", 3000)]
    assert "".join(found["table"]).startswith("NAME:") and "wide" not in found


def test_the_result_is_that_of_version_1(api, kube):
    # Made by the version before the lists were read without the Kubernetes client.
    api.lists = mixed_cluster()
    expected = json.loads((Path(__file__).parent / "mixed_cluster.json").read_text())
    found = collect(kube, ("table", "wide"))
    assert json.loads("".join(_parts(found))) == expected


def test_the_result_says_of_which_cluster_and_when(api, kube):
    now = datetime.datetime(2026, 11, 26, 3, 5, 7, tzinfo=datetime.UTC)
    found = report(kube, (), now)
    assert (found["cluster"], found["time"], found["total"]) == (api.url, "2026-11-26T03:05:07Z", 32)


def test_all_pages_are_read(api, kube, monkeypatch):
    monkeypatch.setattr(stream, "PAGE", 5)
    monkeypatch.setattr(stream, "CHUNK", 100)
    assert collect(kube)["nodes"][0]["used"] == 10
    assert kube.requests == {"GET": 6}


def test_only_requested_tables_are_returned(kube):
    assert set(collect(kube, ())) & {"table", "wide"} == set()
    assert set(collect(kube, ("wide",))) & {"table", "wide"} == {"wide"}


def test_an_expired_list_is_requested_once_more(api, kube, monkeypatch):
    monkeypatch.setattr(stream, "PAGE", 5)
    api.failures = [None, None, 410]
    assert collect(kube)["nodes"][0]["used"] == 10
    assert kube.requests == {"GET": 8}
    api.failures = [None, None, 410, None, 410]
    with pytest.raises(ShareError, match="the list of Pods expired twice"):
        collect(kube)


@pytest.mark.parametrize(
    ("status", "words"), [(401, "doesn't accept these credentials"), (403, "lacks a permission"), (500, "(500)")]
)
def test_an_http_error_is_one_line(api, kube, status, words):
    api.failures = [status]
    with pytest.raises(ShareError) as error:
        collect(kube)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert isinstance(error.value, KubeError) and error.value.status == status


def test_a_truncated_response_is_reported(api, kube):
    api.cut = True
    with pytest.raises(BadInput, match="can't be reached"):
        collect(kube)


def test_a_refused_connection_is_reported(api, kube):
    api.close()
    with pytest.raises(BadInput, match="can't be reached: connection refused"):
        collect(kube)


# --------------------------------------------------------------------------- the output


class Module:
    check_mode = False

    def __init__(self, *secrets):
        self.no_log_values, self.slow, self.cleaned = set(secrets), None, 0

    def exit_json(self, **result):
        self.slow = result

    def do_cleanup_files(self):
        self.cleaned += 1


def test_a_long_text_is_printed_in_its_parts(capsys):
    with pytest.raises(SystemExit):
        LargeResult(Module()).exit_json(table=("é\n", '"two"'), nothing=())
    assert json.loads(capsys.readouterr().out) == {"changed": False, "table": 'é\n"two"', "nothing": ""}
    module = Module("two")
    LargeResult(module).exit_json(table=("one ", "two"))
    assert module.slow == {"table": "one two"}


RESULT = {
    "nodes": [{"name": "a"}, {"name": 'quo"te'}],
    "waiting": [],
    "total": 3,
    "unit": None,
    "table": "é\n",
    "d": {"GET": 2},
}


def test_a_result_without_secrets_is_printed_directly(capsys):
    module = Module("other", "")
    with pytest.raises(SystemExit) as ended:
        LargeResult(module).exit_json(**RESULT)
    assert ended.value.code == 0 and module.cleaned == 1 and module.slow is None
    assert json.loads(capsys.readouterr().out) == {"changed": False, **RESULT}


@pytest.mark.parametrize("secret", ["a", 'quo"te', "é", "GET", "3", 3])
def test_a_result_with_a_secret_is_printed_by_ansible(secret, capsys):
    module = Module(secret)
    LargeResult(module).exit_json(**RESULT)
    assert module.slow == RESULT
    assert capsys.readouterr().out == ""


def test_a_result_with_warnings_is_printed_by_ansible(monkeypatch):
    monkeypatch.setattr(warnings, "get_warning_messages", lambda: ("careful",))
    module = Module()
    LargeResult(module).exit_json(**RESULT)
    assert module.slow == RESULT


def test_the_module_as_a_process(api, tmp_path):
    config = tmp_path / "config"
    config.write_text(json.dumps(kubeconfig(api.url)))
    arguments = {"ANSIBLE_MODULE_ARGS": {"kubeconfig": str(config), "tables": ["table", "wide"]}}
    packages = [str(ROOT / ".collections"), str(Path(ansible.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.kubegpu.share.plugins.modules.gpu_allocation_info"],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(packages), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert (found["requests"], found["changed"], found["total"], found["used"]) == ({"GET": 2}, False, 32, 10)
    assert "GPU1 [######....] 10/16  NVIDIA T4" in found["table"] and "uid-a" in found["wide"]
    assert SECRET not in done.stdout
