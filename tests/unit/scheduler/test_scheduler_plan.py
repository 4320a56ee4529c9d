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
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.constants import (
    ANNOTATION,
    CONFIG,
    CONTAINER,
    FOLDER,
    POLICY,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler import config as sc
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler import merged_file
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler.form import Extender
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler.plan import (
    ObserveAgain,
    Options,
    lease_of,
    make_plan,
)
from observations import process, static_pod

EXTENDER = Extender("http://127.0.0.1:12345/gpushare-scheduler", 30)
PRESENT = Options(present=True, extender=EXTENDER)
ABSENT = Options(present=False, extender=EXTENDER)


def after(planned: t.Any, before: dict[str, t.Any]) -> dict[str, t.Any]:
    """Return the observation after a plan was applied."""
    texts = {row.path: row.after for row in planned.files}
    manifest = texts.get(cp.MANIFEST, before["manifest"])
    named = cp.flag(manifest, "config")
    ours = texts.get(CONFIG, before["ours"])
    config = texts.get(before["config_path"], before["config"]) if before["config"] is not None else ours
    path = before["config_path"] if before["config"] is not None else named
    merged = texts.get(cp.MERGED, before["merged"])
    running = [process(config=named)]
    return static_pod(manifest, ours=ours, merged=merged, config=config, config_path=path, running=running)


@pytest.mark.parametrize("minor", [19, 20, 22, 23, 25, 28, 29, 31, 32, 34, 36])
def test_kubeadm_manifest_of_each_version(minor: int) -> None:
    manifest = manifests.kubeadm(minor)
    planned = make_plan(PRESENT, static_pod(manifest))
    assert [row.path for row in planned.files] == [CONFIG, cp.MANIFEST], "the manifest last"
    text = planned.files[1].after
    old = manifest.splitlines()
    assert [line for line in text.splitlines() if line in old][: len(old)] and not set(old) - set(text.splitlines())
    pod = yaml.safe_load(text)
    [container] = pod["spec"]["containers"]
    assert f"--config={CONFIG}" in container["command"]
    assert {"mountPath": FOLDER, "name": "kubegpu-share", "readOnly": True} in container["volumeMounts"]
    assert {"name": "kubegpu-share", "hostPath": {"path": FOLDER, "type": "Directory"}} in pod["spec"]["volumes"]
    sha256 = hashlib.sha256(planned.files[0].after.encode()).hexdigest()
    assert pod["metadata"]["annotations"] == {ANNOTATION: sha256}
    assert planned.config == CONFIG
    paths = ("/livez", "/readyz") if minor >= 31 else ("/healthz",)
    assert planned.urls == tuple(f"https://127.0.0.1:10259{path}" for path in paths)

    then = after(planned, static_pod(manifest))
    assert make_plan(PRESENT, then).plan.empty
    back = make_plan(ABSENT, then)
    assert [row.path for row in back.files] == [cp.MANIFEST, CONFIG], "nothing refers to a file that is gone"
    assert back.files[0].after == manifest, "to the byte"
    assert back.files[1].after is None and back.config == ""
    assert make_plan(ABSENT, after(back, then)).plan.empty


def test_a_manifest_in_another_style() -> None:
    planned = make_plan(PRESENT, static_pod(manifests.FULL))
    text = planned.files[1].after
    for comment in ("# our own manifest", "# who", "# flags", "# the kubeconfig", "# end of the volumes"):
        assert comment in text
    container = yaml.safe_load(text)["spec"]["containers"][1]
    assert container["command"] == ["kube-scheduler"] and container["args"][-1] == f"--config={CONFIG}"
    config = yaml.safe_load(planned.files[0].after)
    assert config["enableProfiling"] is False and config["clientConnection"]["qps"] == 75.0
    assert planned.urls == ("https://127.0.0.1:10260/livez", "https://127.0.0.1:10260/readyz")
    then = after(planned, static_pod(manifests.FULL))
    assert make_plan(PRESENT, then).plan.empty
    assert make_plan(ABSENT, then).files[0].after == manifests.FULL, "to the byte"


def users(**changes: t.Any) -> dict[str, t.Any]:
    return static_pod(
        manifests.WITH_CONFIG, config_path="/srv/scheduler/config.yaml", config=manifests.USERS_CONFIG, **changes
    )


def test_users_configuration_is_merged() -> None:
    planned = make_plan(PRESENT, users())
    assert [row.path for row in planned.files] == [cp.MERGED, "/srv/scheduler/config.yaml", cp.MANIFEST]
    assert planned.config == "/etc/scheduler/config.yaml"
    manifest = planned.files[2].after
    assert FOLDER not in manifest and ANNOTATION in manifest
    then = after(planned, users())
    assert make_plan(PRESENT, then).plan.empty
    back = make_plan(ABSENT, then)
    assert [row.after for row in back.files] == [manifests.USERS_CONFIG, manifests.WITH_CONFIG, None]


def test_removal_leaves_a_users_own_extender() -> None:
    own = manifests.USERS_CONFIG.replace("http://127.0.0.1:9000", EXTENDER.url)
    assert make_plan(ABSENT, users(running=[]) | {"config": own}).plan.empty


def test_host_path_is_observed_for_a_container_path() -> None:
    with pytest.raises(ObserveAgain) as caught:
        make_plan(PRESENT, static_pod(manifests.WITH_CONFIG, config="something else"))
    assert caught.value.arguments == {"config_path": "/srv/scheduler/config.yaml"}


def test_changed_configuration_restarts_the_scheduler() -> None:
    then = after(make_plan(PRESENT, static_pod(manifests.kubeadm(36))), static_pod(manifests.kubeadm(36)))
    for other in (Extender(EXTENDER.url, 10), Extender(EXTENDER.url, 30, preempts=True)):
        planned = make_plan(Options(True, other), then)
        assert len(planned.files) == 2
        texts = (then["manifest"], planned.files[1].after)
        old, new = (yaml.safe_load(text)["metadata"]["annotations"] for text in texts)
        assert old != new
        # Its removal doesn't depend on the options.
        assert make_plan(ABSENT, after(planned, then)).files[0].after == manifests.kubeadm(36)


def test_partial_edit_is_completed() -> None:
    """A kubeadm upgrade kept the flag but lost the volume, or a user changed the mount."""
    done = make_plan(PRESENT, static_pod(manifests.kubeadm(36)))
    whole, ours = done.files[1].after, done.files[0].after
    broken = whole.replace(f"  - hostPath:\n      path: {FOLDER}\n      type: Directory\n    name: kubegpu-share\n", "")
    broken = broken.replace("mountPath: /etc/kubernetes/kubegpu-share", "mountPath: /elsewhere")
    assert broken != whole
    text = make_plan(PRESENT, static_pod(broken, ours=ours)).files[0].after
    assert yaml.safe_load(text) == yaml.safe_load(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"running": []}, "not running with this configuration"),
        ({"running": [process(config="")]}, "not running with this configuration"),
        ({"health": 0}, "not healthy"),
        ({"pending": True}, "an earlier run was interrupted"),
    ],
)
def test_right_files_and_unhealthy_scheduler_need_a_restart(changes: dict[str, t.Any], words: str) -> None:
    then = after(make_plan(PRESENT, static_pod(manifests.kubeadm(36))), static_pod(manifests.kubeadm(36)))
    planned = make_plan(PRESENT, {**then, **changes})
    assert planned.files == ()
    assert [(one.header, one.before) for one in planned.plan.changes] == [(CONTAINER, f"{words}\n")]


