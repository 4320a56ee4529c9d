# SPDX-License-Identifier: GPL-3.0-or-later
"""Apply plans to kube-scheduler's static pod, verify them and roll them back; on a machine in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import manifests
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.gpushare import RESOURCE_MEMORY
from ansible_collections.kubegpu.share.plugins.module_utils._core.digest import digest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.constants import (
    ANNOTATION,
    CONFIG,
    FOLDER,
    POLICY,
)
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.plan import Options
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.static_pod_apply import error_lines
from fake_machine import ABSENT, EXTENDER, OTHER, PRESENT, FakeMachine, carry_out, left_by_kills, plan, run

KUBEADM = manifests.kubeadm(36)


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine(KUBEADM)


def refusing(text: str) -> Callable[[FakeMachine], str]:
    """A kube-scheduler that ends when a file of ours that its manifest names has this in it."""
    error = 'E1121 run.go:72] "command failed" err="unknown field"'
    return lambda one: error if FOLDER in one.files[one.manifest] and text in one.files[CONFIG] else ""


def state(machine: FakeMachine) -> dict[str, str]:
    return {path: text for path, text in machine.files.items() if path.startswith("/etc/kubernetes")}


def test_install_and_removal_are_verified_and_idempotent(machine: FakeMachine) -> None:
    old = machine.pid
    run(machine, PRESENT)
    [running] = cp.running(machine)
    assert running.pid != old and running.config == CONFIG
    assert set(state(machine)) == {cp.MANIFEST, CONFIG}, "no record, nothing staged"
    assert machine.modes[cp.MANIFEST] == 0o600 and machine.modes[CONFIG] == 0o644
    first, second = machine.log.index(f"write {CONFIG}"), machine.log.index(f"write {cp.STAGED}")
    assert machine.log.index(f"write {cp.PENDING}") < first < second, "the configuration before the manifest"
    assert machine.time < 130, "no longer than it takes"
    assert plan(machine, PRESENT).plan.empty
    run(machine, ABSENT)
    assert state(machine) == {cp.MANIFEST: KUBEADM}
    assert [one.config for one in cp.running(machine)] == [""]
    assert f"rmdir {FOLDER}" in machine.log
    assert plan(machine, ABSENT).plan.empty


def test_crash_loop_rolled_back_before_the_timeout() -> None:
    machine = FakeMachine(KUBEADM, refusing("extenders"))
    begun = machine.time
    words = r'\(its container restarts again and again\); rolled back, it runs with the old one: .*err="unknown'
    with pytest.raises(NotInEffect, match=words):
        run(machine, PRESENT)
    assert machine.time - begun < 60
    assert state(machine) == {cp.MANIFEST: KUBEADM} and machine.modes[cp.MANIFEST] == 0o600
    assert machine.healthy


PROXY = """\
  - args:
    - --config=/etc/proxy.yaml
    - --policy-config-file=/etc/proxy.json
    image: example.org/kube-scheduler-proxy:v1
    name: kube-scheduler-proxy
