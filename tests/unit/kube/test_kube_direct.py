# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests without the library kubernetes: which connections need it, and the same answers from a real API server."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kube import client, direct, refs
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._kube.stream import Wanted, listed
from kube_api import SECRET, Api, forget_environment, kubeconfig, module

URL = "http://192.0.2.1:6443"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    forget_environment(monkeypatch, tmp_path)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def access(config=None, environ=None, **params):
    return direct.access_of({**module().params, "kubeconfig": config, **params}, environ or {})


def changed(cluster=None, user=None, url=URL):
    config = kubeconfig(url)
    config["clusters"][0]["cluster"].update(cluster or {})
    config["users"][0]["user"].update(user or {})
    return config


# --------------------------------------------------------------------------- which client


def test_a_token_needs_no_client(tmp_path):
    found = access(kubeconfig(URL + "/k8s/clusters/c-1/"))
    assert (found.server, found.headers["Authorization"]) == (f"{URL}/k8s/clusters/c-1", f"Bearer {SECRET}")
    assert found.headers["Accept-Encoding"] == "gzip" and found.tls is None
    assert access(changed({"disable-compression": True})).headers["Accept-Encoding"] == "identity"
    # A file is relative to the kubeconfig.
    (tmp_path / "token").write_text("from-file\n")
    config = kubeconfig(URL)
    config["users"][0]["user"] = {"tokenFile": "token"}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    assert access(str(tmp_path / "config")).headers["Authorization"] == "Bearer from-file"


def test_the_default_file_and_the_context_are_those_of_the_client(tmp_path):
    config = kubeconfig(URL)
    config["contexts"].append({"name": "other", "context": {"cluster": "k2", "user": "u"}})
    config["clusters"].append({"name": "k2", "cluster": {"server": "http://192.0.2.2"}})
    path = tmp_path / ".kube" / "config"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    assert access().server == access(None, {"KUBECONFIG": str(path)}).server == URL
    assert access(None, {"K8S_AUTH_KUBECONFIG": str(path), "K8S_AUTH_CONTEXT": "other"}).server == "http://192.0.2.2"
    assert access(context="other").server == "http://192.0.2.2"
    # In a pod the client takes the service account; without a file there is nothing to take.
    assert access(None, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) is None
    path.unlink()
    assert access() is None


@pytest.mark.parametrize(
    ("config", "environ", "params"),
    [
        (changed(user={"exec": {"command": "x"}}), {}, {}),
        (changed(user={"auth-provider": {}}), {}, {}),
        (changed(user={"username": "a", "password": "b"}), {}, {}),
        (changed(user={"as": "somebody"}), {}, {}),
        (changed({"proxy-url": "http://proxy"}), {}, {}),
        (changed({"server": "https://192.0.2.1"}), {}, {}),
        (changed({"server": "unix:///x"}), {}, {}),
        (changed(user={"token": 5}), {}, {}),
        (kubeconfig(URL), {"HTTPS_PROXY": "http://proxy"}, {}),
        (kubeconfig(URL), {"https_proxy": "http://proxy"}, {}),
        (kubeconfig(URL), {"K8S_AUTH_IMPERSONATE_USER": "x"}, {}),
        (kubeconfig(URL), {"K8S_AUTH_VERIFY_SSL": "no"}, {}),
        (kubeconfig(URL), {}, {"validate_certs": False}),
        (kubeconfig(URL), {}, {"impersonate_groups": ["x"]}),
        (kubeconfig(URL), {}, {"host": URL, "api_key": "x"}),
        (kubeconfig(URL), {}, {"context": "missing"}),
        ("/a:/b", {}, {}),
        ({}, {}, {}),
    ],
    ids=repr,
)
def test_other_connections_need_the_client(config, environ, params):
    assert access(config, environ, **params) is None


def test_the_client_reports_a_kubeconfig_that_cannot_be_used(tmp_path):
    (tmp_path / "config").write_text("a: [")
    with pytest.raises(BadInput, match="isn't a kubeconfig"):
        direct.connect(module(kubeconfig=str(tmp_path / "config")))


