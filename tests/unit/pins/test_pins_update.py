# SPDX-License-Identifier: GPL-3.0-or-later
"""``make pins`` against a web server and a registry on loopback: changed keys, charts and images are taken up."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil

import pytest
import served
import yaml
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins import table
from layers import ROOT

ARMOURED = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n{}\n-----END PGP PUBLIC KEY BLOCK-----\n"
OLD_KEY, NEW_KEY = (ARMOURED.format(one).encode() for one in ("b2xk", "bmV3"))
INDEX, MANIFEST = (f"application/vnd.oci.image.{kind}.v1+json" for kind in ("index", "manifest"))


def load():
    specification = importlib.util.spec_from_file_location("pins", ROOT / ".ci/pins.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


PINS = load()


def manifest(note, kind=INDEX):
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "annotations": {"note": note}}).encode()


def answer(content, kind=INDEX, digest=None):
    headers = {"Content-Type": kind, "Docker-Content-Digest": digest or f"sha256:{served.sha256(content)}"}
    return lambda asked: (200, headers, content) if kind in asked.get("Accept", "") else (404, {}, b"")


@pytest.fixture
def server():
    with served.Server().running() as running:
        yield running


MANIFESTS = "/v2/library/python/manifests/3.13-slim-bookworm"
HAMI = "/v2/projecthami/hami/manifests/v2.10.0"
CHART, BASE = (served.chart("hami", "2.10.0", "old"), manifest("old"))


def release_files():
    """Project, version, architecture and file of everything that the lab may download."""
    for tools in (*PINS.build.TOOL_SETS, *PINS.build.OLDER):
        source = PINS.released.SOURCES.get(tools.module)
        for architecture in ("amd64", "arm64") if source else ():
            for file in PINS.released.files(source, tools.version, architecture, tools.binaries):
                yield source.name, tools.version, architecture, file


def publish(server):
    """Serve the digest of each, as its project does: alone, or in a list with others; return the table of them."""
    rows = {}
    for project, version, architecture, file in release_files():
        digest, path = served.sha256(file.path.encode()), f"/{project}/{file.published}"
        line = digest if project == "kubernetes" else f"{digest}  {file.path.rpartition('/')[2]}\n"
        server.files[path] = server.files.get(path, b"") + line.encode()
        row = rows.setdefault(project, {}).setdefault(version, {"known": "2026-01-01: before"})
        row.setdefault(architecture, {})[file.name] = digest
    return rows


def helm(server, version):
    """Serve the digests of a release; return the pin of another release."""
    url = f"{server.url}/helm-v{version}-linux-{{architecture}}.tar.gz"
    pin = {"url": url, "version": version}
    for name in table.ARCHITECTURES:
        pin[name] = served.sha256(f"{version} {name}".encode())
        place = url.replace("{architecture}", name).removeprefix(server.url)
        server.files[f"{place}.sha256sum"] = f"{pin[name]}  {place[1:]}\n".encode()
    return pin


@pytest.fixture
def checkout(server, tmp_path, monkeypatch):
    """A checkout with the files that the command reads and writes, and whose pins are those of the server."""
    for path in ("meta/pins.yml", PINS.RELEASED, PINS.CONTAINERFILE, "roles/hami/defaults/main.yml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    digest = f"sha256:{served.sha256(BASE)}"
    pins = {
        "keys": {"debian12/a.pub": {"url": f"{server.url}/debian12/a.pub", "sha256": "", "fingerprint": ""}},
        "charts": {"hami": {"url": f"{server.url}", "version": "2.10.0", "sha256": served.sha256(CHART)}},
        "programs": {"helm": helm(server, PINS.build.HELM.version)},
        "images": {
            "base": {"url": f"{server.address}/library/python:3.13-slim-bookworm", "digest": digest, "chart": ""},
            "hami": {"url": f"{server.address}/projecthami/hami:v2.10.0", "digest": digest, "chart": "hami"},
        },
    }
    pins["keys"]["debian12/a.pub"]["sha256"] = served.sha256(OLD_KEY)
    for section in pins.values():
        for pin in section.values():
            pin["known"] = "2026-01-01: before"
    for pin in pins["images"].values():
        pin["platforms"] = {}
    path = tmp_path / "meta/pins.yml"
    path.write_text(PINS.written(pins, path.read_text()))
    server.files["/debian12/a.pub"] = OLD_KEY
    served.repository(server, "hami", "2.10.0", CHART)
    server.files[MANIFESTS] = server.files[HAMI] = answer(BASE)
    places = {project: f"{server.url}/{project}" for project in PINS.settings.DOWNLOADS}
    monkeypatch.setattr(PINS.settings, "DOWNLOADS", places)
    put(tmp_path, publish(server))
    return tmp_path


def put(root, rows):
    path = root / PINS.RELEASED
    path.write_text(PINS.written(rows, path.read_text()))


def rows_of(root):
    return yaml.safe_load((root / PINS.RELEASED).read_text())


def run(root, *words, tag="v2.10.0", others=()):
    """Run the command with a stand-in for helm, by which the chart names an image beside the role's own.

    :param tag: of that image.
    """
    known = yaml.safe_load((root / "meta/pins.yml").read_text())["images"]["hami"]["url"]
    found = {f"{known.rpartition(':')[0]}:{tag}", *others}
    return PINS.main(words, root, "http", rendered=lambda _name, _content: found)


def pins_of(root):
    return table.load((root / "meta/pins.yml").read_text(), "pins.yml")


def test_nothing_new_writes_nothing(checkout, capsys):
    before = (checkout / "meta/pins.yml").read_text()
    assert run(checkout) == 0 and capsys.readouterr().out == "Nothing changed.\n"
    assert (checkout / "meta/pins.yml").read_text() == before


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_one_command_takes_up_every_change(checkout, server, capsys, words):
    before = pins_of(checkout)
    text = (checkout / "meta/pins.yml").read_text()
    chart, base = served.chart("hami", "2.10.0", "new"), manifest("new")
    server.files["/debian12/a.pub"] = NEW_KEY
    served.repository(server, "hami", "2.10.0", chart)
    server.files[MANIFESTS] = answer(base)
    assert run(checkout, *words) == 0
    digest = f"sha256:{served.sha256(base)}"
    assert capsys.readouterr().out.splitlines() == [
        f"keys: debian12/a.pub: sha256: {served.sha256(OLD_KEY)} -> {served.sha256(NEW_KEY)}",
        f"charts: hami: sha256: {served.sha256(CHART)} -> {served.sha256(chart)}",
        f"images: base: digest: {before['images']['base']['digest']} -> {digest}",
    ]
    if words:
        assert (checkout / "meta/pins.yml").read_text() == text
        return
    after = pins_of(checkout)
    assert after["keys"]["debian12/a.pub"]["sha256"] == served.sha256(NEW_KEY)
    assert after["charts"]["hami"]["sha256"] == served.sha256(chart) and after["images"]["base"]["digest"] == digest
    changed = (after["keys"]["debian12/a.pub"], after["charts"]["hami"], after["images"]["base"])
    assert all("downloaded from" in pin["known"] for pin in changed)
    lines = (checkout / PINS.CONTAINERFILE).read_text().splitlines()
    assert f"ARG BASE={server.address}/library/python:3.13-slim-bookworm@{digest}" in lines
    assert (checkout / "meta/pins.yml").read_text().startswith(text[: text.index("\nkeys:")]), "its comments stay"
    assert run(checkout) == 0 and capsys.readouterr().out == "Nothing changed.\n"


def test_another_version_of_the_role_is_taken_up(checkout, server, capsys):
    path = checkout / "roles/hami/defaults/main.yml"
    path.write_text(path.read_text().replace("hami_chart_version: 2.10.0", "hami_chart_version: 2.11.0"))
    new = served.chart("hami", "2.11.0")
    served.repository(server, "hami", "2.11.0", new)
    assert run(checkout) == 0 and "charts: hami: version: 2.10.0 -> 2.11.0" in capsys.readouterr().out
    assert pins_of(checkout)["charts"]["hami"].items() >= {"version": "2.11.0", "sha256": served.sha256(new)}.items()


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("/debian12/a.pub", None, "keys: debian12/a.pub: .*/a.pub can't be downloaded: HTTP Error 404"),
        ("/debian12/a.pub", b"<html>", "keys: debian12/a.pub: .* isn't an armoured OpenPGP public key"),
        ("/debian12/a.pub", b"\x99\x01\xff", "keys: debian12/a.pub: .* isn't an armoured OpenPGP public key"),
        ("/debian12/a.pub", OLD_KEY * 20_000, "keys: debian12/a.pub: .* has more than 1048576 bytes"),
        ("/index.yaml", b"entries: {}", "charts: hami: .*index.yaml has no chart hami"),
        ("/index.yaml", b"[", "charts: hami: .*index.yaml isn't an index of charts"),
        ("/hami-2.10.0.tgz", b"other", "charts: hami: .*tgz has SHA-256 .*, and .*index.yaml says"),
        (
            MANIFESTS,
            answer(manifest("a", MANIFEST), MANIFEST),
            "images: base: .* and not an index of several platforms",
        ),
        (MANIFESTS, answer(BASE, digest=f"sha256:{'0' * 64}"), "images: base: .* its registry says sha256:000"),
        (MANIFESTS, b"<html>", "images: base: .* isn't a manifest"),
    ],
)
def test_what_cant_be_learnt_stays_and_is_named(checkout, server, capsys, path, content, words):
    """A failure keeps its digest and takes nothing from the others."""
    before = pins_of(checkout)
    new = served.chart("hami", "2.10.0", "new") if "charts" not in words else None
    if new:
        served.repository(server, "hami", "2.10.0", new)
    server.files[path] = content
    assert run(checkout) == 1
    said = capsys.readouterr().err
    assert re.search(f"^not updated: {words}", said), said
    after = pins_of(checkout)
    section, name = words.split(": ")[:2]
    assert after[section][name] == before[section][name]
    assert not new or after["charts"]["hami"]["sha256"] == served.sha256(new)


def test_each_architectures_manifest_is_kept_with_what_a_node_downloads(checkout, server, capsys):
    rows, expected = [], {}
    for name, system, size in (
        ("amd64", "linux", 1000),
        ("arm64", "linux", 900),
        ("amd64", "windows", 5),
        ("s390x", "linux", 5),
    ):
        layers = [{"digest": "sha256:1", "size": size}, {"digest": "sha256:2", "size": 20}]
        body = {"mediaType": MANIFEST, "config": {"size": 3}, "layers": layers, "annotations": {"for": name + system}}
        content = json.dumps(body).encode()
        own = f"sha256:{served.sha256(content)}"
        rows.append({"digest": own, "size": len(content), "platform": {"architecture": name, "os": system}})
        server.files[f"/v2/library/python/manifests/{own}"] = answer(content, MANIFEST)
        if name in ("amd64", "arm64") and system == "linux":
            expected[name] = {"digest": own, "bytes": size + 23 + len(content)}
    index = json.dumps({"mediaType": INDEX, "manifests": rows}).encode()
    server.files[MANIFESTS] = answer(index)
    assert run(checkout) == 0
    assert pins_of(checkout)["images"]["base"]["platforms"] == expected
    assert f"images: base: platforms: unknown -> amd64 {expected['amd64']['digest']} (" in capsys.readouterr().out
    # A registry that sends another manifest than the index names.
    server.files[f"/v2/library/python/manifests/{expected['arm64']['digest']}"] = answer(b'{"layers": []}', MANIFEST)
    assert run(checkout) == 1 and "its registry says sha256:" in capsys.readouterr().err


def test_a_charts_images_are_those_that_helm_makes_of_it(checkout, server, capsys):
    new = manifest("2.11")
    server.files["/v2/projecthami/hami/manifests/v2.11.0"] = answer(new)
    assert run(checkout, tag="v2.11.0") == 0
    address = f"{server.address}/projecthami/hami"
    assert f"images: hami: url: {address}:v2.10.0 -> {address}:v2.11.0" in capsys.readouterr().out
    pin = pins_of(checkout)["images"]["hami"]
    assert (pin["url"], pin["digest"]) == (f"{address}:v2.11.0", f"sha256:{served.sha256(new)}")
    # One that nothing here knows would be missing without internet access.
    assert run(checkout, tag="v2.11.0", others=["example.org/certgen:1"]) == 1
    said = capsys.readouterr().err
    assert "not updated: charts: hami: it names" in said and "example.org/certgen:1" in said


def test_a_registry_that_wants_a_token_gets_one(checkout, server, capsys):
    base = manifest("new")

    def asked(headers):
        if headers.get("Authorization") != "Bearer abc":
            scope = 'service="registry",scope="repository:library/python:pull"'
            return 401, {"WWW-Authenticate": f'Bearer realm="{server.url}/token",{scope}'}, b""
        return answer(base)(headers)

    server.files[MANIFESTS] = asked
    query = "service=registry&scope=repository%3Alibrary%2Fpython%3Apull"
    server.files[f"/token?{query}"] = b'{"token": "abc"}'
    assert run(checkout) == 0 and "images: base: digest:" in capsys.readouterr().out


def test_a_mirror_is_asked_instead(checkout, server, capsys):
    with served.Server().running() as mirror:
        mirror.files = {f"/mirror{path}": content for path, content in server.files.items()}
        mirror.files["/mirror/debian12/a.pub"] = NEW_KEY
        server.asked.clear()
        assert run(checkout, f"--mirror={server.url}/debian12/={mirror.url}/mirror/debian12/") == 0
    assert "keys: debian12/a.pub: sha256:" in capsys.readouterr().out
    pin = pins_of(checkout)["keys"]["debian12/a.pub"]
    assert pin["url"].startswith(server.url) and mirror.url in pin["known"]
    assert not [path for _method, path in server.asked if "debian12" in path]


def test_what_isnt_known_of_the_labs_downloads_is_filled_in(checkout, server, capsys):
    rows = rows_of(checkout)
    [(version, known)] = rows["etcd"].items()
    newest = PINS.build.SETS["kubernetes"].version
    empty = {"known": "", "amd64": {}, "arm64": {}}
    put(checkout, {**rows, "etcd": {"0.1.0": known}, "kubernetes": {**rows["kubernetes"], newest: empty}})
    head = (checkout / PINS.RELEASED).read_text().partition("kubernetes:")[0]
    assert run(checkout) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"kubernetes {newest} amd64: 7 digests",
        f"kubernetes {newest} arm64: 7 digests",
        f"etcd {version} amd64: 1 digests",
        f"etcd {version} arm64: 1 digests",
        "etcd 0.1.0: dropped",
    ]
    after = rows_of(checkout)
    assert after["etcd"][version]["known"].endswith(f": downloaded from {server.url}/etcd")
    for project, release_file, architecture, _file in release_files():
        assert after[project][release_file][architecture] == rows[project][release_file][architecture]
    assert (checkout / PINS.RELEASED).read_text().startswith(head), "its comments stay"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "etcd .*: .*/SHA256SUMS can't be downloaded: HTTP Error 404"),
        (b"<html>", "etcd .*: .*/SHA256SUMS has no SHA-256 of etcd-v.*-linux-amd64.tar.gz"),
        (b"0" * 64 + b"  other.tar.gz\n", "etcd .*: .*/SHA256SUMS has no SHA-256 of etcd-v"),
        (b"0" * 64, "etcd .*: .* has SHA-256 0{64} of etcd-v.*-linux-amd64.tar.gz for amd64, which was [0-9a-f]{64}"),
    ],
)
def test_a_released_file_doesnt_change(checkout, server, capsys, content, words):
    before = rows_of(checkout)
    [path] = [file for file in server.files if file.endswith("SHA256SUMS")]
    server.files[path] = content
    assert run(checkout) == 1
    assert re.search(f"^not updated: {words}", capsys.readouterr().err) and rows_of(checkout) == before


def test_the_containerfile_has_the_base_of_the_table():
    [line] = [one for one in (ROOT / PINS.CONTAINERFILE).read_text().splitlines() if one.startswith("ARG BASE=")]
    assert line == f"ARG BASE={table.image('base')}"
    assert yaml.safe_load((ROOT / "meta/pins.yml").read_text())["images"]["base"]["digest"]


def test_a_newer_program_gets_its_digests_and_a_changed_release_is_a_failure(checkout, server, capsys):
    version = PINS.build.HELM.version
    path = checkout / "meta/pins.yml"
    known = pins_of(checkout)
    older = {**known["programs"]["helm"], "version": "3.0.0", "amd64": "a" * 64}
    older["url"] = older["url"].replace(version, "3.0.0")
    known["programs"]["helm"] = older
    path.write_text(PINS.written(known, path.read_text()))
    assert run(checkout) == 0, capsys.readouterr()
    pin = pins_of(checkout)["programs"]["helm"]
    assert pin["version"] == version and pin["amd64"] == served.sha256(f"{version} amd64".encode())
    assert f"programs: helm: version: 3.0.0 -> {version}" in capsys.readouterr().out
    server.files[f"/helm-v{version}-linux-arm64.tar.gz.sha256sum"] = b"0" * 64
    assert run(checkout) != 0
    assert f"arm64.tar.gz has SHA-256 {'0' * 64}, which was {pin['arm64']}" in capsys.readouterr().err
    assert pins_of(checkout)["programs"]["helm"] == pin
