# SPDX-License-Identifier: GPL-3.0-or-later
"""What becomes of kube-scheduler's manifest."""

from __future__ import annotations

import hashlib
import typing as t

import manifests
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as sc
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_plan import (
    ANNOTATION,
    CONTAINER,
    Options,
    OtherFile,
    make_plan,
)

EXTENDER = sc.Extender("http://127.0.0.1:12345/gpushare-scheduler", 30)
PRESENT = Options(present=True, extender=EXTENDER)
ABSENT = Options(present=False, extender=EXTENDER)


def seen(manifest: str | None, **changes: t.Any) -> dict[str, t.Any]:
    named = cp.flag(manifest or "", "config")
    return {
        "manifest_path": cp.MANIFEST,
        "manifest": manifest,
        "config_path": named,
        "config": None,
        "ours": None,
        "running": [{"pid": 1, "config": named}],
        "health": 200,
        "pending": False,
        "hostname": "cp1",
        "embedded": "",
        **changes,
    }


def after(planned: t.Any, before: dict[str, t.Any]) -> dict[str, t.Any]:
    """What the machine shows when a plan has been carried out."""
    texts = {row["path"]: row["after"] for row in planned.files}
    manifest = texts.get(cp.MANIFEST, before["manifest"])
    named = cp.flag(manifest, "config")
    ours = texts.get(cp.CONFIG, before["ours"])
    config = texts.get(before["config_path"], before["config"]) if before["config"] is not None else ours
    path = before["config_path"] if before["config"] is not None else named
    return seen(manifest, ours=ours, config=config, config_path=path, running=[{"pid": 2, "config": named}])


@pytest.mark.parametrize("minor", [19, 20, 22, 23, 25, 28, 29, 31, 32, 34, 36])
def test_kubeadms_manifest_of_every_version(minor: int) -> None:
    manifest = manifests.kubeadm(minor)
    planned = make_plan(PRESENT, seen(manifest))
    assert [row["path"] for row in planned.files] == [cp.CONFIG, cp.MANIFEST], "the manifest last"
    text = planned.files[1]["after"]
    old = manifest.splitlines()
    assert [line for line in text.splitlines() if line in old][: len(old)] and not set(old) - set(text.splitlines())
    pod = yaml.safe_load(text)
    [container] = pod["spec"]["containers"]
    assert f"--config={cp.CONFIG}" in container["command"]
    assert {"mountPath": cp.FOLDER, "name": "kubegpu-share", "readOnly": True} in container["volumeMounts"]
    assert {"name": "kubegpu-share", "hostPath": {"path": cp.FOLDER, "type": "Directory"}} in pod["spec"]["volumes"]
    sha256 = hashlib.sha256(planned.files[0]["after"].encode()).hexdigest()
    assert pod["metadata"]["annotations"] == {ANNOTATION: sha256}
    assert planned.config == cp.CONFIG
    paths = ("/livez", "/readyz") if minor >= 31 else ("/healthz",)
    assert planned.urls == tuple(f"https://127.0.0.1:10259{path}" for path in paths)

    then = after(planned, seen(manifest))
    assert make_plan(PRESENT, then).plan.empty
    back = make_plan(ABSENT, then)
    assert [row["path"] for row in back.files] == [cp.MANIFEST, cp.CONFIG], "nothing refers to a file that is gone"
    assert back.files[0]["after"] == manifest, "to the byte"
    assert back.files[1]["after"] is None and back.config == ""
    assert make_plan(ABSENT, after(back, then)).plan.empty


def test_a_manifest_in_another_style() -> None:
    planned = make_plan(PRESENT, seen(manifests.FULL))
    text = planned.files[1]["after"]
    for comment in ("# our own manifest", "# who", "# flags", "# the kubeconfig", "# end of the volumes"):
        assert comment in text
    container = yaml.safe_load(text)["spec"]["containers"][1]
    assert container["command"] == ["kube-scheduler"] and container["args"][-1] == f"--config={cp.CONFIG}"
    config = yaml.safe_load(planned.files[0]["after"])
    assert config["enableProfiling"] is False and config["clientConnection"]["qps"] == 75.0
    assert planned.urls == ("https://127.0.0.1:10260/livez", "https://127.0.0.1:10260/readyz")
    then = after(planned, seen(manifests.FULL))
    assert make_plan(PRESENT, then).plan.empty
    # Its lists stand in differently, which ruamel.yaml can't keep: what differs is whitespace, and only that.
    assert (
        make_plan(ABSENT, then).files[0]["after"].split()
        == manifests.FULL.replace("[ ", "[").replace(" ]", "]").split()
    )


def users(**changes: t.Any) -> dict[str, t.Any]:
    return seen(
        manifests.WITH_CONFIG, config_path="/srv/scheduler/config.yaml", config=manifests.USERS_CONFIG, **changes
    )