def test_without_kubernetes_core_no_other_kubeconfig_is_taken(monkeypatch, tmp_path):
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(json.dumps(kubeconfig(URL)))
    monkeypatch.setattr(direct, "auth_arguments", dict)
    assert access({"clusters": []}) is None


@pytest.mark.parametrize("token", ["two\nlines", "\u00fc", "nul\0"])
def test_a_token_that_no_header_can_have_is_refused_and_not_shown(token):
    with pytest.raises(BadInput, match="the token of its user has a line break") as error:
        direct.connect(module(kubeconfig=changed(user={"token": token})))
    assert token not in str(error.value)


@pytest.mark.parametrize("name", ["foo..bar", "a" * 64 + ".example"])
def test_a_name_that_no_server_can_have_is_unreachable(name):
    with pytest.raises(BadInput, match="can't be reached: "):
        direct.connect(module(kubeconfig=kubeconfig(f"http://{name}:6443"))).version()


def test_credentials_of_a_dictionary_are_hidden():
    given = module(kubeconfig=kubeconfig(URL))
    direct.connect(given)
    assert SECRET in given.no_log_values


@pytest.mark.parametrize(
    "name", ["backend_objects", "cluster_info", "cluster_objects", "gpu_allocation_check", "gpu_allocation_info"]
)
def test_the_client_is_not_imported(name):
    program = (
        "import sys\n"
        f"from ansible_collections.kubegpu.share.plugins.modules import {name}\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('kubernetes', 'urllib3')])"
    )
    packages = [str(Path(__file__).resolve().parents[3] / ".collections"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)},
    )
    assert done.stdout == "[]\n"


# --------------------------------------------------------------------------- answers


@pytest.fixture
def api():
    server = Api()
    yield server
    server.close()


def names_of(kube, kind="Node"):
    (found,) = listed(kube, Wanted(kind, lambda item: [item["metadata"]["name"]]))
    return found


def test_a_compressed_answer_that_ends_early_is_an_error(monkeypatch, api):
    api.lists["/api/v1/nodes"] = [{"metadata": {"name": "n"}}]
    kube = direct.connect(module(kubeconfig=kubeconfig(api.url)))
    monkeypatch.setattr(
        direct.http.client.HTTPResponse, "getheader", lambda _self, _name, _default=None: "gzip", raising=True
    )
    with pytest.raises(KubeError, match="can't be reached"):
        names_of(kube)


def test_a_connection_serves_all_requests_until_it_is_closed(api):
    api.lists["/api/v1/nodes"] = [{"metadata": {"name": "n"}}]
    api.answers["/version"] = (200, {"gitVersion": "v1"})
    kube = direct.connect(module(kubeconfig=kubeconfig(api.url)))
    assert kube.get(Ref("v1", "Node", "", "a")) is None and names_of(kube) == ["n"] and kube.version()
    assert api.connections == 1
    api.closing = True
    for number in range(1, 4):
        assert kube.version() == {"gitVersion": "v1"}
        assert api.connections == number
        time.sleep(0.05)


def test_a_connection_whose_answer_is_not_read_to_its_end_serves_no_other_request(api):
    api.lists["/api/v1/nodes"] = [{"metadata": {"name": "n" * 5000}}]
    api.answers["/version"] = (200, {"gitVersion": "v1"})
    kube = direct.connect(module(kubeconfig=kubeconfig(api.url)))
    chunks = kube.chunks("v1", "Node", [("limit", "500")], 1000)
    assert next(chunks)
    chunks.close()
    assert kube.version() == {"gitVersion": "v1"} and api.connections == 2


def test_a_redirection_is_not_followed(api):
    api.failures = [302]
    with pytest.raises(KubeError) as error:
        names_of(direct.connect(module(kubeconfig=kubeconfig(api.url))))
    assert error.value.status == 302


