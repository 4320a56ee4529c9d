# SPDX-License-Identifier: GPL-3.0-or-later
"""Install the programs that the lab needs with apt, and raise kernel limits."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from lab.paths import RUN
from lab.shell import LabError, run, say, step, wait_for

# Program -> its Debian package.
PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "ip": "iproute2",
    "apt-ftparchive": "apt-utils",
    "dpkg-deb": "dpkg",
    "gpg": "gpg",
    "gpg-agent": "gpg-agent",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "gcc": "gcc",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
# For machines of the RPM families only.
RPM_PROGRAMS = {"rpmbuild": "rpm", "rpmsign": "rpm", "createrepo_c": "createrepo-c"}
# For the guest with a kernel of its own.
GUEST_PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "make": "make"}
FILES = {"/usr/include/stdio.h": "libc6-dev"}
# Every systemd, kubelet and pod takes inotify instances, and all nodes share one user's limit.
LIMITS = {"fs/inotify/max_user_instances": 2048, "fs/inotify/max_user_watches": 524288}
_LIMITS_BEFORE = RUN / "limits.json"
_SYSCTL = Path("/proc/sys")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def missing_packages(need_engine: bool = True, rpm: bool = False, guest: bool = False) -> list[str]:
    """List the packages whose programs or files are missing, sorted."""
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    programs = PROGRAMS | (RPM_PROGRAMS if rpm else {}) | (GUEST_PROGRAMS if guest else {})
    lacking = {package for program, package in programs.items() if not shutil.which(program, path=path)}
    lacking |= {package for file, package in FILES.items() if not Path(file).exists()}
    if not need_engine and shutil.which("docker", path=path):
        # A running engine needs no dockerd here.
        lacking.discard("docker.io")
    return sorted(lacking)


def prepare(need_engine: bool = True, rpm: bool = False, guest: bool = False) -> None:
    """Install missing packages.

    :raises LabError: not root, or no apt to install them with.
    """
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{SBIN}"
    if os.geteuid() != 0:
        raise LabError("the lab must be run as root: it creates containers, mounts and networks.")
    lacking = missing_packages(need_engine, rpm, guest)
    if not lacking:
        return
    if not shutil.which("apt-get"):
        raise LabError(
            f"this machine has no apt, and programs of these Debian packages are missing: {', '.join(lacking)}."
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step(f"installing {', '.join(lacking)}"):
        wait_for("the lock of apt", lambda: run(["apt-get", "check"], check=False).returncode == 0, 120)
        run(["apt-get", "-q", "update"], env=environment)
        # Since Debian 13 the client is a separate package.
        if "docker.io" in lacking and run(["apt-cache", "show", "docker-cli"], check=False).returncode == 0:
            lacking.append("docker-cli")
        run(["apt-get", "-q", "-y", "--no-install-recommends", "install", *lacking], env=environment)


def raise_limits() -> None:
    """Raise kernel limits for many nodes, after recording the old values."""
    now = {name: int((_SYSCTL / name).read_text()) for name in LIMITS}
    low = {name: value for name, value in now.items() if value < LIMITS[name]}
    if not low:
        return
    RUN.mkdir(mode=0o700, exist_ok=True)
    known = json.loads(_LIMITS_BEFORE.read_text()) if _LIMITS_BEFORE.exists() else {}
    fresh = _LIMITS_BEFORE.with_suffix(".new")
    fresh.write_text(json.dumps({**low, **known}))
    fresh.replace(_LIMITS_BEFORE)
    for name in low:
        try:
            (_SYSCTL / name).write_text(f"{LIMITS[name]}\n")
        except OSError as error:
            say(f"{name.replace('/', '.')} stays at {now[name]} ({error.strerror}); a large lab may need more")


def restore_limits() -> None:
    """Restore the limits that raise_limits recorded, unless somebody changed them since."""
    if not _LIMITS_BEFORE.exists():
        return
    for name, value in json.loads(_LIMITS_BEFORE.read_text()).items():
        if int((_SYSCTL / name).read_text()) == LIMITS.get(name):
            (_SYSCTL / name).write_text(f"{value}\n")
    _LIMITS_BEFORE.unlink()
    if not any(RUN.iterdir()):
        RUN.rmdir()
