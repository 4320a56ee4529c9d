# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugins plan on the controller and execute only non-empty plans on the machine."""

from __future__ import annotations

import io
import json
import tarfile
import typing as t
from pathlib import Path
from types import SimpleNamespace

import manifests
import pytest
from ansible_collections.kubegpu.share.plugins.action import container_runtime, image_import, kube_scheduler
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.constants import CONFIG
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler.lease import Lease, SchedulerLease
from observations import static_pod


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


def machine(manifest: str | None = manifests.kubeadm(36), **changes: t.Any) -> t.Any:
    return static_pod(manifest, **changes)


def test_check_mode_executes_nothing_and_shows_the_diff() -> None:
    made = action(kube_scheduler, {"observed": machine()}, check=True)
    result = made.run()
    assert result["changed"] is True and made.executed == []
    assert [one["after_header"] for one in result["diff"]] == [CONFIG, cp.MANIFEST]


def test_machine_gets_the_plan_without_the_observation() -> None:
    made = action(kube_scheduler, {"observed": machine(), "timeout": 60})
    result = made.run()
    [(name, args)] = made.executed
    assert name is None and set(args) == {"timeout", "plan"}
    assert [row["path"] for row in args["plan"]["files"]] == [CONFIG, cp.MANIFEST]
    assert args["plan"]["config"] == CONFIG and len(args["plan"]["urls"]) == 2
    assert result["changed"] is True and len(result["diff"]) == 2


def test_empty_plan_executes_nothing() -> None:
    made = action(kube_scheduler, {"observed": machine(), "state": "absent"})
    assert made.run() == {"changed": False, "diff": []} and made.executed == []


def test_refusal_fails_with_its_message() -> None:
    made = action(kube_scheduler, {"observed": machine(manifest=None)})
    result = made.run()
    assert result["failed"] and result["msg"].startswith("scheduler_mode: ") and made.executed == []
    assert "observed:" in action(kube_scheduler, {"observed": {"x": 1}}).run()["msg"]
    assert "observed:" in action(container_runtime, {"observed": {"x": 1}}).run()["msg"]


def test_file_behind_a_mount_is_observed() -> None:
    first = machine(manifest=manifests.WITH_CONFIG, config_path="/etc/scheduler/config.yaml")
    second = {**first, "config_path": "/srv/scheduler/config.yaml", "config": manifests.USERS_CONFIG}
    answers = {"kubegpu.share.control_plane_info": {"control_plane": second}}
    made = action(kube_scheduler, {"observed": first}, check=True, answers=answers)
    result = made.run()
    assert made.executed == [("kubegpu.share.control_plane_info", {"config_path": "/srv/scheduler/config.yaml"})]
    assert [one["after_header"] for one in result["diff"]] == [cp.MERGED, "/srv/scheduler/config.yaml", cp.MANIFEST]


class Leases:
    """A cluster's lease before the change, and the outcome of the wait for its renewal."""

    def __init__(self, holder: str = "cp1_old", outcome: str = "cp1_new") -> None:
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


def test_action_waits_for_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases()
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", leases)
    result = action(kube_scheduler, {"observed": machine(), "kubeconfig": "/k"}).run()
    assert result["lease"] == "cp1_new" and str(leases.asked[0]) == "Lease kube-system/kube-scheduler"
    assert leases.asked[1] == "cp1"


KUBECONFIG = {
    "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "a", "user": {"token": "very-secret"}}],
    "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    "current-context": "a",
}


@pytest.mark.parametrize("kubeconfig", ["/k", KUBECONFIG, None], ids=["path", "content", "default"])
@pytest.mark.parametrize("outcome", ["cp1_new", ""])
def test_kubeconfig_stays_on_the_controller(monkeypatch: pytest.MonkeyPatch, kubeconfig: t.Any, outcome: str) -> None:
    """Without one the lease is read with kubernetes.core's defaults."""
    leases = Leases(outcome=outcome)
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", leases)
    given = {} if kubeconfig is None else {"kubeconfig": kubeconfig}
    made = action(kube_scheduler, {"observed": machine(), "timeout": 60, **given})
    result = made.run()
    assert leases.kubeconfig == kubeconfig and bool(result.get("failed")) is not bool(outcome)
    assert len(made.executed) == (1 if outcome else 2)
    assert all(set(args) == {"timeout", "plan"} for _name, args in made.executed)
    assert "very-secret" not in json.dumps([result, made.executed])


