# SPDX-License-Identifier: GPL-3.0-or-later
"""The role's scheduler with OpenShift's real Secondary Scheduler Operator, where a variable names its checkout.

OLM is played; see real_operators.py. With KUBEGPU_SECONDARY_SCHEDULER_RECORD=<file> what the operator did is written
to that file; recorded/secondary_scheduler_1_6.yml was made so.
"""

from __future__ import annotations

import datetime
import os
import time
import typing as t
from pathlib import Path

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import scheduler
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import secondary as subject
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.scheduler import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import certificates, dedicated
from definitions import OLD, definitions
from played_operator import PlayedOperator
from ports import free_port
from real_apiserver import own_api_server
from real_operators import Nodes, anything, checkout, controller_manager, running
from simulation import module_of
from test_secondary_scheduler import CR, DEPLOYMENTS, IMAGE, Played, options

MOST = float(os.environ.get("KUBEGPU_GPU_OPERATOR_SECONDS") or 120)
PROGRAM = "secondary-scheduler-operator"


class Olm(Played):
    """OLM alone; it installs the operator's definition."""

    def _operator(self) -> None:
        pass


def test_install_change_and_remove() -> None:
    folder = checkout("KUBEGPU_SECONDARY_SCHEDULER_OPERATOR", PROGRAM)
    with own_api_server() as server:
        server.install(*sorted(path for path in definitions().glob("*.yaml") if path.name != OLD))
        needed = [
            anything("apiservers", "APIServer", "config.openshift.io", namespaced=False),
            anything("infrastructures", "Infrastructure", "config.openshift.io", namespaced=False),
            anything("servicemonitors", "ServiceMonitor", "monitoring.coreos.com"),
        ]
        extra = server.folder / "extra.yaml"
        extra.write_text(yaml.safe_dump_all(needed))
        server.install(extra)
        topology = {"controlPlaneTopology": "HighlyAvailable", "infrastructureTopology": "HighlyAvailable"}
        for kind, more in (("APIServer", {}), ("Infrastructure", {"status": topology})):
            body = {"apiVersion": "config.openshift.io/v1", "kind": kind, "metadata": {"name": "cluster"}, **more}
            server.request("POST", f"/apis/config.openshift.io/v1/{kind.lower()}s", body)
        for name in ("openshift-config", subject.NAMESPACE):
            server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        PlayedOperator(server, "4.20.3")
        api = scheduler.DynamicKube.of_module(module_of(server, ARGUMENTS))
        defaults = {name: spec.get("default") for name, spec in ARGUMENTS.items()}

        def run(config: str = "", **more: t.Any) -> dict[str, t.Any]:
            params = {**defaults, "method": "secondary", "config": config, "image": IMAGE, **more}
            return subject.work(api, params, False, Waiting(timeout=MOST, pause=0.5))

        tls = certificates.fitting([], ["gpushare-extender.gpushare-system.svc"], datetime.datetime.now(datetime.UTC))
        first, second = (
            dedicated.plan({"version": "4.20.0", "nodes": []}, options(tls=tls["client"], preemption=one))["config"]
            for one in (True, False)
        )
        flags = (
            "operator",
            f"--kubeconfig={server.kubeconfig}",
            f"--namespace={subject.NAMESPACE}",
            f"--listen=127.0.0.1:{free_port()}",
        )
        given = {"OPERATOR_NAME": PROGRAM, "WATCH_NAMESPACE": subject.NAMESPACE, "POD_NAME": "operator"}
        with (
            controller_manager(server),
            Nodes(server, ("worker-1",), "cri-o://1.36.3"),
            Olm(server),
            running(server, str(folder / PROGRAM), *flags, **given) as operator,
        ):
            took = {}

            def timed(name: str, *arguments: str, **more: t.Any) -> dict[str, t.Any]:
                start = time.monotonic()
                try:
                    done = run(*arguments, **more)
                except ShareError:
                    print(operator.log.read_text(errors="replace")[-6000:])
                    raise
                took[name] = {"changed": done["changed"], "seconds": round(time.monotonic() - start, 1)}
                assert not operator.ended(), operator.log.read_text(errors="replace")[-2000:]
                return done

            time.sleep(5)
            assert not operator.ended(), operator.log.read_text(errors="replace")[-2000:]
            assert timed("first", first)["changed"]
            live = server.request("GET", f"{DEPLOYMENTS}/secondary-scheduler")
            spec = live["spec"]["template"]["spec"]
            resource = server.request("GET", CR)
            assert not timed("again", first)["changed"]
            assert timed("another configuration", second)["changed"]
            volumes = server.request("GET", f"{DEPLOYMENTS}/secondary-scheduler")["spec"]["template"]["spec"]["volumes"]
            named = [volume["configMap"]["name"] for volume in volumes if volume.get("configMap")]
            assert named == [subject.Options({**defaults, "config": second, "image": IMAGE}).name]
            assert timed("absent", state="absent")["changed"]
            assert server.ask("GET", CR)[0] == 404
            # The garbage collector removes what the operator owned; the operator doesn't make it again.
            end = time.monotonic() + MOST
            while server.ask("GET", f"{DEPLOYMENTS}/secondary-scheduler")[0] != 404:
                assert time.monotonic() < end
                time.sleep(0.5)
            assert not timed("absent again", state="absent")["changed"]
    target = os.environ.get("KUBEGPU_SECONDARY_SCHEDULER_RECORD")
    if target:
        (container,) = spec["containers"]
        note = {
            "component": "Secondary Scheduler Operator of OpenShift",
            "version": os.environ.get("KUBEGPU_SECONDARY_SCHEDULER_VERSION", ""),
            "recorded": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "by": "tests/unit/openshift/test_real_secondary_scheduler.py",
            "beside": "real kube-apiserver and Deployment controller of 1.36.3; OLM and kubelet are played",
            "deployment": {
                "command": container.get("command"),
                "args": container.get("args"),
                "replicas": live["spec"].get("replicas"),
                "strategy": (live["spec"].get("strategy") or {}).get("type"),
                "volumes": spec["volumes"],
                "mounts": [volume_mount["mountPath"] for volume_mount in container.get("volumeMounts") or []],
                "owners": [
                    owner_reference["kind"] for owner_reference in live["metadata"].get("ownerReferences") or []
                ],
                "annotations": sorted(live["metadata"].get("annotations") or {}),
                "template_annotations": sorted(live["spec"]["template"]["metadata"].get("annotations") or {}),
            },
            "finalizers": resource["metadata"].get("finalizers") or [],
            "conditions": [
                f"{condition['type']}={condition['status']}"
                for condition in (resource.get("status") or {}).get("conditions") or []
            ],
            "runs": took,
        }
        Path(target).write_text("---\n" + yaml.safe_dump(note, sort_keys=False, width=110))
