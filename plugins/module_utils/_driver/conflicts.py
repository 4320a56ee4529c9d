# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect installations on a node that conflict with the requested driver, before anything changes.

By packages and their origin, package sources, and other sources of a driver (``driver.others`` of ``gpu_node``). Role
driver and role preflight use this one function.
"""

from __future__ import annotations

import fnmatch
import re
import typing as t

from .._host.types import Package
from .._packages.types import AptSource, RpmRepository
from . import nvidia_smi
from .runfile import driver_packages
from .types import Conflict, NodeFacts

Found = t.Optional[tuple[str, str]]

# Id and description of each conflict.
IDS: dict[str, str] = {
    "driver-runfile": "A driver from a .run file is installed, and packages are requested.",
    "driver-packages-present": "Packages of the driver are installed, and a .run file is requested.",
    "driver-twice": "A container provides the driver, and the machine has one of its own, too.",
    "driver-rpmfusion": "RPM Fusion's driver is installed, which conflicts with NVIDIA's packages.",
    "driver-elrepo": "ELRepo's driver is installed, which conflicts with NVIDIA's packages.",
    "driver-negativo17": "negativo17's driver is installed, whose packages have the same names as NVIDIA's.",
    "driver-graphics-ppa": "The graphics-drivers PPA is a package source; its packages have the names of Ubuntu's.",
    "driver-debian-legacy": "A driver from Debian's legacy or tesla packages is installed, with the same files.",
    "driver-other-source": "The installed driver comes from another source than requested, and the two don't mix.",
    "driver-old-key": "NVIDIA's repository is configured with its retired key 7fa2af80.",
    "driver-other-release": "NVIDIA's repository for another release of the distribution is among the package sources.",
    "driver-source-twice": "NVIDIA's repository is among the package sources already, with another key.",
    "driver-dkms-old": "The installed dkms is held, and older than the driver's build requires.",
}

OLD_KEY = "7fa2af80"
# Since this version the build requires a newer dkms than Debian 12 has.
DKMS_SINCE, DKMS_NEEDED = (570, 148, 8), (3, 1, 8)
CUDA_FOLDER = re.compile(r"/compute/cuda/repos/([a-z]+[0-9]+)/")
# rpm packages have a vendor, as in ``driver.others``, and each source of packages goes with some vendors. A driver of
# the distribution consists of NVIDIA's packages around the distribution's module.
VENDORS = {"nvidia": "NVIDIA's repository", "distribution": "the distribution"}
FITTING = {"repository": {"nvidia"}, "packages": {"nvidia"}, "distribution": {"distribution", "nvidia"}}
# NVIDIA's packages for Debian and Ubuntu have the same maintainers: there names and versions differ.
ARCHIVE_VERSION = re.compile(r"ubuntu0\.[0-9]{2}\.[0-9]{2}|~deb[0-9]+u|~bpo[0-9]+")
ARCHIVE_NAMES = ("nvidia-open-kernel-dkms", "*nvidia-*-server", "nvidia-*-server-open", "linux-modules-nvidia-*")
NVIDIA_NAMES = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-open", "nvidia-open-[0-9]*", "cuda-drivers*")


def conflicts(gpu_node: NodeFacts, state: str, source: str, version: str, repo_url: str = "") -> list[Conflict]:
    """Return everything that has to be removed before the driver can be installed.

    :param state: of the requested driver, as ``driver_state``.
    :param source: as ``driver_source``.
    :param version: as ``driver_version``.
    :param repo_url: as ``driver_repo_url``, where it is known.
    """
    if state != "present":
        return []
    node = _Node(gpu_node, source, version, repo_url)
    provider = nvidia_smi.of(node.others)
    detectors = _DETECTORS
    if provider is not None:
        # Nothing is installed. A driver on the machine itself is the provider's own, but for that of a container.
        detectors = {} if provider.root == "/" else {"driver-twice": _twice}
    found: list[Conflict] = []
    for id, detect in detectors.items():
        conflict = detect(node)
        if conflict is not None:
            found.append({"id": id, "found": conflict[0], "remedy": conflict[1]})
    return found


class _Node:
    """A node's facts and the requested driver; a section that wasn't collected is empty."""

    def __init__(self, seen: NodeFacts, source: str, version: str, repo_url: str) -> None:
        self.source = source
        self.version = version
        self.repo_url = repo_url
        self.packages: t.Mapping[str, Package] = seen.get("packages") or {}
        driver: t.Mapping[str, t.Any] = seen.get("driver") or {}
        self.others = set(driver.get("others") or [])
        distribution: t.Mapping[str, t.Any] = seen.get("distribution") or {}
        self.id = str(distribution.get("id") or "")
        self.release = str(distribution.get("version") or "")
        self.family = str(distribution.get("family") or "")
        apt: t.Mapping[str, t.Any] = seen.get("apt") or {}
        rpm: t.Mapping[str, t.Any] = seen.get("rpm") or {}
        self.apt_sources: t.Sequence[AptSource] = apt.get("sources") or []
        self.rpm_repositories: t.Sequence[RpmRepository] = rpm.get("repositories") or []
        self.keys = [*(apt.get("keys") or {}), *_words(rpm.get("keys")), *_words(rpm.get("imported"))]

    def named(self, *patterns: str) -> list[str]:
        """Return the installed packages whose names match a pattern."""
        return sorted(name for name in self.packages if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))

    def of_origin(self, word: str, *patterns: str) -> list[str]:
        """Return the packages of these names whose maintainer or vendor contains a word."""
        return [name for name in self.named(*patterns) if word in str(self.packages[name].get("origin") or "").lower()]

    @property
    def remove(self) -> str:
        """The command that removes packages on this node."""
        return {"debian": "apt-get purge", "suse": "zypper remove"}.get(self.family, "dnf remove")


def _words(value: t.Any) -> list[str]:
    return [str(name) for name in value] if value else []


def _some(names: t.Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _runfile(node: _Node) -> Found:
    if "runfile" not in node.others or node.source == "runfile":
        return None
    return (
        "has its driver from a .run file",
        "run '/usr/bin/nvidia-uninstall --silent', or set driver_state to external",
    )


def _packages_present(node: _Node) -> Found:
    names = driver_packages(node.packages) if node.source == "runfile" else []
    if not names:
        return None
    return (
        f"has the driver's packages {_some(names)}",
        f"run '{node.remove} {' '.join(names)}', or set driver_source to repository",
    )


def _twice(node: _Node) -> Found:
    provider = nvidia_smi.of(node.others)
    names = [*(["its .run file"] if "runfile" in node.others else []), *driver_packages(node.packages)]
    if provider is None or not names:
        return None
    return (
        f"has its driver from {provider.who}, and one of its own: {_some(names)}",
        "remove that one, or have no driver provided on the node (GPU Operator: driver.enabled=false) and reboot it",
    )


def _rpmfusion(node: _Node) -> Found:
    if node.family == "debian":
        return None
    names = node.named("akmod-nvidia*", "xorg-x11-drv-nvidia*")
    if not names and "rpmfusion" not in node.others:
        return None
    what = f"RPM Fusion's {_some(names)}" if names else "RPM Fusion's driver"
    return f"has {what}", f"run '{node.remove} {' '.join(names) or 'akmod-nvidia xorg-x11-drv-nvidia*'}'"


def _elrepo(node: _Node) -> Found:
    if node.family == "debian":
        return None
    names = sorted({*node.named("nvidia-x11-drv*"), *node.of_origin("elrepo", "*nvidia*")})
    if not names and "elrepo" not in node.others:
        return None
    what = f"ELRepo's {_some(names)}" if names else "ELRepo's driver"
    return f"has {what}", f"run '{node.remove} {' '.join(names) or 'kmod-nvidia nvidia-x11-drv*'}'"


def _negativo17(node: _Node) -> Found:
    names = node.of_origin("negativo17", "*nvidia*", "*cuda*")
    enabled = [
        str(repository.get("file") or repository.get("id"))
        for repository in node.rpm_repositories
        if "negativo17" in f"{repository.get('url')} {repository.get('id')}" and repository.get("enabled", True)
    ]
    if not names and not enabled and "negativo17" not in node.others:
        return None
    what = f"negativo17's {_some(names)}" if names else "negativo17's repository enabled"
    steps = [f"{node.remove} {' '.join(names)}"] if names else []
    steps += [f"rm {path}" for path in enabled if path.startswith("/")]
    return f"has {what}", f"run '{' && '.join(steps) or node.remove + ' dkms-nvidia nvidia-driver*'}'"


def _graphics_ppa(node: _Node) -> Found:
    listed = [str(source["file"]) for source in node.apt_sources if "graphics-drivers" in str(source.get("url"))]
    if not listed and "graphics-ppa" not in node.others:
        return None
    what = f"the graphics-drivers PPA in {listed[0]}" if listed else "its driver from the graphics-drivers PPA"
    return (
        f"has {what}",
        "run 'add-apt-repository --remove ppa:graphics-drivers/ppa', and 'apt-get purge' what is installed from it",
    )


def _debian_legacy(node: _Node) -> Found:
    if node.family != "debian":
        return None
    names = node.named("nvidia-legacy-*", "nvidia-tesla-*")
    if not names:
        return None
    return f"has Debian's {_some(names)}", "run \"apt-get purge 'nvidia-legacy-*' 'nvidia-tesla-*'\""


def _other_source(node: _Node) -> Found:
    if node.family == "debian":
        names = _of_the_other_archive(node)
        whose = "NVIDIA's repository" if node.source == "distribution" else "the distribution"
    else:
        foreign = sorted((node.others & set(VENDORS)) - FITTING.get(node.source, set(VENDORS)))
        # Packages of the container toolkit have NVIDIA's name too, and may stay.
        names = [name for name in node.named("*nvidia*", "cuda-drivers*") if "container" not in name] if foreign else []
        whose = " and ".join(VENDORS[vendor] for vendor in foreign)
    if not names:
        return None
    return (
        f"has {_some(names)} from {whose}, and driver_source is {node.source}",
        f"set driver_source to what is installed, or run '{node.remove} {' '.join(names)}' first",
    )


def _of_the_other_archive(node: _Node) -> list[str]:
    if node.source not in ("repository", "packages", "distribution"):
        return []
    if node.source != "distribution":
        named = node.named(*ARCHIVE_NAMES)
        driver = driver_packages(node.packages)
        versions = [name for name in driver if ARCHIVE_VERSION.search(str(node.packages[name].get("version")))]
        return sorted({*named, *versions})
    names = node.named(*NVIDIA_NAMES)
    if node.id == "ubuntu":
        # Ubuntu's packages for servers conflict with those without "-server", of any source.
        names += [name for name in node.named("nvidia-dkms-*", "libnvidia-compute*") if "-server" not in name]
    return sorted(set(names))


def _old_key(node: _Node) -> Found:
    keyring = node.packages.get("cuda-keyring")
    if keyring and _numbers(str(keyring.get("version"))) < (1, 1):
        return (
            f"has cuda-keyring {keyring.get('version')}, of NVIDIA's retired key {OLD_KEY}",
            "run 'apt-get purge cuda-keyring'",
        )
    named = [str(source["file"]) for source in node.apt_sources if OLD_KEY in str(source.get("signed_by")).lower()]
    if named:
        return f"has {named[0]}, which trusts NVIDIA's retired key {OLD_KEY}", f"run 'rm {named[0]}'"
    if any(OLD_KEY in key.lower() for key in node.keys):
        command = f"apt-key del {OLD_KEY}" if node.family == "debian" else f"rpm -e gpg-pubkey-{OLD_KEY}"
        return f"has NVIDIA's retired key {OLD_KEY}", f"run '{command}'"
    return None


def _repositories(node: _Node) -> list[tuple[str, str]]:
    """Return directory and file of NVIDIA's repositories in lists of others."""
    rows = []
    for repository in (*node.apt_sources, *(row for row in node.rpm_repositories if row.get("enabled", True))):
        match = CUDA_FOLDER.search(str(repository.get("url")))
        if match and "/kubegpu-" not in str(repository.get("file")):
            rows.append((match.group(1), str(repository.get("file"))))
    return rows


