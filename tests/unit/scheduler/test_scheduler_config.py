# SPDX-License-Identifier: GPL-3.0-or-later
"""KubeSchedulerConfiguration by version, judged by the real kube-scheduler where it can be."""

from __future__ import annotations

import json
from pathlib import Path

import manifests
import pytest
import real_scheduler
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as sc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXTENDER = sc.Extender("http://127.0.0.1:12345/gpushare-scheduler", 30)
ENTRY = {
    "urlPrefix": "http://127.0.0.1:12345/gpushare-scheduler",
    "filterVerb": "filter",
    "bindVerb": "bind",
    "enableHTTPS": False,
    "httpTimeout": "30s",
    "nodeCacheCapable": True,
    "ignorable": False,
    "managedResources": [{"name": "aliyun.com/gpu-mem", "ignoredByScheduler": False}],
}
FLAGS = {"kubeconfig": "/etc/kubernetes/scheduler.conf", "leader-elect": "true", "bind-address": "127.0.0.1"}


@pytest.mark.parametrize(
    ("minor", "version"),
    [
        *[(19, "v1beta1"), (20, "v1beta1"), (21, "v1beta1"), (22, "v1beta2"), (23, "v1beta3"), (24, "v1beta3")],
        *[(25, "v1"), (27, "v1"), (28, "v1"), (29, "v1"), (36, "v1"), (40, "v1")],
    ],
)
def test_version_of_the_configuration(minor: int, version: str) -> None:
    config = yaml.safe_load(sc.new_config(minor, FLAGS, EXTENDER))
    assert config["apiVersion"] == f"kubescheduler.config.k8s.io/{version}"
    assert version in sc.api_versions(minor)[1]


@pytest.mark.parametrize(
    ("image", "version", "minor"),
    [
        ("registry.k8s.io/kube-scheduler:v1.36.3", None, 36),
        ("registry.example:5000/a/kube-scheduler:v1.28.2-eks-1", None, 28),
        ("k8s.gcr.io/kube-scheduler:v1.20.15@sha256:00", None, 20),
        ("whatever:latest", "1.31.0", 31),
        ("registry.k8s.io/kube-scheduler:v1.36.3", "v1.19", 19),
    ],
)
def test_minor(image: str, version: str | None, minor: int) -> None:
    assert sc.minor_of(image, version) == minor


@pytest.mark.parametrize(
    ("image", "version", "words"),
    [
        ("kube-scheduler:latest", None, "scheduler_version: .*can't be told from its image 'kube-scheduler:latest'"),
        ("registry:5000/kube-scheduler", None, "scheduler_version:"),
        ("x:v1.36.3", "newest", "scheduler_version: 'newest' isn't"),
        ("x:v1.18.20", None, r"1\.18 takes extenders from a Policy file only"),
    ],
)
def test_minor_refused(image: str, version: str | None, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        sc.minor_of(image, version)


def test_new_configuration() -> None:
    config = yaml.safe_load(sc.new_config(36, FLAGS, EXTENDER))
    assert config == {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": "/etc/kubernetes/scheduler.conf"},
        "leaderElection": {"leaderElect": True},
        "extenders": [ENTRY],
    }


def test_what_flags_said_is_repeated(tmp_path: Path) -> None:
    flags = {
        **FLAGS,
        "leader-elect": "false",
        "leader-elect-lease-duration": "30s",
        "leader-elect-renew-deadline": "20s",
        "leader-elect-resource-name": "mine",
        "kube-api-qps": "75",
        "kube-api-burst": "150",
        "profiling": "false",
        "contention-profiling": "false",
        "v": "2",
    }
    text = sc.new_config(36, flags, EXTENDER)
    config = yaml.safe_load(text)
    assert config["clientConnection"] == {"kubeconfig": "/etc/kubernetes/scheduler.conf", "qps": 75.0, "burst": 150}
    assert config["leaderElection"] == {
        "leaderElect": False,
        "leaseDuration": "30s",
        "renewDeadline": "20s",
        "resourceName": "mine",
    }
    assert config["enableProfiling"] is False and config["enableContentionProfiling"] is False
    assert real_scheduler.complaint(text, tmp_path) == ""


def test_the_real_scheduler_judges(tmp_path: Path) -> None:
    good = sc.new_config(36, FLAGS, EXTENDER)
    assert real_scheduler.complaint(good, tmp_path) == ""
    assert "strict decoding" in real_scheduler.complaint(good.replace("enableHTTPS", "enableHttps"), tmp_path)
    assert "is registered" in real_scheduler.complaint(sc.new_config(24, FLAGS, EXTENDER), tmp_path)


def test_merged_into_a_users_file_keeps_every_line(tmp_path: Path) -> None:
    text = sc.merged("/c", manifests.USERS_CONFIG, 36, EXTENDER)
    lines = iter(text.splitlines())
    assert all(line in lines for line in manifests.USERS_CONFIG.splitlines()), "all of them, in their order"
    config = yaml.safe_load(text)
    assert [one["urlPrefix"] for one in config["extenders"]] == ["http://127.0.0.1:9000", ENTRY["urlPrefix"]]
    assert config["extenders"][1] == ENTRY
    assert sc.merged("/c", text, 36, EXTENDER) == text
    assert sc.without("/c", text) == manifests.USERS_CONFIG
    assert real_scheduler.complaint(text, tmp_path) == ""


UPSTREAM = """\
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
extenders:
- urlPrefix: "http://127.0.0.1:32766/gpushare-scheduler" # upstream's
  filterVerb: filter
  prioritizeVerb: prioritize
  weight: 3
  bindVerb:   bind
  enableHTTPS: false
  nodeCacheCapable: true
  managedResources:
  - name: aliyun.com/gpu-mem
    ignoredByScheduler: true
  - name: aliyun.com/gpu-count
    ignoredByScheduler: false
  ignorable: true
"""


def test_upstreams_extender_becomes_ours(tmp_path: Path) -> None:
    text = sc.merged("/c", UPSTREAM, 36, EXTENDER)
    # ruamel.yaml writes one blank behind a colon.
    assert "# upstream's" in text and "bindVerb: bind" in text
    [entry] = yaml.safe_load(text)["extenders"]
    resources = [*ENTRY["managedResources"], {"name": "aliyun.com/gpu-count", "ignoredByScheduler": False}]
    assert entry == {**ENTRY, "managedResources": resources}
    assert real_scheduler.complaint(text, tmp_path) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.replace("filterVerb: filter", "bindVerb: bind"), r"/c has an extender that binds pods already"),
        (lambda t: t.replace("extenders:", "extenderz:"), "/c: kube-scheduler knows no field extenderz"),
        (lambda t: t.replace("filterVerb", "filterverb"), r"knows no field extenders\[0\]\.filterverb"),
        (lambda t: t.replace("leaderElect:", "leader:"), r"no field leaderElection\.leader"),
        (lambda t: t.replace("io/v1", "io/v1beta3"), r"1\.36 doesn't read kubescheduler\.config\.k8s\.io/v1beta3"),
        (lambda t: t.replace("kind: Kube", "kind: Other"), "isn't a KubeSchedulerConfiguration"),
        (lambda t: t + "x: [\n", r"/c, line [0-9]+, can't be parsed"),
        (lambda t: t.split("extenders:")[0] + "extenders: {a: b}\n", "extenders isn't a list"),
        (lambda t: t + "podMaxBackoff: 3\n", "no field podMaxBackoff"),
    ],
)
def test_refused(change, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadInput, match=words):
        sc.merged("/c", change(manifests.USERS_CONFIG), 36, EXTENDER)


