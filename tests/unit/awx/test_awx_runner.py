# SPDX-License-Identifier: GPL-3.0-or-later
"""ansible-runner, AWX's engine, runs the playbooks with the execution environment's packages, not in a container."""

from __future__ import annotations

import sys

import pytest
from awx_kit import ROOT, variables
from awx_stand_in import API, Controller

sys.path.insert(0, str(ROOT / "tests"))

import built_collection
import runner
from real_apiserver import MERGE
from taken_machine import TakenMachine

pytestmark = pytest.mark.long
NODE, SHARED = "managed-1", "shared-1"
# A cluster whose nodes and schedulers aren't machines of the inventory.
SETTINGS = {
    "gpushare_nodes": [NODE],
    "scheduler_mode": "dedicated",
    "gpushare_image_delivery": "registry",
    "gpushare_image": "registry.example.org/kubegpu/gpushare:1.1.0",
}
EMPTY = {"gpu_nodes": {"hosts": []}, "control_plane": {"hosts": []}, "all": {"vars": SETTINGS}}
LOCAL = {"_meta": {"hostvars": {"machine-1": {"ansible_connection": "local"}}}}
MACHINE = {**EMPTY, "gpu_nodes": {"hosts": ["machine-1"]}, **LOCAL}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with built_collection.installed() as (folder, _paths):
        yield runner.Environment(tmp_path_factory.mktemp("awx"), folder / "collections")


@pytest.fixture(scope="module")
def credential(api_server):
    """What AWX makes of the credential type in awx/vars.yml."""
    controller = Controller([])
    made = {"kind": "cloud", **variables()["awx_kubeconfig_type"]}
    _status, kind = controller.answer("POST", f"{API}credential_types/", {}, made)
    inputs = {"kubeconfig": api_server.kubeconfig.read_text()}
    body = {"name": "k", "organization": 1, "credential_type": kind["id"], "inputs": inputs}
    controller.answer("POST", f"{API}credentials/", {}, body)
    return controller.injected("k", "PATH")


@pytest.fixture(scope="module", autouse=True)
def nodes(api_server):
    """A node that is to be set up, and one that announces memory of a card."""
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}
    info = {"containerRuntimeVersion": "containerd://2.2.0", "kubeletVersion": "v1.36.0", "architecture": "amd64"}
    shared = {"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1"}
    for name, resources in ((NODE, {}), (SHARED, shared)):
        api_server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        status = {"conditions": [ready], "nodeInfo": info, "capacity": resources, "allocatable": resources}
        api_server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)
    yield
    for name in (NODE, SHARED):
        api_server.request("DELETE", f"/api/v1/nodes/{name}")


@pytest.fixture
def job(environment, credential):
    def run(template, inventory, *words, **answers):
        """Run a job template of awx/vars.yml, with an account on the machines that is named root."""
        become = ["--become"] if variables()["awx_job_templates"][template].get("become") else []
        given = ["-u", "root", *become, "--forks", "20", "--diff", *words]
        done = environment.job(f"playbooks/{template}.yml", inventory, credential, *given, **answers)
        assert (done.status == "successful") is (done.rc == 0), done.output
        return done

    return run


def test_preflight_passes_or_says_why_not(job):
    done = job("preflight", EMPTY)
    assert done.rc == 0 and not done.results("runner_on_failed"), done.output
    wrong = {**EMPTY, "all": {"vars": {**SETTINGS, "gpushare_nodes": ["no-such-node"]}}}
    done = job("preflight", wrong)
    assert done.rc == 2 and "no-such-node" in done.output, done.output
    assert {host for host, _task in done.results("runner_on_failed")} == {"localhost"}


@pytest.mark.parametrize("template", ["plan", "site"])
def test_site_in_check_mode_and_plan(job, template):
    done = job(template, EMPTY, *(["--check"] if template == "site" else []))
    assert done.rc == 0, done.output
    assert ("gpu_plan" in done.artifacts) or template == "site", done.output


def test_verify_leaves_its_result_also_where_it_fails(job):
    done = job("verify", MACHINE, verify_grace=0)
    assert done.rc == 0 and done.artifacts["gpu_verify"]["result"] == "WARN", done.output
    assert ("machine-1", "Query NVML") in done.results("runner_on_ok")
    # A survey's answer is text.
    done = job("verify", MACHINE, verify_grace=0, verify_strict="true")
    assert done.rc == 2 and done.artifacts["gpu_verify"]["result"] == "WARN", done.output
    assert done.results("runner_on_failed") == [("localhost", "Fail if a check failed")]


def test_what_a_machine_returns_is_no_variable_and_no_artifact(job, tmp_path):
    taken = TakenMachine(tmp_path)
    own = {"machine-1": {"ansible_connection": "local", "ansible_python_interpreter": str(taken.python)}}
    done = job("verify", {**MACHINE, "_meta": {"hostvars": own}}, verify_grace=0)
    assert list(done.artifacts) == ["gpu_verify"] and not taken.marker.exists(), done.output
    assert "nvml_info returned variables" in done.output and "Removed restricted key" not in done.output


def test_inspect_leaves_the_totals(job):
    done = job("inspect", EMPTY, inspect_format="wide")
    assert done.rc == 0, done.output
    [totals] = done.artifacts["gpu_inspect"]["totals"]
    assert (totals["unit"], totals["total"]) == ("GiB", 16)
    assert [node["name"] for node in done.artifacts["gpu_inspect"]["nodes"]] == [SHARED]
