# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans for kube-scheduler's manifest and files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing as t

import manifests
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import config as sc
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.constants import (
    ANNOTATION,
    CONFIG,
    CONTAINER,
    FOLDER,
    POLICY,
)
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.extenders import Extender
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.plan import (
    ObserveAgain,
    Options,
    make_plan,
)
from fake_machine import ABSENT, EXTENDER, PRESENT
from observations import process, static_pod

KUBEADM = manifests.kubeadm(36)
OLD = manifests.kubeadm(19).replace(":v1.19.3", ":v1.18.9")


class Machine:
    """The files of a machine, which runs with its manifest; ``paths`` are those that a plan asked for."""

    def __init__(self, manifest: str, **files: str) -> None:
        self.files: dict[str, str | None] = {cp.MANIFEST: manifest, **files}
        self.paths: dict[str, str] = {}

    def observed(self, **changes: t.Any) -> dict[str, t.Any]:
        seen = static_pod(self.files[cp.MANIFEST], **self.paths)
        names = {"config": seen["config_path"], "policy": seen["policy_path"], "merged": cp.MERGED}
        names |= {"ours": CONFIG, "ours_policy": POLICY}
        return {**seen, **{name: self.files.get(path) for name, path in names.items()}, **changes}

    def plan(self, options: Options, **changes: t.Any) -> t.Any:
        try:
            return make_plan(options, self.observed(**changes))
        except ObserveAgain as more:
            self.paths.update(more.arguments)
            return make_plan(options, self.observed(**changes))

    def run(self, options: Options, files: int | None = None, **changes: t.Any) -> t.Any:
        """Carry out a plan, or only the first so many of its files."""
        planned = self.plan(options, **changes)
        for row in planned.files[:files]:
            assert self.files.get(row.path) == row.before
            self.files[row.path] = row.after
        return planned

    def left(self) -> dict[str, str]:
        return {path: text for path, text in self.files.items() if text is not None}


@pytest.fixture
def machine() -> Machine:
    return Machine(KUBEADM)


@pytest.mark.parametrize("minor", [19, 23, 31, 34, 36])
def test_kubeadm_manifest_of_each_version(minor: int) -> None:
    manifest = manifests.kubeadm(minor)
    machine = Machine(manifest)
    planned = machine.run(PRESENT)
    assert [row.path for row in planned.files] == [CONFIG, cp.MANIFEST], "the manifest last"
    pod = yaml.safe_load(planned.files[1].after)
    [container] = pod["spec"]["containers"]
    assert f"--config={CONFIG}" in container["command"]
    assert {"mountPath": FOLDER, "name": "kubegpu-share", "readOnly": True} in container["volumeMounts"]
    assert {"name": "kubegpu-share", "hostPath": {"path": FOLDER, "type": "Directory"}} in pod["spec"]["volumes"]
    sha256 = hashlib.sha256(planned.files[0].after.encode()).hexdigest()
    assert pod["metadata"]["annotations"] == {ANNOTATION: sha256}
    assert planned.config == CONFIG
    paths = ("/livez", "/readyz") if minor >= 31 else ("/healthz",)
    assert planned.urls == tuple(f"https://127.0.0.1:10259{path}" for path in paths)

    assert machine.plan(PRESENT).plan.empty
    back = machine.run(ABSENT)
    assert [row.path for row in back.files] == [cp.MANIFEST, CONFIG], "nothing refers to a file that is gone"
    assert machine.left() == {cp.MANIFEST: manifest} and back.config == ""
    assert machine.plan(ABSENT).plan.empty


PLAIN_PROBE = "        host: 127.0.0.1\n        path: /healthz\n        port: 10251\n"


