# SPDX-License-Identifier: GPL-3.0-or-later
"""kubeadm's own configuration and its patches, validated by the real kubeadm."""

from __future__ import annotations

import copy
import json
import re
import typing as t
from pathlib import Path

import manifests
import pytest
import real_kubeadm
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import kubeadm as kubeadm_config
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import kubeadm_edit
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.constants import (
    ANNOTATION,
    CONFIG,
    FOLDER,
    POLICY,
)
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.static_pod_plan import (
    HOST_FOLDER,
    MOUNT,
    VOLUME,
    Stamp,
    StaticPod,
)

FLAG = f"--config={CONFIG}"
SHA256 = "ab" * 32
OURS = {"name": VOLUME, "hostPath": FOLDER, "mountPath": FOLDER, "readOnly": True, "pathType": "Directory"}


edit = kubeadm_edit.cluster_configuration


def stored(version: str, kubernetes: str, scheduler: str = "scheduler: {}\n") -> str:
    """Return the configuration that kubeadm stores: sorted, with all defaults."""
    arguments, timeout = "  - name: authorization-mode\n    value: Node,RBAC\n", ""
    if version not in ("v1beta4", "v1"):
        arguments, timeout = "    authorization-mode: Node,RBAC\n", "  timeoutForControlPlane: 4m0s\n"
    dns = "dns:\n  type: CoreDNS\n" if version in ("v1beta1", "v1beta2") else "dns: {}\n"
    return (
        f"apiServer:\n  extraArgs:\n{arguments}{timeout}"
        f"apiVersion: kubeadm.k8s.io/{version}\ncertificatesDir: /etc/kubernetes/pki\nclusterName: kubernetes\n"
        f"controllerManager: {{}}\n{dns}etcd:\n  local:\n    dataDir: /var/lib/etcd\n"
        f"imageRepository: registry.k8s.io\nkind: ClusterConfiguration\nkubernetesVersion: {kubernetes}\n"
        "networking:\n  dnsDomain: cluster.local\n  podSubnet: 10.244.0.0/16\n  serviceSubnet: 10.96.0.0/12\n"
        f"{scheduler}"
    )


USERS_MAP = """\
scheduler:
  extraArgs:
    bind-address: 0.0.0.0 # for the metrics
    profiling: "false"
  extraVolumes:
  - hostPath: /etc/ssl/scheduler
    mountPath: /etc/ssl/scheduler
    name: tls
"""
USERS_LIST = """\
scheduler:
  extraArgs:
  - name: v
    value: "2"
  # twice is allowed here
  - {name: vmodule, value: a=1}
  extraVolumes: []
"""

FORMS = [
    ("v1beta1", "v1.17.3", "scheduler: {}\n", "policy-config-file"),
    ("v1beta2", "v1.18.20", "scheduler: {}\n", "policy-config-file"),
    ("v1beta2", "v1.21.1", USERS_MAP, "config"),
    ("v1beta2", "v1.21.1", "", "config"),
    ("v1beta3", "v1.25.0", "scheduler:\n  extraArgs: {}\n", "config"),
    ("v1beta3", "v1.36.3", "scheduler: {}\n", "config"),
    ("v1beta3", "v1.36.3", USERS_MAP, "config"),
    ("v1beta4", "v1.36.3", "scheduler: {}\n", "config"),
    ("v1beta4", "v1.36.3", USERS_LIST, "config"),
    ("v1beta4", "v1.36.3", "scheduler: null\n", "config"),
    ("v1beta4", "v1.37.2", "scheduler: {}\n", "config"),
    ("v1beta4", "v1.37.2", USERS_LIST, "config"),
    ("v1beta4", "v1.37.2", "scheduler: null\n", "config"),
    ("v1", "v1.37.2", "scheduler: {}\n", "config"),
    ("v1", "v1.37.2", USERS_LIST, "config"),
]


