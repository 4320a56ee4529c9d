# SPDX-License-Identifier: GPL-3.0-or-later
"""Registries, indexes and hosts of packages that send without end, or something else than they announce.

What is longer than its metadata says is stopped before the disk is full, is one sentence, leaves nothing, and the next
run goes on. The registry, the index and the host are played; skopeo and pip are real.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import time

import ports
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import download_python, fetched, programs
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import store as stores
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.store import Store
from test_airgap_download import TYPES, Made, image, item, on_its_host, registry, repository, wheel  # noqa: F401

# What a server sends before it gives up, and at most in a second, so that the tests' disk isn't the one that is filled.
MOST, IN_A_SECOND = 512 << 20, 128 << 20
CHUNK = b"x" * (1 << 20)


def endless(handler, counts):
    """Send until the other side ends it; the bytes become the last one of the counts."""
    began = time.monotonic()
    counts.append(0)
    with contextlib.suppress(OSError):
        while counts[-1] < MOST:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
            counts[-1] += len(CHUNK)
            time.sleep(max(0.0, counts[-1] / IN_A_SECOND - (time.monotonic() - began)))
    handler.close_connection = True


class Played:
    """A registry with one image, whose layer comes as ``lies`` says.

    :ivar lies: ``endless``, ``longer`` or ``shorter`` than announced; empty for what its manifest names.
    :ivar sent: bytes of each endless layer.
    """

    def __init__(self, kind, program):
        self.lies, self.sent, self.program = "", [], program
        form, layer_type = TYPES[kind]
        self.layer = os.urandom(1000)
        config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}})
        media = "application/vnd.docker.container.image.v1+json" if kind == "docker" else form.format("config")
        self.blobs = {self.digest(content): content for content in (self.layer, config.encode())}
        self.manifest = json.dumps(
            {
                **{"schemaVersion": 2, "mediaType": form.format("manifest")},
                "config": {"mediaType": media, "digest": self.digest(config.encode()), "size": len(config)},
                "layers": [{"mediaType": layer_type, "digest": self.digest(self.layer), "size": len(self.layer)}],
            }
        ).encode()
        self.media = form.format("manifest")
        own = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                own.answer(self, False)

            def do_GET(self):
                own.answer(self, True)

            def log_message(self, *_args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", ports.free_port()), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"

    @staticmethod
    def digest(content):
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    def answer(self, handler, body):
        name = handler.path.rpartition("/")[2]
        content = self.manifest if "/manifests/" in handler.path else self.blobs.get(name, b"{}")
        handler.send_response(200)
        if content is self.manifest:
            handler.send_header("Content-Type", self.media)
            handler.send_header("Docker-Content-Digest", self.digest(content))
        lies = self.lies if content is self.layer else ""
        if lies == "endless":
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            if body:
                endless(handler, self.sent)
            return
        more = {"longer": 100, "shorter": -100}.get(lies, 0)
        handler.send_header("Content-Length", str(len(content) + more))
        handler.end_headers()
        if body:
            handler.wfile.write(content)
        handler.close_connection = bool(lies)

    def run(self, argv, timeout=60, folder=None, also=None, watch=None):
        """Runs skopeo, which takes this registry without TLS."""
        options = {"copy": ["--src-tls-verify=false"], "inspect": ["--tls-verify=false"]}[argv[1]]
        return self.program([*argv[:2], *options, *argv[2:]], timeout, folder, also, watch)


@pytest.mark.parametrize("kind", sorted(TYPES))
@pytest.mark.parametrize(("lies", "code"), [("endless", "too_large"), ("longer", "skopeo"), ("shorter", "skopeo")])
def test_a_layer_of_another_length_than_its_manifest_says(tmp_path, monkeypatch, registry, kind, lies, code):  # noqa: F811
    monkeypatch.setattr(programs, "LOOK", 0.05)
    played = Played(kind, registry.run)
    make = Made(tmp_path / "a", played.run)
    wanted = image(played, "played", architectures=[])
    played.lies = lies
    with ports.serving(played.server):
        with pytest.raises(ShareError, match=r"1 of 1 can't be fetched: image .*/played:1: .*; what is there ") as e:
            make(wanted)
        assert "\n" not in str(e.value)
        [failed] = e.value.details["failed"]
        assert failed["code"] == code
        if code == "too_large":
            expected = (
                f"more came than the {sum(map(len, played.blobs.values()))} bytes of its parts that its manifests"
            )
            assert expected in failed["reason"]
            assert failed["largest"] < 17 << 20
            assert played.sent
            assert max(played.sent) < MOST
        left = [path for path in make.folder.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in left) < 10_000
        assert not any("oci-put" in path.name for path in left)
        played.lies = ""
        assert make(wanted)["changed"]
    assert len(make.read().contents.items) == 1


def test_a_wheel_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "LOOK", 0.05)
    monkeypatch.setattr(download_python, "LARGEST_SET", 20 << 20)
    folder = tmp_path / "index"
    folder.mkdir()
    real = wheel(folder, "nvidia-ml-py")
    sent = []

    class Index(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            if self.path.endswith(".whl") and not sent:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                endless(self, sent)
                return
            page = f'<a href="/{real.name}">{real.name}</a>'.encode()
            content = real.read_bytes() if self.path.endswith(".whl") else page
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", ports.free_port()), Index)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    make = Made(tmp_path / "a", programs.run)
    one = item("wheel", "nvidia-ml-py", "==1.0", id="wheels/controller/nvidia-ml-py")
    with ports.serving(server):
        with pytest.raises(ShareError, match="more came than the 20 MiB that such a set never has, so pip was ") as e:
            make(one)
        assert [(row["code"], row["largest"]) for row in e.value.details["failed"]] == [("too_large", 20 << 20)]
        assert sent
        assert sent[0] < MOST
        # Nothing of it lies anywhere else.
        assert not list(tmp_path.rglob("*tmp*")) and not (tmp_path / "cache").exists()
        assert make(one)["changed"]
    assert "wheels/nvidia_ml_py-1.0-py3-none-any.whl" in make.read().sums


def test_collections_that_never_end(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "LOOK", 0.05)
    monkeypatch.setattr(download_python, "LARGEST_SET", 20 << 20)

    def program(argv, timeout=60, folder=None, also=None, watch=None):
        assert also["ANSIBLE_LOCAL_TEMP"] == also["TMPDIR"]
        script = f'dd if=/dev/zero of="$TMPDIR/part" bs=1M count={MOST >> 20} status=none'
        return programs.run(["sh", "-c", script], timeout, folder, also, watch)

    make = Made(tmp_path / "a", program)
    with pytest.raises(ShareError, match="so ansible-galaxy was stopped: see what the server sends") as e:
        make(item("collection", "kubegpu.other", ">=1.0"))
    assert [row["code"] for row in e.value.details["failed"]] == ["too_large"]
    assert not list(make.folder.rglob("part"))


# --------------------------------------------------------------------------- packages of machines


def test_a_host_of_packages_sends_no_more_than_it_has_described(tmp_path):
    files, described = repository()
    on_its_host(tmp_path / "remote", files, described)
    store = Store(str(tmp_path / "a"))

    def by_program(source, target):
        # As sftp, which the system ends.
        if source.endswith(".deb"):
            subprocess.run(["sh", "-c", f"exec cat /dev/zero >{target}"], check=True)
        shutil.copy(source, target)

    def within(source, target):
        with open(target, "wb") as file:
            for _number in range(MOST >> 20):
                file.write(CHUNK)

    size = len(files["pool/gcc_12_amd64.deb"])
    for transfer, name in ((by_program, "pool/gcc_12_amd64.deb"), (within, "repository.asc")):
        with pytest.raises(ShareError, match=rf"/{name}: its host sends more than the [0-9]+ bytes that it has") as e:
            fetched.Repositories([described]).fetch(store, str(tmp_path / "remote"), transfer)
        assert str(e.value).endswith("; what is there stays, and the next run goes on")
        assert e.value.details["code"] == "too_large"
        assert e.value.details["largest"] in (size, len(files["repository.asc"]))
        assert not list((tmp_path / "a").rglob("*.part"))
        shutil.rmtree(tmp_path / "a")
    fetched.Repositories([described]).fetch(store, str(tmp_path / "remote"), shutil.copy)
    assert store.sha256(f"{described['path']}/pool/gcc_12_amd64.deb") == described["packages"][0]["sha256"]


def test_what_a_host_describes_has_to_fit_before_any_of_it_comes(tmp_path):
    _files, described = repository()
    described["packages"][0]["bytes"] = 1 << 60
    with pytest.raises(ShareError, match=r"is full: [0-9]+ MiB are needed, [0-9]+ are free; what is there stays") as e:
        fetched.Repositories([described]).fetch(Store(str(tmp_path / "a")), "/remote", pytest.fail)
    assert e.value.details["code"] == "full"
    assert e.value.details["needed"] == (1 << 60) + len(b"key") + len(b"signed") + stores.SPARE
    assert not list((tmp_path / "a").iterdir())
