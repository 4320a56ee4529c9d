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
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.constants import ANNOTATION, CONFIG, FOLDER
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.static_pod_plan import VOLUME, Stamp, StaticPod
from hypothesis import given, settings
from hypothesis import strategies as st

CORPUS = manifest_corpus.editable()
REFUSED = manifest_corpus.refused()
SHA256 = "0123456789abcdef" * 4
FLAG = f"--config={CONFIG}"


def edited(text: str, sha256: str = SHA256) -> str:
    pod = StaticPod(text)
    if pod.flags.get("config", CONFIG) == CONFIG:
        pod.mount()
    pod.annotate(Stamp(sha256))
    return pod.text()


def undone(text: str) -> str:
    pod = StaticPod(text)
    pod.restore()
    return pod.text()


def read(text: str) -> JsonObject:
    """As PyYAML reads it, with tabs that Kubernetes takes for blanks."""
    if text.lstrip("\ufeff").startswith("{") and '"' in text:
        return t.cast(JsonObject, json.loads(text))
    found = next(iter(yaml.safe_load_all(text.replace("\t", " "))))
    return t.cast(JsonObject, json.loads(json.dumps(found, default=str)))


def scheduler(pod: JsonObject) -> JsonObject:
    return next(container for container in pod["spec"]["containers"] if container["name"] == "kube-scheduler")


def foreign(pod: JsonObject) -> JsonObject:
    """Return a pod without our entries; where there is no list, an empty one."""
    pod = copy.deepcopy(pod)
    for name in ("command", "args"):
        scheduler(pod)[name] = [one for one in scheduler(pod).get(name) or [] if one != FLAG]
    for holder, name in ((scheduler(pod), "volumeMounts"), (pod["spec"], "volumes")):
        holder[name] = [one for one in holder.get(name) or [] if one["name"] != VOLUME]
    pod["metadata"]["annotations"] = dict(pod["metadata"].get("annotations") or {})
    pod["metadata"]["annotations"].pop(ANNOTATION, None)
    return pod