def test_missing_kubeconfig_warns_about_the_unchecked_lease() -> None:
    made = action(kube_scheduler, {"observed": machine()})
    result = made.run()
    assert result["changed"] and not result.get("failed") and "lease" not in result
    [warning] = result["warnings"]
    assert "Lease kube-system/kube-scheduler isn't checked" in warning and "No configuration found" in warning
    made = action(kube_scheduler, {"observed": machine(), "kubeconfig": "/k"})
    result = made.run()
    assert result["failed"] and "No configuration found" in result["msg"] and made.executed == []
    assert action(kube_scheduler, {"observed": machine()}, check=True).run().keys() == {"changed", "diff"}


def test_invalid_kubeconfig_content_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", SchedulerLease)
    made = action(
        kube_scheduler, {"observed": machine(), "kubeconfig": {**KUBECONFIG, "current-context": "very-secret"}}
    )
    result = made.run()
    assert result["failed"] and "kubeconfig (variable gpu_kubeconfig)" in result["msg"] and made.executed == []
    assert "very-secret" not in json.dumps(result) and "********" in result["msg"]


def test_untaken_lease_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", Leases(outcome=""))
    made = action(kube_scheduler, {"observed": machine(), "kubeconfig": "/k"})
    result = made.run()
    assert result["failed"] and result["msg"].endswith("rolled back, kube-scheduler runs with the old configuration")
    there, back = (args["plan"] for _name, args in made.executed)
    assert [row["path"] for row in back["files"]] == [row["path"] for row in reversed(there["files"])]
    assert back["files"][0]["after"] == manifests.kubeadm(36) and back["config"] == ""
    answers = {"": {"failed": True, "msg": "no"}}
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", Leases(outcome=""))
    made = action(kube_scheduler, {"observed": machine(), "kubeconfig": "/k"}, answers=answers)
    assert made.run()["msg"] == "no", "the module's own failure is returned; it has rolled back itself"


