# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the devices that a node's kubelet allocated to containers, and those that they have. No I/O."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._contracts.claim_templates import DRIVER
from .._contracts.pod_resources import PodDevices, decode_pod, split_pods
from .._contracts.protobuf import MalformedMessage
from .._core.errors import BadInput
from .._rancher import settings
from .checkpoint import parse_checkpoint, prepared_claims
from .source import KubeletSource, Missing, Process, Unreadable
from .types import Checkpoint, KubeletDevices, ListedPod, PodResources, no_checkpoint, no_pod_resources

ROOT = "/var/lib/kubelet"
RESOURCES = ["aliyun.com/gpu-", "nvidia.com/"]
# k3s and RKE2 pass arguments to a kubelet in their own process; microk8s keeps them in a file.
KUBELETS = frozenset(("kubelet", "hyperkube", "k3s", "k3s-agent", "k3s-server", "rke2", "kubelite"))


def collect(source: KubeletSource, root: str | None, resources: t.Sequence[str]) -> KubeletDevices:
    """Read checkpoint, PodResources, the device plugins' sockets, the containers' device nodes and prepared claims.

    :param root: kubelet's directory; None: that of the running kubelet, else the default.
    :param resources: prefixes of the resource names to return.
    :raises BadInput: an option is invalid, or several kubelets run with different directories.
    """
    if not resources or not all(resources):
        raise BadInput("resources: each item has to be the prefix of a resource's name")
    folder = root or running_root(source)
    if not folder.startswith("/"):
        raise BadInput(f"root: {folder!r} isn't an absolute path")
    plugins = posixpath.join(folder, "device-plugins")
    return {
        "root": folder,
        "checkpoint": _checkpoint(source, posixpath.join(plugins, "kubelet_internal_checkpoint"), resources),
        "pod_resources": _pod_resources(source, posixpath.join(folder, "pod-resources", "kubelet.sock"), resources),
        "sockets": source.sockets(plugins),
        "device_nodes": source.device_nodes(),
        "prepared": prepared_claims(source, folder),
    }


def running_root(source: KubeletSource) -> str:
    """Return the running kubelet's directory, by its command line (no configuration file sets it), else the default.

    :raises BadInput: several kubelets run with different directories, or the settings of k3s or RKE2 can't be read.
    """
    roots = {_root_of(source, process) for process in source.processes(KUBELETS)} - {""}
    if len(roots) > 1:
        raise BadInput(f"several kubelets run on this node, in {' and '.join(sorted(roots))}: set root to one of them")
    return roots.pop() if roots else ROOT


def parse_pod_resources(response: bytes, resources: t.Sequence[str]) -> PodResources:
    """Decode kubelet's response to List; never raises.

    :returns: pods that have a device of these resources, or a card by a claim, by name; ``state`` is ``ok`` or
        ``unknown``.
    """
    try:
        pods = [_listed(decode_pod(message, tuple(resources), DRIVER)) for message in split_pods(response)]
    except MalformedMessage as error:
        return no_pod_resources("unknown", f"kubelet's PodResources response isn't a message of version 1: {error}")
    listed = [pod for pod in pods if pod["containers"]]
    return {"state": "ok", "problem": "", "pods": sorted(listed, key=lambda pod: (pod["namespace"], pod["name"]))}


def _listed(pod: PodDevices) -> ListedPod:
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "containers": [
            {
                "name": container.name,
                "devices": [{"resource": name, "ids": list(ids)} for name, ids in sorted(container.devices.items())],
                "claims": [
                    {
                        "namespace": each.namespace,
                        "claim": each.claim,
                        "pool": each.pool,
                        "device": each.device,
                        "share": each.share,
                    }
                    for each in container.claimed
                ],
            }
            for container in pod.containers
            if container.devices or container.claimed
        ],
    }


def _checkpoint(source: KubeletSource, path: str, resources: t.Sequence[str]) -> Checkpoint:
    try:
        return parse_checkpoint(source.file(path), resources)
    except Missing as error:
        return no_checkpoint("missing", str(error))
    except Unreadable as error:
        return no_checkpoint("unreadable", str(error))


def _pod_resources(source: KubeletSource, path: str, resources: t.Sequence[str]) -> PodResources:
    try:
        return parse_pod_resources(source.pod_resources(path), resources)
    except Missing as error:
        return no_pod_resources("missing", str(error))
    except Unreadable as error:
        return no_pod_resources("unreadable", str(error))


def _root_of(source: KubeletSource, process: Process) -> str:
    arguments = list(process.arguments)
    if len(arguments) == 1:
        # A title that the process set itself.
        arguments = arguments[0].split()
    name = posixpath.basename("".join(arguments[:1]))
    if name == "kubelite":
        return _snap_root(source, _last(arguments, "--kubelet-args-file"))
    if name in ("kubelet", "hyperkube"):
        return _last(arguments, "--root-dir")
    return _rancher_root(source, name.partition("-")[0], arguments[1:])


def _rancher_root(source: KubeletSource, name: str, arguments: t.Sequence[str]) -> str:
    """Read the settings of k3s or RKE2, which hide most of their arguments behind a title.

    :raises BadInput: they can't be read.
    """

    def content(path: str) -> str | None:
        try:
            return source.file(path).decode("utf-8", "replace")
        except (Missing, Unreadable):
            return None

    def names(folder: str) -> list[str]:
        try:
            return source.names(folder, optional=True)
        except Unreadable:
            return []

    given = settings.read(name, arguments, {}, content, names, keys=("kubelet-arg",))
    if given["problem"]:
        raise BadInput(f"root: {settings.explain(name, given['problem'])}; set root to kubelet's directory")
    roots = [
        argument.partition("=")[2]
        for argument in settings.values(given, "kubelet-arg")
        if argument.lstrip("-").startswith("root-dir=")
    ]
    return roots[-1] if roots else ""


def _snap_root(source: KubeletSource, path: str) -> str:
    """Read microk8s' file of kubelet arguments, in which the snap's directory is a variable."""
    snap = re.match(r"/var/snap/[^/]+/", path)
    if not snap:
        return ""
    try:
        arguments = source.file(path).decode("utf-8", "replace").split()
    except (Missing, Unreadable):
        arguments = []
    root = _last(arguments, "--root-dir") or "${SNAP_COMMON}/var/lib/kubelet"
    return re.sub(r"\$\{?SNAP_COMMON\}?", f"{snap.group(0)}common", root)


def _last(arguments: t.Sequence[str], flag: str) -> str:
    """Return the last value of a flag, without quotes; empty without one. Go's flags have one dash or two."""
    last = ""
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in (flag, flag[1:]):
            following = arguments[number + 1] if number + 1 < len(arguments) else ""
            last = value if equals else following
    return last.strip("\"'")
