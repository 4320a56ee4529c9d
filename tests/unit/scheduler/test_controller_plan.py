# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugins plan on the controller and execute only non-empty plans on the machine."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import manifests
import pytest
from ansible_collections.kubegpu.share.plugins.action import container_runtime, image_import, kube_scheduler
from ansible_collections.kubegpu.share.plugins.module_utils._core.digest import digest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import kubeadm_edit
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.constants import CONFIG
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.lease import Lease, SchedulerLease
from fake_server import FakeServer
from kube_api import SECRET, kubeconfig
from observations import static_pod
from test_images import archive


def action(
    module: t.Any, args: dict[str, t.Any], check: bool = False, answers: dict[str, t.Any] | None = None
) -> t.Any:
    """An action plugin whose executions on the machine are noted in ``executed`` and answered."""
    made = object.__new__(module.ActionModule)
    made._task = SimpleNamespace(args=args, check_mode=check, diff=True, action="x")
    made.executed = []

    def execute(module_name: str | None = None, module_args: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        made.executed.append((module_name, module_args))
        return dict((answers or {}).get(module_name or "", {"changed": True}))

    made._execute_module = execute
    made.transferred = []
    made._make_tmp_path = lambda: "/tmp/x"
    made._connection = SimpleNamespace(
        _shell=SimpleNamespace(tmpdir="/tmp/x", join_path=lambda *parts: "/".join(parts))
    )
    made._transfer_file = lambda local, remote: made.transferred.append((local, remote))
    made._fixup_perms2 = lambda paths: None
    made.removed = []
    made._remove_tmp_path = made.removed.append
    return made


class NoCluster:
    """No cluster is named anywhere, as by kubernetes.core's defaults."""

    def __call__(self, kubeconfig: t.Any, ref: t.Any = None) -> t.NoReturn:
        raise BadInput("the default kubeconfig can't be used: No configuration found.")


@pytest.fixture(autouse=True)
def no_ansible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ansible.plugins.action import ActionBase

    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", NoCluster())


KUBEADM = manifests.kubeadm(36)
PATCHES = [f"/p/{name}" for name in kubeadm_edit.PATCHES]


def scheduled(observed: t.Any = None, check: bool = False, again: t.Any = None, **options: t.Any) -> t.Any:
    """Return the plugin ``kube_scheduler`` for this observation, and for ``again`` where it asks for another one."""
    answers = {"kubegpu.share.control_plane_info": {"control_plane": again}}
    return action(kube_scheduler, {"observed": observed or static_pod(KUBEADM), **options}, check, answers)


def test_check_mode_executes_nothing_and_shows_the_diff() -> None:
    made = scheduled(check=True)
    result = made.run()
    assert result["changed"] is True and made.executed == [] and result.keys() == {"changed", "diff"}
    assert [one["after_header"] for one in result["diff"]] == [CONFIG, cp.MANIFEST]


def test_empty_plan_executes_nothing() -> None:
    made = scheduled(state="absent")
    assert made.run() == {"changed": False, "diff": []} and made.executed == []


NO_RUNTIME = {"runtimes": {"containerd": None}, "kubelet": None}


@pytest.mark.parametrize(
    ("module", "args", "message"),
    [
        (kube_scheduler, {"observed": static_pod(None)}, "scheduler_mode: "),
        (kube_scheduler, {"observed": {"x": 1}}, "observed: "),
        (container_runtime, {"observed": {"x": 1}}, "observed: "),
        (container_runtime, {"observed": NO_RUNTIME}, "runtime_name: no container runtime is installed"),
        (container_runtime, {"observed": NO_RUNTIME, "runtime": "containerd"}, "runtime_name: containerd isn't inst"),
    ],
)
def test_refusal_fails_with_its_message(module: t.Any, args: dict[str, t.Any], message: str) -> None:
    made = action(module, args)
    result = made.run()
    assert result["failed"] and result["msg"].startswith(message) and made.executed == []


WITH_CONFIG = static_pod(manifests.WITH_CONFIG, config_path="/etc/scheduler/config.yaml")
USERS = {"config_path": "/srv/scheduler/config.yaml", "config": manifests.USERS_CONFIG}


@pytest.mark.parametrize(
    ("first", "more", "options", "paths"),
    [
        (WITH_CONFIG, USERS, {}, [cp.MERGED, "/srv/scheduler/config.yaml", cp.MANIFEST]),
        (static_pod(KUBEADM), {"patches_dir": "/p"}, {"patches_dir": "/p"}, [CONFIG, *PATCHES, cp.MANIFEST]),
    ],
    ids=["a file behind a mount", "patches"],
)
def test_what_is_missing_is_observed(first: t.Any, more: t.Any, options: t.Any, paths: list[str]) -> None:
    made = scheduled(first, check=True, again={**first, **more}, **options)
    result = made.run()
    [(name, asked)] = made.executed
    assert name == "kubegpu.share.control_plane_info" and len(asked) == 1 and asked.items() <= more.items()
    assert [one["after_header"] for one in result["diff"]] == paths


def test_second_observation_without_result_fails() -> None:
    made = scheduled(WITH_CONFIG, again=WITH_CONFIG)
    assert "the machine changed during its observation" in made.run()["msg"]
    assert len(made.executed) == 1


class Leases:
    """A cluster's lease before the change, and the outcome of the wait for its renewal; all actions use it."""

    def __init__(self, patch: pytest.MonkeyPatch, holder: str = "cp1_old", outcome: str = "cp1_new") -> None:
        patch.setattr(kube_scheduler, "SchedulerLease", self)
        self.holder, self.outcome = holder, outcome
        self.asked: list[t.Any] = []

    def __call__(self, kubeconfig: t.Any, ref: t.Any = None) -> Leases:
        self.kubeconfig = kubeconfig
        self.asked.append(ref)
        return self

    def read(self) -> Lease:
        return Lease(self.holder, "1")

    def wait_for_renewal(self, before: Lease, hostname: str, timeout: float) -> str:
        self.asked.append(hostname)
        if not self.outcome:
            raise NotInEffect("its lease isn't renewed")
        return self.outcome


@pytest.mark.parametrize("given", ["/k", kubeconfig("http://127.0.0.1:9"), None], ids=["path", "content", "default"])
@pytest.mark.parametrize("outcome", ["cp1_new", ""])
def test_kubeconfig_stays_on_the_controller(monkeypatch: pytest.MonkeyPatch, given: t.Any, outcome: str) -> None:
    """Without one the lease is read with kubernetes.core's defaults."""
    leases = Leases(monkeypatch, outcome=outcome)
    made = scheduled(timeout=60, **({} if given is None else {"kubeconfig": given}))
    result = made.run()
    assert leases.kubeconfig == given and bool(result.get("failed")) is not bool(outcome)
    assert outcome in ("", result.get("lease")) and len(result["diff"]) == 2
    assert [str(one) for one in leases.asked] == ["Lease kube-system/kube-scheduler", "cp1"]
    assert len(made.executed) == (1 if outcome else 2)
    assert all(set(args) == {"timeout", "plan"} for _name, args in made.executed)
    assert SECRET not in json.dumps([result, made.executed])


def test_missing_kubeconfig_warns_about_the_unchecked_lease() -> None:
    result = scheduled().run()
    assert result["changed"] and not result.get("failed") and "lease" not in result
    [warning] = result["warnings"]
    assert "Lease kube-system/kube-scheduler isn't checked" in warning and "No configuration found" in warning
    made = scheduled(kubeconfig="/k")
    result = made.run()
    assert result["failed"] and "No configuration found" in result["msg"] and made.executed == []


def test_all_warnings_of_a_run_are_shown() -> None:
    path = "/etc/kubernetes/kubescheduler-config.yaml"
    manifest = manifests.mounted(KUBEADM, f"--config={path}", path, path)
    [handover, lease] = scheduled(static_pod(manifest, config=manifests.USERS_CONFIG)).run()["warnings"]
    assert "kube_scheduler_extenders: [{urlPrefix:" in handover and "isn't checked" in lease


def test_invalid_kubeconfig_content_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", SchedulerLease)
    made = scheduled(kubeconfig={**kubeconfig("http://127.0.0.1:9"), "current-context": SECRET})
    result = made.run()
    assert result["failed"] and "kubeconfig (variable gpu_kubeconfig)" in result["msg"] and made.executed == []
    assert SECRET not in json.dumps(result) and "********" in result["msg"]


def test_untaken_lease_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    Leases(monkeypatch, outcome="")
    made = scheduled(kubeconfig="/k")
    result = made.run()
    assert result["failed"] and result["msg"].endswith("rolled back, kube-scheduler runs with the old configuration")
    there, back = (args["plan"] for _name, args in made.executed)
    assert [row["path"] for row in there["files"]] == [CONFIG, cp.MANIFEST] and len(there["urls"]) == 2
    assert [row["path"] for row in back["files"]] == [cp.MANIFEST, CONFIG]
    assert [row["after"] for row in back["files"]] == [KUBEADM, None]
    assert back["files"][0]["before"] == digest(there["files"][1]["after"])
    assert (there["config"], back["config"]) == (CONFIG, "")
    made = action(
        kube_scheduler,
        {"observed": static_pod(KUBEADM), "kubeconfig": "/k"},
        answers={"": {"failed": True, "msg": "no"}},
    )
    assert made.run()["msg"] == "no", "the module's own failure is returned; it has rolled back itself"


def test_no_wait_without_leader_election(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases(monkeypatch, outcome="")
    alone = KUBEADM.replace("--leader-elect=true", "--leader-elect=false")
    result = scheduled(static_pod(alone), kubeconfig="/k").run()
    assert result["changed"] and not result.get("failed") and leases.asked == []


def k3s() -> t.Any:
    return cp.observe(server := FakeServer("k3s"), ask=server.ask)


@pytest.mark.parametrize(("holder", "waited"), [("", False), ("server1_x", True)])
def test_k3s_waits_only_for_an_existing_lease(monkeypatch: pytest.MonkeyPatch, holder: str, waited: bool) -> None:
    Leases(monkeypatch, holder, "server1_y")
    made = scheduled(k3s(), kubeconfig="/k")
    result = made.run()
    assert result["changed"] and ("lease" in result) is waited
    [(_name, args)] = made.executed
    assert args["plan"]["kind"] == "k3s" and len(args["plan"]["files"]) == 2


def test_unreachable_api_server_fails_static_pods_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(Leases):
        def read(self) -> Lease:
            raise ShareError("the API server at x can't be reached")

    Away(monkeypatch)
    made = scheduled(kubeconfig="/k")
    result = made.run()
    assert result["failed"] and "can't be reached" in result["msg"] and made.executed == []
    made = scheduled(k3s(), kubeconfig="/k")
    assert made.run()["changed"] and len(made.executed) == 1


# --------------------------------------------------------------------------- images


NAME = "localhost/a:1"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return archive(tmp_path / "a.tar", manifest_json=[{"RepoTags": [NAME]}])


def imported(path: str, images: t.Any, reference: str = NAME, answers: t.Any = None, **options: t.Any) -> t.Any:
    args = {"reference": reference, "archive": path, "observed": {"images": images}, **options}
    return action(image_import, args, answers=answers)


def test_present_image_executes_nothing(path: str) -> None:
    made = imported(path, {NAME: "ab"}, sha256="ab")
    assert made.run()["changed"] is False and made.executed == []


def test_other_archive_is_transferred_and_removed(path: str) -> None:
    made = imported(path, {NAME: "old"})
    assert made.run()["changed"] is True
    [(_name, sent)] = made.executed
    assert sent["remote_path"] == "/tmp/x/a.tar" and len(sent["sha256"]) == 64
    assert made.transferred == [(path, "/tmp/x/a.tar")] and made.removed == ["/tmp/x"]


def test_unknown_image_state_is_queried_first(path: str) -> None:
    made = imported(path, {}, answers={"": {"changed": False, "diff": []}})
    assert made.run()["changed"] is False
    assert len(made.executed) == 1 and made.transferred == []


def test_failed_transfer_leaves_no_files(path: str) -> None:
    made = imported(path, {NAME: "old"})
    made._transfer_file = Mock(side_effect=RuntimeError("disk full"))
    with pytest.raises(RuntimeError):
        made.run()
    assert made.removed == ["/tmp/x"]


def test_archive_without_the_image_refused_before_transfer(path: str) -> None:
    made = imported(path, {}, "localhost/b:1")
    result = made.run()
    assert result["failed"] and result["msg"].startswith("image_archive: ") and made.transferred == []
