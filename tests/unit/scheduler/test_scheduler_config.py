# SPDX-License-Identifier: GPL-3.0-or-later
"""KubeSchedulerConfiguration by version, validated by the real kube-scheduler."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import manifests
import pytest
import real_scheduler
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import config as sc
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.extenders import Extender
from fake_machine import EXTENDER
from ports import free_port

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
MORE_FLAGS = {
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


@pytest.mark.parametrize(
    ("minor", "version"),
    [(19, "v1beta1"), (21, "v1beta1"), (22, "v1beta2"), (23, "v1beta3"), (24, "v1beta3"), (25, "v1"), (40, "v1")],
)
def test_version_of_the_configuration(minor: int, version: str) -> None:
    config = yaml.safe_load(sc.FORM.new(minor, FLAGS, EXTENDER))
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
        ("k8s.gcr.io/kube-scheduler:v1.18.20", None, 18),
    ],
)
def test_minor(image: str, version: str | None, minor: int) -> None:
    assert sc.minor_of(image, version) == minor


@pytest.mark.parametrize(
    ("image", "version", "words"),
    [
        ("kube-scheduler:latest", None, "scheduler_version: the tag of kube-scheduler's image 'kube-scheduler:latest'"),
        ("registry:5000/kube-scheduler", None, "scheduler_version:"),
        ("x:v1.36.3", "newest", "scheduler_version: 'newest' isn't"),
    ],
)
def test_minor_refused(image: str, version: str | None, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        sc.minor_of(image, version)


@pytest.mark.parametrize(
    ("minor", "wanted", "form"),
    [
        *[(14, "auto", "policy"), (18, "auto", "policy"), (18, "policy", "policy"), (19, "auto", "config")],
        *[(19, "policy", "policy"), (19, "config", "config"), (22, "policy", "policy"), (23, "auto", "config")],
    ],
)
def test_policy_or_configuration(minor: int, wanted: str, form: str) -> None:
    assert sc.form_of(minor, wanted) == form


@pytest.mark.parametrize(
    ("minor", "wanted", "words"),
    [
        (23, "policy", r"^scheduler_configuration: kube-scheduler 1\.23 reads no Policy"),
        (17, "config", r"^scheduler_configuration: kube-scheduler 1\.17 takes extenders from a Policy only"),
    ],
)
def test_form_refused(minor: int, wanted: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        sc.form_of(minor, wanted)
    if wanted == "config":
        with pytest.raises(BadInput, match=words):
            sc.FORM.merged("/c", manifests.USERS_CONFIG, minor, EXTENDER)


def test_new_configuration() -> None:
    config = yaml.safe_load(sc.FORM.new(36, FLAGS, EXTENDER))
    assert config == {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": "/etc/kubernetes/scheduler.conf"},
        "leaderElection": {"leaderElect": True},
        "extenders": [ENTRY],
    }


def test_flags_are_repeated_in_the_configuration(tmp_path: Path) -> None:
    text = sc.FORM.new(36, MORE_FLAGS, EXTENDER)
    config = yaml.safe_load(text)
    assert config["clientConnection"] == {"kubeconfig": "/etc/kubernetes/scheduler.conf", "qps": 75.0, "burst": 150}
    times = {"leaseDuration": "30s", "renewDeadline": "20s"}
    assert config["leaderElection"] == {"leaderElect": False, **times, "resourceName": "mine"}
    assert config["enableProfiling"] is False and config["enableContentionProfiling"] is False
    assert real_scheduler.complaint(text, tmp_path) == ""


@pytest.mark.parametrize("name", ["kube-api-burst", "kube-api-qps", "hard-pod-affinity-symmetric-weight"])
def test_invalid_numeric_flag_refused(name: str) -> None:
    with pytest.raises(BadInput, match=rf"^kube-scheduler's --{name}=many isn't a number$"):
        sc.FORM.new(36, {**FLAGS, name: "many"}, EXTENDER)


OLD_FLAGS = {
    **FLAGS,
    "port": "0",
    "scheduler-name": "mine",
    "hard-pod-affinity-symmetric-weight": "7",
    "lock-object-name": "turns",
    "lock-object-namespace": "elsewhere",
}


def test_the_configuration_repeats_flags_up_to_1_22() -> None:
    text = sc.FORM.new(20, OLD_FLAGS, EXTENDER)
    config = yaml.safe_load(text)
    lease = {"resourceName": "turns", "resourceNamespace": "elsewhere"}
    assert config["leaderElection"] == {"leaderElect": True, **lease}
    arguments = [{"name": "InterPodAffinity", "args": {"hardPodAffinityWeight": 7}}]
    assert config["profiles"] == [{"schedulerName": "mine", "pluginConfig": arguments}]
    only = yaml.safe_load(sc.FORM.new(20, {"hard-pod-affinity-symmetric-weight": "7"}, EXTENDER))
    assert only["profiles"][0]["schedulerName"] == "default-scheduler"
    assert "profiles" not in yaml.safe_load(sc.FORM.new(20, FLAGS, EXTENDER))


@pytest.mark.long
def test_the_real_scheduler_reads_repeated_flags(tmp_path: Path) -> None:
    assert real_scheduler.complaint(sc.FORM.new(20, OLD_FLAGS, EXTENDER), tmp_path, "1.20") == ""


@pytest.mark.parametrize(
    ("minor", "flags", "address"),
    [
        (19, {"port": "0"}, "127.0.0.1:10251"),
        (22, {"port": "0", "address": "0.0.0.0"}, "127.0.0.1:10251"),
        (20, {"address": "127.0.0.1"}, "127.0.0.1:10251"),
        (20, {"address": "::1", "port": "10300"}, "[::1]:10300"),
        (20, {}, "0.0.0.0:10251"),
        (23, {"port": "0"}, None),
        (36, {}, None),
    ],
)
def test_insecure_port_follows_the_flags(minor: int, flags: dict[str, str], address: str | None) -> None:
    config = yaml.safe_load(sc.FORM.new(minor, {**FLAGS, **flags}, EXTENDER))
    assert config.get("healthzBindAddress") == config.get("metricsBindAddress") == address


@pytest.mark.long
def test_insecure_port_listens_on_loopback_only(tmp_path: Path) -> None:
    """The real 1.20 can't do without that port when it has a configuration."""
    text = sc.FORM.new(20, {**FLAGS, "port": "0"}, EXTENDER)
    closed = real_scheduler.complaint(text.replace("127.0.0.1:10251", "127.0.0.1:0"), tmp_path, "1.20")
    assert "must be between 1 and 65535" in closed
    port = free_port()
    with real_scheduler.running(text.replace("10251", str(port)), tmp_path, "1.20") as error:
        assert not error
        socket.create_connection(("127.0.0.1", port), 5).close()
        # Every other address of this machine would do for this.
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), 5).close()


