# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Record the baseline of a node, compare the node with it, and remove it."""

from __future__ import annotations

import posixpath
import typing as t

from .._core.errors import NotInEffect, ShareError
from .._core.plan import Plan, run
from .._core.types import JsonObject
from .._driver.facts import UNITS
from .._host.system import System
from .._toolkit import legacy
from . import facts
from .baseline import (
    NO_BASELINE,
    Comparison,
    evaluate,
    make_plan,
    own_files,
    snapshot,
)
from .facts import observe_baseline
from .types import PATH, Baseline, Snapshot, parse

# Where roles write, and where the packages that they install keep their configuration.
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
    # Records of roles for later runs; none of them outlives an uninstall.
    posixpath.dirname(PATH),
    posixpath.dirname(legacy.RECORD),
)


FILES = (
    "/etc/apt/sources.list",
    "/etc/apt/preferences",
    "/etc/apt/apt.conf",
    "/etc/dnf/dnf.conf",
    "/etc/dnf/automatic.conf",
    "/etc/dnf/versionlock.toml",
    "/etc/zypp/locks",
    "/etc/docker/daemon.json",
    "/etc/rancher/k3s/config.yaml",
    "/etc/rancher/rke2/config.yaml",
    "/etc/default/grub",
)


# systemd's drop-ins for container runtimes and for NVIDIA's services.


UNIT_NAMES = ("nvidia", "containerd", "docker", "crio", "k3s", "rke2")


def files(system: System) -> dict[str, str]:
    """Read all files that the comparison covers."""
    units = [name for name in system.names(UNITS) if name.startswith(UNIT_NAMES)]
    folders = [*FOLDERS, *(f"{UNITS}/{name}" for name in units if name.endswith(".d"))]
    paths = [*FILES, *(f"{folder}/{name}" for folder in folders for name in system.names(folder))]
    paths += [f"{UNITS}/{name}" for name in units]
    texts = {path: _read(system, path) for path in paths}
    return {path: text for path, text in texts.items() if text is not None and path != PATH}


def _read(system: System, path: str) -> str | None:
    try:
        return system.read(path)
    except ShareError as error:
        # The file is there. If it could be read before and can't be read now, that is a difference.
        return str(error)


def _snapshot(system: System, texts: t.Mapping[str, str]) -> Snapshot:
    return snapshot(facts.observe(system, (), ("*",)), texts)


class BaselineReconciler:
    """The baseline of the machine that the module runs on."""

    def __init__(self, state: str, system: System) -> None:
        self._state = state
        self._system = system

    def observe(self) -> JsonObject:
        return {"baseline": observe_baseline(self._system)}

    def plan(self, observed: JsonObject) -> Plan:
        return make_plan(self._state, observed["baseline"])

    def apply(self, observed: JsonObject, plan: Plan) -> None:
        folder = posixpath.dirname(PATH)
        if self._state != "present":
            self._system.remove(PATH)
            # Fails while other records are in it.
            self._system.run(["rmdir", folder])
            return
        texts = files(self._system)
        now = self._system.run(["date", "-u", "+%Y-%m-%dT%H:%M:%SZ"]).out.strip()
        record = Baseline(now, _snapshot(self._system, texts), tuple(own_files(texts)))
        for argv in (["mkdir", "-p", "-m", "0700", folder], ["chmod", "0700", folder]):
            done = self._system.run(argv)
            if done.rc != 0:
                raise ShareError(f"{folder} can't be created: {done.err.strip()}")
        self._system.write(PATH, record.text(), 0o600)


def evaluate_node(system: System, accept: t.Sequence[str]) -> Comparison:
    """Compare the node with its baseline.

    :raises ShareError: the baseline can't be read.
    """
    text = system.read(PATH)
    if text is None:
        return Comparison(notes=(NO_BASELINE,))
    return evaluate(parse(text), _snapshot(system, files(system)), accept)


def ensure(state: str, accept: t.Sequence[str], check: bool, system: System) -> JsonObject:
    """Record, compare or remove the baseline.

    :param accept: ids of differences that are no problem.
    :param check: change nothing.
    :raises NotInEffect: the node differs from its baseline, by this collection's doing.
    """
    comparison = Comparison()
    if state == "compared" and not check:
        comparison = evaluate_node(system, accept)
        if comparison.problems:
            raise NotInEffect(
                f"this node isn't as it was before: {'; '.join(comparison.problems)}",
                problems=list(comparison.problems),
                notes=list(comparison.notes),
            )
    return {**run(BaselineReconciler(state, system), check), "notes": list(comparison.notes)}
