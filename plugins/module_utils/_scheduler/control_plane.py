# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe a control-plane machine's kube-scheduler: its manifest, configuration, process and health."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._contracts.gpushare import RESOURCE_MEMORY
from .._core.digest import digest
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._host.http_probe import Probe, probe
from .._host.system import System
from .._host.systemd import changed_since_start, process_age, unit
from .._rancher import yaml_reader
from .._runtime.containerd import distribution
from . import embedded
from .constants import CONFIG, CONTAINER, FOLDER, POLICY
from .embedded import Server

# A quoted value, which may contain '#', or a comment. Quotes inside plain values have no meaning.
_QUOTED_OR_COMMENT = re.compile(
    r"""((?:^\s*|[-?]\s+|[:,\[{]\s*)(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'))|(?:^|\s)\#.*$""", re.VERBOSE
)


def uncommented(text: str) -> str:
    """Return the text with the same lines, without comments."""
    return "\n".join(_QUOTED_OR_COMMENT.sub(lambda match: match.group(1) or "", line) for line in text.splitlines())


MANIFEST = "/etc/kubernetes/manifests/kube-scheduler.yaml"
PENDING = f"{FOLDER}/backup/pending.json"
# The note about a user's file into which the extender was merged; its folder is readable by root only.
MERGED = f"{FOLDER}/backup/merged.json"
STAGED = f"{FOLDER}/.staged-kube-scheduler.yaml"
LOGS = "/var/log/pods"
POD_PREFIX = f"kube-system_{CONTAINER}-"

# kube-scheduler's ports with TLS, which it serves since 1.SECURE_SINCE, and without.
SECURE_PORT, INSECURE_PORT, SECURE_SINCE = "10259", "10251", 12
HEALTH_FLAGS = ("bind-address", "secure-port", "address", "port")

KUBELET = "kubelet.service"
# kubeasz and others run it by systemd.
UNIT = f"{CONTAINER}.service"
KUBELET_CONFIG = "/var/lib/kubelet/config.yaml"

ARGUMENTS: JsonObject = {
    "config_path": {"type": "path"},
    "policy_path": {"type": "path"},
    "patches_dir": {"type": "path"},
}


class RunningScheduler(t.TypedDict):
    """A kube-scheduler process as the module reports it.

    ``version`` is a static pod's, from its log; ``stamp`` is RKE2's of the configuration. ``loaded`` has the SHA-256 of
    the files that the process names, by path and as the process itself sees them; ``fresh`` is false where one of them
    was changed since the process started, and None where that is unknown. ``extender`` is whether they name the
    extender's resource; None where they can't be read.
    """

    pid: int
    config: str
    policy: str
    version: str
    stamp: str
    fresh: bool | None
    loaded: dict[str, str]
    extender: bool | None


class _Contents(t.TypedDict):
    loaded: dict[str, str]
    extender: bool | None


class ControlPlane(t.TypedDict):
    """A control-plane machine's kube-scheduler; texts are None without the file.

    ``others`` may be kube-scheduler pods, too. ``ours`` is this collection's file, ``merged`` its note about a user's
    with the extender. ``pending``: a run was interrupted. ``embedded``: what else runs it.
    """

    kind: str
    version: str
    folder: str
    manifest_path: str
    manifest: str | None
    link: str
    others: dict[str, str]
    config_path: str
    config: str | None
    policy_path: str
    policy: str | None
    ours: str | None
    ours_policy: str | None
    merged: str | None
    patches_dir: str
    patches: dict[str, str]
    running: list[RunningScheduler]
    health: int
    pending: bool
    hostname: str
    embedded: str
    server: Server | None


class Process(t.NamedTuple):
    """A running kube-scheduler process; ``age`` in seconds."""

    pid: int
    age: float
    config: str
    policy: str = ""


def flag(manifest: str, name: str) -> str:
    """Return a flag's value in a manifest; empty where kube-scheduler's container hasn't it.

    Reads ``--config=FILE`` and the two list items ``--config`` and ``FILE``, of several the last. Where the container
    isn't certain, or the YAML isn't what ``yaml_reader`` knows, it searches the whole text.
    """
    try:
        spec = dict(yaml_reader.read(manifest)).get("spec")
    except yaml_reader.Unreadable:
        spec = None
    items = dict(spec).get("containers") if isinstance(spec, yaml_reader.Pairs) else None
    containers = [dict(item) for item in items or [] if isinstance(item, yaml_reader.Pairs)]
    numbers = scheduler_containers(containers)
    if len(numbers) == 1:
        return _value(words_of(containers[numbers[0]]), f"--{name}")
    pattern = rf"--{re.escape(name)}(?:=|[\"']?\s*(?:,|\n\s*-)\s*[\"']?)([^\s\"',\]]+)"
    values = re.findall(pattern, uncommented(manifest))
    return str(values[-1]) if values else ""