def test_absent_plans_nothing_unless_a_run_was_interrupted() -> None:
    assert make_plan(ABSENT, static_pod(None)).plan.empty
    assert make_plan(ABSENT, static_pod(manifests.kubeadm(36), running=[], health=0)).plan.empty
    assert not make_plan(ABSENT, static_pod(manifests.kubeadm(36), pending=True)).plan.empty


KUBEADM = manifests.kubeadm(36)
OLD = manifests.kubeadm(19).replace(":v1.19.3", ":v1.18.9")


@pytest.mark.parametrize(
    ("manifest", "changes", "words"),
    [
        (None, {}, "scheduler_mode: static_pod needs /etc/kubernetes/manifests/kube-scheduler.yaml"),
        (None, {"embedded": "k3s"}, "this machine has none \\(it runs k3s\\)"),
        ("a: [\n", {}, "kube-scheduler.yaml, line 2, can't be parsed"),
        (KUBEADM.replace("    name: kube-scheduler\n", "    name: other\n"), {}, "has no container kube-scheduler"),
        (KUBEADM.replace(":v1.36.3", ":main"), {}, "scheduler_version:"),
        (
            KUBEADM.replace("--leader-elect=true", "--policy-config-file=/p"),
            {},
            "has --policy-config-file=/p, with which",
        ),
        (KUBEADM.replace("--leader-elect=true", "--policy-configmap=p"), {}, "has --policy-configmap"),
        (OLD.replace("--leader-elect=true", "--config=/c"), {}, "has --config=/c, with which a policy file can't be"),
        (
            KUBEADM,
            {"link": "/srv/m.yaml"},
            "kube-scheduler.yaml is a symbolic link to /srv/m.yaml; put the file itself",
        ),
        (KUBEADM, {"others": {f"{cp.MANIFEST}.bak": KUBEADM}}, "second kube-scheduler pod, kube-scheduler.yaml.bak"),
        (
            KUBEADM,
            {"version": "1.36.3", "running": [process(config="", version="1.35.6")]},
            r"half upgraded: .* asks for kube-scheduler 1.36 and 1.35 is running; finish the upgrade",
        ),
        (f"{KUBEADM}# caf\ufffd\n", {}, "kube-scheduler.yaml isn't in UTF-8"),
        (KUBEADM.replace("--leader-elect=true", "--config=/nowhere/c"), {}, r"--config=/nowhere/c isn't in a folder"),
        (manifests.WITH_CONFIG, {"config_path": "/srv/scheduler/config.yaml"}, "config.yaml, which .* doesn't exist"),
    ],
)
def test_refused(manifest: str | None, changes: dict[str, t.Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make_plan(PRESENT, static_pod(manifest, **changes))


def test_half_upgraded_control_plane_refused() -> None:
    near, far = (
        dataclasses.replace(PRESENT, versions=versions) for versions in (("v1.36.1", "v1.36.3"), ("1.35.4", "1.36.3"))
    )
    assert make_plan(near, static_pod(KUBEADM)).files
    with pytest.raises(BadInput, match=r"half upgraded: its kube-schedulers are 1.35 to 1.36"):
        make_plan(far, static_pod(KUBEADM))
    then = after(make_plan(PRESENT, static_pod(KUBEADM)), static_pod(KUBEADM))
    assert make_plan(far, then).plan.empty, "there is nothing to change"


def test_similar_files_are_no_second_scheduler() -> None:
    others = {
        "/etc/kubernetes/manifests/a.yaml": "kind: ConfigMap\nmetadata: {name: kube-scheduler}\n",
        "/etc/kubernetes/manifests/b.yaml": "name: kube-scheduler\n  broken: [\n",
        "/etc/kubernetes/manifests/c.yaml": "kind: Pod\nspec: {containers: [{name: kube-scheduler-x}]}\n",
    }
    assert make_plan(PRESENT, static_pod(KUBEADM, others=others)).files


# --------------------------------------------------------------------------- Policy


def with_policy(minor: int) -> str:
    flag, folder = "--policy-config-file=/etc/policy/p.json", "  hostNetwork: true\n"
    mount = f"    - mountPath: /etc/policy\n      name: policy\n{folder}"
    volume = "  - hostPath:\n      path: /srv/policy\n    name: policy\nstatus: {}\n"
    text = manifests.kubeadm(minor).replace("    image: ", f"    - {flag}\n    image: ")
    return text.replace(folder, mount).replace("status: {}\n", volume)


USERS_POLICY = """\
{
  "kind": "Policy", "apiVersion": "v1",
  "extenders": [
    {"urlPrefix": "http://127.0.0.1:9000", "filterVerb": "filter", "nodeCacheCapable": true}
  ]
}
"""


@pytest.mark.parametrize(
    ("manifest", "configuration", "form"),
    [
        (OLD, "auto", "policy"),
        (manifests.kubeadm(22), "auto", "config"),
        (manifests.kubeadm(22), "policy", "policy"),
        (manifests.kubeadm(23), "config", "config"),
    ],
)
def test_policy_or_configuration_by_version(manifest: str, configuration: str, form: str) -> None:
    planned = make_plan(dataclasses.replace(PRESENT, configuration=configuration), static_pod(manifest))
    path, flag = (POLICY, "policy-config-file") if form == "policy" else (CONFIG, "config")
    assert [row.path for row in planned.files] == [path, cp.MANIFEST]
    [container] = yaml.safe_load(planned.files[1].after or "")["spec"]["containers"]
    assert container["command"][-1] == f"--{flag}={path}"
    assert (planned.config, planned.policy) == ((CONFIG, "") if form == "config" else ("", POLICY))


@pytest.mark.parametrize(("minor", "configuration"), [(20, "auto"), (22, "policy")])
def test_users_policy_is_merged(minor: int, configuration: str) -> None:
    options = dataclasses.replace(PRESENT, configuration=configuration)
    manifest = with_policy(minor)
    with pytest.raises(ObserveAgain) as caught:
        make_plan(options, static_pod(manifest, policy_path="/etc/policy/p.json"))
    assert caught.value.arguments == {"policy_path": "/srv/policy/p.json"}
    before = static_pod(manifest, policy_path="/srv/policy/p.json", policy=USERS_POLICY)
    planned = make_plan(options, before)
    assert [row.path for row in planned.files] == [cp.MERGED, "/srv/policy/p.json", cp.MANIFEST]
    note, policy_file, manifest_file = (row.after for row in planned.files)
    policy = json.loads(policy_file or "")
    assert [one["urlPrefix"] for one in policy["extenders"]] == ["http://127.0.0.1:9000", EXTENDER.url]
    assert policy["extenders"][1]["httpTimeout"] == 30_000_000_000
    assert (planned.config, planned.policy) == ("", "/etc/policy/p.json")
    then = {**before, "manifest": manifest_file, "policy": policy_file, "merged": note}
    then["running"] = [process(config="", policy="/etc/policy/p.json")]
    assert make_plan(options, then).plan.empty
    back = make_plan(ABSENT, then)
    assert [row.after for row in back.files] == [USERS_POLICY, manifest, None]


def test_policy_removed_after_upgrade() -> None:
    done = make_plan(dataclasses.replace(PRESENT, configuration="policy"), static_pod(manifests.kubeadm(22)))
    planned = make_plan(PRESENT, static_pod(manifests.kubeadm(23), ours_policy=done.files[0].after))
    assert [(row.path, row.after is None) for row in planned.files] == [
        (CONFIG, False),
        (cp.MANIFEST, False),
        (POLICY, True),
    ]


def test_configuration_replaced_by_the_users() -> None:
    """Ours was there; then the user gave kube-scheduler another one, by hand, beside our folder."""
    whole = make_plan(PRESENT, static_pod(KUBEADM))
    mixed = (whole.files[1].after or "").replace(f"--config={CONFIG}", "--config=/etc/scheduler/config.yaml")
    mixed = mixed.replace(
        "  hostNetwork: true\n", "    - mountPath: /etc/scheduler\n      name: mine\n  hostNetwork: true\n"
    ).replace("status: {}\n", "  - hostPath:\n      path: /srv/scheduler\n    name: mine\nstatus: {}\n")
    path = "/srv/scheduler/config.yaml"
    planned = make_plan(
        PRESENT, static_pod(mixed, ours=whole.files[0].after, config=manifests.USERS_CONFIG, config_path=path)
    )
    assert [(row.path, row.after is None) for row in planned.files] == [
        (cp.MERGED, False),
        (path, False),
        (cp.MANIFEST, False),
        (CONFIG, True),
    ]


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (OLD.replace("--leader-elect=true", "--config=/c"), r"1\.18 has --config=/c, .* combined; remove that flag$"),
        (KUBEADM.replace("--leader-elect=true", "--policy-config-file=/p"), r"combined; remove that flag$"),
        (
            manifests.kubeadm(20).replace("--leader-elect=true", "--config=/c"),
            r"scheduler_configuration: config, or remove",
        ),
    ],
)
def test_message_suggests_a_possible_remedy(manifest: str, words: str) -> None:
    options = dataclasses.replace(PRESENT, configuration="policy" if ":v1.20" in manifest else "auto")
    with pytest.raises(BadInput, match=words):
        make_plan(options, static_pod(manifest))


