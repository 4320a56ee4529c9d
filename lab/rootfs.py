# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian root filesystems as tar files in the cache: one for nodes, a small one that images are built on."""

from __future__ import annotations

import hashlib
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
BASE_PACKAGES = ("python3", "python3-pip", "iptables", "kmod")
# Bump when the steps below change what comes out.
RECIPE = 2


def rootfs(name: str, packages: Sequence[str], source: Source) -> Path:
    """The tar file of a minimal system with these packages, made on first use."""
    architecture = output(["dpkg", "--print-architecture"])
    wanted = repr((RECIPE, sorted(packages), source.uri, source.suite, source.components, architecture))
    key = hashlib.sha256(wanted.encode()).hexdigest()[:16]
    target = cache_root() / "rootfs" / f"{name}-{source.suite}-{key}"
    with made_once(target) as fresh:
        if fresh:
            with step(f"making the {name} system from {source.suite} ({len(packages)} packages and what they need)"):
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
    unwanted = ("etc/ssh/ssh_host_*", "etc/hostname", "var/cache/apt/*.bin", "var/lib/apt/lists/*_*", "var/log/*.log")
    for path in [path for pattern in unwanted for path in system.glob(pattern)]:
        path.unlink()
    # Empty means that each node makes its own at its first boot.
    (system / "etc" / "machine-id").write_text("")
    exclude = ["./dev/*", "./proc/*", "./sys/*", "./var/cache/apt/archives/*.deb"]
    exclude += [f"./usr/share/{each}/*" for each in ("doc", "info", "locale", "man")]
    command = ["tar", "-C", str(system), "--numeric-owner", *(f"--exclude={each}" for each in exclude)]
    run([*command, "-cf", str(folder / "rootfs.tar"), "."])
    run(["rm", "-rf", str(system)])
