# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/monitoring.md lists every metric and every Event of the servers, and nothing else."""

from __future__ import annotations

import ast
import re
import typing as t
from pathlib import Path

import gpushare
from both_servers import Both
from gpushare.extender.metrics import METRICS_PORT
from gpushare.plugin.command import METRICS_PORT as PLUGIN_PORT
from gpushare.shared._contracts import gpushare as contract

PAGE = (Path(__file__).parents[4] / "docs" / "monitoring.md").read_text()
SOURCES = sorted(Path(gpushare.__file__).parent.rglob("*.py"))
REASON = re.compile(r"(Gpu|GPUMemory)[A-Z][A-Za-z]+|Preempted")
# The fields of every line of the log.
STANDARD = {"time", "level", "logger", "message", "exception"}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(title: str) -> dict[str, str]:
    """Name to the next cell, of a section's table."""
    rows = [row.split("|") for row in section(title).splitlines() if row.startswith("| `")]
    names = [row[1].strip().strip("`") for row in rows]
    assert len(set(names)) == len(names)
    return {name: row[2].strip() for name, row in zip(names, rows, strict=True)}


def test_every_metric_is_in_the_page_with_its_labels(both: Both) -> None:
    both.work()
    common = first_column("Metrics of every server")
    for job, title in (("extender", "Metrics of the extender"), ("device-plugin", "Metrics of the device plugin")):
        text = both.page(job)
        names = re.findall(r"^# TYPE ((?:gpushare|container)_\w+) ", text, re.MULTILINE)
        listed = first_column(title) | common
        listed |= first_column("Metrics of containers") if job == "device-plugin" else {}
        # The start of a counter is a series of its own, which no query uses.
        assert {name for name in names if not name.endswith("_created")} == set(listed)
        for name, labels in listed.items():
            match = re.search(rf"^{name}(?:_sum)?(?:{{(.*?)}})? ", text, re.MULTILINE)
            if match is None:
                # Nothing of the kind has happened.
                continue
            assert sorted(re.findall(r'(\w+)="', match[1] or "")) == sorted(filter(None, labels.split(", "))), name


def test_the_ports_are_those_of_the_servers_and_the_roles() -> None:
    templates = Path(__file__).parents[4] / "roles" / "gpushare" / "templates"
    plugin = re.findall(r"metrics_port = (\d+)", (templates / "device_plugin.yml.j2").read_text())
    extender = re.findall(r"metrics_port = (\d+)", (templates / "extender_parts.j2").read_text())
    assert (plugin, extender) == ([str(PLUGIN_PORT)], [str(METRICS_PORT)])
    top = PAGE.split("\n## ")[0]
    assert re.findall(r"`gpushare_device_plugin_metrics` \| (\d+)", top) == plugin
    assert re.findall(r"`gpushare_extender_metrics` \| (\d+)", top) == extender
    # A node may be both a control plane and one with cards.
    assert len({*plugin, *extender, str(contract.EXTENDER_PORT)}) == 3


def literals() -> t.Iterator[str]:
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_event_is_in_the_page() -> None:
    in_source = {text for text in literals() if REASON.fullmatch(text)}
    events = set(first_column("Events"))
    # Not an Event: the kind of correction that needs no report.
    assert in_source - events == {"GpuCardConfirmed"}
    assert events <= in_source


def test_every_reason_code_is_in_the_page() -> None:
    page = (Path(__file__).parents[4] / "docs" / "gpushare.md").read_text()
    rows = page.split("\n## Reason codes\n")[1].split("\n## ")[0].splitlines()
    documented = [code for row in rows if row.startswith("| `") for code in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(documented) == sorted(reason.value for reason in contract.Reason)


def test_no_field_overrides_the_common_fields_of_a_log_line() -> None:
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Dict):
                continue
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if "data" not in keys:
                continue
            facts = node.values[keys.index("data")]
            if isinstance(facts, ast.Dict):
                named = {key.value for key in facts.keys if isinstance(key, ast.Constant)}
                assert not named & STANDARD, f"{file.name}:{node.lineno}"
