# SPDX-License-Identifier: GPL-3.0-or-later
"""The dashboard for Grafana: a real Prometheus, which scrapes the real servers, answers every query of every panel."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import subprocess
import time
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from api_double import make_pod
from both_servers import Both
from gpushare.dra.metrics import Metrics as DriverMetrics
from gpushare.shared._core.types import JsonObject
from metrics_reader import TOKEN
from plugin_fakes import NODE
from prometheus_client import CollectorRegistry, generate_latest
from real_prometheus import Missing, Prometheus, programs

DASHBOARDS = Path(__file__).parents[4] / "images" / "gpushare"
OURS, DCGM = "dashboard", "dashboard-dcgm"


def dashboard(name: str = OURS) -> JsonObject:
    return t.cast(JsonObject, json.loads((DASHBOARDS / f"{name}.json").read_text()))


def panels(board: JsonObject) -> list[JsonObject]:
    """All panels but the rows, those in folded rows too."""
    every = [one for panel in board["panels"] for one in [panel, *panel.get("panels", [])]]
    return [one for one in every if one["type"] != "row"]


def queries(board: JsonObject) -> list[tuple[str, str]]:
    """Title of the panel and query, of every target."""
    return [(panel["title"], target["expr"]) for panel in panels(board) for target in panel["targets"]]


def filled(expression: str, node: str = ".*") -> str:
    """What Grafana sends: its variables replaced."""
    text = expression.replace("$__rate_interval", "30s").replace("$node", node)
    assert "$" not in text, f"a variable that the dashboard doesn't have: {text}"
    return text


def unanswered(prometheus: Prometheus, board: JsonObject, node: str = ".*") -> list[str]:
    """The queries that give no number, with the panel's title."""
    found = []
    for title, expression in queries(board):
        result = prometheus.query(filled(expression, node))
        if not any(math.isfinite(float(series["value"][1])) for series in result):
            found.append(f"{title}: {expression}")
    return found


@pytest.fixture(scope="module")
def prometheus(both: Both, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    try:
        programs()
    except Missing as error:
        pytest.skip(str(error))
    with Prometheus(tmp_path_factory.mktemp("prometheus"), both.addresses, TOKEN) as running:
        yield running


def test_fault_18_every_query_of_the_dashboard_is_answered(both: Both, prometheus: Prometheus) -> None:
    board, end, left = dashboard(), time.monotonic() + 60, ["nothing was asked"]
    while left and time.monotonic() < end:
        both.work()
        # Rates need two scrapes.
        time.sleep(1.2)
        left = unanswered(prometheus, board)
    assert left == []
    assert unanswered(prometheus, board, NODE) == [], "with one node chosen"

    wrong = copy.deepcopy(board)
    panels(wrong)[0]["targets"][0]["expr"] = "count(gpushare_card_capacity_unit)"
    assert len(unanswered(prometheus, wrong)) == 1, "a metric that isn't there is found"
    panels(wrong)[0]["targets"][0]["expr"] = "sum by (node (gpushare_card_capacity_units)"
    with pytest.raises(ValueError, match="parse error"):
        unanswered(prometheus, wrong)


def test_the_dashboard_shows_the_servers_numbers(both: Both, prometheus: Prometheus) -> None:
    shown = {panel["title"]: panel["targets"][0]["expr"] for panel in panels(dashboard())}

    def value(title: str) -> float:
        return float(prometheus.query(filled(shown[title]))[0]["value"][1])

    pod = both.api.put("pods", make_pod("tenant", 8))
    assert both.client.bind(pod, NODE) == ""
    end = time.monotonic() + 20
    while value("Booked") != 8 / 32 and time.monotonic() < end:
        time.sleep(0.3)
    assert (value("Nodes"), value("Cards"), value("Units"), value("Booked")) == (1, 2, 32, 0.25)
    assert (value("Unhealthy cards"), value("Cards over their size")) == (0, 0)
    assert value("Nodes with enforced limits") == 1
    both.api.remove("pods", "tenant", "default")


def test_variables_have_values(prometheus: Prometheus) -> None:
    board = dashboard()
    names = [one["name"] for one in board["templating"]["list"]]
    assert names == ["datasource", "node"]
    variable = board["templating"]["list"][1]
    match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
    assert match and variable["query"]["query"] == variable["definition"]
    assert prometheus.label_values(match[1], match[2]) == [NODE]


def test_promtool_finds_no_fault_in_the_metrics(both: Both, prometheus: Prometheus) -> None:
    for job in both.addresses:
        text = both.page(job).encode()
        ours = b"".join(row for row in text.splitlines(keepends=True) if re.match(rb"(# \w+ )?gpushare_", row))
        assert ours
        done = subprocess.run(
            [programs()["promtool"], "check", "metrics"], input=ours, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr.decode()) == (0, ""), job


def test_the_dra_drivers_panels_ask_for_its_metrics() -> None:
    """It runs beside neither of the others; without it these panels show 0."""
    registry = CollectorRegistry()
    DriverMetrics(registry)
    page = generate_latest(registry).decode()
    asked = {name for _title, text in queries(dashboard()) for name in re.findall(r"gpushare_dra_\w+", text)}
    assert len(asked) == 4 and all(re.search(rf"^{name} ", page, re.MULTILINE) for name in asked)


def test_the_dcgm_dashboard_asks_for_metrics_and_labels_that_the_exporter_has(tmp_path: Path) -> None:
    """By the list of its default metrics; DCGM isn't free software, so no exporter runs here."""
    known = yaml.safe_load((Path(__file__).parent / "dcgm_metrics.yml").read_text())
    board = dashboard(DCGM)
    [source, node] = board["templating"]["list"]
    assert (source["name"], node["name"]) == ("datasource", "node")
    texts = [*(text for _title, text in queries(board)), node["definition"]]
    for text in texts:
        names = set(re.findall(r"\bDCGM_\w+", text))
        assert names and names <= {*known["gauges"], *known["counters"]}, text
        # A rate of a gauge, or a counter as it is but for rows that never decrease, shows nothing.
        rated = set(re.findall(r"(?:rate|increase)\((DCGM_\w+)", text))
        assert rated <= set(known["counters"]), text
        assert (names & set(known["counters"])) - rated <= {name for name in names if "REMAPPED" in name}, text
        asked = {label.strip() for part in re.findall(r"by \(([^)]*)\)", text) for label in part.split(",")}
        asked |= {label for part in re.findall(r"{([^}]*)}", text) for label in re.findall(r"(\w+)\s*[=!]~?", part)}
        assert asked <= set(known["labels"]), text
    rules = [{"record": "x", "expr": filled(text)} for text in texts[:-1]]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    try:
        promtool = programs()["promtool"]
    except Missing as error:
        pytest.skip(str(error))
    words = [promtool, "check", "rules", "--lint=none", str(tmp_path / "rules.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [OURS, DCGM])
def test_dashboard_is_complete(name: str) -> None:
    board = dashboard(name)
    every = [one for panel in board["panels"] for one in [panel, *panel.get("panels", [])]]
    assert len({one["id"] for one in every}) == len(every)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels(board):
        assert panel["title"] and panel["description"].endswith("."), panel
        assert panel["datasource"] == source
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        assert all(target["datasource"] == source for target in panel["targets"])
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", [OURS, DCGM])
def test_panels_do_not_overlap(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard(name)["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24, panel["title"]
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} lies over {taken.get(cell)}"
            taken[cell] = panel["title"]
