# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugins plan on the controller and execute on the machine only what has to be done."""

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
from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp


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


@pytest.fixture(autouse=True)
def no_ansible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ansible.plugins.action import ActionBase

    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def machine(**changes: t.Any) -> dict[str, t.Any]:
    return {
        "manifest_path": cp.MANIFEST,
        "manifest": manifests.kubeadm(36),
        "config_path": "",
        "config": None,
        "ours": None,
        "running": [{"pid": 1, "config": ""}],
        "health": 200,
        "pending": False,
        "hostname": "cp1",
        "embedded": "",
        **changes,
    }


def test_check_mode_executes_nothing_and_shows_everything() -> None:
    made = action(kube_scheduler, {"observed": machine()}, check=True)
    result = made.run()
    assert result["changed"] is True and made.executed == []
    assert [one["after_header"] for one in result["diff"]] == [cp.CONFIG, cp.MANIFEST]


def test_the_machine_gets_the_plan_and_not_the_observation() -> None:
    made = action(kube_scheduler, {"observed": machine(), "timeout": 60})
    result = made.run()
    [(name, args)] = made.executed
    assert name is None and set(args) == {"timeout", "plan"}
    assert [row["path"] for row in args["plan"]["files"]] == [cp.CONFIG, cp.MANIFEST]
    assert args["plan"]["config"] == cp.CONFIG and len(args["plan"]["urls"]) == 2
    assert result["changed"] is True and len(result["diff"]) == 2


def test_nothing_to_do_executes_nothing() -> None:
    made = action(kube_scheduler, {"observed": machine(), "state": "absent"})
    assert made.run() == {"changed": False, "diff": []} and made.executed == []


def test_a_refusal_is_a_failure_in_one_sentence() -> None:
    made = action(kube_scheduler, {"observed": machine(manifest=None)})
    result = made.run()
    assert result["failed"] and result["msg"].startswith("scheduler_mode: ") and made.executed == []
    assert "observed:" in action(kube_scheduler, {"observed": {"x": 1}}).run()["msg"]
    assert "observed:" in action(container_runtime, {"observed": {"x": 1}}).run()["msg"]


def test_the_file_behind_a_mount_is_looked_at() -> None:
    first = machine(manifest=manifests.WITH_CONFIG, config_path="/etc/scheduler/config.yaml")
    second = {**first, "config_path": "/srv/scheduler/config.yaml", "config": manifests.USERS_CONFIG}
    answers = {"kubegpu.share.control_plane_info": {"control_plane": second}}
    made = action(kube_scheduler, {"observed": first}, check=True, answers=answers)
    result = made.run()
    assert made.executed == [("kubegpu.share.control_plane_info", {"config_path": "/srv/scheduler/config.yaml"})]
    assert [one["after_header"] for one in result["diff"]] == ["/srv/scheduler/config.yaml", cp.MANIFEST]


def test_a_node_without_containerd_is_refused() -> None:
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


def test_an_image_that_is_there_costs_nothing(archive: str) -> None:
    args = {
        "reference": "localhost/a:1",
        "archive": archive,
        "sha256": "ab",
        "observed": {"images": {"localhost/a:1": "ab"}},
    }
    made = action(image_import, args)
    assert made.run()["changed"] is False and made.executed == []


def test_another_archive_is_carried_over_and_removed(archive: str) -> None:
    args = {"reference": "localhost/a:1", "archive": archive, "observed": {"images": {"localhost/a:1": "old"}}}
    made = action(image_import, args)
    assert made.run()["changed"] is True
    [(_name, sent)] = made.executed
    assert sent["remote_path"] == "/tmp/x/" + Path(archive).name and len(sent["sha256"]) == 64
    assert made.transferred == [(archive, "/tmp/x/" + Path(archive).name)] and made.removed == ["/tmp/x"]


def test_an_image_that_wasnt_asked_for_is_looked_for_first(archive: str) -> None:
    args = {"reference": "localhost/a:1", "archive": archive, "observed": {"images": {}}}
    made = action(image_import, args, answers={"": {"changed": False, "diff": []}})
    assert made.run()["changed"] is False
    assert len(made.executed) == 1 and made.transferred == []


def test_a_failing_transfer_leaves_nothing_behind(archive: str) -> None:
    args = {"reference": "localhost/a:1", "archive": archive, "observed": {"images": {"localhost/a:1": "old"}}}
    made = action(image_import, args)

    def fail(local: str, remote: str) -> None:
        raise RuntimeError("no room")

    made._transfer_file = fail
    with pytest.raises(RuntimeError):
        made.run()
    assert made.removed == ["/tmp/x"]


def test_an_image_that_isnt_in_the_archive_is_refused_before_it_travels(archive: str) -> None:
    made = action(image_import, {"reference": "localhost/b:1", "archive": archive}, check=True)
    result = made.run()
    assert result["failed"] and result["msg"].startswith("image_archive: ") and made.transferred == []
