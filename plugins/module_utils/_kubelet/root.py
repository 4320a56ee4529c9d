# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the directory of a node's running kubelet. No I/O."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.errors import BadInput
from .._rancher import settings
from .source import KubeletSource, Missing, Process, Unreadable

ROOT = "/var/lib/kubelet"
# k3s and RKE2 pass arguments to a kubelet in their own process; microk8s keeps them in a file.
KUBELETS = frozenset(("kubelet", "hyperkube", "k3s", "k3s-agent", "k3s-server", "rke2", "kubelite"))


def running_root(source: KubeletSource) -> str:
    """Return the running kubelet's directory, by its command line (no configuration file sets it), else the default.

    :raises BadInput: several kubelets run with different directories, or the settings of k3s or RKE2 can't be read.
    """
    roots = {_root_of(source, process) for process in source.processes(KUBELETS)} - {""}
    if len(roots) > 1:
        raise BadInput(f"several kubelets run on this node, in {' and '.join(sorted(roots))}: set root to one of them")
    return roots.pop() if roots else ROOT


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
