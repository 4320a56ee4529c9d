# SPDX-License-Identifier: GPL-3.0-or-later
"""The secondary scheduler of OpenShift: OLM and the Secondary Scheduler Operator, simulated on a real API server."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.filter.scheduler import dedicated_scheduler
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import scheduler
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import secondary as subject
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.scheduler import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import certificates, dedicated
from definitions import definitions
from memory_kube import Killed
from played_operator import PlayedOperator, conditions
from real_apiserver import MERGE, Refused
from simulation import Simulation, module_of

SPACE = subject.NAMESPACE
CORE = f"/api/v1/namespaces/{SPACE}"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{SPACE}/deployments"
CR = f"/apis/operator.openshift.io/v1/namespaces/{SPACE}/secondaryschedulers/cluster"
GROUPS = f"/apis/operators.coreos.com/v1/namespaces/{SPACE}/operatorgroups"
SUBSCRIPTIONS = f"/apis/operators.coreos.com/v1alpha1/namespaces/{SPACE}/subscriptions"
DEFINITION = "secondaryschedulers.operator.openshift.io"
CONFIG = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
# What the real operator did, by test_real_secondary_scheduler.py.
RECORDED = yaml.safe_load((Path(__file__).parent / "recorded/secondary_scheduler_1_6.yml").read_text())
IMAGE = "registry.k8s.io/scheduler-plugins/kube-scheduler:v0.33.5"


class Played(Simulation):
    """A simulation of OLM, the operator and kubelet.

    :param bad: configurations (their ConfigMaps' names) with which pods never get ready.
    """

    def __init__(self, server, installs=True, bad=()):
        super().__init__()
        self.server, self.installs, self.bad = server, installs, list(bad)
        self.generation = None

    def _get(self, path):
        status, _text = self.server.ask("GET", path)
        return self.server.request("GET", path) if status == 200 else None

    def _step(self):
        with contextlib.suppress(Refused):
            self._olm()
            self._operator()

    def _olm(self):
        for item in self.server.request("GET", SUBSCRIPTIONS)["items"]:
            if not self.installs:
                broken = conditions(ResolutionFailed=(True, f"no operators found in package {SPACE}"))
                status = {"status": {"lastUpdated": "2026-11-21T12:00:00Z", "conditions": broken}}
                path = f"{SUBSCRIPTIONS}/{item['metadata']['name']}/status"
                self.server.request("PATCH", path, status, MERGE)
            elif self._get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{DEFINITION}") is None:
                self.server.install(definitions() / f"{DEFINITION}.yaml")

    def _operator(self):
        live = self._get(CR)
        if live is None:
            if self.generation is not None:
                self.server.request("DELETE", f"{DEPLOYMENTS}/secondary-scheduler")
                self.generation = None
            return
        if live["metadata"]["generation"] == self.generation:
            return
        self.generation = live["metadata"]["generation"]
        spec = live["spec"]
        made = RECORDED["deployment"]
        container = {"name": "secondary-scheduler", "image": spec["schedulerImage"]}
        container |= {"command": made["command"], "args": made["args"]}
        volumes = [
            {**volume, "configMap": {"name": spec["schedulerConfig"]}} if "configMap" in volume else volume
            for volume in made["volumes"]
        ]
        labels = {"app": "secondary-scheduler"}
        metadata = {"labels": labels, "annotations": {"generation": str(self.generation)}}
        pod = {"metadata": metadata, "spec": {"containers": [container], "volumes": volumes}}
        options = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}
        metadata = {"name": "secondary-scheduler", "namespace": SPACE, "labels": labels}
        self.server.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": options})
        time.sleep(0.1)
        generation = self._get(f"{DEPLOYMENTS}/secondary-scheduler")["metadata"]["generation"]
        fine = spec["schedulerConfig"] not in self.bad
        count = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": int(fine), "availableReplicas": int(fine)}
        status = {"status": {"observedGeneration": generation, **count}}
        self.server.request("PATCH", f"{DEPLOYMENTS}/secondary-scheduler/status", status, MERGE)
        self._pod(labels, fine)

    def _pod(self, labels, fine):
        self.server.ask("DELETE", f"{CORE}/pods/scheduler?gracePeriodSeconds=0")
        spec = {"nodeName": "worker-1", "containers": [{"name": "secondary-scheduler", "image": "i"}]}
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "secondary-scheduler-1", "uid": "1"}
        metadata = {"name": "scheduler", "labels": labels, "ownerReferences": [owner]}
        self.server.request("POST", f"{CORE}/pods", {"metadata": metadata, "spec": spec})
        if not fine:
            waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
            state = {"name": "secondary-scheduler", "image": "i", "imageID": "", "ready": False, "restartCount": 3}
            status = {"phase": "Running", "containerStatuses": [{**state, "state": {"waiting": waiting}}]}
            self.server.request("PATCH", f"{CORE}/pods/scheduler/status", {"status": status}, MERGE)


@pytest.fixture
def api(openshift):
    """A cluster of 4.20 without the operator; its definition may be there, as OLM leaves it."""
    PlayedOperator(openshift, "4.20.3")
    for path in (
        *(CR, DEPLOYMENTS, f"{CORE}/configmaps", f"{CORE}/pods?gracePeriodSeconds=0", f"{CORE}/secrets"),
        *(GROUPS, SUBSCRIPTIONS),
    ):
        openshift.ask("DELETE", path)
    # No controller completes a namespace's removal, so it exists before each test.
    openshift.ask("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    return scheduler.DynamicKube.of_module(module_of(openshift, ARGUMENTS))


@pytest.fixture
def not_installed(openshift):
    """OLM hasn't installed the operator's definition. (To publish a definition costs an API server most.)"""
    openshift.kubectl("delete", "crd", DEFINITION, "--ignore-not-found", "--timeout=30s")


def params(config=CONFIG, **more):
    defaults = {name: spec.get("default") for name, spec in ARGUMENTS.items()}
    return {**defaults, "method": "secondary", "config": config, "image": IMAGE, **more}


def run(api, config=CONFIG, check=False, timeout=25.0, **more):
    return subject.work(api, params(config, **more), check, Waiting(timeout=timeout, pause=0.05))


def name_of(config):
    return subject.Options(params(config)).name


def maps(server):
    found = server.request("GET", f"{CORE}/configmaps")["items"]
    return {one["metadata"]["name"]: one["data"][subject.KEY] for one in found}


OTHER = CONFIG + "parallelism: 8\n"


def test_install_change_and_remove(api, openshift, not_installed):
    with Played(openshift):
        before = run(api, check=True)
        assert before["changed"] and maps(openshift) == {}
        done = run(api)
        assert done["diff"] == before["diff"]
        kinds = ["OperatorGroup", "Subscription", "ConfigMap", "SecondaryScheduler"]
        assert [one["before_header"].split()[0] for one in done["diff"]] == kinds
        live = openshift.request("GET", CR)
        assert live["spec"]["schedulerConfig"] == name_of(CONFIG) and live["spec"]["schedulerImage"] == IMAGE
        assert subject.BEFORE not in live["metadata"].get("annotations", {})
        assert not run(api)["changed"]
        assert run(api, OTHER, topology="HighlyAvailable")["changed"]
        assert maps(openshift) == {name_of(OTHER): OTHER}
        assert openshift.request("GET", CR)["spec"]["topology"]["mode"] == "HighlyAvailable"
        assert run(api, state="absent")["changed"]
        assert maps(openshift) == {} and openshift.ask("GET", CR)[0] == 404
        assert openshift.request("GET", SUBSCRIPTIONS)["items"] == []
        assert not run(api, state="absent")["changed"]


def test_crashing_configuration_rolls_back_with_the_pods_message(api, openshift):
    with Played(openshift, bad=[name_of(OTHER)]):
        run(api)
        with pytest.raises(NotInEffect) as failure:
            run(api, OTHER, timeout=4.0)
        assert "CrashLoopBackOff" in str(failure.value)
        assert f"rolled back to the configuration {name_of(CONFIG)}, with which it is healthy" in str(failure.value)
        assert openshift.request("GET", CR)["spec"]["schedulerConfig"] == name_of(CONFIG)
        assert maps(openshift) == {name_of(CONFIG): CONFIG}
        assert not run(api)["changed"]


def test_crashing_first_configuration_is_removed(api, openshift):
    with Played(openshift, bad=[name_of(CONFIG)]):
        with pytest.raises(NotInEffect, match=r"CrashLoopBackOff.*rolled back: it was removed again"):
            run(api, timeout=4.0)
        assert openshift.ask("GET", CR)[0] == 404 and maps(openshift) == {}


def test_olm_failure_reported_with_its_message(api, openshift, not_installed):
    message = r"OLM doesn't install .* ResolutionFailed: no operators found in package"
    with Played(openshift, installs=False), pytest.raises(NotInEffect, match=message):
        run(api, timeout=2.0)


def test_killed_run_is_verified_by_the_next(api, openshift):
    def die(_seconds):
        if openshift.ask("GET", CR)[0] == 200:
            raise Killed

    with Played(openshift, bad=[name_of(OTHER)]):
        run(api)
        with pytest.raises(Killed):
            subject.work(api, params(OTHER), False, Waiting(timeout=20, pause=0.05, sleep=die))
        assert openshift.request("GET", CR)["spec"]["schedulerConfig"] == name_of(OTHER)
        with pytest.raises(NotInEffect, match="with which it is healthy"):
            run(api, OTHER, timeout=4.0)
        assert openshift.request("GET", CR)["spec"]["schedulerConfig"] == name_of(CONFIG)


def finished(server):
    """Complete a namespace's removal, as the namespace controller does once it is empty."""
    path = f"/api/v1/namespaces/{SPACE}"
    live = server.request("GET", path)
    assert live["metadata"].get("deletionTimestamp"), "it is not being deleted"
    server.request("PUT", f"{path}/finalize", {**live, "spec": {"finalizers": []}})
    assert server.ask("GET", path)[0] == 404


def without_namespace(server):
    server.request("DELETE", f"/api/v1/namespaces/{SPACE}")
    finished(server)


def test_created_namespace_removed_and_terminating_one_refused(api, openshift):
    without_namespace(openshift)
    with Played(openshift):
        assert run(api)["changed"]
        assert openshift.request("GET", f"/api/v1/namespaces/{SPACE}")["metadata"]["annotations"]
        gone = run(api, state="absent")
        assert gone["changed"] and gone["kept"] == []
        assert "Namespace" in gone["diff"][-1]["before_header"]
        # No controller has completed it yet.
        assert not run(api, state="absent")["changed"]
        with pytest.raises(ShareError, match=r"Namespace .* is being deleted; run again when it is gone"):
            run(api)
        finished(openshift)


def test_created_namespace_kept_for_foreign_objects(api, openshift):
    without_namespace(openshift)
    with Played(openshift):
        run(api)
        theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "theirs", "namespace": SPACE}}
        openshift.apply(theirs)
        lock = {"control-plane.alpha.kubernetes.io/leader": "{}"}
        body = {"metadata": {"name": "the-operators-lock", "annotations": lock}}
        openshift.request("POST", f"{CORE}/configmaps", body)
        for changed in (True, False):
            gone = run(api, state="absent")
            assert (gone["changed"], gone["kept"]) == (changed, ["Secret theirs"])
        assert openshift.ask("GET", f"{CORE}/secrets/theirs")[0] == 200
        assert not openshift.request("GET", f"/api/v1/namespaces/{SPACE}")["metadata"].get("deletionTimestamp")
        openshift.request("DELETE", f"{CORE}/secrets/theirs")
        assert run(api, state="absent")["changed"]
        finished(openshift)