def test_two_for_one_resource_are_refused() -> None:
    item = UPSTREAM.split("extenders:\n")[1]
    with pytest.raises(BadInput, match=r"has 2 extenders for aliyun\.com/gpu-mem"):
        sc.merged("/c", UPSTREAM + item, 36, EXTENDER)


def test_a_newer_scheduler_may_know_more_fields() -> None:
    assert "newField" in sc.merged("/c", manifests.USERS_CONFIG + "newField: 1\n", 37, EXTENDER)


EXTENDERS = st.lists(
    st.fixed_dictionaries(
        {"urlPrefix": st.sampled_from(["http://a", "http://b"]), "filterVerb": st.just("f")},
        optional={
            "httpTimeout": st.just("5s"),
            "ignorable": st.booleans(),
            "managedResources": st.just([{"name": "example.com/x"}]),
        },
    ),
    max_size=2,
    unique_by=lambda one: one["urlPrefix"],
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    extenders=EXTENDERS,
    more=st.fixed_dictionaries(
        {},
        optional={
            "parallelism": st.integers(1, 32),
            "profiles": st.just([{"schedulerName": "x"}]),
            "podMaxBackoffSeconds": st.just(20),
            "percentageOfNodesToScore": st.just(50),
        },
    ),
    flow=st.sampled_from([False, None, True]),
    comment=st.sampled_from(["", "# mine\n"]),
    judged=st.integers(0, 9),
)
def test_any_users_configuration(  # type: ignore[no-untyped-def]
    extenders, more, flow, comment, judged, tmp_path: Path
) -> None:
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": "/etc/kubernetes/scheduler.conf"},
        **more,
        **({"extenders": extenders} if extenders else {}),
    }
    text = comment + yaml.safe_dump(config, sort_keys=False, default_flow_style=flow, width=1000)
    if flow:
        # kube-scheduler takes whatever begins with a brace for JSON.
        text = json.dumps(config, indent=2 if comment else None)
    done = sc.merged("/c", text, 36, EXTENDER)
    assert yaml.safe_load(done) == {**config, "extenders": [*extenders, ENTRY]}
    assert sc.merged("/c", done, 36, EXTENDER) == done
    assert sc.without("/c", done) == text
    if judged == 0 and real_scheduler.binary():
        names = [one for entry in extenders for one in entry.get("managedResources", [])]
        said = real_scheduler.complaint(done, tmp_path)
        assert said == "" or (len(names) > 1 and "duplicate" in said)
