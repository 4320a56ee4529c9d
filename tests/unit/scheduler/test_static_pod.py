# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler gets its files, proves itself, or gets the old ones back; over a machine with a made-up kubelet."""

from __future__ import annotations

import manifests
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import Replacement, replacements
from ansible_collections.kubegpu.share.plugins.module_utils._static_pod import Apply, Proof, last_words, work
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as sc
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_plan import Options, Planned, make_plan
from fake_machine import FakeMachine

KUBEADM = manifests.kubeadm(36)
EXTENDER = sc.Extender("http://127.0.0.1:12345/gpushare-scheduler", 30)


def plan(machine: FakeMachine, present: bool = True) -> Planned:
    return make_plan(Options(present, EXTENDER), cp.observe(machine, ask=machine.ask))


def apply(machine: FakeMachine, planned: Planned | None = None, present: bool = True) -> None:
    planned = planned or plan(machine, present)
    changes = replacements(list(planned.files))
    Apply(machine, 120, machine.ask, machine.sleep, machine.now).run(changes, Proof(planned.config, planned.urls))


def bad(machine: FakeMachine) -> str:
    """A kube-scheduler that doesn't like our configuration."""
    return 'E1121 run.go:72] "command failed" err="unknown field"' if cp.CONFIG in machine.files[cp.MANIFEST] else ""


def state(machine: FakeMachine) -> dict[str, str]:
    return {path: text for path, text in machine.files.items() if path.startswith("/etc/kubernetes")}


def test_applied_proven_and_idempotent() -> None:
    machine = FakeMachine(KUBEADM)
    old = machine.pid
    apply(machine)
    [running] = cp.running(machine)
    assert running.pid != old and running.config == cp.CONFIG
    assert set(state(machine)) == {cp.MANIFEST, cp.CONFIG}, "no record, nothing staged"
    assert machine.modes[cp.MANIFEST] == 0o600 and machine.modes[cp.CONFIG] == 0o644
    first, second = machine.log.index(f"write {cp.CONFIG}"), machine.log.index(f"write {cp.STAGED}")
    assert machine.log.index(f"write {cp.PENDING}") < first < second, "the configuration before the manifest"
    assert machine.time < 130, "no longer than it takes"
    assert plan(machine).plan.empty


def test_taken_out_again() -> None:
    machine = FakeMachine(KUBEADM)
    apply(machine)
    apply(machine, present=False)
    assert state(machine) == {cp.MANIFEST: KUBEADM}
    assert [one.config for one in cp.running(machine)] == [""]
    assert f"rmdir {cp.FOLDER}" in machine.log
    assert plan(machine, present=False).plan.empty


def test_a_scheduler_that_ends_is_put_back_before_the_time_is_up() -> None:
    machine = FakeMachine(KUBEADM, bad)
    begun = machine.time
    with pytest.raises(
        NotInEffect, match=r'runs with the old one again \(its container ends again and again\): .*err="unknown'
    ):
        apply(machine)
    assert machine.time - begun < 60
    assert state(machine) == {cp.MANIFEST: KUBEADM} and machine.modes[cp.MANIFEST] == 0o600
    assert machine.healthy


def test_a_kubelet_that_does_nothing_is_waited_for_only_so_long() -> None:
    machine = FakeMachine(KUBEADM)
    machine.kubelet_works = False
    with pytest.raises(NotInEffect, match=r"no new process with this configuration was started after 120 s"):
        apply(machine)
    assert state(machine)[cp.MANIFEST] == KUBEADM


def test_the_old_process_proves_nothing() -> None:
    """Only a process that is younger than the manifest counts, even where its flags are as they should be."""
    machine = FakeMachine(KUBEADM)
    apply(machine)
    changed = make_plan(Options(True, sc.Extender(EXTENDER.url, 10)), cp.observe(machine, ask=machine.ask))
    machine.kubelet_works = False
    with pytest.raises(NotInEffect, match="no new process"):
        apply(machine, changed)


def test_healthy_for_a_moment_isnt_healthy() -> None:
    machine = FakeMachine(KUBEADM)
    flicker = iter([200, 200, 0] * 400)

    def ask(url: str) -> int:
        return next(flicker) if cp.CONFIG in machine.files[cp.MANIFEST] else machine.ask(url)

    planned = plan(machine)
    with pytest.raises(NotInEffect, match="it isn't healthy after 120 s"):
        Apply(machine, 120, ask, machine.sleep, machine.now).run(
            replacements(list(planned.files)), Proof(planned.config, planned.urls)
        )
    assert state(machine) == {cp.MANIFEST: KUBEADM}


def test_both_failing_is_said_and_the_way_back_is_kept() -> None:
    machine = FakeMachine(KUBEADM)
    planned = plan(machine)
    machine.refuses = lambda m: 'err="no etcd"'
    with pytest.raises(
        NotInEffect, match=r"with the old one, which is back in place, it doesn't come up either .*no etcd"
    ):
        apply(machine, planned)
    assert machine.files[cp.MANIFEST] == KUBEADM and cp.PENDING in machine.files
    machine.refuses = lambda m: ""
    apply(machine)
    assert cp.PENDING not in machine.files and plan(machine).plan.empty


