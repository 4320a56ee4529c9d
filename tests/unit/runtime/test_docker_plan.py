# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans for daemon.json, validated by the real dockerd programs of this machine."""

from __future__ import annotations

import json
import re
import typing as t
from pathlib import Path

import pytest
import real_dockerd
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import docker as runtime_docker
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.common import RuntimePlan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.docker_plan import make_plan
from corpus_others import Row, rows
from runtime_kit import ABSENT, BINARY, DAEMON_JSON, PRESENT, REPLACED, REPLACING, docker_state

# Not the default runtime, and CDI stays as it is.
AVAILABLE = Options(present=True, default=False, binary=BINARY, cdi=False)
ALL_SET = json.dumps({"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": BINARY}}, "features": {"cdi": True}})


def after(planned: RuntimePlan) -> str | None:
    [row] = planned.files
    return t.cast("str | None", row["after"])


def with_ours(observed: dict[str, t.Any], planned: RuntimePlan, **changes: t.Any) -> dict[str, t.Any]:
    """Return the state of the node with the plan applied."""
    tree = json.loads((after(planned) or "{}").lstrip("\ufeff"))
    return {
        **observed,
        "text": after(planned),
        "default_runtime": tree.get("default-runtime", "runc"),
        "runtimes": {"runc": "runc", **{name: runtime.get("path", "") for name, runtime in tree["runtimes"].items()}},
        "was": {"text": observed["text"], "untouched": True},
        "ours": True,
        **changes,
    }


@pytest.mark.parametrize("row", [row for row in rows("docker") if not row.refused], ids=lambda row: row.name)
def test_addition_and_removal_of_a_runtime_that_isnt_the_default(row: Row, tmp_path: Path) -> None:
    """The corpus' own test covers the default runtime."""
    text = row.texts[DAEMON_JSON].decode() if row.texts else None
    observed = docker_state(text)
    planned = make_plan(AVAILABLE, observed)
    if not planned.files:
        assert '"path": "/usr/bin/nvidia-container-runtime"' in str(text)
        return
    new = after(planned)
    assert new is not None
    tree = json.loads(new.lstrip("\ufeff"))
    old = json.loads((text or "").lstrip("\ufeff").strip() or "{}")
    assert tree["runtimes"]["nvidia"] == {**(old.get("runtimes") or {}).get("nvidia", {}), "path": BINARY}
    assert {name: value for name, value in tree.items() if name != "runtimes"} == {
        name: value for name, value in old.items() if name != "runtimes"
    }
    assert planned.plan.changes[-1].header == runtime_docker.UNIT
    for binary in real_dockerd.binaries():
        (tmp_path / "daemon.json").write_bytes(new.encode())
        assert real_dockerd.validate(binary, tmp_path / "daemon.json") == (True, "configuration OK")
    there = with_ours(observed, planned)
    assert make_plan(AVAILABLE, there).plan.empty, "a second run changes nothing"
    if text is None:
        assert make_plan(ABSENT, there).files[0]["after"] is None
    else:
        assert after(make_plan(ABSENT, there)) == text, "the original bytes are restored"


def test_an_nvidia_runtime_given_as_a_shim_is_valid(tmp_path: Path) -> None:
    text = '{"runtimes": {"nvidia": {"runtimeType": "io.containerd.runc.v2", "options": {"BinaryName": "/o"}}}}'
    new = after(make_plan(PRESENT, docker_state(text))) or ""
    assert json.loads(new)["runtimes"]["nvidia"]["path"] == BINARY
    (tmp_path / "daemon.json").write_text(new)
    for binary in real_dockerd.binaries():
        assert real_dockerd.validate(binary, tmp_path / "daemon.json") == (True, "configuration OK")


def test_cdi_waits_for_a_harmless_restart() -> None:
    assert make_plan(PRESENT, docker_state("{}")).restart is True
    assert make_plan(PRESENT, docker_state("{}", containers=3, live_restore=True)).restart is True
    planned = make_plan(PRESENT, docker_state("{}", containers=3))
    assert planned.restart is False and "would stop 3 running container(s)" in planned.warnings[0]
    older = make_plan(PRESENT, docker_state("{}", version="24.0.9", containers=3))
    assert older.warnings == () and "features" not in str(after(older))


def test_removal_from_a_file_changed_since() -> None:
    before = '{"default-runtime": "kata", "labels": ["a=b"]}'
    observed = docker_state(before)
    there = with_ours(observed, make_plan(REPLACING, observed))
    there["text"] = there["text"].replace('"a=b"', '"a=c"')
    there["was"]["untouched"] = False
    assert after(make_plan(ABSENT, there)) == before.replace("a=b", "a=c")
    # A later change by the user stays.
    there["text"] = there["text"].replace('"default-runtime": "nvidia"', '"default-runtime": "crun"')
    assert json.loads(after(make_plan(ABSENT, there)) or "")["default-runtime"] == "crun"