"""
WITH_SIDECAR = {
    "before": KUBEADM.replace("  containers:\n", f"  containers:\n{PROXY}"),
    "after": KUBEADM.replace("  hostNetwork: true\n", f"{PROXY}  hostNetwork: true\n"),
}


@pytest.mark.parametrize("manifest", WITH_SIDECAR.values(), ids=list(WITH_SIDECAR))
def test_a_sidecars_configuration_is_not_kube_schedulers(manifest: str) -> None:
    """The old process is recognised: the change waits for its end, and a rollback for its return."""
    machine = FakeMachine(manifest, refusing("httpTimeout: 10s"))
    with pytest.raises(NotInEffect, match=r"rolled back, it runs with the old one"):
        run(machine, OTHER)
    assert state(machine) == {cp.MANIFEST: manifest} and machine.healthy
    run(machine, PRESENT)
    with pytest.raises(NotInEffect, match=r"rolled back, it runs with the old one"):
        run(machine, OTHER)
    assert [one.config for one in cp.running(machine)] == [CONFIG] and plan(machine, PRESENT).plan.empty
    assert_waits_for_the_old_process(FakeMachine(manifest))


def test_idle_kubelet_times_out(machine: FakeMachine) -> None:
    machine.kubelet_works = False
    with pytest.raises(NotInEffect, match=r"no new process with this configuration was started after 60 s"):
        run(machine, PRESENT)
    assert state(machine)[cp.MANIFEST] == KUBEADM


def test_old_process_does_not_count(machine: FakeMachine) -> None:
    """Only a process that is younger than the manifest counts, even where its flags are as they should be."""
    run(machine, PRESENT)
    changed = plan(machine, OTHER)
    machine.kubelet_works = False
    with pytest.raises(NotInEffect, match="no new process"):
        carry_out(machine, changed)


def test_health_must_last(machine: FakeMachine) -> None:
    flicker, ask = iter([200, 200, 0] * 400), machine.ask
    machine.ask = lambda url: next(flicker) if CONFIG in machine.files[cp.MANIFEST] else ask(url)  # type: ignore
    with pytest.raises(NotInEffect, match="it isn't healthy after 60 s"):
        run(machine, PRESENT)
    assert state(machine) == {cp.MANIFEST: KUBEADM}


def test_failed_rollback_reported_and_record_kept(machine: FakeMachine) -> None:
    planned = plan(machine, PRESENT)
    machine.refuses = lambda m: 'err="no etcd"'
    with pytest.raises(NotInEffect, match=r"is restored, and kube-scheduler isn't healthy with it either .*no etcd"):
        carry_out(machine, planned)
    assert machine.files[cp.MANIFEST] == KUBEADM and cp.PENDING in machine.files
    machine.refuses = lambda m: ""
    run(machine, PRESENT)
    assert cp.PENDING not in machine.files and plan(machine, PRESENT).plan.empty


def test_concurrently_changed_manifest_not_overwritten(machine: FakeMachine) -> None:
    planned = plan(machine, PRESENT)
    machine.put(cp.MANIFEST, KUBEADM + "# new\n", 0o600)
    with pytest.raises(ShareError, match="was changed by another process"):
        carry_out(machine, planned)
    assert not [one for one in machine.log if one.startswith(("write", "mv"))]


# --------------------------------------------------------------------------- what the process has loaded


USERS_FILE = "/etc/kubernetes/kubescheduler-config.yaml"
ALONE = manifests.mounted(KUBEADM, f"--config={USERS_FILE}", USERS_FILE, USERS_FILE)
POLICIED = manifests.mounted(
    manifests.kubeadm(20), "--policy-config-file=/etc/policy/p.json", "/etc/policy", "/srv/policy"
)
USERS_POLICY = '{"kind": "Policy", "apiVersion": "v1"}\n'


@pytest.mark.parametrize(
    ("manifest", "path", "without"),
    [
        (KUBEADM, CONFIG, manifests.USERS_CONFIG),
        (manifests.WITH_CONFIG, "/srv/scheduler/config.yaml", manifests.USERS_CONFIG),
        (ALONE, USERS_FILE, manifests.USERS_CONFIG),
        (POLICIED, "/srv/policy/p.json", USERS_POLICY),
    ],
    ids=["ours", "the user's", "mounted alone", "policy"],
)
def test_rewritten_configuration_is_loaded_anew(manifest: str, path: str, without: str) -> None:
    """Another program rewrites the file, kube-scheduler ends and starts with it, and then site.yml runs."""
    machine = FakeMachine(manifest)
    machine.put(path, without, 0o644)
    for restarts in (0, 1, 2):
        run(machine, PRESENT)
        assert [RESOURCE_MEMORY in text for text in machine.loaded.values()] == [True], restarts
        [seen] = cp.observe(machine, ask=machine.ask)["running"]
        assert (seen["fresh"], seen["extender"]) == (True, True)
        assert plan(machine, PRESENT).plan.empty, "the process has loaded it"
        machine.sleep(10)
        machine.put(path, without, 0o644)
        machine.sleep(10)
        machine.container_restarts()
        machine.sleep(10)
        assert RESOURCE_MEMORY not in "".join(machine.loaded.values())
    run(machine, ABSENT)
    assert plan(machine, ABSENT).plan.empty


def test_file_that_was_changed_and_changed_back_is_loaded_anew(machine: FakeMachine) -> None:
    """The file and the annotation are as they should be; only the process has something else."""
    run(machine, PRESENT)
    ours = machine.files[CONFIG]
    for text in (manifests.USERS_CONFIG, ours):
        machine.sleep(10)
        machine.put(CONFIG, text, 0o644)
        machine.sleep(10)
        if text != ours:
            machine.container_restarts()
    [seen] = cp.observe(machine, ask=machine.ask)["running"]
    assert (seen["fresh"], seen["loaded"]) == (False, {CONFIG: digest(ours)})
    assert [file.path for file in run(machine, PRESENT).files] == [cp.MANIFEST]
    assert machine.loaded == {CONFIG: ours} and plan(machine, PRESENT).plan.empty


def test_process_that_sees_another_file_does_not_count() -> None:
    """Its --config isn't where the manifest's mounts lead: it runs with the right flags, and without the extender."""
    machine = FakeMachine(manifests.WITH_CONFIG)
    machine.put("/srv/scheduler/config.yaml", manifests.USERS_CONFIG, 0o644)
    machine.put("/elsewhere.yaml", manifests.USERS_CONFIG, 0o644)
    seen = machine.seen
    machine.seen = lambda path: "/elsewhere.yaml" if "/root/" in path else seen(path)  # type: ignore[method-assign]
    words = r"its process has other text in /etc/scheduler/config.yaml than /srv/scheduler/config.yaml has after 60 s"
    with pytest.raises(NotInEffect, match=rf"\({words}\); rolled back"):
        run(machine, PRESENT)
    assert machine.files["/srv/scheduler/config.yaml"] == manifests.USERS_CONFIG


def test_annotation_of_an_earlier_release_stays(machine: FakeMachine) -> None:
    run(machine, PRESENT)
    assert f"{ANNOTATION}: {digest(machine.files[CONFIG])}\n" in machine.files[cp.MANIFEST]


def forbidden(read: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Reads that only root may do fail."""

    def checked(path: str) -> str | None:
        if "/root/" in path:
            raise ShareError(f"{path} can't be read: Permission denied")
        return read(path)

    return checked