@pytest.mark.parametrize(("version", "api", "minor"), real_scheduler.RELEASES)
def test_real_scheduler_reads_new_and_merged_configurations(version: str, api: str, minor: int, tmp_path: Path) -> None:
    good = sc.FORM.new(minor, FLAGS, EXTENDER)
    assert yaml.safe_load(good)["apiVersion"] == f"kubescheduler.config.k8s.io/{api}"
    assert real_scheduler.complaint(good, tmp_path, version) == ""
    assert real_scheduler.complaint(sc.FORM.new(minor, MORE_FLAGS, EXTENDER), tmp_path, version) == ""
    assert "enableHttps" in real_scheduler.complaint(good.replace("enableHTTPS", "enableHttps"), tmp_path, version)
    assert "v1beta3" in real_scheduler.complaint(sc.FORM.new(24, FLAGS, EXTENDER), tmp_path, version)
    ours = manifests.USERS_CONFIG.replace("scheduler.config.k8s.io/v1", f"scheduler.config.k8s.io/{api}")
    if minor < 21:
        ours = ours.replace("{scoringStrategy: {type: MostAllocated}}", "{ignoredResources: [example.com/x]}")
    for text in (ours, as_json(ours)):
        done = sc.FORM.merged("/c", text, minor, EXTENDER)
        assert real_scheduler.complaint(done, tmp_path, version) == ""
        assert sc.FORM.without("/c", done) == text


def as_json(text: str) -> str:
    """Return a text as JSON as an editor writes it, with tabs."""
    tabs = json.dumps(yaml.safe_load(text), indent="\t")
    return tabs.replace('"filterVerb": "filter",', '"filterVerb":"filter",') + "\n"


def test_merge_keeps_every_line_of_the_user(tmp_path: Path) -> None:
    text = sc.FORM.merged("/c", manifests.USERS_CONFIG, 36, EXTENDER)
    lines = iter(text.splitlines())
    assert all(line in lines for line in manifests.USERS_CONFIG.splitlines()), "all of them, in their order"
    config = yaml.safe_load(text)
    assert [extender["urlPrefix"] for extender in config["extenders"]] == ["http://127.0.0.1:9000", ENTRY["urlPrefix"]]
    assert config["extenders"][1] == ENTRY
    assert sc.FORM.merged("/c", text, 36, EXTENDER) == text
    assert sc.FORM.without("/c", text) == manifests.USERS_CONFIG
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