def test_a_new_file_with_a_users_key_is_kept() -> None:
    observed = docker_state(None)
    there = with_ours(observed, make_plan(PRESENT, observed))
    there["text"] = there["text"].replace("{\n", '{\n    "debug": true,\n', 1)
    there["was"]["untouched"] = False
    assert json.loads(after(make_plan(ABSENT, there)) or "") == {"debug": True}


def test_no_longer_the_default() -> None:
    observed = docker_state('{"default-runtime": "kata"}\n')
    there = with_ours(observed, make_plan(REPLACING, observed))
    assert json.loads(after(make_plan(AVAILABLE, there)) or "")["default-runtime"] == "kata"
    there["was"]["untouched"] = False
    assert json.loads(after(make_plan(AVAILABLE, there)) or "")["default-runtime"] == "kata"


def test_foreign_settings_are_kept() -> None:
    """As nvidia-ctk writes them: without a record of ours on the node."""
    observed = docker_state(ALL_SET, default_runtime="nvidia", runtimes={"nvidia": BINARY})
    assert make_plan(ABSENT, observed).plan.empty


def test_an_outdated_daemon_is_reloaded() -> None:
    observed = docker_state(ALL_SET)
    planned = make_plan(PRESENT, observed)
    assert planned.files == () and [change.header for change in planned.plan.changes] == [runtime_docker.UNIT]
    stopped = docker_state(ALL_SET, service_active=False, answers=False, default_runtime="", runtimes={})
    assert make_plan(PRESENT, stopped).plan.changes[0].before == "running not at all\n"
    assert make_plan(ABSENT, stopped).plan.empty


