# SPDX-License-Identifier: GPL-3.0-or-later
"""Clusters of IPv6, and of both families: an API server on ``::1``, and the extender's command as OpenShift runs it."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import types
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import collect
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import node_of
from ansible_collections.kubegpu.share.plugins.module_utils._kube import direct
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.initial_inventory import initial_inventory
from extender_kit import command_process, message
from gpushare.http import server as http_server
from gpushare.http.limits import Limits
from gpushare.http.server import Endpoint, HttpServer
from real_apiserver import ApiServer, own_api_server
from test_http_server import App
from test_openshift_templates import rendered
from tls_files import Files

BOTH = ("127.0.0.1", "::1")


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    ranges = ("--service-cluster-ip-range=fd00:10:96::/112", "--advertise-address=::1")
    with own_api_server("--bind-address=::1", *ranges) as started:
        assert started.url.startswith("https://[::1]:")
        yield started


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def ask(host: str, port: int, context: ssl.SSLContext, path: str) -> tuple[int, str]:
    # Before 3.12 Python looks for a name with brackets.
    connection = http.client.HTTPSConnection(host, port, context=context, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def openshifts_address() -> str:
    """The address on which OpenShift's extender listens, by its own command."""
    [made] = [one for one in rendered("openshift/extender") if one["kind"] == "Deployment"]
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    [found] = [one for one in command if one.startswith("--address")]
    return str(found)


def test_the_extender_serves_schedulers_of_both_families(server: ApiServer, files: Files, tmp_path: Path) -> None:
    """It reads the cluster over IPv6; its metrics are on the pod's address, which is written without brackets."""
    address = openshifts_address()
    assert address == "--address=::"
    options = [f"--api-server={server.url}", f"--service-account={server.service_account(tmp_path / 'account')}"]
    options += [address, f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-client-ca={files.ca}"]
    options += ["--metrics-address=::1", "--metrics-port=0"]
    options += [f"--metrics-tls-cert={files.cert}", f"--metrics-tls-key={files.key}"]
    with command_process(*options) as log:
        served = message(log, "serving")
        message(log, "ready")
        client = files.client(files.authority)
        for host in BOTH:
            assert ask(host, served["port"], client, f"{contract.EXTENDER_PREFIX}/inspect")[0] == 200
        # Without a token the metrics aren't read.
        assert ask("::1", served["metrics"], files.client(), "/metrics")[0] == 401


@pytest.mark.parametrize("address", ["::", "", "::1", "[::1]", "127.0.0.1", "localhost"])
def test_a_server_listens_where_it_is_told(address: str) -> None:
    served = HttpServer(App(), Endpoint(address), Limits())
    served.start()
    try:
        wanted = {"::": BOTH, "": BOTH, "::1": BOTH[1:], "[::1]": BOTH[1:], "127.0.0.1": BOTH[:1]}.get(address)
        for host in BOTH:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
                refused = one.connect_ex((host, served.port))
            assert wanted is None or (refused == 0) is (host in wanted), host
    finally:
        served.stop()


@pytest.mark.parametrize("lacking", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("reason", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_kernel_with_one_family_has_the_other_ones_sockets(
    monkeypatch: pytest.MonkeyPatch, lacking: int, reason: int
) -> None:
    real = socket.create_server

    def without(address: t.Any, *, family: int, backlog: int) -> socket.socket:
        if family == lacking:
            raise OSError(reason, "not here")
        return real(address, family=family, backlog=backlog)

    monkeypatch.setattr(http_server.socket, "create_server", without)
    served = HttpServer(App(), Endpoint("::"), Limits())
    served.start()
    served.stop()
    only = HttpServer(App(), Endpoint("::1" if lacking == socket.AF_INET6 else "127.0.0.1"), Limits())
    with pytest.raises(OSError, match="not here"):
        only.start()
    only.stop()


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        (Endpoint("::1", 80), "[::1]:80"),
        (Endpoint("[fd00::5]", 80), "[fd00::5]:80"),
        (Endpoint("", 80), "[::]:80"),
        (Endpoint("10.0.0.5", 80), "10.0.0.5:80"),
        (Endpoint(path="/a.sock"), "/a.sock"),
    ],
)
def test_an_endpoint_is_written_as_in_an_address(endpoint: Endpoint, text: str) -> None:
    assert str(endpoint) == text


def test_both_clients_of_the_collection_read_such_a_cluster(server: ApiServer) -> None:
    given = types.SimpleNamespace(params={"kubeconfig": str(server.kubeconfig)}, no_log_values=set())
    quick = direct.connect(given)
    assert isinstance(quick, direct.DirectKube)
    for kube in (quick, RealKube.of_module(given)):
        assert kube.version()["gitVersion"].startswith("v1.")


def node(name: str, *addresses: str, **labels: str) -> t.Any:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"addresses": [{"type": "InternalIP", "address": address} for address in addresses]},
    }


def test_a_node_of_both_families_has_the_address_of_the_clusters_first(server: ApiServer) -> None:
    given = types.SimpleNamespace(params={"kubeconfig": str(server.kubeconfig)}, no_log_values=set())
    nodes = [node("gpu1", "10.0.0.5", "2001:db8::5"), node("gpu2", "2001:db8::6", "10.0.0.6"), node("gpu3")]
    made = collect(direct.connect(given), list(map(node_of, nodes)), "v1.36.3", foreigners=False)
    assert [node.address for node in made.nodes] == ["10.0.0.5", "2001:db8::6", ""]


def test_an_inventory_has_ipv6_addresses_as_ssh_takes_them(server: ApiServer) -> None:
    """Without brackets; the API server's address is recognized in whatever spelling."""
    given = types.SimpleNamespace(params={"kubeconfig": str(server.kubeconfig)}, no_log_values=set())
    gpu = {"nvidia.com/gpu.present": "true"}
    nodes = [node("gpu1", "2001:db8::5", **gpu), node("gpu2", "2001:db8::6", **gpu)]
    known = collect(direct.connect(given), list(map(node_of, nodes)), "v1.36.3", foreigners=False).result()["nodes"]
    made = initial_inventory(known, server="https://[2001:DB8:0:0::6]:6443")
    assert made["gpu_nodes"] == {"gpu1": "2001:db8::5"}
    assert [one["node"] for one in made["left_out"]] == ["gpu2"]
