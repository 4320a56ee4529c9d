# SPDX-License-Identifier: GPL-3.0-or-later
"""What the machine must have; apt brings what is missing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from lab.paths import RUN
from lab.shell import LabError, run, say, step, wait_for

# Program -> the Debian package that has it.
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
# Only machines of RPM's families need these.
RPM_PROGRAMS = {"rpmbuild": "rpm", "rpmsign": "rpm", "createrepo_c": "createrepo-c"}
FILES = {"/usr/include/stdio.h": "libc6-dev"}
# Every systemd, kubelet and pod takes a few inotify instances, and all nodes share what the kernel allows one user.
LIMITS = {"fs/inotify/max_user_instances": 2048, "fs/inotify/max_user_watches": 524288}
_LIMITS_BEFORE = RUN / "limits.json"
_SYSCTL = Path("/proc/sys")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def missing_packages(need_engine: bool = True, rpm: bool = False) -> list[str]:
    """Packages whose programs or files the machine lacks, sorted."""
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    programs = PROGRAMS | (RPM_PROGRAMS if rpm else {})
    lacking = {package for program, package in programs.items() if not shutil.which(program, path=path)}
    lacking |= {package for file, package in FILES.items() if not Path(file).exists()}
    if not need_engine and shutil.which("docker", path=path):
        # A running engine needs no dockerd on this side.
        lacking.discard("docker.io")
    return sorted(lacking)


def prepare(need_engine: bool = True, rpm: bool = False) -> None:
    """Install what is missing, or say in one sentence what is."""
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{SBIN}"
    if os.geteuid() != 0:
        raise LabError("the lab must be run as root: it makes containers, mounts and networks.")
    lacking = missing_packages(need_engine, rpm)
    if not lacking:
        return
    if not shutil.which("apt-get"):
        raise LabError(f"this machine has no apt and lacks what these Debian packages bring: {', '.join(lacking)}.")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step(f"installing {', '.join(lacking)}"):
        wait_for("the lock of apt", lambda: run(["apt-get", "check"], check=False).returncode == 0, 120)
        run(["apt-get", "-q", "update"], env=environment)
        # From Debian 13 on, the client is a package apart.
        if "docker.io" in lacking and run(["apt-cache", "show", "docker-cli"], check=False).returncode == 0:
            lacking.append("docker-cli")
        run(["apt-get", "-q", "-y", "--no-install-recommends", "install", *lacking], env=environment)


def raise_limits() -> None:
    """Let the kernel carry many nodes; what was there before is noted first."""
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
    """Put back what raise_limits found, unless somebody else has set it since."""
    if not _LIMITS_BEFORE.exists():
        return
    for name, value in json.loads(_LIMITS_BEFORE.read_text()).items():
        if int((_SYSCTL / name).read_text()) == LIMITS.get(name):
            (_SYSCTL / name).write_text(f"{value}\n")
    _LIMITS_BEFORE.unlink()
    if not any(RUN.iterdir()):
        RUN.rmdir()