def both(config):
    """The names of the cluster's namespaces' pods and nodes, read without the client and with it."""
    given = module(kubeconfig=config)
    found = direct.connect(given)
    assert isinstance(found, direct.DirectKube)
    return [names_of(one, "Node") for one in (found, client.RealKube.of_module(given))]


@pytest.fixture(scope="module")
def cluster(api_server):
    for name in ("direct-1", "direct-2"):
        api_server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
    yield api_server
    for name in ("direct-1", "direct-2"):
        api_server.request("DELETE", f"/api/v1/nodes/{name}")


def test_certificates_and_tokens_are_accepted_by_a_real_server(cluster, tmp_path):
    admin = yaml.safe_load(cluster.kubeconfig.read_text())
    first, second = both(str(cluster.kubeconfig))
    assert first == second and {"direct-1", "direct-2"} <= set(first)

    inline = yaml.safe_load(cluster.kubeconfig.read_text())
    for entry in (inline["clusters"][0]["cluster"], inline["users"][0]["user"]):
        for field in ("certificate-authority", "client-certificate", "client-key"):
            if field in entry:
                entry[f"{field}-data"] = base64.b64encode(Path(entry.pop(field)).read_bytes()).decode()
    assert both(inline) == [first, first]

    account = cluster.service_account(tmp_path / "account", name="direct")
    for user in ({"token": (account / "token").read_text()}, {"tokenFile": str(account / "token")}):
        assert both({**admin, "users": [{"name": admin["users"][0]["name"], "user": user}]}) == [first, first]

    named = yaml.safe_load(cluster.kubeconfig.read_text())
    named["clusters"][0]["cluster"]["tls-server-name"] = "localhost"
    assert both(named) == [first, first]
    named["clusters"][0]["cluster"]["tls-server-name"] = "elsewhere.example"
    with pytest.raises(BadInput, match=r"can't be reached: .*certificate"):
        names_of(direct.connect(module(kubeconfig=named)))


def test_single_objects_selected_lists_and_the_version_are_the_clients(cluster, monkeypatch):
    monkeypatch.setattr(refs, "PAGE", 1)
    given = module(kubeconfig=str(cluster.kubeconfig))
    direct_one, with_client = direct.connect(given), client.RealKube.of_module(given)

    def reads(kube):
        label = "kubernetes.io/metadata.name=kube-system"
        return [
            kube.get(Ref("v1", "Node", "", "direct-1")),
            kube.get(Ref("v1", "Node", "", "nobody")),
            # A kind that isn't known here is looked up, and one that the cluster lacks isn't there.
            kube.get(Ref("apiregistration.k8s.io/v1", "APIService", "", "v1.apps")),
            kube.get(Ref("nvidia.com/v1", "ClusterPolicy", "", "a")),
            kube.list_all("nvidia.com/v1", "ClusterPolicy"),
            sorted(one["metadata"]["name"] for one in kube.list_all("v1", "Node")),
            kube.list_all("v1", "Namespace", label_selector=label),
            kube.list_all("v1", "ConfigMap", namespace="kube-system"),
            kube.version(),
        ]

    first = reads(direct_one)
    assert first == reads(with_client) and direct_one.requests == with_client.requests
    assert first[0] and first[2] and first[1] is first[3] is None and first[4] == []
    assert {"direct-1", "direct-2"} <= set(first[5]) and len(first[6]) == 1 and first[8]["gitVersion"]
    nobody = direct.connect(module(kubeconfig=str(cluster.kubeconfig_of("nobody"))))
    with pytest.raises(KubeError) as error:
        nobody.get(Ref("v1", "Node", "", "direct-1"))
    assert error.value.status == 403


