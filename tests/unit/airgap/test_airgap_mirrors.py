# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight asks the mirrors that variables name for each thing: web servers and a registry on loopback."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import io
import json
import socket
import ssl
import threading
import time
import urllib.request

import pytest
import real_skopeo
import served
import yaml
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import findings, mirrors, web
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.findings import examine
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import needed
from ansible_runs import ansible, write_inventory
from test_airgap_needed import LIST, machine, of
from test_driver_choice import chosen, node

INDEX = "application/vnd.oci.image.index.v1+json"
KEY = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n"
DEBS = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")
TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)


@pytest.fixture
def server():
    with served.Server().running() as running:
        yield running


def manifest(*architectures):
    row = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": f"sha256:{'0' * 64}", "size": 1}
    rows = [{**row, "platform": {"architecture": name, "os": "linux"}} for name in architectures]
    return 200, {"Content-Type": INDEX}, json.dumps({"mediaType": INDEX, "manifests": rows}).encode()


def packages(**versions):
    """A list of Debian packages."""
    text = "".join(
        f"Package: {name}\nSource: x\nVersion: {version}\nDescription: the Version: 0 of it\n\n"
        for name, version in versions.items()
    )
    return gzip.compress(text.encode(), mtime=0)


def fill(server):
    """Serve all that the inventory of ``run`` needs."""
    server.files |= {
        "/cuda/Packages.gz": packages(**dict.fromkeys(DEBS, "580.95.05-1")),
        "/toolkit/Packages.gz": packages(**dict.fromkeys(TOOLKIT, "1:1.20.2-1")),
        "/cuda/3bf863cc.pub": KEY,
        "/v2/hami/manifests/v2.10.0": manifest("amd64", "arm64"),
        "/v2/kube-scheduler/manifests/v1.36.3": manifest("amd64", "arm64"),
        "/charts/index.yaml": yaml.safe_dump({"entries": {"hami": [{"version": "2.10.0"}]}}).encode(),
        "/simple/grpcio/": b'<a href="grpcio-1.85.1-cp313-cp313-manylinux2014_x86_64.whl">',
    }


def given(server):
    return {
        "driver_repo_url": f"{server.url}/cuda/",
        "driver_repo_key_sha256": served.sha256(KEY),
        "toolkit_repo_url": f"{server.url}/toolkit",
        "hami_image": f"{server.address}/hami:v2.10.0",
        "hami_kube_scheduler_image": f"{server.address}/kube-scheduler",
        "hami_chart_repo_url": f"{server.url}/charts",
        # The nodes' runtimes know that it has no TLS.
        "airgap_registry": f"{server.address}/gpu",
        "airgap_registry_insecure": True,
    }


def run(server, seconds=20, **more):
    """The findings of a Debian 12 node with HAMi, whose variables name the server for everything."""
    own = {**given(server), "gpushare_image_delivery": "registry", **more}
    observed = node("debian-12", "ampere")
    options = {name.removeprefix("driver_"): own[name] for name in ("driver_repo_url", "driver_repo_key_sha256")}
    hostvars = {"localhost": own, "gpu1": {**own, "gpu_node": observed}}
    cluster = {
        "version": "v1.36.3",
        "backends": {"parts": {"hami": True, "nvidia": False}, "gpushare": []},
        "scheduler": {"mode": "static_pod"},
    }
    found = examine(hostvars, {"gpu1": chosen(observed, **options)}, cluster, seconds)
    return {one.id: one for one in found}


def test_mirrors_that_have_everything_are_no_finding_but_the_rest_is_named(server):
    fill(server)
    found = run(server)
    # The toolkit's key has a variable of its own.
    assert set(found) == {"mirror-not-named"} and found["mirror-not-named"].severity == "note"
    assert found["mirror-not-named"].fields["names"] == ["libnvidia-container/gpgkey"]
    assert found["mirror-not-named"].fields["variables"] == ["toolkit_repo_key_url"]
    # A list is read once, whatever is looked for in it.
    assert [path for _method, path in server.asked].count("/cuda/Packages.gz") == 1