def test_users_volume_of_our_name_stays() -> None:
    theirs = USERS_MAP.replace("name: tls", f"name: {VOLUME}")
    text = stored("v1beta3", "v1.36.3", theirs)
    done = edit(text, present=True)
    assert done.kept and yaml.safe_load(done.text)["scheduler"]["extraVolumes"] == [
        *yaml.safe_load(theirs)["scheduler"]["extraVolumes"],
        {**OURS, "name": f"{VOLUME}-1"},
    ]
    assert edit(done.text, present=True).text == done.text and edit(done.text, present=False).text == text


@pytest.mark.parametrize(("version", "kubernetes", "scheduler", "flag"), FORMS)
def test_each_version_edited_and_undone(version: str, kubernetes: str, scheduler: str, flag: str) -> None:
    text = stored(version, kubernetes, scheduler)
    done = edit(text, present=True)
    assert done.kept and bool(done.message) == (int(kubernetes.split(".")[1]) < 25), "upgrades drop those"
    before, after = yaml.safe_load(text), yaml.safe_load(done.text)
    given = after["scheduler"]["extraArgs"]
    file = POLICY if flag == "policy-config-file" else CONFIG
    if version in ("v1beta4", "v1"):
        assert given.pop() == {"name": flag, "value": file}
    else:
        assert given.pop(flag) == file
    assert after["scheduler"]["extraVolumes"].pop() == OURS
    theirs = before.get("scheduler") or {}
    for one in ("extraArgs", "extraVolumes"):
        assert (after["scheduler"].pop(one) or None) == (theirs.pop(one, None) or None)
    assert {**after, "scheduler": None} == {**before, "scheduler": None}
    assert edit(done.text, present=True).text == done.text, "twice is once"
    assert edit(done.text, present=False).text == text, "to the byte"
    assert edit(text, present=False).text == text


@pytest.mark.parametrize(
    ("version", "kubernetes", "scheduler"),
    [form[:3] for form in FORMS if form[:2] == ("v1beta4", real_kubeadm.VERSION)],
)
def test_real_kubeadm_renders_our_manifest(version: str, kubernetes: str, scheduler: str, tmp_path: Path) -> None:
    text = stored(version, kubernetes, scheduler)
    done = edit(text, present=True).text
    assert real_kubeadm.complaint(done, tmp_path) == real_kubeadm.complaint(text, tmp_path) == ""
    before, after = real_kubeadm.manifest(tmp_path, text), real_kubeadm.manifest(tmp_path, done)
    # What kubeadm writes for us is what we write, so that only the annotation is missing.
    ours = StaticPod(before)
    ours.mount()
    assert _sorted(yaml.safe_load(ours.text())) == _sorted(yaml.safe_load(after))
    again = StaticPod(after)
    again.mount()
    assert again.text() == after
    again.restore()
    assert yaml.safe_load(again.text()) == yaml.safe_load(before)


def _sorted(pod: JsonObject) -> JsonObject:
    """kubeadm sorts its flags and volumes."""
    pod = copy.deepcopy(pod)
    [container] = pod["spec"]["containers"]
    container["command"].sort()
    container["volumeMounts"].sort(key=lambda one: str(one["name"]))
    pod["spec"]["volumes"].sort(key=lambda one: str(one["name"]))
    return pod


def test_real_kubeadm_refuses_invalid_configuration(tmp_path: Path) -> None:
    mapped = edit(stored("v1beta3", "v1.36.3"), present=True).text
    assert "extraArgs" in real_kubeadm.complaint(mapped.replace("v1beta3", "v1beta4"), tmp_path)
    assert "old API spec" in real_kubeadm.complaint(mapped, tmp_path), "1.36 is the last release that reads v1beta3"


@pytest.mark.parametrize("scheduler", ["scheduler: {}\n", USERS_LIST])
def test_real_kubeadm_takes_the_experimental_version(scheduler: str, tmp_path: Path) -> None:
    """kubeadm 1.37 reads v1 where it is allowed to, and stores v1beta4."""
    text = stored("v1", real_kubeadm.VERSION, scheduler)
    assert real_kubeadm.complaint(edit(text, present=True).text, tmp_path) == ""