@pytest.mark.parametrize("fault", ["no process", "other root", "not root", "clock set back"])
def test_what_a_process_has_loaded_may_be_unknown(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run(machine, PRESENT)
    if fault == "no process":
        machine.forget_process(machine.pid)
    elif fault == "not root":
        monkeypatch.setattr(machine, "read", forbidden(machine.read))
    elif fault == "other root":
        machine.seen = lambda path: "/nowhere" if "/root/" in path else path  # type: ignore[method-assign]
    else:
        machine.changed_at[CONFIG] += 1000
    seen = cp.observe(machine, ask=machine.ask)["running"]
    assert [one["fresh"] for one in seen] == ([] if fault == "no process" else [None])
    assert plan(machine, PRESENT).files == (), "that alone is no reason for a restart"


# --------------------------------------------------------------------------- killed


@pytest.mark.parametrize("later", [0, pytest.param(25, marks=pytest.mark.long)], ids=["at once", "after a while"])
@pytest.mark.parametrize(
    ("first", "wanted", "then", "refused"),
    [
        (None, PRESENT, PRESENT, ""),
        (None, PRESENT, ABSENT, ""),
        (PRESENT, OTHER, OTHER, ""),
        (PRESENT, ABSENT, ABSENT, ""),
        (PRESENT, ABSENT, PRESENT, ""),
        pytest.param(None, PRESENT, PRESENT, "extenders", marks=pytest.mark.long),
        (PRESENT, OTHER, OTHER, "httpTimeout: 10s"),
        pytest.param(PRESENT, OTHER, ABSENT, "httpTimeout: 10s", marks=pytest.mark.long),
    ],
)
def test_run_killed_at_any_call_is_completed_by_the_next(
    first: Options | None, wanted: Options, then: Options, refused: str, later: int
) -> None:
    """After each kill kube-scheduler runs by one manifest, and the next run completes."""
    start = FakeMachine(KUBEADM)
    if first:
        run(start, first)
    old = state(start)
    start.refuses = refusing(refused) if refused else start.refuses
    left = left_by_kills(start, wanted)
    assert len(left) > 15
    for at, machine in enumerate(left):
        for _second in range(later):
            machine.sleep(1)
        again = plan(machine, then)
        bad = bool(refused) and then.present
        if bad and not again.plan.empty:
            with pytest.raises(NotInEffect, match="rolled back, it runs with the old one"):
                carry_out(machine, again)
            assert state(machine) == old, at
        elif not again.plan.empty:
            carry_out(machine, again)
        assert machine.healthy and machine.names(machine.folder) == ["kube-scheduler.yaml"], at
        assert cp.PENDING not in machine.files and cp.STAGED not in machine.files, at
        if not bad:
            assert plan(machine, then).plan.empty, at
            assert [one.config for one in cp.running(machine)] == [CONFIG if then.present else ""], at
        if not then.present:
            assert state(machine) == {cp.MANIFEST: KUBEADM}, at


# --------------------------------------------------------------------------- other folders, other forms


ELSEWHERE = "/srv/kubelet/pods"


def test_kubelet_configuration_names_the_folder() -> None:
    machine = FakeMachine(KUBEADM, folder=ELSEWHERE)
    machine.devices = {"/etc/kubernetes": "7"}
    # A leftover that doesn't run.
    machine.put(cp.MANIFEST, "leftover: [\n", 0o644)
    observed = cp.observe(machine, ask=machine.ask)
    assert observed["folder"] == ELSEWHERE and observed["manifest_path"] == f"{ELSEWHERE}/kube-scheduler.yaml"
    run(machine, PRESENT)
    assert [one.config for one in cp.running(machine)] == [CONFIG]
    # On the file system of the folder, which isn't that of /etc/kubernetes.
    assert f"mv -fT /srv/kubelet/.staged-kube-scheduler.yaml {machine.manifest}" in machine.log
    assert machine.files[cp.MANIFEST] == "leftover: [\n" and not plan(machine, PRESENT).files
    run(machine, ABSENT)
    assert machine.files[machine.manifest] == KUBEADM


@pytest.mark.parametrize(
    ("kubelet", "files", "folder"),
    [
        ("", {cp.KUBELET_CONFIG: "kind: KubeletConfiguration\nstaticPodPath: '/a/b/' # here\n"}, "/a/b"),
        ("--config=/x.yaml", {"/x.yaml": '{"kind": "KubeletConfiguration", "staticPodPath": "/a"}'}, "/a"),
        ("--config=/x --config-dir=/d", {"/x": "staticPodPath: /a\n", "/d/1.conf": "staticPodPath: /b"}, "/b"),
        ("--pod-manifest-path=/p", {cp.KUBELET_CONFIG: "staticPodPath: /a\n"}, "/p"),
        ("", {cp.KUBELET_CONFIG: ""}, "/etc/kubernetes/manifests"),
    ],
)
def test_static_pod_folder(machine: FakeMachine, kubelet: str, files: dict[str, str], folder: str) -> None:
    machine.files.update(files)
    machine.kubelet_arguments = kubelet
    assert cp.watched_folder(machine) == folder


def test_folder_on_its_own_file_system_refused(machine: FakeMachine) -> None:
    machine.devices = {machine.folder: "9"}
    with pytest.raises(ShareError, match="file system of its own"):
        run(machine, PRESENT)
    assert not [one for one in machine.log if one.startswith(("write", "mv", "mkdir"))]


def test_symbolic_link_not_replaced(machine: FakeMachine) -> None:
    planned = plan(machine, PRESENT)
    machine.links = {machine.manifest: "/srv/kube-scheduler.yaml"}
    with pytest.raises(ShareError, match="is a symbolic link; nothing was changed"):
        carry_out(machine, planned)
    assert not [one for one in machine.log if one.startswith(("write", "mv"))]


def test_policy_installed_replaced_and_removed() -> None:
    old = manifests.kubeadm(20)
    machine = FakeMachine(old)
    options = Options(True, EXTENDER, configuration="policy")
    run(machine, options)
    assert [(one.config, one.policy) for one in cp.running(machine)] == [("", POLICY)]
    assert set(state(machine)) == {cp.MANIFEST, POLICY}
    assert plan(machine, options).plan.empty
    # The other form takes its place, and nothing of the first one is left.
    run(machine, PRESENT)
    assert [(one.config, one.policy) for one in cp.running(machine)] == [(CONFIG, "")]
    assert set(state(machine)) == {cp.MANIFEST, CONFIG}
    run(machine, ABSENT)
    assert state(machine) == {cp.MANIFEST: old}


def test_patches_written_and_removed(machine: FakeMachine) -> None:
    folder = "/etc/kubernetes/patches"
    machine.put(f"{folder}/kube-scheduler0+merge.yaml", "spec: {}\n", 0o644)
    options = dataclasses.replace(PRESENT, patches_dir=folder)

    run(machine, PRESENT)
    pid = machine.pid
    planned = run(machine, options)
    assert len(planned.files) == 2 and not planned.restarts
    assert machine.pid == pid and plan(machine, options).plan.empty
    assert len(machine.names(folder)) == 3
    run(machine, dataclasses.replace(options, present=False))
    assert machine.names(folder) == ["kube-scheduler0+merge.yaml"]
    assert machine.files[cp.MANIFEST] == KUBEADM


def test_full_disk_restores_all_files(machine: FakeMachine) -> None:
    planned, pid, write = plan(machine, PRESENT), machine.pid, machine.write

    def full(path: str, text: str, mode: int = 0o644) -> None:
        if path == cp.STAGED:
            raise ShareError(f"{path} can't be written: No space left on device")
        write(path, text, mode)

    machine.write = full  # type: ignore[method-assign]
    with pytest.raises(ShareError, match="No space left on device; kube-scheduler's files are restored"):
        carry_out(machine, planned)
    assert state(machine) == {cp.MANIFEST: KUBEADM} and machine.pid == pid


def test_remaining_old_process_fails(machine: FakeMachine) -> None:
    assert_waits_for_the_old_process(machine)


def assert_waits_for_the_old_process(machine: FakeMachine) -> None:
    manifest = machine.files[cp.MANIFEST]
    planned, old = plan(machine, PRESENT), machine.pid
    left = {path: text for path, text in machine.files.items() if path.startswith(f"/proc/{old}/")}
    stop = machine._stop

    def stays() -> None:
        stop()
        machine.files.update(left)

    machine._stop = stays  # type: ignore[method-assign]
    with pytest.raises(NotInEffect, match="its old process is still running after 60 s"):
        carry_out(machine, planned)
    assert machine.files[cp.MANIFEST] == manifest


def test_unhealthy_scheduler_without_changes_fails(machine: FakeMachine) -> None:
    run(machine, PRESENT)
    machine._stop()
    machine.kubelet_works = False
    planned = plan(machine, PRESENT)
    assert planned.files == () and not planned.plan.empty
    with pytest.raises(NotInEffect, match=r"^kube-scheduler isn't healthy"):
        carry_out(machine, planned)


def test_the_module_needs_a_plan(machine: FakeMachine) -> None:
    with pytest.raises(BadInput, match="action plugin"):
        work({"plan": None, "timeout": 1}, machine)


# --------------------------------------------------------------------------- observation


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("    - --config=/a/b\n", "/a/b"),
        ('args: ["--kubeconfig=/x", "--config=/a/b"]', "/a/b"),
        ("- --config\n    - /a/b\n", "/a/b"),
        ('["--config", "/a/b"]', "/a/b"),
        ("# - --config=/a/b\n- --kubeconfig=/c\n- --authorization-kubeconfig=/d\n", ""),
        ("- --leader-elect=true # was --config=/old\n", ""),
        ("- --leader-elect=true\t# was --config=/old\n- --config=/a/b # not --config=/old\n", "/a/b"),
        ("- --config # the folder's\n  # own\n- /a/b\n", "/a/b"),
        ("- --feature-gates=a#b,--config=/a/b\n", "/a/b"),
        # Within quotes it is none, and an apostrophe in a word is no quote.
        ("- '--v=2 # '\n- \"it''s # \\\" # \" # --config=/old\n- --config=/a/b\n", "/a/b"),
        ("command: ['x # y', \"z # --config=/a/b\"]\n", "/a/b"),
        ('{"command":["x # y","--config=/a/b"]}', "/a/b"),
        ("- --x=it's # don't --config=/old\n", ""),
        ('- --x="a # --config=/old"\n', ""),
        # The last counts.
        ("- --config=/old\n- --config\n- /a/b\n", "/a/b"),
        # Of several containers it is that with the name, or else that with the image or the program.
        (manifests.FULL.replace("busybox", "busybox\n            args: [--config=/old]"), ""),
        (
            "spec:\n  containers:\n  - {name: kube-scheduler, args: [--config=/a/b]}\n"
            "  - {name: a, args: [--config=/old]}\n",
            "/a/b",
        ),
        (
            "spec:\n  containers:\n  - args: [kube-scheduler, --config=/a/b]\n    name: s\n"
            "  - args: [--config=/old]\n    name: b\n",
            "/a/b",
        ),
        (
            "spec:\n  containers:\n  -\n    name: kube-scheduler\n    args: [--config=/a/b]\n  -\n    name: p\n"
            "    image: kube-scheduler\n    ports:\n    - name: kube-scheduler\n    args: [--config=/old]\n",
            "/a/b",
        ),
    ],
)
def test_flag(text: str, value: str) -> None:
    assert cp.flag(text, "config") == value