def scheduler_containers(containers: t.Sequence[t.Mapping[str, t.Any]]) -> list[int]:
    """Return the numbers of kube-scheduler's containers in a pod: those of its name, or else those that run it."""
    named = [number for number, container in enumerate(containers) if container.get("name") == CONTAINER]
    return named or [number for number, container in enumerate(containers) if _runs_scheduler(container)]


def _runs_scheduler(container: t.Mapping[str, t.Any]) -> bool:
    """Return whether a container runs kube-scheduler, by its program or its image."""
    image = str(container.get("image") or "").partition("@")[0].rpartition("/")[2].partition(":")[0]
    # Images of one architecture have its name at the end.
    by_image = re.fullmatch(rf"{CONTAINER}(-[a-z0-9]+)?", image)
    return bool(by_image) or CONTAINER in [posixpath.basename(word) for word in words_of(container)[:1]]


def words_of(container: t.Mapping[str, t.Any]) -> list[str]:
    """Return a container's command and arguments."""
    lists = [container.get(key) for key in ("command", "args")]
    return [str(word) for words in lists if isinstance(words, list) for word in words]


def running(system: System) -> list[Process]:
    """Return the kube-scheduler processes that this machine's kubelet runs.

    Processes of other clusters, whose control planes run in pods or containers here, are left out. Where kubelet keeps
    no log of a static kube-scheduler, all processes of that name count.
    """
    processes = []
    pods = _static_pods(system)
    for name in system.names("/proc"):
        if not name.isdigit():
            continue
        argv = (system.read(f"/proc/{name}/cmdline") or "").split("\0")
        if posixpath.basename(argv[0]) != CONTAINER or not _belongs_to(system, int(name), pods):
            continue
        age = process_age(system, int(name))
        if age is not None:
            processes.append(Process(int(name), age, _value(argv, "--config"), _value(argv, "--policy-config-file")))
    return processes


_UID = r"([0-9a-f]{32})"


def _static_pods(system: System) -> dict[str, str]:
    """Return the log folders of kube-scheduler's static pods by UID, which is an MD5 without dashes."""
    named = ((re.search(rf"_{_UID}$", name), name) for name in system.names(LOGS) if name.startswith(POD_PREFIX))
    return {uid.group(1): name for uid, name in named if uid}


def _belongs_to(system: System, pid: int, pods: t.Mapping[str, str]) -> bool:
    """Return whether a process is in one of these pods; also where its cgroup doesn't name any pod."""
    cgroup = system.read(f"/proc/{pid}/cgroup") or ""
    if not pods or not any(line.rpartition(":")[2].strip("/") for line in cgroup.splitlines()):
        return True
    return any(uid in pods for uid in re.findall(rf"pod{_UID}\b", cgroup))


def _value(argv: t.Sequence[str], name: str) -> str:
    """Return a flag's value; of several the last counts."""
    value = ""
    for number, word in enumerate(argv):
        if word.startswith(f"{name}="):
            value = word[len(name) + 1 :]
        elif word == name and number + 1 < len(argv):
            value = argv[number + 1]
    return value


def running_version(system: System, pid: int) -> str:
    """Return the version that a static pod's kube-scheduler logged at its start; empty where it isn't in the log."""
    pods = _static_pods(system)
    uids = re.findall(rf"pod{_UID}\b", system.read(f"/proc/{pid}/cgroup") or "")
    for pod in (pods[uid] for uid in uids if uid in pods):
        log = f"{log_folder(system, pod)}/{restarts(system, pod)}.log"
        done = system.run(["grep", "-m", "1", "-F", "Starting Kubernetes Scheduler", log], timeout=20)
        match = re.search(r"\bv(1\.[0-9]+\.[0-9]+)", done.out) if done.rc == 0 else None
        if match:
            return match.group(1)
    return ""


