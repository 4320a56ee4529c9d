# SPDX-License-Identifier: GPL-3.0-or-later
"""Both clients with an HTTP server, and with servers that refuse, don't answer, or use another protocol."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import api as requests
from ansible_collections.kubegpu.share.plugins.module_utils._kube import client, direct
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from kube_api import SECRET, Api, forget_environment, kubeconfig, module
from ports import free_port


@pytest.fixture
def api():
    server = Api()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    forget_environment(monkeypatch, tmp_path)


@pytest.fixture(params=["direct", "client"])
def connect(request):
    """Return a function that connects to a URL with a token, without the library kubernetes and with it."""
    make = {"direct": direct.connect, "client": RealKube.of_module}[request.param]
    return lambda url: make(module(kubeconfig=kubeconfig(url)))


POD = Ref("v1", "Pod", "n s", "p/1")


def test_connects_lazily_and_authenticates_like_kubernetes_core(connect, api):
    api.answers["/api/v1/namespaces/n%20s/pods/p%2F1"] = (200, {"kind": "Pod"})
    api_client = connect(api.url)
    assert api.received == []
    assert api_client.get(POD) == {"kind": "Pod"}
    ((method, _path, headers, _body),) = api.received
    assert method == "GET"
    assert {key.lower(): value for key, value in headers.items()}["authorization"] == f"Bearer {SECRET}"
    assert api_client.requests == {"GET": 1}


def test_the_environment_is_used_like_in_kubernetes_core(api, monkeypatch):
    monkeypatch.setenv("K8S_AUTH_HOST", api.url)
    monkeypatch.setenv("K8S_AUTH_API_KEY", "from-env")
    monkeypatch.setenv("K8S_AUTH_IMPERSONATE_USER", "somebody")
    api.answers["/version"] = (200, {"gitVersion": "v1"})
    assert RealKube.of_module(module()).version() == {"gitVersion": "v1"}
    headers = {key.lower(): value for key, value in api.received[0][2].items()}
    assert (headers["authorization"], headers["impersonate-user"]) == ("Bearer from-env", "somebody")


def test_a_missing_object_is_none(connect, api):
    assert connect(api.url).get(POD) is None


def test_lists_are_paged_and_items_have_kind_and_version(connect, api):
    def page(path):
        more = {} if "continue=two" in path else {"continue": "two"}
        return {"metadata": more, "items": [{"metadata": {"name": "b" if not more else "a"}}]}

    api.answers["/api/v1/pods"] = (200, page)
    found = connect(api.url).list_all("v1", "Pod", field_selector="status.phase!=Failed", label_selector="a=b")
    assert [one["metadata"]["name"] for one in found] == ["a", "b"]
    assert {(one["kind"], one["apiVersion"]) for one in found} == {("Pod", "v1")}
    assert "limit=500" in api.received[0][1] and "labelSelector=a%3Db" in api.received[0][1]
    assert "fieldSelector=status.phase%21%3DFailed" in api.received[0][1]


@pytest.mark.parametrize("tokens", [["continue-not-supported"], ["one", "two"], ["one", "two", "three", "four"]])
def test_a_list_of_a_server_that_does_not_page_has_each_item_once(connect, api, tokens):
    """As ansible-operator's proxy answers: each time all objects, and a token."""
    items = [{"metadata": {"name": name}} for name in "ab"]

    def page(_path):
        return {"metadata": {"continue": tokens[min(len(api.received), len(tokens)) - 1]}, "items": items}

    api.answers["/api/v1/pods"] = (200, page)
    found = connect(api.url).list_all("v1", "Pod", label_selector="a=b")
    assert [one["metadata"]["name"] for one in found] == ["a", "b"]
    assert len(api.received) == 3
    assert "limit" not in api.received[-1][1] and "labelSelector=a%3Db" in api.received[-1][1]


def test_a_page_without_items_is_followed(connect, api):
    """The API server returns such pages where a selector matches none of the page's objects."""

    def page(path):
        at = int(path.partition("continue=")[2] or 0) + 1
        return {"metadata": {"continue": str(at)} if at < 4 else {}, "items": [{"metadata": {"name": "a"}}] * (at == 4)}

    api.answers["/api/v1/pods"] = (200, page)
    assert [one["metadata"]["name"] for one in connect(api.url).list_all("v1", "Pod")] == ["a"]
    assert len(api.received) == 4


