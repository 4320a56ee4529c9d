# SPDX-License-Identifier: GPL-3.0-or-later
"""An HTTP server with scripted answers, which returns lists as kube-apiserver does, and the means to connect to it."""

from __future__ import annotations

import http.server
import json
import threading
import types

import kubernetes.client
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments

SECRET = "c2VjcmV0LXRva2Vu"


class Api:
    """Returns ``answers`` (status and body by path) and ``lists`` (paged), in chunks; records its requests.

    The token of a page is the number of its first item. ``failures`` are statuses of the next answers. While
    ``closing`` is set, it closes the connection after an answer without saying so before.
    """

    def __init__(self):
        self.received, self.answers, self.lists, self.failures, self.cut = [], {}, {}, [], False
        self.connections, self.closing = 0, False
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                api.connections += 1

            def respond(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                api.received.append((self.command, self.path, dict(self.headers), body))
                path = self.path.partition("?")[0]
                failure = api.failures.pop(0) if api.failures else None
                if failure:
                    status, answer = failure, {"message": "too old"}
                elif path in api.lists:
                    status, answer = 200, api.page(*api.asked[-1])
                else:
                    status, answer = api.answers.get(path, (404, {"message": "not here"}))
                answer = answer(self.path) if callable(answer) else answer
                text = answer if isinstance(answer, str) else json.dumps(answer, separators=(",", ":")) + "\n"
                self.send_response(status)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                payload = text.encode()
                for at in range(0, len(payload), 1000):
                    piece = payload[at : at + 1000]
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    if api.cut:
                        self.close_connection = True
                        return
                self.wfile.write(b"0\r\n\r\n")
                self.close_connection = self.close_connection or api.closing

            do_GET = do_PATCH = do_DELETE = respond

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def asked(self):
        """Path and query of each request."""
        split = [path.partition("?") for _method, path, _headers, _body in self.received]
        return [(path, dict(pair.split("=") for pair in query.split("&") if pair)) for path, _mark, query in split]

    def page(self, path, query):
        items, start = self.lists[path], int(query.get("continue", 0))
        stop = start + int(query["limit"])
        metadata = {"continue": str(stop)} if stop < len(items) else {}
        return {"kind": "List", "metadata": metadata, "items": items[start:stop]}

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def kubeconfig(url):
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": SECRET}}],
    }


def module(**params):
    return types.SimpleNamespace(params={**dict.fromkeys(auth_arguments()), **params}, no_log_values=set())


def connect(url):
    return RealKube.of_module(module(kubeconfig=kubeconfig(url)))


def forget_environment(monkeypatch, home):
    """Remove every default that gives a kubeconfig or a proxy."""
    monkeypatch.setenv("HOME", str(home))
    # The library keeps the last kubeconfig for the process; a module has a process of its own.
    monkeypatch.setattr(kubernetes.client.Configuration, "_default", None)
    defaults = ("KUBECONFIG", "K8S_AUTH_KUBECONFIG", "K8S_AUTH_HOST", "KUBERNETES_SERVICE_HOST")
    for name in (*defaults, "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