def test_converted_v1beta4_configuration_is_recognised() -> None:
    """An upgrade to 1.31 turns v1beta3 into v1beta4, sorted anew."""
    later = "scheduler:\n  extraArgs:\n  - name: config\n    value: " + CONFIG + "\n  extraVolumes:\n"
    later += "".join(f"  {'-' if key == 'hostPath' else ' '} {key}: {json.dumps(OURS[key])}\n" for key in sorted(OURS))
    text = stored("v1beta4", "v1.31.0", later)
    assert edit(text, present=True).text == text
    assert yaml.safe_load(edit(text, present=False).text).get("scheduler") in (None, {})


def test_users_config_flag_is_kept() -> None:
    own = "scheduler:\n  extraArgs:\n    config: /etc/kubernetes/own.yaml\n"
    text = stored("v1beta3", "v1.29.0", own)
    done = edit(text, present=True)
    assert done.text == text and done.kept
    machines = {name: kubeadm_edit.ExtenderFile("config", "/etc/kubernetes/own.yaml") for name in ("cp1", "cp2")}
    assert edit(text, True, "auto", machines) == done
    assert done.message.endswith("kubeadm-config has --config=/etc/kubernetes/own.yaml of its own, which kubeadm keeps")
    # Ours of an earlier time goes.
    ours = edit(stored("v1beta3", "v1.29.0"), present=True).text
    both = ours.replace(f"{{config: {CONFIG}}}", "{policy-config-file: /etc/p.json}")
    assert both != ours
    scheduler = yaml.safe_load(edit(both, present=True).text)["scheduler"]
    assert scheduler == {"extraArgs": {"policy-config-file": "/etc/p.json"}}


def test_policy_is_replaced_by_configuration() -> None:
    text = stored("v1beta3", "v1.22.4", USERS_MAP)
    policy = edit(text, present=True, wanted="policy")
    assert "1.23 reads no policy file" in policy.message
    assert f"policy-config-file: {POLICY}" in policy.text
    config = edit(policy.text, present=True)
    assert config.text == edit(text, present=True).text and "policy" not in config.message


def test_changed_entries_of_ours_are_repaired() -> None:
    done = edit(stored("v1beta4", "v1.36.3", USERS_LIST), present=True).text
    broken = done.replace("readOnly: true", "readOnly: false").replace("scheduler.yaml", "old.yaml")
    assert broken != done
    assert edit(broken, present=True).text == done
    assert edit(broken, present=False).text == stored("v1beta4", "v1.36.3", USERS_LIST)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (stored("v1alpha3", "v1.13.0"), "holds a kubeadm.k8s.io/v1alpha3, and only v1beta1,"),
        (stored("v1beta5", "v1.40.0"), "holds a kubeadm.k8s.io/v1beta5"),
        ("kind: ClusterConfiguration\n", "has no apiVersion, and only v1beta1,"),
        ('{"a": 1\n', r"ClusterConfiguration, line [12], can't be parsed as JSON, because it begins with a brace \("),
        ("a: [\n", r"ClusterConfiguration, line 2, can't be parsed"),
        (stored("v1beta3", "latest"), "the kubernetesVersion 'latest', which isn't a version of Kubernetes"),
        (stored("v1beta3", "v1.29.0", "scheduler: 1\n"), "line 20: scheduler has an unexpected type"),
        (stored("v1beta3", "v1.29.0", "scheduler: {extraArgs: 1}\n"), "scheduler.extraArgs has an unexpected type"),
        (stored("v1beta3", "v1.29.0", "scheduler: {extraArgs: []}\n"), "scheduler.extraArgs has an unexpected type"),
        (stored("v1beta4", "v1.36.3", "scheduler: {extraArgs: {}}\n"), "scheduler.extraArgs has an unexpected type"),
        (stored("v1beta4", "v1.36.3", "scheduler: {extraVolumes: [1]}\n"), "extraVolumes has an unexpected type"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=rf"^ConfigMap kube-system/kubeadm-config.*{words}") as caught:
        edit(text, present=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kubernetes", "words"),
    [
        ("v1.18.20", "1.23 reads no policy file: .* once the cluster is 1.19 or later, and before .* to 1.23$"),
        ("v1.19.1", "1.23 doesn't read v1beta1, .* for 1.19: .* is 1.22 or later, and before .* to 1.23$"),
        ("v1.21.1", "1.23 doesn't read v1beta1, .* for 1.21: .* is 1.22 or later, and before .* to 1.23$"),
        ("v1.22.9", "1.28 doesn't read v1beta2, .* for 1.22: .* is 1.23 or later, and before .* to 1.28$"),
        ("v1.23.3", "1.29 doesn't read v1beta3, .* for 1.23: .* is 1.25 or later, and before .* to 1.29$"),
        ("v1.24.3", "1.29 doesn't read v1beta3, .* for 1.24: .* is 1.25 or later, and before .* to 1.29$"),
        ("v1.25.0", "^$"),
    ],
)
def test_upgrades_that_drop_our_file_are_reported(kubernetes: str, words: str) -> None:
    done = edit(stored("v1beta3", kubernetes), present=True)
    assert done.kept and re.search(words, done.message), done.message