def test_a_registry_without_tls_is_a_warning_unless_the_nodes_know_it(server):
    fill(server)
    for more in ({"airgap_registry_insecure": "false"}, {"airgap_registry": "other.example.org/gpu"}):
        found = run(server, **more)
        assert set(found) == {"mirror-not-named", "registry-without-tls"}
        assert found["registry-without-tls"].severity == "warning"
        assert found["registry-without-tls"].fields["registries"] == [server.address]


def test_what_is_missing_is_counted_and_named(server):
    fill(server)
    server.files["/cuda/Packages.gz"] = packages(**dict.fromkeys(DEBS[:2], "580.95.05-1"), **{DEBS[2]: "1:570.10.01-1"})
    del server.files["/v2/kube-scheduler/manifests/v1.36.3"]
    server.files["/charts/index.yaml"] = b"entries: {hami: [{version: 2.9.0}]}"
    server.files["/v2/hami/manifests/v2.10.0"] = manifest("arm64")
    server.files["/cuda/3bf863cc.pub"] = KEY + b"another"
    found = run(server)["mirror-missing"]
    assert found.severity == "problem" and found.fields["count"] == 5 and found.fields["checked"] == 11
    assert found.text.startswith("5 of 11 missing: ")
    reasons = {row["name"]: row["reason"] for row in found.fields["missing"]}
    assert reasons == {
        "nvidia-persistenced": "there are only other versions, such as 570.10.01-1",
        "registry.k8s.io/kube-scheduler:v1.36.3": "it isn't there",
        "hami": "there are only other versions, such as 2.9.0",
        "docker.io/projecthami/hami:v2.10.0": "it has none for amd64",
        "debian12/3bf863cc.pub": f"there is another file, whose SHA-256 isn't {served.sha256(KEY)}",
    }
    assert set(found.fields["variables"]) == {
        *("driver_repo_url", "driver_repo_key_url", "hami_chart_repo_url", "hami_image", "hami_kube_scheduler_image")
    }


def test_without_mirrors_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(findings.mirrors, "ask", lambda *_given: pytest.fail("asked"))
    observed = node("debian-12", "ampere")
    hostvars = {"localhost": {}, "gpu1": {"gpu_node": observed}}
    assert examine(hostvars, {"gpu1": chosen(observed)}, {}, 20, findings.mirrors.ask) == []


def test_a_mirror_that_sends_a_byte_at_a_time_ends_in_time(server):
    fill(server)
    del server.files["/charts/index.yaml"]

    def slow(_headers):
        time.sleep(6)
        return 200, {}, b""

    server.files["/cuda/Packages.gz"] = slow
    began = time.monotonic()
    found = run(server, seconds=2)
    assert time.monotonic() - began < 5.5
    assert {row["reason"] for row in found["mirror-not-checked"].fields["not_checked"]} == {"it doesn't answer in time"}
    assert [row["name"] for row in found["mirror-missing"].fields["missing"]] == ["hami"]


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("/cuda/Packages.gz", (403, {}, b""), "it wants credentials that the controller hasn't (HTTP 403)"),
        ("/cuda/Packages.gz", (500, {}, b""), "it answers with HTTP 500"),
        ("/cuda/Packages.gz", b"\x1f\x8bno", "its list of packages is damaged"),
        ("/charts/index.yaml", b"a: &a [x]\nentries: *a\n", "its index.yaml has aliases, or more than 50 levels"),
        ("/charts/index.yaml", b"[" * 100_000, "its index.yaml has aliases, or more than 50 levels"),
        ("/charts/index.yaml", b"<html>", "its index.yaml isn't an index of charts"),
        ("/v2/hami/manifests/v2.10.0", b"<html>", "it sends no manifest"),
        ("/v2/hami/manifests/v2.10.0", b"[" * 100_000, "it sends no manifest"),
        ("/cuda/Packages.gz", (302, {"Location": "ftp://127.0.0.1:1/x"}, b""), "it answers with HTTP 302"),
    ],
)
def test_an_answer_that_says_nothing_is_neither_there_nor_missing(server, path, content, reason):
    fill(server)
    server.files[path] = content
    found = run(server)
    assert {row["reason"] for row in found["mirror-not-checked"].fields["not_checked"]} == {reason}
    assert "mirror-missing" not in found and found["mirror-not-checked"].severity == "warning"