@pytest.mark.parametrize(
    ("probe", "flag", "image", "url"),
    [
        # kubelet asks by HTTP where the probe doesn't name a scheme.
        (PLAIN_PROBE, "--leader-elect=true", "v1.18.9", "http://127.0.0.1:10251/healthz"),
        (
            PLAIN_PROBE.replace("host: 127.0.0.1", "scheme: HTTP"),
            "--address=::1",
            "v1.18.9",
            "http://[::1]:10251/healthz",
        ),
        (None, "--leader-elect=true", "v1.18.9", "https://127.0.0.1:10259/healthz"),
        (None, "--secure-port=0", "v1.18.9", "http://127.0.0.1:10251/healthz"),
        (None, "--port=10300", "v1.11.9", "http://127.0.0.1:10300/healthz"),
    ],
)
def test_health_is_asked_where_kube_scheduler_serves_it(probe: str | None, flag: str, image: str, url: str) -> None:
    pod = yaml.safe_load(manifests.kubeadm(18))
    [container] = pod["spec"]["containers"]
    container["image"] = f"k8s.gcr.io/kube-scheduler:{image}"
    container["command"].append(flag)
    del container["livenessProbe"]
    if probe:
        container["livenessProbe"] = {"httpGet": yaml.safe_load(probe)}
    assert Machine(yaml.safe_dump(pod)).plan(PRESENT).urls == (url,)


@pytest.mark.parametrize("taken", [("kubegpu-share",), ("kubegpu-share", "kubegpu-share-1")])
def test_users_volume_of_our_name_stays(taken: tuple[str, ...]) -> None:
    pod = yaml.safe_load(KUBEADM)
    for name in taken:
        pod["spec"]["volumes"].append({"name": name, "hostPath": {"path": f"/srv/{name}"}})
        pod["spec"]["containers"][0]["volumeMounts"].append({"name": name, "mountPath": f"/srv/{name}"})
    manifest = yaml.safe_dump(pod)
    machine = Machine(manifest)
    options = dataclasses.replace(PRESENT, patches_dir="/p")
    planned = machine.plan(options, patches_dir="/p")
    after = yaml.safe_load(next(row.after for row in planned.files if row.path == cp.MANIFEST))
    for before, now in (
        (pod["spec"]["volumes"], after["spec"]["volumes"]),
        (pod["spec"]["containers"][0]["volumeMounts"], after["spec"]["containers"][0]["volumeMounts"]),
    ):
        assert now[:-1] == before and now[-1]["name"] == f"kubegpu-share-{len(taken)}"
    [patch] = [yaml.safe_load(row.after or "") for row in planned.files if row.path.endswith("strategic.yaml")]
    assert patch["spec"]["volumes"] == after["spec"]["volumes"][-1:]
    machine.run(PRESENT)
    assert machine.plan(PRESENT).plan.empty
    machine.run(ABSENT)
    assert machine.left() == {cp.MANIFEST: manifest}


def test_a_manifest_in_another_style() -> None:
    machine = Machine(manifests.FULL)
    planned = machine.run(PRESENT)
    text = planned.files[1].after
    for comment in ("# our own manifest", "# who", "# flags", "# the kubeconfig", "# end of the volumes"):
        assert comment in text
    container = yaml.safe_load(text)["spec"]["containers"][1]
    assert container["command"] == ["kube-scheduler"] and container["args"][-1] == f"--config={CONFIG}"
    config = yaml.safe_load(planned.files[0].after)
    assert config["enableProfiling"] is False and config["clientConnection"]["qps"] == 75.0
    assert planned.urls == ("https://127.0.0.1:10260/livez", "https://127.0.0.1:10260/readyz")
    assert machine.plan(PRESENT).plan.empty
    machine.run(ABSENT)
    assert machine.left() == {cp.MANIFEST: manifests.FULL}, "to the byte"


@pytest.mark.parametrize("other", [Extender(EXTENDER.url, 10), Extender(EXTENDER.url, 30, preempts=True)])
def test_changed_configuration_restarts_the_scheduler(machine: Machine, other: Extender) -> None:
    machine.run(PRESENT)
    planned = machine.run(Options(True, other))
    assert [row.path for row in planned.files] == [CONFIG, cp.MANIFEST]
    old, new = (yaml.safe_load(text)["metadata"]["annotations"] for text in planned.files[1][1:])
    assert old != new
    # Its removal doesn't depend on the options.
    machine.run(ABSENT)
    assert machine.left() == {cp.MANIFEST: KUBEADM}


