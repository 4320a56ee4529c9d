# SPDX-License-Identifier: GPL-3.0-or-later
"""The server of claim templates, with the rights that the role grants it, on a real API server."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dra_world import NAMESPACE, TEMPLATES, account, events, names, pod, templates
from extender_kit import environment
from gpushare.api.client import KubeError, connect
from gpushare.shared._contracts import claim_templates as contract
from gpushare.templates.command import Templates
from gpushare.templates.keeper import EVENT
from gpushare.templates.objects import template_of
from gpushare.templates.rows import DIGEST
from own_cluster import until
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE, ApiServer
from test_gpushare_on_api import listed
from test_monitoring_page import first_column
from unix_http import ask_socket

COMMAND = (sys.executable, "-m", "gpushare.templates.command")


@pytest.fixture
def server(dra_api: ApiServer) -> ApiServer:
    return dra_api


@pytest.fixture
def space(server: ApiServer) -> str:
    return server.namespace()


@pytest.fixture
def start(server: ApiServer, tmp_path: Path) -> Iterator[Callable[..., Templates]]:
    """Start the server in this process, by default as the leader."""
    running: list[Templates] = []

    def begin(leads: bool = True, **options: Any) -> Templates:
        kube = connect(server.url, str(account(server, tmp_path / "account")))
        templates = Templates(kube, namespace=NAMESPACE, registry=CollectorRegistry(), **options)
        templates.start()
        running.append(templates)
        if leads:
            until(lambda: templates.leader.leading and templates.unready() is None)
        return templates

    yield begin
    for one in running:
        assert one.stop()


def create(server: ApiServer, namespace: str, wanted: dict[str, Any]) -> dict[str, Any]:
    return server.request("POST", f"/api/v1/namespaces/{namespace}/pods", wanted)


def delete(server: ApiServer, namespace: str, name: str) -> None:
    server.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}?gracePeriodSeconds=0")


# --------------------------------------------------------------------------- rights


def test_kubectl_lists_exactly_these_permissions(server: ApiServer) -> None:
    everywhere = {"list pods", "watch pods", "create events"}
    everywhere |= {f"{verb} {TEMPLATES}.resource.k8s.io" for verb in ("list", "watch", "create", "delete")}
    lease = {"create leases.coordination.k8s.io"}
    lease |= {f"{verb} leases.coordination.k8s.io gpushare-dra-templates" for verb in ("get", "update")}
    assert listed(server, "gpushare-dra-templates", "default") == everywhere
    assert listed(server, "gpushare-dra-templates", NAMESPACE) == everywhere | lease


OURS = {contract.MANAGED_BY: contract.MANAGER}
CARD = {"name": "r", "exactly": {"deviceClassName": contract.DRIVER}}


@pytest.mark.parametrize(
    ("metadata", "request_"),
    [
        ({"name": "theirs", "labels": OURS}, CARD),
        ({"name": "gpu-mem-1"}, CARD),
        ({"name": "gpu-mem-1", "labels": OURS}, {"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}}),
        ({"name": "gpu-mem-1", "labels": OURS}, {"name": "r", "firstAvailable": [{"name": "s", **CARD["exactly"]}]}),
        ({"name": "gpu-mem-1", "labels": OURS}, {"name": "r", "exactly": {**CARD["exactly"], "adminAccess": True}}),
    ],
    ids=["another name", "no label", "another class", "a list", "administrator's access"],
)
def test_it_makes_no_other_templates(
    server: ApiServer, tmp_path: Path, metadata: dict[str, Any], request_: dict[str, Any]
) -> None:
    kube = connect(server.url, str(account(server, tmp_path / "account")))
    space = server.namespace(labels={"resource.kubernetes.io/admin-access": "true"})
    path = f"/apis/{contract.API_VERSION}/namespaces/{space}/{TEMPLATES}"
    spec = {"spec": {"devices": {"requests": [request_]}}}
    with pytest.raises(KubeError, match=r"its own templates of claims on gpu\.kubegpu\.share only"):
        kube.post(path, {"metadata": metadata, "spec": spec})


def test_it_deletes_no_other_templates(server: ApiServer, tmp_path: Path, space: str) -> None:
    template = template_of(space, "gpu-mem-1", "GiB")
    assert template is not None
    del template["metadata"]["labels"]
    server.apply(template)
    kube = connect(server.url, str(account(server, tmp_path / "account")))
    with pytest.raises(KubeError, match=r"its own templates of claims on gpu\.kubegpu\.share only"):
        kube.delete(f"/apis/{contract.API_VERSION}/namespaces/{space}/{TEMPLATES}/gpu-mem-1")


# --------------------------------------------------------------------------- making


def test_a_pod_gets_the_template_that_admission_has_named(
    server: ApiServer, space: str, start: Callable[..., Templates]
) -> None:
    create(server, space, pod("early", 4))
    start()
    until(lambda: names(server, space) == {"gpu-mem-4"})
    wishes = {"kubegpu.share/card-count": "2", "kubegpu.share/models": "*A100*", "kubegpu.share/exclude-models": "x"}
    create(server, space, pod("late", 8, annotations=wishes))
    create(server, space, pod("two", 4, "2"))
    expected = {"gpu-mem-4", "gpu-mem-4-2", "gpu-mem-8.cards-2.models-x2aa100x2a.without-x78"}
    until(lambda: names(server, space) == expected)
    for name, template in templates(server, space).items():
        wanted = template_of(space, name, "GiB")
        assert wanted is not None
        assert template["spec"]["spec"] == wanted["spec"]["spec"]
        assert template["metadata"]["labels"] == OURS


def test_templates_of_other_names_are_nobodys(server: ApiServer, space: str, start: Callable[..., Templates]) -> None:
    start()
    claims = [
        {"name": f"c{number}", "resourceClaimTemplateName": name}
        for number, name in enumerate(("gpu-mem-x", "gpu-mem-04", "gpu-mem-4.cards-3", "gpu-mem-4.models", "mine"))
    ]
    native = {"name": "native", "resourceClaimTemplateName": "gpu-mem-3"}
    create(server, space, {**pod("p"), "spec": {"containers": [{"name": "c", "image": "i"}], "resourceClaims": claims}})
    create(
        server, space, {**pod("q"), "spec": {"containers": [{"name": "c", "image": "i"}], "resourceClaims": [native]}}
    )
    until(lambda: names(server, space) == {"gpu-mem-3"})
    time.sleep(0.5)
    assert names(server, space) == {"gpu-mem-3"}


def test_a_template_of_the_namespaces_owner_is_left_alone(
    server: ApiServer, space: str, start: Callable[..., Templates]
) -> None:
    theirs = template_of(space, "gpu-mem-4", "MiB")
    assert theirs is not None
    del theirs["metadata"]["labels"]
    server.apply(theirs)
    create(server, space, pod("p", 4))
    create(server, space, pod("q", 5))
    start(unused=0.0)
    until(lambda: names(server, space) == {"gpu-mem-4", "gpu-mem-5"})
    assert "labels" not in templates(server, space)["gpu-mem-4"]["metadata"]
    assert not events(server, space, EVENT)


def test_another_unit_replaces_what_was_made(server: ApiServer, space: str, start: Callable[..., Templates]) -> None:
    first = start()
    create(server, space, pod("p", 4))
    until(lambda: names(server, space) == {"gpu-mem-4"})
    before = templates(server, space)["gpu-mem-4"]["metadata"]
    assert first.stop()
    start(unit="MiB")

    def replaced() -> bool:
        now = templates(server, space).get("gpu-mem-4", {}).get("metadata", before)
        return bool(now["annotations"][DIGEST] != before["annotations"][DIGEST])

    until(replaced)
    [request] = templates(server, space)["gpu-mem-4"]["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["capacity"]["requests"] == {"memory": "4Mi"}


def test_an_event_on_the_pod_says_why_there_is_no_template(
    server: ApiServer, space: str, start: Callable[..., Templates]
) -> None:
    """A quota is the usual reason; its end is noticed."""
    quota = {"count/resourceclaimtemplates.resource.k8s.io": "0"}
    server.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none", "namespace": space},
            "spec": {"hard": quota},
        }
    )
    path = f"/api/v1/namespaces/{space}/resourcequotas/none"
    # Nobody else fills in the status here.
    server.request("PATCH", f"{path}/status", {"status": {"hard": quota, "used": quota}}, content=MERGE)
    start()
    create(server, space, pod("p", 4))
    [message] = until(lambda: events(server, space, EVENT), 30)
    assert re.match(
        "KubernetesAPIError: template gpu-mem-4 of its claim can't be made, and it waits for it: .*exceeded quota",
        message,
    )
    server.request("DELETE", path)
    until(lambda: names(server, space) == {"gpu-mem-4"}, 30)


# --------------------------------------------------------------------------- sweeping


def test_what_no_waiting_pod_names_is_swept(server: ApiServer, space: str, start: Callable[..., Templates]) -> None:
    """A pod that is bound has its claims; and what others have made always stays."""
    for name, units in (("waits", 1), ("bound", 2), ("goes", 3)):
        create(server, space, pod(name, units))
    theirs = template_of(space, "gpu-mem-9", "GiB")
    assert theirs is not None
    del theirs["metadata"]["labels"]
    server.apply(theirs)
    first = start()
    until(lambda: len(names(server, space)) == 4)
    assert first.stop()
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": space}})
    binding = {"metadata": {"name": "bound"}, "target": {"kind": "Node", "name": space}}
    server.request("POST", f"/api/v1/namespaces/{space}/pods/bound/binding", binding)
    delete(server, space, "goes")
    start(unused=1.0)
    until(lambda: names(server, space) == {"gpu-mem-1", "gpu-mem-9"})


def test_a_deleted_template_comes_back_while_a_pod_waits(
    server: ApiServer, space: str, start: Callable[..., Templates]
) -> None:
    start()
    create(server, space, pod("p", 4))
    until(lambda: names(server, space) == {"gpu-mem-4"})
    uid = templates(server, space)["gpu-mem-4"]["metadata"]["uid"]
    server.request("DELETE", f"/apis/{contract.API_VERSION}/namespaces/{space}/{TEMPLATES}/gpu-mem-4")
    until(lambda: templates(server, space).get("gpu-mem-4", {}).get("metadata", {}).get("uid", uid) != uid, 30)


# --------------------------------------------------------------------------- several processes


@contextlib.contextmanager
def process(server: ApiServer, folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the real command; its status socket is <name>.sock, and its log <name>.log."""
    options = [f"--api-server={server.url}", f"--service-account={account(server, folder / 'account')}"]
    options += [f"--lease-namespace={NAMESPACE}", f"--status-socket={folder / name}.sock"]
    with (folder / f"{name}.log").open("wb") as log:
        started = subprocess.Popen([*COMMAND, *options], env=environment(), stdout=log, stderr=log)
        try:
            until(lambda: ready(folder / f"{name}.sock"), 30)
            yield started
        finally:
            started.kill()
            started.wait(10)


