# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's table of digests, and that what the roles download by default is in it."""

from __future__ import annotations

import re

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins import table
from layers import ROOT

CATALOGS = sorted((ROOT / "roles/driver/vars").glob("*_*.yml"))


def defaults(role):
    return yaml.safe_load((ROOT / f"roles/{role}/defaults/main.yml").read_text())


def test_the_table_is_valid():
    found = table.load(table.FILE.read_text(), "pins.yml")
    assert found == {name: table.section(name) for name in table.FIELDS}
    for name, pin in found["keys"].items():
        assert re.search(rf"/{re.escape(name)}$", re.sub("/(x86_64|sbsa)/", "/", pin["url"])), name


@pytest.mark.parametrize("path", CATALOGS, ids=lambda path: path.stem)
def test_every_key_of_nvidias_repositories_is_in_the_table(path):
    catalog = yaml.safe_load(path.read_text())["__driver_catalog"]
    source = catalog["sources"]["repository"]
    for folder in catalog["folder"].values():
        pin = table.section("keys")[f"{folder}/{source['key']}"]
        assert pin["url"] == source["url"].format(folder=folder, arch="x86_64") + source["key"]


def test_the_roles_take_the_table():
    assert defaults("driver")["driver_repo_key_sha256"] == table.PINNED
    assert defaults("toolkit")["toolkit_repo_key_sha256"] == table.PINNED
    variables = yaml.safe_load((ROOT / "roles/toolkit/vars/main.yml").read_text())
    assert table.section("keys")["libnvidia-container/gpgkey"]["url"] == variables["__toolkit_repo_key_default"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pins: pins.pop("images"), "it needs the sections keys, charts, images"),
        (lambda pins: pins["keys"]["a"].update(sha256="A" * 64), "keys: a: sha256 is"),
        (lambda pins: pins["keys"]["a"].update(sha256=None), "keys: a: sha256 is None"),
        (lambda pins: pins["keys"]["a"].update(fingerprint="b" * 8), "keys: a: fingerprint is 'bbbbbbbb'"),
        (lambda pins: pins["keys"]["a"].pop("known"), "keys: a needs the fields"),
        (lambda pins: pins["charts"]["c"].update(version=2.1), "charts: c: version is 2.1"),
        (lambda pins: pins["charts"].update(d=None), "charts: d needs the fields"),
        (lambda pins: pins["images"]["i"].update(digest="0" * 64), "images: i: digest is"),
    ],
)
def test_a_table_that_holds_nothing_to_anything_is_refused(change, words):
    common = {"url": "https://example.org/", "known": "today"}
    pins = {
        "keys": {"a": {**common, "sha256": "a" * 64, "fingerprint": ""}},
        "charts": {"c": {**common, "version": "1.0.0", "sha256": "c" * 64}},
        "images": {"i": {**common, "digest": f"sha256:{'d' * 64}"}},
    }
    assert table.load(yaml.safe_dump(pins), "pins.yml") == pins
    change(pins)
    with pytest.raises(BadInput, match=f"^pins.yml: {re.escape(words)}"):
        table.load(yaml.safe_dump(pins), "pins.yml")
