# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look at a control-plane machine's kube-scheduler: its manifest, its configuration, the process, its health."""

from __future__ import annotations

import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _embedded
from ansible_collections.kubegpu.share.plugins.module_utils._observe_containerd import EMBEDDED
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import process_age, unit
from ansible_collections.kubegpu.share.plugins.module_utils._probe import Probe, probe
from ansible_collections.kubegpu.share.plugins.module_utils._system import System
from ansible_collections.kubegpu.share.plugins.module_utils._yaml_comments import uncommented

MANIFEST = "/etc/kubernetes/manifests/kube-scheduler.yaml"
FOLDER = "/etc/kubernetes/kubegpu-share"
CONFIG = f"{FOLDER}/scheduler.yaml"
POLICY = f"{FOLDER}/policy.json"
PENDING = f"{FOLDER}/backup/pending.json"
# The note of what was put into a file of the user's own, in the folder for root alone.
MERGED = f"{FOLDER}/backup/merged.json"
STAGED = f"{FOLDER}/.staged-kube-scheduler.yaml"
# SHA-256 of the configuration, on the pod: kubelet starts it again when this changes.
ANNOTATION = "kubegpu.share/scheduler-config-sha256"
LOGS = "/var/log/pods"
CONTAINER = "kube-scheduler"
POD_PREFIX = f"kube-system_{CONTAINER}-"

KUBELET = "kubelet.service"
KUBELET_CONFIG = "/var/lib/kubelet/config.yaml"

ARGUMENTS: dict[str, t.Any] = {
    "config_path": {"type": "path"},
    "policy_path": {"type": "path"},
    "patches_dir": {"type": "path"},
}


def flag(text: str, name: str) -> str:
    """A flag's value in a manifest, read without a YAML library; empty where it isn't set.

    Both ``--config=FILE`` and the two list items ``--config`` and ``FILE`` are understood.
    """
    value = rf"--{re.escape(name)}(?:=|[\"']?\s*(?:,|\n\s*-)\s*[\"']?)([^\s\"',\]]+)"
    found = re.search(value, uncommented(text))
    return found.group(1) if found else ""


class Scheduler(t.NamedTuple):
    """A running kube-scheduler process; ``age`` in seconds."""

    pid: int
    age: float
    config: str
    policy: str = ""


def running(system: System) -> list[Scheduler]:
    """The kube-scheduler processes of this machine's kubelet, with their --config and --policy-config-file.

    Those of other clusters, whose control planes run in pods or containers here, are none of them. Where kubelet keeps
    no log of a static kube-scheduler, all processes of that name count.
    """
    found = []
    pods = _static_pods(system)
    for name in system.names("/proc"):
        if not name.isdigit():
            continue
        words = (system.read(f"/proc/{name}/cmdline") or "").split("\0")
        if posixpath.basename(words[0]) != "kube-scheduler" or not _is_of(system, int(name), pods):
            continue
        age = process_age(system, int(name))
        if age is not None:
            values = (_value(words, "--config"), _value(words, "--policy-config-file"))
            found.append(Scheduler(int(name), age, *values))
    return found


_UID = r"([0-9a-f]{32})"


def _static_pods(system: System) -> dict[str, str]:
    """kube-scheduler's static pods: the folder of logs of each by its UID, which is a plain MD5."""
    named = ((re.search(rf"_{_UID}$", name), name) for name in system.names(LOGS) if name.startswith(POD_PREFIX))
    return {uid.group(1): name for uid, name in named if uid}


def _is_of(system: System, pid: int, pods: t.Mapping[str, str]) -> bool:
    """Whether a process is in one of these pods; also where nothing tells that it is elsewhere."""
    cgroup = system.read(f"/proc/{pid}/cgroup") or ""
    if not pods or not any(line.rpartition(":")[2].strip("/") for line in cgroup.splitlines()):
        return True
    return any(uid in pods for uid in re.findall(rf"pod{_UID}\b", cgroup))


def _value(words: t.Sequence[str], name: str) -> str:
    for number, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word[len(name) + 1 :]
        if word == name and number + 1 < len(words):
            return words[number + 1]
    return ""


def running_version(system: System, pid: int) -> str:
    """Which version a static pod's kube-scheduler said that it is, in its log; empty where that can't be told."""
    pods = _static_pods(system)
    uids = re.findall(rf"pod{_UID}\b", system.read(f"/proc/{pid}/cgroup") or "")
    for pod in (pods[uid] for uid in uids if uid in pods):
        log = f"{LOGS}/{pod}/{CONTAINER}/{starts(system, pod)}.log"
        done = system.run(["grep", "-m", "1", "-F", "Starting Kubernetes Scheduler", log], timeout=20)
        found = re.search(r"\bv(1\.[0-9]+\.[0-9]+)", done.out) if done.rc == 0 else None
        if found:
            return found.group(1)
    return ""


def starts(system: System, pod: str) -> int:
    """How often kubelet has started the container of a pod, named as its folder of logs, again."""
    logs = system.names(f"{LOGS}/{pod}/{CONTAINER}")
    return max((int(name[:-4]) for name in logs if re.match(r"^[0-9]+\.log$", name)), default=0)