def test_apply_patch_and_delete_send_the_expected_requests(connect, api):
    definition = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d", "namespace": "n"}}
    path = "/apis/apps/v1/namespaces/n/daemonsets/d"
    api.answers[path] = (200, {"done": True})
    api.answers[path + "/status"] = (200, {"done": True})
    api_client = connect(api.url)
    ref = Ref("apps/v1", "DaemonSet", "n", "d")
    assert api_client.apply(definition, "me") == {"done": True}
    api_client.patch(ref, {"status": {"a": None}}, "status")
    api_client.delete(ref)
    applied, patched, deleted = api.received
    query = dict(pair.split("=") for pair in applied[1].split("?")[1].split("&"))
    assert query == {"fieldManager": "me", "force": "true", "fieldValidation": "Strict"}
    assert applied[2]["Content-Type"] == requests.APPLY
    assert json.loads(applied[3]) == definition
    assert (patched[1], patched[2]["Content-Type"]) == (path + "/status", "application/merge-patch+json")
    assert json.loads(patched[3]) == {"status": {"a": None}}
    assert (deleted[0], deleted[1]) == ("DELETE", path + "?propagationPolicy=Foreground")
    assert api_client.requests == {"PATCH": 2, "DELETE": 1}


def test_logs_are_text(connect, api):
    api.answers["/api/v1/namespaces/n/pods/p/log"] = (200, "{not json\n")
    assert connect(api.url).log("n", "p", "c", 3) == "{not json\n"
    assert api.received[0][1].endswith("?container=c&tailLines=3")


def test_unknown_kinds_are_discovered_once_per_group(connect, api):
    resources = [{"name": "things", "kind": "Thing", "namespaced": False}, {"name": "things/status", "kind": "Thing"}]
    api.answers["/apis/x.example/v1"] = (200, {"resources": resources})
    api.answers["/apis/x.example/v1/things/t"] = (200, {"found": True})
    api_client = connect(api.url)
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
        # Of a path that isn't served, from Kubernetes 1.38 on; before, it is a text.
        (404, {"message": "the server could not find it", "reason": "NotFound", "details": {}}, "not find it (404)"),
        (200, "<html>hello", "isn't a Kubernetes API server"),
        (429, {"message": "slow down", "reason": "TooManyRequests"}, "rejected the request: slow down (429)"),
        (500, {"message": "etcd\nis away"}, "rejected the request: etcd is away (500)"),
        (503, "busy", "(503)"),
    ],
)
def test_errors_have_status_reason_and_a_message_of_one_line(connect, api, status, answer, message):
    api.answers["/api/v1/nodes"] = (status, answer)
    with pytest.raises(KubeError) as error:
        connect(api.url).list_all("v1", "Node")
    assert error.value.status == (status if status != 200 else 0)
    assert error.value.reason == (answer.get("reason", "") if isinstance(answer, dict) else "")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert SECRET not in str(error.value)


def test_a_rejected_apply_names_the_object(connect, api):
    path = "/apis/apps/v1/namespaces/n/daemonsets/d"
    api.answers[path] = (422, {"message": "spec.selector: field is immutable"})
    definition = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d", "namespace": "n"}}
    with pytest.raises(
        ShareError, match=r"^DaemonSet n/d: the API server rejected the request: spec.selector: field is immutable"
    ):
        connect(api.url).apply(definition, "me")


def test_a_refused_connection_is_reported_at_once(connect):
    port = free_port()
    begin = time.monotonic()
    with pytest.raises(BadInput, match=rf"gpu_kubeconfig.*127\.0\.0\.1:{port} can't be reached: connection refused"):
        connect(f"http://127.0.0.1:{port}").version()
    assert time.monotonic() - begin < 2


def test_a_silent_server_times_out(connect, monkeypatch):
    for one in (client, direct):
        monkeypatch.setattr(one, "TIMEOUT", (0.2, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as one:
        begin = time.monotonic()
        with pytest.raises(BadInput, match="no answer within"):
            connect(f"http://127.0.0.1:{one.getsockname()[1]}").version()
        assert time.monotonic() - begin < 2


def test_an_answer_that_ends_early_is_an_error(connect):
    """One with a Content-Length; ``Api`` sends chunks."""

    class Half(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"a":1')

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Half) as server:
        threading.Thread(target=server.handle_request).start()
        with pytest.raises(KubeError, match=r"can't be reached: .*IncompleteRead"):
            connect(f"http://127.0.0.1:{server.server_port}").log("n", "p", "c", 3)


def test_plain_http_instead_of_tls_is_an_error(connect, api):
    with pytest.raises(BadInput, match="can't be reached: "):
        connect(api.url.replace("http:", "https:")).version()


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