def test_writes_have_the_results_of_the_clients(cluster, monkeypatch):
    given = module(kubeconfig=str(cluster.kubeconfig))
    new, opened = direct.DirectKube._opened, []
    monkeypatch.setattr(direct.DirectKube, "_opened", lambda self: opened.append(self) or new(self))

    def writes(kube):
        space = cluster.namespace()
        name = {"name": "c", "namespace": space}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": name, "data": {"a": "1", "b": "\u00fc"}}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": name,
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        }
        ref, of_pod = Ref("v1", "ConfigMap", space, "c"), Ref("v1", "Pod", space, "c")
        found = [
            kube.apply(config_map, "us"),
            kube.patch(ref, {"data": {"a": None}}),
            kube.try_create(pod),
            kube.get(of_pod),
            kube.apply(pod, "us"),
            kube.patch(of_pod, {"status": {"reason": "Tried"}}, "status"),
            kube.evict(space, "c", 0),
            kube.get(of_pod),
            kube.delete(ref),
            kube.get(ref),
            kube.delete(ref),
        ]
        for wrong in (
            lambda: kube.apply({**config_map, "dada": {}}, "us"),
            lambda: kube.try_create({**pod, "spec": {"containers": []}}),
            lambda: kube.log(space, "c", "c", 3),
            lambda: kube.evict(space, "c"),
        ):
            with pytest.raises(KubeError) as error:
                wrong()
            found.append((error.value.status, error.value.reason, str(error.value).replace(space, "SPACE")))
        for one in found:
            if isinstance(one, dict):
                for field in (
                    "uid",
                    "resourceVersion",
                    "creationTimestamp",
                    "deletionTimestamp",
                    "namespace",
                    "managedFields",
                ):
                    one["metadata"].pop(field, None)
        return found

    direct_one, with_client = direct.connect(given), client.RealKube.of_module(given)
    assert isinstance(direct_one, direct.DirectKube)
    first = writes(direct_one)
    # Over TLS, and despite answers that are errors.
    assert opened == [direct_one]
    assert first == writes(with_client) and direct_one.requests == with_client.requests
    assert first[0]["data"] == {"a": "1", "b": "\u00fc"} and first[1]["data"] == {"b": "\u00fc"}
    assert first[3] is first[7] is None and first[5]["status"]["reason"] == "Tried"
    # No garbage collector runs there.
    assert first[9]["metadata"]["finalizers"] == ["foregroundDeletion"]
    assert [status for status, _reason, _text in first[11:]] == [500, 422, 404, 404]


def test_an_answer_that_isnt_the_apis_is_told(monkeypatch, api):
    kube = direct.connect(module(kubeconfig=kubeconfig(api.url)))
    monkeypatch.setattr(direct.DirectKube, "fetch", lambda *_words: "<html>")
    with pytest.raises(BadInput, match="isn't a Kubernetes API server"):
        kube.version()


def test_a_real_server_with_another_authority_or_without_rights_is_refused(cluster, tmp_path):
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["certificate-authority"] = config["users"][0]["user"]["client-certificate"]
    with pytest.raises(BadInput, match=r"can't be reached: .*certificate"):
        names_of(direct.connect(module(kubeconfig=config)))
    config["clusters"][0]["cluster"] = {"server": cluster.url, "insecure-skip-tls-verify": True}
    assert "direct-1" in names_of(direct.connect(module(kubeconfig=config)))
    config["users"][0]["user"] = {"token": "wrong"}
    with pytest.raises(BadInput, match="doesn't accept these credentials"):
        names_of(direct.connect(module(kubeconfig=config)))
    with pytest.raises(KubeError, match="its user lacks a permission: nodes is forbidden") as error:
        names_of(direct.connect(module(kubeconfig=str(cluster.kubeconfig_of("nobody")))))
    assert (error.value.status, error.value.reason) == (403, "Forbidden")


def test_an_exec_plugin_is_left_to_the_client(cluster, tmp_path):
    account = cluster.service_account(tmp_path / "account", name="plugin")
    plugin = tmp_path / "plugin"
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": (account / "token").read_text()},
    }
    plugin.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(credential)}\nEND\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}
    config["users"][0]["user"] = {"exec": command}
    found = direct.connect(module(kubeconfig=config))
    assert isinstance(found, client.RealKube)
    assert "direct-1" in names_of(found)