def log_folder(system: System, pod: str) -> str:
    """Return the folder of a pod's logs: that of the container kube-scheduler, or else of its first container."""
    containers = system.names(f"{LOGS}/{pod}")
    return f"{LOGS}/{pod}/{next(iter(containers)) if containers and CONTAINER not in containers else CONTAINER}"


def restarts(system: System, pod: str) -> int:
    """Return how often kubelet has restarted a pod's container.

    :param pod: the name of the pod's folder of logs.
    """
    logs = system.names(log_folder(system, pod))
    return max((int(name[:-4]) for name in logs if re.match(r"^[0-9]+\.log$", name)), default=0)


def health_url(manifest: str) -> str:
    """Return the URL of kube-scheduler's /healthz on this machine, which every version serves."""
    match = re.match(r"1\.([0-9]+)", image_version(manifest))
    flags = {name: value for name in HEALTH_FLAGS if (value := flag(manifest, name))}
    return f"{health_base(flags, int(match.group(1)) if match else None)}/healthz"


def health_base(flags: t.Mapping[str, str], minor: int | None) -> str:
    """Return the URL of the port on which kube-scheduler serves its health, without a path.

    :param flags: by their names without dashes.
    :param minor: of kube-scheduler 1.``minor``; None where it is unknown.
    """
    if flags.get("secure-port") == "0" or (minor is not None and minor < SECURE_SINCE):
        return server_url(flags.get("address", ""), flags.get("port") or INSECURE_PORT, "http")
    return server_url(flags.get("bind-address", ""), flags.get("secure-port") or SECURE_PORT)


def server_url(address: str, port: str | int, scheme: str = "https") -> str:
    """Return the URL of a server on this machine, without a path.

    :param address: on which it listens; empty for the loopback address.
    """
    address = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"


def loopbacks(url: str) -> tuple[str, ...]:
    """Return a URL with each loopback address that its server may have: k3s and RKE2 choose it by the machine's."""
    return (url, url.replace("//127.0.0.1:", "//[::1]:", 1)) if "//127.0.0.1:" in url else (url,)


def image_version(manifest: str) -> str:
    """Return the version in the tag of kube-scheduler's image; empty where it has none."""
    match = re.search(
        r"\bimage[\"']?\s*:\s*[\"']?\S*/?kube-scheduler[^\s:@/\"',]*:v?(1\.[0-9]+\.[0-9]+[^\s@\"',}]*)",
        uncommented(manifest),
    )
    return match.group(1) if match else ""


def watched_folder(system: System) -> str:
    """Return the folder of static pods that kubelet's own configuration names."""
    kubelet = unit(system, KUBELET)
    named = kubelet.values("--pod-manifest-path")
    text = system.read((kubelet.values("--config") or [KUBELET_CONFIG])[-1]) or ""
    folder = "".join(kubelet.values("--config-dir")[-1:])
    for name in system.names(folder) if folder else []:
        # Later files win.
        if name.endswith(".conf"):
            text = (system.read(posixpath.join(folder, name)) or "") + "\n" + text
    match = re.search(
        r"(?m)^[\"']?staticPodPath[\"']?:[ \t]*[\"']?([^\s\"'#]+)|\"staticPodPath\"\s*:\s*\"([^\"]+)\"", text
    )
    # A flag overrides the file.
    path = "".join(named[-1:]) or (match.group(1) or match.group(2) if match else "")
    return posixpath.normpath(path) if path.startswith("/") else posixpath.dirname(MANIFEST)


def _manifests(system: System, folder: str) -> dict[str, str]:
    """Return the files that may be kube-scheduler pods: kubelet reads all but those with a leading dot."""
    names_it = r"[\"']?(?:name|image)[\"']?\s*:\s*[\"']?[^\s\"']*kube-scheduler"
    manifests = {}
    for name in system.names(folder):
        path = posixpath.join(folder, name)
        text = None if name.startswith(".") else system.read(path)
        if text is not None and (name == posixpath.basename(MANIFEST) or re.search(names_it, text)):
            manifests[path] = text
    return manifests