def test_a_list_that_grows_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(mirrors, "LARGEST_LIST", 1000)
    with pytest.raises(mirrors._Unknown, match="more than 0 MiB"):
        mirrors._decompressed(gzip.compress(b"\0" * 2000))


def test_a_hostile_list_takes_time_and_memory_by_its_size_alone(server, monkeypatch):
    # Without an end of the first package, each of them was once searched through for its version.
    lines = b"Package: x\n" * 30_000 + b"Version: 1\n\nVersion: 2\n"
    began = time.process_time()
    assert list(mirrors._debs(lines)) == [(b"x", b"1")]
    assert time.process_time() - began < 2
    fill(server)
    # What is no UTF-8 is another version.
    server.files["/cuda/Packages.gz"] = gzip.compress(f"Package: {DEBS[0]}\nVersion: ".encode() + b"\xff\n\n")
    assert run(server)["mirror-missing"].fields["count"] == len(DEBS)
    monkeypatch.setattr(mirrors, "MOST_VERSIONS", 2)
    many = "".join(f"Package: {DEBS[0]}\nVersion: {number}\n\n" for number in range(3))
    server.files["/cuda/Packages.gz"] = gzip.compress(many.encode())
    [reason] = {row["reason"] for row in run(server)["mirror-not-checked"].fields["not_checked"]}
    assert reason == "its list of packages has more than 2 versions of one"


def test_a_servers_demand_for_a_token_is_read_in_time():
    def fetch(url, _until, _largest=0, headers=None):
        assert "Authorization" not in headers, "nobody has granted a token"
        if "token" in url:
            return web.Answer(200, b"[" * 60_000)
        wanted = f'Bearer {"a" * 60_000} realm="https://r.example.org/token"'
        return web.Answer(401, headers={"WWW-Authenticate": wanted})

    began = time.process_time()
    assert web.Registries(fetch, {}).manifest("r.example.org", "a/b", "1", 0).status == 401
    assert time.process_time() - began < 2


def test_rpm_repositories_and_components_of_apt_ones(server):
    primary = (
        b'<metadata><package type="rpm"><name>nvidia-driver-cuda</name><arch>x86_64</arch>'
        b'<version epoch="3" ver="580.95.05" rel="1.el9"/></package></metadata>'
    )
    repomd = b'<repomd><data type="primary"><location href="repodata/1-primary.xml.gz"/></data></repomd>'
    server.files |= {"/r/repodata/repomd.xml": repomd, "/r/repodata/1-primary.xml.gz": gzip.compress(primary)}
    server.files["/d/dists/stable/main/binary-amd64/Packages"] = gzip.decompress(
        packages(**dict.fromkeys(TOOLKIT, "1.20.2-1"))
    )
    suites = {
        "toolkit_repo_suites": ["stable"],
        "toolkit_repo_components": ["main"],
        "toolkit_repo_url": f"{server.url}/d",
    }
    known = of(
        machine("rocky-9", driver_repo_url=f"{server.url}/r/"), machine("debian-12", "gpu2", **suites), backends=()
    )
    items = [item for item in mirrors.at_mirrors(needed(LIST, known)) if item["kind"] in ("apt", "rpm")]
    found = {each.item["name"]: each.state for each in mirrors.ask(items, 20)}
    rpms = {name: state for name, state in found.items() if name not in TOOLKIT}
    assert rpms.pop("nvidia-driver-cuda") == "present" and rpms and set(rpms.values()) == {"missing"}
    assert {found[name] for name in TOOLKIT} == {"present"}


