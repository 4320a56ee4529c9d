# SPDX-License-Identifier: GPL-3.0-or-later
"""Print, as JSON, the state of a machine that must be equal before the installation and after the uninstall.

Standard library only, for Python 3.9 and newer. With a path as argument, the JSON is written there instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys

# Paths that change by themselves or with any use of a package manager, or that the tools below report better.
LEFT_OUT = (
    "/dev",
    "/proc",
    "/run",
    "/sys",
    "/tmp",
    "/root/.ansible",
    "/root/.cache",
    "/boot",
    "/etc/ld.so.cache",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/var/cache",
    "/var/log",
    "/var/tmp",
    "/var/lib/apt",
    "/var/lib/containerd",
    "/var/lib/dnf",
    "/var/lib/docker",
    "/var/lib/dpkg",
    "/var/lib/kubegpu-lab",
    "/var/lib/rpm",
    "/var/lib/systemd",
    "/var/lib/YaST2",
    "/var/lib/zypp",
)
INITRAMFS = "lsinitramfs /boot/initrd.img-* || lsinitrd /boot/initramfs-*.img || lsinitrd /boot/initrd-*"
# Each prints a state; a missing tool prints nothing.
QUESTIONS = {
    "packages of dpkg": "dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n'",
    "held": "apt-mark showhold",
    "unfinished": "dpkg --audit",
    "packages of rpm": "rpm -qa --qf '%{NAME} %{EVR}\\n' | grep -v ^gpg-pubkey | sort",
    "keys of rpm": "rpm -qa gpg-pubkey --qf '%{NVR} %{SUMMARY}\\n' | sort",
    "locks of dnf": "dnf -q -C versionlock list | sort",
    "locks of zypper": "zypper --non-interactive --quiet locks",
    "modules of dnf": "cat /etc/dnf/modules.d/*.module",
    "repositories of dnf": "dnf -q -C repolist",
    "repositories of zypper": "zypper --non-interactive --quiet repos -u",
    "repositories of apt": "apt-get indextargets --format '$(SITE) $(RELEASE)' | sort -u",
    "services": "systemctl list-unit-files --no-legend --plain --type=service,path,timer | awk '{print $1, $2}' | sort",
    "containerd": "containerd config dump",
    "docker": "docker info --format '{{.DefaultRuntime}}'",
    # Docker 20.10 forgets the built-in names that begin with io.containerd whenever it reads its file again.
    "runtimes of docker": "docker info --format '{{range $k, $_ := .Runtimes}}{{println $k}}{{end}}' | grep -v ^io[.]",
    "modprobe": "modprobe --showconfig | grep -E 'nouveau|nvidia' | grep -v ^alias",
    "initramfs": f"({INITRAMFS}) 2>/dev/null | awk '{{print $NF}}' | grep -E 'nouveau|nvidia|modprobe.d/' | sort",
    "devices": "ls /dev | grep nvidia",
    "libraries": "ldconfig -p | grep -iE 'nvidia|cuda'",
}


def files() -> dict[str, str]:
    """Map paths to kind, mode, owner and digest."""
    found = {}
    for folder, folders, names in os.walk("/"):
        folders[:] = [
            name
            for name in folders
            if os.path.join(folder, name) not in LEFT_OUT
            and name != "__pycache__"
            and not os.path.ismount(os.path.join(folder, name))
        ]
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            if path in LEFT_OUT:
                continue
            about = os.lstat(path)
            text = f"{stat.filemode(about.st_mode)} {about.st_uid}:{about.st_gid}"
            if stat.S_ISLNK(about.st_mode):
                text += f" {os.readlink(path)}"
            elif stat.S_ISREG(about.st_mode):
                with open(path, "rb") as file:
                    text += f" {hashlib.sha256(file.read()).hexdigest()[:16]}"
            found[path] = text
    return found


def answers() -> dict[str, list[str]]:
    environment = {**os.environ, "LC_ALL": "C", "PATH": f"/usr/local/sbin:/usr/sbin:/sbin:{os.environ.get('PATH', '')}"}
    return {
        question: subprocess.run(
            ["sh", "-c", command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
        )
        .stdout.decode(errors="replace")
        .splitlines()
        for question, command in QUESTIONS.items()
    }


def main() -> None:
    text = json.dumps({"files": files(), "answers": answers()})
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            file.write(text)
    else:
        print(text)


main()