def observe(
    system: System,
    config_path: str | None = None,
    ask: Probe = probe,
    policy_path: str | None = None,
    patches_dir: str | None = None,
) -> ControlPlane:
    """Collect what the role scheduler decides on.

    :param config_path: the file to read as kube-scheduler's configuration, where it isn't the path in its --config.
    :param policy_path: the same for its --policy-config-file.
    :param patches_dir: the folder that is passed to ``kubeadm upgrade --patches``; None for none.
    """
    folder = watched_folder(system)
    pods = _manifests(system, folder)
    path = posixpath.join(folder, posixpath.basename(MANIFEST))
    if path not in pods:
        path = next(iter(pods), path)
    manifest = pods.pop(path, None)
    distro = distribution(system)
    server = embedded.observe(system, distro) if manifest is None else None
    own = embedded.PLACES[distro] if server is not None else None
    if config_path is None:
        config_path = server["named"] if server is not None else flag(manifest or "", "config")
    if policy_path is None:
        policy_path = flag(manifest or "", "policy-config-file")
    kind = ""
    urls: tuple[str, ...] = ()
    if manifest is not None:
        kind = "static_pod"
        urls = (health_url(manifest),) if manifest else ()
    elif own is not None:
        kind, urls = distro, own.health
    return {
        "kind": kind,
        "version": server["version"] if server is not None else image_version(manifest or ""),
        "folder": folder,
        "manifest_path": path,
        "manifest": manifest,
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
        "running": _in_server(system, server) if distro == "k3s" and server else _in_pods(system, server),
        "health": next((status for url in urls if (status := ask(url))), 0),
        "pending": system.exists(own.record if own is not None else PENDING),
        "hostname": (system.read("/proc/sys/kernel/hostname") or "").strip(),
        "embedded": distro or ("" if manifest is not None else _elsewhere(system)),
        "server": server,
    }


def _elsewhere(system: System) -> str:
    """Return what runs kube-scheduler without a manifest; empty for nothing."""
    if unit(system, UNIT).loaded:
        return UNIT
    processes = running(system)
    return f"kube-scheduler as process {processes[0].pid}" if processes else ""


def _in_pods(system: System, server: Server | None) -> list[RunningScheduler]:
    reported: list[RunningScheduler] = []
    for process in running(system):
        root = f"/proc/{process.pid}/root"
        texts = _texts(system, root, process.config, process.policy)
        changed = changed_since_start(system, process.pid, [root + path for path in texts])
        reported.append(
            {
                "pid": process.pid,
                "config": process.config,
                "policy": process.policy,
                "version": running_version(system, process.pid),
                "stamp": embedded.stamp(system, process.pid) if server is not None else "",
                "fresh": None if changed is None else not changed,
                **_contents(texts, process.config, process.policy),
            }
        )
    return reported


def _in_server(system: System, server: Server) -> list[RunningScheduler]:
    """Return k3s's process, of which kube-scheduler is a part."""
    if not server["active"]:
        return []
    texts = _texts(system, "", server["named"])
    return [
        {
            "pid": server["pid"],
            "config": server["named"],
            "policy": "",
            "version": "",
            "stamp": "",
            "fresh": not server["stale"],
            **_contents(texts, server["named"]),
        }
    ]


def _texts(system: System, root: str, *paths: str) -> dict[str, str]:
    """Return the files that a process names, as it sees them, by path; without those that can't be read.

    :param root: of the process's files.
    """
    texts = {}
    for path in paths:
        try:
            text = system.read(root + path) if path.startswith("/") else None
        except ShareError:
            continue
        if text is not None:
            texts[path] = text
    return texts


def unseen(system: System, pid: int, files: t.Mapping[str, str]) -> str:
    """Return why a process doesn't see these files of the machine; empty where it does, or can't be read.

    :param files: the path on the machine of each, by its path for the process.
    """
    for path, text in _texts(system, f"/proc/{pid}/root", *files).items():
        if text != system.read(files[path]):
            return f"its process has other text in {path} than {files[path]} has"
    return ""


def _contents(texts: t.Mapping[str, str], *named: str) -> _Contents:
    complete = all(path in texts for path in named if path)
    has_extender = any(RESOURCE_MEMORY in uncommented(text) for text in texts.values())
    return {
        "loaded": {path: digest(text) for path, text in texts.items()},
        "extender": has_extender if has_extender or complete else None,
    }


def _patches(system: System, folder: str | None) -> dict[str, str]:
    """Return kubeadm's patches of kube-scheduler by path."""
    if not folder:
        return {}
    paths = [posixpath.join(folder, name) for name in system.names(folder) if name.startswith(CONTAINER)]
    return {path: text for path in paths if (text := system.read(path)) is not None}