@pytest.mark.parametrize(
    ("observed", "message"),
    [
        (docker_state('{"a": 1,}'), "daemon.json, line 1, can't be parsed (a comma stands before the closing })"),
        (docker_state('{"runtimes": []}'), "daemon.json: runtimes isn't an object"),
        (docker_state('{"a": "\ufffd"}'), "isn't UTF-8"),
        (docker_state("", version="20.10.24"), "is empty, and Docker 20.10.24 doesn't start"),
        (docker_state("\ufeff{}", version="20.10.24"), "byte order mark, with which Docker 20.10.24 doesn't start"),
        (docker_state("{}", rootless="/run/x"), "Docker runs rootless on this node (/run/x)"),
        (docker_state("{}", operator=True), "NVIDIA's GPU Operator configures Docker"),
        (docker_state("{}", runtimes={"nvidia": "/usr/local/nvidia/toolkit/nvidia-container-runtime"}), "GPU Operator"),
        (docker_state("{}", error="no: x"), "Docker can't read its own configuration: no: x"),
        (docker_state("{}", answers=False), "'docker info' doesn't answer"),
        (
            docker_state("{}", flags={"default-runtime": {"values": ["runc"], "file": "/etc/x.conf"}}),
            "/etc/x.conf starts dockerd with --default-runtime=runc",
        ),
    ],
)
def test_refusals(observed: dict[str, t.Any], message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        make_plan(PRESENT, observed)


SHIM = '{"default-runtime": "safe", "runtimes": {"safe": {"runtimeType": "io.containerd.runsc.v1"}}}'


@pytest.mark.parametrize(
    ("observed", "name"),
    [
        (docker_state('{"default-runtime": "kata"}'), "kata (Kata)"),
        (docker_state('{"default-runtime": "io.containerd.kata.v2"}'), "io.containerd.kata.v2 (Kata)"),
        (docker_state(SHIM), "safe (gVisor)"),
        (docker_state('{"default-runtime": "s", "runtimes": {"s": {"Path": "/usr/bin/sysbox-runc"}}}'), "s (Sysbox)"),
        (docker_state('{"default-runtime": "s"}', runtimes={"s": "/usr/local/bin/runsc"}), "s (gVisor)"),
        (docker_state('{"default-runtime": "crun"}'), "crun"),
    ],
)
def test_a_users_default_runtime_is_replaced_only_where_the_user_allows_it(
    observed: dict[str, t.Any], name: str
) -> None:
    message = f"runtime_replace_default: Docker's default runtime is {name}, and pods"
    with pytest.raises(BadInput, match=re.escape(message)):
        make_plan(PRESENT, observed)
    kept = json.loads(observed["text"])["default-runtime"]
    assert json.loads(after(make_plan(AVAILABLE, observed)) or "")["default-runtime"] == kept
    there = with_ours(observed, make_plan(REPLACING, observed))
    there["runtimes"] = {**observed["runtimes"], **there["runtimes"]}
    assert json.loads(there["text"])["default-runtime"] == "nvidia" and make_plan(REPLACING, there).files == ()
    again = make_plan(PRESENT, there)
    assert again.plan.empty and REPLACED.format("Docker", name) in again.warnings[0]
    assert make_plan(REPLACING, there).warnings == make_plan(AVAILABLE, there).warnings == ()
    # As the message says.
    assert json.loads(after(make_plan(AVAILABLE, there)) or "")["default-runtime"] == kept
    assert make_plan(ABSENT, there).files


def test_crun_stays_where_nvidias_runtime_runs_it() -> None:
    observed = docker_state('{"default-runtime": "crun"}', low_level="/opt/bin/crun")
    assert json.loads(after(make_plan(PRESENT, observed)) or "")["default-runtime"] == "nvidia"


def test_runcs_own_shim_may_be_the_default() -> None:
    text = '{"default-runtime": "mine", "runtimes": {"mine": {"runtimeType": "io.containerd.runc.v2"}}}'
    assert json.loads(after(make_plan(PRESENT, docker_state(text))) or "")["default-runtime"] == "nvidia"


@pytest.mark.parametrize(
    "runtime", ['{"Path": "/opt/x"}', '{"path": "/opt/x", "PATH": "/opt/y"}', '{"Path": "/opt/x", "path": "/opt/y"}']
)
def test_go_ignores_the_case_of_a_runtimes_keys_and_the_last_one_wins(runtime: str) -> None:
    text = f'{{"runtimes": {{"nvidia": {runtime}}}}}'
    assert runtime_docker.runtimes_in(text).runtimes == {"nvidia": "/opt/y" if "/opt/y" in text else "/opt/x"}
    new = after(make_plan(PRESENT, docker_state(text)))
    assert runtime_docker.runtimes_in(new).runtimes == {"nvidia": BINARY}


def test_a_flag_with_nvidia_is_not_repeated_in_the_file() -> None:
    values = {"default-runtime": ["nvidia"], "add-runtime": ["nvidia=/o"]}
    flags = {name: {"values": value, "file": "x"} for name, value in values.items()}
    tree = json.loads(after(make_plan(PRESENT, docker_state("{}", flags=flags))) or "")
    assert "default-runtime" not in tree and tree["runtimes"]["nvidia"]["path"] == BINARY


def test_parse_docker_info() -> None:
    runtimes = {"io.containerd.runc.v2": {"path": "runc"}, "nvidia": {"path": BINARY}, "kata": {}}
    info = {"ServerVersion": "27.3.1", "DefaultRuntime": "nvidia", "Runtimes": runtimes, "CgroupDriver": "systemd"}
    info |= {"LiveRestoreEnabled": True, "ContainersRunning": 2, "SecurityOptions": ["name=seccomp", "name=rootless"]}
    found = runtime_docker.read_info(json.dumps(info))
    assert found is not None and found.state == ("nvidia", {"nvidia": BINARY, "kata": ""})
    assert (found.cgroup_driver, found.live_restore, found.containers, found.rootless) == ("systemd", True, 2, True)
    assert runtime_docker.unmet_requirements(found, PRESENT) == []
    for invalid in ('{"ServerErrors": ["no"], "ServerVersion": ""}', ""):
        assert runtime_docker.read_info(invalid) is None


def test_credentials_are_restored_in_a_changed_file() -> None:
    text = '{"proxies": {"http-proxy": "http://user:hunter2@proxy:3128"}, "registry-mirrors": ["https://m.example"]}'
    shown = runtime_docker.mask(text)
    assert "https://m.example" in shown and "proxy:3128" in shown
    planned = make_plan(PRESENT, docker_state(shown))
    assert "hunter2@proxy" in runtime_docker.unmask(after(planned) or "", text)


@pytest.mark.parametrize(
    "text",
    [
        '{"log-opts": {"splunk-token": "hunter3"}, "dns": ["10.0.0.1"]}',
        r'{"proxies": {"http-proxy": "http:\/\/u:hunter2@p"}}',
        '{"proxies": {"https-proxy": "u:hunter2@proxy:3128"}}',
        '{"registry-mirrors": ["http://u:hunter2/hunter3@h", "https://u:hunter4@hunter5@h/x"]}',
        '{"HTTP-Proxy": "http://u:hunter2@h", "https://me:hunter-token@h": "y", "log-opts": {"a-token": "hunter2"}}',
    ],
)
def test_credentials_of_any_spelling_are_masked_and_restored(text: str) -> None:
    shown = runtime_docker.mask(text)
    assert "hunter" not in shown and "kubegpu-share-masked-1" in shown
    json.loads(shown)
    assert runtime_docker.unmask(shown, text) == text


def test_the_temporary_file_sets_the_missing_keys() -> None:
    none, flag = runtime_docker.Flags(), runtime_docker.Flags("kata")
    for text in ('{"runtimes": null}', None):
        stock = {"runtimes": {}, "default-runtime": "runc"}
        assert json.loads(runtime_docker.with_stock_runtime(text, none)) == stock
    assert json.loads(runtime_docker.with_stock_runtime(None, flag)) == {"runtimes": {}}, "no contradiction of a flag"


@pytest.mark.parametrize(
    ("text", "flag", "keeps"),
    [
        ('{"default-runtime": "x"}', "", True),
        ('{"runtimes": {"x": {}}}', "", True),
        ('{"default-runtime": "x", "runtimes": {"x": {}}}', "", False),
        ('{"runtimes": {"x": {}}}', "kata", False),
        ("{}", "kata", True),
    ],
)
def test_a_reload_keeps_runtimes_that_the_file_lacks(text: str, flag: str, keeps: bool) -> None:
    assert runtime_docker.reload_keeps_runtime(text, runtime_docker.Flags(flag)) is keeps
