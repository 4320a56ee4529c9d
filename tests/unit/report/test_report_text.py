# SPDX-License-Identifier: GPL-3.0-or-later
"""The report in a terminal."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._report.parse import view
from ansible_collections.kubegpu.share.plugins.module_utils._report.text_output import WIDTH, render
from report_samples import ALLOCATION, HEALTHY, NVIDIA, TROUBLE, card, check, finding, node, pod, report


def test_findings_come_first_with_all_their_fields():
    lines = render(view(TROUBLE, None)).splitlines()
    assert lines[:5] == [
        "FAIL     C2  node gpu1, card 0, GPU-5a4d7f2e-0000-4000-8000-000000000001",
        "         A process uses the card outside any pod.",
        "         nvml  process 20817 (python3) holds 2048 MiB of card 0",
        "         proc  its cgroup is /user.slice/user-1000.slice/session-4.scope, which is no pod's",
        "         do    Ask who runs process 20817 on gpu1, and stop it or move it into a pod.",
    ]
    heads = [line.split()[:2] for line in lines if line.startswith(("FAIL ", "WARN ", "UNKNOWN "))]
    assert heads == [["FAIL", "C2"], ["FAIL", "G6"], ["WARN", "G9"], ["UNKNOWN", "C5"]]
    assert any("pod research/notebook-7d9c5b6f4-x2v8q" in line for line in lines)


def test_checks_follow_and_the_result_is_last():
    lines = render(view(TROUBLE, None)).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("CHECK"))
    rows = {line.split()[0]: line for line in lines[start + 1 : start + 9]}
    assert rows["G6"].split()[:7] == ["G6", "gpushare", "FAIL", "6", "1", "-", "-"]
    assert "nothing to check" in rows["G10"] and "PASS" not in rows["G10"]
    assert lines[-3] == "2 contradictions of the first sample only, which is no finding."
    assert lines[-1] == (
        "FAIL: Scheduler, kubelet and GPUs contradict each other. 2 FAIL, 1 WARN, 1 UNKNOWN; 2 of 8 checks passed, "
        "2 had nothing to check."
    )


def test_a_healthy_cluster_is_its_checks_and_one_line():
    shown = render(view(HEALTHY, None))
    assert not any(word in shown for word in ("do  ", "first sample"))
    assert shown.splitlines()[-1] == (
        "PASS: Scheduler, kubelet and GPUs agree. 0 FAIL, 0 WARN, 0 UNKNOWN; 2 of 3 checks passed, "
        "1 had nothing to check."
    )


def test_a_back_end_that_no_node_has_is_one_line():
    checks = [
        {**check(name, n=0), "backend": backend}
        for backend, names in (("dra", ("D1", "D2")), ("hami", ("H1", "H2", "H3")), ("gpushare", ("G1",)))
        for name in names
    ]
    lines = render(view(report([*checks, check("C1", n=1)], [], [node("gpu1")]), None)).splitlines()
    heads = [line.split()[0] for line in lines[1:-1] if line]
    # The node has gpushare, so its check says for itself that it had nothing to check.
    assert heads == ["G1", "C1", "D*", "H*"]
    assert lines[4].split()[1:5] == ["hami", "no", "node", "has"] and lines[4].endswith(
        "3 checks of this back end had nothing to check"
    )


def test_a_check_of_a_missing_back_end_with_findings_keeps_its_lines():
    found = finding("H10", level="UNKNOWN")
    checks = [{**check("H1", n=0), "backend": "hami"}, {**check("H10", "UNKNOWN", n=0), "backend": "hami"}]
    shown = render(view(report(checks, [found], [node("gpu1")]), None))
    assert "no node has it" not in shown and "\nH1 " in shown


def test_findings_per_check_are_limited():
    many = [finding("C2", node=f"gpu{n}") for n in range(50)]
    shown = render(view(report([check("C2", "FAIL"), check("G6", "FAIL")], [*many, finding("G6")], []), None))
    assert shown.count("FAIL     C2") == 20 and shown.count("FAIL     G6") == 1
    assert "         and 30 more of C2\n" in shown
    assert "51 FAIL" in shown.splitlines()[-1]


def test_long_sentences_are_wrapped_below_their_start():
    evidence = {"api": "word " * 60}
    shown = render(view(report([check("C2", "FAIL")], [finding("C2", evidence=evidence)], []), None))
    lines = shown.partition("CHECK")[0].splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[3].startswith("              word word")


def test_an_allocation_is_a_table_of_cards():
    lines = render(view(None, ALLOCATION)).splitlines()
    assert lines[1].split() == [
        *("gpu2", "0", "[###############.....]", "12", "GiB", "16", "GiB", "75", "%", "-", "2"),
        *("UNHEALTHY", "ECC", "errors"),
    ]
    assert lines[2].split() == ["gpu2", "?", "2", "GiB", "1", "card", "unknown"]
    assert lines[3].startswith("gpu10")
    assert "  b/big requests 64 GiB: no card has so much" in lines
    assert lines[-1] == "2 nodes, 2 cards. Nothing was checked."
    assert render(view(None, {})) == "No node shares a GPU.\n\n0 nodes, 0 cards. Nothing was checked.\n"


def test_resources_without_cards_are_in_the_table():
    lines = render(view(None, NVIDIA)).splitlines()
    assert lines[1].split()[:3] == ["dgx1", "-", "[########............]"]
    assert lines[1].split()[3:] == ["3", "shares", "8", "shares", "37", "%", "-", "nvidia.com/gpu.shared"]
    assert lines[2].split() == ["dgx1", "?", "3", "shares", "2", "card", "unknown"]
    assert lines[3].split()[:3] == ["dgx1", "its", "label"]


def test_bars_mark_overbooked_and_unknown_use():
    over = {**ALLOCATION, "nodes": [{**ALLOCATION["nodes"][1]}]}
    over["nodes"][0]["cards"] = [{**over["nodes"][0]["cards"][0], "used": 20}]
    assert "[####################!" in render(view(None, over))
    over["nodes"][0]["cards"] = [{**over["nodes"][0]["cards"][0], "used": None}]
    assert "[????????????????????]" in render(view(None, over))


def test_control_characters_of_the_cluster_are_removed():
    evil = "\x1b]0;owned\x07\x1b[2Jx\rPASS\x9b31m\u202e"
    wrong = finding(evil, node=evil, pod=evil, container=evil, what=evil, do=evil, evidence={evil: evil})
    shown = report([check(evil, backend=evil, title=evil)], [wrong], [node(evil, card(0, pod(evil, 1, 1), model=evil))])
    for words in (
        render(view(shown, None)),
        render(view(None, {"nodes": [{"name": evil, "cards": [{"reason": evil}]}]})),
    ):
        assert not [word for word in words if (ord(word) < 32 and word != "\n") or 127 <= ord(word) < 160]
        assert "\u202e" not in words
