# SPDX-License-Identifier: GPL-3.0-or-later
"""The real ansible-operator runs the operator on a real API server, with the rights of its account and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from operator_kit import RESOURCES, running
from real_apiserver import MERGE

DAEMON_SET = "/apis/apps/v1/namespaces/gpushare-system/daemonsets/gpushare-dra-driver"
CLAIM = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"


@pytest.fixture(scope="module")
def operator():
    with running() as started:
        yield started
        if os.environ.get("KEEP_AUDIT"):
            Path(os.environ["KEEP_AUDIT"]).write_text("\n".join(map(json.dumps, started.audit())))


def held(api, holder):
    """Have a pod hold a share of a card of gpu1."""
    requests = [{"name": "gpu-0", "exactly": {"deviceClassName": "gpu.kubegpu.share"}}]
    api.apply(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "held", "namespace": "default"},
            "spec": {"devices": {"requests": requests}},
        }
    )
    pod = {"metadata": {"name": holder}, "spec": {"nodeName": "gpu1", "containers": [{"name": "c", "image": "i"}]}}
    made = api.request("POST", "/api/v1/namespaces/default/pods", pod)
    slices = api.request("GET", "/apis/resource.k8s.io/v1/resourceslices")["items"]
    device = slices[0]["spec"]["devices"][0]["name"]
    result = {"request": "gpu-0", "driver": "gpu.kubegpu.share", "pool": "gpu1", "device": device}
    result |= {"consumedCapacity": {"memory": "4Gi"}, "shareID": "4b0dd4a5-0001-4c0d-8000-000000000000"}
    reserved = [{"resource": "pods", "name": holder, "uid": made["metadata"]["uid"]}]
    status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": reserved}
    api.request("PATCH", f"{CLAIM}/held/status", {"status": status}, MERGE)


def released(api, holder):
    api.request("PATCH", f"{CLAIM}/held/status", {"status": None}, MERGE)
    api.request("DELETE", f"{CLAIM}/held")
    api.request("DELETE", f"/api/v1/namespaces/default/pods/{holder}?gracePeriodSeconds=0")


def test_from_a_resource_to_nothing(operator):
    """Create, nothing to do, bad and hostile specs, deletion while a pod holds a share, and deletion."""
    pod = operator.start()
    operator.create()
    operator.until_well()
    assert operator.cluster.named()["daemonsets"] == {"gpushare-dra-driver"}

    # After the run that changed something there is one that changes nothing, and then nothing is left to run.
    operator.until(lambda: pod.metrics().get("kubegpu_operator_checks_total", 0) >= 1)
    before = pod.metrics()
    writes = operator.writes()
    operator.until(
        lambda: pod.metrics()["kubegpu_operator_checks_total"] >= before["kubegpu_operator_checks_total"] + 3
    )
    after = pod.metrics()
    assert after["kubegpu_operator_runs_succeeded_total"] == before["kubegpu_operator_runs_succeeded_total"] == 2
    calls = after["kubegpu_operator_checks_total"] - before["kubegpu_operator_checks_total"]
    spent = after["kubegpu_operator_cpu_seconds_total"] - before["kubegpu_operator_cpu_seconds_total"]
    assert calls >= 3 and spent / calls < 1, "seconds of processor time where nothing has changed"
    assert operator.writes() == writes

    # A second resource decides nothing, and takes nothing away.
    operator.create("other", gpushareNodes=["nowhere"])
    operator.until(lambda: operator.conditions("other").get("Degraded") == ("True", "another_resource"))
    operator.api.request("DELETE", f"{RESOURCES}/other")
    operator.until(lambda: operator.get("other") is None)
    assert there(operator.api) and pod.metrics()["kubegpu_operator_runs_succeeded_total"] == 2

    # Options that the schema doesn't have, as where somebody has replaced it: refused before Ansible starts.
    runs = pod.metrics()["kubegpu_operator_runs_succeeded_total"]
    operator.change(gpushareState="absent")
    operator.until_degraded("unknown_option")
    assert "spec.gpushareState is no option" in operator.message()
    operator.change(gpushareState=None, gpushareNodes=["{{ lookup('pipe', 'touch /tmp/evaluated') }}"])
    operator.until(lambda: operator.conditions().get("Degraded", ("", ""))[0] == "True")
    assert "lookup('pipe'" in operator.message(), "the template is text"
    assert operator.status_of("Available") == "True", "what is deployed works as before"
    assert there(operator.api)
    assert pod.metrics()["kubegpu_operator_runs_succeeded_total"] <= runs + 1

    # It can't be deleted while a pod holds a share, whatever the resource says by then.
    held(operator.api, "holder")
    operator.change(gpushareNodes=["other"], gpushareState="present", uninstallWithPods=True)
    operator.api.request("DELETE", f"{RESOURCES}/cluster")
    operator.until_degraded("pods_hold_shares")
    assert "default/holder" in operator.message() and "on gpu1" in operator.message()
    assert there(operator.api) and operator.get()["metadata"]["finalizers"] == ["kubegpu.share/uninstall"]
    events = operator.api.request("GET", "/api/v1/namespaces/default/events")["items"]
    said = {(one["type"], one["reason"]) for one in events if one["involvedObject"]["kind"] == "GPUShare"}
    assert {("Normal", "applied"), ("Warning", "unknown_option"), ("Warning", "pods_hold_shares")} <= said
    released(operator.api, "holder")
    operator.until(lambda: operator.get() is None)
    assert operator.left() == {}
    assert "gpushare" not in operator.cluster.labels()

    assert operator.refusals() == []
    # And one would be seen.
    operator.as_account("get", "secret", "theirs")
    assert operator.refusals() == ["get  secrets default/theirs"]
    assert pod.runs()


def there(api):
    """Whether the DaemonSet exists, and isn't on its way out."""
    status, text = api.ask("GET", DAEMON_SET)
    return status == 200 and "deletionTimestamp" not in json.loads(text)["metadata"]