@pytest.mark.parametrize(
    ("manifest", "url"),
    [
        (KUBEADM, "https://127.0.0.1:10259/healthz"),
        (manifests.FULL, "https://127.0.0.1:10260/healthz"),
        (KUBEADM.replace("--bind-address=127.0.0.1", "'--bind-address=::'"), "https://[::1]:10259/healthz"),
        (KUBEADM.replace("--leader-elect=true", "--secure-port=0"), "http://127.0.0.1:10251/healthz"),
        (KUBEADM.replace(":v1.36.3", ":v1.11.9"), "http://127.0.0.1:10251/healthz"),
        (
            KUBEADM.replace("--leader-elect=true", "--port=10300").replace(":v1.36.3", ":v1.11.9"),
            "http://127.0.0.1:10300/healthz",
        ),
    ],
)
def test_health_url(manifest: str, url: str) -> None:
    assert cp.health_url(manifest) == url


def test_observation(machine: FakeMachine) -> None:
    observed = cp.observe(machine, ask=machine.ask)
    assert observed["manifest"] == KUBEADM and observed["health"] == 200 and observed["hostname"] == "cp1"
    process = {"pid": machine.pid, "config": "", "policy": "", "version": "1.36.3", "stamp": ""}
    process |= {"fresh": None, "loaded": {}, "extender": False}
    assert observed["running"] == [process] and not observed["pending"]
    assert (observed["kind"], observed["version"]) == ("static_pod", "1.36.3")
    assert observed["folder"] == "/etc/kubernetes/manifests"
    assert observed["link"] == "" and observed["others"] == {} and observed["server"] is None
    bare = FakeMachine("")
    del bare.files[cp.MANIFEST]
    observed = cp.observe(bare, ask=lambda url: pytest.fail("asked"))
    assert observed["manifest"] is None and observed["health"] == 0 and observed["running"] == []


