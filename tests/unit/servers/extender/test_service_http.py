# SPDX-License-Identifier: GPL-3.0-or-later
"""The common HTTP service, its log, Events, the extender's command line, and the image's files."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import re
import signal
import subprocess
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpushare
import pytest
from api_double import ApiDouble, make_node, make_pod, served
from extender_kit import COMMAND, command_process, environment, eventually, message
from gpushare.api.events import Events
from gpushare.extender import command
from gpushare.http.limits import Limits
from gpushare.http.server import Endpoint
from gpushare.http.service import (
    LARGE_BODY_BYTES,
    STOP_SECONDS,
    BadRequest,
    Request,
    Response,
    Service,
    answer,
    common,
    logger,
    stop_within,
    text,
)
from prometheus_client import CollectorRegistry, Counter
from service_account import service_account

IMAGE = Path(gpushare.__file__).parents[2]


@pytest.fixture
def reason() -> list[str | None]:
    """Why the service isn't ready."""
    return [None]


@pytest.fixture
def service(reason: list[str | None]) -> Iterator[Service]:
    registry = CollectorRegistry()
    Counter("seen", "Seen", registry=registry).inc()

    def echo(request: Request) -> Response:
        if request.rest == "bad":
            raise BadRequest("that's wrong", 422)
        if request.rest == "boom":
            raise RuntimeError("secret inside")
        return answer({"rest": request.rest, "body": request.body.decode("latin-1")})

    routes = {**common(lambda: reason[0], registry), ("GET", "/echo"): echo, ("POST", "/echo"): echo}
    service = Service("t", Endpoint(), routes, limits=Limits(connections=2))
    service.start()
    yield service
    service.stop()


def ask(service: Service, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()


def test_common_endpoints(service: Service, reason: list[str | None]) -> None:
    assert ask(service, "GET", "/healthz")[::2] == (200, b"ok\n")
    assert ask(service, "GET", "/version")[::2] == (200, gpushare.__version__.encode() + b"\n")
    assert ask(service, "GET", "/readyz")[::2] == (200, b"ok\n")
    reason[0] = "no driver"
    assert ask(service, "GET", "/readyz")[::2] == (503, b"no driver\n")
    assert b"seen_total 1.0" in ask(service, "GET", "/metrics")[2]
    assert ask(service, "HEAD", "/healthz")[::2] == (200, b"")


def test_routes(service: Service) -> None:
    status, headers, body = ask(service, "POST", "/echo/a/b/?x=1&x=2", b"hello")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == {"rest": "a/b", "body": "hello"}
    assert ask(service, "GET", "/echo")[0] == 200
    assert ask(service, "GET", "/echoes")[0] == 404
    status, headers, _body = ask(service, "DELETE", "/echo")
    assert (status, headers["Allow"]) == (405, "GET, POST")
    for path in ("/", "/debug/pprof/", "/nothing"):
        assert ask(service, "GET", path)[0] == 404


def test_errors_and_exceptions_of_handlers(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(service, "GET", "/echo/bad")[::2] == (422, b'{"error":"that\'s wrong"}')
    status, _headers, body = ask(service, "GET", "/echo/boom")
    assert (status, b"secret" in body) == (500, False)
    assert "secret inside" in caplog.text


@pytest.mark.parametrize(("size", "at_once"), [(LARGE_BODY_BYTES + 1, 1), (LARGE_BODY_BYTES, 3)])
def test_one_large_body_is_handled_at_a_time(size: int, at_once: int) -> None:
    """8 MiB of ``{},`` become 200 MB of objects."""
    inside, most, together = 0, 0, threading.Barrier(at_once)

    def count(_request: Request) -> Response:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        together.wait(10)
        inside -= 1
        return text("done")

    large = Service("t", Endpoint(), {("POST", "/count"): count})
    large.start()
    try:
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda _: ask(large, "POST", "/count", b"x" * size), range(3)))
    finally:
        large.stop()
    assert [status for status, _headers, _body in answers] == [200] * 3
    assert most == at_once