def test_a_manifest_that_changed_meanwhile_isnt_overwritten() -> None:
    machine = FakeMachine(KUBEADM)
    planned = plan(machine)
    machine.put(cp.MANIFEST, KUBEADM + "# new\n", 0o600)
    with pytest.raises(ShareError, match="was changed while"):
        apply(machine, planned)
    assert not [one for one in machine.log if one.startswith(("write", "mv"))]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("refused", [False, True], ids=["good", "bad"])
@pytest.mark.parametrize("at", range(1, 16))
def test_a_run_killed_anywhere_is_finished_by_the_next(at: int, refused: bool) -> None:
    machine = FakeMachine(KUBEADM, bad if refused else lambda m: "")
    count = 0
    write, run, sleep = machine.write, machine.run, machine.sleep

    def step() -> None:
        nonlocal count
        count += 1
        if count == at:
            raise Killed

    machine.write = lambda *args, **kw: (step(), write(*args, **kw))[1]  # type: ignore[method-assign]
    machine.run = lambda *args, **kw: (step(), run(*args, **kw))[1]  # type: ignore[method-assign]
    machine.sleep = lambda seconds: (step(), sleep(seconds))[1]  # type: ignore[method-assign]
    with pytest.raises(Killed):
        apply(machine)
    machine.write, machine.run, machine.sleep = write, run, sleep  # type: ignore[method-assign]
    for _second in range(20):
        machine.sleep(1)
    planned = plan(machine)
    if refused:
        with pytest.raises(NotInEffect, match="runs with the old one again"):
            apply(machine, planned)
        assert {path for path in state(machine) if path != cp.STAGED} == {cp.MANIFEST}
        assert machine.files[cp.MANIFEST] == KUBEADM and machine.healthy
    else:
        apply(machine, planned)
        assert cp.PENDING not in machine.files
        assert plan(machine).plan.empty


def test_unhealthy_with_nothing_to_put_back() -> None:
    machine = FakeMachine(KUBEADM)
    apply(machine)
    machine._stop()
    machine.kubelet_works = False
    planned = plan(machine)
    assert planned.files == () and not planned.plan.empty
    with pytest.raises(NotInEffect, match=r"^kube-scheduler isn't healthy"):
        apply(machine, planned)


def test_the_module_needs_a_plan() -> None:
    with pytest.raises(BadInput, match="action plugin"):
        work({"plan": None, "timeout": 1}, FakeMachine(KUBEADM))


# --------------------------------------------------------------------------- the look


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("    - --config=/a/b\n", "/a/b"),
        ('args: ["--kubeconfig=/x", "--config=/a/b"]', "/a/b"),
        ("- --config\n    - /a/b\n", "/a/b"),
        ('["--config", "/a/b"]', "/a/b"),
        ("# - --config=/a/b\n- --kubeconfig=/c\n- --authorization-kubeconfig=/d\n", ""),
    ],
)
def test_flag(text: str, value: str) -> None:
    assert cp.flag(text, "config") == value


@pytest.mark.parametrize(
    ("manifest", "url"),
    [
        (KUBEADM, "https://127.0.0.1:10259/healthz"),
        (manifests.FULL, "https://127.0.0.1:10260/healthz"),
        (KUBEADM.replace("--bind-address=127.0.0.1", "--bind-address=::"), "https://[::1]:10259/healthz"),
    ],
)
def test_health_url(manifest: str, url: str) -> None:
    assert cp.health_url(manifest) == url


def test_what_is_seen() -> None:
    machine = FakeMachine(KUBEADM)
    seen = cp.observe(machine, ask=machine.ask)
    assert seen["manifest"] == KUBEADM and seen["health"] == 200 and seen["hostname"] == "cp1"
    assert seen["running"] == [{"pid": machine.pid, "config": ""}] and not seen["pending"]
    bare = FakeMachine("")
    del bare.files[cp.MANIFEST]
    seen = cp.observe(bare, ask=lambda url: pytest.fail("asked"))
    assert seen["manifest"] is None and seen["health"] == 0 and seen["running"] == []


def test_another_file_can_be_asked_for() -> None:
    machine = FakeMachine(manifests.WITH_CONFIG)
    machine.put("/srv/scheduler/config.yaml", "mine", 0o644)
    assert cp.observe(machine, ask=machine.ask)["config"] is None
    assert cp.observe(machine, "/srv/scheduler/config.yaml", machine.ask)["config"] == "mine"


def test_last_words() -> None:
    error = '2026 stderr F E1121 09:07 run.go:72] "command failed" err="x"\n'
    log = f"2026 stderr F I1121 fine\n{error}2026 stderr F I1121 bye\n"
    assert last_words(log) == 'E1121 09:07 run.go:72] "command failed" err="x"'
    assert last_words("t s F a\nt s F b\n") == "a | b"


def test_replacement_rows() -> None:
    assert replacements([{"path": "/a", "before": "", "after": None}]) == [Replacement("/a", "", None)]
