# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What on a node would clash with the driver that is to be installed, told before anything changes. Pure.

The first look decides: packages and their origin, package sources, and who else manages a driver (``driver.others`` of
``gpu_node``). Role driver and role preflight ask this one function.
"""

from __future__ import annotations

import fnmatch
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._runfile import driver_packages

Json = t.Mapping[str, t.Any]
Found = t.Optional[t.Tuple[str, str]]

# Id and meaning of each.
IDS: dict[str, str] = {
    "driver-runfile": "A driver from a .run file is installed, and packages are to be.",
    "driver-packages-present": "Packages of the driver are installed, and a .run file is to be.",
    "driver-gpu-operator": "The GPU operator's driver container gives the node its driver.",
    "driver-rpmfusion": "RPM Fusion's driver is installed, which NVIDIA's packages exclude.",
    "driver-elrepo": "ELRepo's driver is installed, which NVIDIA's packages exclude.",
    "driver-negativo17": "negativo17's driver is installed, whose packages have the names of NVIDIA's.",
    "driver-graphics-ppa": "The graphics-drivers PPA is a package source, whose packages have the names of Ubuntu's.",
    "driver-debian-legacy": "A driver from Debian's legacy or tesla packages is installed, which has the same files.",
    "driver-other-source": "The driver that is installed is from another source than asked for, and the two don't mix.",
    "driver-old-key": "NVIDIA's repository is set up with its retired key 7fa2af80.",
    "driver-other-release": "NVIDIA's repository for another release of the distribution is among the package sources.",
    "driver-source-twice": "NVIDIA's repository is among the package sources already, with another key entry.",
    "driver-dkms-old": "The dkms that is installed is held, and older than the driver's build needs.",
}

OLD_KEY = "7fa2af80"
# From this version on the build needs a newer dkms than Debian 12 has.
DKMS_SINCE, DKMS_NEEDED = (570, 148, 8), (3, 1, 8)
CUDA_FOLDER = re.compile(r"/compute/cuda/repos/([a-z]+[0-9]+)/")
# RPM tells the vendor: who brought what is there, as ``driver.others`` calls it, and who of them goes with a source.
# Where the distribution has a driver of its own there, that is NVIDIA's packages around a module of the distribution.
VENDORS = {"nvidia": "NVIDIA's repository", "distribution": "the distribution"}
FITTING = {
    "repository": {"nvidia"},
    "packages": {"nvidia"},
    "distribution": {"distribution", "nvidia"},
}
# NVIDIA's packages for Debian and Ubuntu, made from theirs, name the same maintainers: there names and versions tell.
ARCHIVE_VERSION = re.compile(r"ubuntu0\.[0-9]{2}\.[0-9]{2}|~deb[0-9]+u|~bpo[0-9]+")
ARCHIVE_NAMES = ("nvidia-open-kernel-dkms", "*nvidia-*-server", "nvidia-*-server-open", "linux-modules-nvidia-*")
NVIDIA_NAMES = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-open", "nvidia-open-[0-9]*", "cuda-drivers*")


def conflicts(gpu_node: Json, options: Json) -> list[dict[str, str]]:
    """Everything that must go before the driver can be installed.

    :param options: ``state``, ``source``, ``version`` and, where it is known, ``repo_url`` of the wanted driver.
    :returns: dicts of ``id``, ``found`` (a clause that begins with "has") and ``do`` (what clears it).
    """
    if options.get("state", "present") != "present":
        return []
    node = _Node(gpu_node, options)
    found = []
    for id, look in _LOOKS.items():
        one = look(node)
        if one is not None:
            found.append({"id": id, "found": one[0], "do": one[1]})
    return found


class _Node:
    """An observation and what is wanted of it; what wasn't looked at is empty."""

    def __init__(self, seen: Json, options: Json) -> None:
        self.source = str(options.get("source") or "repository")
        self.version = str(options.get("version") or "")
        self.repo_url = str(options.get("repo_url") or "")
        self.packages: t.Mapping[str, Json] = seen.get("packages") or {}
        self.others = set((seen.get("driver") or {}).get("others") or [])
        distribution: Json = seen.get("distribution") or {}
        self.id = str(distribution.get("id") or "")
        self.release = str(distribution.get("version") or "")
        self.family = str(distribution.get("family") or "")
        apt: Json = seen.get("apt") or {}
        rpm: Json = seen.get("rpm") or {}
        self.apt_sources: t.Sequence[Json] = apt.get("sources") or []
        self.rpm_repositories: t.Sequence[Json] = rpm.get("repositories") or []
        self.keys = [*(apt.get("keys") or {}), *_words(rpm.get("keys")), *_words(rpm.get("imported"))]

    def named(self, *patterns: str) -> list[str]:
        return sorted(name for name in self.packages if any(fnmatch.fnmatchcase(name, one) for one in patterns))

    def of_origin(self, word: str, *patterns: str) -> list[str]:
        """Packages of these names whose maintainer or vendor has the word in its name."""
        return [name for name in self.named(*patterns) if word in str(self.packages[name].get("origin") or "").lower()]

    @property
    def remove(self) -> str:
        """The command that removes packages here."""
        return {"debian": "apt-get purge", "suse": "zypper remove"}.get(self.family, "dnf remove")


