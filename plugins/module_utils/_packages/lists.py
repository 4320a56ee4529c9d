# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the node's own package lists which versions of the driver's packages and of its kernels' there are.

The lists are read as they lie on the node: nothing is downloaded.
"""

from __future__ import annotations

import re
import typing as t
from xml.etree import ElementTree

from .._host.system import Done, System
from .._host.types import Kernel, Package
from .names import DRIVER, followed, matches_any
from .types import PackageFacts, PackageLists

NO_DRIVER = ("*-debuginfo", "*-debugsource", "*-devel", "*-dev-*")
KERNELS = ("kernel*-devel", "kernel*-devel-matched")
HEADERS = ("linux-headers-*", "proxmox-headers-*", "proxmox-default-headers", "pve-headers*")
SECONDS = 60
APT_STAMPS = (
    "/var/lib/apt/periodic/update-success-stamp",
    "/var/lib/apt/lists",
    "/var/lib/apt/lists/partial",
)
RPM_CACHES = {"dnf": "/var/cache/dnf", "dnf5": "/var/cache/libdnf5", "zypper": "/var/cache/zypp/raw"}
# Parts of a repository's cache; a download that finds nothing new touches the second.
RPM_STAMPS = ("repodata", "repodata/repomd.xml")
# zypper's exit code where a search finds nothing.
NOTHING_FOUND = 104


def wanted(version: str, packages: t.Mapping[str, Package], kernel: Kernel, booted: t.Iterable[str]) -> bool:
    """Return whether something has to be installed: the lists take a second, which a run without changes hasn't.

    :param version: the driver's; empty where its packages aren't asked for.
    :param booted: the kernels that the driver's module is needed for.
    """
    if not version:
        return False
    held = re.compile(rf"(\d+:)?{re.escape(version)}([-_~+].*)?")
    there = any("nvidia" in name and held.fullmatch(package["version"]) for name, package in packages.items())
    modules = kernel["modules"]
    return not there or any(not modules[release]["nvidia"] for release in booted if release in modules)


def observe(system: System, facts: PackageFacts, kernels: t.Sequence[str]) -> PackageLists:
    """Return what the lists have of the driver, and of headers and compiled modules for these kernels.

    :param facts: with all installed packages.
    """
    if facts["apt"] is not None:
        flavours = [flavour for flavour, _headers in followed(facts["packages"]).values() if flavour]
        lists = _apt(system, [*kernels, *flavours])
        stamps: t.Sequence[str] = APT_STAMPS
    elif facts["rpm"] is not None:
        manager = facts["rpm"]["manager"]
        folder = RPM_CACHES[manager]
        cached = system.names(folder)
        stamps = [f"{folder}/{name}/{stamp}" for name in cached for stamp in RPM_STAMPS]
        if manager == "zypper":
            # It downloads what it has never downloaded.
            enabled = [repository["id"] for repository in facts["rpm"]["repositories"] if repository["enabled"]]
            lists = _zypper(system, [repository for repository in enabled if repository in cached], kernels)
        else:
            lists = _dnf(system, manager, kernels)
    else:
        return {"age_hours": None, "error": "there is no package manager that is known", "packages": {}}
    if lists["packages"]:
        lists["age_hours"] = _age(system, stamps)
    return lists


def _age(system: System, stamps: t.Sequence[str]) -> float | None:
    """Return the hours since the lists were last downloaded; None where that is unknown."""
    # Some of them are missing, which is an error of stat alone.
    times = system.run(["stat", "-L", "-c", "%Y", *stamps], timeout=10).out.split() if stamps else []
    now = system.run(["date", "+%s"], timeout=10).out.strip()
    numbers = [int(time) for time in times if time.isdigit()]
    if not numbers or not now.isdigit():
        return None
    return round(max(0, int(now) - max(numbers)) / 3600, 1)


class _Collected:
    """Versions by name, each with the repositories that have it."""

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, list[str]]] = {}

    def add(self, name: str, version: str, source: str) -> None:
        sources = self.packages.setdefault(name, {}).setdefault(version, [])
        if source not in sources:
            sources.append(source)

    def result(self, error: str = "") -> PackageLists:
        return {"age_hours": None, "error": error, "packages": self.packages}


def _failed(done: Done) -> PackageLists:
    # The first line has the cause; later ones have consequences.
    lines = (done.err or done.out).strip().splitlines()
    return _Collected().result(lines[0] if lines else f"exit status {done.rc}")


def _apt(system: System, endings: t.Sequence[str]) -> PackageLists:
    done = system.run(["apt-cache", "pkgnames"], SECONDS)
    if done.rc != 0:
        return _failed(done)
    names = [name for name in done.out.split() if _apt_name(name, endings)]
    if not names:
        return _Collected().result()
    done = system.run(["apt-cache", "madison", *sorted(names)], SECONDS)
    if done.rc != 0:
        return _failed(done)
    collected = _Collected()
    for line in done.out.splitlines():
        name, version, source = ([part.strip() for part in line.split("|", 2)] + ["", ""])[:3]
        # "URL suite/component architecture Packages"; the last word differs for packages in source form.
        if source.endswith(" Packages"):
            collected.add(name, version, source.split()[0])
    return collected.result()


def _apt_name(name: str, endings: t.Sequence[str]) -> bool:
    if name.startswith(("linux-", "proxmox-", "pve-")):
        # The metapackage of a flavour, and not what other kernels of it have.
        rests = [name[: -len(end) - 1] for end in endings if name.endswith(f"-{end}")]
        of_node = any(not re.search(r"[0-9][.][0-9]", rest) for rest in rests)
        return (of_node and matches_any(name, (*DRIVER, *HEADERS))) or name == "proxmox-default-headers"
    return matches_any(name, DRIVER)


def _dnf(system: System, manager: str, kernels: t.Sequence[str]) -> PackageLists:
    # Streams that aren't enabled hide their packages otherwise, and the role enables one.
    options = ("-q", "--disable-modular-filtering", "--qf", "%{name}\\t%{evr}\\t%{repoid}\\n")
    done = system.run([manager, "-C", "repoquery", *options, *_rpm_patterns()], SECONDS)
    if done.rc != 0:
        return _failed(done)
    collected = _Collected()
    for line in done.out.splitlines():
        name, version, source = ([*line.split("\t"), "", ""])[:3]
        if version and _rpm_row(name, version, kernels):
            collected.add(name, version, source)
    return collected.result()


def _zypper(system: System, repositories: t.Sequence[str], kernels: t.Sequence[str]) -> PackageLists:
    if not repositories:
        return _Collected().result()
    only = [word for repository in repositories for word in ("--repo", repository)]
    options = ("--non-interactive", "--no-refresh", "--xmlout", "search", "--details", "--type", "package")
    done = system.run(["zypper", *options, *only, *_rpm_patterns()], SECONDS)
    if done.rc not in (0, NOTHING_FOUND):
        return _failed(done)
    collected = _Collected()
    try:
        rows = ElementTree.fromstring(done.out).iter("solvable")
        for row in rows:
            name, version, source = (str(row.get(key) or "") for key in ("name", "edition", "repository"))
            # What is installed and in no repository has none of its own.
            if source and not source.startswith("(") and _rpm_row(name, version, kernels):
                collected.add(name, version, source)
    except ElementTree.ParseError:
        return _failed(Done(1, "", "zypper's answer isn't XML"))
    return collected.result()


def _rpm_patterns() -> list[str]:
    return [pattern for pattern in (*DRIVER, *KERNELS) if not pattern.startswith("linux-")]


def _rpm_row(name: str, version: str, kernels: t.Sequence[str]) -> bool:
    if matches_any(name, KERNELS):
        # Packages of the node's own kernels only.
        bases = (re.match(r"[0-9.]+-[0-9.]*[0-9]", kernel) for kernel in kernels)
        return any(base is not None and base.group() in version for base in bases)
    return not matches_any(name, NO_DRIVER)