def test_foreign_operator_group_and_configuration(api, openshift):
    openshift.install(definitions() / f"{DEFINITION}.yaml")
    group = {"metadata": {"name": "theirs"}, "spec": {"targetNamespaces": [SPACE]}}
    kind = {"apiVersion": "operators.coreos.com/v1", "kind": "OperatorGroup"}
    openshift.request("POST", GROUPS, {**kind, **group})
    with Played(openshift):
        run(api)
        run(api, state="absent")
        groups = openshift.request("GET", GROUPS)["items"]
        assert [one["metadata"]["name"] for one in groups] == ["theirs"]
    options = {"apiVersion": "operator.openshift.io/v1", "kind": "SecondaryScheduler"}
    spec = {"schedulerConfig": "theirs", "schedulerImage": "i"}
    openshift.apply({**options, "metadata": {"name": "cluster", "namespace": SPACE}, "spec": spec})
    with pytest.raises(BadInput, match=r"a configuration that isn't ours .theirs."):
        run(api)
    assert not run(api, state="absent")["changed"]
    openshift.request("DELETE", CR)
    path = f"{GROUPS}/theirs"
    openshift.request("PATCH", path, {"spec": {"targetNamespaces": ["default"]}}, MERGE)
    with pytest.raises(BadInput, match=r"OperatorGroup theirs .* watches other namespaces"):
        run(api)