def test_partial_edit_is_completed(machine: Machine) -> None:
    """A kubeadm upgrade kept the flag but lost the volume, or a user changed the mount."""
    whole = machine.run(PRESENT).files[1].after
    broken = whole.replace(f"  - hostPath:\n      path: {FOLDER}\n      type: Directory\n    name: kubegpu-share\n", "")
    machine.files[cp.MANIFEST] = broken.replace(f"mountPath: {FOLDER}", "mountPath: /elsewhere")
    assert machine.files[cp.MANIFEST] not in (broken, whole)
    machine.run(PRESENT)
    assert yaml.safe_load(machine.files[cp.MANIFEST] or "") == yaml.safe_load(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"running": []}, "not running with this configuration"),
        ({"running": [process(config="")]}, "not running with this configuration"),
        ({"health": 0}, "not healthy"),
        ({"pending": True}, "an earlier run was interrupted"),
    ],
)
def test_right_files_and_unhealthy_scheduler_need_a_restart(
    machine: Machine, changes: dict[str, t.Any], words: str
) -> None:
    machine.run(PRESENT)
    planned = machine.plan(PRESENT, **changes)
    assert planned.files == ()
    assert [(change.header, change.before) for change in planned.plan.changes] == [(CONTAINER, f"{words}\n")]


@pytest.mark.parametrize("facts", [{"fresh": False}, {"loaded": {CONFIG: "another"}}])
def test_process_that_has_not_loaded_the_configuration_is_replaced(machine: Machine, facts: dict[str, t.Any]) -> None:
    sha256 = hashlib.sha256((machine.run(PRESENT).files[0].after or "").encode()).hexdigest()
    for number in (1, 2):
        planned = machine.run(PRESENT, running=[process(config=CONFIG, **facts)])
        assert [row.path for row in planned.files] == [cp.MANIFEST] and planned.restarts
        assert f"{ANNOTATION}: {sha256}-{number}\n" in (machine.files[cp.MANIFEST] or "")
        assert machine.plan(PRESENT).plan.empty
    twice = [process(config=CONFIG, **facts), process(config=CONFIG)]
    assert machine.plan(PRESENT, running=twice).plan.empty, "the other one ends"
    machine.run(ABSENT)
    assert machine.left() == {cp.MANIFEST: KUBEADM}


def test_absent_plans_nothing_unless_a_run_was_interrupted() -> None:
    assert make_plan(ABSENT, static_pod(None)).plan.empty
    assert make_plan(ABSENT, static_pod(KUBEADM, running=[], health=0)).plan.empty
    assert not make_plan(ABSENT, static_pod(KUBEADM, pending=True)).plan.empty


def with_policy(minor: int) -> str:
    return manifests.mounted(
        manifests.kubeadm(minor), "--policy-config-file=/etc/policy/p.json", "/etc/policy", "/srv/policy"
    )


def with_config(minor: int) -> str:
    """Return a manifest with a configuration, beside which 1.18 ignores its policy's flag."""
    manifest = manifests.kubeadm(minor).replace("    image: ", "    - --policy-config-file=/ignored\n    image: ")
    return manifests.mounted(manifest, "--config=/etc/scheduler/config.yaml", "/etc/scheduler", "/srv/scheduler")


# The user's other extender is spelled as 1.18 reads it: in any case, with nanoseconds.
ALPHA = """\
# ours
apiVersion: kubescheduler.config.k8s.io/v1alpha2
kind: KubeSchedulerConfiguration
bindTimeoutSeconds: 600
disablePreemption: false
profiles:
- schedulerName: default-scheduler
  plugins: {unreserve: {disabled: [{name: "*"}]}}
  pluginConfig: [{name: NodeResourcesMostAllocated, args: {any: 1}}]
extenders:
- URLPrefix: http://127.0.0.1:9000 # the licences'
  FilterVerb: filter
  httpTimeout: 5000000000
"""