@pytest.mark.parametrize(
    ("unit", "process", "embedded"),
    [
        (True, True, "kube-scheduler.service"),
        (False, True, "kube-scheduler as process 77"),
        (False, False, ""),
    ],
)
def test_observation_of_a_scheduler_without_a_manifest(unit: bool, process: bool, embedded: str) -> None:
    """As kubeasz runs it by systemd, and RKE1 in a container."""
    bare = FakeMachine("")
    del bare.files[cp.MANIFEST]
    done = bare.done
    show = "LoadState=loaded\nExecStart={ path=/opt/kube/bin/kube-scheduler ; argv[]=/opt/kube/bin/kube-scheduler ; }\n"
    bare.done = lambda argv: Done(0, show, "") if unit and cp.UNIT in argv else done(argv)  # type: ignore[method-assign]
    if process:
        bare.put_process(77, "/opt/kube/bin/kube-scheduler", "--leader-elect=true")
    observed = cp.observe(bare, ask=bare.ask)
    assert (observed["kind"], observed["embedded"]) == ("", embedded)


def test_log_of_a_container_of_another_name(machine: FakeMachine) -> None:
    for path in [file for file in machine.files if file.startswith(cp.LOGS)]:
        text = machine.files.pop(path)
        machine.files[path.replace("/kube-scheduler/", "/scheduler/")] = text
    [seen] = cp.observe(machine, ask=machine.ask)["running"]
    assert seen["version"] == "1.36.3"


