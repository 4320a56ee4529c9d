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


def folders(catalog, source):
    """The folders of a source of packages, by the ids of the distributions that use it."""
    return catalog["sources"][source].get("folder") or catalog["folder"]


@pytest.mark.parametrize("path", CATALOGS, ids=lambda path: path.stem)
def test_every_source_of_packages_is_in_the_table_of_repositories(path):
    catalog = yaml.safe_load(path.read_text())["__driver_catalog"]
    for source, name in (("repository", "nvidia"), ("distribution", "distribution")):
        if source not in catalog["sources"]:
            continue
        used = folders(catalog, source)
        used = used.values() if isinstance(used, dict) else [used]
        for one in (folder for value in used for folder in ([value] if isinstance(value, str) else value)):
            rows = [row for key, row in table.section(name).items() if key.startswith(f"{one}/")]
            assert rows and len(rows) == len({row["arch"] for row in rows}), one
        # What was moved to the table isn't here, too.
        assert not {"url", "key", "since", "branches", "architectures", "doubtful_after"} & set(
            catalog["sources"][source]
        )


def test_no_row_of_the_table_is_unused():
    catalogs = [yaml.safe_load(path.read_text())["__driver_catalog"] for path in CATALOGS]
    for source, name in (("repository", "nvidia"), ("distribution", "distribution")):
        used = set()
        for value in (folders(catalog, source) for catalog in catalogs if source in catalog["sources"]):
            for folder in value.values() if isinstance(value, dict) else [value]:
                used |= {folder} if isinstance(folder, str) else set(folder)
        assert {key.partition("/")[0] for key in table.section(name)} == used


def test_the_key_of_every_repository_has_a_digest_or_an_entry_that_says_there_is_none():
    rows = {**table.section("nvidia"), **{f"own/{key}": row for key, row in table.section("distribution").items()}}
    for name, row in rows.items():
        folder, end = row["url"].rstrip("/").split("/")[-2:] if row["url"] else ("", "")
        assert bool(row["url"]) == bool(row["key"]), name
        if row["key"]:
            pin = table.section("keys")[f"{folder}/{row['key']}"]
            assert pin["url"] == f"{row['url'].replace(f'/{end}/', '/x86_64/')}{row['key']}"
        assert row["first"] is None or row["last"] is None or row["first"] <= row["last"]
    # No repository has two keys.
    assert len(table.section("keys")) == len({key.partition("/")[0] for key in table.section("keys")})


def test_debian_13_has_its_own_key_and_begins_with_branch_590():
    row = table.section("nvidia")["debian13/x86_64"]
    assert (row["key"], row["first"], row["last"]) == ("8793F200.pub", 590, None)
    assert "debian13/sbsa" not in table.section("nvidia")


def test_the_roles_take_the_table():
    assert defaults("driver")["driver_repo_key_sha256"] == table.PINNED
    assert defaults("toolkit")["toolkit_repo_key_sha256"] == table.PINNED
    assert {row["key"] for row in table.section("toolkit").values()} == {"gpgkey"}


PLATFORMS = {"amd64": {"digest": f"sha256:{'e' * 64}", "bytes": 1}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pins: pins.pop("images"), "it needs the sections keys, charts, programs, images"),
        (lambda pins: pins["keys"]["a"].update(sha256="A" * 64), "keys: a: sha256 is"),
        (lambda pins: pins["keys"]["a"].update(sha256=None), "keys: a: sha256 is None"),
        (lambda pins: pins["keys"]["a"].update(fingerprint="b" * 8), "keys: a: fingerprint is 'bbbbbbbb'"),
        (lambda pins: pins["keys"]["a"].pop("known"), "keys: a needs the fields"),
        (lambda pins: pins["charts"]["c"].update(version=2.1), "charts: c: version is 2.1"),
        (lambda pins: pins["charts"].update(d=None), "charts: d needs the fields"),
        (lambda pins: pins["programs"]["p"].update(url="https://e.org/x"), "programs: p: url is 'https://e.org/x'"),
        (lambda pins: pins["programs"]["p"].update(arm64="x"), "programs: p: arm64 is 'x'"),
        (lambda pins: pins["images"]["i"].update(digest="0" * 64), "images: i: digest is"),
        (lambda pins: pins["images"]["i"].update(platforms={"amd64": {"digest": "x", "bytes": 1}}), "images: i: platf"),
        (lambda pins: pins["images"]["i"].update(platforms={"mips": PLATFORMS["amd64"]}), "images: i: platforms is"),
    ],
)
def test_a_table_that_holds_nothing_to_anything_is_refused(change, words):
    common = {"url": "https://example.org/", "known": "today"}
    pins = {
        "keys": {"a": {**common, "sha256": "a" * 64, "fingerprint": ""}},
        "charts": {"c": {**common, "version": "1.0.0", "sha256": "c" * 64}},
        "programs": {"p": {**common, "url": "https://e.org/{architecture}", "version": "1", "amd64": "", "arm64": ""}},
        "images": {"i": {**common, "digest": f"sha256:{'d' * 64}", "platforms": PLATFORMS, "chart": "c"}},
    }
    assert table.load(yaml.safe_dump(pins), "pins.yml") == pins
    change(pins)
    with pytest.raises(BadInput, match=f"^pins.yml: {re.escape(words)}"):
        table.load(yaml.safe_dump(pins), "pins.yml")


ROW = {
    "url": "https://example.org/x/",
    "arch": "amd64",
    "key": "k.pub",
    "source": "https://example.org/",
    "date": "2026-11-29",
}
OF_DRIVER = {**ROW, "first": None, "last": 575, "modules": ["open"], "kernels": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": "somebody"}, "nvidia: a/x86_64: source is 'somebody'"),
        ({"source": ""}, "nvidia: a/x86_64: source is ''"),
        ({"date": "yesterday"}, "nvidia: a/x86_64: date is 'yesterday'"),
        ({"arch": "x86_64"}, "nvidia: a/x86_64: arch is 'x86_64'"),
        ({"first": "590"}, "nvidia: a/x86_64: first is '590'"),
        ({"modules": []}, "nvidia: a/x86_64: modules is []"),
        ({"modules": ["closed"]}, "nvidia: a/x86_64: modules is ['closed']"),
        ({"kernels": []}, "nvidia: a/x86_64: kernels is []"),
        ({"more": 1}, "nvidia: a/x86_64 needs the fields"),
    ],
)
def test_a_row_without_source_and_date_or_with_other_fields_is_refused(change, words):
    rows = {"nvidia": {"a/x86_64": OF_DRIVER}, "distribution": {}, "toolkit": {"deb/amd64": ROW}}
    assert table.load(yaml.safe_dump(rows), "repositories.yml", table.REPOSITORIES) == rows
    rows["nvidia"] = {"a/x86_64": {**OF_DRIVER, **change}}
    with pytest.raises(BadInput, match=f"^repositories.yml: {re.escape(words)}"):
        table.load(yaml.safe_dump(rows), "repositories.yml", table.REPOSITORIES)
