# SPDX-License-Identifier: GPL-3.0-or-later
"""The alerting rules: promtool runs each on a damaged and on a healthy cluster, and their metrics are the servers'."""

from __future__ import annotations

import json
import re
import subprocess
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._check.registry import CHECKS
from ansible_collections.kubegpu.share.plugins.module_utils._report import prometheus as report
from both_servers import Both
from gpushare.dra.metrics import Metrics as DriverMetrics
from prometheus_client import CollectorRegistry, generate_latest
from real_prometheus import Missing, programs

ROOT = Path(__file__).parents[4]
FILE = ROOT / "images" / "gpushare" / "alerts.yml"
GROUPS: list[dict[str, t.Any]] = yaml.safe_load(FILE.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
# Samples a minute apart; the longest rule looks at two hours.
MINUTES = 200
CARD = 'node="gpu1",card="0",uuid="GPU-1"'
EXTENDER, PLUGIN, DRIVER = 'instance="e"', 'instance="p"', 'instance="d"'


def always(value: float) -> str:
    return f"{value}x{MINUTES}"


def rising(step: int) -> str:
    return f"0+{step}x{MINUTES}"


Series = dict[str, str]
HEALTHY: Series = {
    f'gpushare_build_info{{component="extender",version="1.0.0",{EXTENDER}}}': always(1),
    f'gpushare_build_info{{component="device-plugin",version="1.0.0",{PLUGIN}}}': always(1),
    f'gpushare_build_info{{component="dra-driver",version="1.0.0",{DRIVER}}}': always(1),
    f'gpushare_plugin_refusals_total{{reason="CardFull",{DRIVER}}}': always(3),
    # The device plugin's refusals have their own Events.
    f'gpushare_plugin_refusals_total{{reason="UnknownDeviceID",{PLUGIN}}}': rising(1),
    f"gpushare_dra_forgotten_claims_total{{{DRIVER}}}": always(2),
    f"gpushare_dra_unbooked_cards{{{DRIVER}}}": always(0),
    f'gpushare_mirror_age_seconds{{objects="pods",{EXTENDER}}}': always(30),
    f'gpushare_extender_requests_total{{verb="bind",result="bound",{EXTENDER}}}': rising(9),
    f'gpushare_extender_requests_total{{verb="bind",result="refused",{EXTENDER}}}': rising(3),
    f'gpushare_extender_requests_total{{verb="bind",result="failed",{EXTENDER}}}': always(2),
    f'gpushare_extender_ledger_writes_total{{result="failed",{EXTENDER}}}': always(1),
    f"gpushare_card_capacity_units{{{CARD},{EXTENDER}}}": always(16),
    f"gpushare_card_booked_units{{{CARD},{EXTENDER}}}": always(16),
    f"gpushare_card_healthy{{{CARD},{EXTENDER}}}": always(1),
    f'gpushare_node_unplaced_units{{node="gpu1",{EXTENDER}}}': always(0),
    f'gpushare_extender_request_seconds_bucket{{verb="filter",le="1.0",{EXTENDER}}}': rising(100),
    f'gpushare_extender_request_seconds_bucket{{verb="filter",le="10.0",{EXTENDER}}}': rising(100),
    f'gpushare_extender_request_seconds_bucket{{verb="filter",le="+Inf",{EXTENDER}}}': rising(100),
    f"gpushare_plugin_card_units{{{CARD},{PLUGIN}}}": always(16),
    f"gpushare_plugin_card_healthy{{{CARD},{PLUGIN}}}": always(1),
    f"gpushare_plugin_card_unreleased_units{{{CARD},{PLUGIN}}}": always(0),
    f'gpushare_plugin_limit_state{{node="gpu1",state="enforced",{PLUGIN}}}': always(1),
    f'gpushare_plugin_limit_state{{node="gpu1",state="unenforced",{PLUGIN}}}': always(0),
    f'gpushare_plugin_limit_violations{{{CARD},reason="ForeignMemoryHeld",{PLUGIN}}}': always(0),
    f'gpushare_api_requests_total{{method="GET",code="200",{PLUGIN}}}': rising(20),
    f'gpushare_api_requests_total{{method="GET",code="503",{PLUGIN}}}': rising(1),
    # Written at the beginning; promtool's clock begins at 0.
    "kubegpu_report_timestamp_seconds": always(60),
    'kubegpu_check_result{check="G6",result="FAIL"}': always(0),
}


def changed(damage: Series, without: str = "") -> Series:
    kept = {name: values for name, values in HEALTHY.items() if not (without and name.startswith(without))}
    return kept | damage


def named(prefix: str) -> str:
    """The healthy series that begins like this."""
    [found] = [name for name in HEALTHY if name.startswith(prefix)]
    return found


# For each alert: the series, and the labels of the alert that has to fire; a label of the rule's own is added.
FIRING: dict[str, tuple[Series, dict[str, str]]] = {
    "GpushareExtenderAbsent": (changed({}, 'gpushare_build_info{component="ext'), {"component": "extender"}),
    "GpushareExtenderStale": (
        changed({named("gpushare_mirror_age"): always(121)}),
        {"instance": "e", "objects": "pods"},
    ),
    "GpushareBindsFail": (
        changed({f'gpushare_extender_requests_total{{verb="bind",result="failed",{EXTENDER}}}': rising(1)}),
        {"instance": "e", "result": "failed"},
    ),
    "GpushareLedgerFails": (changed({named("gpushare_extender_ledger"): rising(1)}), {"instance": "e"}),
    "GpushareCardOverbooked": (
        changed({named("gpushare_card_booked"): always(17)}),
        {"node": "gpu1", "card": "0", "uuid": "GPU-1"},
    ),
    "GpushareUnplacedUnits": (changed({named("gpushare_node_unplaced"): always(2)}), {"node": "gpu1"}),
    "GpushareExtenderSlow": (
        changed({named('gpushare_extender_request_seconds_bucket{verb="filter",le="1.0"'): rising(50)}),
        {"verb": "filter"},
    ),
    "GpushareDevicePluginAbsent": (
        changed({}, 'gpushare_build_info{component="device'),
        {"component": "device-plugin"},
    ),
    "GpushareDevicePluginMissing": (changed({}, "gpushare_plugin_card_units"), {"node": "gpu1"}),
    "GpushareCardUnhealthy": (
        changed({named("gpushare_plugin_card_healthy"): always(0)}),
        {"node": "gpu1", "card": "0", "uuid": "GPU-1"},
    ),
    "GpushareLimitsLost": (
        changed(
            {
                f'gpushare_plugin_limit_state{{node="gpu1",state="enforced",{PLUGIN}}}': f"1x30 {always(0)}",
                f'gpushare_plugin_limit_state{{node="gpu1",state="unenforced",{PLUGIN}}}': f"0x30 {always(1)}",
            }
        ),
        {"node": "gpu1"},
    ),
    "GpushareLimitViolated": (
        changed({named("gpushare_plugin_limit_violations"): always(1)}),
        {"node": "gpu1", "card": "0", "uuid": "GPU-1", "reason": "ForeignMemoryHeld"},
    ),
    "GpushareMemoryNotReleased": (
        changed({named("gpushare_plugin_card_unreleased"): always(4)}),
        {"node": "gpu1", "card": "0", "uuid": "GPU-1"},
    ),
    "GpushareDraDriverAbsent": (changed({}, 'gpushare_build_info{component="dra'), {"component": "dra-driver"}),
    "GpushareClaimsRefused": (
        changed({named('gpushare_plugin_refusals_total{reason="CardFull"'): rising(1)}),
        {"instance": "d", "reason": "CardFull"},
    ),
    "GpushareClaimsForgotten": (changed({named("gpushare_dra_forgotten"): rising(1)}), {"instance": "d"}),
    "GpushareMemoryWithoutClaim": (changed({named("gpushare_dra_unbooked"): always(1)}), {"instance": "d"}),
    "GpushareApiErrors": (
        changed({f'gpushare_api_requests_total{{method="GET",code="503",{PLUGIN}}}': rising(9)}),
        {"instance": "p"},
    ),
    "GpushareVersionsDiffer": (
        changed({f'gpushare_build_info{{component="device-plugin",version="0.9.0",{PLUGIN}}}': always(1)}),
        {},
    ),
    "GpushareVerifyOutdated": (changed({}, "kubegpu_report_timestamp"), {}),
    "GpushareVerifyFailed": (
        changed({named("kubegpu_check_result"): always(1)}),
        {"check": "G6", "result": "FAIL"},
    ),
}


def fired(alert: str, labels: dict[str, str]) -> dict[str, t.Any]:
    """An alert as promtool expects it."""
    texts = ALERTS[alert]["annotations"]
    filled = {key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: labels[m[1]], text) for key, text in texts.items()}
    return {"exp_labels": {**labels, **ALERTS[alert]["labels"]}, "exp_annotations": filled}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        program = programs()["promtool"]
    except Missing as error:
        pytest.skip(str(error))
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def outcome(tmp_path: Path, tests: t.Iterable[tuple[Series, dict[str, list[dict[str, t.Any]]]]]) -> str:
    """Run promtool on series and the alerts expected at their end; what it says, empty where all is as expected."""
    document = {
        "rule_files": [str(FILE)],
        "evaluation_interval": "5m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{MINUTES - 5}m", "alertname": alert, "exp_alerts": alerts}
                    for alert, alerts in expected.items()
                ],
            }
            for series, expected in tests
        ],
    }
    (tmp_path / "alerts_test.yml").write_text(json.dumps(document))
    done = promtool("test", "rules", str(tmp_path / "alerts_test.yml"))
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_finds_no_fault_in_the_rules() -> None:
    done = promtool("check", "rules", str(FILE))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_fires_on_a_healthy_cluster(tmp_path: Path) -> None:
    assert outcome(tmp_path, [(HEALTHY, {alert: [] for alert in ALERTS})]) == ""