def test_observation_of_other_files() -> None:
    machine = FakeMachine(manifests.WITH_CONFIG)
    machine.put("/srv/scheduler/config.yaml", "mine", 0o644)
    observed = cp.observe(machine, ask=machine.ask)
    assert observed["config"] is None and observed["merged"] is None
    machine.put(cp.MERGED, "{}", 0o644)
    observed = cp.observe(machine, "/srv/scheduler/config.yaml", machine.ask)
    assert observed["config"] == "mine" and observed["merged"] == "{}"


HOSTED_CGROUPS = {
    "a pod's": "0::/kubepods.slice/kubepods-burstable-pod3a6f_11_22.slice/cri-containerd-abc.scope\n",
    "a cluster's in a container": f"0::/system.slice/docker-abc.scope/kubelet/kubepods/pod{'0' * 32}/abc\n",
    "a container's": "12:pids:/docker/abc\n0::/docker/abc\n",
}


def hosted(machine: FakeMachine, cgroup: str) -> int:
    """A kube-scheduler of another cluster, whose control plane runs in pods or containers of this machine."""
    machine.put_process(77, "kube-scheduler", "--leader-elect=true", cgroup=cgroup, started=50)
    return 77


@pytest.mark.parametrize("cgroup", HOSTED_CGROUPS.values(), ids=list(HOSTED_CGROUPS))
def test_scheduler_of_another_cluster_ignored(machine: FakeMachine, cgroup: str) -> None:
    hosted(machine, cgroup)
    assert [one["pid"] for one in cp.observe(machine, ask=machine.ask)["running"]] == [machine.pid]
    run(machine, PRESENT)
    assert [one.config for one in cp.running(machine)] == [CONFIG] and plan(machine, PRESENT).plan.empty
    run(machine, ABSENT)
    assert [one.pid for one in cp.running(machine)] == [machine.pid]
    assert state(machine) == {cp.MANIFEST: KUBEADM}


