# SPDX-License-Identifier: GPL-3.0-or-later
"""An HTTP server that returns lists as kube-apiserver does."""

from __future__ import annotations

import http.server
import json
import threading

SECRET = "c2VjcmV0LXRva2Vu"


class Api:
    """Returns lists chunked and paged; the token of a page is the number of its first item."""

    def __init__(self):
        self.lists, self.asked, self.failures, self.cut = {}, [], [], 0
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path, _mark, query = self.path.partition("?")
                asked = dict(pair.split("=") for pair in query.split("&"))
                api.asked.append((path, asked))
                failure = api.failures.pop(0) if api.failures else None
                if failure:
                    return self.answer(failure, json.dumps({"message": "too old"}).encode())
                items = api.lists[path]
                start = int(asked.get("continue", 0))
                stop = start + int(asked["limit"])
                metadata = {"continue": str(stop)} if stop < len(items) else {}
                page = {"kind": "List", "metadata": metadata, "items": items[start:stop]}
                self.answer(200, json.dumps(page, separators=(",", ":")).encode() + b"\n")

            def answer(self, status, body):
                self.send_response(status)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for at in range(0, len(body), 1000):
                    piece = body[at : at + 1000]
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    if api.cut:
                        self.close_connection = True
                        return
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def kubeconfig(self):
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": SECRET}}],
        }

    def close(self):
        self.server.shutdown()
        self.server.server_close()
