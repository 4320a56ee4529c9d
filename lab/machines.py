# SPDX-License-Identifier: GPL-3.0-or-later
"""Machines without a cluster, of several distributions: real systemd, package manager and container runtime."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab import rootfs, rpms
from lab.aptsources import Source, of_suite
from lab.paths import cache_root, made_once
from lab.publish import DEBIAN
from lab.shell import LabError, output, run

HERE = Path(__file__).resolve().parent
CARDS = 2
# Bump when what is unpacked for the compiler changes.
SYSROOT = 2
FIRST_ADDRESS = 41
# What a machine has in common with the cluster's nodes.
_OF_NODES = (
    "etc/ssh/sshd_config.d/lab.conf",
    "etc/systemd/system/kubegpu-lab-node.service",
    "usr/local/lib/kubegpu-lab/boot",
    "usr/local/lib/kubegpu-lab/init",
)


@dataclass(frozen=True)
class Kind:
    """A machine as a platform team would hand it over: a runtime and nothing of any GPU."""

    name: str
    # Debian's suite that its programs are from, whatever its os-release says.
    suite: str
    # Whose ways it has: debian, el or suse.
    family: str
    # The folder of NVIDIA's repository.
    distribution: str
    # Ansible's group, and the molecule scenario that it is for.
    group: str
    packages: tuple[str, ...]
    services: tuple[str, ...]
    # Beside those that every node has.
    volumes: tuple[str, ...] = ()


_CONTAINERD = ("containerd", "runc")
_RPM = ("rpm", "dracut", "cpio", *_CONTAINERD)

KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            f"debian{number}-containerd",
            suite,
            "debian",
            f"debian{number}",
            "containerd",
            ("initramfs-tools", *_CONTAINERD),
            ("containerd",),
        )
        for number, suite in ((11, "bullseye"), (12, "bookworm"), (13, "trixie"))
    )
} | {
    "debian12-docker": Kind(
        "debian12-docker",
        "bookworm",
        "debian",
        "debian12",
        "docker",
        ("initramfs-tools", "docker.io"),
        ("containerd", "docker"),
        ("docker",),
    ),
    "el9-containerd": Kind(
        "el9-containerd",
        "bookworm",
        "el",
        "rhel9",
        "enterprise_linux",
        ("dnf", "dnf-plugins-core", *_RPM),
        ("containerd",),
    ),
    "suse15-containerd": Kind(
        "suse15-containerd",
        "bookworm",
        "suse",
        "opensuse15",
        "suse",
        ("zypper", *_RPM),
        ("containerd",),
    ),
}


def chosen(names: list[str]) -> list[Kind]:
    """The kinds of these names or groups, all where none is named."""
    groups = dict.fromkeys(kind.group for kind in KINDS.values())
    unknown = sorted(set(names) - set(KINDS) - set(groups))
    if unknown:
        known = f"there are {', '.join(KINDS)}, in the groups {', '.join(groups)}"
        raise LabError(f"no kind of machine is named {', '.join(unknown)}; {known}.")
    return [kind for kind in KINDS.values() if not names or {kind.name, kind.group} & set(names)]


def number(kind: Kind) -> int:
    """Its place in the lab's network."""
    return FIRST_ADDRESS + list(KINDS).index(kind.name)


def files(kind: Kind, repository: str) -> tuple[tuple[str, int, str], ...]:
    """What a machine has of its own: where its distribution's packages come from."""
    empty = ("etc/kubegpu-lab/routes", 0o644, "")
    if kind.family != "el":
        return (empty,)
    folder = f"{repository}distribution/{kind.distribution}/{os.uname().machine}"
    stanzas = "".join(
        f"[{name}]\nname=Rocky Linux $releasever - {name}, stubs of the kubegpu.share lab\n"
        f"baseurl={folder}/\nenabled=1\ngpgcheck=1\ngpgkey={folder}/RPM-GPG-KEY\n\n"
        for name in ("baseos", "crb", "epel")
    )
    return (empty, ("etc/yum.repos.d/rocky.repo", 0o644, stanzas))


def is_older(suite: str, than: str) -> bool:
    """Whether what is built on the one release can't be relied on to run on the other."""
    order = list(DEBIAN)
    if than not in order:
        raise LabError(f"the lab makes machines on Debian {', '.join(order)}, and this machine is {than}.")
    return order.index(suite) < order.index(than)


def _base(kind: Kind, machine: Source) -> Path:
    """What it has in common with the cluster's nodes, of its own release."""
    return rootfs.rootfs("node", rootfs.NODE_PACKAGES, of_suite(machine, kind.suite))


def system(kind: Kind, machine: Source) -> Path:
    """The machine's root filesystem, made on first use."""
    base = _base(kind, machine)
    wanted = list(kind.packages)
    if is_older(kind.suite, machine.suite):
        # Its own headers are what programs for its C library are compiled with.
        wanted.append("libc6-dev")
    kernel = os.uname().release
    with tempfile.TemporaryDirectory(prefix="kubegpu-machine-") as scratch:
        part = Path(scratch)
        (part / "machine").mkdir()
        shutil.copy2(HERE / "machine" / "finish", part / "machine" / "finish")
        source, target = HERE / "machine" / "nouveau.c", part / "machine" / "nouveau.ko"
        run(["gcc", "-c", "-o", str(target), str(source)])
        if kind.family != "debian":
            (part / "machine" / "rpms").mkdir()
            release = rpms.el_release() if kind.family == "el" else rpms.suse_release()
            for rpm in (*rpms.system(), release):
                rpms.make_rpm(rpm, os.uname().machine, part / "machine" / "rpms")
        for name in _OF_NODES:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / "node" / "rootfs" / name, part / name)
        return rootfs.grown(kind.name, base, wanted, (part, HERE / "machine" / kind.family), (kind.family, kernel))


def sysroot(kind: Kind, machine: Source, made: Path) -> Path | None:
    """Headers and libraries of a machine's system, unpacked for the compiler, where those here are too new for it."""
    if not is_older(kind.suite, machine.suite):
        return None
    # By the release alone: other changes of a machine are nothing to what is compiled for it.
    target = cache_root() / "sysroot" / f"{_base(kind, machine).parent.name}-{SYSROOT}"
    with made_once(target) as fresh:
        if fresh:
            triplet = output(["gcc", "-dumpmachine"])
            names = ("./lib", "./lib64", "./usr/lib64", "./usr/include", f"./usr/lib/{triplet}")
            run(["tar", "-C", str(fresh), "--no-same-owner", "-xf", str(made), *names])
            for link in [path for path in fresh.rglob("*") if path.is_symlink()]:
                # Meant from the root of the system that it is of.
                if os.readlink(link).startswith("/"):
                    inside = fresh / os.readlink(link).lstrip("/")
                    link.unlink()
                    link.symlink_to(os.path.relpath(inside, link.parent.resolve()))
    return target