def test_each_alert_fires_for_its_damage(tmp_path: Path) -> None:
    assert set(FIRING) == set(ALERTS)
    tests = [(series, {alert: [fired(alert, labels)]}) for alert, (series, labels) in FIRING.items()]
    assert outcome(tmp_path, tests) == ""
    silent = {"GpushareVersionsDiffer": [fired("GpushareVersionsDiffer", {})]}
    assert "GpushareVersionsDiffer" in outcome(tmp_path, [(HEALTHY, silent)]), "an alert that doesn't fire is found"


def test_an_old_report_of_verify_is_found(tmp_path: Path) -> None:
    """The clock of promtool begins at 0, and the report is from two days before."""
    series = changed({"kubegpu_report_timestamp_seconds": always(-2 * 24 * 3600)})
    assert outcome(tmp_path, [(series, {"GpushareVerifyOutdated": [fired("GpushareVerifyOutdated", {})]})]) == ""


def used(expression: str) -> set[tuple[str, str]]:
    """The metrics of an expression, each with one of the labels that it is selected by, or none."""
    names = re.findall(r"\b((?:gpushare|kubegpu)_\w+)(?:\{([^}]*)\})?", expression)
    return {(name, label) for name, labels in names for label in (re.findall(r"(\w+)=", labels) or [""])}