def test_releases_before_4_10_refused(openshift, api):
    PlayedOperator(openshift, "4.9.40")
    with pytest.raises(BadInput, match=r"OpenShift 4.9.40 has no Secondary Scheduler Operator"):
        run(api)


# --------------------------------------------------------------------------- image and configuration


NOW = datetime.datetime.now(datetime.UTC)
TLS = certificates.fitting([], ["gpushare-extender.gpushare-system.svc"], NOW)["client"]


def options(**given):
    common = {"mode": "openshift", "state": "present", "name": "gpushare-scheduler", "image": "", "version": ""}
    extender = {"extender": "gpushare-extender.gpushare-system", "timeout": 30, "preemption": True, "tls": TLS}
    return {**common, **extender, **given}


@pytest.mark.parametrize(
    ("release", "tag", "minor"),
    [("4.20.3", "v0.33.5", 33), ("4.21.0", "v0.34.7", 34), ("4.22.1", "v0.34.7", 34), ("4.19.9", "v0.32.7", 32)],
)
def test_image_by_release(release, tag, minor):
    found = dedicated.plan({"version": release, "nodes": []}, options())
    assert (found["image"], found["minor"]) == (f"{dedicated.REPOSITORY}:{tag}", minor)
    assert found["policy_api"] == "admissionregistration.k8s.io/v1"
    config = yaml.safe_load(found["config"])
    assert config["leaderElection"] == {"leaderElect": False}
    (extender,) = config["extenders"]
    assert extender["urlPrefix"] == "https://gpushare-extender.gpushare-system.svc:12345/gpushare-scheduler"
    assert (extender["enableHTTPS"], extender["preemptVerb"]) == (True, "preempt")
    decoded = {name: base64.b64decode(text).decode() for name, text in extender["tlsConfig"].items()}
    assert decoded == {"caData": TLS["authority"], "certData": TLS["certificate"], "keyData": TLS["key"]}


