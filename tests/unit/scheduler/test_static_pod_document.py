# SPDX-License-Identifier: GPL-3.0-or-later
"""A corpus of manifests: edited, edited again, undone to the byte, and read by Kubernetes' own parser."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import typing as t
from pathlib import Path

import manifest_corpus
import manifests
import pytest
import real_kubeadm
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._control_plane import ANNOTATION
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._static_pod_document import VOLUME, StaticPod
from hypothesis import given, settings
from hypothesis import strategies as st

Json = dict[str, t.Any]

CORPUS = manifest_corpus.editable()
REFUSED = manifest_corpus.refused()
SHA256 = "0123456789abcdef" * 4
FLAG = f"--config={cp.CONFIG}"


def edited(text: str, sha256: str = SHA256) -> str:
    pod = StaticPod(text)
    if pod.flags().get("config", cp.CONFIG) == cp.CONFIG:
        pod.mount()
    pod.annotate(sha256)
    return pod.done()


def undone(text: str) -> str:
    pod = StaticPod(text)
    pod.restore()
    return pod.done()


def read(text: str) -> Json:
    """As PyYAML reads it, with tabs that Kubernetes takes for blanks."""
    if text.lstrip("\ufeff").startswith("{") and '"' in text:
        return t.cast(Json, json.loads(text))
    found = next(iter(yaml.safe_load_all(text.replace("\t", " "))))
    return t.cast(Json, json.loads(json.dumps(found, default=str)))


def scheduler(pod: Json) -> Json:
    return next(one for one in pod["spec"]["containers"] if one["name"] == "kube-scheduler")


def foreign(pod: Json) -> Json:
    """A pod without what is ours, judged by what Kubernetes means: an empty list is none."""
    pod = copy.deepcopy(pod)
    places: list[tuple[Json, str, t.Any]] = [
        (scheduler(pod), "command", lambda one: one != FLAG),
        (scheduler(pod), "args", lambda one: one != FLAG),
        (scheduler(pod), "volumeMounts", lambda one: one["name"] != VOLUME),
        (pod["spec"], "volumes", lambda one: one["name"] != VOLUME),
        (pod["metadata"], "annotations", lambda one: one != ANNOTATION),
    ]
    for holder, key, keep in places:
        old = holder.pop(key, None) or []
        new = (
            {one: old[one] for one in old if keep(one)} if isinstance(old, dict) else [one for one in old if keep(one)]
        )
        if new:
            holder[key] = new
    return pod


def by_kubernetes(text: str, folder: Path) -> Json:
    """A manifest as Kubernetes' parser reads it: kubectl does so without a cluster, as kubelet does."""
    kubectl = real_kubeadm.binary("kubectl")
    file = folder / ("judged.json" if text.startswith("{") else "judged.yaml")
    file.write_bytes(text.encode())
    done = subprocess.run(
        [kubectl, "label", "--local", "-o", "json", "-f", file, "judged=yes"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "KUBECONFIG": str(folder / "none")},
    )
    assert done.returncode == 0, done.stderr
    pod: Json = json.loads(done.stdout)
    del pod["metadata"]["labels"]["judged"]
    if not pod["metadata"]["labels"]:
        del pod["metadata"]["labels"]
    return pod


def test_the_corpus_is_one() -> None:
    assert len(CORPUS) >= 60 and len(set(CORPUS.values())) == len(CORPUS)


@pytest.mark.parametrize("name", CORPUS)
def test_edited_and_undone(name: str) -> None:
    text = CORPUS[name]
    done = edited(text)
    before, after = read(text), read(done)
    assert foreign(after) == foreign(before)
    assert after["metadata"]["annotations"][ANNOTATION] == SHA256
    container = scheduler(after)
    theirs = StaticPod(text).flags().get("config", cp.CONFIG) != cp.CONFIG
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    assert words.count(FLAG) == (0 if theirs else 1)
    volumes = [one for one in after["spec"].get("volumes") or [] if one["name"] == VOLUME]
    mounts = [one for one in container.get("volumeMounts") or [] if one["name"] == VOLUME]
    if not theirs:
        assert words[-1] == FLAG, "behind all others"
        assert volumes == [{"name": VOLUME, "hostPath": {"path": cp.FOLDER, "type": "Directory"}}]
        assert mounts == [{"name": VOLUME, "mountPath": cp.FOLDER, "readOnly": True}]
        assert StaticPod(done).flags()["config"] == cp.CONFIG
    # Every line that there was is there still, but for those that had brackets filled, or JSON that got a comma.
    lines = done.splitlines()
    rest = [line for line in text.splitlines() if line not in lines and line + "," not in lines]
    assert not [line for line in rest if not re.search(r"[\[\]{}~]|null|:$|\tabs$", line)], rest
    assert edited(done) == done, "twice is once"
    again = edited(done, SHA256[::-1])
    assert again != done and len(again) == len(done), "a new hash takes the old one's place"
    assert undone(again) == text == undone(done), "to the byte"
    assert undone(text) == text, "there is nothing of ours"