def test_every_metric_of_the_rules_is_one_of_the_servers_or_of_verify(both: Both) -> None:
    both.work()
    registry = CollectorRegistry()
    DriverMetrics(registry).forgotten(1)
    pages = "".join(both.page(job) for job in both.addresses) + generate_latest(registry).decode()
    source = Path(report.__file__).read_text()
    for rule in ALERTS.values():
        for name, label in used(rule["expr"]):
            if name.startswith("kubegpu_"):
                assert f'"{name}"' in source and (not label or f'"{label}"' in source), name
                continue
            rows = [row for row in pages.splitlines() if re.match(rf"{name}\b[{{ ]", row)]
            assert rows and (not label or any(f'{label}="' in row for row in rows)), (name, label)
    assert used('max by (node) (gpushare_x{state="a",b=~"c"}) > gpushare_y') == {
        ("gpushare_x", "state"),
        ("gpushare_x", "b"),
        ("gpushare_y", ""),
    }


def test_every_name_in_the_texts_exists(both: Both) -> None:
    """Checks, reason codes, metrics, Events, variables and playbooks that an alert sends its reader to."""
    known = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("gpushare", "monitoring", "dra-driver"))
    variables = "".join(path.read_text() for path in ROOT.glob("roles/*/meta/argument_specs.yml"))
    checks = {check.id for check in CHECKS}
    for name, rule in ALERTS.items():
        text = " ".join(rule["annotations"].values())
        assert set(rule["annotations"]) == {"summary", "description"} and text.endswith("."), name
        for path in re.findall(r"\b(?:docs|playbooks)/[\w-]+\.\w+", text):
            assert (ROOT / path).exists(), path
        assert set(re.findall(r"\b[CDGS]\d+\b", text)) <= checks
        for word in re.findall(r"\b(?:gpushare_\w+|Gpu[A-Z]\w+|GPUMemory\w+|StaleState|LedgerUnavailable)\b", text):
            assert f"`{word}`" in known, word
        for word in re.findall(r"\b(?:scheduler|verify)_\w+", text):
            assert f" {word}:" in variables, word