def test_upstream_extender_is_replaced(tmp_path: Path) -> None:
    text = sc.FORM.merged("/c", UPSTREAM, 36, EXTENDER)
    assert "# upstream's" in text and "bindVerb:   bind" in text
    [entry] = yaml.safe_load(text)["extenders"]
    resources = [*ENTRY["managedResources"], {"name": "aliyun.com/gpu-count", "ignoredByScheduler": False}]
    assert entry == {**ENTRY, "managedResources": resources}
    assert real_scheduler.complaint(text, tmp_path) == ""


@pytest.mark.parametrize("write", [str, as_json], ids=["yaml", "json"])
def test_preempt_verb_added_and_removed(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def parsed(text):  # type: ignore[no-untyped-def]
        # A file of kube-scheduler may have tabs where YAML has none.
        return json.loads(text) if text.startswith("{") else yaml.safe_load(text)

    preempting = Extender(EXTENDER.url, 30, preempts=True)
    before = write(UPSTREAM.partition("extenders:")[0])
    quiet = sc.FORM.merged("/c", before, 36, EXTENDER)
    asking = sc.FORM.merged("/c", quiet, 36, preempting)
    assert parsed(asking)["extenders"] == [{**ENTRY, "preemptVerb": "preempt"}]
    assert real_scheduler.complaint(asking, tmp_path) == ""
    assert sc.FORM.merged("/c", asking, 36, preempting) == asking
    assert parsed(sc.FORM.merged("/c", asking, 36, EXTENDER)) == parsed(quiet)
    # It is ours either way, and removed.
    for text in (quiet, asking):
        for wanted in (EXTENDER, preempting):
            assert sc.FORM.has("/c", text, wanted)
            assert parsed(sc.FORM.undone("/c", text, before, wanted)) == parsed(before)
    assert not sc.FORM.has("/c", asking.replace("preempt", "evict"), preempting)


def test_upstream_extender_restored_in_a_changed_json_file() -> None:
    before = as_json(UPSTREAM)
    ours = sc.FORM.merged("/c", before, 36, EXTENDER)
    assert not sc.FORM.has("/c", before, EXTENDER) and not sc.FORM.has("/c", ours, EXTENDER)
    changed = ours.rstrip()[:-1].rstrip() + ',\n\t"parallelism": 4\n}\n'
    assert json.loads(sc.FORM.undone("/c", changed, before, EXTENDER)) == {**yaml.safe_load(UPSTREAM), "parallelism": 4}
    assert sc.FORM.undone("/c", before, before, EXTENDER) == before, "what is there again stays"


@pytest.mark.parametrize("empty", ["[]", "null", "[ ]"])
def test_empty_json_list_is_restored(empty: str) -> None:
    head = '{"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration", "extenders": '
    before = f"{head}{empty}}}\n"
    done = sc.FORM.merged("/c", before, 36, EXTENDER)
    assert sc.FORM.undone("/c", done, before, EXTENDER) == before


@pytest.mark.parametrize("extenders", [', "extenders": []', ', "extenders": null', ""])
@pytest.mark.parametrize("wide", [False, True], ids=["one line", "lines"])
def test_json_list_is_restored_without_a_note(extenders: str, wide: bool) -> None:
    before = f'{{"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration"{extenders}}}\n'
    before = json.dumps(json.loads(before), indent=2) if wide else before
    done = sc.FORM.merged("/c", before, 36, EXTENDER)
    assert sc.FORM.without("/c", done) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.replace("filterVerb: filter", "bindVerb: bind"),
            r"/c has an extender that binds pods already",
        ),
        (lambda t: t.replace("extenders:", "extenderz:"), r"/c, line 11: .* 1\.36 has no field extenderz"),
        (lambda t: t.replace("filterVerb", "filterverb"), r"/c, line 14: .* no field extenders\[0\]\.filterverb"),
        (lambda t: t.replace("leaderElect:", "leader:"), r"no field leaderElection\.leader"),
        (lambda t: t.replace("io/v1", "io/v1beta3"), r"1\.36 doesn't read kubescheduler\.config\.k8s\.io/v1beta3"),
        (lambda t: t.replace("kind: Kube", "kind: Other"), "isn't a KubeSchedulerConfiguration"),
        (lambda t: t + "x: [\n", r"/c, line [0-9]+, can't be parsed"),
        (lambda t: t.split("extenders:")[0] + "extenders: {a: b}\n", "extenders isn't a list"),
        (lambda t: UPSTREAM + UPSTREAM.split("extenders:\n")[1], r"has 2 extenders for aliyun\.com/gpu-mem"),
    ],
)
def test_refused(change, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadInput, match=words):
        sc.FORM.merged("/c", change(manifests.USERS_CONFIG), 36, EXTENDER)


def test_newer_scheduler_allows_unknown_fields() -> None:
    assert "newField" in sc.FORM.merged("/c", manifests.USERS_CONFIG + "newField: 1\n", 38, EXTENDER)
