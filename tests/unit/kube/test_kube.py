# SPDX-License-Identifier: GPL-3.0-or-later
"""The client with an HTTP server, and with servers that refuse, don't answer, or use another protocol."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
import types

import kubernetes.client
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import client
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import AUTH_ARG_SPEC, KubeError, RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref

SECRET = "c2VjcmV0LXRva2Vu"


class Api:
    """A small HTTP server with scripted answers, which records its requests."""

    def __init__(self):
        self.received, self.answers = [], {}
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def respond(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length).decode()
                api.received.append((self.command, self.path, dict(self.headers), body))
                status, answer = api.answers.get(self.path.split("?")[0], (404, {"message": "not here"}))
                if callable(answer):
                    answer = answer(self.path)
                payload = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_PATCH = do_DELETE = respond

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def api():
    server = Api()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    # The library keeps the last kubeconfig for the process; a module has a process of its own.
    monkeypatch.setattr(kubernetes.client.Configuration, "_default", None)
    kubernetes_names = ("KUBECONFIG", "K8S_AUTH_KUBECONFIG", "K8S_AUTH_HOST", "KUBERNETES_SERVICE_HOST")
    for name in (*kubernetes_names, "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


def module(**params):
    return types.SimpleNamespace(params={**dict.fromkeys(AUTH_ARG_SPEC), **params}, no_log_values=set())


def kubeconfig(url):
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": SECRET}}],
    }


def kube(url):
    return RealKube.of_module(module(kubeconfig=kubeconfig(url)))


POD = Ref("v1", "Pod", "n s", "p/1")


def test_connects_lazily_and_authenticates_like_kubernetes_core(api):
    api.answers["/api/v1/namespaces/n%20s/pods/p%2F1"] = (200, {"kind": "Pod"})
    api_client = kube(api.url)
    assert api.received == []
    assert api_client.get(POD) == {"kind": "Pod"}
    ((method, _path, headers, _body),) = api.received
    assert method == "GET"
    assert headers["authorization" if "authorization" in headers else "Authorization"] == f"Bearer {SECRET}"
    assert api_client.requests == {"GET": 1}


def test_the_environment_is_used_like_in_kubernetes_core(api, monkeypatch):
    monkeypatch.setenv("K8S_AUTH_HOST", api.url)
    monkeypatch.setenv("K8S_AUTH_API_KEY", "from-env")
    monkeypatch.setenv("K8S_AUTH_IMPERSONATE_USER", "somebody")
    api.answers["/version"] = (200, {"gitVersion": "v1"})
    assert RealKube.of_module(module()).version() == {"gitVersion": "v1"}
    headers = {key.lower(): value for key, value in api.received[0][2].items()}
    assert (headers["authorization"], headers["impersonate-user"]) == ("Bearer from-env", "somebody")


def test_the_credentials_of_a_kubeconfig_dictionary_are_hidden():
    given = module(kubeconfig=kubeconfig("http://127.0.0.1:1"))
    RealKube.of_module(given)
    assert SECRET in given.no_log_values


def test_a_missing_object_is_none(api):
    assert kube(api.url).get(POD) is None


def test_lists_are_paged_and_items_have_kind_and_version(api):
    def page(path):
        more = {} if "continue=two" in path else {"continue": "two"}
        return {"metadata": more, "items": [{"metadata": {"name": "b" if not more else "a"}}]}

    api.answers["/api/v1/pods"] = (200, page)
    found = kube(api.url).list_all("v1", "Pod", field_selector="status.phase!=Failed", label_selector="a=b")
    assert [(one["kind"], one["apiVersion"], one["metadata"]["name"]) for one in found] == [
        ("Pod", "v1", "a"),
        ("Pod", "v1", "b"),
    ]
    assert "limit=500" in api.received[0][1] and "labelSelector=a%3Db" in api.received[0][1]
    assert "fieldSelector=status.phase%21%3DFailed" in api.received[0][1]


def test_apply_patch_and_delete_send_the_expected_requests(api):
    definition = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d", "namespace": "n"}}
    path = "/apis/apps/v1/namespaces/n/daemonsets/d"
    api.answers[path] = (200, {"done": True})
    api.answers[path + "/status"] = (200, {"done": True})
    api_client = kube(api.url)
    ref = Ref("apps/v1", "DaemonSet", "n", "d")
    assert api_client.apply(definition, "me") == {"done": True}
    api_client.patch(ref, {"status": {"a": None}}, "status")
    api_client.delete(ref)
    applied, patched, deleted = api.received
    query = dict(pair.split("=") for pair in applied[1].split("?")[1].split("&"))
    assert query == {"fieldManager": "me", "force": "true", "fieldValidation": "Strict"}
    assert applied[2]["Content-Type"] == "application/apply-patch+yaml"
    assert json.loads(applied[3]) == definition
    assert (patched[1], patched[2]["Content-Type"]) == (path + "/status", "application/merge-patch+json")
    assert json.loads(patched[3]) == {"status": {"a": None}}
    assert (deleted[0], deleted[1]) == ("DELETE", path + "?propagationPolicy=Foreground")
    assert api_client.requests == {"PATCH": 2, "DELETE": 1}


def test_logs_are_text(api):
    api.answers["/api/v1/namespaces/n/pods/p/log"] = (200, "{not json\n")
    assert kube(api.url).log("n", "p", "c", 3) == "{not json\n"
    assert api.received[0][1].endswith("?container=c&tailLines=3")


def test_unknown_kinds_are_discovered_once_per_group(api):
    resources = [{"name": "things", "kind": "Thing", "namespaced": False}, {"name": "things/status", "kind": "Thing"}]
    api.answers["/apis/x.example/v1"] = (200, {"resources": resources})
    api.answers["/apis/x.example/v1/things/t"] = (200, {"found": True})
    api_client = kube(api.url)
    thing = Ref("x.example/v1", "Thing", "", "t")
    assert api_client.get(thing) == api_client.get(thing) == {"found": True}
    assert api_client.requests == {"GET": 3}
    assert api_client.get(Ref("x.example/v1", "Other", "", "t")) is None
    api_client.delete(Ref("x.example/v1", "Other", "", "t"))
    assert api_client.requests == {"GET": 3}
    with pytest.raises(ShareError, match=r"Other t: the cluster doesn't know Other in x\.example/v1"):
        api_client.apply({"apiVersion": "x.example/v1", "kind": "Other", "metadata": {"name": "t"}}, "me")


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (401, {"message": "Unauthorized", "reason": "Unauthorized"}, "these credentials (401 Unauthorized)"),
        (403, {"message": 'nodes is forbidden: User "x"'}, 'lacks a permission: nodes is forbidden: User "x"'),
        (404, "<html>nothing", "isn't a Kubernetes API server"),
        (200, "<html>hello", "isn't a Kubernetes API server"),
        (429, {"message": "slow down", "reason": "TooManyRequests"}, "rejected the request: slow down (429)"),
        (500, {"message": "etcd\nis away"}, "rejected the request: etcd is away (500)"),
        (503, "busy", "(503)"),
    ],
)
def test_errors_have_status_reason_and_a_message_of_one_line(api, status, answer, message):
    api.answers["/api/v1/nodes"] = (status, answer)
    with pytest.raises(KubeError) as error:
        kube(api.url).list_all("v1", "Node")
    assert error.value.status == (status if status != 200 else 0)
    assert error.value.reason == (answer.get("reason", "") if isinstance(answer, dict) else "")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert SECRET not in str(error.value)


def test_a_rejected_apply_names_the_object(api):
    path = "/apis/apps/v1/namespaces/n/daemonsets/d"
    api.answers[path] = (422, {"message": "spec.selector: field is immutable"})
    definition = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d", "namespace": "n"}}
    with pytest.raises(
        ShareError, match=r"^DaemonSet n/d: the API server rejected the request: spec.selector: field is immutable"
    ):
        kube(api.url).apply(definition, "me")


def listening():
    one = socket.socket()
    one.bind(("127.0.0.1", 0))
    one.listen()
    return one


def test_a_refused_connection_is_reported_at_once():
    one = listening()
    port = one.getsockname()[1]
    one.close()
    begin = time.monotonic()
    with pytest.raises(BadInput, match=rf"gpu_kubeconfig.*127\.0\.0\.1:{port} can't be reached: connection refused"):
        kube(f"http://127.0.0.1:{port}").version()
    assert time.monotonic() - begin < 2


def test_a_silent_server_times_out(monkeypatch):
    monkeypatch.setattr(client, "TIMEOUT", (0.2, 0.2))
    with listening() as one:
        begin = time.monotonic()
        with pytest.raises(BadInput, match="no answer within"):
            kube(f"http://127.0.0.1:{one.getsockname()[1]}").version()
        assert time.monotonic() - begin < 2


def test_plain_http_instead_of_tls_is_an_error(api):
    with pytest.raises(BadInput, match="can't be reached: "):
        kube(api.url.replace("http:", "https:")).version()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "isn't a file"),
        ("just words", "isn't a kubeconfig"),
        ("a: [", "isn't a kubeconfig"),
        ("apiVersion: v1\nkind: Config\n", "can't be used"),
    ],
)
def test_an_invalid_kubeconfig_is_named(tmp_path, text, message):
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput) as error:
        RealKube.of_module(module(kubeconfig=str(path)))
    assert str(error.value).startswith(f"kubeconfig (variable gpu_kubeconfig): {path} {message}")
    assert "\n" not in str(error.value)


def test_no_kubeconfig():
    with pytest.raises(BadInput, match="the default kubeconfig can't be used"):
        RealKube.of_module(module())
