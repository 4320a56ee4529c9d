# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Take the first look at a node, keep it, compare the node with it, and forget it."""

from __future__ import annotations

import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _first_look as look
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info
from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_legacy as legacy
from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._first_look_observe import observe
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan, run
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

# Where roles write, and where the packages that they bring keep their configuration.
FOLDERS = (
    "/etc/modprobe.d",
    "/etc/modules-load.d",
    "/etc/dracut.conf.d",
    "/etc/udev/rules.d",
    "/etc/apt/sources.list.d",
    "/etc/apt/preferences.d",
    "/etc/apt/apt.conf.d",
    "/etc/apt/keyrings",
    "/etc/apt/trusted.gpg.d",
    "/usr/share/keyrings",
    "/etc/yum.repos.d",
    "/etc/pki/rpm-gpg",
    "/etc/yum/pluginconf.d",
    "/etc/dnf/plugins",
    "/etc/dnf/modules.d",
    "/etc/zypp/repos.d",
    "/etc/containerd",
    "/etc/containerd/conf.d",
    "/etc/containerd/config.d",
    "/etc/crio",
    "/etc/crio/conf.d",
    "/etc/crio/crio.conf.d",
    "/etc/rancher/k3s/config.yaml.d",
    "/etc/rancher/rke2/config.yaml.d",
    "/etc/nvidia-container-runtime",
    "/etc/nvidia-container-toolkit",
    "/etc/cdi",
    # What roles keep for a run to come; nothing of it outlives an uninstall.
    posixpath.dirname(look.PATH),
    posixpath.dirname(legacy.RECORD),
)
FILES = (
    "/etc/apt/sources.list",
    "/etc/apt/preferences",
    "/etc/apt/apt.conf",
    "/etc/dnf/dnf.conf",
    "/etc/dnf/automatic.conf",
    "/etc/dnf/versionlock.toml",
    "/etc/yum.conf",
    "/etc/zypp/locks",
    "/etc/docker/daemon.json",
    "/etc/rancher/k3s/config.yaml",
    "/etc/rancher/rke2/config.yaml",
    "/etc/default/grub",
)
# systemd's drop-ins for what runs containers and cards.
UNITS = "/etc/systemd/system"
OF_UNITS = ("nvidia", "containerd", "docker", "crio", "k3s", "rke2")


def files(system: System) -> dict[str, str]:
    """Texts of all files that the comparison is about."""
    folders = [*FOLDERS]
    for name in system.names(UNITS):
        if name.startswith(OF_UNITS) and name.endswith(".d"):
            folders.append(f"{UNITS}/{name}")
    paths = [*FILES, *(f"{folder}/{name}" for folder in folders for name in system.names(folder))]
    paths += [f"{UNITS}/{name}" for name in system.names(UNITS) if name.startswith(OF_UNITS)]
    texts = {path: _read(system, path) for path in paths}
    return {path: text for path, text in texts.items() if text is not None and path != look.PATH}


def _read(system: System, path: str) -> str | None:
    try:
        return system.read(path)
    except ShareError as error:
        # A file that can't be read is there, and one that could be read before and can't now is a difference.
        return str(error)


class FirstLookConcern:
    """The first look at the machine that the module runs on."""

    def __init__(self, state: str, system: System) -> None:
        self._state = state
        self._system = system

    def observe(self) -> Json:
        return {"first_look": observe(self._system)}

    def plan(self, seen: Json) -> Plan:
        return look.plan(self._state, seen)

    def apply(self, seen: Json, plan: Plan) -> None:
        folder = posixpath.dirname(look.PATH)
        if self._state != "present":
            self._system.remove(look.PATH)
            # Refuses while others' records are in it.
            self._system.run(["rmdir", folder])
            return
        texts = files(self._system)
        now = look.reduce(_node_info.observe(self._system, (), ("*",)), texts)
        kept = look.Look(self._now(), now, tuple(look.ours_before(texts)))
        for argv in (["mkdir", "-p", "-m", "0700", folder], ["chmod", "0700", folder]):
            done = self._system.run(argv)
            if done.rc != 0:
                raise ShareError(f"{folder} can't be made: {done.err.strip()}")
        self._system.write(look.PATH, kept.text(), 0o600)

    def _now(self) -> str:
        return self._system.run(["date", "-u", "+%Y-%m-%dT%H:%M:%SZ"]).out.strip()


def verdict(system: System, accept: t.Sequence[str]) -> look.Verdict:
    """Compare the node as it is with the first look.

    :raises ShareError: what was kept can't be read.
    """
    text = system.read(look.PATH)
    if text is None:
        return look.Verdict((), (look.NO_LOOK,))
    now = look.reduce(_node_info.observe(system, (), ("*",)), files(system))
    return look.judge(look.parse(text), now, accept)


def work(state: str, accept: t.Sequence[str], check: bool, system: System) -> Json:
    """Run the concern; a comparison comes before forgetting, and in check mode there is nothing to compare yet.

    :raises NotInEffect: something of ours is left, or something that was there is gone; the look is kept.
    """
    found = look.Verdict((), ())
    if state == "compared" and not check:
        found = verdict(system, accept)
        if found.problems:
            raise NotInEffect(
                f"this node isn't as it was before: {'; '.join(found.problems)}",
                problems=list(found.problems),
                notes=list(found.notes),
            )
    return {**run(FirstLookConcern(state, system), check), "notes": list(found.notes)}
