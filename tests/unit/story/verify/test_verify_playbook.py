# SPDX-License-Identifier: GPL-3.0-or-later
"""verify.yml: who is asked what, when a second look is taken, and with which status it ends."""

from __future__ import annotations

import json

import pytest
from verify_kit import UUID, Extender, Stage, chosen, evidence, finding, report, stats

# Nobody listens on port 1; the host's own words are ssh's.
AWAY = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_user": "nobody"}


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_what_passes_by_itself_is_looked_at_twice_and_machines_that_fail_are_unknown(stage, tmp_path):
    first = report(finding("FAIL"), finding("UNKNOWN", "C2", "gpu3"))
    second = report(finding("UNKNOWN", "C2", "gpu3"), samples=2)
    stage.says("gpu_allocation_check", {"report": first}, {"report": second})
    held = {"id": "Y2", "result": "PASS", "n": 3}
    stage.says("gpu_canary", {"checks": [held], "findings": []})
    hosts = {
        "gpu_nodes": {
            "gpu1": {"gpu_node_name": "node-one"},
            "gpu2": AWAY,
            # Its Python is broken, says the stand-in.
            "gpu3": {"verify_nvml_timeout": 99},
            "cp1": {},
        },
        "control_plane": {"cp1": {}, "cp2": {**AWAY, "gpu_node_name": "away"}},
    }
    page = tmp_path / "out" / "page.html"
    page.parent.mkdir()
    with Extender('{"nodes": [{"name": "node-one"}]}') as extender:
        words = ["verify_grace=1", f"verify_html={page}", f"verify_json={page.parent}/story.json"]
        words += [f"verify_extender_url={extender.url}", "verify_canary=true", "verify_strict=no"]
        rc, text = stage.play(*[word for each in words for word in ("-e", each)], hosts=hosts)
    # UNKNOWN is told and fails nothing, and neither does a machine that is away.
    assert rc == 0, text
    one, two = stage.calls("gpu_allocation_check")
    assert one["before"] is None and two["before"] == first
    for call in (one, two):
        nodes = evidence(call)
        assert sorted(nodes) == ["cp1", "gpu2", "gpu3", "node-one"]
        assert nodes["node-one"]["nvml"]["cards"] == [{"uuid": UUID.format(1)}] and nodes["node-one"]["problem"] == ""
        assert nodes["node-one"]["kubelet"] == {"root": "/var/lib/kubelet"}
        assert nodes["gpu2"]["nvml"] is None and nodes["gpu2"]["kubelet"] is None
        assert nodes["gpu2"]["problem"].startswith("its machine can't be reached: "), nodes["gpu2"]
        assert nodes["gpu3"]["nvml"] is None and nodes["gpu3"]["kubelet"] is not None
        assert nodes["gpu3"]["problem"].startswith("NVML couldn't be asked: "), nodes["gpu3"]
        assert call["extender"]["cp1"] == {"nodes": [{"name": "node-one"}]}
        assert isinstance(call["extender"]["away"], str) and call["extender"]["away"]
        assert call["story"] == {"problems": [], "unknown": [], "passed": ["fine"], "notes": []}
        assert call["grace_seconds"] == 1
    # Who was away isn't waited for a second time.
    assert len(stage.calls("nvml_info")) == 6 and text.count("UNREACHABLE!") == 2, text
    # The cards are those that NVML told.
    cards = {"node-one": [UUID.format(1)], "cp1": [UUID.format(1)], "gpu2": [], "gpu3": []}
    assert [call["cards"] for call in stage.calls("verification_info")] == [cards, cards]
    handed = stats(text)
    assert (handed["result"], handed["findings"]) == ("UNKNOWN", second["findings"])
    assert handed["counts"] == {**second["counts"], "PASS": second["counts"]["PASS"] + 1}
    assert "C2 of gpu3 is UNKNOWN" in page.read_text()
    written = json.loads((page.parent / "story.json").read_text())
    assert written == {**second, "counts": handed["counts"], "checks": [*second["checks"], held]}
    [call] = stage.calls("gpu_canary")
    assert call["namespace"] is None and call["scheduler_name"] is None and call["timeout"] == 120