def test_a_scheduler_that_has_a_configuration_keeps_it() -> None:
    planned = make_plan(PRESENT, users())
    assert [row["path"] for row in planned.files] == ["/srv/scheduler/config.yaml", cp.MANIFEST]
    assert planned.config == "/etc/scheduler/config.yaml"
    manifest = planned.files[1]["after"]
    assert cp.FOLDER not in manifest and ANNOTATION in manifest
    then = after(planned, users())
    assert make_plan(PRESENT, then).plan.empty
    back = make_plan(ABSENT, then)
    assert [row["after"] for row in back.files] == [manifests.USERS_CONFIG, manifests.WITH_CONFIG]


def test_what_wasnt_put_in_isnt_taken_out() -> None:
    own = manifests.USERS_CONFIG.replace("http://127.0.0.1:9000", EXTENDER.url)
    assert make_plan(ABSENT, users(running=[]) | {"config": own}).plan.empty


def test_a_path_in_the_container_isnt_one_on_the_machine() -> None:
    with pytest.raises(OtherFile) as caught:
        make_plan(PRESENT, seen(manifests.WITH_CONFIG, config="something else"))
    assert caught.value.path == "/srv/scheduler/config.yaml"


def test_a_changed_configuration_starts_the_scheduler_again() -> None:
    then = after(make_plan(PRESENT, seen(manifests.kubeadm(36))), seen(manifests.kubeadm(36)))
    planned = make_plan(Options(True, sc.Extender(EXTENDER.url, 10)), then)
    assert len(planned.files) == 2
    old, new = (
        yaml.safe_load(text)["metadata"]["annotations"] for text in (then["manifest"], planned.files[1]["after"])
    )
    assert old != new


def test_half_of_ours_is_completed() -> None:
    """As after a kubeadm upgrade that kept the flag but lost the volume, or a hand that changed the mount."""
    done = make_plan(PRESENT, seen(manifests.kubeadm(36)))
    whole, ours = done.files[1]["after"], done.files[0]["after"]
    broken = whole.replace(
        f"  - hostPath:\n      path: {cp.FOLDER}\n      type: Directory\n    name: kubegpu-share\n", ""
    )
    broken = broken.replace("mountPath: /etc/kubernetes/kubegpu-share", "mountPath: /elsewhere")
    assert broken != whole
    text = make_plan(PRESENT, seen(broken, ours=ours)).files[0]["after"]
    assert yaml.safe_load(text) == yaml.safe_load(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"running": []}, "not running with this configuration"),
        ({"running": [{"pid": 1, "config": ""}]}, "not running with this configuration"),
        ({"health": 0}, "not healthy"),
        ({"pending": True}, "an earlier run was cut short"),
    ],
)
def test_right_files_and_a_scheduler_that_isnt(changes: dict[str, t.Any], words: str) -> None:
    then = after(make_plan(PRESENT, seen(manifests.kubeadm(36))), seen(manifests.kubeadm(36)))
    planned = make_plan(PRESENT, {**then, **changes})
    assert planned.files == ()
    assert [(one.header, one.before) for one in planned.plan.changes] == [(CONTAINER, f"{words}\n")]


def test_absent_minds_nothing_but_a_run_cut_short() -> None:
    assert make_plan(ABSENT, seen(None)).plan.empty
    assert make_plan(ABSENT, seen(manifests.kubeadm(36), running=[], health=0)).plan.empty
    assert not make_plan(ABSENT, seen(manifests.kubeadm(36), pending=True)).plan.empty


KUBEADM = manifests.kubeadm(36)


@pytest.mark.parametrize(
    ("manifest", "changes", "words"),
    [
        (None, {}, "scheduler_mode: static_pod needs /etc/kubernetes/manifests/kube-scheduler.yaml"),
        (None, {"embedded": "k3s"}, "this machine has none \\(it runs k3s\\)"),
        ("a: [\n", {}, "kube-scheduler.yaml, line 2, can't be parsed"),
        (KUBEADM.replace("    name: kube-scheduler\n", "    name: other\n"), {}, "has no container kube-scheduler"),
        (KUBEADM.replace(":v1.36.3", ":main"), {}, "scheduler_version:"),
        (KUBEADM.replace(":v1.36.3", ":v1.18.9"), {}, "scheduler_mode: .*Policy file only"),
        (KUBEADM.replace("--leader-elect=true", "--policy-config-file=/p"), {}, "has --policy-config-file"),
        (KUBEADM.replace("--leader-elect=true", "--config=/nowhere/c"), {}, r"--config=/nowhere/c isn't in a folder"),
        (manifests.WITH_CONFIG, {"config_path": "/srv/scheduler/config.yaml"}, "config.yaml, which .* isn't there"),
    ],
)
def test_refused(manifest: str | None, changes: dict[str, t.Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make_plan(PRESENT, seen(manifest, **changes))
