# SPDX-License-Identifier: GPL-3.0-or-later
"""STAND-IN for a Galaxy server: one collection in one version."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import tarfile
import typing as t
from pathlib import Path

import ports


class Server(http.server.ThreadingHTTPServer):
    """:ivar about: namespace, name and version of the collection."""

    def __init__(self, tarball: bytes, about: t.Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tarball, self.about = tarball, about

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api/"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as Galaxy's API v3 does; November 2026."""

    server: Server

    def do_GET(self) -> None:
        about, base = self.server.about, self.server.url.removesuffix("/api/")
        namespace, name, version = about["namespace"], about["name"], about["version"]
        place = f"/api/v3/collections/{namespace}/{name}/versions/"
        if self.path == "/file":
            return self.answer(self.server.tarball)
        described = {
            **{"version": version, "href": f"{place}{version}/", "download_url": f"{base}/file", "signatures": []},
            **{"namespace": {"name": namespace}, "collection": {"name": name}, "metadata": {"dependencies": {}}},
            "artifact": {"sha256": hashlib.sha256(self.server.tarball).hexdigest()},
        }
        known: dict[str, t.Any] = {
            "/api/": {"available_versions": {"v3": "v3/"}},
            place.removesuffix("versions/"): {"created_at": "2026-01-01", "updated_at": "2026-01-01"},
            place: {"data": [described], "links": {"next": None}, "meta": {"count": 1}},
            f"{place}{version}/": described,
        }
        found = known.get(self.path.partition("?")[0])
        return self.answer(json.dumps(found or {"errors": []}).encode(), 200 if found else 404)

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: t.Any) -> None:
        pass


@contextlib.contextmanager
def galaxy(tarball: bytes, about: t.Mapping[str, str]) -> t.Iterator[str]:
    """Run the server; yields the address that ansible-galaxy takes."""
    server = Server(tarball, about)
    with ports.serving(server):
        yield server.url


def tarball_of(collection: Path) -> bytes:
    """Pack a collection of the package ``ansible``, which leaves out files that FILES.json lists."""
    manifest = json.loads((collection / "MANIFEST.json").read_text())
    rows = json.loads((collection / "FILES.json").read_text())["files"]
    rows = [row for row in rows if row["name"] == "." or (collection / row["name"]).exists()]
    files = json.dumps({"files": rows, "format": 1}).encode()
    manifest["file_manifest_file"]["chksum_sha256"] = hashlib.sha256(files).hexdigest()
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as plain, tarfile.open(fileobj=plain, mode="w") as tar:

        def add(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))

        add("MANIFEST.json", json.dumps(manifest).encode())
        add("FILES.json", files)
        for row in rows:
            if row["ftype"] == "file":
                add(row["name"], (collection / row["name"]).read_bytes())
            elif row["name"] != ".":
                folder = tarfile.TarInfo(row["name"])
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(folder)
    return packed.getvalue()
