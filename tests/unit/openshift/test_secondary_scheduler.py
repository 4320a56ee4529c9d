# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler beside OpenShift's own: OLM and the Secondary Scheduler Operator, played on a real API server."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.filter.secondary_scheduler import secondary_scheduler
from ansible_collections.kubegpu.share.plugins.module_utils import _openshift_client as client
from ansible_collections.kubegpu.share.plugins.module_utils import _secondary_scheduler as subject
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting
from ansible_collections.kubegpu.share.plugins.plugin_utils import _extender_certificates, _secondary_config
from definitions import definitions
from played_operator import PlayedOperator, conditions
from real_apiserver import MERGE, Refused

SPACE = subject.NAMESPACE
CORE = f"/api/v1/namespaces/{SPACE}"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{SPACE}/deployments"
CR = f"/apis/operator.openshift.io/v1/namespaces/{SPACE}/secondaryschedulers/cluster"
OLM = "/apis/operators.coreos.com"
DEFINITION = "secondaryschedulers.operator.openshift.io"
CONFIG = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
IMAGE = "registry.k8s.io/scheduler-plugins/kube-scheduler:v0.33.5"


class Played:
    """OLM, the operator and kubelet in one: the Deployment of the object that there is, and how far it comes.

    :param bad: configurations (their ConfigMaps' names) with which pods never get ready.
    """

    def __init__(self, server, installs=True, bad=()):
        self.server, self.installs, self.bad = server, installs, list(bad)
        self.generation = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _get(self, path):
        status, _text = self.server.ask("GET", path)
        return self.server.request("GET", path) if status == 200 else None

    def _follow(self):
        while not self._end.wait(0.02):
            with contextlib.suppress(Refused):
                self._olm()
                self._operator()

    def _olm(self):
        for one in self.server.request("GET", f"{OLM}/v1alpha1/namespaces/{SPACE}/subscriptions")["items"]:
            if not self.installs:
                broken = conditions(ResolutionFailed=(True, "no operators found in package"))
                del broken[0]["message"]
                broken[0]["message"] = "no operators found in package openshift-secondary-scheduler-operator"
                status = {"status": {"lastUpdated": "2026-11-21T12:00:00Z", "conditions": broken}}
                path = f"{OLM}/v1alpha1/namespaces/{SPACE}/subscriptions/{one['metadata']['name']}/status"
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
        container = {"name": "secondary-scheduler", "image": spec["schedulerImage"], "command": ["/bin/kube-scheduler"]}
        volume = {"name": "etckubernetes", "configMap": {"name": spec["schedulerConfig"]}}
        labels = {"app": "secondary-scheduler"}
        notes = {"secondaryschedulers.operator.openshift.io/cluster": str(self.generation)}
        pod = {
            "metadata": {"labels": labels, "annotations": notes},
            "spec": {"containers": [container], "volumes": [volume]},
        }
        wish = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}
        metadata = {"name": "secondary-scheduler", "namespace": SPACE, "labels": labels}
        self.server.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": wish})
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
    """A cluster of 4.20 without the operator."""
    PlayedOperator(openshift, "4.20.3")
    openshift.ask("DELETE", CR)
    for path in (f"{DEPLOYMENTS}", f"{CORE}/configmaps", f"{CORE}/pods?gracePeriodSeconds=0"):
        openshift.ask("DELETE", path)
    openshift.ask("DELETE", f"{CORE}/secrets")
    for kind in ("v1/namespaces/{}/operatorgroups", "v1alpha1/namespaces/{}/subscriptions"):
        openshift.ask("DELETE", f"{OLM}/{kind.format(SPACE)}")
    openshift.kubectl("delete", "crd", DEFINITION, "--ignore-not-found", "--timeout=30s")
    # Nobody finishes a namespace's removal here, so that each test finds it made by somebody else.
    openshift.ask("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    module = SimpleNamespace(
        params={**dict.fromkeys(subject.ARGUMENTS), "kubeconfig": str(openshift.kubeconfig)},
        tmpdir=str(openshift.folder),
        no_log_values=set(),
    )
    return client.DynamicKube.of_module(module)


def params(config=CONFIG, **more):
    defaults = {name: spec.get("default") for name, spec in subject.ARGUMENTS.items()}
    return {**defaults, "config": config, "image": IMAGE, **more}