USERS_PATH, USERS_POLICY_PATH = "/srv/scheduler/config.yaml", "/srv/policy/p.json"
USERS_POLICY = """\
{
  "kind": "Policy", "apiVersion": "v1",
  "extenders": [
    {"urlPrefix": "http://127.0.0.1:9000", "filterVerb": "filter", "nodeCacheCapable": true}
  ]
}
"""
WITH_COMMENT = {"policy_path": USERS_POLICY_PATH, "policy": USERS_POLICY.replace('"kind"', '"ours": 1, "kind"')}


def flagged(flag: str, manifest: str = KUBEADM) -> str:
    return manifest.replace("--leader-elect=true", flag)


@pytest.mark.parametrize(
    ("manifest", "changes", "words"),
    [
        (
            None,
            {},
            "needs /etc/kubernetes/manifests/kube-scheduler.yaml, and this machine has none; scheduler_mode: ded",
        ),
        (None, {"embedded": "k3s"}, "this machine has none and runs k3s; scheduler_mode: dedicated runs a second"),
        ("a: [\n", {}, "kube-scheduler.yaml, line 2, can't be parsed"),
        (KUBEADM.replace(":v1.36.3", ":main"), {}, "scheduler_version:"),
        (flagged("--policy-configmap=p"), {}, "has --policy-configmap"),
        (KUBEADM, {"link": "/srv/m"}, "kube-scheduler.yaml is a symbolic link to /srv/m; put the file itself"),
        (KUBEADM, {"others": {f"{cp.MANIFEST}.bak": KUBEADM}}, "second kube-scheduler pod, kube-scheduler.yaml.bak"),
        # No day of a calendar: for kubelet a text.
        (KUBEADM, {"others": {"/m/x": KUBEADM + "x: 2026-99-99\n"}}, "second kube-scheduler pod, x"),
        (
            KUBEADM,
            {"version": "1.36.3", "running": [process(config="", version="1.35.6")]},
            r"half upgraded: .* asks for kube-scheduler 1.36 and 1.35 is running; finish the upgrade",
        ),
        (f"{KUBEADM}# caf\ufffd\n", {}, "kube-scheduler.yaml isn't in UTF-8"),
        (
            flagged("--config=/nowhere/c"),
            {},
            r"--config=/nowhere/c isn't in a folder .*mount one .* or scheduler_mode: dedicated",
        ),
        (manifests.WITH_CONFIG, {"config_path": USERS_PATH}, "config.yaml, which .* doesn't exist"),
        (
            manifests.WITH_CONFIG,
            {
                "config_path": USERS_PATH,
                "config": manifests.USERS_CONFIG.replace("filterVerb: filter", "bindVerb: bind"),
            },
            "binds pods already .*; scheduler_mode: dedicated runs a second scheduler",
        ),
        (with_policy(19), WITH_COMMENT, r"kube-scheduler 1\.19 has no field ours"),
        # The message suggests what is possible in this version.
        (
            flagged("--config=/c", OLD.replace("v1.18.9", "v1.17.9")),
            {},
            r"1\.17 has --config=/c, .* a policy file .* combined; 1\.18 is the first .*; scheduler_mode: dedicated",
        ),
        (flagged("--config=/c", OLD), "policy", r"1\.18 has --config=/c, .* set scheduler_configuration: config$"),
        (
            with_config(18),
            {"config_path": USERS_PATH, "config": ALPHA.replace("v1alpha2", "v1alpha1")},
            "v1alpha1 has no extenders; convert it to v1alpha2, or scheduler_mode: dedicated",
        ),
        (
            with_config(18),
            {"config_path": USERS_PATH, "config": f"{ALPHA}hardPodAffinitySymmetricWeight: 3\n"},
            r"1\.18 has no field hard",
        ),
        (flagged("--policy-config-file=/p"), {}, r"has --policy-config-file=/p, with .* combined; 1\.23 has removed"),
        (flagged("--config=/c", manifests.kubeadm(20)), "policy", r"combined; set scheduler_configuration: config$"),
    ],
)
def test_refused(manifest: str | None, changes: dict[str, t.Any] | str, words: str) -> None:
    configuration, changes = (changes, {}) if isinstance(changes, str) else ("auto", changes)
    with pytest.raises(BadInput, match=words):
        make_plan(dataclasses.replace(PRESENT, configuration=configuration), static_pod(manifest, **changes))