def ready(socket: Path) -> bool:
    with contextlib.suppress(OSError):
        return ask_socket(socket, "/readyz")[0] == 200
    return False


def leads(folder: Path, name: str) -> bool:
    return "gpushare_templates_leader 1.0" in str(ask_socket(folder / f"{name}.sock", "/metrics")[1])


def test_a_server_that_ends_is_followed_by_the_other_at_once(server: ApiServer, space: str, tmp_path: Path) -> None:
    """It gives its Lease back."""
    with process(server, tmp_path, "one") as one:
        until(lambda: leads(tmp_path, "one"), 40)
        with process(server, tmp_path, "two"):
            assert not leads(tmp_path, "two")
            one.send_signal(signal.SIGTERM)
            assert one.wait(15) == 0
            create(server, space, pod("p", 1))
            until(lambda: names(server, space) == {"gpu-mem-1"}, 8)
            assert leads(tmp_path, "two")
            page = ask_socket(tmp_path / "two.sock", "/metrics")[1]
    # Every metric is in the documentation, and nothing else.
    shown = {name for name in re.findall(r"^# TYPE (gpushare_\w+) ", page, re.M) if not name.endswith("_created")}
    own, common = "Metrics of the server of claim templates", "Metrics of every server"
    assert shown == {*first_column(own), *first_column(common)}