def test_credentials_go_to_their_registry_alone(server, tmp_path):
    auth = base64.b64encode(b"user:secret").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"https://r.example.org/v1/": {"auth": auth}}}))
    known = web.credentials({"DOCKER_CONFIG": str(tmp_path)})
    assert known == {"r.example.org": f"Basic {auth}"}
    asked = []

    def fetch(url, _until, _largest=0, headers=None):
        asked.append((url, (headers or {}).get("Authorization", "")))
        if "token" in url:
            return web.Answer(200, b'{"token": "t"}')
        if headers["Authorization"] == "Bearer t":
            return web.Answer(200, b"{}")
        return web.Answer(401, headers={"WWW-Authenticate": 'Bearer realm="https://r.example.org/token",service="s"'})

    assert web.Registries(fetch, known).manifest("r.example.org", "a/b", "1", 0).status == 200
    manifest_url = "https://r.example.org/v2/a/b/manifests/1"
    assert asked == [
        (manifest_url, f"Basic {auth}"),
        ("https://r.example.org/token?service=s", f"Basic {auth}"),
        (manifest_url, "Bearer t"),
    ]
    # Without TLS they go to none but those that the user has named.
    for insecure, sent in (((), ""), (("r.example.org",), f"Basic {auth}")):
        asked.clear()

        def plain(url, _until, _largest=0, headers=None):
            asked.append((url, (headers or {}).get("Authorization", "")))
            return web.Answer(404) if url.startswith("http://") else web.Answer(0, failure="no_tls")

        answer = web.Registries(plain, known, insecure).manifest("r.example.org", "a/b", "1", 0)
        assert answer.status == 404 and answer.plain
        assert asked[-1] == (manifest_url.replace("https", "http"), sent)
    # A redirect leads elsewhere without them.
    with served.Server().running() as other:
        seen = []
        other.files["/there"] = lambda headers: (seen.append(headers.get("Authorization")), (200, {}, b"x"))[1]
        server.files["/here"] = (302, {"Location": f"{other.url}/there"}, b"")
        answer = web.fetch(f"{server.url}/here", time.monotonic() + 5, 10, {"Authorization": "Basic x"})
    assert (answer.status, answer.content, seen) == (200, b"x", [None])


def test_where_a_registry_redirects_nobody_asks_for_its_credentials(server):
    """Blobs and manifests may be at a storage's: a token that it demands is for itself."""
    seen = []

    def token(headers):
        seen.append(headers.get("Authorization"))
        return 200, {}, b'{"token": "t"}'

    with served.Server().running() as other:
        for path, realm in (("/v2/a/manifests/1", other.url), ("/v2/b/manifests/1", server.url)):
            demand = (401, {"WWW-Authenticate": f'Bearer realm="{realm}/token",service="s"'}, b"")
            server.files[path] = (307, {"Location": f"{other.url}{path}"}, b"") if "/a/" in path else demand
            other.files[path] = demand
        server.files["/token?service=s"] = other.files["/token?service=s"] = token
        registries = web.Registries(web.fetch, {server.address: "Basic eDp5"}, [server.address])
        assert registries.manifest(server.address, "a", "1", time.monotonic() + 10).status == 401
        assert seen == []
        # The registry itself may name any place.
        registries.manifest(server.address, "b", "1", time.monotonic() + 10)
        assert seen == ["Basic eDp5"]


def test_a_registry_that_answers_for_a_digest_with_another_image_hasnt_it(server):
    content = manifest("amd64", "arm64")[2]
    own, other = f"sha256:{served.sha256(content)}", f"sha256:{'0' * 64}"
    server.files |= dict.fromkeys((f"/v2/hami/manifests/{own}", f"/v2/hami/manifests/{other}"), content)
    known = of(machine("debian-12"), backends=("hami",))
    [item] = [item for item in needed(LIST, known) if item["id"] == "images/hami"]
    rows = [{**item, "place": f"{server.address}/hami@{digest}"} for digest in (own, other)]
    found = [mirrors.ask([row], 10, insecure=[server.address])[0] for row in rows]
    assert [each.state for each in found] == ["present", "missing"]
    assert found[1].reason == f"there is another image, whose digest isn't {other}"