def test_policy_validated_for_the_scheduler_version() -> None:
    unknown = USERS_POLICY.replace('"extenders"', '"ours": 1, "extenders"')
    for minor, refused in ((16, False), (17, True)):
        manifest = with_policy(19).replace(":v1.19.3", f":v1.{minor}.3")
        before = static_pod(manifest, policy_path="/srv/policy/p.json", policy=unknown)
        if refused:
            with pytest.raises(BadInput, match=r"kube-scheduler 1\.17 has no field ours"):
                make_plan(PRESENT, before)
        else:
            assert make_plan(PRESENT, before).files


# --------------------------------------------------------------------------- the note of the user's file


USERS_PATH = "/srv/scheduler/config.yaml"
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


class Machine:
    """A machine whose kube-scheduler has a configuration of the user's own."""

    def __init__(self, config: str, manifest: str = manifests.WITH_CONFIG) -> None:
        self.files: dict[str, str | None] = {cp.MANIFEST: manifest, USERS_PATH: config}
        self.path = "/etc/scheduler/config.yaml"

    def observed(self) -> dict[str, t.Any]:
        merged = self.files.get(cp.MERGED)
        manifest = self.files[cp.MANIFEST]
        running = [process(config=cp.flag(manifest or "", "config"))]
        ours, config = self.files.get(CONFIG), self.files.get(self.path)
        return static_pod(manifest, config_path=self.path, config=config, ours=ours, merged=merged, running=running)

    def plan(self, options: Options) -> t.Any:
        try:
            return make_plan(options, self.observed())
        except ObserveAgain as more:
            self.path = more.arguments["config_path"]
            return make_plan(options, self.observed())

    def run(self, options: Options, files: int | None = None) -> t.Any:
        """Carry out a plan, or only the first so many of its files."""
        planned = self.plan(options)
        for row in planned.files[:files]:
            assert self.files.get(row.path) == row.before
            self.files[row.path] = row.after
        return planned

    def left(self) -> dict[str, str]:
        return {path: text for path, text in self.files.items() if text is not None}