def test_what_stays_fails_and_is_named(stage):
    findings = [finding("FAIL"), finding("WARN", "G9", "gpu2"), *(finding("FAIL", "C2", f"n{at}") for at in range(12))]
    stage.says("gpu_allocation_check", {"report": report(*findings)}, {"report": report(*findings, samples=2)})
    with Extender("no JSON") as extender:
        rc, text = stage.play(
            *("-e", "verify_grace=1", "-e", "verify_nodes=gpu1,gpu9", "-e", "verify_allowed_processes=Xorg,dcgm"),
            hosts={"gpu_nodes": {"gpu1": {}, "gpu2": AWAY}, "control_plane": {"cp1": {}}},
            verify_extender_url=extender.url,
        )
    assert rc == 2, text
    assert "FAIL: 13 findings (G6 on gpu1, C2 on n0," in text and "C2 on n8 and more), told above" in text
    assert "G9 on" not in text.split("told above")[0].rsplit("FAIL: ", 1)[1]
    for call in stage.calls("gpu_allocation_check"):
        assert evidence(call)["gpu1"]["problem"] == ""
        # Not named, so not asked.
        assert evidence(call)["gpu2"]["problem"] == "its machine wasn't looked at in this run"
        assert call["extender"] == {"cp1": "its answer isn't JSON"}
        assert call["allowed_processes"] == ["Xorg", "dcgm"] and call["allowed_pods"] is None
    assert stats(text)["result"] == "FAIL"


def test_unknown_needs_no_second_look_and_fails_only_where_that_is_asked_for(stage):
    """The scheduler can't be told, the servers aren't looked at, nothing is in the inventory."""
    stage.says("scheduler_info", {"fail": "control_plane: this group is empty, and scheduler_mode is static_pod"})
    stage.says("gpu_allocation_check", {"report": report(finding("UNKNOWN", "C2"), finding("WARN", "S1", ""))})
    rc, text = stage.play(hosts={})
    assert rc == 0 and "Pausing for" not in text, text
    assert len(stage.calls("gpu_allocation_check")) == 1
    stage.says("gpu_allocation_check", {"report": report(finding("UNKNOWN", "C2"))})
    rc, text = stage.play("-e", "verify_strict=true", "-e", "verify_grace=0", hosts={})
    assert rc == 2 and "UNKNOWN: 1 finding (C2 on gpu1), told above" in text, text
    [call] = stage.calls("gpu_allocation_check")
    assert call["nodes"] == {} and call["extender"] is None
    assert call["story"] == {
        "unknown": [
            "how this cluster runs its scheduler can't be told, so gpushare's servers weren't looked at: "
            "control_plane: this group is empty, and scheduler_mode is static_pod"
        ]
    }
    assert stage.calls("verification_info") == []


def test_other_backends_have_no_servers_of_ours_and_a_scheduler_of_its_own_no_extender_on_machines(stage):
    stage.says("scheduler_info", chosen("dedicated", ours=False))
    stage.says("gpu_allocation_check", {"report": report(finding("WARN", "N5"))})
    broken = {"id": "Y3", "result": "FAIL", "n": 1, "fail": 1}
    stage.says("gpu_canary", {"checks": [broken], "findings": [finding("FAIL", "Y3")]})
    hosts = {"gpu_nodes": {"gpu1": {}}, "control_plane": {"cp1": {}}}
    rc, text = stage.play("-e", "verify_grace=0", "-e", "verify_canary=yes", hosts=hosts)
    # What the canary finds broken is a failure like any other.
    assert rc == 2 and "FAIL: 1 finding (Y3 on gpu1), told above" in text, text
    assert [one["check"] for one in stats(text)["findings"]] == ["Y3", "N5"]
    [call] = stage.calls("gpu_allocation_check")
    assert call["story"] is None and call["extender"] is None and stage.calls("verification_info") == []
    assert call["schedulers"] == ["gpushare-scheduler"]
    assert stage.calls("gpu_canary")[0]["scheduler_name"] == "gpushare-scheduler"


def test_servers_that_cannot_be_looked_at_and_a_canary_that_cannot_run_are_unknown(stage):
    stage.says("verification_info", {"fail": "its user may not do this: pods is forbidden"})
    stage.says("gpu_canary", {"fail": "the namespace is somebody else's"})
    rc, text = stage.play(hosts={"gpu_nodes": {"gpu1": {}}}, verify_canary=True)
    assert rc == 0, text
    [call] = stage.calls("gpu_allocation_check")
    said = "gpushare's servers weren't looked at: its user may not do this: pods is forbidden"
    assert call["story"] == {"unknown": [said]}
    handed = stats(text)
    assert handed["result"] == "UNKNOWN" and handed["counts"]["UNKNOWN"] == 1
    assert handed["findings"][0]["what"] == "the canary didn't run: the namespace is somebody else's"


def test_a_cluster_that_does_not_answer_is_an_error_in_a_sentence(stage):
    said = "kubeconfig (variable gpu_kubeconfig): the API server at https://x can't be reached: connection refused"
    for module in ("scheduler_info", "verification_info", "gpu_allocation_check"):
        stage.says(module, {"fail": said})
    rc, text = stage.play(hosts={})
    assert rc == 2 and said in text, text