def run(api, config=CONFIG, check=False, timeout=25.0, **more):
    return subject.work(api, params(config, **more), check, Waiting(timeout=timeout, pause=0.05))


def name_of(config):
    return subject.Wish(params(config)).name


def maps(server):
    found = server.request("GET", f"{CORE}/configmaps")["items"]
    return {one["metadata"]["name"]: one["data"][subject.KEY] for one in found}


OTHER = CONFIG + "parallelism: 8\n"


def test_it_comes_stays_changes_and_goes(api, openshift):
    with Played(openshift):
        before = run(api, check=True)
        assert before["changed"] and maps(openshift) == {}
        done = run(api)
        assert done["diff"] == before["diff"]
        assert [one["before_header"].split()[0] for one in done["diff"]] == [
            "OperatorGroup",
            "Subscription",
            "ConfigMap",
            "SecondaryScheduler",
        ]
        live = openshift.request("GET", CR)
        assert live["spec"]["schedulerConfig"] == name_of(CONFIG) and live["spec"]["schedulerImage"] == IMAGE
        assert subject.BEFORE not in live["metadata"].get("annotations", {})
        assert not run(api)["changed"]
        assert run(api, OTHER, topology="HighlyAvailable")["changed"]
        assert maps(openshift) == {name_of(OTHER): OTHER}
        assert openshift.request("GET", CR)["spec"]["topology"]["mode"] == "HighlyAvailable"
        assert run(api, state="absent")["changed"]
        assert maps(openshift) == {} and openshift.ask("GET", CR)[0] == 404
        assert openshift.request("GET", f"{OLM}/v1alpha1/namespaces/{SPACE}/subscriptions")["items"] == []
        assert not run(api, state="absent")["changed"]


def test_a_configuration_that_crashes_is_put_back_in_the_pods_words(api, openshift):
    with Played(openshift, bad=[name_of(OTHER)]):
        run(api)
        with pytest.raises(NotInEffect) as failure:
            run(api, OTHER, timeout=4.0)
        assert "CrashLoopBackOff" in str(failure.value)
        assert f"has the configuration {name_of(CONFIG)} again and is healthy" in str(failure.value)
        assert openshift.request("GET", CR)["spec"]["schedulerConfig"] == name_of(CONFIG)
        assert maps(openshift) == {name_of(CONFIG): CONFIG}
        assert not run(api)["changed"]


def test_the_first_one_that_crashes_is_taken_away_again(api, openshift):
    with Played(openshift, bad=[name_of(CONFIG)]):
        with pytest.raises(NotInEffect, match=r"CrashLoopBackOff.*taken away again"):
            run(api, timeout=4.0)
        assert openshift.ask("GET", CR)[0] == 404 and maps(openshift) == {}


def test_an_operator_that_olm_cant_bring_is_told_in_olms_words(api, openshift):
    words = r"OLM doesn't bring .* ResolutionFailed: no operators found in package"
    with Played(openshift, installs=False), pytest.raises(NotInEffect, match=words):
        run(api, timeout=2.0)


def test_a_run_that_was_killed_before_the_proof_is_proven_or_put_back_by_the_next(api, openshift):
    class Killed(BaseException):
        pass

    class Dies(Waiting):
        pass

    def die(_seconds):
        if openshift.ask("GET", CR)[0] == 200:
            raise Killed

    with Played(openshift, bad=[name_of(OTHER)]):
        run(api)
        with pytest.raises(Killed):
            subject.work(api, params(OTHER), False, Dies(timeout=20, pause=0.05, sleep=die))
        assert openshift.request("GET", CR)["spec"]["schedulerConfig"] == name_of(OTHER)
        with pytest.raises(NotInEffect, match="again and is healthy"):
            run(api, OTHER, timeout=4.0)
        assert openshift.request("GET", CR)["spec"]["schedulerConfig"] == name_of(CONFIG)


def finished(server):
    """What the namespace controller does when a namespace that is to go is empty."""
    path = f"/api/v1/namespaces/{SPACE}"
    live = server.request("GET", path)
    assert live["metadata"].get("deletionTimestamp"), "it was to go"
    server.request("PUT", f"{path}/finalize", {**live, "spec": {"finalizers": []}})
    assert server.ask("GET", path)[0] == 404