@pytest.mark.parametrize("config", [manifests.USERS_CONFIG, WITH_UPSTREAM, EMPTY_LIST], ids=["own", "upstream", "[]"])
@pytest.mark.parametrize("minor_change", [False, True], ids=["", "changed"])
def test_users_file_is_restored(config: str, minor_change: bool) -> None:
    machine = Machine(config)
    before = machine.left()
    planned = machine.run(PRESENT)
    assert [row.path for row in planned.files] == [cp.MERGED, USERS_PATH, cp.MANIFEST], (
        "the note before what it is about"
    )
    assert machine.plan(PRESENT).plan.empty
    if minor_change:
        machine.run(Options(True, Extender(EXTENDER.url, 10)))
    assert machine.run(ABSENT).files[-1].path == cp.MERGED, "and after it"
    assert machine.left() == before and machine.plan(ABSENT).plan.empty


def test_later_changes_of_the_user_are_kept() -> None:
    machine = Machine(WITH_UPSTREAM)
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

    machine = Machine(manifests.USERS_CONFIG)
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
    machine = Machine(manifests.USERS_CONFIG)
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
    machine = Machine(manifests.USERS_CONFIG)
    machine.run(PRESENT)
    machine.files[cp.MANIFEST] = KUBEADM
    machine.run(PRESENT)
    assert machine.files[CONFIG] and machine.files[cp.MERGED]
    machine.run(ABSENT)
    assert machine.left() == {cp.MANIFEST: KUBEADM, USERS_PATH: manifests.USERS_CONFIG}