@pytest.mark.parametrize("configuration", ["auto", "config"])
def test_users_v1alpha2_configuration_gets_the_extender(configuration: str) -> None:
    machine = Machine(with_config(18), **{USERS_PATH: ALPHA})
    options = dataclasses.replace(PRESENT, configuration=configuration)
    before = machine.left()
    assert machine.run(options).config == "/etc/scheduler/config.yaml"
    text = machine.files[USERS_PATH]
    assert text is not None and text.startswith(ALPHA)
    ours = yaml.safe_load(text)["extenders"][1]
    assert ours["urlPrefix"] == EXTENDER.url and ours["enableHttps"] is False
    assert ours["httpTimeout"] == EXTENDER.timeout_seconds * 10**9
    assert machine.plan(options).plan.empty
    machine.files[USERS_PATH] = text.replace("600", "300")
    machine.run(ABSENT)
    assert machine.left() == {**before, USERS_PATH: ALPHA.replace("600", "300")}


@pytest.mark.parametrize(
    ("image", "program"),
    [
        ("registry.k8s.io/kube-scheduler:v1.36.3", "x"),
        ("k8s.gcr.io/kube-scheduler-amd64:v1.36.3", "x"),
        ("x", "/kube-scheduler"),
    ],
)
def test_container_of_another_name(image: str, program: str) -> None:
    """As Typhoon, bootkube and manifests written by hand may have it."""
    manifest = KUBEADM.replace("    name: kube-scheduler\n", "    name: scheduler\n")
    manifest = manifest.replace("    - kube-scheduler\n", f"    - {program}\n")
    manifest = manifest.replace("registry.k8s.io/kube-scheduler:v1.36.3", image)
    machine = Machine(manifest)
    options = dataclasses.replace(PRESENT, version="1.36.3")
    machine.run(options)
    [container] = yaml.safe_load(machine.files[cp.MANIFEST] or "")["spec"]["containers"]
    assert f"--config={CONFIG}" in container["command"]
    machine.run(ABSENT)
    assert machine.left() == {cp.MANIFEST: manifest}


def test_half_upgraded_control_plane_refused() -> None:
    near, far = (
        dataclasses.replace(PRESENT, versions=versions) for versions in (("v1.36.1", "v1.36.3"), ("1.35.4", "1.36.3"))
    )
    machine = Machine(KUBEADM)
    assert machine.plan(near).files
    with pytest.raises(BadInput, match=r"half upgraded: its kube-schedulers are 1.35 to 1.36"):
        machine.plan(far)
    machine.run(PRESENT)
    assert machine.plan(far).plan.empty, "there is nothing to change"


def test_similar_files_are_no_second_scheduler() -> None:
    others = {
        "/etc/kubernetes/manifests/a.yaml": "kind: ConfigMap\nmetadata: {name: kube-scheduler}\n",
        "/etc/kubernetes/manifests/b.yaml": "name: kube-scheduler\n  broken: [\n",
        "/etc/kubernetes/manifests/c.yaml": "kind: Pod\nspec: {containers: [{name: kube-scheduler-x}]}\n",
    }
    assert make_plan(PRESENT, static_pod(KUBEADM, others=others)).files


@pytest.mark.parametrize(
    "text",
    [
        "name: kube-scheduler\nx: " + "[" * 60_000,
        "kind: Pod\nspec: [name: kube-scheduler]",
        "kind: Pod\nmetadata: 'name: kube-scheduler'",
        "kind: Pod\nspec: {containers: 7}",
    ],
    ids=["deep", "list", "text", "number"],
)
def test_files_that_are_no_pods_are_no_second_scheduler(text):
    assert make_plan(PRESENT, static_pod(KUBEADM, others={f"{cp.MANIFEST}.bak": text})).files


# --------------------------------------------------------------------------- Policy