# --------------------------------------------------------------------------- machines

OURS_CONFIG, OURS_POLICY = kubeadm_edit.ExtenderFile("config", CONFIG), kubeadm_edit.ExtenderFile("policy", POLICY)
MINE = kubeadm_edit.ExtenderFile("config", "/etc/mine.yaml")
NAMED = "scheduler:\n  extraArgs:\n    config: /etc/mine.yaml\n"


@pytest.mark.parametrize(("file", "flag"), [(OURS_CONFIG, "config"), (OURS_POLICY, "policy-config-file")])
def test_file_common_to_all_machines_is_written(file: kubeadm_edit.ExtenderFile, flag: str) -> None:
    machines = {"cp1": file, "cp2": file}
    done = edit(stored("v1beta2", "v1.20.5"), True, "auto", machines)
    assert done.kept and list(yaml.safe_load(done.text)["scheduler"]["extraArgs"]) == [flag]


@pytest.mark.parametrize(
    ("scheduler", "machines", "words"),
    [
        ("", {"cp1": MINE, "cp2": MINE}, "on cp1, cp2 has --config=/etc/mine.yaml, which isn't in .* is lost"),
        ("", {"cp1": OURS_CONFIG, "cp2": MINE}, "on cp2 has --config=/etc/mine.yaml, which isn't"),
        ("", {"cp1": OURS_CONFIG, "cp2": OURS_POLICY}, "some of them have a policy file and others"),
        ("", {"cp1": kubeadm_edit.ExtenderFile("policy", "/p")}, "on cp1 has --policy-config-file=/p, which"),
        (NAMED, {"cp1": MINE, "cp2": OURS_CONFIG}, "gives .* --config=/etc/mine.yaml, and on cp2 it has --conf"),
    ],
)
def test_differing_machines_leave_kubeadm_config_unchanged(scheduler: str, machines: JsonObject, words: str) -> None:
    text = stored("v1beta2", "v1.20.5", scheduler)
    done = edit(text, True, "auto", machines)
    assert not done.kept and done.text == text and re.search(words, done.message), done.message
    # Ours of an earlier time goes.
    if not scheduler:
        ours = edit(text, True).text
        assert edit(ours, True, "auto", machines).text == text


def test_unobserved_machine_changes_nothing() -> None:
    ours = edit(stored("v1beta3", "v1.29.0"), True).text
    for text in (ours, stored("v1beta3", "v1.29.0")):
        done = edit(text, True, "auto", {"cp1": OURS_CONFIG, "cp2": None})
        assert done.text == text and not done.kept and done.message.endswith("this run has no facts of cp2")


# --------------------------------------------------------------------------- patches


