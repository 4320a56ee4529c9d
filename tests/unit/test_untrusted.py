# SPDX-License-Identifier: GPL-3.0-or-later
"""The boundary for values of others: what each type takes, what it refuses, and that free text controls nothing."""

from __future__ import annotations

import time

import hostile
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core import untrusted
from ansible_collections.kubegpu.share.plugins.module_utils._core.both_ends import both_ends
from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import Refused


def code(parse, value) -> str:
    try:
        parse(value)
    except Refused as error:
        assert str(error) == untrusted.REFUSALS[error.code]
        return error.code
    return ""


@pytest.mark.parametrize("given", hostile.TEXTS, ids=lambda one: ascii(one)[:30])
def test_free_text_controls_nothing(given: str) -> None:
    line, lines = untrusted.line(given), untrusted.lines(given)
    assert not hostile.FORBIDDEN.search(line) and not hostile.FORBIDDEN.search(lines)
    assert "\n" not in line and "\t" not in line and len(line) <= untrusted.LONGEST
    assert len(untrusted.line(given, 20)) <= 20 and len(untrusted.lines(given, 20)) <= 20
    line.encode()


@pytest.mark.parametrize("given", hostile.HONEST)
def test_texts_of_honest_people_stay(given: str) -> None:
    assert untrusted.line(given) == given and untrusted.lines(f"{given}\n\t{given}") == f"{given}\n\t{given}"


def test_nothing_behind_a_sequence_is_hidden() -> None:
    assert untrusted.line("\x1b]0;x the node can't be used").endswith("the node can't be used")
    assert untrusted.line("\x1b[31;1merror\x1b[0m: 1") == "error: 1"
    assert untrusted.line(None) == untrusted.lines(None) == ""


def test_junk_costs_little() -> None:
    began = time.process_time()
    for junk in ("\x1b" * 10_000_000, "\x1b[" * 5_000_000, "\x1b[" + "1;" * 5_000_000, " \n" * 5_000_000):
        untrusted.line(junk)
    assert time.process_time() - began < 1


def test_addresses() -> None:
    for value in hostile.ADDRESSES:
        assert code(untrusted.address, value) == "not-an-address", value
    for value in (None, 1, ["192.0.2.1"], b"192.0.2.1"):
        assert code(untrusted.address, value) == "not-an-address"
    for value in hostile.NOT_OTHERS:
        assert not code(untrusted.address, value), value
        assert code(untrusted.other_machine, value) in ("own-machine", "no-machine"), value
    assert untrusted.other_machine("2001:DB8:0::1") == "2001:db8::1"
    assert untrusted.address("::ffff:192.0.2.1") == untrusted.address("192.0.2.1") == "192.0.2.1"
    assert untrusted.other_machine("Gpu-1.Example.ORG") == "gpu-1.example.org"
    assert untrusted.other_machine("10.0.0.1") == "10.0.0.1"


def test_names() -> None:
    for value in (*hostile.NAMES, None, 7):
        assert code(untrusted.node_name, value) == "not-a-node-name", value
    for value in hostile.RESERVED:
        assert not code(untrusted.node_name, value)
        assert code(untrusted.host_name, value) == "reserved-name"
    for value in ("gpu1", "1", "10.0.0.5", "a.b-c.d", "x" * 63):
        assert untrusted.host_name(value) == value


def test_labels_and_versions() -> None:
    for value in ("", "NVIDIA-H100-80GB", "a.b_c", "x" * 63):
        assert untrusted.label_value(value) == value
    for value in ("-a", "a b", "x" * 64, "a\n", "{{ x }}", None, "ü"):
        assert code(untrusted.label_value, value) == "not-a-label-value"
    for value in ("v1.36.3", "1.30", "v1.29.3-gke.1282001", "v1.30.1+k3s1", "v1.21.2-20+8f0c-dirty"):
        assert untrusted.version(value) == value
    for value in ("", "latest", "v1.2\n", "1 2", "v1{{ x }}", "1" * 200, None, *hostile.TEXTS):
        assert code(untrusted.version, value) == "not-a-version", value


def test_components_of_paths() -> None:
    for value in ("", ".", "..", None):
        assert code(untrusted.component, value) == "no-name"
    quoted = {"a/b": "a%2Fb", "../x": "..%2Fx", "a?b#c%d": "a%3Fb%23c%25d", "a b\r\n": "a%20b%0D%0A", "ü": "%C3%BC"}
    for value, wanted in {**quoted, "a-b_c.d~": "a-b_c.d~"}.items():
        assert untrusted.component(value) == wanted
    assert untrusted.path("api", "v1", "nodes", "../pods") == "/api/v1/nodes/..%2Fpods"
    for value in hostile.TEXTS:
        assert untrusted.component(value).isascii() and "/" not in untrusted.component(value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("as it is", "as it is"),
        (None, ""),
        ("start" + "x" * 20 + "cause", "start…cause"),
        ("start" + "x" * 10**7 + "cause", "start…cause"),
        ("st\x1b[31mart\n" + "x" * 20 + "\x00ause", "start…\N{REPLACEMENT CHARACTER}ause"),
    ],
)
def test_a_long_text_is_shown_with_both_ends(text, shown):
    assert both_ends(text, 11) == shown
