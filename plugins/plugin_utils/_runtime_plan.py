# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The plan of ``container_runtime``: for the runtime that the kubelet uses, or the one that was asked for."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._containerd import Wanted, effective
from ansible_collections.kubegpu.share.plugins.module_utils._k3s import K3S, RKE2
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import choose
from ansible_collections.kubegpu.share.plugins.plugin_utils import (
    _containerd_plan,
    _crio_plan,
    _docker_plan,
    _k3s_plan,
)

Json = dict[str, t.Any]

TITLES = {"containerd": "containerd", "docker": "Docker", "crio": "CRI-O", "k3s": "k3s", "rke2": "RKE2"}


@dataclasses.dataclass(frozen=True)
class Planned:
    """What to show and what to hand to the node.

    :param runtime: whose plan it is; empty where there is none.
    :param restart: reading the files again isn't enough.
    :param warnings: what the user should know though it stops nothing.
    """

    plan: Plan
    runtime: str = ""
    files: tuple[Json, ...] = ()
    restart: bool = False
    warnings: tuple[str, ...] = ()


def make_plan(asked: str, wanted: Wanted, runtimes: Json, kubelet: Json | None) -> Planned:
    """Compare the node with what is asked for.

    :param asked: the option ``runtime``.
    :raises BadInput: it can't be done as asked for; nothing was changed.
    :raises NotInEffect: our files are right and the runtime doesn't do what they say.
    """
    name = choose(asked, wanted.present, runtimes, kubelet)
    if not name:
        return Planned(Plan())
    observed = runtimes.get(name)
    notes = cgroup_mismatch(name, observed, kubelet) if wanted.present else []
    if name == "docker":
        docker = _docker_plan.make_plan(wanted, observed)
        return Planned(docker.plan, name, docker.files, docker.restart, (*docker.warnings, *notes))
    if name == "containerd":
        options = _containerd_plan.Options(wanted.present, wanted.binary, wanted.default, wanted.cdi, wanted.enable_cri)
        containerd = _containerd_plan.make_plan(options, observed)
        return Planned(containerd.plan, name, containerd.files, False, tuple(notes))
    if name == "crio":
        crio = _crio_plan.make_plan(wanted, observed)
        return Planned(crio.plan, name, crio.files, False, tuple(notes))
    rancher = _k3s_plan.make_plan(K3S if name == "k3s" else RKE2, wanted, observed)
    return Planned(rancher.plan, name, rancher.files, False, tuple(notes))


def cgroup_mismatch(name: str, observed: Json | None, kubelet: Json | None) -> list[str]:
    """A kubelet and a runtime that make cgroups in different ways fight over every pod's limits."""
    theirs = cgroup_driver(name, observed)
    own = (kubelet or {}).get("cgroup_driver") if (kubelet or {}).get("runtime") == name else ""
    if not theirs or not own or theirs == own:
        return []
    return [
        f"the kubelet's cgroupDriver is {own} and {TITLES[name]}'s is {theirs}: pods' limits will not hold reliably; "
        f"set both to the same ({_where(name)})"
    ]


def cgroup_driver(name: str, observed: Json | None) -> str:
    """``systemd`` or ``cgroupfs``, or nothing where it can't be told."""
    if not observed:
        return ""
    if name != "containerd":
        return str(observed.get("cgroup_driver") or "")
    found = effective(observed.get("dump") or "")
    model = found.runtime(found.model()) if found.plugin and found.model() else None
    if model is None:
        return ""
    return "systemd" if model.get(("options", "SystemdCgroup")) else "cgroupfs"


def _where(name: str) -> str:
    return {
        "docker": '"exec-opts": ["native.cgroupdriver=systemd"] in daemon.json',
        "containerd": "SystemdCgroup of runc's options in containerd's config.toml",
        "crio": "cgroup_manager in crio.conf",
    }.get(name, "cgroupDriver of the kubelet's config.yaml")
