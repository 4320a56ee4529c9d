# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients on the network at the servers' ports: probes and allocatable memory stay, and no memory is taken."""

from __future__ import annotations

import json
import re
import threading
import typing as t
from collections.abc import Iterator

import pytest
from _lab import JsonObject, Lab, until
from _pods import SERVERS, containers, is_announced, is_ready, plugin, plugin_page

PLAYBOOK = "tests/lab/injection.yml"
NAMESPACE = "lab-clients"
METRICS_PORT, EXTENDER_PORT = 9445, 12345
MEMORY_MIB = 128
# Holds connections that send one byte each, and opens others for those that the server ends.
HOLDER = """
import socket, sys, time
address, port, number, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
held, made, end = [], 0, time.monotonic() + seconds

def is_open(one):
    try:
        return bool(one.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False

while time.monotonic() < end:
    held = [one for one in held if is_open(one) or one.close()]
    while len(held) < number and time.monotonic() < end:
        try:
            one = socket.create_connection((address, port), 5)
            one.sendall(bytes([22]))
        except OSError:
            break
        one.setblocking(False)
        held.append(one)
        made += 1
    time.sleep(0.2)
print(made)
"""
# Sends a GiB in chunks, and prints how much of it was taken.
ENDLESS = """
import socket, ssl, sys
address, port, path, tls = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "tls"
one = socket.create_connection((address, port), 10)
if tls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    one = context.wrap_socket(one)
chunk, sent = b"10000\\r\\n" + bytes(65536) + b"\\r\\n", 0
try:
    one.sendall(f"POST {path} HTTP/1.1\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n".encode())
    while sent < 1 << 30:
        one.sendall(chunk)
        sent += 65536
except OSError:
    pass
print(sent)
"""


def run(lab: Lab, node: str, script: str, *words: t.Any, seconds: float = 60) -> str:
    """Run a Python script on a node."""
    given = " ".join(map(str, words))
    return lab.ssh(node, f"python3 - {given} <<'SCRIPT'\n{script}\nSCRIPT", seconds=seconds)


def most_memory(lab: Lab, node: str, command: str) -> int:
    """The largest resident size of a server on a node so far, in MiB."""
    text = lab.ssh(node, f"for p in $(pgrep -f [b]in/{command}); do grep VmHWM /proc/$p/status; done")
    return max(int(match) // 1024 for match in re.findall(r"VmHWM:\s+(\d+) kB", text))


def listening(lab: Lab, node: str) -> list[str]:
    """The TCP ports on which the node's device plugin listens, in its pod's network."""
    script = "for p in $(pgrep -f [b]in/gpushare-device-plugin); do cat /proc/$p/net/tcp /proc/$p/net/tcp6; done"
    rows = [row.split() for row in lab.ssh(node, script).splitlines()]
    return sorted({row[1].rpartition(":")[2] for row in rows if len(row) > 3 and row[3] == "0A"})


@pytest.fixture(scope="module")
def namespace(lab: Lab) -> Iterator[str]:
    with lab.api.namespace(NAMESPACE) as name:
        yield name


def configured(lab: Lab, metrics: bool) -> None:
    value = json.dumps({"gpushare_device_plugin_metrics": metrics})
    done = lab.playbook(PLAYBOOK, "-e", value)
    assert done.rc == 0, done.out[-8000:]
    for node in lab.gpu_nodes:
        until(lambda node=node: is_ready(plugin(lab, node)), f"the plugin of {node}", 90)
        until(lambda node=node: is_announced(lab, node, len(lab.cards(node))), f"the cards of {node}", 60)


def test_the_device_plugin_listens_on_no_port(lab: Lab) -> None:
    for node in lab.gpu_nodes:
        assert listening(lab, node) == []
        assert plugin_page(lab, node, "/healthz").strip() == "ok"
    policy = lab.api.call(
        "GET", f"/apis/networking.k8s.io/v1/namespaces/{SERVERS}/networkpolicies/gpushare-device-plugin"
    )
    assert not policy["spec"].get("ingress")


def test_a_gibibyte_to_the_extender_takes_no_memory(lab: Lab) -> None:
    for node in lab.control_planes:
        for path in ("/gpushare-scheduler/filter", "/healthz"):
            assert int(run(lab, node, ENDLESS, "127.0.0.1", EXTENDER_PORT, path, "plain")) < 1 << 30
        assert most_memory(lab, node, "gpushare-extender") < MEMORY_MIB


@pytest.mark.long
def test_one_byte_connections_for_five_minutes(lab: Lab, namespace: str) -> None:
    """With metrics served, 64 and 500 connections to each plugin: no restart, and the memory stays announced."""
    try:
        configured(lab, True)
        before = {node: plugin(lab, node) for node in lab.gpu_nodes}
        units = {node: lab.allocatable(node) for node in lab.gpu_nodes}
        token = reader(lab, namespace)
        for number in (64, 500):
            attacks = [
                threading.Thread(
                    target=run,
                    args=(lab, node, HOLDER, before[node]["status"]["podIP"], METRICS_PORT, number, 300),
                    kwargs={"seconds": 360},
                )
                for node in lab.gpu_nodes
            ]
            for attack in attacks:
                attack.start()
            while any(attack.is_alive() for attack in attacks):
                for node in lab.gpu_nodes:
                    assert lab.allocatable(node) == units[node]
                    assert is_ready(plugin(lab, node))
                    assert "gpushare_plugin_card_units" in scrape(lab, before[node], token)
                attacks[0].join(5)
        for node in lab.gpu_nodes:
            assert containers([plugin(lab, node)]) == containers([before[node]])
            address = before[node]["status"]["podIP"]
            assert int(run(lab, node, ENDLESS, address, METRICS_PORT, "/metrics", "tls")) < 1 << 30
            assert most_memory(lab, node, "gpushare-device-plugin") < MEMORY_MIB
            refused = lab.ssh(
                node, f"curl -sk -m 5 -o /dev/null -w '%{{http_code}}' https://{address}:{METRICS_PORT}/metrics"
            )
            assert refused == "401"
    finally:
        configured(lab, False)
        for kind in ("clusterrolebindings", "clusterroles"):
            lab.api.delete(f"/apis/rbac.authorization.k8s.io/v1/{kind}/{namespace}")
    left = lab.api.items("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings")
    assert "gpushare-device-plugin:auth-delegator" not in {one["metadata"]["name"] for one in left}
    secrets = lab.api.items(f"/api/v1/namespaces/{SERVERS}/secrets")
    assert "gpushare-device-plugin-metrics-tls" not in {secret["metadata"]["name"] for secret in secrets}


def reader(lab: Lab, namespace: str) -> str:
    """The token of an account that may read metrics."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    account = {"metadata": {"name": "reader"}}
    lab.api.call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    rules = [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    owner: JsonObject = {"metadata": {"name": namespace}}
    lab.api.call("POST", f"{rbac}/clusterroles", {**owner, "rules": rules})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace}
    subjects = [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}]
    lab.api.call("POST", f"{rbac}/clusterrolebindings", {**owner, "roleRef": reference, "subjects": subjects})
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/reader/token"
    wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    return str(lab.api.call("POST", path, wanted)["status"]["token"])


def scrape(lab: Lab, pod: JsonObject, token: str) -> str:
    """Read the metrics from another address than the attack's, whose clients compete for one limit."""
    address = f"https://{pod['status']['podIP']}:{METRICS_PORT}/metrics"
    return lab.ssh(lab.control_planes[0], f"curl -sk -m 20 -H 'Authorization: Bearer {token}' {address}")