@pytest.mark.parametrize("configured", [False, True])
def test_real_kubeadm_applies_the_patches(configured: bool, tmp_path: Path) -> None:
    """Without and with an equal configuration."""
    folder = tmp_path / "patches"
    folder.mkdir()
    files = kubeadm_edit.patch_files(SHA256, FLAG)
    assert set(files) == set(kubeadm_edit.PATCHES)
    for name, text in files.items():
        (folder / name).write_text(text)
    # The user's own, before and after ours.
    (folder / "kube-scheduler0+merge.yaml").write_text("metadata: {annotations: {owner: platform}}\n")
    (folder / "kube-scheduler99+json.json").write_text(
        '[{"op": "add", "path": "/spec/containers/0/command/-", "value": "--v=2"}]\n'
    )
    text = stored("v1beta4", "v1.36.3")
    if configured:
        text = edit(text, present=True).text
    after = real_kubeadm.manifest(tmp_path, text, folder)
    pod = yaml.safe_load(after)
    [container] = pod["spec"]["containers"]
    assert pod["metadata"]["annotations"] == {ANNOTATION: SHA256, "owner": "platform"}
    assert container["command"].count(FLAG) == (2 if configured else 1) and container["command"][-1] == "--v=2"
    assert container["volumeMounts"].count(MOUNT) == 1 and pod["spec"]["volumes"].count(HOST_FOLDER) == 1
    # Nothing is left for us to do: the upgraded scheduler needn't start again.
    ours = StaticPod(after)
    ours.mount()
    ours.annotate(Stamp(SHA256))
    assert ours.text() == after
    ours.restore()
    expected = StaticPod(ours.text())
    assert expected.flags == {**StaticPod(manifests.kubeadm(36)).flags, "v": "2"}
    left = yaml.safe_load(ours.text())
    assert left["spec"]["volumes"] == yaml.safe_load(manifests.kubeadm(36))["spec"]["volumes"]


def test_annotation_patch(tmp_path: Path) -> None:
    [(name, text)] = list(kubeadm_edit.patch_files(SHA256).items())
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / name).write_text(text)
    ours = StaticPod(real_kubeadm.expected())
    ours.annotate(Stamp(SHA256))
    assert yaml.safe_load(real_kubeadm.manifest(tmp_path, patches=tmp_path / "p")) == yaml.safe_load(ours.text())


# --------------------------------------------------------------------------- module


class FakeKube:
    """One ConfigMap whose version rises with each change, as the API server does it."""

    def __init__(self, text: str | None) -> None:
        data = {kubeadm_config.KEY: text, "x": "y"}
        self.map = None if text is None else {"metadata": {"resourceVersion": "7"}, "data": data}
        self.meanwhile: t.Callable[[], None] = lambda: None
        self.refusal: ShareError | None = None

    def change(self, text: str) -> None:
        assert self.map is not None
        self.map["data"][kubeadm_config.KEY] = text
        self.map["metadata"]["resourceVersion"] += "1"

    def get(self, ref: t.Any) -> JsonObject | None:
        assert ref == kubeadm_config.CONFIG_MAP
        return copy.deepcopy(self.map)

    def patch(self, ref: t.Any, body: JsonObject, subresource: str = "") -> JsonObject:
        self.meanwhile()
        if self.refusal is not None:
            raise self.refusal
        assert self.map is not None and set(body) == {"metadata", "data"} and set(body["data"]) == {kubeadm_config.KEY}
        if body["metadata"]["resourceVersion"] != self.map["metadata"]["resourceVersion"]:
            raise ShareError(f"{ref}: the API server refuses it: the object has been modified (409)")
        self.change(body["data"][kubeadm_config.KEY])
        return self.map


def test_written_text_is_verified() -> None:
    kube = FakeKube("old")
    kube.change = lambda text: None  # type: ignore[method-assign]
    with pytest.raises(NotInEffect, match="doesn't have the text that was written"):
        kubeadm_config.work({"plan": {"text": "new", "resource_version": "7"}}, t.cast(t.Any, kube))
