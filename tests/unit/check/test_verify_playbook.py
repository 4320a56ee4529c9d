# SPDX-License-Identifier: GPL-3.0-or-later
"""verify.yml: which modules run with which options, when a second sample is taken, and the exit status."""

from __future__ import annotations

import json

import pytest
from verify_kit import KUBELET, NVML, UUID, VIRTUAL, Stage, chosen, evidence, extender, finding, report, stats

# Nothing listens on port 1.
UNREACHABLE = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_user": "nobody"}

RUNNING = [
    {"pid": 7, "config": "/c", "policy": "", "version": "", "stamp": "", "fresh": True, "loaded": {}, "extender": True}
]
# As a control plane's machine answers.
CONTROL_PLANE = {
    **dict.fromkeys(("kind", "version", "folder", "manifest_path", "link", "config_path", "policy_path"), ""),
    **dict.fromkeys(("config", "policy", "ours", "ours_policy", "merged", "server"), None),
    **{"patches_dir": "", "hostname": "", "embedded": "", "others": {}, "patches": {}, "health": 0, "pending": False},
    **{"running": RUNNING, "manifest": "text"},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Ansible builds the archive of a module once for all runs of one collection."""
    return Stage(tmp_path_factory.mktemp("stage"))


@pytest.fixture
def stage(built):
    built.reset()
    return built


def test_transient_failures_take_a_second_sample_and_failing_machines_are_unknown(stage, tmp_path):
    stage.returns("control_plane_info", {"control_plane": CONTROL_PLANE})
    first = report(finding("FAIL"), finding("UNKNOWN", "C2", "gpu3"))
    second = report(finding("UNKNOWN", "C2", "gpu3"), samples=2)
    stage.returns("gpu_allocation_check", {"report": first}, {"report": second})
    held = {"id": "Y2", "result": "PASS", "n": 3}
    stage.returns("gpu_acceptance", {"checks": [held], "findings": []})
    hosts = {
        "gpu_nodes": {
            "gpu1": {"gpu_node_name": "node-one"},
            "gpu2": UNREACHABLE,
            # The stand-in fails as with a broken Python.
            "gpu3": {"verify_nvml_timeout": 99},
            "cp1": {},
        },
        "control_plane": {"cp1": {}, "cp2": {**UNREACHABLE, "gpu_node_name": "away"}},
    }
    page = tmp_path / "out" / "page.html"
    page.parent.mkdir()
    with extender('{"nodes": [{"name": "node-one"}]}') as url:
        words = ["verify_grace=1", f"verify_html={page}", f"verify_json={page.parent}/report.json"]
        words += [f"verify_extender_url={url}", "verify_canary=true", "verify_strict=no"]
        rc, text = stage.play(*[word for each in words for word in ("-e", each)], hosts=hosts)
    # Neither UNKNOWN nor an unreachable machine fails the run.
    assert rc == 0, text
    one, two = stage.calls("gpu_allocation_check")
    assert one["before"] is None and two["before"] == first
    for call in (one, two):
        nodes = evidence(call)
        assert sorted(nodes) == ["cp1", "gpu2", "gpu3", "node-one"]
        assert nodes["node-one"]["nvml"] == NVML and nodes["node-one"]["problem"] == ""
        assert nodes["node-one"]["kubelet"] == KUBELET
        assert nodes["node-one"]["virtual_machines"] == VIRTUAL
        assert nodes["gpu2"]["nvml"] is None and nodes["gpu2"]["kubelet"] is None
        assert nodes["gpu2"]["problem"].startswith("its machine is unreachable: "), nodes["gpu2"]
        assert nodes["gpu3"]["nvml"] is None and nodes["gpu3"]["kubelet"] is not None
        assert nodes["gpu3"]["problem"].startswith("NVML couldn't be queried: "), nodes["gpu3"]
        assert call["extender"]["cp1"] == {"nodes": [{"name": "node-one"}]}
        assert isinstance(call["extender"]["away"], str) and call["extender"]["away"]
        servers = {"control_plane": ["cp1", "away"], "namespace": "gpushare-system", "admission": "deny"}
        servers |= {"scheduler": "static_pod", "problem": "", "running": {"cp1": RUNNING, "away": []}}
        servers |= {"reserved_mib": 0, "dedicated_namespace": "gpushare-scheduler"}
        assert call["servers"] == servers and call["scope"] is None
        assert call["grace_seconds"] == 1
    assert len(stage.calls("control_plane_info")) == 2
    # Unreachable machines are left out of the second sample.
    assert len(stage.calls("nvml_info")) == 6 and text.count("UNREACHABLE!") == 2, text
    stat = stats(text)
    assert (stat["result"], stat["findings"]) == ("UNKNOWN", second["findings"])
    assert stat["counts"] == {**second["counts"], "PASS": second["counts"]["PASS"] + 1}
    assert "C2 of gpu3 is UNKNOWN" in page.read_text()
    written = json.loads((page.parent / "report.json").read_text())
    assert written == {**second, "counts": stat["counts"], "checks": [*second["checks"], held]}
    [call] = stage.calls("gpu_acceptance")
    assert call["namespace"] is None and call["scheduler_name"] is None and call["timeout"] == 120


def test_findings_of_the_only_sample_fail_the_run(stage):
    findings = [finding("FAIL"), finding("WARN", "G9", "gpu2"), *(finding("FAIL", "C2", f"n{at}") for at in range(12))]
    stage.returns("gpu_allocation_check", {"report": report(*findings)})
    with extender("no JSON") as url:
        rc, text = stage.play(
            *("-e", "verify_grace=0", "-e", "verify_nodes=gpu1,gpu9", "-e", "verify_allowed_processes=Xorg,dcgm"),
            hosts={"gpu_nodes": {"gpu1": {}, "gpu2": {}}, "control_plane": {"cp1": {}}},
            verify_extender_url=url,
        )
    assert rc == 2, text
    assert "FAIL: 13 findings (G6 on gpu1, C2 on n0," in text and "C2 on n8 and more), reported above" in text
    assert "G9 on" not in text.split("reported above")[0].rsplit("FAIL: ", 1)[1]
    [call] = stage.calls("gpu_allocation_check")
    assert evidence(call)["gpu1"]["problem"] == ""
    # Not in verify_nodes.
    assert evidence(call)["gpu2"]["problem"] == "its machine wasn't observed in this run"
    assert call["extender"] == {"cp1": "its answer isn't JSON"}
    # Nor may its pod be asked.
    assert call["pods"] == {"namespace": "gpushare-system", "nodes": ["gpu1", "gpu9"], "timeout": 30}
    assert call["allowed_processes"] == ["Xorg", "dcgm"] and call["allowed_pods"] is None
    assert stats(text)["result"] == "FAIL"


@pytest.mark.long
def test_unknown_takes_no_second_sample_and_fails_only_with_verify_strict(stage):
    """With an empty inventory the scheduler is unknown, and so are the servers."""
    stage.returns("cluster_info", {"fail": "control_plane: this group is empty, and scheduler_mode is static_pod"})
    lasting = finding("WARN", "S5", ""), finding("WARN", "C8", cause="privileged")
    stage.returns("gpu_allocation_check", {"report": report(finding("UNKNOWN", "C2"), *lasting)})
    rc, text = stage.play(hosts={})
    assert rc == 0 and "Pausing for" not in text, text
    assert len(stage.calls("gpu_allocation_check")) == 1
    stage.returns("gpu_allocation_check", {"report": report(finding("UNKNOWN", "C2"))})
    rc, text = stage.play("-e", "verify_strict=true", "-e", "verify_grace=0", hosts={})
    assert rc == 2 and "UNKNOWN: 1 finding (C2 on gpu1), reported above" in text, text
    [call] = stage.calls("gpu_allocation_check")
    assert call["nodes"] == {} and call["extender"] is None
    assert call["servers"]["problem"] == "control_plane: this group is empty, and scheduler_mode is static_pod"


@pytest.mark.long
def test_without_our_namespace_the_servers_arent_checked_and_a_dedicated_scheduler_has_no_extender_on_machines(stage):
    stage.returns("cluster_info", chosen("dedicated", ours=False))
    stage.returns("gpu_allocation_check", {"report": report(finding("WARN", "N5"))})
    broken = {"id": "Y3", "result": "FAIL", "n": 1, "fail": 1}
    stage.returns("gpu_acceptance", {"checks": [broken], "findings": [finding("FAIL", "Y3")]})
    hosts = {"gpu_nodes": {"gpu1": {}}, "control_plane": {"cp1": {}}}
    rc, text = stage.play("-e", "verify_grace=0", "-e", "verify_canary=yes", hosts=hosts)
    # A failed step of the canary fails the run.
    assert rc == 2 and "FAIL: 1 finding (Y3 on gpu1), reported above" in text, text
    assert [one["check"] for one in stats(text)["findings"]] == ["Y3", "N5"]
    [call] = stage.calls("gpu_allocation_check")
    assert call["servers"] is None and call["extender"] is None
    assert call["schedulers"] == ["gpushare-scheduler"]
    assert stage.calls("gpu_acceptance")[0]["scheduler_name"] == "gpushare-scheduler"


@pytest.mark.long
def test_a_canary_that_cannot_run_is_unknown(stage):
    stage.returns("gpu_acceptance", {"fail": "the namespace is another client's"})
    rc, text = stage.play(hosts={"gpu_nodes": {"gpu1": {}}}, verify_canary=True)
    assert rc == 0, text
    stat = stats(text)
    assert stat["result"] == "UNKNOWN" and stat["counts"]["UNKNOWN"] == 1
    assert stat["findings"][0]["what"] == "the canary didn't run: the namespace is another client's"


@pytest.mark.long
def test_an_unreachable_api_server_is_reported(stage):
    message = "kubeconfig (variable gpu_kubeconfig): the API server at https://x can't be reached: connection refused"
    for module in ("cluster_info", "gpu_allocation_check"):
        stage.returns(module, {"fail": message})
    rc, text = stage.play(hosts={})
    assert rc == 2 and message in text, text


# --------------------------------------------------------------------------- the last step of site.yml

ROLE = [{"hosts": "localhost", "gather_facts": False, "roles": ["kubegpu.share.verify"]}]


@pytest.fixture
def last_step(stage):
    path = stage.folder / "last_step.yml"
    path.write_text(json.dumps(ROLE))

    def run(*words, **variables):
        cards = {"gpu_node": {"driver": {"cards": [{"uuid": UUID.format(1)}]}}}
        hosts = {"gpu_nodes": {"gpu1": cards, "gpu2": {}}, "control_plane": {"cp1": {}}}
        return stage.play(*words, hosts=hosts, playbook=path, verify_grace=1, **variables)

    return run


def test_sites_last_step_repeats_a_failed_check(stage, last_step):
    """Kubelet's status may be that from between the old device plugin and the new one."""
    first = report(finding("FAIL", "C6"))
    stage.returns("gpu_allocation_check", {"report": first}, {"report": report(samples=2)})
    rc, text = last_step()
    assert rc == 0, text
    one, two = stage.calls("gpu_allocation_check")
    assert (one["before"], two["before"]) == (None, first)
    for call in (one, two):
        assert (call["scope"], call["nodes"]) == ("servers", {"gpu1": [UUID.format(1)], "gpu2": []})
        assert (call["servers"]["control_plane"], call["servers"]["running"]) == (["cp1"], {})
    assert stage.calls("nvml_info") == []


@pytest.mark.long
def test_sites_last_step_fails_after_two_samples_and_only_reports_in_check_mode(stage, last_step):
    both = {"report": report(finding("FAIL", "S1"), finding("WARN", "S5", ""), samples=2)}
    stage.returns("gpu_allocation_check", both)
    rc, text = last_step()
    assert rc == 2 and "FAIL: 1 finding (S1 on gpu1), reported above" in text and "S5 of" in text, text
    rc, text = last_step("--check")
    assert rc == 0 and "run without --check for the final result" in text and "S1 of gpu1 is FAIL" in text, text
    assert len(stage.calls("gpu_allocation_check")) == 1


def test_where_claims_allocate_all_cards_control_planes_are_left_alone(stage):
    """The variable is each node's: localhost has none, and a value of it there changes nothing."""
    stage.returns("cluster_info", {"scheduler": None, "backends": {"parts": {"extender": False, "dra": True}}})
    away = {"acceptance": {"node": "gpu1", "untested": ["gpu2"], "steps": []}, "checks": [], "findings": []}
    stage.returns("gpu_acceptance", away)
    hosts = {"gpu_nodes": {"gpu1": {"gpushare_allocation": "dra"}, "gpu2": {}}, "control_plane": {"cp1": {}}}
    given = {"verify_canary": True, "gpushare_allocation": "extender"}
    rc, text = stage.play("-e", "verify_grace=0", hosts=hosts, **given)
    assert rc == 0, text
    [asked] = stage.calls("cluster_info")
    assert asked["backends"] == {"wanted": None}
    [call] = stage.calls("gpu_allocation_check")
    assert call["servers"]["problem"] == "" and "allocation" not in call["servers"]
    assert call["extender"] is None and not stage.calls("control_plane_info")
    assert "The canary ran on gpu1. Not tested: gpu2, whose cards have the other allocation" in text
