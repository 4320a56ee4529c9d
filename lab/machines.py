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
# Increase when the contents of the compiler's sysroot change.
SYSROOT = 2
FIRST_ADDRESS = 41
# Packages of every machine and every node of the cluster.
_OF_NODES = (
    "etc/ssh/sshd_config.d/lab.conf",
    "etc/systemd/system/kubegpu-lab-node.service",
    "usr/local/lib/kubegpu-lab/boot",
    "usr/local/lib/kubegpu-lab/init",
)


@dataclass(frozen=True)
class Kind:
    """A machine as a platform team provides it: a container runtime, and nothing for GPUs."""

    name: str
    # The Debian suite of its programs; its os-release may name another distribution.
    suite: str
    # The family that it behaves like: debian, el or suse.
    family: str
    # The folder in NVIDIA's repository.
    distribution: str
    # Ansible's group and the molecule scenario.
    group: str
    packages: tuple[str, ...]
    services: tuple[str, ...]
    # In addition to those of every node.
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
    """Return the kinds with these names or groups; all by default."""
    groups = dict.fromkeys(kind.group for kind in KINDS.values())
    unknown = sorted(set(names) - set(KINDS) - set(groups))
    if unknown:
        known = f"there are {', '.join(KINDS)}, in the groups {', '.join(groups)}"
        raise LabError(f"no kind or group of machines is named {', '.join(unknown)}; {known}.")
    return [kind for kind in KINDS.values() if not names or {kind.name, kind.group} & set(names)]


def number(kind: Kind) -> int:
    """Return its number in the lab's network."""
    return FIRST_ADDRESS + list(KINDS).index(kind.name)


def files(kind: Kind, repository: str) -> tuple[tuple[str, int, str], ...]:
    """Return a machine's own files: its distribution's package sources."""
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
    """Test whether programs built on one release may fail to run on the other."""
    order = list(DEBIAN)
    if than not in order:
        raise LabError(f"the lab builds machines on Debian {', '.join(order)}, and this machine is {than}.")
    return order.index(suite) < order.index(than)


def _base(kind: Kind, machine: Source) -> Path:
    """Return the packages that it shares with the cluster's nodes, in its own release."""
    return rootfs.rootfs("node", rootfs.NODE_PACKAGES, of_suite(machine, kind.suite))


def system(kind: Kind, machine: Source) -> Path:
    """Return the machine's root filesystem, building it on first use."""
    base = _base(kind, machine)
    wanted = list(kind.packages)
    if is_older(kind.suite, machine.suite):
        # Programs for its C library are compiled with its own headers.
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
    """Unpack headers and libraries of a machine's system for the compiler, when this machine's are too new for it."""
    if not is_older(kind.suite, machine.suite):
        return None
    # Keyed by the release alone, which decides what is compiled.
    target = cache_root() / "sysroot" / f"{_base(kind, machine).parent.name}-{SYSROOT}"
    with made_once(target) as fresh:
        if fresh:
            triplet = output(["gcc", "-dumpmachine"])
            names = ("./lib", "./lib64", "./usr/lib64", "./usr/include", f"./usr/lib/{triplet}")
            run(["tar", "-C", str(fresh), "--no-same-owner", "-xf", str(made), *names])
            for link in [path for path in fresh.rglob("*") if path.is_symlink()]:
                # An absolute link is relative to the root of its own system.
                if os.readlink(link).startswith("/"):
                    inside = fresh / os.readlink(link).lstrip("/")
                    link.unlink()
                    link.symlink_to(os.path.relpath(inside, link.parent.resolve()))
    return target