def test_scheduler_of_another_cluster_does_not_count(machine: FakeMachine) -> None:
    run(machine, PRESENT)
    hosted(machine, HOSTED_CGROUPS["a pod's"])
    machine.refuses = lambda machine: 'err="no"' if FOLDER not in machine.files[machine.manifest] else ""
    with pytest.raises(NotInEffect, match="rolled back, it runs with the old one"):
        run(machine, ABSENT)


@pytest.mark.parametrize("cgroup", ["", "0::/\n", "1:name=systemd:/\n0::/\n"])
def test_process_of_unknown_origin_counts(machine: FakeMachine, cgroup: str) -> None:
    pid = hosted(machine, cgroup)
    assert {one.pid for one in cp.running(machine)} == {machine.pid, pid}
    machine.files["/proc/77/cgroup"] = HOSTED_CGROUPS["a container's"]
    assert [one.pid for one in cp.running(machine)] == [machine.pid]
    for path in [file for file in machine.files if file.startswith(cp.LOGS)]:
        del machine.files[path]
    assert {one.pid for one in cp.running(machine)} == {machine.pid, pid}


def test_of_several_configurations_the_process_has_loaded_the_last(machine: FakeMachine) -> None:
    machine.put_process(machine.pid, "kube-scheduler", "--config=/old", "--config", "/a")
    assert [one.config for one in cp.running(machine)] == ["/a"]


def test_image_version_ignores_comments() -> None:
    text = "  # image: registry.k8s.io/kube-scheduler:v1.20.1\n  image: registry.k8s.io/kube-scheduler:v1.36.3 # now\n"
    assert cp.image_version(text) == "1.36.3"


def test_error_lines() -> None:
    error = '2026 stderr F E1121 09:07 run.go:72] "command failed" err="x"\n'
    log = f"2026 stderr F I1121 fine\n{error}2026 stderr F I1121 bye\n"
    assert error_lines(log) == 'E1121 09:07 run.go:72] "command failed" err="x"'
    assert error_lines("t s F a\nt s F b\n") == "a | b"