@pytest.mark.parametrize("options", [PRESENT, ABSENT], ids=["present", "absent"])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_interrupted_run_loses_nothing(options: Options, done: int) -> None:
    machine = Machine(WITH_UPSTREAM)
    before = machine.left()
    if options is ABSENT:
        machine.run(PRESENT)
    machine.run(options, done)
    machine.run(PRESENT)
    machine.run(ABSENT)
    assert machine.left() == before


def test_foreign_extender_in_an_untouched_file_is_kept() -> None:
    for config in (WITH_UPSTREAM, "a: [\n"):
        for manifest in (manifests.WITH_CONFIG, "a: [\n"):
            assert Machine(config, manifest).plan(ABSENT).plan.empty
    mapped = manifests.WITH_CONFIG.replace("  - hostPath:\n      path: /srv/scheduler\n", "  - configMap: {name: x}\n")
    assert mapped != manifests.WITH_CONFIG and Machine(WITH_UPSTREAM, mapped).plan(ABSENT).plan.empty


def test_invalid_note_is_ignored() -> None:
    for text in ("", "{", "[]", '{"path": 1}', '{"x": ""}'):
        assert merged_file.read(text) is None


# --------------------------------------------------------------------------- rollback and lease


def test_rollback_reverses_the_plan() -> None:
    planned = make_plan(PRESENT, static_pod(KUBEADM))
    handed, back = planned.to_module(), planned.rollback()
    assert [row["path"] for row in back["files"]] == [cp.MANIFEST, CONFIG]
    assert [row["after"] for row in back["files"]] == [KUBEADM, None]
    assert back["files"][0]["before"] == hashlib.sha256(handed["files"][1]["after"].encode()).hexdigest()
    assert (handed["config"], back["config"]) == (CONFIG, "")


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
    assert lease_of(text, flags, minor) == lease


def test_lease_of_the_users_configuration() -> None:
    own = manifests.USERS_CONFIG.replace("{leaderElect: true}", "{leaderElect: true, resourceName: mine}")
    path = "/srv/scheduler/config.yaml"
    planned = make_plan(PRESENT, static_pod(manifests.WITH_CONFIG, config_path=path, config=own))
    assert planned.lease == ("kube-system", "mine") and planned.lease_certain
    assert make_plan(PRESENT, static_pod(KUBEADM)).lease == ("kube-system", "kube-scheduler")