@pytest.mark.parametrize(
    ("manifest", "form"),
    [(OLD, "policy"), (manifests.kubeadm(22), "config"), (manifests.kubeadm(23), "config")],
)
def test_policy_or_configuration_by_version(manifest: str, form: str) -> None:
    planned = make_plan(PRESENT, static_pod(manifest))
    path, flag = (POLICY, "policy-config-file") if form == "policy" else (CONFIG, "config")
    assert [row.path for row in planned.files] == [path, cp.MANIFEST]
    [container] = yaml.safe_load(planned.files[1].after or "")["spec"]["containers"]
    assert container["command"][-1] == f"--{flag}={path}"
    assert (planned.config, planned.policy) == ((CONFIG, "") if form == "config" else ("", POLICY))


@pytest.mark.parametrize(("minor", "configuration"), [(17, "auto"), (20, "auto"), (22, "policy")])
def test_users_policy_is_merged(minor: int, configuration: str) -> None:
    options = dataclasses.replace(PRESENT, configuration=configuration)
    machine = Machine(with_policy(minor), **{USERS_POLICY_PATH: USERS_POLICY})
    before = machine.left()
    planned = machine.run(options)
    assert machine.paths == {"policy_path": USERS_POLICY_PATH}
    assert [row.path for row in planned.files] == [cp.MERGED, USERS_POLICY_PATH, cp.MANIFEST]
    policy = json.loads(planned.files[1].after or "")
    assert [extender["urlPrefix"] for extender in policy["extenders"]] == ["http://127.0.0.1:9000", EXTENDER.url]
    assert policy["extenders"][1]["httpTimeout"] == 30_000_000_000
    assert (planned.config, planned.policy) == ("", "/etc/policy/p.json")
    assert machine.plan(options).plan.empty
    machine.run(ABSENT)
    assert machine.left() == before


def test_policy_removed_after_upgrade() -> None:
    machine = Machine(manifests.kubeadm(22))
    machine.run(dataclasses.replace(PRESENT, configuration="policy"))
    machine.files[cp.MANIFEST] = manifests.kubeadm(23)
    machine.run(PRESENT)
    assert set(machine.left()) == {CONFIG, cp.MANIFEST}


def test_configuration_replaced_by_the_users() -> None:
    """Ours was there; then the user gave kube-scheduler another one, manually, beside our folder."""
    machine = Machine(KUBEADM, **{USERS_PATH: manifests.USERS_CONFIG})
    mixed = (machine.run(PRESENT).files[1].after or "").replace(f"    - --config={CONFIG}\n", "")
    theirs = ("--config=/etc/scheduler/config.yaml", "/etc/scheduler", "/srv/scheduler")
    machine.files[cp.MANIFEST] = manifests.mounted(mixed, *theirs)
    planned = machine.run(PRESENT)
    assert [row.path for row in planned.files] == [cp.MERGED, USERS_PATH, cp.MANIFEST, CONFIG]
    assert set(machine.left()) == {cp.MERGED, USERS_PATH, cp.MANIFEST}


KUBESPRAYS = "/etc/kubernetes/kubescheduler-config.yaml"


def test_kubesprays_file_is_handed_over_to_kubespray() -> None:
    machine = Machine(
        manifests.mounted(KUBEADM, f"--config={KUBESPRAYS}", KUBESPRAYS, KUBESPRAYS),
        **{KUBESPRAYS: manifests.USERS_CONFIG},
    )
    [warning] = machine.run(PRESENT).warnings
    assert warning.startswith(f"{KUBESPRAYS} is kubespray's, and its next cluster.yml writes it without the extender")
    variable = yaml.safe_load(warning[warning.index("kube_scheduler_extenders:") :])
    assert variable == {"kube_scheduler_extenders": [EXTENDER.entry()]}
    # cluster.yml writes it in its own layout.
    theirs = {**yaml.safe_load(manifests.USERS_CONFIG), "extenders": variable["kube_scheduler_extenders"]}
    machine.files[KUBESPRAYS] = yaml.safe_dump(theirs)
    again = machine.run(PRESENT)
    assert KUBESPRAYS not in [row.path for row in again.files] and again.warnings == ()
    assert machine.plan(PRESENT).plan.empty
    [warning] = machine.run(ABSENT).warnings
    assert "remove the extender from kube_scheduler_extenders in its inventory too" in warning
    assert machine.plan(ABSENT).warnings == ()