@pytest.mark.parametrize("way", ["header", "chunk", "tls", "tls-header"])
def test_what_never_ends_takes_no_longer_than_the_answer_may_and_leaves_no_thread(tmp_path, way):
    """A byte from time to time keeps each wait for bytes short."""
    begin = b"HTTP/1.1 200 OK\r\nX: "
    if way == "chunk":
        begin = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"
    authority, key, certificate = real_skopeo.certificates(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _address = listening.accept()
            if way == "tls-header":
                connection = context.wrap_socket(connection, server_side=True)
            with connection, contextlib.suppress(OSError):
                while way == "tls":
                    # Its handshake doesn't go on.
                    if not connection.recv(1024):
                        raise OSError
                connection.sendall(begin)
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.05)
            ended.set()

        before = set(threading.enumerate())
        threading.Thread(target=answer, daemon=True).start()
        began = time.monotonic()
        url = f"{'https' if 'tls' in way else 'http'}://127.0.0.1:{listening.getsockname()[1]}/"
        assert web.fetcher(str(authority), "a variable")(url, began + 1, 10).failure == "timeout"
        assert time.monotonic() - began < 3
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
        assert set(threading.enumerate()) <= before
        assert ended.is_set()


@pytest.mark.parametrize(
    ("first", "then", "followed"),
    [("https", "http", False), ("https", "https", True), ("http", "https", True), ("https", "ftp", False)],
)
def test_a_redirect_doesnt_lead_out_of_tls(first, then, followed):
    """A file without a digest in the list is taken by the server's certificate alone."""
    asked = urllib.request.Request(f"{first}://a.example.org/x")
    given = (asked, io.BytesIO(), 302, "Found", http.client.HTTPMessage(), f"{then}://b.example.org/x")
    assert bool(web._Redirects().redirect_request(*given)) == followed


def test_an_image_that_only_a_variable_names_is_asked_for_at_the_same_registry():
    known = of(backends=["hami"], hami_image="m.example.org/hami:v2.10.0", acceptance_image="m.example.org/cuda:1")
    places = {item["place"] for item in mirrors.at_mirrors(needed(LIST, known))}
    assert places == {"m.example.org/hami:v2.10.0", "m.example.org/cuda:1"}
    # It isn't public, either; and airgap_push.yml's registry may have no other image.
    assert "m.example.org/cuda:1" not in {item["source"] for item in mirrors.elsewhere(needed(LIST, known))}
    known = of(backends=[], acceptance_image="m.example.org/cuda:1")
    [image] = mirrors.at_mirrors(needed(LIST, known), "m.example.org/gpu")
    assert (
        image["place"] == "m.example.org/cuda:1" and mirrors.elsewhere(needed(LIST, known), "m.example.org/gpu") == []
    )
    assert [item["source"] for item in mirrors.elsewhere(needed(LIST, known))] == ["m.example.org/cuda:1"]


def test_preflight_stops_before_anything_changes_and_counts_what_is_missing(server, tmp_path):
    """By the real ansible-playbook, on this machine, whose facts are read only."""
    write_inventory(tmp_path, {"gpu_nodes": {"gpu1": {"driver_state": "external", "toolkit_repo_url": server.url}}})
    role = {"role": "kubegpu.share.preflight", "preflight_scope": "nodes"}
    play = [{"hosts": "gpu_nodes", "gather_facts": False, "roles": [role]}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    done = ansible(tmp_path, "ansible-playbook", "-i", "hosts.yml", "play.yml")
    assert done.rc != 0 and "problem  mirror-missing" in done.text, done.text
    assert "4 of 4 missing: libnvidia-container-tools 1.20.2-1 at" in " ".join(done.text.split())
    assert "Nothing was changed." in done.text and done.changed == 0
