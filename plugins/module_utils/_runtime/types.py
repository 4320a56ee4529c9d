# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes of the sections ``runtimes`` and ``kubelet`` of ``gpu_node``, and of what a change would alter."""

from __future__ import annotations

import typing as t

from .._rancher.settings import Settings


class Loss(t.NamedTuple):
    """A user's setting that a change would alter.

    :param path: its tables and its key.
    :param before: its value in the effective configuration, as it is written; None for none.
    :param after: its value after the change.
    """

    path: tuple[str, ...]
    before: str | None
    after: str | None


class Flag(t.TypedDict):
    """A command-line flag of a daemon, and the file of its unit that sets it."""

    values: list[str]
    file: str


class Daemon(t.TypedDict):
    """Common to all: ``pending`` means an interrupted run, ``operator`` that the GPU Operator configures the node."""

    version: str
    service_active: bool
    pending: bool
    operator: bool


class ContainerdState(Daemon):
    """Files and dump with credentials masked; ``embedded`` names a distribution that runs its own containerd.

    ``low_level`` (of Docker and k3s too) is the program by which NVIDIA's runtime runs containers, as the toolkit's
    configuration has it.
    """

    config_path: str
    files: dict[str, str]
    drop_in: str | None
    dump: str
    error: str
    stale: bool
    embedded: str
    low_level: str


class CrioState(Daemon):
    config_path: str
    folder: str
    files: dict[str, str]
    flags: dict[str, Flag]
    default_runtime: str
    runtimes: dict[str, dict[str, str]]
    cgroup_driver: str
    answers: bool
    error: str
    stale: bool
    toolkit_config: str | None
    on_path: list[str]
    ours: bool


class DockerOriginal(t.TypedDict):
    """Docker's file before this collection changed it; ``untouched``: nobody else has changed it since."""

    text: str | None
    untouched: bool


class DockerState(Daemon):
    config_path: str
    text: str | None
    flags: dict[str, Flag]
    default_runtime: str
    runtimes: dict[str, t.Any]
    cgroup_driver: str
    live_restore: bool
    containers: int
    rootless: str
    answers: bool
    error: str
    low_level: str
    was: DockerOriginal | None
    ours: bool


class K3sTemplate(t.TypedDict):
    """A user's template for containerd's configuration.

    ``renders_default``: it uses ``default-runtime``; ``names_nvidia``: it names NVIDIA's runtime; ``repeats_nvidia``:
    it has the table of that runtime, and the base template that it includes has it too.
    """

    path: str
    names_nvidia: bool
    renders_default: bool
    repeats_nvidia: bool


class K3sState(Daemon):
    """State of k3s or RKE2.

    ``settings`` are its own for the default runtime, and ``flag_file`` is the file of its unit that has the flag;
    ``drop_in_path`` is where it reads our drop-in, and ``unread`` the text of one at the default place where it reads
    none. ``containerd_defaults`` are the user's template and the files that containerd imports, where they set the
    default runtime for containerd itself, the last one wins; ``runtimes`` has each runtime's program, ``types`` its
    type; ``gone`` are runtimes whose program isn't there.
    """

    unit: str
    drop_in_path: str
    drop_in: str | None
    unread: str | None
    settings: Settings
    flag_file: str
    containerd_defaults: dict[str, str]
    template: K3sTemplate | None
    default_runtime: str
    runtimes: dict[str, str]
    types: dict[str, str]
    gone: list[str]
    low_level: str
    cgroup_driver: str
    stale: bool
    ours: bool


class Runtimes(t.TypedDict):
    """The section ``runtimes``; None for one that isn't installed."""

    containerd: ContainerdState | None
    docker: DockerState | None
    crio: CrioState | None
    k3s: K3sState | None
    rke2: K3sState | None


class Kubelet(t.TypedDict):
    """The section ``kubelet``; an empty ``runtime`` or ``cgroup_driver`` is unknown."""

    version: str
    endpoint: str
    runtime: str
    cgroup_driver: str


AnyState = t.Union[ContainerdState, CrioState, DockerState, K3sState]


def state_of(name: str, runtimes: Runtimes) -> AnyState | None:
    """Return the state of one runtime; None where it isn't installed."""
    return t.cast("t.Mapping[str, AnyState | None]", runtimes).get(name)
