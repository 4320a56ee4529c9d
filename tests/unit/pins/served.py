# SPDX-License-Identifier: GPL-3.0-or-later
"""A web server on loopback whose files are a mapping, and the files of a repository of charts."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import tarfile

import yaml
from ports import serving


class Server:
    """The server; ``files`` maps a path to bytes, or to headers and bytes.

    :ivar asked: method and path of each request.
    """

    def __init__(self):
        self.files, self.asked = {}, []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append((self.command, self.path))
                found = outer.files.get(self.path)
                if callable(found):
                    found = found(self.headers)
                status, headers, content = found if isinstance(found, tuple) else (200, {}, found)
                self.send_response(404 if content is None else status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                if self.command == "GET":
                    with contextlib.suppress(ConnectionError):
                        self.wfile.write(content or b"")

            do_HEAD = do_GET

            def log_message(self, *_args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}"

    @contextlib.contextmanager
    def running(self):
        with serving(self._server):
            yield self


def chart(name, version, note=""):
    """The archive of a small chart."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for path, text in (
            ("Chart.yaml", yaml.safe_dump({"apiVersion": "v2", "name": name, "version": version})),
            ("values.yaml", f"note: {note!r}\n"),
        ):
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(made.getvalue(), mtime=0)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def repository(server, name, version, content, claimed=None):
    """Serve an archive in a repository of charts, whose index is signed by nobody.

    :param claimed: the digest that the index gives.
    """
    entry = {"apiVersion": "v2", "name": name, "version": version, "digest": claimed or sha256(content)}
    entry["urls"] = [f"{server.url}/{name}-{version}.tgz"]
    index = {"apiVersion": "v1", "generated": "2026-01-01T00:00:00Z", "entries": {name: [entry]}}
    server.files["/index.yaml"] = yaml.safe_dump(index).encode()
    server.files[f"/{name}-{version}.tgz"] = content