def health_url(manifest: str) -> str:
    """Where kube-scheduler answers for its health on this machine; /healthz is served by every version."""
    address = flag(manifest, "bind-address") or "127.0.0.1"
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    host = f"[{address}]" if ":" in address else address
    return f"https://{host}:{flag(manifest, 'secure-port') or '10259'}/healthz"


def image_version(manifest: str) -> str:
    """The version in the tag of kube-scheduler's image; empty where it has none."""
    found = re.search(
        r"\bimage[\"']?\s*:\s*[\"']?\S*/?kube-scheduler[^\s:@/\"',]*:v?(1\.[0-9]+\.[0-9]+[^\s@\"',}]*)",
        uncommented(manifest),
    )
    return found.group(1) if found else ""


def watched_folder(system: System) -> str:
    """The folder whose manifests kubelet runs: its own configuration says which."""
    kubelet = unit(system, KUBELET)
    named = kubelet.values("--pod-manifest-path")
    text = system.read((kubelet.values("--config") or [KUBELET_CONFIG])[-1]) or ""
    folder = "".join(kubelet.values("--config-dir")[-1:])
    for name in system.names(folder) if folder else []:
        # Later files win.
        if name.endswith(".conf"):
            text = (system.read(posixpath.join(folder, name)) or "") + "\n" + text
    found = re.search(
        r"(?m)^[\"']?staticPodPath[\"']?:[ \t]*[\"']?([^\s\"'#]+)|\"staticPodPath\"\s*:\s*\"([^\"]+)\"", text
    )
    # A flag goes before the file.
    path = "".join(named[-1:]) or (found.group(1) or found.group(2) if found else "")
    return posixpath.normpath(path) if path.startswith("/") else posixpath.dirname(MANIFEST)


def _like_a_scheduler(text: str) -> bool:
    """It may be a pod of kube-scheduler; whether it is one, who can read YAML has to say."""
    return bool(re.search(r"[\"']?(?:name|image)[\"']?\s*:\s*[\"']?[^\s\"']*kube-scheduler", text))


def _pods(system: System, folder: str) -> dict[str, str]:
    """The files there that may be a pod of kube-scheduler: kubelet reads all but those with a leading dot."""
    found = {}
    for name in system.names(folder):
        path = posixpath.join(folder, name)
        text = None if name.startswith(".") else system.read(path)
        if text is not None and (name == posixpath.basename(MANIFEST) or _like_a_scheduler(text)):
            found[path] = text
    return found


def observe(
    system: System,
    config_path: str | None = None,
    ask: Probe = probe,
    policy_path: str | None = None,
    patches_dir: str | None = None,
) -> dict[str, t.Any]:
    """What the scheduler role decides on.

    :param config_path: which file to read as kube-scheduler's configuration, where that isn't the path in its --config.
    :param policy_path: the same for its --policy-config-file.
    :param patches_dir: the folder of patches that is given to kubeadm upgrade, where there is one.
    """
    folder = watched_folder(system)
    pods = _pods(system, folder)
    path = posixpath.join(folder, posixpath.basename(MANIFEST))
    if path not in pods:
        path = next(iter(pods), path)
    manifest = pods.pop(path, None)
    embedded = next((name for name, place in EMBEDDED.items() if system.exists(place)), "")
    server = _embedded.observe(system, embedded) if manifest is None else None
    own = _embedded.PLACES[embedded] if server is not None else None
    if config_path is None:
        config_path = server["named"] if server is not None else flag(manifest or "", "config")
    if policy_path is None:
        policy_path = flag(manifest or "", "policy-config-file")
    if server is not None:
        health = next((status for url in own.health if (status := ask(url))), 0) if own is not None else 0
    else:
        health = ask(health_url(manifest)) if manifest else 0
    return {
        "kind": "static_pod" if manifest is not None else embedded if server is not None else "",
        "version": server["version"] if server is not None else image_version(manifest or ""),
        "folder": folder,
        "manifest_path": path,
        "manifest": manifest,
        # Where the manifest is a link, what it points to.
        "link": system.link(path) or "",
        "others": pods,
        "config_path": config_path,
        "config": system.read(config_path) if config_path.startswith("/") else None,
        "policy_path": policy_path,
        "policy": system.read(policy_path) if policy_path.startswith("/") else None,
        "ours": system.read(own.config if own is not None else CONFIG),
        "ours_policy": system.read(POLICY),
        "merged": system.read(own.merged if own is not None else MERGED),
        "patches_dir": patches_dir or "",
        "patches": _patches(system, patches_dir),
        "running": [
            {
                "pid": one.pid,
                "config": one.config,
                "policy": one.policy,
                "version": running_version(system, one.pid),
                "stamp": _embedded.stamp(system, one.pid) if server is not None else "",
            }
            for one in running(system)
        ],
        "health": health,
        "pending": system.exists(own.record if own is not None else PENDING),
        # As it stands in the lease that kube-scheduler holds.
        "hostname": (system.read("/proc/sys/kernel/hostname") or "").strip(),
        "embedded": embedded,
        "server": server,
    }


def _patches(system: System, folder: str | None) -> dict[str, str]:
    """kubeadm's patches of kube-scheduler by their path."""
    if not folder:
        return {}
    paths = [posixpath.join(folder, name) for name in system.names(folder) if name.startswith("kube-scheduler")]
    return {path: text for path in paths if (text := system.read(path)) is not None}
