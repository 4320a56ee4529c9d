# SPDX-License-Identifier: GPL-3.0-or-later
"""Kubernetes 1.29 with 20,000 pods: the cluster's own scheduler and a dedicated one at once, as the roles deploy them.

Each has an extender beside it, with the rights and the configuration of its role. All programs of Kubernetes are the
real ones of that release; nodes are objects only, since bound pods needn't run.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dedicated_kit
import gpushare_objects
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.config import FORM
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.extenders import Extender
from api_double import make_node
from extender_kit import eventually
from gpushare.api.client import KubeApi, connect
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from real_apiserver import ApiServer, own_api_server
from role_templates import one
from test_double_booking import PODS, Auditor, Process

RELEASE = "v1.29.6"
SYSTEM = "gpushare-system"
RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
SCHEDULERS = ("default-scheduler", dedicated_kit.NAME)
# 40 pods of one unit on each node leave one unit on each card, and the two schedulers need most of these.
COUNT, CARDS, SIZE, RUNNING, BURST = 500, 4, 11, 20_000, 800
NODES = {f"gpu-node-{number:04d}": (SIZE,) * CARDS for number in range(COUNT)}
LIMIT = 600.0


class Deployed(Process):
    """The command as the image runs it."""

    program = ("-m", "gpushare.extender.command")


@pytest.fixture
def server() -> Iterator[ApiServer]:
    # Without a controller manager nothing would remove the taints of nodes that aren't ready yet.
    with own_api_server("--disable-admission-plugins=ServiceAccount,TaintNodesByCondition", release="1.29") as started:
        yield started


def accounts(server: ApiServer, folder: Path) -> dict[str, list[str]]:
    """Apply the rights of both roles; return the options of the extender beside each scheduler."""
    cluster = {"version": RELEASE}
    objects = gpushare_objects.rendered("namespace", "extender", __gpushare_cluster=cluster)
    objects += dedicated_kit.rendered("namespace", "rights", server=RELEASE)
    server.apply(*(one for one in objects if one["kind"] == "Namespace"))
    server.apply(*(one for one in objects if one["kind"] in RIGHTS))
    names = {SCHEDULERS[0]: (SYSTEM, "gpushare-extender"), SCHEDULERS[1]: (dedicated_kit.NAMESPACE, dedicated_kit.NAME)}
    return {
        scheduler: [
            f"--api-server={server.url}",
            f"--service-account={server.token(folder / scheduler, *name)}",
            f"--ledger-namespace={SYSTEM}",
        ]
        for scheduler, name in names.items()
    }


def configuration(server: ApiServer, scheduler: str, port: int) -> str:
    """Return the configuration that its role writes, for the extender at this port and for this API server."""
    url = f"http://127.0.0.1:{port}{contract.EXTENDER_PREFIX}"
    kubeconfig = str(server.kubeconfig)
    if scheduler == SCHEDULERS[0]:
        return FORM.new(29, {"kubeconfig": kubeconfig, "leader-elect": "false"}, Extender(url, 30, preempts=True))
    data = one(dedicated_kit.rendered("workload", server=RELEASE), "ConfigMap")["data"]
    config = yaml.safe_load(data["config.yaml"])
    config["clientConnection"] = {"kubeconfig": kubeconfig}
    config["extenders"][0]["urlPrefix"] = url
    return yaml.safe_dump(config)


@contextlib.contextmanager
def scheduling(server: ApiServer, folder: Path, scheduler: str, port: int) -> Iterator[None]:
    file = folder / f"{scheduler}.yaml"
    file.write_text(configuration(server, scheduler, port))
    with (folder / f"{scheduler}.log").open("wb") as log:
        process = subprocess.Popen(
            [server.programs["kube-scheduler"], f"--config={file}", "--secure-port=0"],
            stdout=log, stderr=subprocess.STDOUT, cwd=folder,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def make(kube: KubeApi, name: str) -> None:
    node = make_node(name, *NODES[name])
    amounts = {**node["status"]["capacity"], "cpu": "64", "memory": "512Gi", "pods": "250"}
    ready = {"type": "Ready", "status": "True", "reason": "t", "message": "t"}
    kube.post("/api/v1/nodes", {"metadata": node["metadata"]})
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    kube.patch(f"/api/v1/nodes/{name}/status", {"status": status})


def body(name: str, **spec: str) -> JsonObject:
    container = {"name": "c", "image": "none", "resources": {"limits": {contract.RESOURCE_MEMORY: "1"}}}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


def run(kube: KubeApi, number: int) -> None:
    """Create a pod that is bound to a card."""
    pod = body(f"running-{number}", nodeName=f"gpu-node-{number % COUNT:04d}")
    card = str(number // COUNT % CARDS)
    pod["metadata"]["annotations"] = {contract.POD_INDEX: card, contract.POD_ASSIGNED: "true"}
    kube.post(PODS, pod)


def held(extender: Process) -> int:
    """Return the units that an extender counts as used on all nodes."""
    answer = extender.ask("GET", f"{contract.EXTENDER_PREFIX}/inspect") or {"nodes": []}
    return sum(card["usedGPU"] for node in answer["nodes"] for card in node["devs"])


@pytest.mark.long
def test_fault_12_two_schedulers_at_once_book_nothing_twice(server: ApiServer, tmp_path: Path) -> None:
    """Scenario e: both bind all their pods to the last units of full cards, and both extenders agree with the API."""
    admin = connect(server.url, str(server.service_account(tmp_path / "admin")), 60.0)
    options = accounts(server, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: make(admin, name), NODES))
        list(pool.map(lambda number: run(admin, number), range(RUNNING)))
    auditor = Auditor(server, NODES)
    threading.Thread(target=auditor.follow, daemon=True).start()
    burst = {f"{scheduler}-{number}": scheduler for number in range(BURST) for scheduler in SCHEDULERS}
    extenders = [Deployed(*options[scheduler]) for scheduler in SCHEDULERS]
    with contextlib.ExitStack() as stack:
        for extender in extenders:
            extender.start()
            stack.callback(extender.kill)
        for extender, scheduler in zip(extenders, SCHEDULERS, strict=True):
            eventually(lambda extender=extender: held(extender) == RUNNING, 120)
            stack.enter_context(scheduling(server, tmp_path, scheduler, extender.port))
        # A scheduler that begins while the other one has done its work would show nothing.
        for scheduler in SCHEDULERS:
            admin.post(PODS, body(f"first-{scheduler}", schedulerName=scheduler))
        eventually(lambda: {f"first-{scheduler}" for scheduler in SCHEDULERS} <= auditor.bound, 120)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda item: admin.post(PODS, body(item[0], schedulerName=item[1])), burst.items()))
        eventually(lambda: auditor.over or auditor.failed or burst.keys() <= auditor.bound, LIMIT)
        assert not auditor.failed, auditor.failed
        assert not auditor.over, auditor.over[:5]
        for extender in extenders:
            eventually(lambda extender=extender: held(extender) == RUNNING + len(burst) + len(SCHEDULERS), 60)
    bound = [pod for pod in auditor.snapshot()[1] if pod["metadata"]["name"] in burst]
    in_order = sorted(bound, key=lambda pod: contract.booking(pod).assume_time)  # type: ignore[union-attr]
    first = Counter(pod["spec"]["schedulerName"] for pod in in_order[:BURST])
    assert min(first[scheduler] for scheduler in SCHEDULERS) > BURST / 10, first