def test_the_namespace_that_we_made_goes_though_it_takes_its_time(api, openshift):
    openshift.request("DELETE", f"/api/v1/namespaces/{SPACE}")
    finished(openshift)
    with Played(openshift):
        assert run(api)["changed"]
        assert openshift.request("GET", f"/api/v1/namespaces/{SPACE}")["metadata"]["annotations"]
        gone = run(api, state="absent")
        assert gone["changed"] and gone["kept"] == []
        assert "Namespace" in gone["diff"][-1]["before_header"]
        # Nobody has finished it yet.
        assert not run(api, state="absent")["changed"]
        with pytest.raises(ShareError, match=r"Namespace .* is being deleted; run again when it is gone"):
            run(api)
        finished(openshift)


def test_the_namespace_that_we_made_stays_for_what_others_have_in_it(api, openshift):
    openshift.request("DELETE", f"/api/v1/namespaces/{SPACE}")
    finished(openshift)
    with Played(openshift):
        run(api)
        theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "theirs", "namespace": SPACE}}
        openshift.apply(theirs)
        lock = {"control-plane.alpha.kubernetes.io/leader": "{}"}
        openshift.request(
            "POST", f"{CORE}/configmaps", {"metadata": {"name": "the-operators-lock", "annotations": lock}}
        )
        gone = run(api, state="absent")
        assert gone["changed"] and gone["kept"] == ["Secret theirs"]
        assert openshift.ask("GET", f"{CORE}/secrets/theirs")[0] == 200
        assert not openshift.request("GET", f"/api/v1/namespaces/{SPACE}")["metadata"].get("deletionTimestamp")
        again = run(api, state="absent")
        assert not again["changed"] and again["kept"] == ["Secret theirs"]
        openshift.request("DELETE", f"{CORE}/secrets/theirs")
        assert run(api, state="absent")["changed"]
        finished(openshift)


def test_what_is_somebody_elses_stays(api, openshift):
    openshift.install(definitions() / f"{DEFINITION}.yaml")
    group = {"metadata": {"name": "theirs"}, "spec": {"targetNamespaces": [SPACE]}}
    kind = {"apiVersion": "operators.coreos.com/v1", "kind": "OperatorGroup"}
    openshift.request("POST", f"{OLM}/v1/namespaces/{SPACE}/operatorgroups", {**kind, **group})
    with Played(openshift):
        run(api)
        run(api, state="absent")
        groups = openshift.request("GET", f"{OLM}/v1/namespaces/{SPACE}/operatorgroups")["items"]
        assert [one["metadata"]["name"] for one in groups] == ["theirs"]
    wish = {"apiVersion": "operator.openshift.io/v1", "kind": "SecondaryScheduler"}
    spec = {"schedulerConfig": "theirs", "schedulerImage": "i"}
    openshift.apply({**wish, "metadata": {"name": "cluster", "namespace": SPACE}, "spec": spec})
    with pytest.raises(BadInput, match=r"somebody else's configuration .theirs."):
        run(api)
    assert not run(api, state="absent")["changed"]
    openshift.request("DELETE", CR)
    path = f"{OLM}/v1/namespaces/{SPACE}/operatorgroups/theirs"
    openshift.request("PATCH", path, {"spec": {"targetNamespaces": ["default"]}}, MERGE)
    with pytest.raises(BadInput, match=r"OperatorGroup theirs .* watches other namespaces"):
        run(api)


def test_before_4_10_it_is_refused(openshift, api):
    PlayedOperator(openshift, "4.9.40")
    with pytest.raises(BadInput, match=r"OpenShift 4.9.40 has no Secondary Scheduler Operator"):
        run(api)


# --------------------------------------------------------------------------- image and configuration


NOW = datetime.datetime.now(datetime.UTC)
TLS = _extender_certificates.fitting([], ["gpushare-extender.gpushare-system.svc"], NOW)["client"]


def wish(**given):
    extender = "gpushare-extender.gpushare-system"
    return {
        "state": "present",
        "name": "gpushare-scheduler",
        "image": "",
        "version": "",
        "extender": extender,
        "timeout": 30,
        "preemption": True,
        "tls": TLS,
        **given,
    }


