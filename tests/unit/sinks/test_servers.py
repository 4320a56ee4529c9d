# SPDX-License-Identifier: GPL-3.0-or-later
"""The servers' log, Events, metrics and requests, with texts and names that nodes and tenants chose."""

from __future__ import annotations

import io
import json
import logging
import re

import hostile
import pytest
from gpushare.api import paths
from gpushare.api.client import KubeError
from gpushare.api.events import MESSAGE_LENGTH, Events
from gpushare.extender.metrics import cards_text
from gpushare.extender.state import NodeRow, State
from gpushare.http.client import HttpClient, HttpError
from gpushare.http.service import logger
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import FakeKube
from prometheus_client.parser import text_string_to_metric_families

EVERY = pytest.mark.parametrize("text", hostile.TEXTS, ids=lambda one: ascii(one)[:30])
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S+: ")


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    yield
    root.handlers[:] = kept
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_one_line_of_the_log_is_one_record() -> None:
    forged = "x\n2026-11-29 01:00:00,000 ERROR gpushare: forged"
    for form in ("text", "json"):
        stream = io.StringIO()
        log = logger("gpushare.test", form, "info", stream)
        texts = [*hostile.TEXTS, forged]
        for text in texts:
            log.warning("pod %s", text, extra={"data": {"pod": text, "reason": 'a b="c"'}})
        try:
            raise ValueError(forged)
        except ValueError:
            log.exception("failed")
        written = stream.getvalue()
        assert not hostile.FORBIDDEN.search(written)
        lines = written.splitlines()
        if form == "json":
            assert len([json.loads(line) for line in lines]) == len(texts) + 1
        else:
            assert len([line for line in lines if RECORD.match(line)]) == len(texts) + 1
            assert all(RECORD.match(line) or line.startswith("  ") for line in lines)
            assert r'reason="a b=\"c\""' in lines[0]
        for text in hostile.HONEST:
            log.info("%s", text)
        shown = stream.getvalue().splitlines()[-len(hostile.HONEST) :]
        for text, record in zip(hostile.HONEST, shown, strict=True):
            assert json.loads(record)["message"] == text if form == "json" else record.endswith(f": {text}")


def test_events_are_short_printable_lines() -> None:
    kube = FakeKube()
    events = Events(kube, "test", rate=1000.0, burst=1000)
    texts = [*hostile.TEXTS, *hostile.HONEST, "显" * 1000]
    for number, text in enumerate(texts):
        assert events.pod("ns", "pod", str(number), "GpuCard", text)
    events.start()
    events.stop()
    messages = [
        body["message"] for method, path, body in kube.requests if method == "POST" and path.endswith("/events")
    ]
    assert len(messages) == len(texts)
    for message in messages:
        assert not hostile.FORBIDDEN.search(message) and "\n" not in message
        assert len(message.encode()) <= MESSAGE_LENGTH
    assert messages[len(hostile.TEXTS) : -1] == list(hostile.HONEST)


@EVERY
def test_labels_of_metrics(text: str) -> None:
    # A longer annotation is refused as a whole.
    uuid = text[: contract.CARDS_LENGTH // 8]
    annotation = json.dumps([{"index": 0, "uuid": uuid, "minor": 0, "memoryMiB": 1024, "units": 1, "healthy": True}])
    cards = tuple(contract.cards_from_annotation(annotation))
    state = State()
    state.node_changed("n", None, NodeRow(text, cards, "GiB"))
    written = cards_text(state.views()).decode()
    assert not hostile.FORBIDDEN.search(written)
    families = list(text_string_to_metric_families(written))
    assert all(family.name.startswith("gpushare_") for family in families)
    assert len([sample for family in families for sample in family.samples]) == 5


def test_a_name_is_one_component_of_a_path() -> None:
    for name in ("", ".", ".."):
        for make, words in ((paths.pod, ("ns", name)), (paths.pod, (name, "p")), (paths.node, (name, "status"))):
            with pytest.raises(KubeError) as raised:
                make(*words)
            assert raised.value.status == 404
    assert paths.pod("a/../b", "x?y#z%2e", "status") == "/api/v1/namespaces/a%2F..%2Fb/pods/x%3Fy%23z%252e/status"
    for text in hostile.TEXTS:
        assert paths.pod(text, text).isascii() and paths.pod(text, text).count("/") == 6


def test_a_path_can_not_end_the_request() -> None:
    client = HttpClient("http://127.0.0.1:9")
    for path in ("/a b", "/a\r\nX: y", "/\x00", "/ü", "/\x7f"):
        with pytest.raises(HttpError, match="path"):
            client.request("GET", path, {}, None, 1.0)


@EVERY
def test_errors_of_the_api_are_printable(text: str) -> None:
    error = KubeError(403, text, text)
    assert not hostile.FORBIDDEN.search(f"{error}{error.message}{error.reason}") and "\n" not in str(error)