# kubectl, unlike kubelet, cuts a file at its dashes.
@pytest.mark.parametrize("name", [name for name in CORPUS if name != "directive"])
def test_kubernetes_reads_it_the_same(name: str, tmp_path: Path) -> None:
    before = by_kubernetes(CORPUS[name], tmp_path)
    after = by_kubernetes(edited(CORPUS[name]), tmp_path)
    assert foreign(after) == foreign(before)
    assert after["metadata"]["annotations"][ANNOTATION] == SHA256
    if StaticPod(CORPUS[name]).flags().get("config", cp.CONFIG) == cp.CONFIG:
        assert {"name": VOLUME, "hostPath": {"path": cp.FOLDER, "type": "Directory"}} in after["spec"]["volumes"]
        assert {"name": VOLUME, "mountPath": cp.FOLDER, "readOnly": True} in scheduler(after)["volumeMounts"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    text, words = REFUSED[name]
    sentence = rf"^/m\.yaml, {words}.*; it is left as it is$"
    with pytest.raises(BadInput, match=sentence) as caught:
        pod = StaticPod(text, "/m.yaml")
        pod.mount()
        pod.annotate(SHA256)
        pod.done()
    assert "\n" not in str(caught.value)


def test_kubeadms_own_manifest(tmp_path: Path) -> None:
    """What the others are written after."""
    assert real_kubeadm.manifest(tmp_path) == manifests.kubeadm(36)


@pytest.mark.parametrize(
    ("name", "path", "host"),
    [
        ("with-config", "/etc/scheduler/config.yaml", "/srv/scheduler/config.yaml"),
        ("config-in-two-words", "/etc/scheduler/./config.yaml", "/srv/scheduler/config.yaml"),
        ("kubespray", "/etc/kubernetes/kubescheduler-config.yaml", "/etc/kubernetes/kubescheduler-config.yaml"),
        ("image-entrypoint", "/etc/kubernetes/x/y", "/etc/kubernetes/x/y"),
    ],
)
def test_a_path_in_the_container_is_one_on_the_machine(name: str, path: str, host: str) -> None:
    assert StaticPod(CORPUS[name]).host_path(path) == host


def test_a_part_of_a_volume_and_what_is_no_folder_of_the_machine() -> None:
    text = manifests.WITH_CONFIG.replace(
        "      name: scheduler-config\n", "      name: scheduler-config\n      subPath: a/b\n"
    )
    assert StaticPod(text).host_path("/etc/scheduler/c") == "/srv/scheduler/a/b/c"
    for odd in (
        text.replace("subPath:", "subPathExpr:"),
        text.replace("hostPath:\n      path: /srv/scheduler", "configMap:\n      name: s"),
        text.replace("mountPath: /etc/scheduler\n", "mountPath: /etc/scheduler2\n"),
    ):
        with pytest.raises(
            BadInput, match=r"line 18: kube-scheduler's --config=/etc/scheduler/config.yaml isn't in a fo"
        ):
            StaticPod(odd).host_path("/etc/scheduler/config.yaml")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("two-containers", {"kubeconfig": "/etc/kubernetes/scheduler.conf", "leader-elect": "true"}),
        ("anchors", {"kubeconfig": "/etc/kubernetes/scheduler.conf", "leader-elect": ""}),
        ("config-in-two-words", {"config": "/etc/scheduler/config.yaml"}),
    ],
)
def test_flags(name: str, flags: dict[str, str]) -> None:
    assert flags.items() <= StaticPod(CORPUS[name]).flags().items()


def test_the_other_form_of_ours_goes_too() -> None:
    pod = StaticPod(CORPUS["kubeadm-1.20"])
    pod.mount(f"--policy-config-file={cp.FOLDER}/policy.json")
    assert f"    - --policy-config-file={cp.FOLDER}/policy.json\n" in pod.done()
    assert undone(pod.done()) == CORPUS["kubeadm-1.20"]
    # A user's file elsewhere stays, and so does what kubeadm wrote for us a second time.
    twice = edited(CORPUS["gpushare-policy-by-hand"]).replace(f"    - {FLAG}\n", f"    - {FLAG}\n    - {FLAG}\n")
    assert undone(twice) == CORPUS["gpushare-policy-by-hand"]


def test_what_others_changed_meanwhile_stays() -> None:
    done = edited(manifests.kubeadm(36))
    upgraded = done.replace(":v1.36.3", ":v1.36.6").replace("cpu: 100m", "cpu: 200m # more")
    upgraded = upgraded.replace(
        "      readOnly: true\n    - mountPath", "      readOnly: true\n    # ours below\n    - mountPath"
    )
    expected = manifests.kubeadm(36).replace(":v1.36.3", ":v1.36.6").replace("cpu: 100m", "cpu: 200m # more")
    expected = expected.replace("  hostNetwork", "    # ours below\n  hostNetwork")
    assert undone(upgraded) == expected


@st.composite
def dressed(draw: st.DrawFn) -> str:
    """kubeadm's manifest as some tool or hand may leave it."""
    pod = yaml.safe_load(manifests.kubeadm(draw(st.integers(18, manifest_corpus.NEWEST))))
    text = yaml.safe_dump(
        pod,
        indent=draw(st.sampled_from([2, 3, 4])),
        default_flow_style=draw(st.sampled_from([False, None])),
        default_style=draw(st.sampled_from([None, '"', "'"])),
        width=draw(st.sampled_from([20, 80, 1000])),
        sort_keys=draw(st.booleans()),
        explicit_start=draw(st.booleans()),
    )
    lines = text.splitlines()
    for _number in range(draw(st.integers(0, 4))):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(["# comment", "", "      # far in"])))
    for _number in range(draw(st.integers(0, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        # With a tab in a blank line it isn't YAML.
        lines[number] += draw(st.sampled_from([" ", "   # beside", " \t" if lines[number] else ""]))
    text = draw(st.sampled_from(["\n", "\r\n"])).join(lines) + draw(st.sampled_from(["", "\n"]))
    try:
        return text if yaml.safe_load(text.replace("\t", " ")) == pod else ""
    except yaml.YAMLError:
        return ""


@settings(max_examples=25)
@given(dressed())
def test_any_dress(text: str) -> None:
    if text:
        done = edited(text)
        assert foreign(read(done)) == foreign(read(text))
        assert edited(done) == done
        assert undone(done) == text