def test_a_port_in_use_is_an_oserror(service: Service) -> None:
    with pytest.raises(OSError):
        Service("t", Endpoint(port=service.port), {}).start()


# ----------------------------------------------------------------- log


def test_a_text_log_has_the_fields_after_the_message() -> None:
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    try:
        logger("gpushare.x", stream=stream).info("bound", extra={"data": {"pod": "default/p"}})
    finally:
        root.handlers[:], root.level = handlers, level
    assert stream.getvalue().endswith(" INFO gpushare.x: bound pod=default/p\n")


# ----------------------------------------------------------------- events


def test_events_are_rate_limited(api: ApiDouble) -> None:
    now = [0.0]
    events = Events(api, "c", repeat=60, rate=1, burst=3, clock=lambda: now[0])
    assert events.pod("default", "p", "u", "Why", "text")
    assert not events.pod("default", "p", "u", "Why", "text"), "the same again"
    assert events.pod("default", "p", "u", "Why", "other text")
    assert events.pod("default", "q", "v", "Why", "x" * 5000)
    assert not events.pod("default", "r", "w", "Why", "text"), "the burst is used up"
    now[0] = 1.0
    assert events.pod("default", "r", "w", "Why", "text")
    now[0] = 100.0
    assert events.pod("default", "p", "u", "Why", "text")
    events.start()
    eventually(lambda: len(api.asked("POST", "/namespaces/default/events$")) == 5)
    events.stop()
    written = api.asked("POST", "/events$")
    assert len({event["metadata"]["name"] for event in written}) == 5
    assert 1000 < max(len(event["message"].encode()) for event in written) <= 1024


def test_an_event_that_cannot_be_written_is_dropped(api: ApiDouble) -> None:
    events = Events(api, "c")
    events.start()
    api.fail("POST", "/events$", 403)
    events.pod("default", "p", "u", "Why", "one")
    events.pod("default", "p", "u", "Why", "two")
    eventually(lambda: len(api.asked("POST", "/events$")) == 2)
    events.stop()


# ----------------------------------------------------------------- the command


