# SPDX-License-Identifier: GPL-3.0-or-later
"""``make outdated``: what is pinned, the newest release of it, and that silence of a registry isn't current."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
import threading
import time

import pytest
import served
from layers import ROOT


def load():
    specification = importlib.util.spec_from_file_location("outdated", ROOT / ".ci/outdated.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["outdated"] = module
    specification.loader.exec_module(module)
    return module


OUTDATED = load()


def component(version, kind="go"):
    return OUTDATED.Component(kind, "example.org/one", version, "go.mod", "a build")


def test_every_pin_is_asked_for() -> None:
    found = {(component.name, component.where) for component in OUTDATED.components(ROOT)}
    assert ("k8s.io/kubernetes", "lab/go/kubernetes/go.mod") in found
    assert ("helm.sh/helm/v3", "lab/go/helm/go.mod") in found
    assert {("hami", "meta/pins.yml"), ("grpcio", "images/gpushare/requirements.lock")} <= found
    assert len(found) == len(OUTDATED.components(ROOT)), "one row for each package of a file"


@pytest.mark.parametrize(
    ("version", "versions", "newest", "state"),
    [
        ("1.36.3", ["v1.36.3", "v1.37.2", "v1.38.0-beta.0"], "1.37.2", "outdated"),
        ("1.9.0", ["1.10.0", "1.9.0"], "1.10.0", "outdated"),
        ("1.37.2", ["v1.37.2", "v1.38.0-beta.0"], "1.37.2", "current"),
        ("2.0.0", ["1.9"], "1.9", "current"),
        ("1.0.0", [], "", "unknown"),
        ("1.0.0", ["v2.0.0-rc.1"], "", "unknown"),
    ],
)
def test_newest_release(version, versions, newest, state) -> None:
    [row] = OUTDATED.compare([component(version)], lambda _one: versions)
    assert (row.newest, row.state) == (newest, state) and bool(row.error) == (state == "unknown")


def test_a_registry_that_doesnt_answer(monkeypatch, capsys) -> None:
    monkeypatch.setattr(OUTDATED, "components", lambda _root: [component("1.0.0", "chart http://127.0.0.1:1")])
    assert OUTDATED.main([]) == 2
    printed = capsys.readouterr().out
    assert (
        "unknown: http://127.0.0.1:1/index.yaml can't be downloaded: <urlopen error" in printed
        and "0 current, 0 outdated, 1 unknown" in printed
    )


def test_charts_of_a_repository() -> None:
    index = b"entries: {example.org/one: [{version: 1.0.0}, {version: 1.2.0}, {version: 2.0.0-rc.1}]}"
    server = served.Server()
    server.files["/index.yaml"] = index
    with server.running():
        [row] = OUTDATED.compare([component("1.0.0", f"chart {server.url}/")])
    assert (row.newest, row.state) == ("1.2.0", "outdated")


# Each list has the one before ten times.
LAUGHS = [b"a: &a [x]", *(b"%c: &%c [%s]" % (98 + n, 98 + n, b"*%c," % (97 + n) * 10) for n in range(9))]


@pytest.mark.parametrize(
    ("index", "error"),
    [
        # The loader in C ended the process.
        (b"entries: " + b"[" * 200_000, "has aliases, or more than 50 levels"),
        (b"\n".join([*LAUGHS, b"entries: {example.org/one: [{version: *j}]}"]), "has aliases, or more than 50 levels"),
        (b"entries: {example.org/one: [{version: '" + b"9" * 5000 + b"'}, 3, {version: {}}]}", "lists no release"),
        ("entries: {example.org/one: [{version: '\u0662.\u0660'}]}".encode(), "lists no release"),
        (lambda _asked: (404, {"X": "\x1b[2J"}, b""), "HTTP Error 404"),
    ],
    ids=["deep", "aliases", "digits", "letters", "status"],
)
def test_what_a_repository_answers_is_data(index, error) -> None:
    server = served.Server()
    server.files["/index.yaml"] = index
    with server.running():
        [row] = OUTDATED.compare([component("1.0.0", f"chart {server.url}/")])
    assert row.state == "unknown" and error in row.error and row.error.isprintable()


def test_an_answer_has_to_be_complete_in_time(monkeypatch) -> None:
    def drip(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), listening.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 404 \x1b[2J\r\nContent-Length: 9999\r\n")
            while True:
                time.sleep(0.05)
                connection.sendall(b"X")

    monkeypatch.setattr(sys.modules["pins"], "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, args=(listening,), daemon=True).start()
        begun = time.monotonic()
        [row] = OUTDATED.compare([component("1.0.0", f"chart http://127.0.0.1:{listening.getsockname()[1]}/")])
    assert time.monotonic() - begun < 10
    assert row.state == "unknown" and "no complete answer within 0.5 s" in row.error