def _words(value: t.Any) -> list[str]:
    return [str(one) for one in value] if value else []


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


def _gpu_operator(node: _Node) -> Found:
    if "gpu-operator" not in node.others:
        return None
    return (
        "has its driver from the GPU operator (/run/nvidia/driver)",
        "set driver_state to external, or run 'kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge "
        '-p \'{"spec":{"driver":{"enabled":false}}}\'\' and reboot the node',
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
        str(one.get("file") or one.get("id"))
        for one in node.rpm_repositories
        if "negativo17" in f"{one.get('url')} {one.get('id')}" and one.get("enabled", True)
    ]
    if not names and not enabled and "negativo17" not in node.others:
        return None
    what = f"negativo17's {_some(names)}" if names else "negativo17's repository enabled"
    steps = [f"{node.remove} {' '.join(names)}"] if names else []
    steps += [f"rm {path}" for path in enabled if path.startswith("/")]
    return f"has {what}", f"run '{' && '.join(steps) or node.remove + ' dkms-nvidia nvidia-driver*'}'"


def _graphics_ppa(node: _Node) -> Found:
    listed = [str(one["file"]) for one in node.apt_sources if "graphics-drivers" in str(one.get("url"))]
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
        strange = sorted((node.others & set(VENDORS)) - FITTING.get(node.source, set(VENDORS)))
        # The container toolkit bears NVIDIA's name too, and may stay.
        names = [one for one in node.named("*nvidia*", "cuda-drivers*") if "container" not in one] if strange else []
        whose = " and ".join(VENDORS[one] for one in strange)
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
        versions = [one for one in driver if ARCHIVE_VERSION.search(str(node.packages[one].get("version")))]
        return sorted({*named, *versions})
    names = node.named(*NVIDIA_NAMES)
    if node.id == "ubuntu":
        # Ubuntu's packages for servers exclude the ones without that word, whoever made them.
        names += [one for one in node.named("nvidia-dkms-*", "libnvidia-compute*") if "-server" not in one]
    return sorted(set(names))


def _old_key(node: _Node) -> Found:
    keyring = node.packages.get("cuda-keyring")
    if keyring and _numbers(str(keyring.get("version"))) < (1, 1):
        return (
            f"has cuda-keyring {keyring.get('version')}, of NVIDIA's retired key {OLD_KEY}",
            "run 'apt-get purge cuda-keyring'",
        )
    named = [str(one["file"]) for one in node.apt_sources if OLD_KEY in str(one.get("signed_by")).lower()]
    if named:
        return f"has {named[0]}, which trusts NVIDIA's retired key {OLD_KEY}", f"run 'rm {named[0]}'"
    if any(OLD_KEY in key.lower() for key in node.keys):
        command = f"apt-key del {OLD_KEY}" if node.family == "debian" else f"rpm -e gpg-pubkey-{OLD_KEY}"
        return f"has NVIDIA's retired key {OLD_KEY}", f"run '{command}'"
    return None


def _repositories(node: _Node) -> list[tuple[str, str, Json]]:
    """NVIDIA's repositories among the lists that aren't ours: the folder, the file, the row."""
    rows = []
    for one in (*node.apt_sources, *(row for row in node.rpm_repositories if row.get("enabled", True))):
        found = CUDA_FOLDER.search(str(one.get("url")))
        if found and "/kubegpu-" not in str(one.get("file")):
            rows.append((found.group(1), str(one.get("file")), one))
    return rows


def _other_release(node: _Node) -> Found:
    if node.id not in ("debian", "ubuntu") or not node.release:
        return None
    own = node.id + node.release.replace(".", "")
    for folder, file, _row in _repositories(node):
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
    # A dkms that may be replaced is, by the one of NVIDIA's repository.
    if node.source == "repository" and not have.get("held"):
        return None
    needed = ".".join(map(str, DKMS_NEEDED))
    how = "run 'apt-mark unhold dkms'" if have.get("held") else f"install dkms {needed} or newer first"
    return f"has dkms {have.get('version')}, and driver {node.version} is built with {needed} or newer", how


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without epoch and revision."""
    return tuple(int(part) for part in re.findall(r"[0-9]+", version.split(":")[-1].split("-")[0]))


_LOOKS: dict[str, t.Callable[[_Node], Found]] = {
    "driver-runfile": _runfile,
    "driver-packages-present": _packages_present,
    "driver-gpu-operator": _gpu_operator,
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