def test_command_line_options_precede_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    options = command.parse([])
    defaults = (options.address, options.port, options.placement, options.log_format)
    assert defaults == ("127.0.0.1", 12345, "binpack", "text")
    monkeypatch.setenv("GPUSHARE_PLACEMENT", "spread")
    monkeypatch.setenv("GPUSHARE_PORT", "1234")
    options = command.parse(["--port", "4321"])
    assert (options.port, options.placement) == (4321, "spread")


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["--placement", "random"], {}, "--placement"),
        ([], {"GPUSHARE_LOG_FORMAT": "xml"}, "--log-format"),
        ([], {"GPUSHARE_PREEMPTION": "true"}, "--preemption"),
        (["--tls-cert", "x"], {}, "--tls-key"),
        (["--port", "x"], {}, "--port"),
        (["--metrics-port=65536"], {}, "--metrics-port: 65536 is no port"),
        # Plain HTTP is for the loopback only, and so are tokens in the clear.
        (["--metrics-address=0.0.0.0"], {}, "--metrics-tls-cert and --metrics-tls-key are needed"),
        (["--address=0.0.0.0"], {}, "--tls-cert, --tls-key and --tls-client-ca are needed"),
    ],
)
def test_fault_14_bad_options_are_named(
    arguments: list[str],
    variables: dict[str, str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as refused:
        command.parse(arguments)
    assert refused.value.code == 2
    assert named in capsys.readouterr().err


def test_a_command_that_was_stopped_before_it_is_ready_goes_on(api: ApiDouble, tmp_path: Path) -> None:
    api.put("nodes", make_node("a", 8))
    api.put("pods", make_pod("p", 3, "a", 0))
    service_account(tmp_path, "")
    with (
        served(api) as address,
        api.outage(),
        command_process(GPUSHARE_API_SERVER=address, GPUSHARE_SERVICE_ACCOUNT=str(tmp_path)) as log,
    ):
        serving = message(log, "serving")
        for _time in range(3):
            log.process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            log.process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        api.down = False
        ready = message(log, "ready")
        assert (ready["nodes"], ready["pods"]) == (1, 1)
        url = f"http://127.0.0.1:{serving['port']}/gpushare-scheduler/inspect/a"
        with urllib.request.urlopen(url, timeout=10) as response:
            assert json.load(response)["nodes"][0]["usedGPU"] == 3


def test_the_command_reports_a_missing_option_in_one_line(tmp_path: Path) -> None:
    options = [*COMMAND, f"--service-account={tmp_path / 'nothing'}"]
    done = subprocess.run(options, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "no way to reach the Kubernetes API" in done.stderr


# ----------------------------------------------------------------- the image


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_the_versions_agree() -> None:
    project = tomllib.loads((IMAGE / "pyproject.toml").read_text())["project"]
    assert project["version"] == gpushare.__version__
    lines = (IMAGE / "requirements.txt").read_text().splitlines()
    pins = {normal(line.partition("==")[0]) for line in lines if line and not line.startswith("#")}
    wanted = {normal(name) for name in project["dependencies"]}
    assert wanted <= pins
    assert not [name for name in wanted if not re.fullmatch(r"[a-z0-9-]+", name)], "versions have one place"


def test_the_image_needs_no_newer_builder() -> None:
    text = (IMAGE / "Containerfile").read_text()
    for word in ("RUN --", "COPY --link", "COPY --chmod", "<<", "# syntax"):
        assert word not in text


# --------------------------------------------------------------------------- termination


def test_parts_stop_side_by_side_and_one_that_hangs_delays_only_its_stage() -> None:
    ended: list[str] = []
    never = threading.Event()

    def part(name: str, seconds: float) -> Callable[[], None]:
        def stop() -> None:
            never.wait(seconds)
            ended.append(name)

        return stop

    began = time.monotonic()
    stages = (1.0, [part("a", 0.3), part("b", 0.3), part("c", 60)]), (2.0, [part("d", 0.1)])
    assert stop_within(*stages) is False
    assert ended == ["a", "b", "d"] or ended == ["b", "a", "d"]
    assert 1.0 <= time.monotonic() - began < 1.8
    assert stop_within((5.0, [part("e", 0.1)]), (6.0, [part("f", 0.0)])) is True
    assert ended[3:] == ["e", "f"]
    never.set()


def test_servers_end_within_their_pods_grace_period() -> None:
    templates = IMAGE.parents[1] / "roles"
    found = {
        str(path.relative_to(templates)): int(grace)
        for role in ("gpushare", "scheduler")
        for path in (templates / role / "templates").rglob("*.j2")
        # A pod that ends by itself has no server.
        if "restartPolicy: Never" not in path.read_text()
        for grace in re.findall(r"terminationGracePeriodSeconds: (\d+)", path.read_text())
    }
    assert len(found) >= 4 and all(grace >= STOP_SECONDS + 2 for grace in found.values()), found


def test_an_extender_with_a_hanging_api_and_an_open_bind_ends_in_time(tmp_path: Path) -> None:
    api, hanging = ApiDouble(), threading.Event()
    api.put("nodes", make_node("a", 16))
    pod = api.put("pods", make_pod("p", 2))
    arrived = threading.Event()

    def hang(method: str, path: str) -> None:
        if hanging.is_set():
            arrived.set()
            end.wait(60)

    end = threading.Event()
    with served(api) as url, command_process(*service_account(tmp_path, url)) as log:
        port = message(log, "serving")["port"]
        message(log, "ready")
        api.hooks.append(hang)
        hanging.set()
        binding = {"PodName": "p", "PodNamespace": "default", "PodUID": pod["metadata"]["uid"], "Node": "a"}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/gpushare-scheduler/bind", json.dumps(binding))
        assert arrived.wait(10)
        began = time.monotonic()
        log.process.send_signal(signal.SIGTERM)
        assert log.process.wait(30) == 0
        took = time.monotonic() - began
        end.set()
    assert took < STOP_SECONDS + 1
