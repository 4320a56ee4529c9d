# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What a node's kubelet says of the devices that it gave to containers: checkpoint and PodResources. No I/O."""

from __future__ import annotations

import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _kubelet_checkpoint as checkpoint
from ansible_collections.kubegpu.share.plugins.module_utils import _kubelet_podresources as podresources
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_door import (
    KubeletDoor,
    Missing,
    Process,
    Unreadable,
)

ROOT = "/var/lib/kubelet"
RESOURCES = ["aliyun.com/gpu-", "nvidia.com/"]
# k3s and RKE2 hand arguments on to a kubelet within their own process; microk8s keeps them in a file.
KUBELETS = frozenset(("kubelet", "hyperkube", "k3s", "k3s-agent", "k3s-server", "rke2", "kubelite"))
ARGUMENTS: Json = {
    "root": {"type": "path"},
    "resources": {"type": "list", "elements": "str", "default": RESOURCES},
}


def look(door: KubeletDoor, root: str | None, resources: t.Sequence[str]) -> Json:
    """
    :param root: kubelet's folder; None: what the running kubelet was told, else its default.
    :param resources: beginnings of the resource names that are of interest.
    :raises BadInput: an option that can't be served, or several kubelets that tell different folders.
    """
    if not resources or not all(resources):
        raise BadInput("resources: each has to be the beginning of a resource's name")
    folder = root or running_root(door)
    if not folder.startswith("/"):
        raise BadInput(f"root: {folder!r} isn't an absolute path")
    plugins = posixpath.join(folder, "device-plugins")
    return {
        "root": folder,
        "checkpoint": _checkpoint(door, posixpath.join(plugins, "kubelet_internal_checkpoint"), resources),
        "pod_resources": _pod_resources(door, posixpath.join(folder, "pod-resources", "kubelet.sock"), resources),
        "sockets": door.sockets(plugins),
    }


def running_root(door: KubeletDoor) -> str:
    """The folder that the running kubelet was told by its command line (no file can tell it), else the default.

    :raises BadInput: there are several kubelets, and they were told different ones.
    """
    found = {told for one in door.processes(KUBELETS) for told in [_told(door, one)] if told}
    if len(found) > 1:
        raise BadInput(f"several kubelets run here, with {' and '.join(sorted(found))}: say with root which one counts")
    return found.pop() if found else ROOT


def _checkpoint(door: KubeletDoor, path: str, resources: t.Sequence[str]) -> Json:
    try:
        return checkpoint.read(door.file(path), resources)
    except Missing as error:
        return checkpoint.state("missing", str(error))
    except Unreadable as error:
        return checkpoint.state("unreadable", str(error))


def _pod_resources(door: KubeletDoor, path: str, resources: t.Sequence[str]) -> Json:
    try:
        return podresources.listed(door.pod_resources(path), resources)
    except Missing as error:
        return podresources.state("missing", str(error))
    except Unreadable as error:
        return podresources.state("unreadable", str(error))


def _told(door: KubeletDoor, process: Process) -> str:
    arguments = list(process.arguments)
    if len(arguments) == 1:
        # A title that the process gave itself.
        arguments = arguments[0].split()
    name = posixpath.basename("".join(arguments[:1]))
    if name == "kubelite":
        return _of_snap(door, _last(arguments, "--kubelet-args-file"))
    if name in ("kubelet", "hyperkube"):
        return _last(arguments, "--root-dir")
    handed = [_value(one) for one in _all(arguments, "--kubelet-arg")]
    return _handed(handed) or _of_rancher(door, name.partition("-")[0])


def _handed(arguments: t.Iterable[str]) -> str:
    return "".join([one.partition("=")[2] for one in arguments if one.lstrip("-").startswith("root-dir=")][-1:])


def _of_rancher(door: KubeletDoor, name: str) -> str:
    """k3s hides its arguments behind a title, and mostly has them from its file anyway."""
    try:
        text = door.file(f"/etc/rancher/{name}/config.yaml").decode("utf-8", "replace")
    except (Missing, Unreadable):
        return ""
    # An item of the list kubelet-arg; no other one has this name.
    return _handed(re.findall(r"""(?m)^[^#\n]*?["'\s,[-](root-dir=[^\s"',\]]+)""", text))


def _of_snap(door: KubeletDoor, path: str) -> str:
    """microk8s: the file of its kubelet's arguments, in which the snap's own folder is a variable."""
    snap = re.match(r"/var/snap/[^/]+/", path)
    if not snap:
        return ""
    try:
        words = door.file(path).decode("utf-8", "replace").split()
    except (Missing, Unreadable):
        words = []
    told = _last(words, "--root-dir") or "${SNAP_COMMON}/var/lib/kubelet"
    return re.sub(r"\$\{?SNAP_COMMON\}?", f"{snap.group(0)}common", told)


def _last(arguments: t.Sequence[str], flag: str) -> str:
    return _value("".join(_all(arguments, flag)[-1:]))


def _all(arguments: t.Sequence[str], flag: str) -> list[str]:
    """Values of a flag, in order; Go's flags may have one dash or two."""
    found = []
    for number, one in enumerate(arguments):
        name, equals, value = one.partition("=")
        if name in (flag, flag[1:]):
            following = arguments[number + 1] if number + 1 < len(arguments) else ""
            found.append(value if equals else following)
    return found


def _value(text: str) -> str:
    return text.strip("\"'")