def _other_release(node: _Node) -> Found:
    if node.id not in ("debian", "ubuntu") or not node.release:
        return None
    own = node.id + node.release.replace(".", "")
    for folder, file in _repositories(node):
        if folder != own:
            return (
                f"has NVIDIA's repository for {folder} in {file} and is {own}",
                f"run 'apt-get purge cuda-keyring; rm -f {file}'",
            )
    return None


def _source_twice(node: _Node) -> Found:
    if node.source != "repository" or node.family != "debian" or not node.repo_url:
        return None
    for row in node.apt_sources:
        if str(row.get("url")).rstrip("/") != node.repo_url.rstrip("/") or "kubegpu-" in str(row.get("signed_by")):
            continue
        owner = "apt-get purge cuda-keyring" if "cuda-keyring" in node.packages else f"rm {row.get('file')}"
        return f"has {node.repo_url} in {row.get('file')} already, with a key of its own", f"run '{owner}'"
    return None


def _dkms_old(node: _Node) -> Found:
    have = node.packages.get("dkms")
    if not have or _numbers(node.version) < DKMS_SINCE or _numbers(str(have.get("version"))) >= DKMS_NEEDED:
        return None
    # NVIDIA's repository has a newer dkms, which replaces one that isn't held.
    if node.source == "repository" and not have.get("held"):
        return None
    needed = ".".join(map(str, DKMS_NEEDED))
    how = "run 'apt-mark unhold dkms'" if have.get("held") else f"install dkms {needed} or newer first"
    return f"has dkms {have.get('version')}, and driver {node.version} is built with {needed} or newer", how


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without epoch and revision."""
    return tuple(int(part) for part in re.findall(r"[0-9]+", version.split(":")[-1].split("-")[0]))


_DETECTORS: dict[str, t.Callable[[_Node], Found]] = {
    "driver-runfile": _runfile,
    "driver-packages-present": _packages_present,
    "driver-rpmfusion": _rpmfusion,
    "driver-elrepo": _elrepo,
    "driver-negativo17": _negativo17,
    "driver-graphics-ppa": _graphics_ppa,
    "driver-debian-legacy": _debian_legacy,
    "driver-other-source": _other_source,
    "driver-old-key": _old_key,
    "driver-other-release": _other_release,
    "driver-source-twice": _source_twice,
    "driver-dkms-old": _dkms_old,
}