def test_no_wait_without_leader_election(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases(outcome="")
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", leases)
    alone = manifests.kubeadm(36).replace("--leader-elect=true", "--leader-elect=false")
    result = action(kube_scheduler, {"observed": machine(manifest=alone), "kubeconfig": "/k"}).run()
    assert result["changed"] and not result.get("failed") and leases.asked == []


def server(**changes: t.Any) -> dict[str, t.Any]:
    observed = machine(manifest=None, kind="k3s", embedded="k3s", version="1.32.4+k3s1", running=[])
    observed["server"] = {
        "version": "1.32.4+k3s1",
        "unit": "k3s.service",
        "active": True,
        "data": "/var/lib/rancher/k3s",
        "settings": "/etc/rancher/k3s/config.yaml",
        "drop_in_path": "/etc/rancher/k3s/config.yaml.d/99-kubegpu-scheduler.yaml",
        "drop_in": None,
        "files": [],
        "flags": {"kube-scheduler-arg": [], "kube-scheduler-extra-mount": [], "disable-scheduler": []},
        "named": "",
        "stale": False,
    }
    return {**observed, **changes}


@pytest.mark.parametrize(("holder", "waited"), [("", False), ("server1_x", True)])
def test_k3s_waits_only_for_an_existing_lease(monkeypatch: pytest.MonkeyPatch, holder: str, waited: bool) -> None:
    leases = Leases(holder, "server1_y")
    monkeypatch.setattr(kube_scheduler, "SchedulerLease", leases)
    made = action(kube_scheduler, {"observed": server(), "kubeconfig": "/k"})
    result = made.run()
    assert result["changed"] and ("lease" in result) is waited
    [(_name, args)] = made.executed
    assert args["plan"]["kind"] == "k3s" and len(args["plan"]["files"]) == 2


def test_unreachable_api_server_fails_static_pods_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(Leases):
        def read(self) -> Lease:
            raise ShareError("the API server at x can't be reached")

    monkeypatch.setattr(kube_scheduler, "SchedulerLease", Away())
    made = action(kube_scheduler, {"observed": machine(), "kubeconfig": "/k"})
    result = made.run()
    assert result["failed"] and "can't be reached" in result["msg"] and made.executed == []
    made = action(kube_scheduler, {"observed": server(), "kubeconfig": "/k"})
    assert made.run()["changed"] and len(made.executed) == 1


def test_second_observation_without_result_fails() -> None:
    first = machine(manifest=manifests.WITH_CONFIG, config_path="/etc/scheduler/config.yaml")
    made = action(
        kube_scheduler, {"observed": first}, answers={"kubegpu.share.control_plane_info": {"control_plane": first}}
    )
    assert "the machine changed during its observation" in made.run()["msg"]
    assert len(made.executed) == 1


def test_missing_patches_are_observed() -> None:
    observed = machine(patches_dir="/p", patches={})
    made = action(
        kube_scheduler,
        {"observed": machine(), "patches_dir": "/p"},
        check=True,
        answers={"kubegpu.share.control_plane_info": {"control_plane": observed}},
    )
    result = made.run()
    assert made.executed == [("kubegpu.share.control_plane_info", {"patches_dir": "/p"})]
    assert len(result["diff"]) == 4 and result["diff"][-1]["after_header"] == cp.MANIFEST


def test_node_without_runtime_refused() -> None:
    node = {"runtimes": {"containerd": None}, "kubelet": None}
    result = action(container_runtime, {"observed": node}).run()
    assert result["failed"] and "runtime_name: no container runtime is installed" in result["msg"]
    result = action(container_runtime, {"observed": node, "runtime": "containerd"}).run()
    assert result["failed"] and "runtime_name: containerd isn't installed" in result["msg"]


# --------------------------------------------------------------------------- images


@pytest.fixture
def archive(tmp_path: Path) -> str:
    data = json.dumps([{"RepoTags": ["localhost/a:1"]}]).encode()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return str(tmp_path / "a.tar")


def test_present_image_executes_nothing(archive: str) -> None:
    args = {
        "reference": "localhost/a:1",
        "archive": archive,
        "sha256": "ab",
        "observed": {"images": {"localhost/a:1": "ab"}},
    }
    made = action(image_import, args)
    assert made.run()["changed"] is False and made.executed == []


def test_other_archive_is_transferred_and_removed(archive: str) -> None:
    args = {"reference": "localhost/a:1", "archive": archive, "observed": {"images": {"localhost/a:1": "old"}}}
    made = action(image_import, args)
    assert made.run()["changed"] is True
    [(_name, sent)] = made.executed
    assert sent["remote_path"] == "/tmp/x/" + Path(archive).name and len(sent["sha256"]) == 64
    assert made.transferred == [(archive, "/tmp/x/" + Path(archive).name)] and made.removed == ["/tmp/x"]


def test_unknown_image_state_is_queried_first(archive: str) -> None:
    args = {"reference": "localhost/a:1", "archive": archive, "observed": {"images": {}}}
    made = action(image_import, args, answers={"": {"changed": False, "diff": []}})
    assert made.run()["changed"] is False
    assert len(made.executed) == 1 and made.transferred == []


def test_failed_transfer_leaves_no_files(archive: str) -> None:
    args = {"reference": "localhost/a:1", "archive": archive, "observed": {"images": {"localhost/a:1": "old"}}}
    made = action(image_import, args)

    def fail(local: str, remote: str) -> None:
        raise RuntimeError("disk full")

    made._transfer_file = fail
    with pytest.raises(RuntimeError):
        made.run()
    assert made.removed == ["/tmp/x"]


def test_archive_without_the_image_refused_before_transfer(archive: str) -> None:
    made = action(image_import, {"reference": "localhost/b:1", "archive": archive}, check=True)
    result = made.run()
    assert result["failed"] and result["msg"].startswith("image_archive: ") and made.transferred == []