@pytest.mark.parametrize(
    ("release", "tag", "minor"),
    [("4.20.3", "v0.33.5", 33), ("4.21.0", "v0.34.7", 34), ("4.22.1", "v0.34.7", 34), ("4.19.9", "v0.32.7", 32)],
)
def test_the_image_goes_with_the_release(release, tag, minor):
    found = _secondary_config.plan(release, wish())
    assert (found["image"], found["minor"]) == (f"{_secondary_config.REPOSITORY}:{tag}", minor)
    assert found["policy_api"] == "admissionregistration.k8s.io/v1"
    config = yaml.safe_load(found["config"])
    assert config["leaderElection"] == {"leaderElect": False}
    (extender,) = config["extenders"]
    assert extender["urlPrefix"] == "https://gpushare-extender.gpushare-system.svc:12345/gpushare-scheduler"
    assert (extender["enableHTTPS"], extender["preemptVerb"]) == (True, "preempt")
    told = {name: base64.b64decode(text).decode() for name, text in extender["tlsConfig"].items()}
    assert told == {"caData": TLS["authority"], "certData": TLS["certificate"], "keyData": TLS["key"]}


def test_nobody_reads_the_key_in_a_difference(api):
    config = _secondary_config.plan("4.20.0", wish())["config"]
    other = _secondary_config.plan("4.20.0", wish(preemption=False))["config"]
    key = base64.b64encode(TLS["key"].encode()).decode()
    assert key in config
    seen = subject.observe(api)
    seen["maps"] = {name_of(other): other}
    shown = json.dumps(subject.make_plan(subject.Wish(params(config)), seen).diff())
    assert key not in shown and shown.count("keyData: (hidden)") == 2


@pytest.mark.parametrize(
    ("release", "policy"),
    [("4.10.0", ""), ("4.16.9", ""), ("4.17.0", "v1"), ("4.20.3", "v1"), ("4.99.0", "v1"), ("5.0.1", "v1")],
)
def test_what_goes_is_only_named(release, policy):
    """Neither image nor name nor release that have become wrong since it came may keep the admission policy."""
    for given in ({}, {"image": "example.org/s:v1.11.0"}, {"image": "example.org/s@sha256:ab"}, {"name": "Ours"}):
        found = secondary_scheduler(release, wish(**given, state="absent"))
        assert found["problem"] == "" and found["image"] == found["config"] == ""
        assert found["policy_api"] == (policy and f"admissionregistration.k8s.io/{policy}")


def test_a_major_version_that_nobody_knows_yet_has_what_the_newest_has():
    found = secondary_scheduler("5.1.0", wish(image="example.org/s:v1.36.0"))
    assert (found["problem"], found["policy_api"]) == ("", "admissionregistration.k8s.io/v1")
    assert secondary_scheduler("5.1.0", wish())["problem"] == (
        "scheduler_openshift_image: no image is known for OpenShift 5.1.0; name one with /bin/kube-scheduler of its "
        "version of Kubernetes or the one before"
    )


@pytest.mark.parametrize(
    ("release", "given", "words"),
    [
        ("4.23.0", {}, "scheduler_openshift_image: no image is known for OpenShift 4.23.0 (Kubernetes 1.36)"),
        ("4.20.0", {"image": "example.org/s:v1.36.3"}, "kube-scheduler 1.36 doesn't go with Kubernetes 1.33 here"),
        ("4.20.0", {"image": "example.org/s@sha256:ab"}, "scheduler_version: kube-scheduler's version can't be told"),
        ("4.20.0", {"name": "default-scheduler"}, "scheduler_name: 'default-scheduler' can't be"),
        ("4.20.0", {"name": "Ours"}, "scheduler_name: 'Ours' can't be"),
    ],
)
def test_what_doesnt_go_together_is_refused(release, given, words):
    with pytest.raises(BadInput) as failure:
        _secondary_config.plan(release, wish(**given))
    assert words in str(failure.value)


def test_the_real_kube_scheduler_reads_the_configuration(openshift, tmp_path):
    """As a pod would: with an address of the API server, here by a kubeconfig, and until it schedules."""
    found = _secondary_config.plan("4.22.0", wish(image="example.org/scheduler:v1.35.0"))
    config = yaml.safe_load(found["config"])
    config["clientConnection"] = {"kubeconfig": str(openshift.kubeconfig)}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [openshift.programs["kube-scheduler"], f"--config={file}", "--secure-port=0", "--v=2"],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"]},
        )
    try:
        end = time.monotonic() + 30
        while "Starting Kubernetes Scheduler" not in log.read_text() and process.poll() is None:
            assert time.monotonic() < end, log.read_text()[-500:]
            time.sleep(0.1)
        assert process.poll() is None, log.read_text()[-800:]
    finally:
        process.kill()
        process.wait()
