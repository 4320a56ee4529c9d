# SPDX-License-Identifier: GPL-3.0-or-later
"""What becomes of daemon.json, judged by every real dockerd that can check a file."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest
import real_dockerd
from ansible_collections.kubegpu.share.plugins.module_utils import _docker
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._docker_plan import Planned, make_plan

PATH = "/etc/docker/daemon.json"
BINARY = "/usr/bin/nvidia-container-runtime"
PRESENT = Wanted(True, True, BINARY, True, False)
AVAILABLE = Wanted(True, False, BINARY, False, False)
ABSENT = Wanted(False, True, BINARY, True, False)


def docker(text: str | None, **changes: t.Any) -> dict[str, t.Any]:
    return {
        "version": "27.3.1",
        "config_path": PATH,
        "text": text,
        "flags": {},
        "default_runtime": "runc",
        "runtimes": {"runc": "runc"},
        "cgroup_driver": "systemd",
        "live_restore": False,
        "containers": 0,
        "rootless": "",
        "service_active": True,
        "answers": True,
        "error": "",
        "was": None,
        "ours": False,
        "pending": False,
        "operator": False,
        **changes,
    }


def after(planned: Planned) -> str | None:
    [row] = planned.files
    return t.cast("str | None", row["after"])


def with_ours(observed: dict[str, t.Any], planned: Planned, **changes: t.Any) -> dict[str, t.Any]:
    """The node after the plan was carried out."""
    tree = json.loads((after(planned) or "{}").lstrip("\ufeff"))
    return {
        **observed,
        "text": after(planned),
        "default_runtime": tree.get("default-runtime", "runc"),
        "runtimes": {"runc": "runc", **{name: one.get("path", "") for name, one in tree["runtimes"].items()}},
        "was": {"text": observed["text"], "untouched": True},
        "ours": True,
        **changes,
    }


FILES = {
    "no file": None,
    "empty": "",
    "object": "{}",
    "Debian's": '{\n  "exec-opts": ["native.cgroupdriver=systemd"],\n  "log-driver": "json-file"\n}\n',
    "features of the user": '{"features": {"buildkit": true, "containerd-snapshotter": true}}',
    "runtimes null": '{"runtimes": null}\n',
    "another runtime": '{"runtimes": {"kata": {"runtimeType": "io.containerd.kata.v2"}}, "default-runtime": "kata"}',
    "nvidia with arguments": '{"runtimes": {"nvidia": {"path": "/opt/old", "runtimeArgs": ["--debug"]}}}',
    "nvidia as a shim": (
        '{"runtimes": {"nvidia": {"runtimeType": "io.containerd.runc.v2", "options": {"BinaryName": "/o"}}}}'
    ),
    "all there": json.dumps(
        {"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": BINARY}}, "features": {"cdi": True}}
    ),
    "tabs, CRLF, no final newline": '{\r\n\t"labels" : [ "a=b" ]\r\n}',
    "byte order mark": '\ufeff{ "shutdown-timeout": 15 }',
}


@pytest.mark.parametrize("text", FILES.values(), ids=list(FILES))
@pytest.mark.parametrize("wanted", [PRESENT, AVAILABLE], ids=["default", "available"])
def test_there_and_back_again(text: str | None, wanted: Wanted, tmp_path: Path) -> None:
    observed = docker(text)
    planned = make_plan(wanted, observed)
    if not planned.files:
        assert text == FILES["all there"]
        return
    new = after(planned)
    assert new is not None
    tree = json.loads(new.lstrip("\ufeff"))
    assert tree["runtimes"]["nvidia"]["path"] == BINARY
    assert tree.get("default-runtime") == (
        "nvidia" if wanted.default else json.loads((text or "{}").lstrip("\ufeff") or "{}").get("default-runtime")
    )
    assert planned.plan.changes[-1].header == _docker.UNIT
    for binary in real_dockerd.binaries():
        (tmp_path / "daemon.json").write_text(new)
        assert real_dockerd.validate(binary, tmp_path / "daemon.json") == (True, "configuration OK")
    there = with_ours(observed, planned)
    assert make_plan(wanted, there).plan.empty, "a second run changes nothing"
    if text is None:
        assert make_plan(ABSENT, there).files[0]["after"] is None
    else:
        assert after(make_plan(ABSENT, there)) == text, "taken out again, to the byte"


def test_the_users_arguments_stay() -> None:
    tree = json.loads(after(make_plan(PRESENT, docker(FILES["nvidia with arguments"]))) or "")
    assert tree["runtimes"]["nvidia"] == {"path": BINARY, "runtimeArgs": ["--debug"]}


def test_features_of_the_user_stay() -> None:
    tree = json.loads(after(make_plan(PRESENT, docker(FILES["features of the user"]))) or "")
    assert tree["features"] == {"buildkit": True, "containerd-snapshotter": True, "cdi": True}


def test_an_old_docker_knows_no_cdi() -> None:
    assert "features" not in (after(make_plan(PRESENT, docker("{}", version="24.0.9"))) or "")


def test_cdi_waits_for_a_restart_that_stops_nothing() -> None:
    assert make_plan(PRESENT, docker("{}")).restart is True
    assert make_plan(PRESENT, docker("{}", containers=3, live_restore=True)).restart is True
    planned = make_plan(PRESENT, docker("{}", containers=3))
    assert planned.restart is False and "would have stopped 3 running container(s)" in planned.warnings[0]
    assert make_plan(PRESENT, docker("{}", version="20.10.24", containers=3)).warnings == ()


def test_a_file_changed_since_loses_only_ours() -> None:
    before = '{"default-runtime": "kata", "labels": ["a=b"]}'
    observed = docker(before)
    there = with_ours(observed, make_plan(PRESENT, observed))
    there["text"] = there["text"].replace('"a=b"', '"a=c"')
    there["was"]["untouched"] = False
    assert after(make_plan(ABSENT, there)) == before.replace("a=b", "a=c")
    # What the user has set otherwise since is his.
    there["text"] = there["text"].replace('"default-runtime": "nvidia"', '"default-runtime": "crun"')
    assert json.loads(after(make_plan(ABSENT, there)) or "")["default-runtime"] == "crun"


def test_a_file_of_ours_that_got_a_users_key_stays() -> None:
    observed = docker(None)
    there = with_ours(observed, make_plan(PRESENT, observed))
    there["text"] = there["text"].replace("{\n", '{\n    "debug": true,\n', 1)
    there["was"]["untouched"] = False
    assert json.loads(after(make_plan(ABSENT, there)) or "") == {"debug": True}


def test_no_longer_the_default() -> None:
    observed = docker('{"default-runtime": "kata"}\n')
    there = with_ours(observed, make_plan(PRESENT, observed))
    assert json.loads(after(make_plan(AVAILABLE, there)) or "")["default-runtime"] == "kata"
    there["was"]["untouched"] = False
    assert json.loads(after(make_plan(AVAILABLE, there)) or "")["default-runtime"] == "kata"


def test_what_isnt_ours_stays() -> None:
    """Made by nvidia-ctk: nothing on the node says that it is ours."""
    observed = docker(FILES["all there"], default_runtime="nvidia", runtimes={"nvidia": BINARY})
    assert make_plan(ABSENT, observed).plan.empty


def test_a_daemon_that_hasnt_read_its_file() -> None:
    observed = docker(FILES["all there"])
    planned = make_plan(PRESENT, observed)
    assert planned.files == () and [one.header for one in planned.plan.changes] == [_docker.UNIT]
    stopped = docker(FILES["all there"], service_active=False, answers=False, default_runtime="", runtimes={})
    assert make_plan(PRESENT, stopped).plan.changes[0].before == "running not at all\n"
    assert make_plan(ABSENT, stopped).plan.empty


@pytest.mark.parametrize(
    ("observed", "words"),
    [
        (None, "runtime_name: Docker isn't installed"),
        (docker('{"a": 1,}'), "daemon.json, line 1, can't be parsed (a comma stands before the closing })"),
        (docker('{"runtimes": []}'), "daemon.json: runtimes isn't an object"),
        (docker('{"a": "\ufffd"}'), "isn't UTF-8"),
        (docker("", version="20.10.24"), "is empty, with which Docker 20.10.24 doesn't start"),
        (docker("\ufeff{}", version="20.10.24"), "byte order mark, with which Docker 20.10.24 doesn't start"),
        (
            docker("{}", rootless="/run/user/1000/docker.sock"),
            "Docker runs rootless on this node (/run/user/1000/docker",
        ),
        (docker("{}", operator=True), "NVIDIA's GPU Operator configures Docker"),
        (docker("{}", runtimes={"nvidia": "/usr/local/nvidia/toolkit/nvidia-container-runtime"}), "GPU Operator"),
        (
            docker("{}", error="unable to configure: x"),
            "Docker can't read its own configuration: unable to configure: x",
        ),
        (docker("{}", answers=False), "'docker info' has no answer"),
        (
            docker(
                "{}",
                flags={
                    "default-runtime": {
                        "values": ["runc"],
                        "file": "/etc/systemd/system/docker.service.d/override.conf",
                    }
                },
            ),
            "/etc/systemd/system/docker.service.d/override.conf starts dockerd with --default-runtime=runc",
        ),
    ],
)
def test_refused_in_a_sentence(observed: dict[str, t.Any] | None, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        make_plan(PRESENT, observed)
    assert words in str(refused.value)


def test_a_flag_that_says_nvidia_isnt_repeated_in_the_file() -> None:
    flags = {
        "default-runtime": {"values": ["nvidia"], "file": "x"},
        "add-runtime": {"values": ["nvidia=/o"], "file": "x"},
    }
    tree = json.loads(after(make_plan(PRESENT, docker("{}", flags=flags))) or "")
    assert "default-runtime" not in tree and tree["runtimes"]["nvidia"]["path"] == BINARY


def test_taking_out_where_there_is_no_docker() -> None:
    assert make_plan(ABSENT, None).plan.empty


# --------------------------------------------------------------------------- the daemon's own word, secrets


def test_what_docker_says() -> None:
    found = _docker.read_info(
        json.dumps(
            {
                "ServerVersion": "27.3.1",
                "DefaultRuntime": "nvidia",
                "Runtimes": {"io.containerd.runc.v2": {"path": "runc"}, "nvidia": {"path": BINARY}, "kata": {}},
                "CgroupDriver": "systemd",
                "LiveRestoreEnabled": True,
                "ContainersRunning": 2,
                "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"],
            }
        )
    )
    assert found is not None and found.state == ("nvidia", {"nvidia": BINARY, "kata": ""})
    assert (found.cgroup_driver, found.live_restore, found.containers, found.rootless) == ("systemd", True, 2, True)
    assert _docker.shortcomings(found, PRESENT) == []
    assert _docker.read_info('{"ServerErrors": ["no"], "ServerVersion": ""}') is None and _docker.read_info("") is None


def test_credentials_are_masked_and_come_back() -> None:
    text = (
        '{"proxies": {"http-proxy": "http://user:hunter2@proxy:3128"}, "log-opts": {"splunk-token": "hunter3"},\n'
        ' "registry-mirrors": ["https://m.example"], "dns": ["10.0.0.1"]}'
    )
    shown = _docker.mask(text)
    assert "hunter" not in shown and "https://m.example" in shown and "proxy:3128" in shown
    json.loads(shown)
    assert _docker.unmask(shown, text) == text
    planned = make_plan(PRESENT, docker(shown))
    assert "hunter2@proxy" in _docker.unmask(after(planned) or "", text)


@pytest.mark.parametrize(
    "text",
    [
        r'{"proxies": {"http-proxy": "http:\/\/u:hunter2@p"}}',
        '{"proxies": {"https-proxy": "u:hunter2@proxy:3128"}}',
        '{"registry-mirrors": ["http://u:hunter2/hunter3@h", "https://u:hunter4@hunter5@h/x"]}',
        '{"HTTP-Proxy": "http://u:hunter2@h", "https://me:hunter-token@h": "y", "log-opts": {"a-token": "hunter2"}}',
    ],
)
def test_credentials_however_written_are_masked_and_come_back(text: str) -> None:
    shown = _docker.mask(text)
    assert "hunter" not in shown and "kubegpu-share-masked-1" in shown
    json.loads(shown)
    assert _docker.unmask(shown, text) == text


def test_a_stopgap_says_what_the_file_leaves_out() -> None:
    none = _docker.Flags()
    assert json.loads(_docker.telling('{"runtimes": null}', none)) == {"runtimes": {}, "default-runtime": "runc"}
    assert json.loads(_docker.telling(None, none)) == {"runtimes": {}, "default-runtime": "runc"}
    assert _docker.needs_telling('{"default-runtime": "x"}', none)
    assert _docker.needs_telling('{"runtimes": {"x": {}}}', none)
    assert not _docker.needs_telling('{"default-runtime": "x", "runtimes": {"x": {}}}', none)


def test_a_stopgap_doesnt_contradict_a_flag() -> None:
    flag = _docker.Flags("kata")
    assert json.loads(_docker.telling(None, flag)) == {"runtimes": {}}
    assert not _docker.needs_telling('{"runtimes": {"x": {}}}', flag) and _docker.needs_telling("{}", flag)