# --------------------------------------------------------------------------- the note of the user's file


UPSTREAMS = """\
  - urlPrefix: "http://127.0.0.1:32766/gpushare-scheduler" # upstream's
    filterVerb: filter
    bindVerb:   bind
    nodeCacheCapable: true
    weight: 3
    prioritizeVerb: prioritize
    managedResources:
      - name: aliyun.com/gpu-mem
        ignoredByScheduler: true
      - name: aliyun.com/gpu-count
"""
WITH_UPSTREAM = manifests.USERS_CONFIG.replace("leaderElection:", f"{UPSTREAMS}leaderElection:")
EMPTY_LIST = json.dumps(
    {"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration", "extenders": []}
)


def users(config: str = manifests.USERS_CONFIG, manifest: str = manifests.WITH_CONFIG) -> Machine:
    """Return a machine whose kube-scheduler has a configuration of the user's own."""
    return Machine(manifest, **{USERS_PATH: config})


@pytest.mark.parametrize("config", [manifests.USERS_CONFIG, WITH_UPSTREAM, EMPTY_LIST], ids=["own", "upstream", "[]"])
@pytest.mark.parametrize("minor_change", [False, True], ids=["", "changed"])
def test_users_file_is_restored(config: str, minor_change: bool) -> None:
    machine = users(config)
    before = machine.left()
    planned = machine.run(PRESENT)
    assert machine.paths == {"config_path": USERS_PATH} and planned.config == "/etc/scheduler/config.yaml"
    paths = [cp.MERGED, USERS_PATH, cp.MANIFEST]
    assert [row.path for row in planned.files] == paths, "the note before what it is about"
    assert FOLDER not in planned.files[2].after and ANNOTATION in planned.files[2].after
    assert machine.plan(PRESENT).plan.empty
    if minor_change:
        machine.run(Options(True, Extender(EXTENDER.url, 10)))
    assert machine.run(ABSENT).files[-1].path == cp.MERGED, "and after it"
    assert machine.left() == before and machine.plan(ABSENT).plan.empty


def test_later_changes_of_the_user_are_kept() -> None:
    machine = users(WITH_UPSTREAM)
    machine.run(PRESENT)
    more = "percentageOfNodesToScore: 50\n"
    machine.files[USERS_PATH] = (machine.files[USERS_PATH] or "") + more
    machine.run(PRESENT)
    machine.run(ABSENT)
    text = machine.files[USERS_PATH] or ""
    assert yaml.safe_load(text) == yaml.safe_load(WITH_UPSTREAM + more)
    assert "# upstream's" in text and "bindVerb:   bind" in text


def test_failing_removal_does_not_block_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: t.Any) -> str:
        raise BadInput("is written in a way that can't be edited safely")

    machine = users()
    machine.run(PRESENT)
    machine.files[USERS_PATH] = (machine.files[USERS_PATH] or "").replace(
        "http://127.0.0.1:9000", "http://127.0.0.1:9001"
    )
    with monkeypatch.context() as patch:
        patch.setattr(sc.FORM, "undone", refused)
        machine.run(PRESENT)
        assert machine.plan(PRESENT).plan.empty
        with pytest.raises(BadInput, match="can't be edited safely"):
            machine.plan(ABSENT)
    machine.run(ABSENT)
    assert machine.files[USERS_PATH] == manifests.USERS_CONFIG.replace("127.0.0.1:9000", "127.0.0.1:9001")