# kubectl, unlike kubelet, cuts a file at its dashes.
PARSED = [name for name in CORPUS if name != "directive"]


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[JsonObject, JsonObject]]:
    """Each manifest, and the edited one, as Kubernetes' parser reads it: kubectl does so without a cluster."""
    folder = tmp_path_factory.mktemp("manifests")
    kubectl = real_kubeadm.binary("kubectl")
    for number, name in enumerate(PARSED):
        for place, text in (("0", CORPUS[name]), ("1", edited(CORPUS[name]))):
            suffix = "json" if text.startswith("{") else "yaml"
            (folder / f"{number:03}-{place}.{suffix}").write_bytes(text.encode())
    done = subprocess.run(
        [kubectl, "label", "--local", "-o", "json", "-f", folder, "checked=yes"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "KUBECONFIG": str(folder / "none")},
    )
    assert done.returncode == 0, done.stderr
    pods: list[JsonObject] = json.loads("[" + done.stdout.replace("\n}\n{", "\n},\n{") + "]")
    for pod in pods:
        del pod["metadata"]["labels"]["checked"]
        if not pod["metadata"]["labels"]:
            del pod["metadata"]["labels"]
    assert len(pods) == 2 * len(PARSED)
    return dict(zip(PARSED, zip(pods[::2], pods[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", CORPUS)
def test_manifest_edited_and_restored(name: str) -> None:
    text = CORPUS[name]
    done = edited(text)
    before, after = read(text), read(done)
    assert foreign(after) == foreign(before)
    assert after["metadata"]["annotations"][ANNOTATION] == SHA256
    container = scheduler(after)
    theirs = StaticPod(text).flags.get("config", CONFIG) != CONFIG
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    assert words.count(FLAG) == (0 if theirs else 1)
    volumes = [volume for volume in after["spec"].get("volumes") or [] if volume["name"] == VOLUME]
    mounts = [volume_mount for volume_mount in container.get("volumeMounts") or [] if volume_mount["name"] == VOLUME]
    if not theirs:
        assert words[-1] == FLAG, "behind all others"
        assert volumes == [{"name": VOLUME, "hostPath": {"path": FOLDER, "type": "Directory"}}]
        assert mounts == [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}]
        assert StaticPod(done).flags["config"] == CONFIG
    # Every line that there was is there still, but for those that had brackets filled, or JSON that got a comma.
    lines = done.splitlines()
    rest = [line for line in text.splitlines() if line not in lines and line + "," not in lines]
    assert not [line for line in rest if not re.search(r"[\[\]{}~]|null|:$|\tabs$", line)], rest
    assert edited(done) == done, "twice is once"
    again = edited(done, SHA256[::-1])
    assert again != done and len(again) == len(done), "a new hash takes the old one's place"
    assert undone(again) == text == undone(done), "to the byte"
    assert undone(text) == text, "there is nothing of ours"


@pytest.mark.parametrize("name", PARSED)
def test_kubernetes_parser_agrees(name: str, parsed: dict[str, tuple[JsonObject, JsonObject]]) -> None:
    before, after = parsed[name]
    assert foreign(after) == foreign(before)
    assert after["metadata"]["annotations"][ANNOTATION] == SHA256
    if StaticPod(CORPUS[name]).flags.get("config", CONFIG) == CONFIG:
        assert {"name": VOLUME, "hostPath": {"path": FOLDER, "type": "Directory"}} in after["spec"]["volumes"]
        assert {"name": VOLUME, "mountPath": FOLDER, "readOnly": True} in scheduler(after)["volumeMounts"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    text, words = REFUSED[name]
    sentence = rf"^/m\.yaml, {words}.*; it is left as it is(, and scheduler_mode: dedicated .*)?$"
    with pytest.raises(BadInput, match=sentence) as caught:
        pod = StaticPod(text, "/m.yaml")
        pod.mount()
        pod.annotate(Stamp(SHA256))
        pod.text()
    assert "\n" not in str(caught.value)
    beside = ", and scheduler_mode: dedicated runs a second scheduler" in str(caught.value)
    assert beside == (name in ("shell", "no-scheduler", "two-schedulers"))


def test_corpus_equals_kubeadms_manifest(tmp_path: Path) -> None:
    """What the others are written after."""
    assert real_kubeadm.manifest(tmp_path) == real_kubeadm.expected()


@pytest.mark.parametrize(
    ("name", "path", "host"),
    [
        ("with-config", "/etc/scheduler/config.yaml", "/srv/scheduler/config.yaml"),
        ("config-in-two-words", "/etc/scheduler/./config.yaml", "/srv/scheduler/config.yaml"),
        ("kubespray", "/etc/kubernetes/kubescheduler-config.yaml", "/etc/kubernetes/kubescheduler-config.yaml"),
        ("image-entrypoint", "/etc/kubernetes/x/y", "/etc/kubernetes/x/y"),
    ],
)
def test_host_path_of_a_container_path(name: str, path: str, host: str) -> None:
    assert StaticPod(CORPUS[name]).host_path(path) == host


def test_host_path_of_subpath_and_unsupported_volumes() -> None:
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
    assert flags.items() <= StaticPod(CORPUS[name]).flags.items()


@pytest.mark.parametrize("name", CORPUS)
def test_the_machine_reads_the_same_flags_without_a_yaml_library(name: str) -> None:
    for text in (CORPUS[name], edited(CORPUS[name])):
        assert cp.flag(text, "config") == StaticPod(text).flags.get("config", "")


def test_other_flag_of_ours_is_removed() -> None:
    pod = StaticPod(CORPUS["kubeadm-1.20"])
    pod.mount(f"--policy-config-file={FOLDER}/policy.json")
    assert f"    - --policy-config-file={FOLDER}/policy.json\n" in pod.text()
    assert undone(pod.text()) == CORPUS["kubeadm-1.20"]
    # A user's file elsewhere stays, and so does what kubeadm wrote for us a second time.
    twice = edited(CORPUS["gpushare-policy-by-hand"]).replace(f"    - {FLAG}\n", f"    - {FLAG}\n    - {FLAG}\n")
    assert undone(twice) == CORPUS["gpushare-policy-by-hand"]


def test_concurrent_changes_are_kept() -> None:
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
    """kubeadm's manifest as a tool or a person may leave it."""
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
def test_generated_layouts_edited_and_restored(text: str) -> None:
    if text:
        done = edited(text)
        assert foreign(read(done)) == foreign(read(text))
        assert edited(done) == done
        assert undone(done) == text
