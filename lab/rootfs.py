# SPDX-License-Identifier: GPL-3.0-or-later
"""Build Debian root filesystems as tar files in the cache: one for nodes, a small one as the base of images."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lab.aptsources import Source
from lab.paths import cache_root, made_once
from lab.shell import output, run, step

NODE_PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "python3", "openssh-server", "ca-certificates", "gnupg"),
    *("iproute2", "iputils-ping", "iptables", "ipset", "ebtables", "ethtool", "socat", "conntrack", "kmod", "procps"),
    *("containernetworking-plugins", "runc", "curl", "less"),
)
# kubelet_devices_info needs the first, which debootstrap can't configure in every suite; a node with cards for virtual
# machines the second, where a test gives it a kernel.
CLUSTER_PACKAGES = (*NODE_PACKAGES, "python3-grpcio", "initramfs-tools")
BASE_PACKAGES = ("python3", "python3-pip", "iptables", "kmod")
# Increase when the steps below change the result.
RECIPE = 2


def rootfs(name: str, packages: Sequence[str], source: Source) -> Path:
    """Return the tar file of a minimal system with these packages, building it on first use."""
    architecture = output(["dpkg", "--print-architecture"])
    wanted = repr((RECIPE, sorted(packages), source.uri, source.suite, source.components, architecture))
    key = hashlib.sha256(wanted.encode()).hexdigest()[:16]
    target = cache_root() / "rootfs" / f"{name}-{source.suite}-{key}"
    with made_once(target) as fresh:
        if fresh:
            with step(f"building the {name} system from {source.suite} ({len(packages)} packages and what they need)"):
                _debootstrap(fresh, packages, source)
    return target / "rootfs.tar"


def _debootstrap(folder: Path, packages: Sequence[str], source: Source) -> None:
    system, debs = folder / "system", cache_root() / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    keyring = [f"--keyring={source.signed_by}"] if source.signed_by and Path(source.signed_by).is_file() else []
    run(
        [
            "debootstrap",
            "--variant=minbase",
            f"--cache-dir={debs}",
            f"--include={','.join(packages)}",
            f"--components={','.join(source.components)}",
            *keyring,
            source.suite,
            str(system),
            source.uri,
        ],
        tied=True,
    )
    _pack(folder, system)


def _pack(folder: Path, system: Path) -> None:
    """Write the tar file of a system, without files that each machine generates."""
    unwanted = ("etc/ssh/ssh_host_*", "etc/hostname", "var/cache/apt/*.bin", "var/lib/apt/lists/*_*", "var/log/*.log")
    for path in [path for pattern in unwanted for path in system.glob(pattern)]:
        path.unlink()
    # Empty: each node generates its own at its first boot.
    (system / "etc" / "machine-id").write_text("")
    exclude = ["./dev/*", "./proc/*", "./sys/*", "./var/cache/apt/archives/*.deb"]
    exclude += [f"./usr/share/{each}/*" for each in ("doc", "info", "locale", "man")]
    command = ["tar", "-C", str(system), "--numeric-owner", *(f"--exclude={each}" for each in exclude)]
    run([*command, "-cf", str(folder / "rootfs.tar"), "."])
    run(["rm", "-rf", str(system)])


# Increase when the steps below change the result.
GROWN = 2
_IN_A_NAMESPACE = """\
set -eu
system=$1; debs=$2; laid=$3; shift 3
mount -t proc proc "$system/proc"
# Its own devices, so that packages can't change this machine's /dev.
mount -t tmpfs -o mode=755 dev "$system/dev"
for each in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    mknod -m 666 "$system/dev/${each%% *}" c ${each#* }
done
ln -s /proc/self/fd "$system/dev/fd"
mkdir -p "$system/var/cache/apt/archives" "$debs/partial"
mount --bind "$debs" "$system/var/cache/apt/archives"
cp /etc/resolv.conf "$system/etc/resolv.conf"
# Start no service in a system under construction.
printf '#!/bin/sh\\nexit 101\\n' >"$system/usr/sbin/policy-rc.d"
chmod 755 "$system/usr/sbin/policy-rc.d"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
chroot "$system" apt-get -q update
chroot "$system" apt-get -q -y --no-install-recommends -o APT::Keep-Downloaded-Packages=true install "$@"
# After the packages, which would ask about existing files.
cp -a "$laid/." "$system/"
chroot "$system" /machine/finish $FINISH
rm -f "$system/usr/sbin/policy-rc.d"
"""


def grown(name: str, base: Path, packages: Sequence[str], parts: Sequence[Path], finish: Sequence[str]) -> Path:
    """Derive a system from another one: install packages, copy folders over it, run /machine/finish.

    :param parts: folders whose content is laid over the system, later ones over earlier ones; one has machine/finish.
    :param finish: the arguments of /machine/finish.
    """
    digest = hashlib.sha256(repr((GROWN, base.parent.name, sorted(packages), list(finish))).encode())
    for part in parts:
        for path in sorted(part.rglob("*")):
            inside = path.relative_to(part).as_posix()
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            digest.update(f"{inside} {os.access(path, os.X_OK)}\n".encode() + content)
    target = cache_root() / "rootfs" / f"{name}-{digest.hexdigest()[:16]}"
    with made_once(target) as fresh:
        if fresh:
            with step(f"building the {name} system"):
                _grow(fresh, base, packages, parts, finish)
            _forget_other(target)
    return target / "rootfs.tar"


def _forget_other(target: Path) -> None:
    """Remove earlier versions of a system, which take hundreds of megabytes."""
    for other in target.parent.glob(f"{target.name.rpartition('-')[0]}-{'[0-9a-f]' * 16}"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)


def _grow(folder: Path, base: Path, packages: Sequence[str], parts: Sequence[Path], finish: Sequence[str]) -> None:
    system, debs = folder / "system", cache_root() / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    system.mkdir()
    run(["tar", "-C", str(system), "--numeric-owner", "-xf", str(base)])
    laid = folder / "laid"
    for part in parts:
        shutil.copytree(part, laid, symlinks=True, dirs_exist_ok=True)
    run(["chmod", "-R", "u=rwX,go=rX", str(laid)])
    environment = {**os.environ, "FINISH": " ".join(finish)}
    arguments = (str(system), str(debs), str(laid), *packages)
    run(["sh", "-c", _IN_A_NAMESPACE, "grow", *arguments], tied=True, env=environment)
    shutil.rmtree(laid)
    _pack(folder, system)