@pytest.mark.parametrize("notes", [True, False], ids=["noted", "without the note"])
def test_recreated_manifest_keeps_our_entry_known(notes: bool) -> None:
    machine = users()
    machine.run(PRESENT)
    machine.files[cp.MANIFEST] = manifests.WITH_CONFIG
    if not notes:
        del machine.files[cp.MERGED]
    planned = machine.run(ABSENT)
    assert machine.files[USERS_PATH] == manifests.USERS_CONFIG and machine.files.get(cp.MERGED) is None
    assert planned.restarts, "the scheduler that runs has read the old one"
    assert machine.plan(ABSENT).plan.empty, "once is enough"
    machine.run(PRESENT)
    machine.run(ABSENT)
    assert machine.left() == {cp.MANIFEST: manifests.WITH_CONFIG, USERS_PATH: manifests.USERS_CONFIG}


def test_users_file_cleaned_after_its_flag_is_gone() -> None:
    machine = users()
    machine.run(PRESENT)
    machine.files[cp.MANIFEST] = KUBEADM
    machine.run(PRESENT)
    assert machine.files[CONFIG] and machine.files[cp.MERGED]
    machine.run(ABSENT)
    assert machine.left() == {cp.MANIFEST: KUBEADM, USERS_PATH: manifests.USERS_CONFIG}


@pytest.mark.parametrize("options", [PRESENT, ABSENT], ids=["present", "absent"])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_interrupted_run_loses_nothing(options: Options, done: int) -> None:
    machine = users(WITH_UPSTREAM)
    before = machine.left()
    if options is ABSENT:
        machine.run(PRESENT)
    machine.run(options, done)
    machine.run(PRESENT)
    machine.run(ABSENT)
    assert machine.left() == before


def test_foreign_extender_in_an_untouched_file_is_kept() -> None:
    same_url = manifests.USERS_CONFIG.replace("http://127.0.0.1:9000", EXTENDER.url)
    mapped = manifests.WITH_CONFIG.replace("  - hostPath:\n      path: /srv/scheduler\n", "  - configMap: {name: x}\n")
    assert mapped != manifests.WITH_CONFIG
    for config in (WITH_UPSTREAM, same_url, "a: [\n"):
        for manifest in (manifests.WITH_CONFIG, mapped, "a: [\n"):
            assert users(config, manifest).plan(ABSENT).plan.empty


def test_invalid_note_is_ignored() -> None:
    for text in ("", "{", "[]", '{"path": 1}', '{"x": ""}'):
        assert sc.read(text) is None


# --------------------------------------------------------------------------- lease


ELECTION = "leaderElection: {%s}\n"


@pytest.mark.parametrize(
    ("text", "flags", "minor", "lease"),
    [
        (None, {}, 36, ("kube-system", "kube-scheduler")),
        (None, {"leader-elect": "false"}, 36, None),
        (None, {"leader-elect": ""}, 36, ("kube-system", "kube-scheduler")),
        (None, {"leader-elect-resource-name": "mine"}, 20, ("kube-system", "mine")),
        (None, {"lock-object-name": "mine", "lock-object-namespace": "ours"}, 20, ("ours", "mine")),
        (None, {"leader-elect-resource-lock": "endpoints"}, 19, None),
        ("kind: x\n", {}, 36, ("kube-system", "kube-scheduler")),
        (ELECTION % "leaderElect: false", {}, 36, None),
        (ELECTION % "leaderElect: false", {"leader-elect": "true"}, 36, ("kube-system", "kube-scheduler")),
        (ELECTION % "leaderElect: false", {"leader-elect": "true"}, 22, None),
        (ELECTION % "resourceName: a, resourceNamespace: b", {"leader-elect": "true"}, 36, ("b", "a")),
    ],
)
def test_lease_by_configuration_and_flags(
    text: str | None, flags: dict[str, str], minor: int, lease: tuple[str, str] | None
) -> None:
    assert sc.lease_of(text, flags, minor) == lease


def test_lease_of_the_users_configuration() -> None:
    planned = users(manifests.USERS_CONFIG.replace("{leaderElect: true}", "{resourceName: mine}")).plan(PRESENT)
    assert planned.lease == ("kube-system", "mine") and planned.lease_certain
    assert Machine(KUBEADM).plan(PRESENT).lease == ("kube-system", "kube-scheduler")