@pytest.mark.long
def test_a_server_that_is_killed_is_followed_by_the_other(server: ApiServer, space: str, tmp_path: Path) -> None:
    with process(server, tmp_path, "one") as one:
        until(lambda: leads(tmp_path, "one"), 40)
        with process(server, tmp_path, "two"):
            one.kill()
            one.wait(10)
            create(server, space, pod("p", 1))
            until(lambda: names(server, space) == {"gpu-mem-1"}, 40)
            assert leads(tmp_path, "two")
    # While none runs.
    create(server, space, pod("q", 2))
    with process(server, tmp_path, "three"):
        until(lambda: "gpu-mem-2" in names(server, space), 40)


def test_one_leads_and_another_follows_when_it_is_gone(
    server: ApiServer, space: str, start: Callable[..., Templates], tmp_path: Path
) -> None:
    first = start(identity="first", lease_seconds=4)
    second = start(leads=False, identity="second", lease_seconds=4)
    until(lambda: second.unready() is None)
    create(server, space, pod("p", 1))
    until(lambda: names(server, space) == {"gpu-mem-1"})
    assert (first.leader.leading, second.leader.leading) == (True, False)
    # Cut off from the Lease: it ends before the other begins.
    real = first.leader._kube
    first.leader._kube = connect("http://127.0.0.1:1", str(tmp_path / "account"))
    until(lambda: not first.leader.leading)
    assert not second.leader.leading
    assert "the Lease gpushare-dra-templates can't be had" in str(first.unready())
    until(lambda: second.leader.leading)
    create(server, space, pod("q", 2))
    until(lambda: names(server, space) == {"gpu-mem-1", "gpu-mem-2"})
    first.leader._kube = real
    until(lambda: first.unready() is None)
    assert (first.leader.leading, second.leader.leading) == (False, True)


# --------------------------------------------------------------------------- monitoring