def test_diff_hides_the_private_key(api):
    config = dedicated.plan({"version": "4.20.0", "nodes": []}, options())["config"]
    other = dedicated.plan({"version": "4.20.0", "nodes": []}, options(preemption=False))["config"]
    key = base64.b64encode(TLS["key"].encode()).decode()
    assert key in config
    seen = dataclasses.replace(subject.observe(api), maps={name_of(other): other})
    shown = json.dumps(subject.make_plan(subject.Options(params(config)), seen).diff())
    assert key not in shown and shown.count("keyData: (hidden)") == 2


@pytest.mark.parametrize(
    ("release", "policy"),
    [("4.10.0", ""), ("4.16.9", ""), ("4.17.0", "v1"), ("4.20.3", "v1"), ("4.99.0", "v1"), ("5.0.1", "v1")],
)
def test_removal_ignores_invalid_options(release, policy):
    """An image, name or release that became invalid must not keep the admission policy."""
    for given in ({}, {"image": "example.org/s:v1.11.0"}, {"image": "example.org/s@sha256:ab"}, {"name": "Ours"}):
        found = dedicated_scheduler({"version": release, "nodes": []}, options(**given, state="absent"))
        assert found["problem"] == "" and found["image"] == found["config"] == ""
        assert found["policy_api"] == (policy and f"admissionregistration.k8s.io/{policy}")


def test_unknown_major_version():
    found = dedicated_scheduler({"version": "5.1.0", "nodes": []}, options(image="example.org/s:v1.36.0"))
    assert (found["problem"], found["policy_api"]) == ("", "admissionregistration.k8s.io/v1")
    assert dedicated_scheduler({"version": "5.1.0", "nodes": []}, options())["problem"] == (
        "scheduler_openshift_image: no image is known for OpenShift 5.1.0; set one with /bin/kube-scheduler of its "
        "version of Kubernetes or the one before"
    )


@pytest.mark.parametrize(
    ("release", "given", "message"),
    [
        ("4.23.0", {}, "scheduler_openshift_image: no image is known for OpenShift 4.23.0 (Kubernetes 1.36)"),
        ("4.20.0", {"image": "example.org/s:v1.36.3"}, "kube-scheduler 1.36 doesn't work with an API server 1.33"),
        ("4.20.0", {"image": "example.org/s@sha256:ab"}, "scheduler_version: 'example.org/s@sha256:ab' has no version"),
        ("4.20.0", {"name": "default-scheduler"}, "scheduler_name: default-scheduler is the name"),
        ("4.20.0", {"name": "Ours"}, "scheduler_name: 'Ours' isn't"),
    ],
)
def test_incompatible_options_refused(release, given, message):
    with pytest.raises(BadInput) as failure:
        dedicated.plan({"version": release, "nodes": []}, options(**given))
    assert message in str(failure.value)


def test_real_scheduler_reads_the_configuration(openshift, tmp_path):
    """Start it with a kubeconfig and the operator's arguments, and wait until it schedules."""
    found = dedicated.plan({"version": "4.22.0", "nodes": []}, options(image="example.org/scheduler:v1.35.0"))
    config = yaml.safe_load(found["config"])
    config["clientConnection"] = {"kubeconfig": str(openshift.kubeconfig)}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    log = tmp_path / "log"
    openshift.ask("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    # Its certificate is a Service's. The operator turns the election of a leader on, which the configuration has off.
    arguments = [
        argument for argument in RECORDED["deployment"]["args"] if not argument.startswith(("--config", "--tls-"))
    ]
    assert "--leader-elect=true" in arguments
    command = [openshift.programs["kube-scheduler"], f"--config={file}", "--secure-port=0", *arguments]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env={"PATH": os.environ["PATH"]})
    try:
        end = time.monotonic() + 30
        while "Successfully acquired lease" not in log.read_text() and process.poll() is None:
            assert time.monotonic() < end, log.read_text()[-500:]
            time.sleep(0.1)
        assert process.poll() is None and "Starting Kubernetes Scheduler" in log.read_text(), log.read_text()[-800:]
    finally:
        process.kill()
        process.wait()
